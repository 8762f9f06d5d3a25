"""Layers that keep copies of their weights in eight bits: no bit changes under streaming.

A stand-in for TransformerEngine's layers under FP8 with delayed scaling, whose wheel needs a GPU.
As there, a step's first micro-batch casts each weight into a cache that the layer holds in a plain
dictionary, later ones use the cache, scales come from the largest values of earlier casts, and
autograd saves the cache beside the input's cast. Products are taken in float32, as a CPU has none
in eight bits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from found_trainings import Streams, streaming
from streamed_programs import WIDTH, Net, Program, bits, compare
from streamed_uses import USES
from torch import nn

HISTORY = 4
"""Casts whose largest values give the next scale."""

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


class Scales:
    """Delayed scaling of one tensor: state of a layer that is neither parameter nor buffer."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.history = torch.zeros(HISTORY)
        self.scale = torch.ones(())

    @torch.no_grad()
    def cast(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The tensor in eight bits, and what to multiply it with."""
        largest = LARGEST[self.dtype]
        used = self.scale.clone()
        made = (tensor * used).clamp(-largest, largest).to(self.dtype)
        self.history.copy_(self.history.roll(1))
        self.history[0] = tensor.abs().max()
        self.scale.copy_(largest / self.history.max().clamp(min=1e-12))
        return made, 1 / used


class Multiply(torch.autograd.Function):
    """A product of casts, which are saved for the backward pass in place of the weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, layer: CachingLinear) -> Any:
        (cast, inverse), (w, of_w) = layer.scales["input"].cast(x), layer.cache["weight"]
        ctx.save_for_backward(cast, inverse, w, of_w)
        ctx.scales = layer.scales["gradient"]
        return (cast.float() * inverse) @ (w.float() * of_w).T

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, of_x, w, of_w = ctx.saved_tensors
        cast, inverse = ctx.scales.cast(gradients[0])
        gradient = cast.float() * inverse
        return gradient @ (w.float() * of_w), gradient.T @ (x.float() * of_x), None


class CachingLinear(nn.Linear):
    """Multiplies in eight bits."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.cache: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        kinds = {"input": torch.float8_e4m3fn, "weight": torch.float8_e4m3fn}
        self.scales = {
            name: Scales(it) for name, it in (kinds | {"gradient": torch.float8_e5m2}).items()
        }

    def forward(self, x: torch.Tensor, is_first: bool = True) -> torch.Tensor:
        if is_first or not self.cache:
            made = self.scales["weight"].cast(self.weight)
            for memory, new in zip(self.cache.setdefault("weight", made), made, strict=True):
                memory.copy_(new)  # the cache keeps its memory
        y: torch.Tensor = Multiply.apply(x, self.weight, self)  # type: ignore[no-untyped-call]
        return y + self.bias

    def get_extra_state(self) -> Any:
        return [(it.history.clone(), it.scale.clone()) for it in self.scales.values()]

    def set_extra_state(self, state: Any) -> None:
        for it, (history, scale) in zip(self.scales.values(), state, strict=True):
            it.history.copy_(history)
            it.scale.copy_(scale)


class Cached(Net):
    """Every second call uses the caches of the one before, as a step's second micro-batch does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(CachingLinear() for _ in range(4))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_first = self.calls % 2 == 0
        self.calls += 1
        x = self.stem(x) * self.scale
        for layer in self.layers:
            x = x + torch.tanh(layer(x, is_first))
        y: torch.Tensor = self.head(self.norm(x))
        return y


@pytest.mark.parametrize("streams_weights", [False, True])
@pytest.mark.parametrize("use", USES)
def test_no_use_sees_another_value(use: Callable[[Program], None], streams_weights: bool) -> None:
    program = compare(use, 0.5, make_model=Cached, batches=2, streams_weights=streams_weights)
    assert program.training is not None
    assert program.training.counts.streamed
    if program.weights is not None:
        assert program.weights.streamed.counts.fetched


@pytest.mark.slow
@pytest.mark.parametrize("offloads", [False, True])
def test_activations_are_copied_where_no_other_offload_is_on(
    offloads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own CPU offload puts hooks on saved tensors around the call of each layer."""

    def run(streams: Streams | None) -> Any:
        torch.manual_seed(0)
        model = Cached()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        own_offload: Any = torch.autograd.graph.save_on_cpu if offloads else nullcontext
        seen: list[Any] = []
        with streaming(streams, monkeypatch):
            for step in range(8):
                optimizer.zero_grad()
                for batch in range(2):
                    generator = torch.Generator().manual_seed(2 * step + batch)
                    with own_offload():
                        loss = model(torch.randn(64, WIDTH, generator=generator)).square().mean()
                    loss.backward()
                    seen.append(loss.detach())
                seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
                optimizer.step()
            return bits([*seen, *model.parameters(), model.state_dict()])

    streams = Streams()
    assert run(streams) == run(None)
    (training,) = streams.trainings
    assert training.counts.streamed > 1
    status = training.status().tuning
    assert status is not None
    counts = status.activations
    if offloads:
        assert counts.tensors_out == 0
    else:  # of what autograd saves, the caches are still there
        assert counts.tensors_out > counts.tensors_in > 0
    assert counts.late_fetches == 0
