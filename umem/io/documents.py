"""Documents: files of one JSON object, compressed, with columns of numbers and text."""

from __future__ import annotations

import difflib
import json
import os
import re
import reprlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from umem._version import __version__
from umem.core.errors import UmemError
from umem.core.units import format_bytes
from umem.io.files import compress, read_file, replace_file

__all__ = [
    "MAX_CONTENT_BYTES",
    "MAX_VALUES",
    "Document",
    "digits",
    "digits_text",
    "integers",
    "items",
    "numbers",
    "read_document",
    "refuse",
    "require_format",
    "require_keys",
    "shown",
    "text",
    "texts",
    "write_document",
]

MAX_CONTENT_BYTES = 128 * 2**20
"""Largest file, and largest JSON text in it."""

MAX_VALUES = 2**24
"""Most commas and opening brackets in the JSON text, so most values: a file can name millions of
empty lists in few bytes, and each takes a hundred times the memory."""

_Integer = TypeVar("_Integer", bound=np.integer[Any])


@dataclass(frozen=True)
class Document:
    """One JSON object, and how to complain about it."""

    place: str
    """Path of the file."""
    error: type[UmemError]
    """What :func:`refuse` raises."""
    data: dict[str, Any]


def write_document(
    data: Mapping[str, Any], path: str | os.PathLike[str], error: type[UmemError]
) -> None:
    """Write plain data in the given order, one line for each key, compressed, in one piece.

    Equal data gives equal bytes. Floats are written with all their digits.

    Raises
    ------
    error
        If the file cannot be written, or is too large to be read again.
    """
    lines = [f"{_json(key)}:{_json(value)}" for key, value in data.items()]
    content = ("{\n" + ",\n".join(lines) + "\n}\n").encode()
    excess = _excess(content)
    if excess:
        raise error(f"{path}: not written: {excess}")
    try:
        replace_file(path, compress(content))
    except OSError as problem:
        raise error(
            f"{path}: cannot be written ({_reason(problem)}): check the path and the space"
        ) from problem


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def read_document(path: str | os.PathLike[str], error: type[UmemError]) -> Document:
    """Read a file of one JSON object, compressed or plain.

    Raises
    ------
    error
        If it cannot be read, is too large, or is not strictly such a file: duplicate keys, and
        numbers that JSON lacks, are refused.
    """
    place = os.fspath(path)
    try:
        content = read_file(path, MAX_CONTENT_BYTES)
    except OSError as problem:
        raise error(f"{place}: cannot be read ({_reason(problem)}): check the path") from problem
    except ValueError as problem:
        raise error(f"{place}: {problem}") from problem
    excess = _excess(content)
    if excess:
        raise error(f"{place}: {excess}")
    return Document(place, error, _parse(content, place, error))


def _reason(problem: OSError) -> str:
    return (problem.strerror or str(problem)).lower()


def _excess(content: bytes) -> str:
    """Which bound a JSON text breaks, or ""."""
    if len(content) > MAX_CONTENT_BYTES:
        return f"larger than {format_bytes(MAX_CONTENT_BYTES)}: no file of umem is"
    if sum(content.count(mark) for mark in b",[{") > MAX_VALUES:
        return f"more than {MAX_VALUES} values: no file of umem has as many"
    return ""


def _parse(content: bytes, place: str, error: type[UmemError]) -> dict[str, Any]:
    try:
        data = json.loads(
            content.decode("utf-8-sig"),
            object_pairs_hook=_without_duplicates,
            parse_constant=_refuse_constant,
        )
    except UnicodeDecodeError as problem:
        raise error(
            f"{place}: neither gzip nor UTF-8 text: give a file that umem wrote"
        ) from problem
    except json.JSONDecodeError as problem:
        raise error(
            f"{place}:{problem.lineno}:{problem.colno}: not valid JSON ({problem.msg}): "
            "give a file that umem wrote"
        ) from problem
    except RecursionError as problem:
        raise error(f"{place}: nested too deeply: no file of umem is") from problem
    except ValueError as problem:  # what the hooks refuse, and integers of thousands of digits
        raise error(f"{place}: {problem}") from problem
    if not isinstance(data, dict):
        raise error(f"{place}: holds {shown(data)}: a file of umem holds one JSON object")
    return data


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {shown(twice)} is there twice: remove one of the two")
    return mapping


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number in JSON: write a finite number, or null")


# ------------------------------------------------------------------------- what a document holds


def refuse(document: Document, where: str, message: str) -> NoReturn:
    """Raise the document's error at a place in it, such as ``phases[3].reads``."""
    raise document.error(f"{document.place}: {where}: {message}")


