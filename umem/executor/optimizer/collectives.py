"""Orders collectives of ``torch.distributed`` behind updates that are under way.

torch's functions for collectives hand tensors to a process group, whose methods take them past
torch's dispatch: the access guard does not see that use. So these methods ask the guard first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from umem.executor.optimizer.access_guard import settle_all
from umem.torch_compat import ProcessGroupBackend

__all__ = ["is_distributed", "order_collectives"]


def is_distributed() -> bool:
    """Whether ``torch.distributed`` is initialised."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


@functools.cache
def order_collectives() -> None:
    """Have collectives wait for updates of the tensors that they take, until the process ends.

    Those of process groups, and of the backends that a group has for its devices. DDP exchanges
    gradients in C++: no update reads these any more when its backward pass begins.
    """
    for owner in (torch.distributed.ProcessGroup, ProcessGroupBackend):
        for name in list(vars(owner)):
            method: Any = getattr(owner, name)
            # The signature of a method in C++ is in its description.
            if callable(method) and "Tensor" in (method.__doc__ or ""):
                setattr(owner, name, _behind_updates(method))


def _behind_updates(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        settle_all((args, kwargs))
        return method(*args, **kwargs)

    return call
