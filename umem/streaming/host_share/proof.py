"""The proof of a form: the same elements are updated on the host and by the optimizer's kernels.

Weights are random and so are gradients and averages, of such sizes that each rounding shows: both
terms of a sum have about the same exponent. One element in sixteen of each is a zero, an infinity,
a number too small to be normal, or no number. torch's kernels have a loop for tensors whose size is
a multiple of four and another one for the rest, whose code may differ: there are tensors of both.

A form stands if all bits of all elements are equal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.optim.optimizer import Optimizer

from umem.runtime.model_parts import plain_step
from umem.runtime.native_library import native
from umem.streaming.host_share.forms import (
    Form,
    Hyperparameters,
    Powers,
    StepKind,
    constants,
    forms_of,
)
from umem.torch_compat import foreach_multiply

__all__ = [
    "DeviceOptimizer",
    "Elements",
    "OptimizerDevice",
    "Proof",
    "prove",
    "random_elements",
    "telling",
    "without_parameters",
]

PARTS = ("weight", "gradient", "first", "second", "NaN")
"""What differing elements are counted in. Where neither result is a number, by themselves."""

ROUNDS = ((1 << 16, 1), (1 << 16, 2), ((1 << 18) - 3, 3), ((1 << 16) - 1, 10), (1 << 18, 1000))
"""Of a proof when a training begins: numbers of elements, and the step's number."""

BFLOAT16_ROUNDS = (
    (1 << 16, 1),
    (1 << 16, 2),
    ((1 << 22) - 3, 3),
    ((1 << 16) - 1, 10),
    (1 << 22, 9),
)
"""Of a last bit in float32, one in 65,536 shows."""

_FACTOR = 47 / 128
"""Of gradients; a number of bfloat16 too."""

_BASE = 1 << 16
"""Elements that are drawn at most. More are combinations of them."""

_SPECIAL = (
    *(0.0, -0.0, 1e-45, -1e-45, 1e-40, -1e-39, 2.0**-126, 1.0, 2.0**64, -1e20, 1e30),
    *(3.4e38, -3.4e38, math.inf, -math.inf, math.nan),
)


class Elements(NamedTuple):
    """Flat arrays of equal lengths: float32, or the bits of bfloat16 as ``uint16``."""

    weight: np.ndarray
    gradient: np.ndarray
    first: np.ndarray
    second: np.ndarray

    def copy(self) -> Elements:
        """Copy all of them."""
        return Elements(*(it.copy() for it in self))

    def differing(self, other: Elements) -> tuple[int, ...]:
        """Count elements whose bits differ, by :data:`PARTS`."""
        counts, no_numbers = [], 0
        infinity = 0x7F800000 >> 8 * (4 - self.weight.itemsize)
        kind = f"u{self.weight.itemsize}"
        for one, two in zip(self, other, strict=True):
            a, b = one.view(kind), two.view(kind)
            is_other = a != b
            is_none = is_other & ((a << 1) > infinity << 1) & ((b << 1) > infinity << 1)
            counts.append(int(is_other.sum()) - int(is_none.sum()))
            no_numbers += int(is_none.sum())
        return (*counts, no_numbers)

    @property
    def addresses(self) -> tuple[int, int, int, int, int]:
        """Those of the arrays, and their length, as the native library takes them."""
        weight, gradient, first, second = (it.ctypes.data for it in self)
        return weight, gradient, first, second, len(self.weight)


