"""Trainings that share one card with many others compute what stock does.

The card's streams are served by turns then, so that a copy or an update that does not wait for all
that it needs comes too early, which it seldom does on a card of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.gpu.conftest import Job

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

PROCESSES = 22
STEPS = 4
# Together they stay below the limit for managed memory of one machine.
VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "UMEM_MANAGED_LIMIT": "512MiB"}


def test_values_are_stocks_beside_many_other_trainings(start: Callable[..., Job]) -> None:
    programs = {"UMEM_POLICY": "sft", "UMEM_DEVICE_BUDGET": "1400MiB"}
    stock = [start("streaming.py", "plain", str(STEPS), **VARIABLES) for _ in range(2)]
    streamed = [
        start("streaming.py", "plain", str(STEPS), **programs, **VARIABLES)
        for _ in range(PROCESSES)
    ]
    expected, again = (job.facts() for job in stock)
    names = ("losses", "weights", "state")
    assert all(again[name] == expected[name] for name in names)
    wrong = {
        number: [name for name in names if facts[name] != expected[name]]
        for number, job in enumerate(streamed)
        if any((facts := job.facts())[name] != expected[name] for name in names)
    }
    assert wrong == {}
