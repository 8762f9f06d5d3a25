"""Saved profiles: exact, and safe to read from strangers."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umem.errors import UmemError
from umem.telemetry import (
    NamedRange,
    Recording,
    concatenated,
    load_recording,
    read_recording,
    records_of,
    save_recording,
)

TIMES = st.integers(0, 2**40)
ROWS = st.tuples(
    st.integers(0, 6),
    TIMES,
    st.integers(0, 2**30),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 2**40),
    st.integers(0, 2**20),
    st.integers(0, 5),
    st.integers(0, 4),
    st.integers(0, 255),
)


@st.composite
def recordings(draw: st.DrawFn) -> Recording:
    rows = draw(st.lists(ROWS, max_size=20))
    records = concatenated(
        [records_of([(kind, start, start + length, *rest) for kind, start, length, *rest in rows])]
    )
    names = tuple(draw(st.lists(st.text(max_size=8), max_size=4)))
    marks = sorted(draw(st.lists(TIMES, max_size=6)))
    step_start, step_end = marks[0 : len(marks) // 2 * 2 : 2], marks[1::2]
    count = len(records)
    return Recording(
        workload=draw(st.text(max_size=10)),
        hardware="H200",
        policy="sft",
        source=draw(st.sampled_from(("cupti", "nsys", "none"))),
        duration_ns=draw(TIMES),
        records=records,
        tensor_class=np.array(
            draw(st.lists(st.integers(-1, 5), min_size=count, max_size=count)), np.int8
        ),
        tensor=np.array(
            draw(st.lists(st.integers(-1, len(names) - 1), min_size=count, max_size=count)),
            np.int32,
        ),
        tensor_names=names,
        step_start_ns=np.array(step_start, np.int64),
        step_end_ns=np.array(step_end, np.int64),
        phases=tuple(
            NamedRange(name, begin, begin + 5)
            for name, begin in draw(st.lists(st.tuples(st.text(max_size=5), TIMES), max_size=3))
        ),
        dropped=draw(st.integers(0, 2**40)),
        notes=tuple(draw(st.lists(st.text(max_size=5), max_size=2))),
    )


def plain(value: Any) -> Any:
    """A recording, or its records, as what == compares."""
    return {
        field.name: (
            plain(it)
            if field.name == "records"
            else (str(it.dtype), it.tolist())
            if isinstance(it, np.ndarray)
            else it
        )
        for field in fields(value)
        for it in [getattr(value, field.name)]
    }


@given(recordings())
def test_what_is_saved_is_read_again_exactly(
    tmp_path_factory: pytest.TempPathFactory, recording: Recording
) -> None:
    path = tmp_path_factory.mktemp("saved") / "run.json.gz"
    save_recording(recording, path)
    assert plain(read_recording(path)) == plain(recording)
    before = path.read_bytes()
    save_recording(load_recording(path), path)
    assert path.read_bytes() == before


def small() -> Recording:
    return Recording(
        workload="small",
        hardware="H200",
        policy="sft",
        source="cupti",
        duration_ns=1000,
        records=records_of([(0, 10, 20, 4096, 64, 0, 2, 0, 0), (3, 15, 15, 4096, 0, 1, 0, 1, 0)]),
        tensor_class=np.array([0, -1], np.int8),
        tensor=np.array([0, -1], np.int32),
        tensor_names=("weight",),
        step_start_ns=np.array([0, 500]),
        step_end_ns=np.array([500, 1000]),
        phases=(),
        dropped=0,
        notes=(),
    )


Change = Callable[[dict[str, Any]], object]


def set_to(key: str, value: Any) -> Change:
    return lambda data: data.__setitem__(key, value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (set_to("format", "umem-profile/2"), "comes from a newer umem"),
        (set_to("format", "umem-plan/1"), "is not a profile of umem"),
        (lambda data: data.pop("cause"), "cause: missing"),
        (set_to("extra", 1), "extra: unknown key"),
        (set_to("source", "guess"), "source: 'guess' is none of cupti, nsys, none"),
        (set_to("kind", "7"), "kind[0]: '7' is not a digit from 0 to 6"),
        (set_to("kind", "0"), "cause: 2 entries, and kind has 1"),
        (set_to("cause", "29"), "cause[1]"),
        (set_to("gap_ns", [-1, 3]), "gap_ns[0]: -1 is not from 0"),
        (set_to("gap_ns", [2**53, 2**53]), "gap_ns: together more than"),
        (set_to("length_ns", [2**50, 0]), "length_ns[0]"),
        (set_to("bytes", [64, 2**62]), "bytes[1]"),
        (set_to("bytes", [64, 1.5]), "bytes[1]: 1.5 is not an integer"),
        (set_to("tensor", [1, -1]), "tensor[0]: 1 is not from -1 to 0"),
        (set_to("tensor_class", "79"), "tensor_class[0]"),
        (set_to("step_start_ns", [0, 400]), "step_start_ns[1]: 400 is before the last end"),
        (set_to("step_end_ns", [500, 499]), "step_end_ns[1]: 499 is before its start"),
        (set_to("step_end_ns", [500]), "step_end_ns: 1 entries"),
        (set_to("phase_names", ["x"]), "phase_start_ns: 0 entries"),
        (set_to("dropped", -1), "dropped: -1 is not a whole number"),
        (set_to("duration_ns", True), "duration_ns: true is not a whole number"),
        (set_to("notes", ["x", 5]), "notes[1]: 5 is not text"),
    ],
)
def test_files_that_contradict_themselves(change: Change, said: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json.gz"
    save_recording(small(), path)
    data = json.loads(gzip.decompress(path.read_bytes()))
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(UmemError) as caught:
        read_recording(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert said in str(caught.value)


def test_files_that_are_something_else(tmp_path: Path) -> None:
    path = tmp_path / "run.json.gz"
    with pytest.raises(UmemError, match=r"cannot be read .no such file"):
        read_recording(path)
    path.write_bytes(b"\x80\x04K\x01.")  # a pickle
    with pytest.raises(UmemError, match="neither gzip nor UTF-8"):
        read_recording(path)
    with pytest.raises(UmemError, match=r"nsys export --type sqlite run\.nsys-rep"):
        read_recording(tmp_path / "run.nsys-rep")


def test_what_cannot_be_saved_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "run.json.gz"
    path.mkdir()
    with pytest.raises(UmemError, match="cannot be written"):
        save_recording(small(), path)
    assert list(tmp_path.iterdir()) == [path]
