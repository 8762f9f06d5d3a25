"""Saved profiles: exact, and safe to read from strangers."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from archives import contents
from hypothesis import given
from hypothesis import strategies as st
from recordings import records_of
from small_files import small_recording

from umem.core.classes import TensorClass
from umem.core.errors import UmemError
from umem.core.report import HintReport, HintUse, Source
from umem.telemetry import Recording, load_recording, save_recording
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
    op=st.sampled_from(("prefetch", "evict", "advise")),
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
    assert plain(load_recording(path)) == plain(recording)
    before = path.read_bytes()
    save_recording(load_recording(path), path)
    assert path.read_bytes() == before


def test_the_file_has_the_keys_of_the_format(tmp_path: Path) -> None:
    path = tmp_path / "run.npz"
    save_recording(small_recording(), path)
    assert tuple(contents(path)) == (*ProfileHeader.model_fields, *PROFILE_COLUMNS)
    text = DOCS.read_text(encoding="utf-8")
    keys = (*ProfileHeader.model_fields, *PROFILE_COLUMNS)
    assert [key for key in keys if f"`{key}`" not in text] == []


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.npz"
    with pytest.raises(UmemError, match=r"cannot be read .no such file"):
        load_recording(path)
    path.write_bytes(b"\x80\x04K\x01.")  # a pickle
    with pytest.raises(UmemError, match=r"not an \.npz archive, so this is not a profile"):
        load_recording(path)


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
    save_recording(small_recording(), path)
    before = path.read_bytes()
    bad = replace(
        small_recording(),
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
        save_recording(small_recording(), path)
    assert list(tmp_path.iterdir()) == [path]
