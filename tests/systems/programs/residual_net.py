"""Image classification by a residual net: BatchNorm, SGD, channels last."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from shared import Program
from torch import nn
from torch.nn.functional import cross_entropy

# Width of the first stage, blocks of each stage, images, pixels of a side.
SHAPES = {
    "tiny": (4, (2, 2), 4, 16),
    "small": (32, (3, 4, 6, 3), 96, 160),
    "large": (64, (3, 4, 23, 3), 48, 224),
}
CLASSES = 100

own = argparse.ArgumentParser(add_help=False)
own.add_argument("--search", action="store_true", help="let cuDNN search for the fastest algorithm")
program = Program(own=own, shapes=SHAPES)
width, depths, images, pixels = program.shape
torch.backends.cudnn.benchmark = program.options.search


class Block(nn.Module):
    """A bottleneck."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = inputs
        for channels, kernel, step in ((width, 1, 1), (width, 3, stride), (4 * width, 1, 1)):
            conv = nn.Conv2d(before, channels, kernel, step, kernel // 2, bias=False)
            layers += [conv, nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
            before = channels
        self.body = nn.Sequential(*layers[:-1])
        self.skip = nn.Conv2d(inputs, 4 * width, 1, stride) if inputs != 4 * width else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.body(x) + (x if self.skip is None else self.skip(x))).relu_()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 7, 4, 3)
        self.blocks, inputs = nn.ModuleList(), width
        for stage, depth in enumerate(depths):
            for number in range(depth):
                stride = 2 if stage and not number else 1
                self.blocks.append(Block(inputs, width << stage, stride))
                inputs = 4 * width << stage
        self.head = nn.Linear(inputs, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).relu()
        for block in self.blocks:
            x = program.block(block, x)
        return self.head(x.mean((2, 3)))


model: Any = Net()
model = model.to(program.device, memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), 0.002, momentum=0.9, weight_decay=1e-4)
for _ in range(program.steps):
    image = program.noise(images, 3, pixels, pixels).to(memory_format=torch.channels_last)
    loss = cross_entropy(model(image), program.numbers(CLASSES, images))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    program.end_step(loss)
program.write(model)
