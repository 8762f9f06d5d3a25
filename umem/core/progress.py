"""Words for whoever has to wait: in a command its progress, elsewhere the log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["notify", "notify_by"]

_LOG = logging.getLogger("umem")


def _log(words: str) -> None:
    _LOG.warning("umem: %s", words)


_notify: ContextVar[Callable[[str], None]] = ContextVar("_notify", default=_log)


def notify(words: str) -> None:
    """Say what takes long, just before it begins."""
    _notify.get()(words)


@contextmanager
def notify_by(say: Callable[[str], None]) -> Iterator[None]:
    """Let `say` have the words, and not the log."""
    before = _notify.set(say)
    try:
        yield
    finally:
        _notify.reset(before)
