"""Traces of known models in the user's cache folder: found again, and private to the user."""

from __future__ import annotations

import json
import os
import shutil
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import Run
from fingerprints import trace_fingerprint

from umem.capture.offline.trace_cache import cache_trace, cached_trace
from umem.io.cache import keep_newest, private_folder
from umem.trace import Trace, load_trace

ARGUMENTS: dict[str, str | int] = {"model": "llama-tiny", "mode": "sft", "batch": 1}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def trace(make_trace: Any) -> Trace:
    made = make_trace({"w": (4096, "weights")}, [(1e-3, ["w"], [])])
    return replace(made, metadata=ARGUMENTS | {"parameters": 3})


def files(home: Path) -> list[Path]:
    return sorted((home / "umem" / "traces").iterdir())


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_a_trace_is_found_again(home: Path, trace: Trace) -> None:
    assert cached_trace(ARGUMENTS) is None
    cache_trace(trace, ARGUMENTS)
    found = cached_trace(ARGUMENTS)
    assert found is not None
    assert trace_fingerprint(found) == trace_fingerprint(trace)
    assert cached_trace(ARGUMENTS | {"batch": 2}) is None


def test_nobody_else_may_read_it(home: Path, trace: Trace) -> None:
    before = os.umask(0)
    try:
        cache_trace(trace, ARGUMENTS)
    finally:
        os.umask(before)
    (file,) = files(home)
    assert (mode(home / "umem"), mode(file.parent), mode(file)) == (0o700, 0o700, 0o600)


def test_a_folder_that_others_may_enter_is_closed(home: Path) -> None:
    (home / "umem" / "traces").mkdir(parents=True)
    (home / "umem").chmod(0o777)
    assert private_folder("traces") == home / "umem" / "traces"
    assert mode(home / "umem") == 0o700


@pytest.mark.parametrize("part", ["umem", "umem/traces"])
def test_a_link_in_place_of_a_folder_is_not_followed(
    home: Path, trace: Trace, part: str, tmp_path: Path
) -> None:
    target = tmp_path / "elsewhere"
    target.mkdir()
    (home / part).parent.mkdir(parents=True)
    (home / part).symlink_to(target)
    cache_trace(trace, ARGUMENTS)
    assert cached_trace(ARGUMENTS) is None
    assert list(target.iterdir()) == []


def test_a_link_in_place_of_a_file_is_not_followed(home: Path, trace: Trace) -> None:
    cache_trace(trace, ARGUMENTS)
    (file,) = files(home)
    file.rename(home / "moved.npz")
    file.symlink_to(home / "moved.npz")
    assert cached_trace(ARGUMENTS) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a folder to another user")
def test_a_folder_of_another_user_is_not_used(home: Path, trace: Trace) -> None:
    (home / "umem").mkdir(parents=True)
    os.chown(home / "umem", 12345, 12345)
    cache_trace(trace, ARGUMENTS)
    assert list((home / "umem").iterdir()) == []


def test_a_damaged_file_is_replaced(home: Path, trace: Trace) -> None:
    cache_trace(trace, ARGUMENTS)
    (file,) = files(home)
    file.write_bytes(file.read_bytes()[:-10])
    assert cached_trace(ARGUMENTS) is None
    cache_trace(trace, ARGUMENTS)
    assert cached_trace(ARGUMENTS) is not None


def test_a_file_under_the_name_of_another_is_not_taken(home: Path, trace: Trace) -> None:
    cache_trace(trace, ARGUMENTS)
    (file,) = files(home)
    other = ARGUMENTS | {"batch": 2}
    cache_trace(trace, other)
    (name,) = {path.name for path in files(home)} - {file.name}
    shutil.copy(file, file.with_name(name))
    assert cached_trace(other) is None


def test_the_sources_of_the_recording_count(
    home: Path, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They change in a checkout, where the version stays."""
    cache_trace(trace, ARGUMENTS)
    monkeypatch.setattr("umem.capture.offline.trace_cache._RECORDING", ("capture",))
    assert cached_trace(ARGUMENTS) is None


def test_a_place_that_cannot_be_written_is_done_without(
    tmp_path: Path, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    cache_trace(trace, ARGUMENTS)
    assert cached_trace(ARGUMENTS) is None


def test_the_newest_files_stay(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"{number}").touch()
        os.utime(tmp_path / f"{number}", (number, number))
    keep_newest(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4"]


@pytest.mark.slow
def test_a_model_its_cached_trace_and_its_file_give_the_same_answer(
    home: Path, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    words = ("--model", "llama-tiny", "--mode", "sft", "--batch", "1", "--seq", "64")
    file = tmp_path / "tiny.npz"
    assert run("trace", *words, "--output", file)[0] == 0
    (cached,) = files(home)
    assert trace_fingerprint(load_trace(cached)) == trace_fingerprint(load_trace(file))

    def cannot_record(*_: object, **__: object) -> None:
        raise AssertionError("recorded twice")

    monkeypatch.setattr("umem.capture.offline.model_trace", cannot_record)
    answers = []
    for source in (words, ("--trace", file)):
        status, text, _ = run("simulate", *source, "--json")
        assert status == 0
        answers.append(json.loads(text))
    assert answers[0] == answers[1]
    assert {row["policy"] for row in answers[0]["results"]} == {"managed"}
