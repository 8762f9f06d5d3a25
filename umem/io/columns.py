"""Files of NumPy columns with a JSON header, and plain JSON files, checked against models.

A file of columns is an ``.npz`` archive, which ``numpy.load`` reads too. Its member ``header``
holds JSON in UTF-8, and each other member one column of numbers.
"""

from __future__ import annotations

import codecs
import dataclasses
import io
import json
import os
import re
import zipfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, FailFast, ValidationError

from umem._version import __version__
from umem.core.errors import UmemError
from umem.core.units import format_bytes
from umem.io.files import begins_with, read_file, unreadable, write_file
from umem.io.problems import Problem, did_you_mean, dotted, message_of, shown

__all__ = [
    "MAX_VALUES",
    "Checker",
    "Header",
    "Items",
    "Model",
    "is_archive",
    "read_columns",
    "read_json",
    "write_columns",
]

MAX_FILE_BYTES = 128 * 2**20
"""Largest file, and largest JSON text in it."""

MAX_COLUMN_BYTES = 512 * 2**20
"""Largest size of all members of a file together, decompressed."""

MAX_VALUES = 2**24
"""Most commas and opening brackets in JSON text, and so most values: a file can name millions of
empty lists in few bytes, and each takes a hundred times the memory."""


_Item = TypeVar("_Item")
Items = Annotated[list[_Item], FailFast()]
"""List in a model. Its validation ends at the first bad item: a file may hold millions of them."""

Columns = Mapping[str, npt.NDArray[Any]]

_MAGIC = b"PK"
_HEADER = "header"
_SUFFIX = ".npy"
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # zipfile decompresses these within bounds


class Model(BaseModel):
    """Base of JSON objects in files: no unknown keys, no conversions, no infinite numbers."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class Header(Model):
    """Base of headers. A file's format has to be the default of `format`: ``umem-trace/3``."""

    format: str


class _Format(BaseModel):
    """What a file says that it is."""

    format: Any = None


_Model = TypeVar("_Model", bound=BaseModel)
_Header = TypeVar("_Header", bound=Header)


@dataclass(frozen=True)
class Checker:
    """Checks on the content of one file. Each error begins with the file and the place in it."""

    place: str
    """Path of the file, or another name of what is checked."""
    error: type[UmemError]

    def refuse(self, where: str, message: str) -> NoReturn:
        """Raise the error for a place in the file, such as ``phases[3].reads``.

        The place may hold a key of a stranger's: what acts on a terminal becomes an escape.
        """
        raise self.error(str(Problem(self.place, key=where, message=message)))

    def refuse_where(
        self, bad: npt.NDArray[np.bool_], key: str, message: Callable[[Any], str]
    ) -> None:
        """Raise the error for the first bad entry of a column; `message` gets its index."""
        if bad.any():
            index = int(bad.argmax())
            self.refuse(f"{key}[{index}]", message(index))

    def require_range(self, key: str, column: npt.NDArray[Any], low: float, high: float) -> None:
        """Refuse a column with a value that is not a number from `low` to `high`."""
        self.refuse_where(
            ~((column >= low) & (column <= high)),
            key,
            lambda index: f"{column[index]} is not from {low} to {high}",
        )

    def require_column(
        self, key: str, column: object, dtype: npt.DTypeLike, length: int | None = None
    ) -> None:
        """Refuse anything but a one-dimensional array of this type and length."""
        if not isinstance(column, np.ndarray) or column.ndim != 1:
            self.refuse(key, "not a column; give a one-dimensional NumPy array")
        if column.dtype != dtype:
            self.refuse(key, f"of {column.dtype}; make it {np.dtype(dtype)}")
        if length is not None and len(column) != length:
            self.refuse(key, f"{len(column)} entries; it takes {length}")

    def validate(self, model: type[_Model], text: bytes) -> _Model:
        """Make a model of JSON text; the error names the first key that is wrong."""
        if not text.strip():
            self.refuse("", "the file is empty: give a file that umem wrote")
        if len(text) > MAX_FILE_BYTES:
            self.refuse("", f"larger than {format_bytes(MAX_FILE_BYTES)}: no file of umem is")
        if sum(text.count(mark) for mark in b",[{") > MAX_VALUES:
            self.refuse("", f"more than {MAX_VALUES} values: no file of umem has as many")
        try:
            return model.model_validate_json(text)
        except ValidationError as problem:
            detail = problem.errors(include_url=False)[0]
            key, message = dotted(detail["loc"]), message_of(detail, model)
            said = Problem(self.place, key=key, message=message)
            raise self.error(str(said)) from None


def _check_format(said: object, noun: str, readable: Sequence[str], check: Checker) -> None:
    """Refuse a format, such as ``umem-trace/3``, that is none of the readable ones of a family."""
    if said in readable:
        return
    known = " and ".join(readable)
    family, newest = readable[-1].split("/")
    version = re.fullmatch(rf"{family}/([0-9]{{1,9}})", said) if isinstance(said, str) else None
    if version is None:
        what = "missing, so this" if said is None else shown(said)
        check.refuse("format", f"{what} is not {noun}: give a file of {' or '.join(readable)}")
    is_newer = int(version[1]) > int(newest)
    age, remedy = ("a newer", "upgrade umem") if is_newer else ("an older", "make the file again")
    check.refuse("format", f"{said} is of {age} umem; umem {__version__} reads {known}: {remedy}")


# Writing and reading files of columns.


