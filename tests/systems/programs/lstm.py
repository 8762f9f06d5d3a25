"""A language model of LSTMs, whose state goes on from batch to batch; with or without optimizer."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from shared import Program
from torch import nn
from torch.nn.functional import log_softmax, nll_loss
from torch.nn.utils import clip_grad_norm_

# Width, layers, words, texts, words of a text.
SHAPES = {
    "tiny": (16, 2, 64, 4, 6),
    "small": (1024, 3, 4096, 256, 64),
    "large": (1536, 2, 33_278, 128, 64),
}
RATE = 5.0
"""At which weights change by hand."""

own = argparse.ArgumentParser(add_help=False)
own.add_argument("--by-hand", action="store_true", help="change weights without an optimizer")
program = Program(own=own, shapes=SHAPES)
width, layers, words, texts, length = program.shape


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.encoder = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, layers, dropout=0.2)
        self.decoder = nn.Linear(width, words)

    def forward(self, x: torch.Tensor, state: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x, state = self.lstm(self.drop(self.encoder(x)), state)
        return log_softmax(self.decoder(self.drop(x)), -1), *state


model: Any = Model().to(program.device)
optimizer = torch.optim.Adagrad(model.parameters(), 0.05)
state = list(torch.zeros(2, layers, texts, width, device=program.device))
for _ in range(program.steps):
    text = program.numbers(words, length + 1, texts)
    found, *state = model(text[:-1], tuple(it.detach() for it in state))
    loss = nll_loss(found.flatten(0, 1), text[1:].flatten())
    model.zero_grad()
    loss.backward()
    clip_grad_norm_(model.parameters(), 0.25)
    if program.options.by_hand:
        for weight in model.parameters():
            weight.data.add_(weight.grad, alpha=-RATE)
    else:
        optimizer.step()
    program.end_step(loss)
program.write(model)
