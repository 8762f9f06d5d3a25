"""Configuration files in YAML: read within bounds, and merged with the files that they extend.

PyYAML parses. Its own types are not used, because YAML 1.1 takes ``on`` for true and ``1:30`` for
ninety; and a file may come from a stranger, so that size, nesting, aliases and tags are bounded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from umem.core.errors import UmemError
from umem.io.files import read_file, unreadable
from umem.io.problems import Document, Entry, KeyPath, Place, did_you_mean, reject, shown

__all__ = ["FileKind", "read", "shipped_names", "stated_keys"]

_MAX_FILE_BYTES = 2**20
_MAX_DEPTH = 16
_MAX_FILES = 16  # that extend one another
_LONGEST_SHOWN = 500  # of a name that is not there


@dataclass(frozen=True)
class FileKind:
    """A kind of configuration file, in the words of its messages."""

    noun: str
    """Name of one file, such as ``policy``."""
    shipped: str
    """Name of a file that comes with umem, such as ``preset``."""
    plural: str
    """All of those, such as ``preset policies``."""
    folder: str
    """Where those are, below umem's folder ``policies``."""
    example: str
    """Name of one of them."""
    instead_of_aliases: str
    """Advice to a user of YAML's aliases."""
    error: type[UmemError]
    """Raised where umem's own files are missing."""
    replaces: Callable[[KeyPath], bool] = lambda path: False
    """Whether the mapping at a path replaces the inherited one, instead of being merged with it."""


def read(source: str | os.PathLike[str] | Mapping[str, Any], kind: FileKind) -> Document:
    """Read a file or a mapping, and merge it over the file that its key ``extends`` names.

    `source` is the name of a file that comes with umem; a path, which as a string ends in ``.yaml``
    or ``.yml`` or holds a ``/``; or a mapping with the keys of such a file. A file that states no
    ``name`` has that of the file.

    Raises InvalidFileError if it cannot be read, or a file that it extends cannot. Raises TypeError
    if `source` is neither a name, a path nor a mapping.
    """
    if isinstance(source, Mapping):
        return _with_parents(_read_mapping(source, kind), Path(), (), kind)
    if isinstance(source, str) and _is_shipped_name(source):
        return _read_with_parents(_shipped_path(source, Place(kind.noun), (), kind), (), kind)
    if isinstance(source, str | os.PathLike):
        return _read_with_parents(Path(os.path.expanduser(source)), (), kind)
    raise TypeError(
        f"a {kind.noun} is the name of a {kind.shipped}, a path or a mapping, "
        f"not {type(source).__name__}"
    )


# A file and its parents.


def _read_with_parents(path: Path, children: tuple[Path, ...], kind: FileKind) -> Document:
    document = _read_file(path, kind)
    document.data.setdefault("name", path.stem)
    return _with_parents(document, path.parent, (*children, path), kind)


def _with_parents(
    document: Document, folder: Path, children: tuple[Path, ...], kind: FileKind
) -> Document:
    extends = document.data.get("extends")
    # Validation reports a value that is neither null nor text.
    if not isinstance(extends, str):
        return document
    place = document.entries["extends",].value
    if _is_shipped_name(extends):
        path = _shipped_path(extends, place, ("extends",), kind)
    else:
        path = folder / os.path.expanduser(extends)
        if not os.path.isfile(path):
            named = str(path)[:_LONGEST_SHOWN]
            reject(place, ("extends",), f"there is no file {named}: check the path")
    if path.resolve() in [child.resolve() for child in children]:
        cycle = " -> ".join(map(str, (*children, path)))
        reject(place, ("extends",), f"a cycle: {cycle}; remove one `extends`")
    if len(children) >= _MAX_FILES:
        message = f"more than {_MAX_FILES} files extend one another: put their keys into fewer"
        reject(place, ("extends",), message)
    parent = _read_with_parents(path, children, kind)
    del parent.data["name"]
    parent.data.pop("description", None)
    data = _merged(parent.data, document.data, (), parent.entries, kind)
    return Document(data, parent.entries | document.entries)


