"""umem's readers of files that may come from strangers, and what must hold for each input.

A reader refuses an input by an error of umem that is short, or accepts it; then all that umem does
with the result works or is refused in the same way. Anything else is wrong: another exception, a
value that is not written and read back unchanged, too much time or memory.
"""

from __future__ import annotations

import copy
import json
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from fingerprints import trace_fingerprint
from fuzz_inputs import archives, documents, texts
from hypothesis.strategies import SearchStrategy
from recordings import make_recording
from umem_bench.compile_planner import compile_planner

from umem.core.classes import TensorClass
from umem.core.errors import UmemError
from umem.core.report import Traffic
from umem.fit import load_shape
from umem.hardware import Hardware, load_hardware, with_durations
from umem.pages.plan import plan
from umem.policy import ResolvedPolicy, load_policy, resolve
from umem.predict.prediction import predict, report_row
from umem.telemetry import load_run, measured_row, run_of, save_run
from umem.telemetry.records import Residency
from umem.trace import Trace, load_trace, save_trace

MOST_BYTES = 64 * 2**20
"""Most memory that an input may take."""

_LONGEST_MESSAGE = 3000

_FOLDER = tempfile.TemporaryDirectory(prefix="umem-fuzz-")
FOLDER = Path(_FOLDER.name)


@dataclass
class Tally:
    """What came out of the inputs of one reader."""

    inputs: int = 0
    refused: int = 0
    accepted: int = 0
    worst_s: float = 0.0
    worst_bytes: int = 0
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Reader:
    """A reader, and the inputs that it is tried with."""

    name: str
    suffix: str
    """End of the file's name."""
    inputs: Callable[[], SearchStrategy[bytes]]
    read: Callable[[Path], object]
    """Reads the file and uses what it holds."""

    def try_input(self, content: bytes, tally: Tally) -> float:
        """Try one input; an exception if anything is wrong. Returns its processor time, s."""
        path = FOLDER / f"input{self.suffix}"
        path.write_bytes(content)
        tally.inputs += 1
        compile_planner()  # once: its time and memory are not the reader's
        tracemalloc.start()
        began = time.process_time()
        try:
            refusal = _refusal(self.read, path)
        finally:
            took_s = time.process_time() - began
            took_bytes = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            tally.worst_s = max(tally.worst_s, took_s)
            tally.worst_bytes = max(tally.worst_bytes, took_bytes)
        tally.refused += refusal is not None
        tally.accepted += refusal is None
        if refusal is not None:
            assert str(path) in refusal, f"names no place: {refusal}"
            assert len(refusal) < _LONGEST_MESSAGE, f"{len(refusal)} characters"
            assert refusal.replace("\n", "").isprintable(), f"a control character: {refusal!a}"
        assert took_bytes < MOST_BYTES, f"{took_bytes:,} bytes"
        return took_s


def _refusal(read: Callable[[Path], object], path: Path) -> str | None:
    try:
        read(path)
    except UmemError as error:
        return str(error)
    return None


@cache
def _machine() -> Hardware:
    return load_hardware("h100-sxm")


@cache
def _policy() -> ResolvedPolicy:
    return resolve(load_policy("managed"), _machine())


_TRACE_DOCUMENT = {
    "format": "umem-trace/1",
    "name": "by hand",
    "source": "fuzz",
    "published": {"step_ms": 3.5},
    "tensors": [
        {"id": 0, "bytes": 1 << 22, "class": "weights", "persistent": True},
        {"id": 1, "bytes": 1 << 21, "class": "activations", "persistent": False},
        {"id": 7, "bytes": 1 << 23, "class": "optimizer_state", "persistent": True},
    ],
    "phases": [
        {"name": "forward", "duration_us": 10, "reads": [0], "writes": [1]},
        {"name": "backward", "duration_us": 20.5, "reads": [0, 1], "writes": [1]},
        {"name": "optimizer", "duration_us": 3, "reads": [0, 7], "writes": [0, 7]},
    ],
}


def _seed(name: str, content: Any) -> Path:
    path = FOLDER / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(json.dumps(content), encoding="utf-8")
    return path


