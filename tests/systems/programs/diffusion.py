"""Diffusion by a U-Net with skips, and an average of its weights behind each step."""

from __future__ import annotations

import copy

import torch
from shared import LEARNING_RATE, MAX_NORM, Program
from torch import nn
from torch.nn.functional import interpolate, mse_loss
from torch.nn.utils import clip_grad_norm_

# Channels of each level, images, pixels of a side.
SHAPES = {
    "tiny": ((8, 16), 2, 8),
    "small": ((32, 64, 128), 96, 64),
    "large": ((128, 128, 256, 256, 512), 32, 128),
}
TIMES, DECAY = 1000, 0.999

program = Program(shapes=SHAPES)
levels, images, pixels = program.shape


class Block(nn.Module):
    """Two convolutions, with the time between them."""

    def __init__(self, inputs: int, channels: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(4, it) for it in (inputs, channels))
        self.first = nn.Conv2d(inputs, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.time = nn.Linear(levels[0], channels)
        self.skip = nn.Conv2d(inputs, channels, 1)
        self.act = nn.SiLU()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        y = self.first(self.act(self.norms[0](x))) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.second(self.act(self.norms[1](y)))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Embedding(TIMES, levels[0])
        self.stem = nn.Conv2d(3, levels[0], 3, padding=1)
        self.down, self.smaller = nn.ModuleList(), nn.ModuleList()
        self.up, self.larger = nn.ModuleList(), nn.ModuleList()
        for inputs, channels in zip((levels[0], *levels), levels, strict=False):
            self.down.append(Block(inputs, channels))
            self.smaller.append(nn.Conv2d(channels, channels, 3, 2, 1))
            self.up.insert(0, Block(2 * channels, inputs))
            self.larger.insert(0, nn.Conv2d(channels, channels, 3, padding=1))
        self.middle = nn.ModuleList(Block(levels[-1], levels[-1]) for _ in range(2))
        self.attention = nn.MultiheadAttention(levels[-1], 4, batch_first=True)
        self.head = nn.Conv2d(levels[0], 3, 3, padding=1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        time, x, skips = self.time(time), self.stem(x), []
        for block, smaller in zip(self.down, self.smaller, strict=True):
            skips.append(program.block(block, x, time))
            x = smaller(skips[-1])
        x = program.block(self.middle[0], x, time)
        flat = x.flatten(2).mT
        x = x + self.attention(flat, flat, flat, need_weights=False)[0].mT.reshape(x.shape)
        x = program.block(self.middle[1], x, time)
        for block, larger in zip(self.up, self.larger, strict=True):
            x = larger(interpolate(x, scale_factor=2.0))
            x = program.block(block, torch.cat([x, skips.pop()], 1), time)
        return self.head(x)


model = UNet().to(program.device)
average = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
kept = torch.linspace(0.9999, 0.98, TIMES).cumprod(0).to(program.device)
for _ in range(program.steps):
    image, noise = (program.noise(images, 3, pixels, pixels) for _ in range(2))
    time = program.numbers(TIMES, images)
    share = kept[time].view(-1, 1, 1, 1)
    loss = mse_loss(model(share.sqrt() * image + (1 - share).sqrt() * noise, time), noise)
    loss.backward()
    clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(weight, 1 - DECAY)
    program.end_step(loss)
program.write(nn.ModuleList([model, average]))
