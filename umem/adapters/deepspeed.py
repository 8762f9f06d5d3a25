"""DeepSpeed, as of 0.19: its Adam and AdamW.

https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/ops/adam/fused_adam.py

ZeRO itself needs no adapter, and could have none: its optimizers, parameters and state are of
torch's own classes. That it has views of flat state, and puts partitions into the groups by turns,
is found where it is (``streaming/stage/state_views.py``, ``streaming/step/units.py``).
"""

from __future__ import annotations

from typing import Any

from umem.adapters.interface import Adapter, KnownStep, full_name

__all__ = ["DeepSpeed"]


class DeepSpeed(Adapter):
    """Its ``FusedAdam``."""

    module = "deepspeed"
    optimizers = "DeepSpeed's FusedAdam"

    def step(self, kind: type) -> KnownStep | None:
        """A step whose kernel updates each element by itself."""
        is_known = full_name(kind) == "deepspeed.ops.adam.fused_adam.FusedAdam"
        return KnownStep(_refusal, is_elementwise=True) if is_known else None


def _refusal(optimizer: Any) -> str:
    if all(len(group["params"]) <= 1 for group in optimizer.param_groups):
        return ""
    return (
        f"{full_name(type(optimizer))} counts the steps of a group's last parameter only: use "
        'ZeRO, which puts one partition into a group, or torch\'s AdamW (`"torch_adam": true`)'
    )
