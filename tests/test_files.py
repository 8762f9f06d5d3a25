"""Files replaced in one piece and read within bounds; columns and JSON from strangers."""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import os
import pickle
import re
import stat
import time
import tracemalloc
import zipfile
from functools import partial
from gzip import compress as gzip_compress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field

from umem.core.errors import TraceError
from umem.io import columns as columns_module
from umem.io.columns import (
    MAX_VALUES,
    Header,
    Model,
    is_archive,
    read_columns,
    read_json,
    write_columns,
)
from umem.io.files import begins_with, read_file, replace_file

compress = partial(gzip_compress, mtime=0)
LIMIT = 1000


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Replacing.


def test_a_file_is_made_with_its_folders_and_then_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "c.bin"
    replace_file(path, b"old")
    replace_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert names_in(path.parent) == ["c.bin"]


def test_a_new_file_has_the_usual_mode(tmp_path: Path) -> None:
    usual = tmp_path / "usual"
    usual.touch()
    replace_file(tmp_path / "ours", b"")
    assert stat.S_IMODE((tmp_path / "ours").stat().st_mode) == stat.S_IMODE(usual.stat().st_mode)


def test_a_name_of_the_longest_length_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 255)
    replace_file(path, b"x")
    assert path.read_bytes() == b"x"


def test_a_symbolic_link_stays_and_its_target_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    replace_file(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_bytes() == b"new"


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failure_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    path = tmp_path / "kept"
    path.write_bytes(b"old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(OSError, match="No space"):
        replace_file(path, b"new")
    monkeypatch.undo()

    assert path.read_bytes() == b"old"
    assert names_in(tmp_path) == ["kept"]


def test_only_regular_files_are_replaced(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        replace_file(tmp_path, b"")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="Not a regular file"):
        replace_file(tmp_path / "pipe", b"")
    assert names_in(tmp_path) == ["pipe"]


# Reading.


def test_plain_and_compressed_files_are_read(tmp_path: Path) -> None:
    for content in (b"plain", compress(b"plain")):
        (tmp_path / "f").write_bytes(content)
        assert read_file(tmp_path / "f", LIMIT) == b"plain"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"x" * (LIMIT + 1), "larger than 1000 B"),
        (compress(b"x" * (LIMIT + 1)), "larger than 1000 B when decompressed"),
        (compress(b"plain")[:-1], "ends too early"),
        (compress(b"plain")[:12], "ends too early"),
        (compress(b"plain") + b"junk", "bytes follow the end"),
        (compress(b"plain") * 2, "bytes follow the end"),
        (b"\x1f\x8bnot gzip at all", "damaged"),
        (compress(b"plain")[:-8] + bytes(8), "damaged"),
    ],
)
def test_damaged_and_large_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_file(tmp_path / "f", LIMIT)


def test_content_of_just_the_limit_is_read(tmp_path: Path) -> None:
    for content in (b"x" * LIMIT, compress(b"x" * LIMIT)):
        (tmp_path / "f").write_bytes(content)
        assert len(read_file(tmp_path / "f", LIMIT)) == LIMIT


def test_reading_a_pipe_does_not_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="Not a regular file"):
        read_file(tmp_path / "pipe", LIMIT)
    with pytest.raises(IsADirectoryError):
        read_file(tmp_path, LIMIT)
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "none", LIMIT)
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "none", "a\0b"):
        assert not begins_with(path, b"P")


# Columns.


class Names(Header):
    """A header with texts."""

    format: str = "umem-trace/3"
    names: list[str]


DTYPES: dict[str, Any] = {"sizes": np.int64, "kept": np.bool_, "empty": np.uint8}
COLUMNS = {
    "sizes": np.array([1, -(2**63), 2**63 - 1]),
    "kept": np.array([True, False]),
    "empty": np.zeros(0, np.uint8),
}


def write(path: Path) -> None:
    write_columns(path, Names, {"names": ["ü\u2028", "x\ny"]}, COLUMNS, error=TraceError)


def read(path: Path | str) -> tuple[Names, dict[str, Any]]:
    return read_columns(path, Names, DTYPES, noun="a trace", error=TraceError, optional=("empty",))


