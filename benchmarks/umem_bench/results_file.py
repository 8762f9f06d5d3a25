"""Results files: what those of all benchmarks have in common."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from umem.core.errors import UmemError
from umem.io.files import read_file, replace_file

__all__ = ["Record", "ResultsFileError", "read_results", "write_results"]

_LIMIT_BYTES = 64 << 20


class ResultsFileError(UmemError, ValueError):
    """A file that holds no benchmark results."""


class Record(BaseModel):
    """Data that are as they were made, and have the fields they should have and no others."""

    model_config = ConfigDict(frozen=True, extra="forbid")


_Results = TypeVar("_Results", bound=Record)


def write_results(results: Record, path: Path, indent: int = 2) -> None:
    """Write a results file in one piece: a reader sees the old file or the whole new one.

    Raises
    ------
    OSError
        If it cannot be written; an old file is then as it was.
    """
    replace_file(path, (results.model_dump_json(indent=indent) + "\n").encode())


def read_results(kind: type[_Results], path: Path, command: str) -> _Results:
    """Read a results file, which may come from a stranger: it is data, of at most 64 MiB.

    Parameters
    ----------
    kind
        What the file is to hold.
    path
        The file.
    command
        Which writes such files, for the error's text.

    Raises
    ------
    ResultsFileError
        If the file cannot be read, or is not one that the command wrote.
    """
    try:
        content = read_file(path, _LIMIT_BYTES)
    except OSError as error:
        raise ResultsFileError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ResultsFileError(f"{path}: cannot be read ({error})") from error
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise ResultsFileError(
            f"{path}: not a file of `{command}`: {place}: {first['msg']}; write it anew"
        ) from error
