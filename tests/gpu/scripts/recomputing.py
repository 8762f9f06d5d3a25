"""A language model written by hand, stock or within a budget: ``recomputing.py MODE [STEPS]``.

Its modes: ``dropout``, ``accumulated``, ``float32``, ``recurrent`` with layers of cuDNN that drop,
``modules`` where functions are modules, and ``checkpoints`` of its own.

The last line is JSON: what its steps were, how long they took, and what the plan did.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import umem
from umem.streaming import streamed_trainings
from umem.streaming.tune.planning import Planning

LAYERS, WIDTH, HEADS, TOKENS, ROWS, WORDS = 12, 1024, 16, 1024, 8, 16384


class Block(nn.Module):
    def __init__(self, dropout: float, act: Any = nn.functional.gelu) -> None:
        super().__init__()
        self.act = act
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, _ = x.shape
        qkv = self.qkv(self.norm_1(x)).view(rows, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        dropout = self.dropout if self.training else 0.0
        y = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        y = self.project(y.transpose(1, 2).reshape(rows, tokens, WIDTH))
        x = x + nn.functional.dropout(y, self.dropout, self.training)
        y = self.down(self.act(self.up(self.norm_2(x))))
        return x + nn.functional.dropout(y, self.dropout, self.training)


class Model(nn.Module):
    def __init__(
        self, dropout: float, *, checkpoints: bool, cells: bool, has_modules: bool
    ) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.cells = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.1) if cells else None
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(
            Block(dropout, nn.GELU() if has_modules else nn.functional.gelu) for _ in range(LAYERS)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words) + self.places.weight[: words.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        if self.cells is not None:
            x = x + self.cells(x)[0]
        return self.head(self.norm(x))


def plan_for_a_slow_link() -> None:
    """Have copies take so long in plans that blocks run twice, whatever else the machine does."""
    begin = Planning.__init__

    def slowed(self: Any, tuned: Any, steps: Any, hardware: Any, *others: Any) -> None:
        names = ("copy_to_host", "copy_to_device", "copy_link")
        rates = {f"{it}_bytes_per_s": 1e9 for it in names}
        begin(self, tuned, steps, replace(hardware, **rates), *others)

    Planning.__init__ = slowed  # type: ignore[method-assign,assignment]


def main(mode: str, steps: int) -> dict[str, Any]:
    torch.use_deterministic_algorithms(True)
    # What is not set is another one each time, as in most programs.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.manual_seed(0)
    dropout = 0.1 if mode in ("dropout", "recurrent", "checkpoints") else 0.0
    model = Model(
        dropout,
        checkpoints=mode == "checkpoints",
        cells=mode == "recurrent",
        has_modules=mode == "modules",
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    batches, rows = (2, ROWS // 2) if mode == "accumulated" else (1, ROWS)
    if mode == "float32":
        batches, rows = 1, ROWS // 2
    numbers = torch.Generator().manual_seed(1)
    losses, seconds = [], []
    for _ in range(steps):
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        for _ in range(batches):
            words = torch.randint(WORDS, (rows, TOKENS + 1), generator=numbers).cuda()
            with torch.autocast("cuda", torch.bfloat16, enabled=mode != "float32"):
                logits = model(words[:, :-1])
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), words[:, 1:].flatten())
            loss.backward()
        losses.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began_s)
    trainings = streamed_trainings() if "UMEM_DEVICE_BUDGET" in os.environ else ()
    tuning = [training.status().tuning for training in trainings]
    return {
        "losses": [float(loss).hex() for loss in losses],
        "weights": [float(it.detach().double().sum()).hex() for it in model.parameters()],
        "random": float(torch.rand(1, device="cuda")).hex(),
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "step_ms": 1e3 * statistics.median(seconds[-8:]),
        "tuning": [
            {
                "recomputed": it.recomputed_blocks,
                "left_out": it.left_out_checkpoints,
                "remakes": it.remakes_results,
                "slices": it.slices_losses,
                "overflow": it.overflow_bytes,
                "copied": it.copied_blocks,
                "predicted_ms": 1e3 * (it.predicted_s or 0.0),
                "late": it.activations.late_fetches,
                "plans": it.plans,
            }
            for it in tuning
            if it is not None
        ],
    }


if __name__ == "__main__":
    if "UMEM_DEVICE_BUDGET" in os.environ:
        umem.enable(os.environ.get("UMEM_POLICY", "sft"))
        if os.environ.get("SLOW_LINK"):
            plan_for_a_slow_link()
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 24)))