def random_elements(count: int, seed: int, *, is_bfloat16: bool = False) -> Elements:
    """Make elements for which roundings differ."""
    random = np.random.default_rng(seed)
    drawn = min(count, _BASE)

    def normal(exponents: np.ndarray) -> np.ndarray:
        return np.ldexp(random.standard_normal(drawn), exponents)

    # In order, so that neighbours are of one size.
    size = np.sort(random.integers(-24, 5, drawn))
    made = [
        normal(size + random.integers(-4, 12, drawn)),
        normal(size),
        normal(size + random.integers(-6, 7, drawn)),
        np.abs(normal(2 * size + random.integers(-12, 5, drawn))),
    ]
    arrays = []
    for number, values in enumerate(made):
        special = np.abs(_SPECIAL) if number == 3 else np.array(_SPECIAL)
        where = random.random(drawn) < 1 / 16
        values[where] = random.choice(special, int(where.sum()))
        array = values.astype(np.float32)
        if is_bfloat16:
            array = (array.view(np.uint32) >> 16).astype(np.uint16)
        shift = (0, 1, 3, 7)[number]
        tiles = [np.roll(array, shift * tile) for tile in range(-(-count // drawn))]
        arrays.append(np.concatenate(tiles)[:count])
    return Elements(*arrays)


def telling(kind: StepKind, settings: Hyperparameters) -> Hyperparameters:
    """Return hyperparameters of which roundings show, for the same kind of step.

    With usual ones, most of what is rounded is too small beside the rest of a sum.
    """
    numbers = {"lr": 0.37, "betas": (0.3 if kind.is_far else 0.6, 0.7), "momentum": 0.7}
    numbers |= {"dampening": 0.3, "weight_decay": 0.61 if kind.decays else 0.0}
    group = {name: numbers.get(name, value) for name, value in settings.group.items()}
    return replace(settings, group=group, factors=(), grad_scale=3.0 if kind.unscales else None)


class OptimizerDevice(Protocol):
    """A device that updates elements by its own code."""

    def step(self, elements: Elements, settings: Hyperparameters, kind: StepKind) -> Elements:
        """Return the elements behind one update; the gradients are those that are kept."""

    def powers(self, base: float, first: int, count: int) -> np.ndarray:
        """Powers of a base in float32, from the first exponent on."""


def without_parameters(optimizer: Optimizer) -> Optimizer:
    """An optimizer of the same class and settings, which keeps nothing of the first one alive."""
    found = object.__new__(type(optimizer))
    left_out = ("param_groups", "state")
    for name, value in vars(optimizer).items():
        if name not in left_out and not name.endswith("_hooks") and not callable(value):
            setattr(found, name, value)
    return found


class DeviceOptimizer:
    """An optimizer's own step on a device of torch.

    Parameters
    ----------
    optimizer
        Neither its parameters nor its state are used.
    device
        Where it runs.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device | str) -> None:
        self._optimizer = without_parameters(optimizer)
        self._device = torch.device(device)

    def step(self, elements: Elements, settings: Hyperparameters, kind: StepKind) -> Elements:
        """Run the step, without hooks, on tensors of its own."""
        weight, gradient, first, second = map(self._tensor, elements)
        parameter = torch.nn.Parameter(weight)
        parameter.grad = gradient
        with torch.no_grad():
            for factor in settings.factors:
                foreach_multiply([gradient], self._number(factor).to(gradient.dtype))
        state: dict[str, Any] = {"momentum_buffer": first if kind.has_average else None}
        if kind.is_adam:
            step = self._number(settings.step - 1, on_host=not kind.is_fused)
            state = {"step": step, "exp_avg": first, "exp_avg_sq": second}
        shadow: Any = object.__new__(type(self._optimizer))
        vars(shadow).update(vars(self._optimizer))
        shadow.param_groups = [{**settings.group, "params": [parameter]}]
        shadow.state = {parameter: state}
        shadow.grad_scale = shadow.found_inf = None
        if settings.grad_scale is not None:
            shadow.grad_scale = self._number(settings.grad_scale)
            shadow.found_inf = self._number(settings.found_inf)
        plain_step(type(shadow))(shadow)
        if not kind.is_adam:
            first = shadow.state[parameter]["momentum_buffer"]
        return Elements(*map(_array, (parameter.detach(), gradient, first, second)))

    def powers(self, base: float, first: int, count: int) -> np.ndarray:
        """Take them by torch's operator, which has the kernels' own function."""
        exponents = torch.arange(first, first + count, dtype=torch.float32, device=self._device)
        return _array(torch.pow(torch.full_like(exponents, base), exponents))

    def _number(self, value: float, *, on_host: bool = False) -> torch.Tensor:
        where = "cpu" if on_host else self._device
        return torch.tensor(float(value), dtype=torch.float32, device=where)

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(values.copy()).to(self._device)
        return tensor if values.itemsize == 4 else tensor.view(torch.bfloat16)


def _array(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    array: np.ndarray = tensor.cpu().numpy()
    return array


@dataclass
class Proof:
    """What was compared."""

    kind: StepKind
    tried: dict[Form, list[tuple[int, ...]]] = field(default_factory=dict)
    """How many elements differ, by :data:`PARTS`, round by round. All forms are tried in the first
    round, and then those that did not differ."""
    rounds: int = 0

    @property
    def form(self) -> Form | None:
        """The first form that differs nowhere; None if there is none."""
        return next(iter(self.standing), None)

    @property
    def standing(self) -> list[Form]:
        """All forms that differ nowhere."""
        return [
            form
            for form, rounds in self.tried.items()
            if len(rounds) == self.rounds and not any(map(any, rounds))
        ]

    def table(self) -> str:
        """Say for each form how many elements differ in its last round, the best first."""
        rows = sorted(self.tried.items(), key=lambda row: (-len(row[1]), sum(row[1][-1])))
        lines = [str(self.kind), "  round" + "".join(f"{it:>10}" for it in PARTS)]
        for form, rounds in rows:
            counts = "".join(f"{it:>10,}" for it in rounds[-1])
            stands = "  (stands)" if form in self.standing else ""
            lines.append(f"  {len(rounds):>5}{counts}  {form}{stands}")
        return "\n".join(lines)


def prove(
    device: OptimizerDevice,
    workers: Any,
    kind: StepKind,
    settings: Hyperparameters,
    rounds: tuple[tuple[int, int], ...] | None = None,
    *,
    follows: bool = False,
) -> Proof:
    """Find the forms that have the device's bits.

    Parameters
    ----------
    device
        Updates the same elements.
    workers
        The native library's ``HostWorkers``.
    kind
        The kind of step.
    settings
        The step's number is replaced.
    rounds
        Numbers of elements, and of steps; None for those of a training's begin. Every second round
        has the hyperparameters as they are, and a factor for gradients; the others have
        :func:`telling` ones.
    follows
        Whether a round goes on with weights and averages of the round before, of as many elements.
    """
    proof = Proof(kind)
    power = Powers(device.powers)
    forms = list(forms_of(kind))
    after: Elements | None = None
    if rounds is None:
        rounds = BFLOAT16_ROUNDS if kind.is_bfloat16 else ROUNDS
    for number, (count, step) in enumerate(rounds, 1):
        own = replace(settings, step=step, factors=(_FACTOR,))
        now = telling(kind, own) if number % 2 else own
        before = random_elements(count, seed=number, is_bfloat16=kind.is_bfloat16)
        if follows and after is not None:
            before = after._replace(gradient=before.gradient)
        after = device.step(before, now, kind)
        numbers = native().HostConstants(**constants(kind, now, power))
        for form in forms:
            made = before.copy()
            workers.update(form.native(), numbers, kind.is_bfloat16, [made.addresses])
            if now.factors and not kind.unscales:  # the host keeps a gradient as it came
                made = made._replace(gradient=after.gradient)
            proof.tried.setdefault(form, []).append(made.differing(after))
        proof.rounds = number
        forms = proof.standing
    return proof
