"""Configuration files in YAML: read within bounds, and merged with the files that they extend.

PyYAML parses. Its own types are not used, because YAML 1.1 takes ``on`` for true and ``1:30`` for
ninety; and a file may come from a stranger, so that its size is bounded, and aliases and tags are
refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeGuard, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from umem.core.errors import UmemError
from umem.io.files import read_file, unreadable
from umem.io.problems import (
    FilePlace,
    InvalidFileError,
    KeyPath,
    Problem,
    did_you_mean,
    dotted,
    message_of,
    shown,
)

__all__ = ["FileKind", "read", "shipped", "stated_keys", "validate"]

_MAX_FILE_BYTES = 2**20
_MAX_FILES = 16  # that extend one another
_LONGEST_SHOWN = 500  # of a name that is not there

_Model = TypeVar("_Model", bound=BaseModel)


class FileKind(NamedTuple):
    """A kind of configuration file."""

    noun: str
    folder: str
    """Where umem's own files are, below its folder ``policies``."""
    error: type[UmemError]
    """Raised where those are missing."""
    replaces: Callable[[KeyPath], bool] = lambda path: False
    """Whether a mapping replaces the inherited one, instead of being merged with it."""
    own: Callable[[str], Mapping[str, Any] | None] = lambda name: None
    """One of umem's own by its name, where they are no files; None for an unknown name."""
    own_names: tuple[str, ...] = ()
    """Names of those to suggest."""


class Document(NamedTuple):
    """A file as written: plain data, and where each key of it is; ``()`` is the whole file."""

    data: dict[str, Any]
    places: dict[KeyPath, FilePlace]


def read(source: str | os.PathLike[str] | Mapping[str, Any], kind: FileKind) -> Document:
    """Read a file or a mapping, and merge it over the file that its key ``extends`` names.

    `source` is the name of a file that comes with umem; a path, which as a string ends in ``.yaml``
    or ``.yml`` or holds a ``/``; or a mapping with the keys of such a file. A file that states no
    ``name`` has that of the file.

    Raises InvalidFileError if a file cannot be read, TypeError for a source of another type.
    """
    if isinstance(source, Mapping):
        return _with_parent(_document(source, FilePlace(f"{kind.noun} mapping")), (), kind)
    if not isinstance(source, str | os.PathLike):
        raise TypeError(
            f"a {kind.noun} is a name, a path or a mapping, not {type(source).__name__}"
        )
    if _is_name(source) and (data := kind.own(source)) is not None:
        return _with_parent(_document(data, FilePlace(f"{kind.noun} {source}")), (), kind)
    return _read_file(_path(source, Path(), FilePlace(kind.noun), kind), (), kind)


def validate(model: type[_Model], document: Document, context: Any = None) -> _Model:
    """Validate a file, with a context for the model's validators.

    Raises InvalidFileError with each problem once, in the order of the text.
    """
    try:
        return model.model_validate(document.data, context=context)
    except ValidationError as error:
        details = error.errors(include_url=False)
    problems: dict[Any, Problem] = {}
    for detail in details:
        # The error of a default that depends on another key follows from the error of that key.
        if detail["type"] == "default_factory_not_called":
            continue
        path, message = detail["loc"], message_of(detail, model)
        depth = next(n for n in range(len(path), -1, -1) if path[:n] in document.places)
        at = document.places[path[:depth]]
        problem = Problem(at.file, at.line, at.column, dotted(path), message)
        problems.setdefault((at, path[depth:], message), problem)
    order = sorted(problems.values(), key=lambda p: (p.file, p.line or 0, p.column or 0, p.key))
    raise InvalidFileError(order)


def _reject(place: FilePlace, message: str) -> NoReturn:
    raise InvalidFileError([Problem(**vars(place), message=message)])


# A file, the one that it extends, and those that come with umem.


def _with_parent(document: Document, files: tuple[Path, ...], kind: FileKind) -> Document:
    """A document over what it extends; `files` end with its own, after those that extend it."""
    extends = document.data.get("extends")
    # Validation reports a value that is neither null nor text.
    if not isinstance(extends, str):
        return document
    parent = _parent(extends, document.places["extends",], files, kind)
    del parent.data["name"]
    parent.data.pop("description", None)
    data = _merged(parent.data, document.data, (), parent, kind)
    return Document(data, parent.places | document.places)


def _parent(extends: str, place: FilePlace, files: tuple[Path, ...], kind: FileKind) -> Document:
    if _is_name(extends) and kind.own(extends) is not None:
        return read(extends, kind)
    path = _path(extends, files[-1].parent if files else Path(), place, kind)
    if not os.path.isfile(path):
        _reject(place, f"there is no file {str(path)[:_LONGEST_SHOWN]}: check the path")
    if path.resolve() in [file.resolve() for file in files]:
        _reject(place, f"a cycle: {' -> '.join(map(str, (*files, path)))}; remove one `extends`")
    if len(files) >= _MAX_FILES:
        _reject(place, f"more than {_MAX_FILES} files extend one another: put keys into fewer")
    return _read_file(path, files, kind)


def _merged(below: Any, above: Any, path: KeyPath, parent: Document, kind: FileKind) -> Any:
    """Data of a parent, `below`, and data `above` it; drops the places of what they replace."""
    if isinstance(below, dict) and isinstance(above, dict) and not kind.replaces(path):
        both = below.keys() & above.keys()
        merge = {key: _merged(below[key], above[key], (*path, key), parent, kind) for key in both}
        return below | above | merge
    for gone in [at for at in parent.places if at[: len(path)] == path]:
        del parent.places[gone]
    return above


