"""Managing without a call: after an optimizer's first step, what it trains is known."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from umem.errors import UmemError

__all__ = ["manage_automatically"]

_LOG = logging.getLogger("umem")

_MOST_WITHOUT_MODEL = 8
"""Steps of an optimizer after which no model is looked for: some other program calls it."""


def manage_automatically(roots: Callable[[], Sequence[nn.Module]]) -> None:
    """Manage every training of the process from its optimizer's first step on.

    An optimizer may step before its model is called: loading a distributed checkpoint does so, to
    make the state that is loaded. Then a later step finds the model.

    Parameters
    ----------
    roots
        Tells the modules that the program has called: the one that holds most of what the optimizer
        trains is its model.
    """
    steps_without = WeakIdKeyDictionary()  # optimizer -> steps so far; None when all is said

    def after_step(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        steps = steps_without.get(optimizer, 0)
        if steps is None:
            return
        model = _model_of(optimizer, roots())
        if model is None:
            is_last = steps + 1 >= _MOST_WITHOUT_MODEL
            steps_without[optimizer] = None if is_last else steps + 1
            if is_last:
                _LOG.warning(
                    "umem: %s is not managed: no module that was called in %d steps holds its "
                    "parameters. Call umem.manage(model, optimizer) where the training begins",
                    type(optimizer).__name__,
                    _MOST_WITHOUT_MODEL,
                )
            return
        steps_without[optimizer] = None
        # With planner and simulator behind it: not before there is a training.
        from umem.executor import manage

        try:
            manage(model, optimizer)
        except UmemError as error:
            _LOG.info("umem: %s is not managed: %s", type(model).__name__, error)

    # torch iterates over an optimizer's own hooks before it comes to the global ones, so that
    # `manage` may add to them here.
    register_optimizer_step_post_hook(after_step)


def _model_of(optimizer: Optimizer, roots: Sequence[nn.Module]) -> nn.Module | None:
    """The outermost module with the most bytes of an optimizer's parameters."""
    trained = {id(p): p.nbytes for group in optimizer.param_groups for p in group["params"]}

    def held_bytes(module: nn.Module) -> int:
        return sum(trained.get(id(parameter), 0) for parameter in module.parameters())

    model = max(roots, key=held_bytes, default=None)
    return model if model is not None and held_bytes(model) else None