def test_columns_come_back_unchanged(tmp_path: Path) -> None:
    write(tmp_path / "f")
    header, columns = read(tmp_path / "f")
    assert header == Names(names=["ü\u2028", "x\ny"])
    assert list(columns) == list(DTYPES)
    for key, column in columns.items():
        assert column.dtype == DTYPES[key]
        assert column.tolist() == COLUMNS[key].tolist()
        assert not column.flags.writeable
    assert is_archive(tmp_path / "f")
    with np.load(tmp_path / "f") as archive:  # as anybody may
        assert json.loads(archive["header"].tobytes()) == header.model_dump()
        assert archive["sizes"].tolist() == COLUMNS["sizes"].tolist()


def test_equal_columns_give_equal_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a")
    monkeypatch.setattr(time, "time", lambda: 2e9)
    write(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def npy(column: Any) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, column)
    return stream.getvalue()


HEADER = npy(np.frombuffer(b'{"format": "umem-trace/3", "names": []}', np.uint8))
GOOD = {"header": HEADER, "sizes": npy(COLUMNS["sizes"]), "kept": npy(COLUMNS["kept"])}
LYING = GOOD["sizes"].replace(b"(3,)", b"(3333333333333,)").replace(b" " * 12 + b"\n", b"\n")
PICKLE = npy(np.array([1]))[:8] + b"".join(
    [b"\x36\x00", b"{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", pickle.dumps([1])]
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"header": None}, "header: missing: give a file that umem wrote"),
        ({"header": npy(np.zeros(3))}, "header: of float64; make it uint8"),
        ({"header": npy(np.zeros(3, np.uint8))}, "header: not valid JSON"),
        ({"sizes": None}, "sizes: missing"),
        ({"sizes": b"not NumPy"}, "sizes: not a column"),
        ({"sizes": npy(np.zeros(3))}, "sizes: of float64; make it int64"),
        ({"sizes": npy(np.zeros(3, ">i8"))}, "sizes: of >i8; make it int64"),
        ({"sizes": npy(np.zeros((3, 1), np.int64))}, "sizes: not a column"),
        ({"sizes": npy(np.array(7))}, "sizes: not a column"),
        ({"sizes": GOOD["sizes"][:-1]}, "sizes: damaged: copy the file again"),
        ({"sizes": LYING}, "sizes: damaged"),
        ({"sizes": PICKLE}, "sizes: damaged"),
        ({"kept": npy(np.array([2], np.uint8).view(np.bool_))}, "kept: bytes other than 0 and 1"),
        ({"size": npy(np.zeros(1))}, r"'size': unknown column, did you mean 'sizes'\?"),
        (
            {"\x1b[2J" * 99: npy(np.zeros(1))},
            r"'\\x1b.*unknown column. Valid columns: sizes, kept, empty",
        ),
    ],
)
def test_bad_members_are_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "f"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in (GOOD | change).items():
            if content is not None:
                archive.writestr(f"{name}.npy", content)
    with pytest.raises(TraceError, match=message) as info:
        read(path)
    assert str(info.value).startswith(f"{path}: ")
    assert len(str(info.value)) < 400


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "/f: the file is empty: give a file of umem-trace/3"),
        (b"x", "not an .npz archive, so this is not a trace: give a file of umem-trace/3"),
        (b'{"format": "umem-trace/2"}', "not an .npz archive.* older umem"),
        (b"PK\3\4 nothing else", "damaged, or ends too early: copy the file again"),
        (b"x" * 2000, "larger than 1000 B"),
    ],
)
def test_files_that_are_no_archives_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, message: str
) -> None:
    monkeypatch.setattr(columns_module, "MAX_FILE_BYTES", 1000)
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(TraceError, match=message):
        read(tmp_path / "f")


def test_a_member_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "f", "w") as archive:
        archive.writestr("header.npy", HEADER)
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("header.npy", HEADER)
    with pytest.raises(TraceError, match="members twice"):
        read(tmp_path / "f")


