"""Problems in files: place, error and remedy of each in one line of text."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

__all__ = [
    "Conflicts",
    "FilePlace",
    "InvalidFileError",
    "KeyPath",
    "Problem",
    "did_you_mean",
    "dotted",
    "message_of",
    "raise_conflicts",
    "shown",
    "summary",
    "visible",
]

_MOST_SHOWN = 10
_LONGEST_KEY = 100

KeyPath = tuple[str | int, ...]
"""Keys, and numbers of list items, from the outside in; ``()`` for a whole file."""


@dataclass(frozen=True)
class FilePlace:
    """Where a key is written."""

    file: str
    """Path of the file, or a name for data that is not in a file."""
    line: int | None = None
    """From 1; None where there is no text."""
    column: int | None = None
    key: str = ""
    """Dotted key path, such as ``classes.weights.kind``; empty for the file as a whole."""


@dataclass(frozen=True)
class Problem(FilePlace):
    """A problem in a file. ``str()`` is ``file:line:column: key: message``, as far as known."""

    message: str = ""
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
    """Carries problems up to the function that loads a file."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(summary(self.problems))


def dotted(path: KeyPath) -> str:
    """A key path as text, cut short: it may be a stranger's."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    text = "".join(parts).removeprefix(".")
    return text if len(text) <= _LONGEST_KEY else shown(text)


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


_MOST_MEANT = 4
"""Words that begin alike are all named, if there are no more."""


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """The question, after a comma; empty where no word is similar."""
    plain = {known.lower().replace("-", "_"): known for known in words}
    asked = word.lower().replace("-", "_")
    near = [it for it in plain if it.startswith(asked)] if asked else []
    if not 1 <= len(near) <= _MOST_MEANT:
        near = difflib.get_close_matches(asked, plain, n=1)
    *others, last = [repr(plain[it]) for it in near] or [""]
    meant = f"{', '.join(others)} or {last}" if others else last
    return f", did you mean {meant}?" if meant else ""


# Errors of pydantic.


Conflicts = Sequence[tuple[KeyPath, str]]
"""Paths below a model of values that cannot hold together, with error and remedy of each."""


def raise_conflicts(conflicts: Conflicts) -> None:
    """End a model's validation with these conflicts; without any, let it go on."""
    from pydantic import ValidationError

    if conflicts:
        raise ValidationError.from_exception_data(
            "conflicts",
            [
                {"type": "value_error", "loc": path, "input": None, "ctx": {"error": message}}
                for path, message in conflicts
            ],
        )


def message_of(detail: ErrorDetails, model: Any) -> str:
    """The error and the remedy, for an error that pydantic found in the data of a model."""
    path, value = detail["loc"], shown(detail["input"])
    match detail["type"]:
        case "value_error":
            return str(detail["ctx"]["error"])
        case "json_invalid":
            return f"not valid JSON ({detail['ctx']['error']}): give a file that umem wrote"
        case "missing":
            return "missing: add the key"
        case "model_type":
            keys = _fields(model, path)
            return f"{value} is not a mapping: write keys below it. Valid keys: {', '.join(keys)}"
        case "tuple_type":
            return f"{value} is not a list: write one in brackets, such as [{value}]"
        case "literal_error":
            words = re.findall("'([^']*)'", detail["ctx"]["expected"])
            return f"{value}: {detail['msg']}{did_you_mean(str(detail['input']), words)}"
        case "extra_forbidden":
            key, keys = str(path[-1]), _fields(model, path[:-1])
            # A valid key may be written one level too high or too low.
            levels: list[KeyPath] = [(), *((name,) for name in _fields(model))]
            found = [dotted((*it, key)) for it in levels if key in _fields(model, it)]
            elsewhere = f", did you mean {found[0]!r}?" if len(found) == 1 else "."
            hint = did_you_mean(key, keys) or elsewhere
            return f"unknown key{hint} Valid keys: {', '.join(keys)}"
    return f"{value}: {detail['msg']}"


def _fields(model: Any, path: KeyPath = ()) -> dict[str, Any]:
    """Fields of the model at a path below a model, by key; empty for anything else."""
    for part in path:
        if isinstance(part, int):
            model = next(iter(get_args(model)), None)
        else:
            model = getattr(_fields(model).get(part), "annotation", None)
    fields = getattr(model, "model_fields", {})
    return {field.alias or name: field for name, field in fields.items()}
