"""Segmentation of volumes by a U-Net of three dimensions."""

from __future__ import annotations

import torch
from shared import Program
from torch import nn
from torch.nn.functional import cross_entropy

# Channels of each level, volumes, voxels of a side.
SHAPES = {
    "tiny": ((4, 8), 2, 8),
    "small": ((16, 32, 64, 128), 6, 80),
    "large": ((32, 64, 128, 256), 2, 112),
}
CLASSES = 4

program = Program(shapes=SHAPES)
levels, volumes, voxels = program.shape


def block(inputs: int, channels: int) -> nn.Module:
    """Two convolutions with norms."""
    layers = (
        (
            nn.Conv3d(before, channels, 3, padding=1, bias=False),
            nn.InstanceNorm3d(channels, affine=True),
            nn.LeakyReLU(0.01, inplace=True),
        )
        for before in (inputs, channels)
    )
    return nn.Sequential(*(layer for each in layers for layer in each))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.smaller = nn.ModuleList(), nn.ModuleList()
        self.up, self.larger = nn.ModuleList(), nn.ModuleList()
        for inputs, channels in zip((1, *levels), levels, strict=False):
            self.down.append(block(inputs, channels))
            self.smaller.append(nn.Conv3d(channels, channels, 2, 2))
            self.larger.insert(0, nn.ConvTranspose3d(2 * channels, channels, 2, 2))
            self.up.insert(0, block(2 * channels, channels))
        self.middle = block(levels[-1], 2 * levels[-1])
        self.head = nn.Conv3d(levels[0], CLASSES, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for each, smaller in zip(self.down, self.smaller, strict=True):
            skips.append(program.block(each, x))
            x = smaller(skips[-1])
        x = program.block(self.middle, x)
        for larger, each in zip(self.larger, self.up, strict=True):
            x = program.block(each, torch.cat([larger(x), skips.pop()], 1))
        return self.head(x)


def dice_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """How little each class and its labels overlap."""
    found = logits.softmax(1).movedim(1, -1).flatten(1, -2)
    known = nn.functional.one_hot(labels, CLASSES).flatten(1, -2)
    return 1 - (2 * (found * known).sum(1) / (found + known).sum(1)).mean()


model = UNet().to(program.device)
optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.99, nesterov=True)
for _ in range(program.steps):
    labels = program.numbers(CLASSES, *[volumes, *[voxels] * 3])
    logits = model(program.noise(volumes, 1, *[voxels] * 3))
    loss = dice_loss(logits, labels)
    loss = loss + cross_entropy(logits.movedim(1, -1).flatten(0, -2), labels.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    program.end_step(loss)
program.write(model)