def write_columns(
    path: str | os.PathLike[str],
    header_type: type[Header],
    header: Mapping[str, Any],
    columns: Columns,
    *,
    error: type[UmemError],
) -> None:
    """Write a header and columns as a compressed ``.npz`` archive, in one piece.

    Missing folders are made. Equal content gives equal bytes.

    Parameters
    ----------
    header
        Fields of `header_type` but `format`. Dataclasses are written as objects.
    columns
        One-dimensional arrays of numbers, by name.
    error
        Raised if the file could not be read again or cannot be written; an old file is then as it
        was.
    """
    check = Checker(f"{os.fspath(path)}: not written", error)
    data = {"format": header_type.model_fields["format"].default, **header}
    text = json.dumps(data, default=dataclasses.asdict, separators=(",", ":")).encode()
    check.validate(header_type, text)
    if sum(column.nbytes for column in columns.values()) + len(text) > MAX_COLUMN_BYTES:
        check.refuse("", f"columns of more than {format_bytes(MAX_COLUMN_BYTES)}")
    content = io.BytesIO()
    members: dict[str, Any] = {_HEADER: np.frombuffer(text, np.uint8), **columns}
    np.savez_compressed(content, **members)
    if len(content.getbuffer()) > MAX_FILE_BYTES:
        check.refuse("", f"larger than {format_bytes(MAX_FILE_BYTES)}")
    write_file(path, content.getvalue(), error)


def read_columns(
    path: str | os.PathLike[str],
    header_type: type[_Header],
    dtypes: Mapping[str, npt.DTypeLike],
    *,
    noun: str,
    error: type[UmemError],
    optional: Collection[str] = (),
) -> tuple[_Header, dict[str, npt.NDArray[Any]]]:
    """Read a file of :func:`write_columns`, which may come from a stranger.

    The sizes that members declare are checked before anything is decompressed, and nothing is ever
    unpickled.

    Parameters
    ----------
    dtypes
        Types of the columns, by name.
    noun
        Content of the file, such as ``a trace``.
    error
        Raised if the file cannot be read, is too large, damaged, or not such a file. The message
        names the file, the member and the remedy.
    optional
        Names of columns that may be missing.

    Returns
    -------
    header, columns
        Columns are read-only and one-dimensional, of the given types and any length.
    """
    check = Checker(os.fspath(path), error)
    known = header_type.model_fields["format"].default
    content = _content(path, check)
    if not content:
        check.refuse("", f"the file is empty: give a file of {known}")
    if not content.startswith(_MAGIC):
        remedy = f"give a file of {known}, or make it again if it is of an older umem"
        check.refuse("", f"not an .npz archive, so this is not {noun}: {remedy}")
    try:
        archive = np.load(io.BytesIO(content))  # unpickles nothing unless asked to
    except Exception as problem:
        raise error(f"{path}: damaged, or ends too early: copy the file again") from problem
    _check_sizes(archive.zip.infolist(), check)
    text = _column(archive, _HEADER, np.uint8, check).tobytes()
    found = Checker(f"{check.place}: {_HEADER}", error).validate(_Format, text)
    _check_format(found.format, noun, (known,), check)
    header = check.validate(header_type, text)
    for name in archive:
        if name not in dtypes and name != _HEADER:
            hint = did_you_mean(name, dtypes) or "."
            check.refuse(shown(name), f"unknown column{hint} Valid columns: {', '.join(dtypes)}")
    return header, {
        name: _column(archive, name, dtype, check)
        for name, dtype in dtypes.items()
        if name in archive or name not in optional
    }


def is_archive(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins like an ``.npz`` archive; False if it cannot be read."""
    return begins_with(path, _MAGIC)


def _content(path: str | os.PathLike[str], check: Checker) -> bytes:
    try:
        return read_file(path, MAX_FILE_BYTES)
    except (OSError, ValueError) as problem:
        raise check.error(f"{check.place}: {unreadable(problem)}") from problem


def _check_sizes(members: Sequence[zipfile.ZipInfo], check: Checker) -> None:
    size_bytes = sum(member.file_size for member in members)
    names = {member.filename.removesuffix(_SUFFIX) for member in members}
    if len(names) != len(members) or any(it.compress_type not in _METHODS for it in members):
        check.refuse("", "members twice, or not compressed by deflate: give a file that umem wrote")
    if size_bytes > MAX_COLUMN_BYTES:
        check.refuse(
            "",
            f"{format_bytes(size_bytes)} when decompressed: umem reads at most "
            f"{format_bytes(MAX_COLUMN_BYTES)}",
        )


def _column(
    archive: Mapping[str, object], name: str, dtype: npt.DTypeLike, check: Checker
) -> npt.NDArray[Any]:
    if name not in archive:
        check.refuse(name, "missing: give a file that umem wrote")
    try:
        column = archive[name]
    except Exception as problem:  # damage makes zipfile and NumPy raise many kinds
        raise check.error(f"{check.place}: {name}: damaged: copy the file again") from problem
    check.require_column(name, column, dtype)
    assert isinstance(column, np.ndarray)
    if dtype == np.bool_ and (column.view(np.uint8) > 1).any():
        check.refuse(name, "bytes other than 0 and 1; give a file that umem wrote")
    column.setflags(write=False)
    return column


# Plain JSON documents.


def read_json(
    path: str | os.PathLike[str],
    model: type[_Model],
    *,
    noun: str,
    error: type[UmemError],
    readable: Sequence[str] = (),
) -> _Model:
    """Read a file of one JSON object, plain or compressed with gzip. It may come from a stranger.

    Parameters
    ----------
    noun
        Content of the file, such as ``a trace``.
    error
        Raised if the file cannot be read, is too large, or is not such a file.
    readable
        Formats of one family that the key ``format`` may name, the newest last; none for a file
        without this key.
    """
    check = Checker(os.fspath(path), error)
    text = _content(path, check).removeprefix(codecs.BOM_UTF8)
    if readable:
        _check_format(check.validate(_Format, text).format, noun, readable, check)
    return check.validate(model, text)
