"""Classification of a graph's nodes by two layers that sum what neighbours send."""

from __future__ import annotations

import torch
from shared import Program
from torch import nn
from torch.nn.functional import cross_entropy, dropout

# Features, width, nodes, edges.
SHAPES = {
    "tiny": (8, 16, 40, 200),
    "small": (128, 128, 50_000, 500_000),
    "large": (128, 256, 200_000, 2_000_000),
}
CLASSES = 40

program = Program(shapes=SHAPES)
features, width, nodes, edges = program.shape


class Layer(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=False)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        sent = x.index_select(0, source) * share[:, None]
        return torch.zeros_like(x).index_add(0, target, sent) + self.bias


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(features, width), Layer(width, CLASSES)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = dropout(program.block(self.layers[0], x).relu(), training=self.training)
        return program.block(self.layers[1], x)


source, target = program.numbers(nodes, 2, edges)
degrees = torch.bincount(target, minlength=nodes).clamp(min=1).rsqrt()
share = degrees[source] * degrees[target]
known, labels = program.noise(nodes, features), program.numbers(CLASSES, nodes)
model = Net().to(program.device)
optimizer = torch.optim.Adam(model.parameters(), 0.01, weight_decay=5e-4)
for _ in range(program.steps):
    optimizer.zero_grad()
    loss = cross_entropy(model(known), labels)
    loss.backward()
    optimizer.step()
    program.end_step(loss)
program.write(model)
