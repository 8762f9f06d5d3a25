"""Classification of texts by a recurrent net whose cell, of operators, is called for each word."""

from __future__ import annotations

import torch
from shared import Program
from torch import nn
from torch.nn.functional import cross_entropy

# Width, words, texts, words of a text.
SHAPES = {"tiny": (16, 64, 4, 12), "small": (1024, 4096, 512, 64), "large": (2048, 4096, 512, 128)}
CLASSES = 40

program = Program(shapes=SHAPES)
width, words, texts, length = program.shape


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Linear(2 * width, 4 * width)

    def forward(
        self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        i, f, o, g = self.gates(torch.cat((x, h), 1)).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(words, width)
        self.cell = Cell()
        self.decoder = nn.Linear(width, CLASSES)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        h = c = torch.zeros(texts, width, device=text.device)
        for x in self.encoder(text):
            h, c = program.block(self.cell, x, h, c)
        return self.decoder(h)


model = Net().to(program.device)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
for _ in range(program.steps):
    text, labels = program.numbers(words, length, texts), program.numbers(CLASSES, texts)
    optimizer.zero_grad()
    loss = cross_entropy(model(text), labels)
    loss.backward()
    optimizer.step()
    program.end_step(loss)
program.write(model)
