"""A GPT written by hand: dropout, tied embeddings, two groups of weights, summed micro-batches."""

from __future__ import annotations

import torch
from shared import MAX_NORM, Program, Shape
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.utils import clip_grad_norm_

SHAPES = {
    "tiny": Shape(16, 64, layers=3, heads=2, vocabulary=64, batch=2, tokens=8),
    "small": Shape(384, 1536, layers=6, heads=6, vocabulary=8192, batch=8, tokens=256),
    "large": Shape(768, 3072, layers=12, heads=12, vocabulary=50_304, batch=8, tokens=1024),
}
MICRO_BATCHES = 4
DROPOUT = 0.1

program = Program(shapes=SHAPES)
shape = program.shape


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(shape.hidden, 3 * shape.hidden)
        self.output = nn.Linear(shape.hidden, shape.hidden)
        self.drop = nn.Dropout(DROPOUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.inputs(x).unflatten(-1, (3, shape.heads, -1)).permute(2, 0, 3, 1, 4)
        dropped = DROPOUT if self.training else 0.0
        y = scaled_dot_product_attention(q, k, v, dropout_p=dropped, is_causal=True)
        return self.drop(self.output(y.transpose(1, 2).flatten(2)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(shape.hidden) for _ in range(2))
        self.attention = Attention()
        self.perceptron = nn.Sequential(
            nn.Linear(shape.hidden, shape.intermediate),
            nn.GELU(),
            nn.Linear(shape.intermediate, shape.hidden),
            nn.Dropout(DROPOUT),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.perceptron(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.vocabulary, shape.hidden)
        self.places = nn.Embedding(shape.tokens, shape.hidden)
        self.drop = nn.Dropout(DROPOUT)
        self.blocks = nn.ModuleList(Block() for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        self.words.weight = self.head.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.words(tokens) + self.places(places))
        for block in self.blocks:
            x = program.block(block, x)
        return cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


model = GPT().to(program.device)
groups = [
    {"params": [it for it in model.parameters() if it.ndim > 1], "weight_decay": 0.1},
    {"params": [it for it in model.parameters() if it.ndim < 2], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, 6e-4, betas=(0.9, 0.95), fused=True)
for step in range(program.steps):
    for group in optimizer.param_groups:
        group["lr"] = 6e-4 * min(1.0, (step + 1) / 10)
    for _ in range(MICRO_BATCHES):
        text = program.numbers(shape.vocabulary, shape.batch, shape.tokens + 1)
        with torch.autocast(program.device.type, torch.bfloat16):
            loss = model(text[:, :-1], text[:, 1:]) / MICRO_BATCHES
        loss.backward()
    clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    program.end_step(loss)
program.write(model)
