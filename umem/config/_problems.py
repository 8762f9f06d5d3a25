"""What is wrong with a file and where: the record, and the words shared by all messages."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

__all__ = [
    "KeyPath",
    "Place",
    "Problem",
    "UnusableError",
    "did_you_mean",
    "nearest",
    "problem_at",
    "reject",
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
