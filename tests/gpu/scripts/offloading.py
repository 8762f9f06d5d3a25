"""Activation offload on the GPU: ``offloading.py POLICY|stock``; facts as JSON."""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import umem
from umem.offload import ActivationStore, offload

MIB = 1 << 20
LAYERS, SIZE = 5, 512
SLEEP_CYCLES = 200_000_000  # 0.1 s and more below 2 GHz


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE), nn.GELU(), nn.Linear(SIZE, SIZE)
    )


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(SIZE, SIZE),
    "layernorm+linear": lambda: nn.Sequential(nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE)),
    "layernorm+mlp": mlp,
}


def held_and_results(
    layers: list[nn.Module], num_layers: int
) -> tuple[int, list[torch.Tensor], Any]:
    """Bytes held between forward and backward pass; the output and the gradients."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    before = torch.cuda.memory_allocated()
    context, sync = offload(max(num_layers, 1), LAYERS, enabled=num_layers > 0)
    x = torch.randn(128, 512, SIZE, device="cuda", dtype=torch.bfloat16, generator=generator)
    for layer in layers:
        with context:
            x = layer(x)
        x = sync(x)
    held = torch.cuda.memory_allocated() - before
    parameters = [p for layer in layers for p in layer.parameters()]
    gradients = torch.autograd.grad(x.float().square().mean(), parameters)
    told = context.statistics if num_layers else None
    return held, [x.detach(), *gradients], told


def compare(name: str) -> dict[str, Any]:
    """The comparison of memory with offload and without, and of one layer alone."""
    torch.manual_seed(0)
    layers = [MAKERS[name]().to("cuda", torch.bfloat16) for _ in range(LAYERS)]
    held_and_results(layers, 0)  # workspaces of matrix products
    off, plain, _ = held_and_results(layers, 0)
    one, _, _ = held_and_results(layers[:1], 0)
    on, offloaded, told = held_and_results(layers, LAYERS - 1)
    pairs = zip(plain, offloaded, strict=True)
    return {
        "off": off,
        "on": on,
        "one": one,
        "weights": sum(p.nbytes for layer in layers for p in layer.parameters() if p.dim() > 1),
        "equal": [torch.equal(a, b) for a, b in pairs],
        "tensors": [told.tensors_out, told.tensors_in, told.late_fetches],
    }


def saved_by(store: ActivationStore, key: str, tensors: int, side: int) -> Any:
    """A graph that has saved tensors of 4 * side * side bytes; values are their numbers."""
    scale = torch.ones((), device="cuda", requires_grad=True)
    store.open_group(key)
    total = torch.zeros((), device="cuda")
    for number in range(tensors):
        total = total + (scale * torch.full((side, side), float(number), device="cuda"))[0, 0]
    store.close_group()
    return total, scale


def races() -> dict[str, Any]:
    """Memory that was let go is overwritten at once, with the GPU far behind the CPU."""
    side, tensors = 2048, 8
    store = ActivationStore("cuda")
    wrong, waits = [], []
    for _ in range(4):
        scale = torch.ones((), device="cuda", requires_grad=True)
        torch.cuda._sleep(SLEEP_CYCLES)
        store.open_group("a")
        values = [torch.rand(side, side, device="cuda") for _ in range(tensors)]
        expected = [value.clone() for value in values]
        products = [(scale * value).sum() for value in values]
        store.close_group()
        del values
        begin = time.perf_counter()
        store.send("a")
        store.release("a")
        waits.append(time.perf_counter() - begin)
        # The same memory again.
        junk = [torch.full((side, side), float("nan"), device="cuda") for _ in range(tensors)]
        torch.cuda._sleep(SLEEP_CYCLES)
        del junk
        begin = time.perf_counter()
        store.fetch("a", range(tensors // 2))  # the other half comes late
        waits.append(time.perf_counter() - begin)
        for product, value in zip(products, expected, strict=True):
            (gradient,) = torch.autograd.grad(product, scale)
            (plain,) = torch.autograd.grad((scale * value).sum(), scale)
            wrong.append((gradient - plain).abs())
        del products, product
    return {
        "wrong": max(error.item() for error in wrong),
        "waits_ms": [wait * 1e3 for wait in waits[2:]],  # the first step pins memory
        "late": store.statistics.late_fetches,
        "sleeps_ms": SLEEP_CYCLES / 2e6,
    }


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


def capture() -> dict[str, Any]:
    """While a graph is captured the store stays out."""
    store = ActivationStore("cuda")
    x = torch.ones(1024, 1024, device="cuda", requires_grad=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.autograd.grad((x * 2).exp().sum(), x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        opened = store.open_group("a")
        y = (x * 2).exp()
        store.close_group()
        (gradient,) = torch.autograd.grad(y.sum(), x)
    graph.replay()
    expected = torch.autograd.grad((x * 2).exp().sum(), x)[0]
    return {"opened": opened, "equal": torch.equal(gradient, expected)}


def main() -> None:
    """Do all of it."""
    if sys.argv[1] != "stock":
        umem.enable(sys.argv[1])
    facts: dict[str, Any] = {}
    for name in MAKERS:
        facts[name] = compare(name)
        gc.collect()
    for part in (races, bandwidth, beside_compute, capture):
        facts[part.__name__] = part()
        gc.collect()
        torch.cuda.empty_cache()
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
