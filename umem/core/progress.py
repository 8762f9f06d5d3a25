"""Progress messages: shown by a command while it runs, log records elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["notify", "notify_by"]

_LOG = logging.getLogger("umem")


def _log(message: str) -> None:
    _LOG.warning("umem: %s", message)


_show: ContextVar[Callable[[str], None]] = ContextVar("_show", default=_log)


def notify(message: str) -> None:
    """Announce a long operation, just before it begins."""
    _show.get()(message)


@contextmanager
def notify_by(show: Callable[[str], None]) -> Iterator[None]:
    """Pass messages to a function instead of the log."""
    token = _show.set(show)
    try:
        yield
    finally:
        _show.reset(token)
