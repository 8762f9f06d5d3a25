"""Prints what the copies of activation offload reach, and what they cost kernels beside them.

``python benchmarks/offload_copies.py`` measures on GPU 0 under torch's allocator, and with a
policy's name (``sft``) under umem's.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import umem
from umem.offloading import ActivationStore


def saved_by(store: ActivationStore, key: str, tensors: int, side: int) -> Any:
    """A graph that has saved tensors of 4 * side * side bytes; values are their numbers."""
    scale = torch.ones((), device="cuda", requires_grad=True)
    store.open_group(key)
    total = torch.zeros((), device="cuda")
    for number in range(tensors):
        total = total + (scale * torch.full((side, side), float(number), device="cuda"))[0, 0]
    store.close_group()
    return total, scale


def bandwidth() -> dict[str, float]:
    """Of the store's copies, and of plain copies of the same size; GB/s, the best of five."""
    side, tensors = 4096, 16
    size_bytes = tensors * 4 * side * side
    store = ActivationStore("cuda")

    def seconds(work: Callable[[], Any]) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    times: dict[str, list[float]] = {"out": [], "in": [], "plain_out": [], "plain_in": []}
    for repeat in range(6):
        total, _ = saved_by(store, "a", tensors, side)
        took = {"out": seconds(lambda: store.send("a"))}
        assert store.release("a") == size_bytes
        took["in"] = seconds(lambda: store.fetch("a"))
        del total
        if repeat:  # the first one pins memory
            for name, value in took.items():
                times[name].append(value)
    store.close()
    device = [torch.ones(side, side, device="cuda") for _ in range(tensors)]
    host = [torch.ones(side, side).pin_memory() for _ in range(tensors)]
    for _ in range(5):
        pairs = list(zip(device, host, strict=True))
        times["plain_out"].append(
            seconds(lambda pairs=pairs: [h.copy_(d, non_blocking=True) for d, h in pairs])  # type: ignore[misc]
        )
        times["plain_in"].append(
            seconds(lambda pairs=pairs: [d.copy_(h, non_blocking=True) for d, h in pairs])  # type: ignore[misc]
        )
    return {name: size_bytes / min(values) / 1e9 for name, values in times.items()}


def beside_compute() -> dict[str, float]:
    """Matrix products alone, and while 1 GiB is sent; ms, medians of pairs."""
    left = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    right = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    store = ActivationStore("cuda")

    def products() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(24):
            torch.mm(left, right)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    alone, beside = [], []
    for repeat in range(7):
        total, _ = saved_by(store, "a", 16, 4096)
        torch.cuda.synchronize()
        first = products()
        store.send("a")
        second = products()
        torch.cuda.synchronize()
        del total
        if repeat:
            alone.append(first)
            beside.append(second)
    return {"alone": statistics.median(alone), "beside": statistics.median(beside)}


def main() -> None:
    """Measure bandwidth, then kernels beside copies."""
    if len(sys.argv) > 1:
        umem.enable(sys.argv[1])
    for name, value in bandwidth().items():
        print(f"{name:10} {value:8.1f} GB/s")
    torch.cuda.empty_cache()
    for name, value in beside_compute().items():
        print(f"24 products, {name:6} {value:8.2f} ms")


if __name__ == "__main__":
    main()
