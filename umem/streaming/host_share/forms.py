"""The forms of an update: which operations torch's CUDA kernels round, and which they fuse.

torch's source says what is added and multiplied. Whether a product and a sum become one operation,
rounded once, is the choice of the compiler that built torch, where the source does not say it. So
for each kind of step there is a table of forms, and :mod:`~umem.streaming.host_share.proof` finds
the one in force.

Read for the tables: torch 2.13's ``ATen/native/cuda`` (``fused_adam_utils.cuh``,
``ForeachFunctors.cuh``, ``DeviceAddCmulCdiv.cuh``), ``ATen/native/Lerp.h``, ``torch/optim/adam.py``
and ``sgd.py``, and the machine code of torch 2.11's float32 kernels for compute capability 9.0.
There, the first form of each table is in force, with two exceptions: Adam that maximizes adds decay
apart from the product (``GRADIENT``), and fused SGD has several forms at once, in its two loops
where it maximizes without decay, and among four elements where it divides by a scale.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import Optimizer

from umem.runtime.guard import PLAIN_CLASSES
from umem.runtime.model_parts import plain_step
from umem.runtime.native_library import native

__all__ = [
    "Ahead",
    "Decay",
    "First",
    "Form",
    "Hyperparameters",
    "Powers",
    "Second",
    "StepKind",
    "Weight",
    "constants",
    "forms_of",
    "kind_of",
]

# The places of names are those of allocators/host_update/update.hpp, which has their formulas.


class _Part(IntEnum):
    @staticmethod
    def _generate_next_value_(name: str, start: int, count: int, last_values: list[int]) -> int:
        return count


class Decay(_Part):
    """How weight decay is applied, to the weight or to the gradient."""

    NONE = auto()
    WEIGHT_FUSED = auto()
    WEIGHT = auto()
    SCALED = auto()
    GRADIENT_FUSED = auto()
    GRADIENT = auto()


class First(_Part):
    """The average of gradients: ``exp_avg`` or ``momentum_buffer``."""

    NESTED = auto()
    LEFT = auto()
    RIGHT = auto()
    SEPARATE = auto()
    LERP_FUSED = auto()
    LERP = auto()
    BACK_FUSED = auto()
    BACK = auto()
    COPIED = auto()


class Second(_Part):
    """The average of squared gradients, ``exp_avg_sq``."""

    NONE = auto()
    NESTED = auto()
    LEFT = auto()
    RIGHT = auto()
    SEPARATE = auto()
    SQUARE_FUSED = auto()
    SQUARE = auto()


class Ahead(_Part):
    """Nesterov's momentum."""

    NONE = auto()
    FUSED = auto()
    SEPARATE = auto()


class Weight(_Part):
    """The update of the weight."""

    QUOTIENT = auto()
    ADDCDIV_FUSED = auto()
    ADDCDIV = auto()
    ADDCMUL_FUSED = auto()
    ADDCMUL = auto()


@dataclass(frozen=True)
class Form:
    """How each part of an update is rounded."""

    decay: Decay
    first: First
    second: Second
    ahead: Ahead
    weight: Weight

    def __str__(self) -> str:
        parts = (self.decay, self.first, self.second, self.ahead, self.weight)
        return " ".join(it.name.lower() for it in parts)

    def native(self) -> Any:
        """The same for the native library."""
        parts = (self.decay, self.first, self.second, self.ahead, self.weight)
        return native().HostForm(*map(int, parts))


@dataclass(frozen=True)
class Hyperparameters:
    """What an update takes, besides tensors, of one group of parameters."""

    group: Mapping[str, Any]
    """The group of the optimizer, as it is when ``step()`` is called."""
    step: int
    """The number of this step, from 1 on."""
    has_average: bool = True
    """False in the first step of SGD, which has no momentum buffer before."""
    factors: Sequence[float] = ()
    """By what the gradient is multiplied first, one after the other, as clipping does: numbers of
    the gradient's type."""
    grad_scale: float | None = None
    """By what a fused kernel divides the gradient, for a ``GradScaler``."""
    found_inf: bool = False
    """Whether the ``GradScaler`` skips the step, so that nothing changes."""


@dataclass(frozen=True)
class StepKind:
    """What decides which code of torch updates a parameter."""

    is_adam: bool
    """Adam or AdamW; else SGD with momentum."""
    is_fused: bool
    """A fused kernel; else functions for lists of tensors."""
    is_bfloat16: bool
    """Weights, gradients and state in bfloat16; else float32."""
    decays: str
    """``weight``, ``gradient``, or empty for nothing."""
    maximizes: bool = False
    looks_ahead: bool = False
    """Nesterov's momentum."""
    is_far: bool = False
    """Whether ``lerp`` starts at its end: weights of 0.5 and more."""
    has_average: bool = True
    unscales: bool = False


