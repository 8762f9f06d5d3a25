"""Saved profiles: exact, and safe to read from strangers."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from archives import contents
from recordings import records_of
from small_files import small_recording

from umem.core.errors import UmemError
from umem.core.report import Source
from umem.telemetry import Recording, load_recording, save_recording
from umem.telemetry.file import PROFILE_COLUMNS, ProfileHeader
from umem.telemetry.records import MigrationRecords, NamedRange, Residency, Shares, no_shares

DOCS = Path(__file__).resolve().parents[1] / "docs" / "trace-format.md"


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


EVERYTHING = replace(
    small_recording(),
    records=records_of(
        [(0, 10, 2**42, -(2**63), 2**40, 0, 2, 0, 0), (3, 15, 15, 2**63 - 1, 0, 2**20, 0, 4, 255)]
    ),
    tensor_names=("gewicht ü\u2028", ""),
    tensor=np.array([1, -1], np.int32),
    duration_ns=2**42,
    phases=(NamedRange("forward", 1, 6), NamedRange("", 6, 6)),
    dropped=2**40,
    notes=("by hand", "\n"),
)
"""Each column and key, with its largest values."""


@pytest.mark.parametrize(
    "recording",
    [
        EVERYTHING,
        replace(EVERYTHING, hints=(), residency=None, ideal_s=None, shares=no_shares()),
        replace(
            EVERYTHING,
            records=records_of([]),
            tensor_class=np.zeros(0, np.int8),
            tensor=np.zeros(0, np.int32),
            step_start_ns=np.zeros(0, np.int64),
            step_end_ns=np.zeros(0, np.int64),
            hints=(None,),
            shares=no_shares(),
        ),
        *(replace(EVERYTHING, source=source) for source in get_args(Source)),
    ],
)
def test_a_recording_comes_back_exactly(tmp_path: Path, recording: Recording) -> None:
    path = tmp_path / "run.npz"
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


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ((0, 10, 2**60, 4096, 64, 0, 2, 0, 0), "end_ns[0]"),
        ((3, 10, 20, 4096, 0, 2**60, 0, 0, 0), "faults[0]"),
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
