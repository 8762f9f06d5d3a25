"""Saved profiles: exact, and safe to read from strangers."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from small_files import small_run

from umem.core.errors import UmemError
from umem.telemetry import MeasuredRun, load_run, save_run


@pytest.fixture
def run(tmp_path: Path) -> MeasuredRun:
    (tmp_path / "small.json").write_text(json.dumps(small_run()))
    return load_run(tmp_path / "small.json")


def test_a_run_comes_back_exactly(tmp_path: Path, run: MeasuredRun) -> None:
    path = tmp_path / "run.json"
    whole = replace(run, step_start_s=(), steps=run.steps[:1])
    for one in (run, replace(run, residency=None), whole):
        save_run(one, path)
        again = load_run(path)
        assert asdict(replace(again, residency=None)) == asdict(replace(one, residency=None))
        if one.residency is not None:
            assert again.residency is not None
            assert again.residency.time_ns.tolist() == one.residency.time_ns.tolist()
            np.testing.assert_array_equal(
                again.residency.resident_bytes, one.residency.resident_bytes
            )
        before = path.read_bytes()
        save_run(again, path)
        assert path.read_bytes() == before


_SQLITE = b"SQLite format 3\0"
"""How an export of Nsight Systems begins."""


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    with pytest.raises(UmemError, match=r"cannot be read .no such file"):
        load_run(path)
    path.write_bytes(b"\x80\x04K\x01.")  # a pickle
    with pytest.raises(UmemError, match="not valid JSON"):
        load_run(path)
    for name, content in [("run.sqlite", b""), ("run.nsys-rep", b"\0NSYS"), ("run", _SQLITE)]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UmemError, match=rf"{name}: .*Nsight Systems.*umem\.profile"):
            load_run(tmp_path / name)
    with path.open("wb") as file:  # as profiles of before were
        np.savez(file, header=np.zeros(1, np.uint8))
    with pytest.raises(UmemError, match=r"trace or a profile of an older umem; .* umem-profile/5"):
        load_run(path)


def test_an_invalid_run_is_not_saved(tmp_path: Path, run: MeasuredRun) -> None:
    path = tmp_path / "run.json"
    save_run(run, path)
    before = path.read_bytes()
    with pytest.raises(UmemError) as caught:
        save_run(replace(run, dropped=2**60), path)
    assert str(caught.value).startswith(f"{path}: not written: dropped")
    assert path.read_bytes() == before


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, run: MeasuredRun) -> None:
    path = tmp_path / "run.json"
    path.mkdir()
    with pytest.raises(UmemError, match="cannot be written"):
        save_run(run, path)
    assert path.is_dir()
