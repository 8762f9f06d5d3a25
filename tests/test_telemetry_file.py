"""Saved profiles: exact, and safe to read from strangers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from archives import contents, rewrite
from hypothesis import given
from hypothesis import strategies as st
from recordings import records_of

from umem.core.classes import TensorClass
from umem.core.errors import UmemError
from umem.core.report import HintReport, HintUse, Source
from umem.telemetry import Recording, load_recording, read_recording, save_recording
from umem.telemetry.file import PROFILE_COLUMNS, ProfileHeader
from umem.telemetry.records import (
    MigrationRecords,
    NamedRange,
    Residency,
    Shares,
    concatenate,
    no_shares,
)

DOCS = Path(__file__).resolve().parents[1] / "docs" / "trace-format.md"
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
    """A recording as plain values, which == compares."""
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


@pytest.mark.slow
@given(recordings())
def test_any_recording_comes_back_exactly(
    tmp_path_factory: pytest.TempPathFactory, recording: Recording
) -> None:
    path = tmp_path_factory.mktemp("saved") / "run.npz"
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


def changed(key: str, value: Any, **others: Any) -> Change:
    return lambda data: data.update({key: value, **others})


def in_hints(key: str, value: Any) -> Change:
    return lambda data: data["hints"][1].__setitem__(key, value)


def in_use(key: str, value: Any) -> Change:
    return lambda data: data["hints"][1]["uses"][0].__setitem__(key, value)


def copy(**changes: float) -> dict[str, Any]:
    row = {"direction": "to_host", "cause": "copy", "tensor_class": "weights"}
    return row | {"bytes": 5, "seconds": 1e-3, "count": 1} | changes


def phase(start_ns: int, end_ns: int) -> dict[str, Any]:
    return {"name": "x", "start_ns": start_ns, "end_ns": end_ns}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (set_to("format", "umem-profile/9"), "is of a newer umem"),
        (set_to("format", "umem-profile/2"), "is of an older umem"),
        (set_to("format", "umem-plan/1"), "is not a profile of umem"),
        (lambda data: data.pop("cause"), "cause: missing"),
        (set_to("extra", 1), "extra: unknown key"),
        (
            set_to("source", "guess"),
            "source: 'guess': Input should be 'driver', 'driver_only', 'cupti', 'nsys', 'hints' or",
        ),
        (set_to("kind", [0, 7]), "kind[1]: 7 is not from 0 to 6"),
        (set_to("kind", [0]), "start_ns: 2 entries; it takes 1"),
        (set_to("cause", [2, 9]), "cause[1]: 9 is not from 0 to 5"),
        (set_to("start_ns", [-1, 3]), "start_ns[0]: -1 is not from 0"),
        (set_to("start_ns", [16, 15]), "start_ns[1]: 15 is before the one in front"),
        (set_to("start_ns", [0, 2**53 + 1]), "start_ns[1]: 9007199254740993 is not from 0"),
        (set_to("end_ns", [9, 30]), "end_ns[0]: 9 is not from 0 to 4398046511103 after its start"),
        (set_to("end_ns", [2**50, 30]), "end_ns[0]: 1125899906842624 is not"),
        (set_to("end_ns", [-(2**63), 30]), "end_ns[0]: -9223372036854775808 is not from 0"),
        (set_to("bytes", [64, 2**62]), "bytes[1]"),
        (set_to("bytes", np.array([64, 1.5])), "bytes: of float64; it takes int64"),
        (set_to("tensor", [1, -1]), "tensor[0]: 1 is not from -1 to 0"),
        (set_to("tensor_class", [0, 6]), "tensor_class[1]: 6 is not from -1 to 5"),
        (set_to("step_start_ns", [0, 400]), "step_start_ns[1]: 400 is before the last end"),
        (set_to("step_end_ns", [500, 499]), "step_end_ns[1]: 499 is before its start"),
        (set_to("step_end_ns", [500]), "step_end_ns: 1 entries; it takes 2"),
        (set_to("phases", [{"name": "x"}]), "phases[0].start_ns: missing"),
        (set_to("phases", [phase(5, 4)]), "phases[0]: 5 to 4 is no time"),
        (set_to("phases", [phase(0, 2**53 + 1)]), "phases[0]: 0 to 9007199254740993 is no time"),
        (set_to("dropped", -1), "dropped: -1: "),
        (set_to("duration_ns", True), "duration_ns: true: "),
        (set_to("notes", ["x", 5]), "notes[1]: 5: Input should be a valid string"),
        (set_to("workload", "\ud800"), "Invalid JSON"),
        (set_to("ideal_s", 0), "ideal_s: 0: "),
        (set_to("ideal_s", "1"), "ideal_s: '1': "),
        (set_to("hints", [None]), "hints: 1 entries for 2 steps"),
        (set_to("hints", [None, {"refused": 1}]), "hints[1].uses: missing"),
        (in_hints("refused", -1), "hints[1]: -1 is not from 0"),
        (in_hints("refused", 1.5), "hints[1].refused: 1.5: "),
        (in_use("op", "guess"), "hints[1].uses: 'guess' is none of"),
        (in_use("tensor_class", "weight"), "hints[1].uses[0].tensor_class: 'weight': "),
        (in_use("late", -1), "hints[1]: -1 is not from 0"),
        (in_use("late_s", 1e300), "hints[1]: 1e+300 is not from 0"),
        (set_to("copies", [[]]), "copies: 1 entries for 2 steps"),
        (set_to("copies", [[], [copy(bytes=-1)]]), "copies[1]: -1 is not from 0"),
        (set_to("copies", [[], [copy(count=2**60)]]), f"copies[1]: {2**60} is not from 0"),
        (set_to("copies", [[copy(seconds=1e300)], []]), "copies[0]: 1e+300 is not from 0"),
        (set_to("residency_ns", [-5]), "residency_ns[0]: -5 is not from 0"),
        (set_to("residency_ns", []), "resident_bytes: 6 entries; it takes 0"),
        (set_to("resident_bytes", [0] * 5 + [-1]), "resident_bytes[5]: -1 is not from 0"),
        (lambda data: data.pop("share_tensor_class"), "share_tensor_class: missing"),
        (set_to("share_bytes", [4, 4]), "share_bytes: 2 entries; it takes 1"),
        (set_to("share_record", [2]), "share_record[0]: 2 is not from 0 to 1"),
        (set_to("share_record", [1]), "share_record[0]: 1 is a record of no transfer"),
        (set_to("share_bytes", [0]), "share_bytes[0]: 0 is not from 1"),
        (set_to("share_bytes", [65]), "share_bytes[0]: 65 is more than its transfer has"),
        (set_to("share_tensor_class", [6]), "share_tensor_class[0]: 6 is not from -1 to 5"),
        (set_to("share_tensor", [1]), "share_tensor[0]: 1 is not from -1 to 0"),
        (changed("residency_ns", [5, 4], resident_bytes=[0] * 12), "residency_ns[1]: 4 is before"),
        (
            changed(
                *("share_record", [1, 0]),
                share_bytes=[1, 1],
                share_tensor_class=[0, 0],
                share_tensor=[0, 0],
            ),
            "share_record[1]: 0 is before the one in front",
        ),
    ],
)
def test_bad_files_are_refused(change: Change, said: str, tmp_path: Path) -> None:
    path = tmp_path / "run.npz"
    save_recording(small(), path)
    rewrite(path, change)
    with pytest.raises(UmemError) as caught:
        read_recording(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert said in str(caught.value)


def test_the_file_has_the_keys_of_the_format(tmp_path: Path) -> None:
    path = tmp_path / "run.npz"
    save_recording(small(), path)
    assert tuple(contents(path)) == (*ProfileHeader.model_fields, *PROFILE_COLUMNS)
    text = DOCS.read_text(encoding="utf-8")
    keys = (*ProfileHeader.model_fields, *PROFILE_COLUMNS)
    assert [key for key in keys if f"`{key}`" not in text] == []


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.npz"
    with pytest.raises(UmemError, match=r"cannot be read .no such file"):
        read_recording(path)
    path.write_bytes(b"\x80\x04K\x01.")  # a pickle
    with pytest.raises(UmemError, match=r"not an \.npz archive, so this is not a profile"):
        read_recording(path)
    with pytest.raises(UmemError, match=r"nsys export --type sqlite run\.nsys-rep"):
        read_recording(tmp_path / "run.nsys-rep")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ((0, 10, 2**60, 4096, 64, 0, 2, 0, 0), "end_ns[0]"),
        ((0, 10, 20, 4096, 2**60, 0, 2, 0, 0), "bytes[0]"),
        ((3, 10, 20, 4096, 0, 2**60, 0, 0, 0), "faults[0]"),
        ((0, -10, 20, 4096, 64, 0, 2, 0, 0), "start_ns[0]"),
        ((0, 2**60, 2**60, 4096, 64, 0, 2, 0, 0), "start_ns[0]"),
        ((0, 10, 20, 4096, 64, 0, 9, 0, 0), "cause[0]"),
    ],
)
def test_an_invalid_recording_is_not_saved(row: tuple[int, ...], said: str, tmp_path: Path) -> None:
    path = tmp_path / "run.npz"
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


def test_a_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "run.npz"
    path.mkdir()
    with pytest.raises(UmemError, match="cannot be written"):
        save_recording(small(), path)
    assert list(tmp_path.iterdir()) == [path]