def _merged(
    below: dict[str, Any],
    above: dict[str, Any],
    path: KeyPath,
    entries: dict[KeyPath, Entry],
    kind: FileKind,
) -> dict[str, Any]:
    """Mapping `above` over `below`; places of replaced keys are removed from `entries`."""
    merged = below | above
    for key in below.keys() & above.keys():
        both, here = (below[key], above[key]), (*path, key)
        if all(isinstance(value, dict) for value in both) and not kind.replaces(here):
            merged[key] = _merged(*both, here, entries, kind)
            continue
        for gone in [at for at in entries if at[: len(here)] == here]:
            del entries[gone]
    return merged


# Files that come with umem.


def shipped_names(kind: FileKind) -> tuple[str, ...]:
    """Names of umem's own files, sorted. Raises ``kind.error`` if they are missing."""
    return tuple(sorted(path.stem for path in _shipped_folder(kind).glob("*.yaml")))


def _shipped_folder(kind: FileKind) -> Path:
    """Folder inside the installed package, else in the source checkout."""
    package = Path(__file__).resolve().parents[1]
    candidates = [root / "policies" / kind.folder for root in (package, package.parent)]
    for folder in candidates:
        # Beside an installed package, a folder of this name may belong to another program.
        if (folder / f"{kind.example}.yaml").is_file():
            return folder
    raise kind.error(
        f"no {kind.plural} in {candidates[0]} or {candidates[1]}: reinstall umem, or give the "
        f"path of a {kind.noun} file"
    )


def _is_shipped_name(source: str) -> bool:
    return "/" not in source and not source.endswith((".yaml", ".yml"))


def _shipped_path(name: str, place: Place, key: KeyPath, kind: FileKind) -> Path:
    """File of a name, which is written at `place` under `key`."""
    names = shipped_names(kind)
    if name not in names:
        hint = did_you_mean(name, names) or "."
        if os.path.isfile(name):
            hint = f"; to read the file of this name, write './{name}'."
        known = f"{kind.shipped.capitalize()}s: {', '.join(names)}"
        reject(place, key, f"no {kind.shipped} is called {name[:_LONGEST_SHOWN]!r}{hint} {known}")
    return _shipped_folder(kind) / f"{name}.yaml"


# A mapping made in Python.


def _read_mapping(source: Mapping[Any, Any], kind: FileKind) -> Document:
    place = Place(f"{kind.noun} mapping")
    entries: dict[KeyPath, Entry] = {(): Entry(place, place)}

    def plain(mapping: Mapping[Any, Any], path: KeyPath) -> dict[str, Any]:
        if len(path) > _MAX_DEPTH:
            reject(place, (), f"nested deeper than {_MAX_DEPTH} levels: no {kind.noun} is")
        data = {}
        for key, value in mapping.items():
            if not isinstance(key, str):
                reject(place, path, f"the key {shown(key)} is not text: write it as a string")
            # str() turns a member of an enumeration of strings into its name.
            here = (*path, str(key))
            entries[here] = Entry(place, place)
            nested = stated_keys(value)
            data[str(key)] = value if nested is None else plain(nested, here)
        return data

    return Document(plain(source, ()), entries)


def stated_keys(value: Any) -> dict[Any, Any] | None:
    """Keys that a mapping or a pydantic model states, without its defaults; None for the rest."""
    if isinstance(value, Mapping):
        return dict(value)
    stated = getattr(value, "model_fields_set", None)
    return None if stated is None else {name: getattr(value, name) for name in stated}


# A file's text.


def _read_file(path: Path, kind: FileKind) -> Document:
    file = str(path)
    if os.path.exists(path) and not os.path.isfile(path):
        reject(Place(file), (), "not a file: give the path of a YAML file")
    try:
        content = read_file(path, _MAX_FILE_BYTES)
    except OSError as error:
        reject(Place(file), (), unreadable(error))
    except ValueError as error:  # too large, or damaged
        reject(Place(file), (), str(error))
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = error.object[: error.start].decode()
        reject(_place_after(before, file), (), "not UTF-8 text: save the file as UTF-8")
    try:
        return _TextReader(text, file, kind).document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        wrong = ", ".join(part for part in (error.context, error.problem) if part)
        message = f"not valid YAML ({wrong}): check indentation, colons and quotes"
        if "'\\t'" in wrong:
            message = "a tab where YAML allows none: indent with spaces"
        reject(Place(file) if mark is None else _place(mark, file), (), message)
    except yaml.reader.ReaderError as error:
        place = _place_after(text[: error.position], file)
        reject(place, (), "a control character: remove it")


