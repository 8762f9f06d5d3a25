"""Files replaced in one piece and read within bounds; documents of strangers."""

from __future__ import annotations

import gzip
import json
import os
import re
import stat
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from umem.core.errors import TraceError
from umem.io import documents
from umem.io.documents import (
    Document,
    digits,
    digits_text,
    integers,
    numbers,
    read_document,
    require_format,
    require_keys,
    texts,
    write_document,
)
from umem.io.files import compress, read_file, replace_file

LIMIT = 1000


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ------------------------------------------------------------------------------- replacing


def test_a_file_is_made_with_its_folders_and_then_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "c.bin"
    replace_file(path, b"old")
    replace_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert names_in(path.parent) == ["c.bin"]


def test_the_mode_is_that_of_any_new_file(tmp_path: Path) -> None:
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


# --------------------------------------------------------------------------------- reading


def test_compressed_and_plain_content_is_read(tmp_path: Path) -> None:
    for content in (b"plain", compress(b"plain"), gzip.compress(b"plain")):
        (tmp_path / "f").write_bytes(content)
        assert read_file(tmp_path / "f", LIMIT) == b"plain"


def test_compression_knows_no_time_of_day(monkeypatch: pytest.MonkeyPatch) -> None:
    before = compress(b"content" * 100)
    monkeypatch.setattr(time, "time", lambda: 1e9)
    assert compress(b"content" * 100) == before
    assert before[4:8] == bytes(4)  # RFC 1952: MTIME


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


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="Not a regular file"):
        read_file(tmp_path / "pipe", LIMIT)
    with pytest.raises(IsADirectoryError):
        read_file(tmp_path, LIMIT)
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "none", LIMIT)


# ------------------------------------------------------------------------------- documents


