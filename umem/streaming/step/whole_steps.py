"""Steps that an optimizer has to run itself, on all its state where it is."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch.optim.optimizer import Optimizer

from umem.streaming.stage.lanes import Lanes
from umem.streaming.step.known_optimizers import whole_step_reason

__all__ = ["COMMON_MEMORY", "COMMON_STATE", "WholeSteps", "named_arguments"]

_LOG = logging.getLogger("umem")

_STEPS_BEFORE_WARNING = 3
"""Steps that run on state in host memory for the same reason before umem warns: a first step may
differ from all others."""

COMMON_STATE = (
    "several parameters have one tensor in their state, as in a state_dict that was "
    "loaded with one step count for all of them; give each its own, as by "
    "`for values in optimizer.state.values(): values['step'] = values['step'].clone()`"
)

COMMON_MEMORY = (
    "parameters have common memory, or a gradient that is another one's, a parameter or optimizer "
    "state, so that the order of all updates counts"
)


class WholeSteps:
    """Finds why a step has to run as a whole, and warns of such steps on state in host memory."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._noted: Counter[str] = Counter()

    def obstacle(
        self,
        optimizer: Optimizer,
        arguments: Mapping[str, Any],
        *,
        is_compiled: bool,
        can_split: bool,
    ) -> str:
        """Why the optimizer has to run the step itself; empty if it does not.

        Parameters
        ----------
        optimizer
            The optimizer.
        arguments
            Those of ``step()``, as :func:`named_arguments` has them.
        is_compiled
            Whether compiled code calls it.
        can_split
            Whether any of its state is not on the device.
        """
        if arguments:
            return f"step() has {', '.join(f'a {name}' for name in arguments)}"
        if is_compiled:
            return "step() is compiled"
        if self._lanes.is_capturing():
            return "step() is captured into a CUDA graph"
        # One that runs as a whole anyway needs no look at all gradients.
        return whole_step_reason(optimizer) if can_split else ""

    def note(self, reason: str) -> None:
        """Count a step that uses state in host memory where it is, and warn once of the reason."""
        self._noted[reason] += 1
        if self._noted[reason] == _STEPS_BEFORE_WARNING:
            _LOG.warning("umem: optimizer state is used in host memory, which is slow: %s", reason)


def named_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of ``step()`` by name, but None: Accelerate calls ``step(None)``."""
    if len(args) == 1 and not kwargs:
        return {}
    named = {**dict(zip(("closure",), args[1:], strict=False)), **kwargs}
    return {name: value for name, value in named.items() if value is not None}
