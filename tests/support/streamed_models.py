"""Models and optimizers that do as those of other libraries, for streamed programs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from streamed_programs import WIDTH, Net
from torch import nn

# ---- layers that keep copies of their weights in eight bits ----

# A stand-in for TransformerEngine's layers under FP8 with delayed scaling, whose wheel needs a GPU.
# As there, a step's first micro-batch casts each weight into a cache that the layer holds in a
# plain dictionary, later ones use the cache, scales come from the largest values of earlier casts,
# and autograd saves the cache beside the input's cast. Products are taken in float32, as a CPU has
# none in eight bits.

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


class MultiplyCasts(torch.autograd.Function):
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
        y: torch.Tensor = MultiplyCasts.apply(x, self.weight, self)  # type: ignore[no-untyped-call]
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
        return self.head(self.norm(x))


# ---- frozen weights of four bits under adapters ----


class Packed(nn.Parameter):
    """Two numbers of four bits in each byte, in a class of their own as bitsandbytes has one."""


class MultiplyPacked(torch.autograd.Function):
    """Unpacks the weight in both passes, and saves it packed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(packed)
        ctx.scale = scale
        return x @ unpacked(packed, scale).T

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (packed,) = ctx.saved_tensors
        return gradients[0] @ unpacked(packed, ctx.scale), None, None


def unpacked(packed: torch.Tensor, scale: float) -> torch.Tensor:
    return scale * (torch.stack([packed & 15, packed >> 4], -1).flatten(-2).float() - 8)


class Adapted(nn.Module):
    """A frozen weight of four bits, and a trained product of two small ones beside it."""

    def __init__(self, rank: int = 4) -> None:
        super().__init__()
        codes = torch.randint(0, 256, (WIDTH, WIDTH // 2), dtype=torch.uint8)
        self.weight = Packed(codes, requires_grad=False)
        self.down = nn.Linear(WIDTH, rank, bias=False)
        self.up = nn.Linear(rank, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = MultiplyPacked.apply(x, self.weight, 1 / 64)  # type: ignore[no-untyped-call]
        return y + self.up(self.down(x))


class QLoRA(Net):
    """Trains the adapters alone."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.layers = nn.ModuleList(Adapted() for _ in range(4))


def adamw_of_trained(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([it for it in parameters if it.requires_grad], lr=1e-2)


# ---- what DeepSpeed's Adam does ----


class FusedAdam(torch.optim.Optimizer):
    """What DeepSpeed's does with parameters, state and settings, in torch's operators."""

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        with torch.no_grad():
            self._update()
        return loss

    def _update(self) -> None:
        for group in self.param_groups:
            state: dict[str, Any] = {}
            of_group = [it for it in group["params"] if it.grad is not None]
            for it in of_group:
                state = self.state[it]
                if not state:
                    state |= {"step": 0, "exp_avg": torch.zeros_like(it)}
                    state["exp_avg_sq"] = torch.zeros_like(it)
            if not of_group:
                continue
            state["step"] += 1  # the last one's alone
            for it in of_group:
                average, square = self.state[it]["exp_avg"], self.state[it]["exp_avg_sq"]
                average.mul_(0.9).add_(it.grad, alpha=0.1)
                square.mul_(0.99).addcmul_(it.grad, it.grad, value=0.01)
                corrected = (square / (1 - 0.99 ** state["step"])).sqrt() + 1e-8
                decayed = average / corrected + group["weight_decay"] * it
                it.sub_(group["lr"] / (1 - 0.9 ** state["step"]) * decayed)


FusedAdam.__module__ = "deepspeed.ops.adam.fused_adam"


def one_in_a_group(parameters: Any, lr: float) -> FusedAdam:
    settings = {"lr": lr, "weight_decay": 0.01}
    return FusedAdam([{"params": [it]} for it in parameters], settings)
