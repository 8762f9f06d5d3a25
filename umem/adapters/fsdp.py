"""FSDP2 of torch 2.8 to 2.15, which gathers parameters on streams of its own.

https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py

These streams wait for the program's stream when the model's forward pass begins, and no more before
a block. To wait for all updates then would hide nothing. So they are left out of what counts as
part of the program's stream. Instead they wait before each gathering, for the updates of what is
gathered. The flat view that is gathered from is guarded until then, too: whatever else reads it
waits, on the stream that reads.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from umem import patches
from umem.adapters.interface import Adapter, GatheredParameters, GatheringGuard
from umem.runtime.guard import guard_of
from umem.torch_compat import fsdp_flats, fsdp_groups, fsdp_modules, fsdp_streams

__all__ = ["FSDP", "order_gathering"]


class FSDP(Adapter):
    """Flat views of this rank's parts, by FSDP2's groups of parameters, and its streams."""

    module = "torch.distributed.fsdp"

    def find_gathering(self, model: nn.Module) -> Callable[[], GatheredParameters] | None:
        """What looks at a model's groups: their flat views may change from step to step.

        It finds nothing in a torch with other names for them.
        """
        modules = list(map(weakref.ref, fsdp_modules(model)))
        return functools.partial(_gathered, modules) if modules else None


def _gathered(modules: list[weakref.ref[nn.Module]]) -> GatheredParameters:
    groups = list(fsdp_groups(module for it in modules if (module := it()) is not None))
    flats = {id(it): flat for group in groups for it, flat in fsdp_flats(group)}
    streams = {id(it): it for group in groups for it in fsdp_streams(group)}
    return GatheredParameters(
        flats, list(streams.values()) if streams and order_gathering() else []
    )


@functools.cache
def order_gathering() -> bool:
    """Have FSDP2's streams wait for updates of what they gather, until the process ends.

    Called when there is such a stream. Returns whether they do: if not, in a torch with other
    names, these streams have to wait for all updates at once, as others do.
    """
    return patches.wrap("fsdp_gathering", _settling)


def _settling(gather: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(gather)
    def unshard(group: Any, *args: Any, **kwargs: Any) -> Any:
        _settle(group)
        return gather(group, *args, **kwargs)

    return unshard


def _settle(group: Any) -> None:
    """Have each stream wait for updates of what is gathered, which nothing guards from then on.

    The guard is for these streams alone: the program's stream has waited too then, and any other
    one waits for that, as it does in a program without umem.
    """
    flats = [flat for _, flat in fsdp_flats(group)]
    guards = {id(guard): guard for it in flats if isinstance(guard := guard_of(it), GatheringGuard)}
    # Streams are asked for at the first gathering after a step alone.
    streams = fsdp_streams(group) if guards else []
    for stream in streams:
        with group.device_handle.stream(stream):
            for guard in guards.values():
                guard.gather()
    for guard in guards.values() if streams else ():
        guard.give_back(flats)