def _place(mark: Any, file: str) -> Place:
    return Place(file, mark.line + 1, mark.column + 1)


def _place_after(before: str, file: str) -> Place:
    return Place(file, before.count("\n") + 1, len(before) - before.rfind("\n"))


class _TextReader:
    """Makes plain data of the events of PyYAML's parser, and notes where each key is."""

    def __init__(self, text: str, file: str, kind: FileKind) -> None:
        self.events: Iterator[Any] = yaml.parse(text, yaml.SafeLoader)
        self.file, self.kind = file, kind
        top = Place(file, 1, 1)
        self.entries: dict[KeyPath, Entry] = {(): Entry(top, top)}

    def document(self) -> Document:
        top = self.entries[()].value
        example = f"a mapping of keys to values, such as 'extends: {self.kind.example}'"
        next(self.events)
        if isinstance(next(self.events), yaml.StreamEndEvent):
            reject(top, (), f"the file is empty: a {self.kind.noun} is {example}")
        data = self._value(next(self.events), (), 1)
        _, after = next(self.events), next(self.events)
        if not isinstance(after, yaml.StreamEndEvent):
            message = f"a second YAML document: keep one {self.kind.noun} per file, remove '---'"
            reject(_place(after.start_mark, self.file), (), message)
        if not isinstance(data, dict):
            reject(top, (), f"not {example}")
        return Document(data, self.entries)

    def _value(self, event: Any, path: KeyPath, depth: int) -> Any:
        """Data that begins with an event, at a nesting depth of 1 for the whole document."""
        place = _place(event.start_mark, self.file)
        if isinstance(event, yaml.AliasEvent):
            reject(place, (), f"aliases are not supported: {self.kind.instead_of_aliases}")
        if depth > _MAX_DEPTH:
            reject(place, (), f"nested deeper than {_MAX_DEPTH} levels: no {self.kind.noun} is")
        if event.tag is not None:
            reject(place, path, f"the tag {event.tag!r} is not supported: remove it")
        if isinstance(event, yaml.ScalarEvent):
            return _plain_scalar(event.value) if event.implicit[0] else event.value
        if isinstance(event, yaml.SequenceStartEvent):
            return self._items(path, depth)
        return self._mapping(path, depth)

    def _items(self, path: KeyPath, depth: int) -> list[Any]:
        items: list[Any] = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            here = (*path, len(items))
            at = _place(event.start_mark, self.file)
            self.entries[here] = Entry(at, at)
            items.append(self._value(event, here, depth + 1))
        return items

    def _mapping(self, path: KeyPath, depth: int) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            key_place = _place(event.start_mark, self.file)
            key = self._value(event, path, depth + 1)
            if not isinstance(key, str):
                reject(key_place, path, f"the key {shown(key)} is not text: put it in quotes")
            here = (*path, key)
            if key in mapping:
                first = self.entries[here].key.line
                message = f"duplicate key: it is also on line {first}; remove one of the two"
                reject(key_place, here, message)
            event = next(self.events)
            self.entries[here] = Entry(key_place, _place(event.start_mark, self.file))
            mapping[key] = self._value(event, here, depth + 1)
        return mapping


_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}


def _plain_scalar(text: str) -> Any:
    """Value of text without quotes: null, true, false, a decimal number or the text."""
    if text in (text.lower(), text.capitalize(), text.upper()) and text.lower() in _WORDS:
        return _WORDS[text.lower()]
    # No key takes longer numbers: they stay text.
    if re.fullmatch(r"[-+]?[0-9](?:_?[0-9]){0,29}", text):
        return int(text)
    if re.fullmatch(r"[-+]?[0-9]{1,30}\.[0-9]{0,30}", text):
        return float(text)
    return text
