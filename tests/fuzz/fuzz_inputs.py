"""Files for readers to be tried with: valid ones, damaged at random or changed in their content."""

from __future__ import annotations

import gzip
import io
import json
import zipfile
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

_NUMBERS = st.one_of(
    st.sampled_from([0, 1, -1, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63), 10**400, 1e308, 5e-324]),
    st.integers(),
    st.floats(),
)
_TEXTS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["", "\x1b[2J", "\ud800", "\x00", "x" * 5000, "9" * 400, "../../x", "16GiB"]),
)
_SCALARS = st.one_of(st.none(), st.booleans(), _NUMBERS, _TEXTS)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXTS, inner, max_size=4),
    max_leaves=8,
)


@st.composite
def damaged(draw: Any, seeds: Sequence[bytes]) -> bytes:
    """A valid file with bits flipped, bytes replaced, parts removed, repeated or cut off."""
    content = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(content) - 1)))
        length = draw(st.integers(1, 16))
        match draw(st.sampled_from(["flip", "replace", "remove", "repeat", "insert", "cut"])):
            case "flip" if content:
                content[at] ^= 1 << draw(st.integers(0, 7))
            case "replace":
                content[at : at + length] = draw(st.binary(max_size=length))
            case "remove":
                del content[at : at + length]
            case "repeat":
                content[at:at] = content[at : at + length] * draw(st.sampled_from([1, 2, 1000]))
            case "insert":
                content[at:at] = draw(st.binary(max_size=length))
            case "cut":
                del content[at:]
    return bytes(content)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all values inside a document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, below in inner:
        found.append((*path, key))
        if isinstance(below, dict | list):
            found += _places(below, (*path, key))
    return found


@st.composite
def _changed(draw: Any, document: dict[str, Any]) -> dict[str, Any]:
    """A document with values replaced, removed, or added beside them; or as it is."""
    made: dict[str, Any] = json.loads(json.dumps(document))
    for _ in range(draw(st.integers(0, 3))):
        places = _places(made)
        if not places:
            break
        *outer, last = draw(st.sampled_from(places))
        at: Any = made
        for key in outer:
            at = at[key]
        match draw(st.sampled_from(["replace", "remove", "add", "repeat"])):
            case "replace":
                at[last] = draw(_VALUES)
            case "remove":
                del at[last]
            case "add" if isinstance(at, dict):
                at[draw(_TEXTS)] = draw(_VALUES)
            case "repeat" if isinstance(at, list):
                at += [at[last]] * draw(st.sampled_from([1, 100]))
    return made


@st.composite
def documents(draw: Any, seeds: Sequence[dict[str, Any]]) -> bytes:
    """A JSON document with other values, plain or compressed, maybe damaged."""
    text = json.dumps(draw(_changed(draw(st.sampled_from(seeds)))), allow_nan=True).encode()
    content = gzip.compress(text) if draw(st.booleans()) else text
    return draw(damaged([content])) if draw(st.booleans()) else content


@st.composite
def texts(draw: Any, seeds: Sequence[dict[str, Any]]) -> bytes:
    """A YAML file: JSON, which is YAML too, or the lines of keys and values; maybe damaged."""
    document = draw(_changed(draw(st.sampled_from(seeds))))
    text = json.dumps(document, ensure_ascii=draw(st.booleans()))
    if draw(st.booleans()):
        text = "\n".join(f"{key}: {json.dumps(value)}" for key, value in document.items())
    content = text.encode("utf-8", "surrogatepass")
    return draw(damaged([content])) if draw(st.booleans()) else content


@st.composite
def archives(draw: Any, seeds: Sequence[bytes]) -> bytes:
    """An archive of columns whose header or columns have other values, packed by another program.

    One in four is then damaged.
    """
    seed = draw(st.sampled_from(seeds))
    if draw(st.integers(0, 3)) == 0:
        return draw(damaged([seed]))
    with np.load(io.BytesIO(seed)) as archive:
        columns = {name: archive[name].copy() for name in archive.files}
    if draw(st.booleans()):
        header = draw(_changed(json.loads(columns["header"].tobytes())))
        columns["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    for _ in range(draw(st.integers(0, 3))):
        name = draw(st.sampled_from(sorted(columns.keys() - {"header"})))
        columns[name] = draw(_other_column(columns[name]))
    packed = io.BytesIO()
    method = draw(st.sampled_from([zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED]))
    with zipfile.ZipFile(packed, "w", method) as archive:
        for name, column in columns.items():
            stream = io.BytesIO()
            np.lib.format.write_array(stream, column)
            archive.writestr(f"{name}.npy", stream.getvalue())
    content = packed.getvalue()
    return draw(damaged([content])) if draw(st.integers(0, 3)) == 0 else content


@st.composite
def _other_column(draw: Any, column: Any) -> Any:
    match draw(st.sampled_from(["entry", "length", "type", "shape"])):
        case "entry" if len(column):
            at = draw(st.integers(0, len(column) - 1))
            raw = draw(st.sampled_from([b"\x00", b"\x01", b"\x7f", b"\x80", b"\xff"]))
            column.view(np.uint8)[at * column.itemsize : (at + 1) * column.itemsize] = raw[0]
            if draw(st.booleans()):
                column[at] = column[draw(st.integers(0, len(column) - 1))]
        case "length":
            column = np.resize(column, draw(st.sampled_from([0, 1, len(column) + 1, 5000])))
        case "type":
            column = np.zeros(len(column), draw(st.sampled_from(["i1", ">i4", "f2", "c16", "U4"])))
        case "shape":
            column = column.reshape(draw(st.sampled_from([(-1, 1), (1, -1)])))
    return column
