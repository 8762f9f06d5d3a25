"""Problems in files: place, error and remedy of each in one line of text."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar, get_args

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

__all__ = [
    "Conflict",
    "Document",
    "Entry",
    "InvalidFileError",
    "KeyPath",
    "Place",
    "Problem",
    "did_you_mean",
    "first_problem",
    "raise_conflicts",
    "reject",
    "shown",
    "summary",
    "validate",
    "visible",
]

_Model = TypeVar("_Model", bound="BaseModel")

_MOST_SHOWN = 10

KeyPath = tuple[str | int, ...]
"""Keys, and numbers of list items, from the outside in; ``()`` for a whole file."""


class Place(NamedTuple):
    """Where something is written. Lines and columns count from 1, None where there is no text."""

    file: str
    line: int | None = None
    column: int | None = None


class Entry(NamedTuple):
    """Where a key and its value are written."""

    key: Place
    value: Place


class Document(NamedTuple):
    """A file as written: plain data, and where each key of it is."""

    data: dict[str, Any]
    entries: dict[KeyPath, Entry]
    """By path; ``()`` is the file as a whole."""


@dataclass(frozen=True)
class Problem:
    """One problem in a configuration file.

    ``str()`` gives one line, ``file:line:column: key: message``, without the parts that are not
    known.
    """

    file: str
    """Path of the file, or a name for data that is not in a file."""
    line: int | None
    """From 1; None where there is no text."""
    column: int | None
    """From 1; None where there is no text."""
    key: str
    """Dotted key path, such as ``classes.weights.kind``; empty for the file as a whole."""
    message: str
    """The error and the remedy."""

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}:{self.column}"
        return visible(": ".join(part for part in (place, self.key, self.message) if part))


def summary(problems: Sequence[Problem]) -> str:
    """Problems, one in a line: the first :data:`_MOST_SHOWN`, and how many others there are."""
    lines = list(map(str, problems[:_MOST_SHOWN]))
    others = len(problems) - len(lines)
    if others:
        lines.append(f"{problems[0].file}: {others:,} more problem{'s' if others > 1 else ''}")
    return "\n".join(lines)


class InvalidFileError(Exception):
    """Carries problems, one in a line, up to the function that loads a file."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(summary(self.problems))


def reject(place: Place, key: KeyPath, message: str) -> NoReturn:
    """Stop reading a file at a problem after which nothing can be read."""
    raise InvalidFileError([Problem(*place, _dotted(key), message)])


def _dotted(path: KeyPath) -> str:
    return "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in path
    ).removeprefix(".")


def visible(text: str) -> str:
    """Text with escapes for characters that act on a terminal, or that it does not show."""
    return "".join(
        mark if mark.isprintable() else mark.encode("unicode_escape").decode() for mark in text
    )


