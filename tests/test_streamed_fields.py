"""Programs of other fields have stock's losses and weights to the last bit, on late lanes.

They are those of the matrix of tests/systems, not edited: each runs in this process as it is, and
with its trainings found at their optimizers' first steps, as ``umem.enable`` finds them on a GPU.
"""

from __future__ import annotations

import functools
import json
import logging
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from found_trainings import Streams, streaming
from matrix import FIELDS, PROGRAMS, is_installed

pytestmark = pytest.mark.slow

STEPS = 5

WITHOUT_OPTIMIZER = ("lstm_by_hand",)
"""Trainings that are not found: nothing tells when they have changed their weights."""

SEARCHES = "residual_net_search"
"""On the CPU the same as without the search."""

FEW_WEIGHTS = ("lstm", "cells", "graph_net", "gan")
"""Two slots are no smaller than all of them: they stay where they are."""

WITH_CHEAP_MODULES = ("residual_net", "diffusion", "gan", "volumes", "translation")

WAYS: dict[str, Callable[[], Streams]] = {
    "all leaves": lambda: Streams(-(10**6), eagerness=0.0),
    "blocks run twice": lambda: Streams(eagerness=0.0, recomputes=True),
    "results are made again": lambda: Streams(eagerness=0.0, remakes=True),
    "weights are streamed": lambda: Streams(eagerness=0.0, streams_weights=True),
}


@pytest.fixture(autouse=True)
def torch_is_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Programs set up torch and the log as if they had the process to themselves."""
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.backends.cudnn.benchmark = False


def run(name: str, streams: Streams | None) -> dict[str, Any]:
    """Losses, and a checksum of the last weights and buffers."""
    system = FIELDS[name]
    if lacking := [it for it in system.packages if not is_installed(it)]:
        pytest.skip(f"it lacks {', '.join(lacking)}")
    program = str(PROGRAMS / f"{system.program or name}.py")
    words = ("--size", "tiny", "--steps", str(STEPS), "--deterministic", *system.options)
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        output = Path(folder, "output.json")
        patch.setattr(sys, "argv", [program, *words, "--output", str(output)])
        with streaming(streams, patch):
            runpy.run_path(program)
        found = json.loads(output.read_text())
    return {it: found[it] for it in ("losses", "weights")}


ONE_BLOCK_SAVES_LITTLE = "graph_net"
"""Too few tensors to cut it, and most of all bytes."""


@functools.cache
def stock(name: str) -> dict[str, Any]:
    """What a stock run has: another loss in each step."""
    found = run(name, None)
    assert len(set(found["losses"])) == STEPS
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [it for it in FIELDS if it not in (*WITHOUT_OPTIMIZER, SEARCHES)])
def test_every_step_is_stocks(name: str, way: str) -> None:
    streams = WAYS[way]()
    assert run(name, streams) == stock(name)
    assert streams.status
    # A measured step is not deferred.
    assert all(it.counts.streamed >= STEPS - 2 for it in streams.status)
    if way == "all leaves":
        tuning = [it.tuning for it in streams.status]
        copied = all(it is not None and it.activations.tensors_out for it in tuning)
        assert copied == (name != ONE_BLOCK_SAVES_LITTLE)
    elif way == "blocks run twice":
        assert all(it.proofs for it in streams.activations)
    elif way == "results are made again":
        assert streams.made_again or name not in WITH_CHEAP_MODULES
    else:
        fetched = sum(it.status().counts.fetched for it in streams.weights.values())
        assert bool(fetched) == (name not in FEW_WEIGHTS)


@pytest.mark.parametrize("name", WITHOUT_OPTIMIZER)
def test_weights_that_a_program_changes_itself_are_its_own(name: str) -> None:
    streams = Streams(streams_weights=True)
    assert run(name, streams) == stock(name)
    assert not streams.status


@pytest.mark.parametrize("name", ["gpt", "vision_transformer"])
def test_blocks_run_twice_with_weights_that_are_staged(name: str) -> None:
    streams = Streams(eagerness=0.0, recomputes=True, streams_weights=True)
    assert run(name, streams) == stock(name)
    assert all(it.proofs for it in streams.activations)
    counts = [it.status().counts for it in streams.weights.values()]
    # What a proof sees of staged weights keeps no buffer.
    assert all(it.fetched and not it.in_place for it in counts)
