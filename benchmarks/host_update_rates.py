"""Prints how many parameters a second the host's cores update, beside torch's own fused AdamW.

``python benchmarks/host_update_rates.py`` takes a tenth of the host's free memory; ``--parameters``
says how many instead. Each rate is the best of some repeats: float32 reads 16 bytes a parameter and
writes 12.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable
from functools import partial

import torch

from umem.hardware.host_memory import host_memory
from umem.runtime.native_library import native
from umem.streaming.host_share import (
    DeviceOptimizer,
    Hyperparameters,
    Powers,
    constants,
    forms_of,
    kind_of,
)

REPEATS = 5


def best_rate(parameters: int, call: Callable[[], object]) -> float:
    """Parameters a second, of the fastest of some calls behind one that nobody times."""
    call()
    durations = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        call()
        durations.append(time.perf_counter() - begin)
    return parameters / min(durations)


def rows(parameters: int, dtype: torch.dtype) -> None:
    """Print the rates for one type, by threads."""
    tensors = [torch.full((parameters,), it, dtype=dtype) for it in (0.02, 1e-3, 1e-3, 1e-6)]
    weight = torch.nn.Parameter(tensors[0])
    weight.grad = tensors[1]
    optimizer = torch.optim.AdamW([weight], fused=True, weight_decay=0.1)
    state = {"step": torch.tensor(9.0), "exp_avg": tensors[2], "exp_avg_sq": tensors[3]}
    optimizer.state[weight] = state
    given = Hyperparameters(optimizer.param_groups[0], 10)
    kind = kind_of(optimizer, given, dtype)
    assert kind is not None
    form = next(forms_of(kind)).native()
    power = Powers(DeviceOptimizer(optimizer, "cpu").powers)
    numbers = native().HostConstants(**constants(kind, given, power))
    spans = [(*(it.data_ptr() for it in tensors), parameters)]
    cpus = len(os.sched_getaffinity(0))
    for threads in sorted({1, 2, 4, 8, 12, 16, 24, 32, 48, 64, cpus} & set(range(1, cpus + 1))):
        found = []
        for name in native().host_instructions()[-2:]:
            workers = native().HostWorkers(threads, [], name)
            update = partial(workers.update, form, numbers, kind.is_bfloat16, spans)
            found.append(f"{name} {best_rate(parameters, update) / 1e9:6.3f}")
        torch.set_num_threads(threads)
        rate = best_rate(parameters, optimizer.step)
        found.append(f"torch {rate / 1e9:6.3f}")
        print(f"{str(dtype)[6:]:9} {threads:3} threads  {'  '.join(found)}")


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parameters", type=int, help="how many are updated at once")
    parameters = parser.parse_args().parameters
    if parameters is None:
        memory = host_memory()
        parameters = (memory.available_bytes if memory else 1 << 30) // 160
    print(f"G parameters/s of {parameters:,}; torch {torch.__version__}, {platform.processor()}")
    for dtype in (torch.float32, torch.bfloat16):
        rows(parameters, dtype)


if __name__ == "__main__":
    main()
