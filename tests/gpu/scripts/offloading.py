"""Activation offload on the GPU: ``offloading.py POLICY|stock``; facts as JSON."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import umem
from umem.offloading import ActivationStore, offload

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


def races() -> dict[str, Any]:
    """Memory that was let go is overwritten at once, with the GPU far behind the CPU."""
    side, tensors = 2048, 8
    store = ActivationStore("cuda")
    wrong, caught_up = [], []
    for _ in range(4):
        scale = torch.ones((), device="cuda", requires_grad=True)
        asleep = torch.cuda.Event()
        torch.cuda._sleep(SLEEP_CYCLES)
        asleep.record()
        store.open_group("a")
        values = [torch.rand(side, side, device="cuda") for _ in range(tensors)]
        expected = [value.clone() for value in values]
        products = [(scale * value).sum() for value in values]
        store.close_group()
        del values
        store.send("a")
        store.release("a")
        caught_up.append(asleep.query())
        # The same memory again.
        junk = [torch.full((side, side), float("nan"), device="cuda") for _ in range(tensors)]
        torch.cuda._sleep(SLEEP_CYCLES)
        asleep.record()
        del junk
        store.fetch("a", range(tensors // 2))  # the other half comes late
        caught_up.append(asleep.query())
        for product, value in zip(products, expected, strict=True):
            (gradient,) = torch.autograd.grad(product, scale)
            (plain,) = torch.autograd.grad((scale * value).sum(), scale)
            wrong.append((gradient - plain).abs())
        del products, product
    return {
        "wrong": max(error.item() for error in wrong),
        "waited": any(caught_up[2:]),  # the first step pins memory
        "late": store.statistics.late_fetches,
    }


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
    for part in (races, capture):
        facts[part.__name__] = part()
        gc.collect()
        torch.cuda.empty_cache()
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
