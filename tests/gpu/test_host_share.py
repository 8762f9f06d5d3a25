"""On a GPU, a form of each table has the bits of torch's kernels. ``-s`` prints all forms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from host_updates import CASES, all_cases
from torch import nn

from umem.runtime.native_library import native
from umem.streaming.host_share import (
    DeviceOptimizer,
    Elements,
    HostSpan,
    HostUpdate,
    Hyperparameters,
    prove,
)

DEVICE = torch.device("cuda", 0)

NO_FORM = {
    # Of four elements that a thread updates, compilers fuse some and not others (torch 2.11).
    "fused Adam with decay",
    "fused Adam with decay, bfloat16",
    "fused Adam with decay, scaled",
    "fused SGD with all, bfloat16",
    "fused SGD with all, scaled",
}
"""Steps that may have none."""


@pytest.fixture(scope="module")
def workers() -> Any:
    return native().HostWorkers(8)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, _ in all_cases()])
def test_a_form_has_the_kernels_bits(name: str, workers: Any) -> None:
    optimizer, given, kind = dict(all_cases())[name]
    assert kind is not None
    device = DeviceOptimizer(optimizer, DEVICE)
    begin = prove(device, workers, kind, given)
    print(f"\n{name}, when a training begins: {begin.table()}")
    if begin.form is None:
        assert name in NO_FORM, begin.table()
        pytest.skip("no form has all bits")
    for count, steps in ((1 << 22, 20), ((1 << 22) - 1, 3)):
        rounds = tuple((count, step) for step in range(1, steps + 1))
        long = prove(device, workers, kind, given, rounds, follows=True)
        assert long.form == begin.form, long.table()
        print(f"over {steps} steps of {count:,} elements: {long.form}")


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.5, 0.99999)])
def test_powers_are_the_kernels(betas: tuple[float, float], workers: Any) -> None:
    """Of steps 1 to 16,383: each is that of a parameter of one element, in one call."""
    steps = 16_383
    weights = [nn.Parameter(it) for it in torch.zeros(steps, 1, device=DEVICE)]
    optimizer = torch.optim.AdamW(weights, lr=0.37, betas=betas, fused=True, weight_decay=0.0)
    numbers = torch.arange(steps, dtype=torch.float32, device=DEVICE)
    for number, weight in zip(numbers, weights, strict=True):
        first, second = (torch.full((1,), it, device=DEVICE) for it in (0.7, 0.9))
        optimizer.state[weight] = {"step": number, "exp_avg": first, "exp_avg_sq": second}
        weight.grad = torch.full((1,), 0.3, device=DEVICE)
    optimizer.step()
    expected = torch.cat([*map(torch.Tensor.detach, weights)]).cpu().numpy()

    updates = HostUpdate.for_optimizer(optimizer, DEVICE, threads=1)
    assert updates is not None
    own = Elements(*(np.full(steps, it, np.float32) for it in (0.0, 0.3, 0.7, 0.9)))
    for step in range(1, steps + 1):
        span = HostSpan._make([*(it.ctypes.data + 4 * (step - 1) for it in own), 1])
        given = Hyperparameters(optimizer.param_groups[0] | {"params": weights[:1]}, step)
        updates.update([span], given, torch.float32)
    updates.close()
    differing = np.flatnonzero(own.weight.view(np.uint32) != expected.view(np.uint32)) + 1
    assert differing.size == 0, f"{differing.size} steps differ, the first are {differing[:20]}"


@pytest.mark.parametrize("name", ["fused AdamW", "fused Adam", "foreach AdamW", "fused SGD"])
def test_a_training_with_clipping(name: str) -> None:
    make, arguments = CASES[name]
    shapes = [(1000, 257), (7,), (1_000_003,), (4096, 64)]
    generator = torch.Generator(DEVICE).manual_seed(3)

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE, generator=generator)

    weights = [nn.Parameter(draw(it) * 0.02) for it in shapes]
    optimizer: Any = make(weights, lr=1e-3, **arguments)
    for weight in weights:  # the first step makes the state
        weight.grad = draw(weight.shape)
    optimizer.step()
    updates = HostUpdate.for_optimizer(optimizer, DEVICE)
    assert updates is not None
    is_adam = name != "fused SGD"
    names = ("exp_avg", "exp_avg_sq") if is_adam else ("momentum_buffer",)
    homes = [
        [weight.detach().cpu(), torch.empty(0)]
        + [optimizer.state[weight][it].cpu() for it in names]
        for weight in weights
    ]
    for step in range(2, 8):
        for home, weight in zip(homes, weights, strict=True):
            weight.grad = draw(weight.shape)
            home[1] = weight.grad.cpu()
        norm = torch.nn.utils.clip_grad_norm_(weights, 1.0)
        factor = torch.clamp(1.0 / (norm + 1e-6), max=1.0)
        optimizer.step()
        spans = []
        for home in homes:
            addresses = [it.data_ptr() for it in home] + ([] if is_adam else [0])
            spans.append(HostSpan._make([*addresses, home[0].numel()]))
        group = dict(optimizer.param_groups[0])

        def late(step: int = step, group: Any = group, factor: Any = factor) -> Hyperparameters:
            return Hyperparameters(group, step, factors=(factor.item(),))

        updates.update(spans, late, torch.float32).result()
        for home, weight in zip(homes, weights, strict=True):
            stock = [weight.detach(), *(optimizer.state[weight][it] for it in names)]
            for own, other in zip([home[0], *home[2:]], stock, strict=True):
                assert torch.equal(own.view(torch.int32), other.cpu().view(torch.int32))
    updates.close()
