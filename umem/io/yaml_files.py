"""What is wrong with a file and where: the record, and the words shared by all messages."""

from __future__ import annotations

import difflib
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import yaml

from umem.core.errors import UmemError
from umem.io.files import read_file

__all__ = [
    "Document",
    "Entry",
    "KeyPath",
    "Kind",
    "Place",
    "Problem",
    "UnusableError",
    "did_you_mean",
    "is_shipped_name",
    "nearest",
    "problem_at",
    "read",
    "read_mapping",
    "read_path",
    "reject",
    "shipped_dir",
    "shipped_names",
    "shipped_path",
    "shown",
]

KeyPath = tuple[str | int, ...]
"""Keys, and numbers of list items, from the outside in; ``()`` for a whole file."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a configuration file.

    ``str()`` gives ``file:line:column: key: message``, without the parts that are not known.
    """

    file: str
    """Path of the file at fault, or a word for what is not a file."""
    line: int | None
    """From 1; None where there is no text."""
    column: int | None
    """From 1; None where there is no text."""
    key: str
    """Dotted key path, such as ``classes.weights.kind``; empty for the file as a whole."""
    message: str
    """What is wrong and what to do."""

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}:{self.column}"
        return ": ".join(part for part in (place, self.key, self.message) if part)


class Place(NamedTuple):
    """Where something is written; lines and columns are None where there is no text."""

    file: str
    line: int | None = None
    column: int | None = None


class UnusableError(Exception):
    """Carries problems up to the function that loads a file; users never see it."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        super().__init__()
        self.problems = tuple(problems)


def reject(place: Place, key: KeyPath, message: str) -> NoReturn:
    """Stop reading at a problem that leaves nothing to go on with."""
    raise UnusableError([problem_at(place, key, message)])


def problem_at(place: Place, key: KeyPath, message: str) -> Problem:
    """Make the record of a problem."""
    return Problem(*place, key=_dotted(key), message=message)


def _dotted(path: KeyPath) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def shown(value: Any) -> str:
    """A value as YAML would say it, cut short."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return reprlib.repr(value)


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """The question, with a comma before it, or nothing where no word is near."""
    near = nearest(word, words)
    return f", did you mean {near!r}?" if near else ""


def nearest(word: str, words: Iterable[str], likeness: float = 0.6) -> str | None:
    """The most similar of `words`, if at least this similar, as :mod:`difflib` measures it."""
    plain = word.lower().replace("-", "_")
    candidates = {candidate.replace("-", "_"): candidate for candidate in words}
    near = difflib.get_close_matches(plain, candidates, n=1, cutoff=likeness)
    return candidates[near[0]] if near else None


# What one kind of configuration file is called, and where umem's own files of it are.


def _keys_of_mapping(value: Any) -> Mapping[Any, Any] | None:
    return value if isinstance(value, Mapping) else None


def _never(path: KeyPath) -> bool:
    return False


@dataclass(frozen=True)
class Kind:
    """A kind of configuration file, in the words of its messages.

    Parameters
    ----------
    noun : str
        What one file holds, such as ``policy``.
    shipped : str
        What a file that comes with umem is called, such as ``preset``.
    plural : str
        All of these, such as ``preset policies``.
    folder : str
        Where they are below umem's folder ``policies``.
    landmark : str
        One of them, by which that folder is told from somebody else's.
    example : str
        Shortest useful file.
    instead_of_aliases : str
        What does the work of YAML's aliases.
    error : type of UmemError
        Raised where umem's own files are missing.
    keys_of : callable
        Keys that a value stated in Python has below it, or None where it is no mapping.
    is_replaced : callable
        Whether the mapping at a path replaces the one that it inherits, and is not merged with it.
    """

    noun: str
    shipped: str
    plural: str
    folder: str
    landmark: str
    example: str
    instead_of_aliases: str
    error: type[UmemError]
    keys_of: Callable[[Any], Mapping[Any, Any] | None] = _keys_of_mapping
    is_replaced: Callable[[KeyPath], bool] = _never


# Reading a file as it is written: plain data, and the place of each key.

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


# The files that come with umem, and how the name of one is told from a path.


def shipped_dir(kind: Kind) -> Path:
    """Folder of umem's own files: inside the installed package, else in the source checkout.

    Raises
    ------
    UmemError
        ``kind.error``, if neither exists.
    """
    package = Path(__file__).resolve().parents[1]
    candidates = [root / "policies" / kind.folder for root in (package, package.parent)]
    for folder in candidates:
        # Beside an installed package a folder of this name may belong to somebody else.
        if (folder / kind.landmark).is_file():
            return folder
    raise kind.error(
        f"no {kind.plural} in {candidates[0]} or {candidates[1]}: reinstall umem, or give the "
        f"path of a {kind.noun} file"
    )