def kind_of(optimizer: Optimizer, settings: Hyperparameters, dtype: torch.dtype) -> StepKind | None:
    """Tell the kind of an optimizer's step on a CUDA device; None where no table has it."""
    group = settings.group
    step = plain_step(type(optimizer))
    is_adam = step in map(plain_step, (torch.optim.Adam, torch.optim.AdamW))
    is_fused = bool(group.get("fused"))
    numbers = ("weight_decay", "eps", "momentum", "dampening")
    rate = group["lr"]
    is_known = (
        (is_adam or step is plain_step(torch.optim.SGD))
        and (is_fused or group.get("foreach") is not False)
        and not any(group.get(it) for it in ("amsgrad", "differentiable", "capturable"))
        and all(isinstance(group.get(it, 0), int | float) for it in numbers)
        # A fused kernel takes the number that a tensor has.
        and (isinstance(rate, int | float) or (is_fused and isinstance(rate, torch.Tensor)))
        and all(isinstance(it, int | float) and it for it in group.get("betas", ()))
        and (is_adam or bool(group["momentum"]))
        # Between functions for lists, each value is rounded to the tensors' type.
        and (dtype is torch.float32 or (dtype is torch.bfloat16 and is_fused))
        and all(type(it) in PLAIN_CLASSES for it in group["params"])
    )
    if not is_known:
        return None
    is_decoupled = is_adam and group.get(
        "decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)
    )
    decays = "weight" if is_decoupled else "gradient"
    return StepKind(
        is_adam,
        is_fused,
        dtype is torch.bfloat16,
        decays if group["weight_decay"] else "",
        maximizes=bool(group["maximize"]),
        looks_ahead=bool(group.get("nesterov")),
        is_far=is_adam and not is_fused and float(np.float32(1 - group["betas"][0])) >= 0.5,
        has_average=is_adam or settings.has_average,
        unscales=settings.grad_scale is not None,
    )


def forms_of(kind: StepKind) -> Iterator[Form]:
    """The forms that a kind of step may have, the likeliest first."""
    decays = {
        "": [Decay.NONE],
        "weight": [Decay.WEIGHT_FUSED, Decay.WEIGHT] if kind.is_fused else [Decay.SCALED],
        "gradient": [Decay.GRADIENT_FUSED, Decay.GRADIENT],
    }[kind.decays]
    second, ahead = [Second.NONE], [Ahead.NONE]
    first = [First.RIGHT, First.LEFT, First.SEPARATE]
    if not kind.is_adam:
        weight = [Weight.ADDCMUL_FUSED, Weight.ADDCMUL]
        if kind.looks_ahead:
            ahead = [Ahead.FUSED, Ahead.SEPARATE]
        if not kind.has_average:
            first = [First.COPIED]
    elif kind.is_fused:
        first.insert(0, First.NESTED)
        second = [Second.NESTED, Second.LEFT, Second.RIGHT, Second.SEPARATE]
        weight = [Weight.QUOTIENT]
    else:
        first = [First.LERP_FUSED, First.LERP]
        if kind.is_far:
            first = [First.BACK_FUSED, First.BACK]
        second = [Second.SQUARE_FUSED, Second.SQUARE]
        weight = [Weight.ADDCDIV_FUSED, Weight.ADDCDIV]
    return itertools.starmap(Form, itertools.product(decays, first, second, ahead, weight))


class Powers:
    """Powers of betas in float32, as the device computes them: no other library has their bits.

    Parameters
    ----------
    powers
        Takes a base, the first exponent and how many there are, and returns an array.
    """

    _COUNT = 1 << 14
    """Taken at a time, so that a training waits for the device at most once in so many steps."""

    def __init__(self, powers: Callable[[float, int, int], np.ndarray]) -> None:
        self._powers = powers
        self._known: dict[tuple[float, int], np.ndarray] = {}

    def __call__(self, base: float, exponent: int) -> np.float32:
        """One power."""
        number, place = divmod(exponent, self._COUNT)
        known = self._known.get((base, number))
        if known is None:
            known = self._powers(base, number * self._COUNT, self._COUNT)
            self._known[base, number] = known
        return np.float32(known[place])


def constants(kind: StepKind, settings: Hyperparameters, power: Powers) -> dict[str, Any]:
    """The numbers of the native library's ``HostConstants``, rounded as torch's code does it."""
    group, one = settings.group, np.float32(1)
    made: dict[str, Any] = {
        "negates": kind.maximizes,
        "factors": list(map(float, settings.factors)),
        "scale": settings.grad_scale,
        "decay": np.float32(group["weight_decay"]),
    }
    lr = np.float32(float(group["lr"]))
    if not kind.is_adam:
        b1, o1 = np.float32(group["momentum"]), np.float32(1 - group["dampening"])
        if kind.is_fused:
            o1 = one - np.float32(group["dampening"])
        made |= {"b1": b1, "o1": o1, "rate": -lr}
    elif kind.is_fused:
        b1, b2 = map(np.float32, group["betas"])
        powers = [power(float(it), settings.step) for it in (b1, b2)]
        made |= {"b1": b1, "o1": one - b1, "b2": b2, "o2": one - b2}
        with np.errstate(divide="ignore"):  # a beta that rounds to 1: infinite on the device too
            made["rate"] = lr / (one - powers[0])
        made["root"] = np.sqrt(one - powers[1])
        if kind.decays == "weight":
            made["decay"] *= lr
    else:
        beta1, beta2 = group["betas"]
        o1 = np.float32(1 - beta1)
        made |= {"b1": one - o1, "o1": o1, "b2": np.float32(beta2), "o2": np.float32(1 - beta2)}
        rate = group["lr"] / (1 - beta1**settings.step) * -1
        made |= {"rate": np.float32(rate), "root": np.float32((1 - beta2**settings.step) ** 0.5)}
        if kind.decays == "weight":
            made["decay"] = np.float32(1 - group["lr"] * group["weight_decay"])
    if kind.is_adam:
        made["eps"] = np.float32(group["eps"])
    return {name: float(it) if isinstance(it, np.floating) else it for name, it in made.items()}