def shown(value: Any) -> str:
    """A value as YAML writes it, cut short."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return reprlib.repr(value)


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """The question, after a comma; empty where no word is similar."""
    near = _nearest(word, words)
    return f", did you mean {near!r}?" if near else ""


def _nearest(word: str, words: Iterable[str], similarity: float = 0.6) -> str | None:
    """The most similar of `words`, if at least this similar as :mod:`difflib` measures it."""
    plain = word.lower().replace("-", "_")
    candidates = {candidate.lower().replace("-", "_"): candidate for candidate in words}
    near = difflib.get_close_matches(plain, candidates, n=1, cutoff=similarity)
    return candidates[near[0]] if near else None


# pydantic's validation errors, with the place in the file and the remedy.

_CONFLICT = "conflict"


class Conflict(NamedTuple):
    """Values that are valid one by one and cannot hold together."""

    path: KeyPath
    """The key to change, below the model that finds the conflict."""
    message: str
    """The error; the remedy."""
    involved: tuple[str, ...] = ()
    """Other keys of the same mapping that take part."""


def raise_conflicts(conflicts: list[Conflict]) -> None:
    """End a model's validation with these conflicts; without any, let it go on.

    Raises PydanticCustomError, which :func:`validate` reports as one problem for each conflict.
    """
    from pydantic_core import PydanticCustomError

    if conflicts:
        summary = "; ".join(conflict.message for conflict in conflicts)
        context = {"summary": summary, "conflicts": conflicts}
        raise PydanticCustomError(_CONFLICT, "{summary}", context)


def validate(
    model: type[_Model],
    document: Document,
    written_at: Callable[[KeyPath, tuple[str, ...]], list[KeyPath]] = lambda path, involved: [path],
    context: Any = None,
) -> _Model:
    """Validate a file, with a context for the model's validators.

    `written_at` returns, for the path of an error and the other keys involved, the key path to
    report, then more paths whose place to give where the first is not in the file. Raises
    InvalidFileError with each problem once, in the order of the text.
    """
    from pydantic import ValidationError

    try:
        return model.model_validate(document.data, context=context)
    except ValidationError as error:
        problems = {
            _problem(detail, conflict, model, document, written_at)
            for detail in error.errors(include_url=False)
            for conflict in _conflicts(detail)
        }
    raise InvalidFileError(
        sorted(problems, key=lambda p: (p.file, p.line or 0, p.column or 0, p.key, p.message))
    )


def _problem(
    detail: Any, conflict: Conflict, model: Any, document: Document, written_at: Any
) -> Problem:
    paths = written_at((*detail["loc"], *conflict.path), conflict.involved)
    path = paths[0]
    outward = (path[:length] for length in range(len(path), -1, -1))
    entries = document.entries
    entry = next(entries[at] for at in (*paths, *outward) if at in entries)
    place = entry.key if detail["type"] == "extra_forbidden" else entry.value
    return Problem(*place, _dotted(path), conflict.message or _message(detail, model, path))


def first_problem(error: ValidationError, file: str, model: type[BaseModel]) -> Problem:
    """First problem that pydantic found in a file whose lines are not known."""
    detail = error.errors(include_url=False)[0]
    key = _dotted(detail["loc"])
    if len(key) > 100 or not key.isprintable():  # a stranger's
        key = shown(key)
    return Problem(file, None, None, key, _message(detail, model, detail["loc"]))


def _conflicts(detail: Any) -> list[Conflict]:
    if detail["type"] == _CONFLICT:
        return list(detail["ctx"]["conflicts"])
    # The error of a default that depends on another key follows from the error of that key.
    return [] if detail["type"] == "default_factory_not_called" else [Conflict((), "")]


def _message(detail: Any, model: type[BaseModel], path: KeyPath) -> str:
    value = shown(detail["input"])
    match detail["type"]:
        case "extra_forbidden":
            return _unknown_key(model, path)
        case "value_error":
            return str(detail["ctx"]["error"])
        case "literal_error":
            words = re.findall("'([^']*)'", detail["ctx"]["expected"])
            said = detail["input"]
            hint = (did_you_mean(said, words) if isinstance(said, str) else "") or "."
            return f"{value} is not valid{hint} Valid values: {', '.join(words)}"
        case "bool_type":
            return f"{value} is not true or false: write one of the two"
        case "string_type":
            return f"{value} is not text: write one word, or a string in quotes"
        case "tuple_type":
            choices = get_args(get_args(_type_at(model, path))[0])
            return f"{value} is not a list: write it as [{', '.join(choices)}]"
        case "missing":
            return f"missing: {_how_to_write(model, path)}"
        case "model_type":
            return f"{value} is not a mapping: {_how_to_write(model, path)}"
    return f"{value}: {detail['msg']}"


def _how_to_write(model: type[BaseModel], path: KeyPath) -> str:
    at = _type_at(model, path)
    is_model = hasattr(at, "model_fields")
    example = getattr(at if is_model else _type_at(model, path[:-1]), "how_to_write", None)
    if example:
        return str(example())
    return f"write keys below it. Valid keys: {', '.join(_keys(at))}" if is_model else "add the key"


def _keys(model: Any) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


def _unknown_key(model: type[BaseModel], path: KeyPath) -> str:
    *outer, last = path
    keys = _keys(_type_at(model, outer))
    hint = did_you_mean(str(last), keys)
    if not hint:
        # A valid key one level too high or too low.
        dotted = {key.rpartition(".")[2]: key for key in _dotted_keys(model)}
        near = _nearest(str(last), dotted, similarity=0.85)
        hint = f", did you mean {dotted[near]}?" if near else "."
    return f"unknown key{hint} Valid keys: {', '.join(keys)}"


def _type_at(model: type[BaseModel], path: Iterable[str | int]) -> Any:
    """Type at a path of keys and list items; None below anything but models and lists."""
    at: Any = model
    for key in path:
        fields = getattr(at, "model_fields", {})
        inner = [it.annotation for name, it in fields.items() if key in (name, it.alias)]
        at = next(iter(get_args(at) if isinstance(key, int) else inner), None)
    return at


def _dotted_keys(model: type[BaseModel]) -> Iterator[str]:
    """Keys of a file and of its mappings, such as ``defaults`` and ``defaults.kind``."""
    for name, field in model.model_fields.items():
        yield name
        below = field.annotation
        if not hasattr(below, "how_to_write"):
            yield from (f"{name}.{key}" for key in getattr(below, "model_fields", ()))