def shipped_names(kind: Kind) -> tuple[str, ...]:
    """Names of umem's own files, sorted.

    Raises
    ------
    UmemError
        ``kind.error``, if they are missing.
    """
    return tuple(sorted(path.stem for path in shipped_dir(kind).glob("*.yaml")))


def is_shipped_name(source: str) -> bool:
    """Whether a string names a file of umem's, whether or not there is one, and not a path."""
    return "/" not in source and not source.endswith((".yaml", ".yml"))


def shipped_path(name: str, place: Place, key: KeyPath, kind: Kind) -> Path:
    """File of a name; `place` and `key` say who asks for it.

    Raises
    ------
    UnusableError
        If there is none of this name.
    """
    names = shipped_names(kind)
    if name not in names:
        hint = did_you_mean(name, names) or "."
        if os.path.isfile(name):
            hint = f"; to read the file of this name, write './{name}'."
        known = f"{kind.shipped.capitalize()}s: {', '.join(names)}"
        reject(place, key, f"no {kind.shipped} is called {name!r}{hint} {known}")
    return shipped_dir(kind) / f"{name}.yaml"


# Reading a file with all that it extends, merged.


def read(source: str | os.PathLike[str] | Mapping[str, Any], kind: Kind) -> Document:
    """Read a file or a mapping, and merge it over what its key ``extends`` names.

    Parameters
    ----------
    source
        The name of a file that comes with umem; a path, which as a string ends in ``.yaml`` or
        ``.yml`` or holds a ``/``; or a mapping with the keys of such a file.
    kind
        What the file is.

    Returns
    -------
    Document
        A file's ``name``, where it states none, is that of the file.

    Raises
    ------
    UnusableError
        If it cannot be read, or something that it extends cannot.
    TypeError
        If `source` is neither a name, a path nor a mapping.
    """
    if isinstance(source, Mapping):
        return _with_parents(read_mapping(source, kind), Path(), (), kind)
    if isinstance(source, str) and is_shipped_name(source):
        return _read_with_parents(shipped_path(source, Place(kind.noun), (), kind), (), kind)
    if isinstance(source, str | os.PathLike):
        return _read_with_parents(Path(os.path.expanduser(source)), (), kind)
    raise TypeError(
        f"a {kind.noun} is the name of a {kind.shipped}, a path or a mapping, "
        f"not {type(source).__name__}"
    )


def _read_with_parents(path: Path, children: tuple[Path, ...], kind: Kind) -> Document:
    document = read_path(path, kind)
    document.data.setdefault("name", path.stem)
    return _with_parents(document, path.parent, (*children, path), kind)


def _with_parents(
    document: Document, folder: Path, children: tuple[Path, ...], kind: Kind
) -> Document:
    extends = document.data.get("extends")
    # What is neither null nor text is left for the check of the keys to report.
    if not isinstance(extends, str):
        return document
    key: KeyPath = ("extends",)
    place = document.entries[key].value
    if is_shipped_name(extends):
        path = shipped_path(extends, place, key, kind)
    else:
        path = folder / os.path.expanduser(extends)
        if not os.path.isfile(path):
            reject(place, key, f"there is no file {path}: check the path")
    if path.resolve() in [child.resolve() for child in children]:
        cycle = " -> ".join(map(str, (*children, path)))
        reject(place, key, f"a cycle: {cycle}; remove one `extends`")
    return _overlay(_read_with_parents(path, children, kind), document, kind)


def _overlay(parent: Document, child: Document, kind: Kind) -> Document:
    """Child over parent, mapping by mapping; the name and description are the child's own."""
    data = {key: said for key, said in parent.data.items() if key not in ("name", "description")}
    entries = dict(parent.entries)

    def lay(below: dict[str, Any], above: dict[str, Any], path: KeyPath) -> dict[str, Any]:
        merged = dict(below)
        for key, value in above.items():
            here = (*path, key)
            covered = merged.get(key)
            if isinstance(value, dict) and isinstance(covered, dict) and not kind.is_replaced(here):
                merged[key] = lay(covered, value, here)
                continue
            merged[key] = value
            for gone in [place for place in entries if place[: len(here)] == here]:
                del entries[gone]
        return merged

    return Document(lay(data, child.data, ()), entries | child.entries)
