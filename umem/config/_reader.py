"""Reading a file as it is written: plain data, and the place of each key."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import yaml

from umem.config._kind import Kind
from umem.config._problems import KeyPath, Place, reject, shown
from umem.files import read_file

__all__ = ["Document", "Entry", "read_mapping", "read_path"]

_MAX_FILE_BYTES = 2**20
_MAX_DEPTH = 16


class Entry(NamedTuple):
    """Where a key and its value are written."""

    key: Place
    value: Place


class Document(NamedTuple):
    """A file as written."""

    data: dict[str, Any]
    entries: dict[KeyPath, Entry]
    """By path; ``()`` is the file as a whole."""


class _Refused(yaml.MarkedYAMLError):
    """Valid YAML that no configuration file needs."""


class _Loader(yaml.SafeLoader):
    """YAML without surprises: no aliases, no dates, no octal or base-60 numbers, no `yes` or `no`.

    PyYAML follows YAML 1.1, where ``on`` is true and ``1:30`` is ninety.
    """

    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012 - PyYAML's own attribute

    def __init__(self, text: str, kind: Kind) -> None:
        super().__init__(text)
        self.kind = kind
        self.depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            self._refuse(f"aliases are not supported: {self.kind.instead_of_aliases}")
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            self._refuse(f"nested deeper than {_MAX_DEPTH} levels: no {self.kind.noun} is")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def _refuse(self, message: str) -> NoReturn:
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        raise _Refused(None, None, message, mark)


class _Scalar(NamedTuple):
    """Plain text that YAML takes for something else than text."""

    pattern: str
    first: str
    """What it can start with, besides nothing at all."""
    read: Callable[[str], Any]


_TAG = "tag:yaml.org,2002:"
_DIGITS = "-+0123456789"
_SCALARS = {
    _TAG + "null": _Scalar(r"~|null|Null|NULL|", "~nN", lambda text: None),
    _TAG + "bool": _Scalar(
        r"true|True|TRUE|false|False|FALSE", "tTfF", lambda text: text.lower() == "true"
    ),
    # Longer numbers are left as text, which no field takes.
    _TAG + "int": _Scalar(r"[-+]?[0-9](?:_?[0-9]){0,29}", _DIGITS, int),
    _TAG + "float": _Scalar(r"[-+]?[0-9]{1,30}\.[0-9]{0,30}", _DIGITS, float),
}
for _tag, _kind in _SCALARS.items():
    _Loader.add_implicit_resolver(_tag, re.compile(rf"(?:{_kind.pattern})\Z"), [*_kind.first, ""])


def read_path(path: Path, kind: Kind) -> Document:
    """Read a YAML file.

    Raises
    ------
    UnusableError
        If it cannot be read, or does not hold a mapping in the YAML that umem's files use.
    """
    file = str(path)
    if os.path.exists(path) and not os.path.isfile(path):
        reject(Place(file), (), "not a file: give the path of a YAML file")
    try:
        content = read_file(path, _MAX_FILE_BYTES)
    except (OSError, ValueError) as error:  # ValueError: too large, or a null character in the path
        reason = (getattr(error, "strerror", None) or "").lower() or str(error)
        reject(Place(file), (), f"cannot be read ({reason}): check the path")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = error.object[: error.start].decode()
        reject(_place_after(before, file), (), "not UTF-8 text: save the file as UTF-8")
    return _read_text(text, file, kind)


def _read_text(text: str, file: str, kind: Kind) -> Document:
    try:
        node = _Loader(text, kind).get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        wrong = ", ".join(part for part in (error.context, error.problem) if part)
        message = f"not valid YAML ({wrong}): check indentation, colons and quotes"
        if isinstance(error, _Refused):
            message = wrong
        elif "'\\t'" in wrong:
            message = "a tab where YAML allows none: indent with spaces"
        elif "expected a single document" in wrong:
            message = f"a second YAML document: keep one {kind.noun} per file and remove the '---'"
        reject(Place(file) if mark is None else _place(mark, file), (), message)
    except yaml.reader.ReaderError as error:
        place = _place_after(text[: error.position], file)
        reject(place, (), "a control character: remove it")
    top = Place(file, 1, 1)
    entries: dict[KeyPath, Entry] = {(): Entry(top, top)}
    if node is None:
        reject(top, (), f"the file is empty: a {kind.noun} is a mapping, such as '{kind.example}'")
    data = _plain(node, file, (), entries)
    if not isinstance(data, dict):
        reject(top, (), f"not a mapping of keys to values, such as '{kind.example}'")
    return Document(data, entries)


def _plain(node: yaml.Node, file: str, path: KeyPath, entries: dict[KeyPath, Entry]) -> Any:
    """Plain data of a node; places of what is below it go to `entries`."""
    place = _place(node.start_mark, file)
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node, place, path)
    if node.tag not in (_TAG + "map", _TAG + "seq"):
        _reject_tag(node, place, path)
    if isinstance(node, yaml.SequenceNode):
        items = []
        for number, item in enumerate(node.value):
            at = _place(item.start_mark, file)
            entries[*path, number] = Entry(at, at)
            items.append(_plain(item, file, (*path, number), entries))
        return items
    mapping: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key_place = _place(key_node.start_mark, file)
        key = _plain(key_node, file, path, {})
        if not isinstance(key, str):
            reject(key_place, path, f"the key {shown(key)} is not text: put it in quotes")
        here = (*path, key)
        if key in mapping:
            first = entries[here].key.line
            reject(
                key_place,
                here,
                f"duplicate key: it is also on line {first}; remove one of the two",
            )
        entries[here] = Entry(key_place, _place(value_node.start_mark, file))
        mapping[key] = _plain(value_node, file, here, entries)
    return mapping


def _scalar(node: yaml.ScalarNode, place: Place, path: KeyPath) -> Any:
    if node.tag == _TAG + "str":
        return node.value
    kind = _SCALARS.get(node.tag)
    # A tag may be written out, and before any text.
    if kind is None or re.fullmatch(kind.pattern, node.value) is None:
        _reject_tag(node, place, path)
    return kind.read(node.value)


def _reject_tag(node: yaml.Node, place: Place, path: KeyPath) -> NoReturn:
    reject(place, path, f"the tag {node.tag!r} is not supported: remove it")


def _place(mark: Any, file: str) -> Place:
    return Place(file, mark.line + 1, mark.column + 1)


def _place_after(before: str, file: str) -> Place:
    return Place(file, before.count("\n") + 1, len(before) - before.rfind("\n"))


def read_mapping(source: Mapping[Any, Any], kind: Kind) -> Document:
    """Read a mapping made in Python.

    Raises
    ------
    UnusableError
        If a key is not text, or it is nested too deep.
    """
    place = Place(f"{kind.noun} mapping")
    entries: dict[KeyPath, Entry] = {(): Entry(place, place)}

    def note(mapping: Mapping[Any, Any], path: KeyPath) -> dict[str, Any]:
        plain = {}
        for key, value in mapping.items():
            if not isinstance(key, str):
                reject(place, path, f"the key {shown(key)} is not text: write it as a string")
            # str() turns a member of an enumeration of strings into the name it stands for.
            name = str(key)
            entries[*path, name] = Entry(place, place)
            nested = kind.keys_of(value)
            if nested is not None and len(path) >= _MAX_DEPTH:
                reject(place, (), f"nested deeper than {_MAX_DEPTH} levels: no {kind.noun} is")
            plain[name] = value if nested is None else note(nested, (*path, name))
        return plain

    return Document(note(source, ()), entries)
