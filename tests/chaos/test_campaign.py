"""The campaign of faults, one attempt of each kind: see campaign.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import IO

import pytest
import torch
from campaign import ROWS, Row, try_for
from ended_processes import Processes
from hypothesis import given, settings
from hypothesis import strategies as st
from random_training import Pair
from soak import soak

IN_PROCESS = [row for row in ROWS if "SIG" not in row.name and "killed" not in row.name]


@pytest.mark.slow
def test_a_process_may_end_at_any_time() -> None:
    with contextlib.closing(Processes()) as processes:
        for attempt in ("kill_a_training", "end_a_training", "end_a_command"):
            getattr(processes, attempt)(0)


@pytest.mark.gpu
def test_a_process_on_a_gpu_may_end_at_any_time() -> None:
    with contextlib.closing(Processes(is_gpu=True)) as processes:
        processes.kill_a_training(0)
        for seed in range(2):
            processes.end_a_training(seed)


@pytest.mark.slow
@pytest.mark.parametrize("row", IN_PROCESS, ids=lambda row: row.name)
def test_training_goes_on(row: Row) -> None:
    tally = try_for(row, minutes=0)
    assert tally.wrong == []
    assert tally.tried


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(st.integers(0, 1 << 32))
def test_every_use_sees_the_last_update(seed: int) -> None:
    """Whatever a program does, and however late lanes run."""
    pair = Pair(seed)
    pair.train(12)
    pair.check()


# ------------------------------------------------------------------ a fault is found


def test_a_changed_bit_is_found() -> None:
    pair = Pair(0)
    pair.train(1)
    with torch.no_grad():
        pair.streamed.model.head.bias.view(torch.int32)[0] ^= 1
    with pytest.raises(AssertionError):
        pair.check()


def test_what_is_wrong_is_told_with_its_seed() -> None:
    @contextlib.contextmanager
    def make(_minutes: float) -> Iterator[object]:
        def attempt(seed: int) -> tuple[int, int]:
            raise ValueError(seed)

        yield attempt

    tally = try_for(Row("fails", 1.0, make), minutes=0, seed=7)  # type: ignore[arg-type]
    (wrong,) = tally.wrong
    assert "seed 7" in wrong
    assert tally.tried == 1


def test_a_row_is_tried_as_often_as_it_asks() -> None:
    @contextlib.contextmanager
    def make(_minutes: float) -> Iterator[object]:
        yield lambda _seed: (3, 0)

    row = Row("in no time", 0.0, make, least=200)  # type: ignore[arg-type]
    assert [try_for(row, minutes).tried for minutes in (0, 2, 20)] == [3, 21, 201]


@pytest.mark.slow
def test_what_grows_is_found() -> None:
    files: list[IO[bytes]] = []
    with pytest.raises(AssertionError, match="descriptors"):
        soak(lambda: files.append(open("/dev/null", "rb")), dict, 48)  # noqa: SIM115
    for file in files:
        file.close()
