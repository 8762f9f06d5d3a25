"""Runs a function beside the training."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

__all__ = ["Background", "run_in_thread"]

Background = Callable[[Callable[[], Any]], "Future[Any]"]
"""Starts a function and returns at once, with the future of its result."""


def run_in_thread(work: Callable[[], Any]) -> Future[Any]:
    """Run a function in a thread of its own, which ends with the process.

    The threads of a ``ThreadPoolExecutor`` are waited for at exit, this one is not.
    """
    future: Future[Any] = Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name="umem plan search", daemon=True).start()
    return future