@pytest.fixture
def bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small archive with a column of 33 MiB, where 32 MiB are allowed."""
    monkeypatch.setattr(columns_module, "MAX_FILE_BYTES", 2**20)
    monkeypatch.setattr(columns_module, "MAX_COLUMN_BYTES", 32 * 2**20)
    path = tmp_path / "bomb"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("header.npy", HEADER)
        archive.writestr("sizes.npy", bytes(33 * 2**20))
    assert path.stat().st_size < 2**18
    return path


def test_a_bomb_is_refused_before_it_is_unpacked(bomb: Path) -> None:
    with pytest.raises(TraceError, match=r"bomb: 33 MiB when decompressed: .* at most 32 MiB"):
        read(bomb)


def test_a_bomb_that_declares_another_size_is_unpacked_no_further(bomb: Path) -> None:
    content = bomb.read_bytes()
    size_at = content.rindex(b"PK\1\2") + 24
    bomb.write_bytes(content[:size_at] + (1000).to_bytes(4, "little") + content[size_at + 4 :])
    tracemalloc.start()
    try:
        with pytest.raises(TraceError, match="sizes: damaged"):
            read(bomb)
        assert tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()


@pytest.mark.slow
@settings(deadline=None)
@given(st.data())
def test_damage_anywhere_is_a_trace_error_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged"
    write(path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    with contextlib.suppress(TraceError):
        _, columns = read(path)
        assert columns["sizes"].tolist() == COLUMNS["sizes"].tolist()


def test_unreadable_files_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = (("MAX_COLUMN_BYTES", "100 B"), ("MAX_FILE_BYTES", "100 B"), ("MAX_VALUES", "3 val"))
    for bound, words in bounds:
        with monkeypatch.context() as patch:
            patch.setattr(columns_module, bound, int(words.split()[0]))
            with pytest.raises(TraceError, match=f"f: not written: .*{words}"):
                write_columns(
                    tmp_path / "f",
                    Names,
                    {"names": ["a", "b", "c", "d"]},
                    {"sizes": np.arange(1000)},
                    error=TraceError,
                )
    assert names_in(tmp_path) == []


def test_paths_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    cases: list[tuple[Path, str]] = [
        (tmp_path / "none.npz", "no such file or directory"),
        (tmp_path, "is a directory"),
        (tmp_path / "f" / "under", "not a directory"),
    ]
    (tmp_path / "f").touch()
    for path, reason in cases:
        message = rf"{re.escape(str(path))}: cannot be read \({reason}\): check the path"
        with pytest.raises(TraceError, match=message):
            read(path)
        with pytest.raises(TraceError, match=message):
            read_document(path)
    with pytest.raises(TraceError, match=r"f/under: cannot be written \(.*\): check the path"):
        write(tmp_path / "f" / "under")
    with pytest.raises(TraceError, match="null"):
        read("a\0b")


# Plain JSON.


class Phase(Model):
    """An inner object."""

    reads: list[int]
    duration: float = Field(alias="duration_us", ge=0)


class Document(Model):
    """An outer object."""

    format: str = ""
    phases: list[Phase] = Field(default_factory=list)
    name: str = ""


def read_document(path: Path, readable: tuple[str, ...] = ()) -> Document:
    return read_json(path, Document, noun="a trace", error=TraceError, readable=readable)


def test_json_is_read_plain_and_compressed(tmp_path: Path) -> None:
    text = '{"phases": [{"reads": [1], "duration_us": 5e-324}], "name": "ü\u2028"}'.encode()
    for content in (text, compress(text), codecs.BOM_UTF8 + text):
        (tmp_path / "f").write_bytes(content)
        document = read_document(tmp_path / "f")
        assert document.phases[0].model_dump() == {"reads": [1], "duration": 5e-324}
        assert document.name == "ü\u2028"
        assert not is_archive(tmp_path / "f")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "/f: the file is empty: give a file that umem wrote"),
        (b"x", r"/f: not valid JSON \(expected value at line 1 column 1\): give a file that umem"),
        (b'{"a": 1,\n"b" 2}', "not valid JSON .* at line 2 column 5"),
        (b'{"name": ""} x', "not valid JSON"),
        (b"\x80\x02binary", "not valid JSON"),
        (b'{"name": "\xff"}', "not valid JSON"),
        (b'{"phases":' + b"[" * 100_000, "not valid JSON .recursion limit"),
        (b'{"phases": [{"reads": [], "duration_us": NaN}]}', "duration_us: nan: .* finite"),
        (b'{"phases": [{"reads": [' + b"9" * 5000 + b"]}]}", "number out of range"),
        (b"[1]", r"\[1\] is not a mapping"),
        (b"null", "null is not a mapping"),
    ],
)
def test_files_of_anything_but_one_json_object_are_refused(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "f"
    for written in (content, compress(content)):
        path.write_bytes(written)
        with pytest.raises(TraceError, match=message) as info:
            read_document(path)
        assert str(info.value).startswith(str(path))
        assert len(str(info.value)) < 400


def test_a_json_bomb_is_refused_before_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns_module, "MAX_FILE_BYTES", 2**20)
    (tmp_path / "bomb").write_bytes(compress(b"0" * 2**24))
    with pytest.raises(TraceError, match="bomb: larger than 1 MiB when decompressed"):
        read_document(tmp_path / "bomb")


@pytest.mark.slow
def test_millions_of_empty_lists_are_refused_before_they_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f").write_bytes(compress(b'{"a":[' + b"[]," * (MAX_VALUES // 2) + b"0]}"))
    monkeypatch.setattr(Document, "model_validate_json", lambda _: pytest.fail("parsed"))
    with pytest.raises(TraceError, match=f"more than {MAX_VALUES} values"):
        read_document(tmp_path / "f")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"phases": [{"reads": [], "duration_us": 1, "read": 1}]}',
            r"phases\[0\]\.read: unknown key, did you .* Valid keys: reads, duration_us",
        ),
        ('{"phases": [{"duration_us": 1}]}', r"phases\[0\]\.reads: missing: add the key"),
        ('{"nam": 1}', r"nam: unknown key, did you mean 'name'\? Valid keys: format, phases, name"),
        ('{"phases": [{"reads": [true], "duration_us": 1}]}', r"phases\[0\]\.reads\[0\]: true: "),
        ('{"phases": [{"reads": [1.0], "duration_us": 1}]}', r"phases\[0\]\.reads\[0\]: 1.0: "),
        ('{"phases": [{"reads": [], "duration_us": -1}]}', r"duration_us: -1: .* equal to 0"),
        ('{"phases": [{"reads": [], "duration_us": 1e999}]}', r"duration_us: inf: .* finite"),
        ('{"phases": {}}', "phases: {}: "),
        ('{"name": "\\ud800"}', "hex escape"),
        (json.dumps({"\x1b[2J" * 1000: 1}), "unknown key"),
    ],
)
def test_a_model_names_the_place(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "f"
    path.write_text(text)
    with pytest.raises(TraceError, match=message) as info:
        read_document(path)
    assert str(info.value).startswith(f"{path}: ")
    assert str(info.value).isprintable()
    assert len(str(info.value)) < 400


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (None, "format: missing, so this is not a trace: give a file of umem-trace/1 or"),
        ("umem-trace/9", r"umem-trace/9 is of a newer umem; umem \S+ reads umem-trace/1 and"),
        ("umem-trace/2", r"umem-trace/2 is of an older umem; .* make the file again"),
        ("umem-plan/1", "'umem-plan/1' is not a trace: give a file of"),
        (["umem-trace/1"], r"\['umem-trace/1'\] is not a trace"),
        (True, "true is not a trace"),
    ],
)
def test_other_formats_are_refused(tmp_path: Path, said: object, message: str) -> None:
    readable = ("umem-trace/1", "umem-trace/3")
    (tmp_path / "f").write_text(json.dumps({} if said is None else {"format": said}))
    with pytest.raises(TraceError, match=message):
        read_document(tmp_path / "f", readable)
    for known in readable:
        (tmp_path / "f").write_text(json.dumps({"format": known}))
        assert read_document(tmp_path / "f", readable).format == known
