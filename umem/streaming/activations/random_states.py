"""States of torch's generators, to run a call with the random numbers that it had before.

A CUDA generator's state is exchanged, and not set: to set it has the next recurrent layer of cuDNN
with dropout begin anew, wherever in the program it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

__all__ = ["RandomStates"]


class RandomStates:
    """The states now of the generators that operators on some tensors may use."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        indices = {it.device.index for it in tensors if it.is_cuda}
        self._host = torch.get_rng_state()
        self._devices = {it: torch.cuda.default_generators[it].clone_state() for it in indices}

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, RandomStates)
            and self._devices.keys() == other._devices.keys()
            and torch.equal(self._host, other._host)
            and all(
                torch.equal(it.get_state(), other._devices[index].get_state())
                for index, it in self._devices.items()
            )
        )

    __hash__ = None  # type: ignore[assignment]

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Have the generators begin with these states, and go on as before in the end."""
        host = torch.get_rng_state()
        generators = {torch.cuda.default_generators[it]: own for it, own in self._devices.items()}
        before = [(it, it.graphsafe_get_state()) for it in generators]
        try:
            torch.set_rng_state(self._host)
            for generator, own in generators.items():
                generator.graphsafe_set_state(own.clone_state())
            yield
        finally:
            torch.set_rng_state(host)
            for generator, state in before:
                generator.graphsafe_set_state(state)
