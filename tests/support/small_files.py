"""Small contents of files, for tests that save, change and read them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from recordings import make_recording

from umem.core.classes import TensorClass
from umem.core.report import HintReport, HintUse, Traffic
from umem.telemetry import run_of, save_run
from umem.telemetry.records import Residency
from umem.trace import Access, PhaseKind, Precision, Trace

MIB = 1 << 20
WEIGHTS, STATE = TensorClass.WEIGHTS, TensorClass.OPTIMIZER_STATE


def small_trace(**changes: Any) -> Trace:
    """Weights, an activation and a scratch tensor in three phases."""
    trace = Trace(
        name="small",
        source="by hand",
        tensor_names=("w", "x", "scratch"),
        tensor_bytes=np.array([4096, 512, 1], np.int64),
        tensor_class=np.array([0, 4, 5], np.uint8),
        persistent=np.array([True, False, False]),
        first_phase=np.array([0, 0, 1], np.int32),
        last_phase=np.array([2, 2, 1], np.int32),
        phase_names=("forward", "backward", "step"),
        phase_kind=np.array([0, 1, 2], np.uint8),
        phase_precision=np.array([0, 3, 4], np.uint8),
        flops=np.array([1e9, 2e9, 0.0]),
        memory_bytes=np.array([4608, 513, 4096], np.int64),
        duration_s=np.array([1e-3, 0.1 + 0.2, 5e-324]),
        access_start=np.array([0, 2, 4, 5], np.int64),
        access_tensor=np.array([0, 1, 1, 2, 0], np.int32),
        access_mode=np.array([1, 2, 1, 2, 3], np.uint8),
        metadata={"batch": 8, "loss": 0.1, "model": "tiny"},
    )
    return dataclasses.replace(trace, **changes)


def trace_of_phases(phases: int, **columns: Any) -> Trace:
    """A trace whose phases each read the one tensor, with other columns than the usual ones."""
    usual: dict[str, Any] = {
        "tensor_bytes": np.array([4096]),
        "tensor_class": np.zeros(1, np.uint8),
        "persistent": np.ones(1, np.bool_),
        "first_phase": np.zeros(1, np.int32),
        "last_phase": np.full(1, phases - 1, np.int32),
        "phase_names": tuple(map(str, range(phases))),
        "phase_kind": np.full(phases, PhaseKind.KERNEL, np.uint8),
        "phase_precision": np.full(phases, Precision.BF16, np.uint8),
        "flops": np.ones(phases),
        "memory_bytes": np.full(phases, 4096),
        "duration_s": np.ones(phases),
        "access_start": np.arange(phases + 1, dtype=np.int64),
        "access_tensor": np.zeros(phases, np.int32),
        "access_mode": np.full(phases, Access.READ, np.uint8),
    }
    return Trace(name="phases", source="by hand", tensor_names=("x",), **(usual | columns))


def exchange(**changes: Any) -> dict[str, Any]:
    """A document: weights 7, activations 3, gradients -1, and a tensor 100 that nothing uses."""
    document: dict[str, Any] = {
        "format": "umem-trace/1",
        "name": "tiny",
        "source": "by hand",
        "published": {"unit": "ms per iteration", "ideal": 3.5, "runs": 2},
        "tensors": [
            {"id": 7, "bytes": 1000, "class": "weights", "persistent": True},
            {"id": 100, "bytes": 5, "class": "other", "persistent": False},
            {"id": 3, "bytes": 200, "class": "activations", "persistent": False},
            {"id": -1, "bytes": 30, "class": "gradients", "persistent": False},
            {"id": 8, "bytes": 4, "class": "optimizer_state", "persistent": True},
        ],
        "phases": [
            {"name": "start", "duration_us": 0, "reads": [], "writes": []},
            {"name": "forward", "duration_us": 1500.5, "reads": [7], "writes": [3]},
            {"name": "backward", "duration_us": 2000, "reads": [3, 7], "writes": [-1]},
            {"name": "step", "duration_us": 1, "reads": [-1, 7], "writes": [7]},
        ],
    }
    return document | changes


def small_run() -> dict[str, Any]:
    """A profile of two steps, as the JSON that it is saved as."""
    recording = make_recording(
        [(0, 10, 20, 4096, 64, 0, 2), (3, 15, 15, 4096, 0, 1, 0)],
        [(0, 0), (-1, -1)],
        [(0, 500), (500, 1000)],
        tensor_names=("weight",),
        ideal_s=1e-7,
        hints=(None, HintReport((HintUse("evict", TensorClass.WEIGHTS, *[1] * 12),), *[0] * 2)),
        copies=((), (Traffic("to_host", "copy", TensorClass.WEIGHTS, 5, 1e-3, 1),)),
        residency=Residency(np.array([5]), np.arange(6, dtype=np.int64).reshape(1, 6)),
    )
    with TemporaryDirectory() as folder:
        save_run(run_of(recording), Path(folder) / "run.json")
        made: dict[str, Any] = json.loads((Path(folder) / "run.json").read_bytes())
    return made
