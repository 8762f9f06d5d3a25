"""Reading a policy as it is written: plain data, and the place of each key."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import yaml

from umem.policy._models import stated_keys
from umem.policy._problems import KeyPath, Place, reject, shown
from umem.units import format_bytes

__all__ = ["Document", "Entry", "read_file", "read_mapping"]

_MAX_FILE_BYTES = 2**20
_MAX_DEPTH = 16


class Entry(NamedTuple):
    """Where a key and its value are written."""

    key: Place
    value: Place


class Document(NamedTuple):
    """A policy as written."""

    data: dict[str, Any]
    entries: dict[KeyPath, Entry]
    """By path; ``()`` is the policy as a whole."""


class _Refused(yaml.MarkedYAMLError):
    """Valid YAML that no policy needs."""


class _Loader(yaml.SafeLoader):
    """YAML without surprises: no aliases, no dates, no octal or base-60 numbers, no `yes` or `no`.

    PyYAML follows YAML 1.1, where ``on`` is true and ``1:30`` is ninety.
    """

    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012 - PyYAML's own attribute
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            self._refuse(
                "aliases are not supported: put what classes have in common under `defaults`, and "
                "what files have in common in a file to `extends`"
            )
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            self._refuse(f"nested deeper than {_MAX_DEPTH} levels: a policy has 3")
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


def read_file(path: Path) -> Document:
    """Read a YAML file.

    Raises
    ------
    UnusableError
        If it cannot be read, or does not hold a mapping in the YAML that policies use.
    """
    file = str(path)
    try:
        if path.exists() and not path.is_file():
            reject(Place(file), (), "not a file: give the path of a YAML file")
        with path.open("rb") as stream:
            content = stream.read(_MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        reject(Place(file), (), f"cannot be read ({reason}): check the path")
    if len(content) > _MAX_FILE_BYTES:
        limit = format_bytes(_MAX_FILE_BYTES)
        reject(Place(file), (), f"larger than {limit}: this is no policy file")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = error.object[: error.start].decode()
        reject(_place_after(before, file), (), "not UTF-8 text: save the file as UTF-8")
    return _read_text(text, file)


def _read_text(text: str, file: str) -> Document:
    try:
        node = _Loader(text).get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        wrong = ", ".join(part for part in (error.context, error.problem) if part)
        message = f"not valid YAML ({wrong}): check indentation, colons and quotes"
        if isinstance(error, _Refused):
            message = wrong
        elif "'\\t'" in wrong:
            message = "a tab where YAML allows none: indent with spaces"
        elif "expected a single document" in wrong:
            message = "a second YAML document: keep one policy per file and remove the '---'"
        reject(Place(file) if mark is None else _place(mark, file), (), message)
    except yaml.reader.ReaderError as error:
        place = _place_after(text[: error.position], file)
        reject(place, (), "a control character: remove it")
    top = Place(file, 1, 1)
    entries: dict[KeyPath, Entry] = {(): Entry(top, top)}
    if node is None:
        reject(top, (), "the file is empty: a policy is a mapping, such as 'extends: sft'")
    data = _plain(node, file, (), entries)
    if not isinstance(data, dict):
        reject(top, (), "not a mapping of keys to values, such as 'extends: sft'")
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


def read_mapping(source: Mapping[Any, Any]) -> Document:
    """Read a mapping made in Python; models in it count with the keys that they state.

    Raises
    ------
    UnusableError
        If a key is not text.
    """
    place = Place("policy mapping")
    entries: dict[KeyPath, Entry] = {(): Entry(place, place)}

    def note(mapping: Mapping[Any, Any], path: KeyPath) -> dict[str, Any]:
        plain = {}
        for key, value in mapping.items():
            if not isinstance(key, str):
                reject(place, path, f"the key {shown(key)} is not text: write it as a string")
            # str() turns a TensorClass, which is a string too, into the name it stands for.
            name = str(key)
            entries[*path, name] = Entry(place, place)
            nested = stated_keys(value)
            plain[name] = value if nested is None else note(nested, (*path, name))
        return plain

    return Document(note(source, ()), entries)
