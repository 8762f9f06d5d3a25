"""Managing without a call."""

from __future__ import annotations

import subprocess
import sys

from torch import nn, optim

from umem.automatic import _model_of

SCRIPT = """
import sys
import torch
from umem.automatic import manage_automatically

model = torch.nn.Linear(4, 4)
manage_automatically(lambda: [model])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
before = "umem.executor" in sys.modules
for _ in range(2):
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
print(before, "umem.executor" in sys.modules)
"""


def test_the_executor_is_loaded_for_a_training_and_its_refusal_stops_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == ["False", "True"]


def test_the_model_is_what_holds_most_of_what_is_trained() -> None:
    small, large = nn.Linear(2, 2), nn.Linear(64, 64)
    optimizer = optim.SGD([*small.parameters(), *large.parameters()], lr=0.1)
    assert _model_of(optimizer, [small, large]) is large
    assert _model_of(optimizer, [nn.Linear(2, 2)]) is None
    assert _model_of(optimizer, []) is None
