"""Image classification by a vision transformer, in float32 or under autocast."""

from __future__ import annotations

import argparse

import torch
from shared import MAX_NORM, Program
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

# Width, blocks, heads, images, pixels of a side, pixels of a patch's side.
SHAPES = {
    "tiny": (16, 3, 2, 4, 16, 4),
    "small": (192, 8, 3, 64, 128, 8),
    "large": (768, 12, 12, 64, 224, 16),
}
CLASSES = 100

own = argparse.ArgumentParser(add_help=False)
own.add_argument("--autocast", action="store_true", help="compute in bfloat16")
program = Program(own=own, shapes=SHAPES)
width, depth, heads, images, pixels, patch = program.shape


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.perceptron(self.norms[1](x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, 1 + (pixels // patch) ** 2, width))
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).mT
        x = torch.cat([self.token.expand(len(x), 1, width), x], 1) + self.places
        for block in self.blocks:
            x = program.block(block, x)
        return self.head(self.norm(x[:, 0]))


model = Net().to(program.device)
optimizer = torch.optim.AdamW(model.parameters(), 3e-4, weight_decay=0.05)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, program.steps)
for _ in range(program.steps):
    image = program.noise(images, 3, pixels, pixels)
    with torch.autocast(program.device.type, torch.bfloat16, enabled=program.options.autocast):
        loss = cross_entropy(model(image), program.numbers(CLASSES, images))
    optimizer.zero_grad()
    loss.backward()
    clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    schedule.step()
    program.end_step(loss)
program.write(model)