def _is_name(source: str | os.PathLike[str]) -> TypeGuard[str]:
    """Whether a source is the name of one of umem's own, and no path."""
    return isinstance(source, str) and "/" not in source and not source.endswith((".yaml", ".yml"))


def _path(name: str | os.PathLike[str], folder: Path, place: FilePlace, kind: FileKind) -> Path:
    """Path of a file, or of umem's own file of this name."""
    if not _is_name(name):
        return folder / os.path.expanduser(name)
    known: Mapping[str, Path] = {} if kind.own_names else shipped(kind)
    if name in known:
        return known[name]
    names = kind.own_names or tuple(known)
    hint = did_you_mean(name, names) or "."
    if os.path.isfile(name):
        hint = f"; to read the file of this name, write './{name}'."
    named = f"no {kind.noun} is called {name[:_LONGEST_SHOWN]!r}"
    _reject(place, f"{named}{hint} Known: {', '.join(names)}")


def shipped(kind: FileKind) -> dict[str, Path]:
    """Files of umem's own by name, sorted. Raises ``kind.error`` if they are missing."""
    package = Path(__file__).resolve().parents[1]
    # Inside the installed package, else in the source checkout.
    folders = [root / "policies" / kind.folder for root in (package, package.parent)]
    for folder in folders:
        if found := {path.stem: path for path in folder.glob("*.yaml")}:
            return dict(sorted(found.items()))
    where = f"{folders[0]} or {folders[1]}"
    raise kind.error(f"no {kind.noun} in {where}: reinstall umem, or give the path of a file")


# Text, and mappings made in Python.


def _read_file(path: Path, files: tuple[Path, ...], kind: FileKind) -> Document:
    try:
        content = read_file(path, _MAX_FILE_BYTES)
    except (OSError, ValueError) as error:
        _reject(FilePlace(str(path)), unreadable(error))
    # Bytes that are not UTF-8 become characters that YAML refuses.
    text = content.decode("utf-8-sig", "surrogateescape")
    document = _document(text, FilePlace(str(path), 1, 1))
    document.data.setdefault("name", path.stem)
    return _with_parent(document, (*files, path), kind)


class _Loader(yaml.BaseLoader):
    def _refuse(self) -> NoReturn:
        # A few aliases can stand for gigabytes.
        problem = "neither aliases nor tags are supported"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=self.get_mark())

    fetch_alias = fetch_tag = _refuse


def _document(source: str | Mapping[str, Any], top: FilePlace) -> Document:
    places: dict[KeyPath, FilePlace] = {(): top}
    try:
        root = _Loader(source).get_single_node() if isinstance(source, str) else source
        data = _plain(root, (), places)
    except yaml.MarkedYAMLError as error:
        mark: Any = error.problem_mark or error.context_mark
        place = FilePlace(top.file, mark.line + 1, mark.column + 1)
        wrong = ", ".join(part for part in (error.context, error.problem) if part)
        _reject(place, f"not valid YAML ({wrong}): check colons and quotes, and indent with spaces")
    except yaml.reader.ReaderError as error:
        before = str(source)[: error.position]
        place = FilePlace(top.file, before.count("\n") + 1, len(before) - before.rfind("\n"))
        _reject(place, "not UTF-8 text, or a control character: save the file as UTF-8")
    except RecursionError:
        _reject(FilePlace(top.file), "nested too deeply: no file of umem is")
    if not isinstance(data, dict):
        wrong = "the file is empty" if root is None else "not a mapping"
        _reject(top, f"{wrong}: write keys and values, such as 'description: mine'")
    return Document(data, places)


def _plain(value: Any, path: KeyPath, places: dict[KeyPath, FilePlace]) -> Any:
    """Plain data of a node of YAML, or of a value made in Python; notes where its keys are."""
    if isinstance(value, yaml.ScalarNode):
        return value.value if value.style else _plain_scalar(value.value)
    if isinstance(value, yaml.SequenceNode):
        return [_plain(item, path, places) for item in value.value]
    pairs = value.value if isinstance(value, yaml.MappingNode) else stated_keys(value)
    if pairs is None:
        return value
    data: dict[str, Any] = {}
    for written, below in pairs.items() if isinstance(pairs, dict) else pairs:
        key = _plain(written, path, places)
        here = (*path, str(key))
        mark = getattr(written, "start_mark", None)
        line, column = (mark.line + 1, mark.column + 1) if mark else (None, None)
        place = FilePlace(places[()].file, line, column, dotted(here))
        if not isinstance(key, str):
            _reject(place, f"the key {shown(key)} is not text: put it in quotes")
        if key in data:
            first = places[here].line
            _reject(place, f"duplicate key: it is also on line {first}; remove one of the two")
        places[here] = place
        data[str(key)] = _plain(below, here, places)
    return data


def stated_keys(value: Any) -> dict[Any, Any] | None:
    """Keys that a mapping or a pydantic model states, without its defaults; None for the rest."""
    if isinstance(value, Mapping):
        return dict(value)
    stated = getattr(value, "model_fields_set", None)
    return None if stated is None else {name: getattr(value, name) for name in stated}


_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}


def _plain_scalar(text: str) -> Any:
    """Value of text without quotes: null, true, false, a decimal number or the text."""
    if text in (text.lower(), text.capitalize(), text.upper()) and text.lower() in _WORDS:
        return _WORDS[text.lower()]
    # No key takes longer numbers: they stay text.
    if re.fullmatch(r"[-+]?[0-9](_?[0-9]){0,29}(\.[0-9]{0,30})?", text):
        return float(text) if "." in text else int(text)
    return text
