"""A generator and a discriminator of images, with an optimizer each, trained in turn."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from shared import Program
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

# Channels from the largest image to the smallest, images, pixels of a side.
SHAPES = {
    "tiny": ((4, 8, 8), 4, 16),
    "small": ((32, 64, 128), 1536, 64),
    "large": ((64, 128, 256, 512), 512, 128),
}
LATENT = 64

program = Program(shapes=SHAPES)
levels, images, pixels = program.shape
first = pixels >> len(levels)


def stage(conv: Callable[..., nn.Module], act: nn.Module, ins: int, outs: int) -> nn.Module:
    """A convolution that halves or doubles the image, a norm and an activation."""
    return nn.Sequential(conv(ins, outs, 4, 2, 1, bias=False), nn.BatchNorm2d(outs), act)


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(LATENT, levels[-1] * first**2)
        make = partial(stage, nn.ConvTranspose2d, nn.ReLU(inplace=True))
        self.stages = nn.ModuleList(make(*it) for it in pairwise(reversed(levels)))
        self.head = nn.ConvTranspose2d(levels[0], 3, 4, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).view(-1, levels[-1], first, first)
        for each in self.stages:
            x = program.block(each, x)
        return self.head(x).tanh()


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        make = partial(stage, nn.Conv2d, nn.LeakyReLU(0.2, inplace=True))
        self.stages = nn.ModuleList(make(*it) for it in pairwise((3, *levels)))
        self.head = nn.Linear(levels[-1] * first**2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in self.stages:
            x = program.block(each, x)
        return self.head(x.flatten(1)).squeeze(1)


def loss_of(logits: torch.Tensor, label: float) -> torch.Tensor:
    return binary_cross_entropy_with_logits(logits, torch.full_like(logits, label))


models = nn.ModuleList([Generator(), Discriminator()]).to(program.device)
generator, discriminator = models
makes, judges = (torch.optim.Adam(it.parameters(), 2e-4, betas=(0.5, 0.999)) for it in models)
for _ in range(program.steps):
    discriminator.zero_grad()
    real_loss = loss_of(discriminator(program.noise(images, 3, pixels, pixels)), 1.0)
    real_loss.backward()
    made = generator(program.noise(images, LATENT))
    made_loss = loss_of(discriminator(made.detach()), 0.0)
    made_loss.backward()
    judges.step()
    generator.zero_grad()
    loss = loss_of(discriminator(made), 1.0)
    loss.backward()
    makes.step()
    program.end_step(loss + real_loss + made_loss)
program.write(models)