@cache
def _trace() -> Trace:
    return load_trace(_seed("seed.json", _TRACE_DOCUMENT))


def _use_trace(path: Path) -> None:
    trace = load_trace(path)
    save_trace(trace, FOLDER / "again.npz")
    assert trace_fingerprint(load_trace(FOLDER / "again.npz")) == trace_fingerprint(trace)
    timed = with_durations(trace, _machine())
    if timed.phase_count > 200 or timed.tensor_count > 200:
        return  # planning of large steps has tests of its own
    try:
        reports = predict(timed, _machine(), _policy(), ("fault", "planned"))
    except UmemError:  # it does not fit: the message names the step, which may be any
        return
    for report in reports:
        json.dumps(report_row(report), allow_nan=False)
        assert report.step_s >= 0


def _use_profile(path: Path) -> None:
    run = load_run(path)
    row = json.dumps(measured_row(run), allow_nan=False)
    save_run(run, FOLDER / "again.json")
    assert json.dumps(measured_row(load_run(FOLDER / "again.json"))) == row


def _use_policy(path: Path) -> None:
    policy = load_policy(path)
    try:
        resolve(policy, _machine())
    except UmemError:  # it asks for what this machine lacks
        return


def _use_hardware(path: Path) -> None:
    hardware = load_hardware(path)
    assert with_durations(_trace(), hardware).duration_s is not None
    try:
        policy = resolve(load_policy("managed"), hardware)
        plan(_trace(), hardware, policy)
    except UmemError:  # the step does not fit
        return


def _use_shape(path: Path) -> None:
    assert load_shape(str(path)).parameters > 0


def _trace_seeds() -> list[bytes]:
    save_trace(_trace(), FOLDER / "seed.npz")
    untimed = FOLDER / "untimed.npz"
    save_trace(with_durations(_trace(), _machine()), untimed)
    return [(FOLDER / "seed.npz").read_bytes(), untimed.read_bytes()]


def _profile_document() -> dict[str, Any]:
    rows = [
        (0, 100, 200, 4096, 1 << 20, 0, 1),
        (1, 300, 400, 8192, 1 << 16, 0, 4),
        (4, 350, 350, 8192, 0, 3, 0),
    ]
    recording = make_recording(
        rows,
        [(0, 0), (3, 1), (-1, -1)],
        [(50, 250), (250, 500)],
        tensor_names=("w", "m"),
        notes=("by hand",),
        hints=(None, None),
        copies=((Traffic("to_host", "copy", TensorClass.WEIGHTS, 5, 1e-3, 1),), ()),
        residency=Residency(np.array([10, 20]), np.arange(12).reshape(2, 6)),
    )
    save_run(run_of(recording), FOLDER / "seed-profile.json")
    return json.loads((FOLDER / "seed-profile.json").read_bytes())


def _hardware_document() -> dict[str, Any]:
    from umem.hardware.cards import card_profile

    return copy.deepcopy(dict(card_profile("h100-sxm") or {}))


_POLICIES: list[dict[str, Any]] = [
    {
        "extends": "sft",
        "description": "by hand",
        "device_budget": "80%",
        "classes": {"weights": {"kind": "managed", "placement": "device", "min_bytes": "1MiB"}},
        "limits": {"managed_bytes": "16GiB"},
    },
    {"defaults": {"kind": "device"}, "planner": "planned", "share": ["rmm"]},
]
_CONFIG = {
    "model_type": "mixtral",
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
}


READERS = (
    Reader("trace", ".npz", lambda: archives(_trace_seeds()), _use_trace),
    Reader("published trace", ".json", lambda: documents([_TRACE_DOCUMENT]), _use_trace),
    Reader("profile", ".json", lambda: documents([_profile_document()]), _use_profile),
    Reader("policy", ".yaml", lambda: texts(_POLICIES), _use_policy),
    Reader("hardware profile", ".yaml", lambda: texts([_hardware_document()]), _use_hardware),
    Reader("model config", ".json", lambda: documents([_CONFIG]), _use_shape),
)
