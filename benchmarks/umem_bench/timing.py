"""Timing loops."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

__all__ = ["loops_for", "no_garbage_collection", "time_calls", "time_loops_s"]

_MAX_LOOPS = 50_000
_FIRST_LOOPS = 8
_TRIAL_SHARE = 0.2

_Result = TypeVar("_Result")


def time_calls(
    call: Callable[[], _Result], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> tuple[_Result, tuple[float, ...]]:
    """The last call's result, and the seconds that each call took."""
    times_s = []
    with no_garbage_collection():
        for _ in range(rounds):
            began_s = clock()
            result = call()
            times_s.append(clock() - began_s)
    return result, tuple(times_s)


def time_loops_s(loop: Callable[[int], None], loops: int, threads: int = 1) -> float:
    """Wall time of one pass: `loops` passes spread evenly over `threads` threads.

    `loop` makes the number of passes that it is given, once in each thread. With several threads
    the result is the time between two passes of the whole process.
    """
    each = max(1, loops // threads)
    with no_garbage_collection():
        if threads == 1:
            began_s = time.perf_counter()
            loop(each)
            return (time.perf_counter() - began_s) / each
        return _time_threads_s(loop, each, threads) / (each * threads)


def loops_for(loop: Callable[[int], None], seconds: float, threads: int = 1) -> int:
    """The number of passes that take about `seconds`; warms `loop` up on the way."""
    loops = _FIRST_LOOPS * threads
    while True:
        took_s = time_loops_s(loop, loops, threads) * loops
        if took_s >= seconds * _TRIAL_SHARE or loops >= _MAX_LOOPS:
            return max(_FIRST_LOOPS * threads, min(_MAX_LOOPS, round(loops * seconds / took_s)))
        loops *= 2


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keep Python's cyclic collector from running in the middle of a measurement."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _time_threads_s(loop: Callable[[int], None], each: int, threads: int) -> float:
    start_line = threading.Barrier(threads)
    starts_s: list[float] = []
    ends_s: list[float] = []
    failures: list[BaseException] = []

    def work() -> None:
        start_line.wait()
        starts_s.append(time.perf_counter())
        try:
            loop(each)
        except BaseException as error:  # raised again by the thread that measures
            failures.append(error)
        ends_s.append(time.perf_counter())

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failures:
        raise failures[0]
    return max(ends_s) - min(starts_s)
