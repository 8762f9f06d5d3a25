"""A small language model whose training step umem records, without memory and without a GPU.

    python examples/trace_my_model.py

`make_step` makes the model and returns the step. `script_trace` needs nothing else:

    umem.capture.offline.script_trace("examples/trace_my_model.py:make_step")

Run as a script, it trains the same step on the CPU and prints the loss.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

__all__ = ["Block", "LanguageModel", "main", "make_step"]

VOCABULARY = 256
WIDTH = 256
LAYERS = 4
HEADS = 4
BATCH = 8
SEQ = 128


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)
        self.feed_forward_norm = nn.LayerNorm(WIDTH)
        self.feed_forward = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map (batch, seq, width) to the same shape."""
        batch, seq, _ = hidden.shape
        projected = self.query_key_value(self.attention_norm(hidden))
        query, key, value = (
            part.view(batch, seq, HEADS, -1).transpose(1, 2)
            for part in projected.split(WIDTH, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.output(mixed.transpose(1, 2).reshape(batch, seq, WIDTH))
        added: torch.Tensor = hidden + self.feed_forward(self.feed_forward_norm(hidden))
        return added


class LanguageModel(nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(SEQ, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map (batch, seq) token numbers to (batch, seq, vocabulary) logits."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.embedding(tokens) + self.position(positions)
        logits: torch.Tensor = self.head(self.norm(self.blocks(hidden)))
        return logits


def make_step() -> Callable[[], torch.Tensor]:
    """Make model, optimizer and data; return the function that runs one training step."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = LanguageModel().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    tokens = torch.randint(VOCABULARY, (BATCH, SEQ + 1), device=device)

    def step() -> torch.Tensor:
        logits = model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()  # not .item(): a recorded step has no data

    return step


def main(steps: int = 5) -> None:
    """Train on random bytes, which the model can learn by heart."""
    torch.manual_seed(0)
    step = make_step()
    for number in range(1, steps + 1):
        print(f"step {number}/{steps}  loss {step().item():.3f}")


if __name__ == "__main__":
    main()