def shown(value: object) -> str:
    """A value as JSON would say it, cut short."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    return reprlib.repr(value)


def require_format(document: Document, noun: str, readable: tuple[str, ...]) -> str:
    """Format of a document; refuses what is not one of `readable`.

    Parameters
    ----------
    document
        With the key ``format``, such as ``umem-plan/1``: family and version.
    noun
        What is wanted, such as ``a plan``.
    readable
        The formats that can be read, of one family.
    """
    said = document.data.get("format")
    if said in readable:
        return str(said)
    known = " and ".join(readable)
    if said is None:
        refuse(document, "format", f"missing, so this is not {noun}: give a file of {known}")
    family, newest = readable[-1].split("/")
    version = re.fullmatch(rf"{family}/([0-9]{{1,9}})", said) if isinstance(said, str) else None
    if version and int(version[1]) > int(newest):
        refuse(
            document,
            "format",
            f"{said} comes from a newer umem; umem {__version__} reads {known}: upgrade umem",
        )
    refuse(document, "format", f"{shown(said)} is not {noun}: give a file of {known}")


def require_keys(
    document: Document,
    where: str,
    mapping: object,
    required: Iterable[str],
    optional: Iterable[str] = (),
) -> None:
    """Refuse what is not an object of these keys; an unknown key gets the nearest one named."""
    required = list(required)
    if not isinstance(mapping, dict):
        refuse(document, where, f"{shown(mapping)} is not an object of {', '.join(required)}")
    prefix = f"{where}." if where else ""
    keys = [*required, *optional]
    for key in mapping.keys() - set(keys):
        near = difflib.get_close_matches(key, [name for name in keys if name not in mapping], n=1)
        hint = f", did you mean {near[0]!r}?" if near else "."
        name = key if re.fullmatch(r"\w{1,40}", key) else shown(key)
        refuse(document, f"{prefix}{name}", f"unknown key{hint} Valid keys: {', '.join(keys)}")
    for key in required:
        if key not in mapping:
            refuse(document, f"{prefix}{key}", "missing: add the key")


def text(document: Document, key: str) -> str:
    """Text of a key."""
    value = document.data[key]
    if not isinstance(value, str):
        refuse(document, key, f"{shown(value)} is not text")
    return value


def items(document: Document, key: str, most: int) -> list[Any]:
    """List of a key, of at most so many entries."""
    value = document.data[key]
    if not isinstance(value, list):
        refuse(document, key, f"{shown(value)} is not a list")
    if len(value) > most:
        refuse(document, key, f"{len(value)} entries: at most {most} are read")
    return value


def texts(document: Document, key: str, most: int) -> tuple[str, ...]:
    """List of texts of a key."""
    entries = items(document, key, most)
    _require_types(document, key, entries, {str}, "text")
    return tuple(entries)


def integers(
    document: Document, key: str, most: int, dtype: type[_Integer]
) -> npt.NDArray[_Integer]:
    """Column of a list of integers that fit a type."""
    entries = items(document, key, most)
    _require_types(document, key, entries, {int}, "an integer")
    low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    if entries and not low <= min(entries) <= max(entries) <= high:
        at = next(index for index, entry in enumerate(entries) if not low <= entry <= high)
        refuse(document, f"{key}[{at}]", f"{shown(entries[at])} is not from {low} to {high}")
    return np.array(entries, dtype=dtype)


def numbers(document: Document, key: str, most: int) -> npt.NDArray[np.float64]:
    """Column of a list of numbers."""
    entries = items(document, key, most)
    _require_types(document, key, entries, {int, float}, "a number")
    try:
        return np.array(entries, dtype=np.float64)
    except OverflowError:
        at = next(index for index, entry in enumerate(entries) if abs(entry) > sys.float_info.max)
        refuse(document, f"{key}[{at}]", f"{shown(entries[at])} does not fit a 64-bit float")


def _require_types(
    document: Document, key: str, entries: list[Any], types: set[type], noun: str
) -> None:
    # By exact type: true and false are integers to Python.
    if not set(map(type, entries)) <= types:
        at = next(index for index, entry in enumerate(entries) if type(entry) not in types)
        refuse(document, f"{key}[{at}]", f"{shown(entries[at])} is not {noun}")


def digits(document: Document, key: str, most: int, largest: int = 9) -> npt.NDArray[np.uint8]:
    """Column of a text with one decimal digit for each entry."""
    value = text(document, key)
    if len(value) > most:
        refuse(document, key, f"{len(value)} digits: at most {most} are read")
    other = re.search(f"[^0-{largest}]", value)
    if other:
        refuse(
            document,
            f"{key}[{other.start()}]",
            f"{shown(other[0])} is not a digit from 0 to {largest}",
        )
    return np.frombuffer(value.encode("ascii"), dtype=np.uint8) - np.uint8(ord("0"))


def digits_text(column: npt.NDArray[Any]) -> str:
    """The text that :func:`digits` reads back, of numbers from 0 to 9."""
    return (column.astype(np.uint8) + np.uint8(ord("0"))).tobytes().decode("ascii")