def test_a_document_comes_back_as_it_was(tmp_path: Path) -> None:
    data = {"a": [1, 0.1, 5e-324, -0.0, 1e308], "b": {"ü\u2028": None}, "c": "x\ny", "d": True}
    write_document(data, tmp_path / "f", TraceError)
    back = read_document(tmp_path / "f", TraceError).data
    assert json.dumps(back) == json.dumps(data)
    assert read_file(tmp_path / "f", LIMIT).startswith(b'{\n"a":[1,0.1,5e-324,-0.0,1e+308],\n')


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"/f:1:1: not valid JSON \(Expecting value\): give a file that umem wrote"),
        (b'{"a": 1,\n"b" 2}', r"/f:2:5: not valid JSON"),
        (b'{"a": 1} x', "not valid JSON"),
        (b"\x80\x02binary", "neither gzip nor UTF-8 text"),
        (b'{"a": "\xff"}', "neither gzip nor UTF-8 text"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"a": NaN}', "NaN is no number in JSON"),
        (b'{"a": [-Infinity]}', "-Infinity is no number in JSON"),
        (b'{"a": 1, "b": 2, "a": 3}', "the key 'a' is there twice"),
        (b'{"a": [{"x": 1, "x": 1}]}', "the key 'x' is there twice"),
        (b'{"a": ' + b"9" * 5000 + b"}", "Exceeds the limit"),
        (b"[1]", "holds a list: a file of umem holds one JSON object"),
        (b"null", "holds null"),
    ],
)
def test_what_is_no_strict_document_is_refused(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "f"
    for written in (content, compress(content)):
        path.write_bytes(written)
        with pytest.raises(TraceError, match=message) as info:
            read_document(path, TraceError)
        assert str(info.value).startswith(str(path))
        assert len(str(info.value)) < 400


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    stream = zlib.compressobj(9, wbits=31)
    zeros = b"0" * 2**20
    bomb = b"".join(stream.compress(zeros) for _ in range(200)) + stream.flush()
    (tmp_path / "bomb").write_bytes(bomb)
    assert len(bomb) < 2**20
    with pytest.raises(TraceError, match="bomb: larger than 128 MiB when decompressed"):
        read_document(tmp_path / "bomb", TraceError)


def test_millions_of_empty_lists_are_refused_before_they_are_made(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(
        compress(b'{"a":[' + b"[]," * (documents.MAX_VALUES // 2) + b"0]}")
    )
    before = time.process_time()
    with pytest.raises(TraceError, match=f"more than {documents.MAX_VALUES} values"):
        read_document(tmp_path / "f", TraceError)
    assert time.process_time() - before < 2


def test_what_could_not_be_read_again_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "MAX_VALUES", 10)
    with pytest.raises(TraceError, match="f: not written: more than 10 values"):
        write_document({"a": [0] * 12}, tmp_path / "f", TraceError)
    monkeypatch.setattr(documents, "MAX_CONTENT_BYTES", 10)
    with pytest.raises(TraceError, match="f: not written: larger than 10 B"):
        write_document({"a": "long enough"}, tmp_path / "f", TraceError)
    assert names_in(tmp_path) == []


def test_unreadable_and_unwritable_paths_are_named(tmp_path: Path) -> None:
    cases: list[tuple[Path, str]] = [
        (tmp_path / "none.json", "no such file or directory"),
        (tmp_path, "is a directory"),
        (tmp_path / "f" / "under", "not a directory"),
    ]
    (tmp_path / "f").touch()
    for path, reason in cases:
        message = rf"{re.escape(str(path))}: cannot be read \({reason}\): check the path"
        with pytest.raises(TraceError, match=message):
            read_document(path, TraceError)
    with pytest.raises(TraceError, match=r"f/under: cannot be written \(.*\): check the path"):
        write_document({}, tmp_path / "f" / "under", TraceError)
    with pytest.raises(TraceError, match="null"):
        read_document("a\0b", TraceError)


# -------------------------------------------------------------------- what a document holds


def document(**data: object) -> Document:
    return Document("f.json", TraceError, data)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (None, "format: missing, so this is not a trace: give a file of umem-trace/1 and"),
        ("umem-trace/9", r"umem-trace/9 comes from a newer umem; umem \S+ reads umem-trace/1 and"),
        ("umem-plan/1", "'umem-plan/1' is not a trace: give a file of"),
        ("umem-trace/0", "'umem-trace/0' is not a trace"),
        (["umem-trace/1"], "a list is not a trace"),
        (True, "true is not a trace"),
    ],
)
def test_other_formats_are_refused(said: object, message: str) -> None:
    made = document() if said is None else document(format=said)
    with pytest.raises(TraceError, match=message):
        require_format(made, "a trace", ("umem-trace/1", "umem-trace/2"))


def test_known_formats_are_told_apart() -> None:
    formats = ("umem-trace/1", "umem-trace/2")
    for said in formats:
        assert require_format(document(format=said), "a trace", formats) == said


def test_keys_are_exactly_these() -> None:
    made = document()
    require_keys(made, "p[1]", {"reads": 1, "writes": 2}, ("reads",), ("writes",))
    with pytest.raises(TraceError, match=r"p\[1\]\.read: unknown key, did you mean 'reads'\?"):
        require_keys(made, "p[1]", {"read": 1, "writes": 2}, ("reads", "writes"))
    with pytest.raises(TraceError, match=r"f.json: zzz: unknown key. Valid keys: reads, writes"):
        require_keys(made, "", {"zzz": 1}, ("reads",), ("writes",))
    with pytest.raises(TraceError, match=r"p\[1\]\.reads: missing: add the key"):
        require_keys(made, "p[1]", {}, ("reads",))
    with pytest.raises(TraceError, match=r"p\[1\]: 5 is not an object of reads"):
        require_keys(made, "p[1]", 5, ("reads",))
    with pytest.raises(TraceError) as info:
        require_keys(made, "", {"\x1b[2J" * 1000: 1}, ("reads",))
    assert str(info.value).isprintable()
    assert len(str(info.value)) < 200


Column = Callable[[Document, str, int], object]


def int32(made: Document, key: str, most: int) -> npt.NDArray[np.int32]:
    return integers(made, key, most, np.int32)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        (int32, [1, True], r"x\[1\]: true is not an integer"),
        (int32, [1.0], r"x\[0\]: 1.0 is not an integer"),
        (int32, ["1"], r"x\[0\]: '1' is not an integer"),
        (int32, [0, None], r"x\[1\]: null is not an integer"),
        (int32, [0, [1]], r"x\[1\]: a list is not an integer"),
        (int32, [0, 2**31], r"x\[1\]: 2147483648 is not from -2147483648 to 2147483647"),
        (int32, [0, 10**400], r"x\[1\]: 1000000\S* is not from"),
        (int32, {"a": 1}, "x: an object is not a list"),
        (int32, [0] * 5, "x: 5 entries: at most 4 are read"),
        (numbers, [1, False], r"x\[1\]: false is not a number"),
        (numbers, [1, 10**400], r"x\[1\]: 1000000\S* does not fit a 64-bit float"),
        (numbers, "1", "x: '1' is not a list"),
        (texts, ["a", 1], r"x\[1\]: 1 is not text"),
        (digits, "01a", r"x\[2\]: 'a' is not a digit from 0 to 9"),
        (digits, "0\n", r"x\[1\]: '\\n' is not a digit from 0 to 9"),
        (digits, "٣", r"x\[0\]: '٣' is not a digit"),
        (digits, [0, 1], "x: a list is not text"),
        (digits, "00000", "x: 5 digits: at most 4 are read"),
    ],
)
def test_columns_hold_what_they_should(column: Column, value: object, message: str) -> None:
    with pytest.raises(TraceError, match=f"^f.json: {message}"):
        column(document(x=value), "x", 4)


def test_columns_come_back() -> None:
    made = document(i=[1, -(2**31)], n=[1, 0.5, 10**20], d="0193", e="", t=["a"])
    assert int32(made, "i", 4).tolist() == [1, -(2**31)]
    assert numbers(made, "n", 4).tolist() == [1.0, 0.5, 1e20]
    assert digits(made, "d", 4).tolist() == [0, 1, 9, 3]
    assert digits_text(digits(made, "d", 4)) == "0193"
    assert len(digits(made, "e", 4)) == 0
    assert texts(made, "t", 4) == ("a",)
