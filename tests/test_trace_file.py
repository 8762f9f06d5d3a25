"""Traces: what is valid, and umem's own file format."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from archives import contents, rewrite
from pydantic import BaseModel
from small_files import small_trace

from umem.core.errors import TraceError
from umem.trace import Trace, ranges
from umem.trace.check import DTYPES, MAX_METADATA, MAX_NAME_LENGTH, check_trace
from umem.trace.file import (
    TRACE_FORMAT,
    Exchange,
    ExchangePhase,
    ExchangeTensor,
    TraceHeader,
    load_trace,
    save_trace,
)

DOCS = Path(__file__).resolve().parents[1] / "docs" / "trace-format.md"


def with_entry(key: str, index: int, value: Any) -> Trace:
    column = getattr(small_trace(), key).copy()
    column[index] = value
    return small_trace(**{key: column})


def assert_same(one: Trace, other: Trace) -> None:
    """Equal bit for bit."""
    for field in dataclasses.fields(Trace):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, np.ndarray):
            assert (a.dtype, a.tobytes()) == (b.dtype, b.tobytes()), field.name
            assert not b.flags.writeable
        else:
            assert a == b, field.name


# ----------------------------------------------------------------------------- what is valid


def test_a_valid_trace_passes() -> None:
    check_trace(small_trace(), "here")
    check_trace(small_trace(duration_s=None, metadata={}, source=""), "here")


def test_a_phase_without_accesses_is_valid() -> None:
    check_trace(
        small_trace(
            access_start=np.zeros(4, np.int64),
            access_tensor=np.zeros(0, np.int32),
            access_mode=np.zeros(0, np.uint8),
        ),
        "here",
    )


NAN, INF = float("nan"), float("inf")

BAD_ENTRIES: list[tuple[str, int, Any, str]] = [
    ("tensor_bytes", 1, 0, "0 is not from 1 to 1125899906842624"),
    ("tensor_bytes", 1, -5, "-5 is not from 1"),
    ("tensor_bytes", 1, 2**50 + 1, "1125899906842625 is not from 1"),
    ("tensor_class", 2, 6, "6 is not from 0 to 5"),
    ("persistent", 2, True, "a persistent tensor lives through the phases 0 to 2, and this one"),
    ("first_phase", 1, -1, "-1 is not from 0 to 2"),
    ("last_phase", 1, 3, "3 is not from 0 to 2"),
    ("first_phase", 2, 2, r"2 comes after last_phase\[2\] = 1"),
    ("phase_kind", 0, 3, "3 is not from 0 to 2"),
    ("phase_precision", 0, 5, "5 is not from 0 to 4"),
    ("flops", 0, NAN, "nan is not from 0 to 1.79"),
    ("flops", 0, INF, "inf is not from 0 to 1.79"),
    ("flops", 0, -1.0, "-1.0 is not from 0"),
    ("memory_bytes", 0, -1, "-1 is not from 0"),
    ("memory_bytes", 0, 2**60, "1152921504606846976 is not from 0"),
    ("duration_s", 2, NAN, "nan is not from 0 to 1000000"),
    ("duration_s", 2, INF, "inf is not from 0"),
    ("duration_s", 2, -1e-9, "-1e-09 is not from 0"),
    ("duration_s", 2, 1e6 + 1, "1000001.0 is not from 0"),
    ("access_start", 0, 1, "1; it is 0 by definition"),
    ("access_start", 3, 4, "4; it is 5 by definition"),
    ("access_start", 1, 5, "5 is followed by 4; the bounds never fall"),
    ("access_tensor", 3, 99, "99 is not from 0 to 2"),
    ("access_tensor", 3, -1, "-1 is not from 0 to 2"),
    ("access_tensor", 0, 2, "phase 0 uses tensor 2, which lives from phase 1 to 1; widen"),
    ("access_tensor", 1, 0, "phase 0 uses tensor 0 twice; join the two"),
    ("access_mode", 4, 0, "0 is not from 1 to 3"),
    ("access_mode", 4, 4, "4 is not from 1 to 3"),
]


@pytest.mark.parametrize(("key", "index", "value", "message"), BAD_ENTRIES)
def test_a_bad_entry_is_named(key: str, index: int, value: Any, message: str) -> None:
    with pytest.raises(TraceError, match=rf"^f\.npz: {key}\[{index}\]: {message}"):
        check_trace(with_entry(key, index, value), "f.npz")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"flops": np.zeros(2)}, "flops: 2 entries; it takes 3"),
        ({"tensor_bytes": np.ones(4, np.int64)}, "tensor_bytes: 4 entries; it takes 3"),
        ({"access_start": np.zeros(3, np.int64)}, "access_start: 3 entries; it takes 4"),
        ({"access_mode": np.ones(4, np.uint8)}, "access_mode: 4 entries; it takes 5"),
        ({"duration_s": np.zeros(4)}, "duration_s: 4 entries; it takes 3"),
        ({"flops": np.zeros(3, np.float32)}, "flops: of float32; make it float64"),
        ({"first_phase": np.zeros(3, np.int64)}, "first_phase: of int64; make it int32"),
        ({"persistent": np.zeros(3, np.uint8)}, "persistent: of uint8; make it bool"),
        ({"flops": [0.0] * 3}, "flops: not a column"),
        ({"flops": np.zeros((3, 1))}, "flops: not a column"),
        ({"access_tensor": None}, "access_tensor: not a column"),
        ({"tensor_names": ()}, "tensor_names: 0 entries; a trace has from 1"),
        ({"phase_names": ()}, "phase_names: 0 entries; a trace has from 1"),
        ({"phase_names": ["a", "b", "c"]}, "phase_names: a list; give a tuple of text"),
        ({"name": ""}, "name: empty; name the workload"),
        ({"name": 5}, "name: a int; give text"),
        ({"tensor_names": ("a", 1, "c")}, r"tensor_names\[1\]: a int; give text"),
        ({"tensor_names": ("a", "b\x1b[2J", "c")}, r"tensor_names\[1\]: holds the control char"),
        ({"tensor_names": ("a", "b", "\ud800")}, r"tensor_names\[2\]: .* '\\ud800'; remove it"),
        (
            {"phase_names": ("a" * (MAX_NAME_LENGTH + 1), "b", "c")},
            r"phase_names\[0\]: 1025 characters; give at most 1024",
        ),
        ({"metadata": {"a": True}}, "metadata.a: a bool; give text or a number"),
        ({"metadata": {"a": None}}, "metadata.a: a NoneType; give text or a number"),
        ({"metadata": {"a": NAN}}, "metadata.a: nan; give a finite number"),
        ({"metadata": {"a": 2**63}}, "metadata.a: an integer of more than 64 bits"),
        ({"metadata": {"a": "\n"}}, "metadata.a: holds the control character"),
        ({"metadata": {"\n": 1}}, "metadata: holds the control character"),
        ({"metadata": {1: 1}}, "metadata: a int; give text"),
        (
            {"metadata": {str(key): 0 for key in range(MAX_METADATA + 1)}},
            "metadata: 257 keys; give at most 256",
        ),
    ],
)
def test_a_bad_field_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=f"^here: {message}"):
        check_trace(small_trace(**changes), "here")


def test_sizes_that_overflow_their_sum_are_refused() -> None:
    count = 2**14  # 2**14 * 2**50 is 0 in 64 bits
    trace = small_trace(
        tensor_names=("t",) * count,
        tensor_bytes=np.full(count, 2**50, np.int64),
        tensor_class=np.zeros(count, np.uint8),
        persistent=np.ones(count, np.bool_),
        first_phase=np.zeros(count, np.int32),
        last_phase=np.full(count, 2, np.int32),
    )
    with pytest.raises(TraceError, match=f"tensor_bytes: {2**64} bytes in all; stay below"):
        check_trace(trace, "here")


def test_bounds_of_accesses_that_overflow_are_refused() -> None:
    with pytest.raises(
        TraceError, match=r"access_start\[1\]: 9223372036854775807 is followed by -5"
    ):
        check_trace(small_trace(access_start=np.array([0, 2**63 - 1, -5, 5], np.int64)), "here")


# ------------------------------------------------------------------------------- the format


EXTREMES = small_trace(
    name="ü\u2028",
    source="",
    tensor_names=("", "\U0001f600", "w"),
    tensor_bytes=np.array([2**50, 1, 2**50 - 1], np.int64),
    tensor_class=np.array([5, 0, 3], np.uint8),
    phase_names=("", "p", "p"),
    flops=np.array([0.0, 5e-324, 1.7976931348623157e308]),
    memory_bytes=np.array([0, 2**60 - 1, 1], np.int64),
    duration_s=np.array([0.0, 1e6, 5e-324]),
    metadata={"": "", "low": -(2**63), "high": 2**63 - 1, "least": 5e-324, "whole": 1.0},
)
"""The largest and the least of what a trace may have."""


@pytest.mark.parametrize("trace", [small_trace(), small_trace(duration_s=None), EXTREMES])
def test_a_trace_comes_back_bit_for_bit(trace: Trace, tmp_path: Path) -> None:
    save_trace(trace, tmp_path / "t.npz")
    back = load_trace(tmp_path / "t.npz")
    assert_same(trace, back)
    assert [type(value) for _, value in sorted(trace.metadata.items())] == [
        type(value) for value in back.metadata.values()
    ]


def test_equal_traces_give_equal_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_trace(small_trace(), tmp_path / "a.npz")
    monkeypatch.setattr(time, "time", lambda: 2e9)
    other_order = dict(reversed(list(small_trace().metadata.items())))
    save_trace(small_trace(metadata=other_order), tmp_path / "b.npz")
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


def test_an_invalid_trace_is_not_saved(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    save_trace(small_trace(), path)
    before = path.read_bytes()
    with pytest.raises(TraceError, match=r"t\.npz: not written: flops\[0\]: nan"):
        save_trace(with_entry("flops", 0, NAN), path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.npz"]


def saved(folder: Path, **changes: Any) -> Path:
    """A saved trace, changed; lists become columns, and None removes."""
    path = folder / "t.npz"
    save_trace(small_trace(), path)

    def change(content: dict[str, Any]) -> None:
        content.update(changes)
        for key in [key for key, value in changes.items() if value is None]:
            del content[key]

    rewrite(path, change)
    return path


def test_the_file_has_the_keys_of_the_format(tmp_path: Path) -> None:
    content = contents(saved(tmp_path))
    assert tuple(content) == (*TraceHeader.model_fields, *DTYPES)
    assert content["format"] == TRACE_FORMAT


def test_a_file_that_was_packed_anew_is_read(tmp_path: Path) -> None:
    assert_same(small_trace(), load_trace(saved(tmp_path)))


# --------------------------------------------------------------------------------- in bulk


def large_trace(phases: int, tensors: int, per_phase: int) -> Trace:
    """As a recorded step of a large model looks: names, sizes and lifetimes of many tensors."""
    random = np.random.default_rng(7)
    persistent = np.arange(tensors) < tensors // 6
    first = np.where(persistent, 0, np.arange(tensors) * phases // tensors).astype(np.int32)
    last = np.where(persistent, phases - 1, np.minimum(first + 60, phases - 1)).astype(np.int32)
    newest = np.minimum(np.arange(1, phases + 1) * tensors // phases, tensors) - 1
    used = newest[:, None] - np.arange(per_phase)
    alive = (used >= 0) & (first[used] <= np.arange(phases)[:, None])
    alive &= last[used] >= np.arange(phases)[:, None]
    return Trace(
        name="large",
        source="made up",
        tensor_names=tuple(f"model.layers.{t % 32}.mlp.up_proj.weight.{t}" for t in range(tensors)),
        tensor_bytes=random.integers(1, 2**28, tensors),
        tensor_class=random.integers(0, 6, tensors).astype(np.uint8),
        persistent=persistent,
        first_phase=first,
        last_phase=last,
        phase_names=tuple(f"model.layers.{p % 32}.mlp/aten.mm.default" for p in range(phases)),
        phase_kind=np.zeros(phases, np.uint8),
        phase_precision=np.full(phases, 3, np.uint8),
        flops=random.random(phases) * 1e12,
        memory_bytes=random.integers(0, 2**30, phases),
        duration_s=random.random(phases),
        access_start=ranges(alive.sum(axis=1)),
        access_tensor=used[alive].astype(np.int32),
        access_mode=random.integers(1, 4, alive.sum()).astype(np.uint8),
    )


@pytest.mark.slow
def test_the_step_of_a_7b_model_is_a_small_file(tmp_path: Path) -> None:
    trace = large_trace(20_000, 30_000, 6)
    assert len(trace.access_tensor) > 110_000
    path = tmp_path / "large.npz"
    save_trace(trace, path)
    assert path.stat().st_size < 2**20
    assert_same(trace, load_trace(path))


# ------------------------------------------------------------------------------------ docs


@pytest.mark.parametrize("model", [TraceHeader, Exchange, ExchangeTensor, ExchangePhase])
def test_the_documentation_names_every_key(model: type[BaseModel]) -> None:
    text = DOCS.read_text(encoding="utf-8")
    keys = [field.alias or name for name, field in model.model_fields.items()]
    assert [key for key in keys if f"| `{key}` |" not in text] == []


def test_the_documentation_names_every_column() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert [key for key in DTYPES if f"| `{key}` |" not in text] == []
