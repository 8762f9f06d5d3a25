"""Saved profiles: exact, and safe to read from strangers."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umem.core.classes import TensorClass
from umem.core.errors import UmemError
from umem.core.report import HintReport, HintUse, Source
from umem.telemetry import (
    MigrationRecords,
    NamedRange,
    Recording,
    Residency,
    Shares,
    concatenate,
    load_recording,
    no_shares,
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


COUNTS = st.integers(0, 2**40)
SECONDS = st.floats(0, 1e6)
USES = st.builds(
    HintUse,
    op=st.sampled_from(("prefetch", "evict", "discard", "copy_in", "copy_out", "advise")),
    tensor_class=st.sampled_from(list(TensorClass)),
    **{it.name: COUNTS for it in fields(HintUse)[2:-2]},
    driver_s=SECONDS,
    late_s=SECONDS,
)
REPORTS = st.none() | st.builds(
    HintReport,
    st.lists(USES, max_size=3).map(tuple),
    **{it.name: COUNTS for it in fields(HintReport)[1:]},
)


@st.composite
def residencies(draw: st.DrawFn) -> Residency | None:
    times = sorted(draw(st.lists(TIMES, max_size=4)))
    size = len(times) * len(TensorClass)
    sizes = draw(st.lists(COUNTS, min_size=size, max_size=size))
    table = np.array(sizes, np.int64).reshape(-1, len(TensorClass))
    return Residency(np.array(times, np.int64), table) if times else None


@st.composite
def recordings(draw: st.DrawFn) -> Recording:
    rows = draw(st.lists(ROWS, max_size=20))
    records = concatenate(
        [records_of([(kind, start, start + length, *rest) for kind, start, length, *rest in rows])]
    )
    names = tuple(draw(st.lists(st.text(max_size=8), max_size=4)))
    marks = sorted(draw(st.lists(TIMES, max_size=6)))
    step_start, step_end = marks[0 : len(marks) // 2 * 2 : 2], marks[1::2]
    count = len(records)
    driven = max(len(step_start), 1) if draw(st.booleans()) else 0
    moved = np.flatnonzero(records.is_transfer() & (records.bytes > 0))
    shared = sorted(draw(st.sets(st.sampled_from(moved.tolist())))) if len(moved) else []
    return Recording(
        workload=draw(st.text(max_size=10)),
        hardware="H200",
        policy="sft",
        source=draw(st.sampled_from(get_args(Source))),
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
        ideal_s=draw(st.none() | st.floats(1e-9, 1e6)),
        hints=tuple(draw(st.lists(REPORTS, min_size=driven, max_size=driven))),
        residency=draw(residencies()),
        shares=Shares(
            np.array(shared, np.int64),
            np.array([draw(st.integers(1, int(records.bytes[row]))) for row in shared], np.int64),
            np.array([draw(st.integers(-1, 5)) for _ in shared], np.int8),
            np.array([draw(st.integers(-1, len(names) - 1)) for _ in shared], np.int32),
        ),
    )


def plain(value: Any) -> Any:
    """A recording, or its records, as what == compares."""
    return {
        field.name: (
            plain(it)
            if isinstance(it, MigrationRecords | Residency | Shares)
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
        ideal_s=1e-7,
        hints=(None, HintReport((HintUse("evict", TensorClass.WEIGHTS, *[1] * 12),), *[0] * 3)),
        residency=Residency(np.array([5]), np.arange(6, dtype=np.int64).reshape(1, 6)),
        shares=Shares(np.array([0]), np.array([4]), np.array([3], np.int8), np.array([-1])),
    )


Change = Callable[[dict[str, Any]], object]


def set_to(key: str, value: Any) -> Change:
    return lambda data: data.__setitem__(key, value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (set_to("format", "umem-profile/3"), "comes from a newer umem"),
        (set_to("format", "umem-profile/1"), "unknown key"),
        (set_to("format", "umem-plan/1"), "is not a profile of umem"),
        (lambda data: data.pop("cause"), "cause: missing"),
        (set_to("extra", 1), "extra: unknown key"),
        (
            set_to("source", "guess"),
            "source: 'guess' is none of driver, driver_only, cupti, nsys, hints, none",
        ),
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
        (set_to("ideal_s", 0), "ideal_s: 0 is no time above 0"),
        (set_to("ideal_s", "1"), "ideal_s: '1' is no time above 0"),
        (set_to("hint_refused", [-1]), "hint_failures: 2 entries, and hint_refused has 1"),
        (set_to("hint_refused", [-2, 0]), "hint_refused[0]: -2 is not from -1"),
        (set_to("hint_failures", [-1, -1]), "hint_failures[1]: -1 is not of the steps"),
        (set_to("hint_step", [2]), "hint_step[0]: 2 is not from 0 to 1"),
        (set_to("hint_step", [0]), "hint_step[0]: 0 is a step without an engine"),
        (set_to("hint_op", "6"), "hint_op[0]: '6' is not a digit from 0 to 5"),
        (set_to("hint_class", ""), "hint_class: 0 entries, and hint_step has 1"),
        (set_to("hint_late", [-1]), "hint_late[0]: -1 is not from 0"),
        (set_to("hint_late_s", [1e300]), "hint_late_s[0]: 1e+300 is not from 0"),
        (set_to("residency_ns", [-5]), "residency_ns[0]: -5 is not from 0"),
        (set_to("residency_ns", []), "resident_bytes: 6 entries for 0 samples"),
        (set_to("resident_bytes", [0] * 5 + [-1]), "resident_bytes[5]: -1 is not from 0"),
        (lambda data: data.pop("share_class"), "share_class: missing"),
        (set_to("share_bytes", [4, 4]), "share_bytes: 2 entries, and share_record has 1"),
        (set_to("share_record", [2]), "share_record[0]: 2 is not from 0 to 1"),
        (set_to("share_record", [1]), "share_record[0]: 1 is a record of no transfer"),
        (set_to("share_bytes", [0]), "share_bytes[0]: 0 is not from 1"),
        (set_to("share_bytes", [65]), "share_bytes[0]: 65 is more than its transfer has"),
        (set_to("share_class", "7"), "share_class[0]"),
        (set_to("share_tensor", [1]), "share_tensor[0]: 1 is not from -1 to 0"),
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


def test_samples_are_in_order(tmp_path: Path) -> None:
    path = tmp_path / "run.json.gz"
    save_recording(small(), path)
    data = json.loads(gzip.decompress(path.read_bytes()))
    data |= {"residency_ns": [5, 4], "resident_bytes": [0] * 12}
    path.write_text(json.dumps(data))
    with pytest.raises(UmemError, match=r"residency_ns\[1\]: 4 is before the sample in front"):
        read_recording(path)


def test_shares_are_in_the_order_of_their_records(tmp_path: Path) -> None:
    path = tmp_path / "run.json.gz"
    save_recording(small(), path)
    data = json.loads(gzip.decompress(path.read_bytes()))
    data |= {"share_record": [1, 0], "share_bytes": [1, 1]}
    data |= {"share_class": "00", "share_tensor": [0, 0]}
    path.write_text(json.dumps(data))
    with pytest.raises(UmemError, match=r"share_record\[1\]: 0 is before the record in front"):
        read_recording(path)


def test_files_from_before_shares(tmp_path: Path) -> None:
    path = tmp_path / "run.json.gz"
    alone = replace(small(), shares=no_shares())
    save_recording(alone, path)
    assert not any(
        key.startswith("share_") for key in json.loads(gzip.decompress(path.read_bytes()))
    )
    assert plain(read_recording(path)) == plain(alone)


def test_hints_are_of_the_marked_steps(tmp_path: Path) -> None:
    path = tmp_path / "run.json.gz"
    save_recording(replace(small(), hints=(None, None)), path)
    data = json.loads(gzip.decompress(path.read_bytes()))
    for key in ("hint_refused", "hint_failures", "hint_over_budget_bytes"):
        data[key] = [-1]
    path.write_text(json.dumps(data))
    with pytest.raises(UmemError, match="hint_refused: 1 entries for 2 steps"):
        read_recording(path)


def test_files_of_the_first_format(tmp_path: Path) -> None:
    path = tmp_path / "run.json.gz"
    plainly = replace(small(), ideal_s=None, hints=(), residency=None, shares=no_shares())
    save_recording(plainly, path)
    data = json.loads(gzip.decompress(path.read_bytes()))
    added = [key for key in data if key.startswith("hint_")]
    for key in (*added, "ideal_s", "residency_ns", "resident_bytes"):
        del data[key]
    data["format"] = "umem-profile/1"
    path.write_text(json.dumps(data))
    assert plain(read_recording(path)) == plain(plainly)
    # It knew nothing of hints.
    data["source"] = "hints"
    path.write_text(json.dumps(data))
    with pytest.raises(UmemError, match="none of cupti, nsys, none"):
        read_recording(path)


def test_files_that_are_something_else(tmp_path: Path) -> None:
    path = tmp_path / "run.json.gz"
    with pytest.raises(UmemError, match=r"cannot be read .no such file"):
        read_recording(path)
    path.write_bytes(b"\x80\x04K\x01.")  # a pickle
    with pytest.raises(UmemError, match="neither gzip nor UTF-8"):
        read_recording(path)
    with pytest.raises(UmemError, match=r"nsys export --type sqlite run\.nsys-rep"):
        read_recording(tmp_path / "run.nsys-rep")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ((0, 10, 2**60, 4096, 64, 0, 2, 0, 0), "length_ns[0]"),
        ((0, 10, 20, 4096, 2**60, 0, 2, 0, 0), "bytes[0]"),
        ((3, 10, 20, 4096, 0, 2**60, 0, 0, 0), "faults[0]"),
        ((0, -10, 20, 4096, 64, 0, 2, 0, 0), "gap_ns[0]"),
        ((0, 2**60, 2**60, 4096, 64, 0, 2, 0, 0), "gap_ns[0]"),
        ((0, 10, 20, 4096, 64, 0, 9, 0, 0), "cause[0]"),
    ],
)
def test_what_could_not_be_loaded_is_not_saved(
    row: tuple[int, ...], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.json.gz"
    save_recording(small(), path)
    before = path.read_bytes()
    bad = replace(
        small(),
        records=records_of(np.array([row])),
        tensor_class=np.array([0], np.int8),
        tensor=np.array([0], np.int32),
        shares=no_shares(),
    )
    with pytest.raises(UmemError) as caught:
        save_recording(bad, path)
    assert str(caught.value).startswith(f"{path}: not written: {said}")
    assert path.read_bytes() == before


def test_what_cannot_be_saved_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "run.json.gz"
    path.mkdir()
    with pytest.raises(UmemError, match="cannot be written"):
        save_recording(small(), path)
    assert list(tmp_path.iterdir()) == [path]
