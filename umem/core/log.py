"""What umem says: the logger ``umem``, and ``UMEM_LOG``."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping

from umem.core.errors import PolicyError

__all__ = ["LOG_VARIABLE", "is_first_rank", "parse_log_level", "show_log"]

LOG_VARIABLE = "UMEM_LOG"

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "off": logging.CRITICAL + 1,
}

_LOG = logging.getLogger("umem")


class _Lines(logging.Handler):
    """Writes to standard error, until the program has handlers of its own for all logs."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            print(self.format(record), file=sys.stderr)


_LINES = _Lines()


def parse_log_level(text: str) -> int:
    """The level of logging that a value of ``UMEM_LOG`` stands for; ``PolicyError`` if none."""
    if text not in _LEVELS:
        raise PolicyError(f"{LOG_VARIABLE}: {text!r} is not one of {', '.join(_LEVELS)}")
    return _LEVELS[text]


def is_first_rank(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this is the first process of its host, or the only one."""
    return environ.get("LOCAL_RANK", "0") == "0"


def show_log(default: str | None = None, environ: Mapping[str, str] = os.environ) -> None:
    """Show umem's log on standard error from a level on, as ``UMEM_LOG`` says.

    A program that configures logging shows umem's records by its own handlers instead, and none of
    them twice.

    Parameters
    ----------
    default
        Level where ``UMEM_LOG`` is not set. None for Python's own: warnings are shown.
    environ
        The environment.

    Raises
    ------
    PolicyError
        If ``UMEM_LOG`` is no level.
    """
    text = environ.get(LOG_VARIABLE) or default
    if text is None:
        return
    _LOG.setLevel(parse_log_level(text))
    _LOG.addHandler(_LINES)  # again is no second one
    _LOG.removeFilter(_as_the_program_says)
    if not environ.get(LOG_VARIABLE):
        _LOG.addFilter(_as_the_program_says)


def _as_the_program_says(record: logging.LogRecord) -> bool:
    """A program that has set up logging decides what it shows, unless ``UMEM_LOG`` does."""
    root = logging.getLogger()
    return not root.handlers or record.levelno >= root.level
