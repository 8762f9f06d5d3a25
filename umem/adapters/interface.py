"""What umem asks of a library, and what the answers are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from umem.runtime.guard import Guard
from umem.runtime.model_loading import LoadingMemory

__all__ = ["Adapter", "GatheredParameters", "GatheringGuard", "KnownStep", "full_name"]


def full_name(kind: type) -> str:
    """The dotted name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


@dataclass(frozen=True)
class KnownStep:
    """The step of a class of optimizers, whose source was read.

    A step that no :attr:`refusal` keeps from it may run in parts: it updates each parameter from
    its own gradient, its own state and its group's hyperparameters alone.
    """

    refusal: Callable[[Any], str] = lambda _: ""
    """Why no step of an optimizer can run in parts; empty if steps can."""
    is_elementwise: bool = False
    """Whether it updates each element by itself, and a count for the whole parameter."""
    replaces_state: bool = True
    """Whether it may replace a value in a parameter's state, and not only change tensors."""
    makes_contiguous: bool = True
    """Whether it may replace parameters and gradients whose elements lie in another order."""


class GatheredParameters(NamedTuple):
    """What a library gathers a model's parameters from, on streams of its own."""

    flats: Mapping[int, torch.Tensor] = {}
    """Flat views of this rank's parts, by ``id`` of the parameter."""
    streams: Sequence[Any] = ()
    """Streams that call :meth:`GatheringGuard.gather` before each gathering."""


class GatheringGuard(Guard):
    """Guards what a library gathers from, from a step to the first gathering after it.

    A use calls `settle`, and a gathering calls `gather` on each of its streams.
    """

    def __init__(self, settle: Callable[[], None], gather: Callable[[], None]) -> None:
        super().__init__(settle)
        self.gather = gather


class Adapter(Protocol):
    """What umem has to know of one library; each default is right for most libraries.

    An adapter is asked when units are made, weights are placed and models are found. A step asks
    for the class of its optimizer alone, and never for a tensor. An adapter never imports its
    library: it looks at the objects that it gets.

    Attributes
    ----------
    module : str
        The library's module. Until the program has imported it, nothing of the library is met.
    optimizers : str
        The optimizers whose steps may run in parts, for the error about any other one.
    """

    module: str
    optimizers: str = ""

    def step(self, kind: type) -> KnownStep | None:
        """What is known of the step of one of the library's optimizers; None for nothing."""
        return None

    def more_tensors(self, weight: torch.Tensor) -> Iterator[torch.Tensor]:
        """Tensors that a weight of one of the library's classes has beside those inside it."""
        return iter(())

    def is_filled(self, value: object) -> bool:
        """Whether an argument of the library's classes is a store that a block's call fills.

        With what it is before the call, but for its tensors, a second call has to be the same.
        """
        return False

    def adapt_loading(self, memory: LoadingMemory | None) -> bool:
        """Have models loaded within the budget and, with a memory for them, by umem's threads.

        Returns whether that is done, for good.
        """
        return True

    def find_gathering(self, model: nn.Module) -> Callable[[], GatheredParameters] | None:
        """What tells what parameters of a model are gathered from; None if none are."""
        return None
