"""Prints what the hint engine's calls cost the thread that makes them, in microseconds.

``python benchmarks/hint_calls.py`` measures over host memory, ``--cuda`` over managed memory of a
GPU, while a prefetch of 1 GiB keeps the engine's threads and the driver busy.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from umem.core.classes import TensorClass
from umem.core.schedule import HintOp
from umem.runtime.hints import HintEngine

MIB = 1 << 20
REQUESTS = 30
ROUNDS = 300


def measure(name: str, call: Callable[[], object]) -> None:
    """Print the median and the 99th percentile of a call's time."""
    durations_ns = []
    for _ in range(ROUNDS):
        start_ns = time.perf_counter_ns()
        call()
        durations_ns.append(time.perf_counter_ns() - start_ns)
        time.sleep(2e-4)
    durations_ns.sort()
    median_us, last_us = durations_ns[ROUNDS // 2] / 1e3, durations_ns[ROUNDS * 99 // 100] / 1e3
    print(f"{name:32} p50 {median_us:8.2f} us   p99 {last_us:8.2f} us")


def main() -> None:
    """Measure `submit`, `submit_batch` and `wait`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cuda", action="store_true", help="on GPU 0 instead of host memory")
    if parser.parse_args().cuda:
        import torch

        from umem.cuda.bindings import allocate_managed

        torch.zeros(1, device="cuda")
        base, stream = allocate_managed(1024 * MIB), torch.cuda.current_stream().cuda_stream
        engine = HintEngine.on_cuda()
    else:
        base, stream = 1 << 40, 0
        engine = HintEngine.on_host(bytes_per_s=50e9)
    with engine:
        engine.start(0)
        addresses = [base + 4 * MIB * i for i in range(REQUESTS)]
        batch = engine.batch(
            [HintOp.PREFETCH] * REQUESTS,
            addresses,
            [2 * MIB] * REQUESTS,
            [TensorClass.WEIGHTS] * REQUESTS,
        )

        def submit_each() -> None:
            for address in addresses:
                engine.submit(HintOp.PREFETCH, address, 2 * MIB)

        measure(f"submit, {REQUESTS} requests", submit_each)
        measure(f"submit_batch, {REQUESTS} requests", lambda: engine.submit_batch(batch, stream))
        done = engine.submit(HintOp.PREFETCH, base, 2 * MIB)
        engine.wait(done, timeout_s=20.0)
        engine.submit(HintOp.EVICT, base, 1024 * MIB)
        measure("wait for a request that is done", lambda: engine.wait(done, timeout_s=1.0))


if __name__ == "__main__":
    main()
