"""Sentence embeddings by triplets: each loss calls the encoder three times."""

from __future__ import annotations

import torch
from shared import LEARNING_RATE, MAX_NORM, Program, Shape
from torch import nn
from torch.nn.functional import normalize, triplet_margin_loss
from torch.nn.utils import clip_grad_norm_

SHAPES = {
    "tiny": Shape(16, 32, layers=3, heads=2, vocabulary=64, batch=3, tokens=8),
    "small": Shape(256, 1024, layers=6, heads=4, vocabulary=8192, batch=32, tokens=128),
    "large": Shape(768, 3072, layers=12, heads=12, vocabulary=30_522, batch=16, tokens=128),
}

program = Program(shapes=SHAPES)
shape = program.shape


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                shape.hidden, shape.heads, shape.intermediate, batch_first=True
            )
            for _ in range(shape.layers)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = program.block(layer, x)
        return normalize(x.mean(1))


model = Encoder().to(program.device)
optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
for _ in range(program.steps):
    anchor, other = (program.numbers(shape.vocabulary, shape.batch, shape.tokens) for _ in range(2))
    near = torch.where(program.noise(*anchor.shape) < 0.5, anchor, other)
    loss = triplet_margin_loss(*map(model, (anchor, near, other)))
    optimizer.zero_grad()
    loss.backward()
    clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    program.end_step(loss)
program.write(model)
