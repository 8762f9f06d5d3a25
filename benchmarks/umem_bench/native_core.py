"""umem's native core alone, over host memory: needs no GPU."""

from __future__ import annotations

import ctypes
import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from umem_bench.results import Measurement
from umem_bench.timing import loops_for, time_loops_s

if TYPE_CHECKING:
    import torch

    from umem.runtime._native import Allocator

__all__ = ["run_core"]

_DEVICE_BYTES = 80 << 30
"""What percentages in a policy refer to; nothing of this size is allocated."""

_CASE_S = 0.1
_QUICK_CASE_S = 0.03

# The random cases: every thread keeps so many blocks, of sizes spread evenly by their logarithm.
_LIVE_BLOCKS = 128
_STREAM_LENGTH = 4096
_SMALLEST_BYTES = 512
_LARGEST_BYTES = 4 << 20

_GRADIENT_BYTES = 4 << 20


def run_core(policy: str, *, rounds: int, quick: bool) -> list[Measurement]:
    """Time the native core from Python: one allocation and its free, and the gradient hook.

    There is nothing fair to compare an allocation with on a host: the figures are absolute, and
    Python's calls are part of them.
    """
    from umem.hardware import load_hardware
    from umem.policy import load_policy, resolve
    from umem.runtime.classification import gradient_hook
    from umem.runtime.native_library import native
    from umem.runtime.state import native_config

    hardware = replace(load_hardware("h200"), device_bytes=_DEVICE_BYTES)
    config = native_config(resolve(load_policy(policy), hardware))
    allocator: Allocator = native().Allocator.on_host(config, _DEVICE_BYTES)
    cases: dict[str, tuple[Callable[[int], None], int]] = {
        "an empty call, of which a pair makes two": (_call_loop(allocator), 1),
        "512 B, 1 thread": (_fixed_loop(allocator, 512), 1),
        "1 MiB, 1 thread": (_fixed_loop(allocator, 1 << 20), 1),
        "20 MiB, 1 thread": (_fixed_loop(allocator, 20 << 20), 1),
        "random sizes, 1 thread": (_random_loop(allocator), 1),
        "random sizes, 8 threads": (_random_loop(allocator), 8),
        "gradient hook": (_hook_loop(allocator, gradient_hook(allocator)), 1),
    }
    case_s = _QUICK_CASE_S if quick else _CASE_S
    passes = {case: loops_for(loop, case_s, threads) for case, (loop, threads) in cases.items()}
    times_s: dict[str, list[float]] = {case: [] for case in cases}
    for _ in range(rounds):
        for case, (loop, threads) in cases.items():
            times_s[case].append(time_loops_s(loop, passes[case], threads))
    return [
        Measurement(benchmark="core", case=case, subject="umem", rounds_s=tuple(rounds_s))
        for case, rounds_s in times_s.items()
    ]


def _call_loop(allocator: Allocator) -> Callable[[int], None]:
    def loop(passes: int) -> None:
        call = allocator.phase
        for _ in itertools.repeat(None, passes):
            call()

    return loop


def _fixed_loop(allocator: Allocator, size_bytes: int) -> Callable[[int], None]:
    def loop(passes: int) -> None:
        malloc, free = allocator.malloc, allocator.free
        for _ in itertools.repeat(None, passes):
            free(malloc(size_bytes))

    return loop


def _hook_loop(
    allocator: Allocator, hook: Callable[[torch.Tensor], object]
) -> Callable[[int], None]:
    """Call a hook on a parameter whose gradient lies in the allocator's memory."""
    import torch

    address = allocator.malloc(_GRADIENT_BYTES)
    memory = (ctypes.c_char * _GRADIENT_BYTES).from_address(address)
    parameter = torch.nn.Parameter(torch.zeros(_GRADIENT_BYTES // 4))
    parameter.grad = torch.frombuffer(memory, dtype=torch.float32)

    def loop(passes: int) -> None:
        for _ in itertools.repeat(None, passes):
            hook(parameter)

    return loop


def _random_loop(allocator: Allocator) -> Callable[[int], None]:
    """Replace one of many live blocks by one of another size, in a fixed random order."""
    numbers = random.Random(0)
    doublings = (_LARGEST_BYTES // _SMALLEST_BYTES).bit_length() - 1
    stream = [
        (numbers.randrange(_LIVE_BLOCKS), int(_SMALLEST_BYTES * 2 ** numbers.uniform(0, doublings)))
        for _ in range(_STREAM_LENGTH)
    ]

    def loop(passes: int) -> None:
        malloc, free = allocator.malloc, allocator.free
        live = [malloc(_SMALLEST_BYTES) for _ in range(_LIVE_BLOCKS)]
        for slot, size_bytes in itertools.islice(itertools.cycle(stream), passes):
            free(live[slot])
            live[slot] = malloc(size_bytes)
        for address in live:
            free(address)

    return loop
