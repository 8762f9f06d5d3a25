"""torchao, as of 0.18: its optimizers are refused.

https://github.com/pytorch/ao/blob/v0.18.0/torchao/optim/adam.py

Its weights need no adapter: they tell the tensors inside them as torch asks all such classes to.
"""

from __future__ import annotations

from umem.adapters.interface import Adapter, KnownStep, full_name

__all__ = ["TorchAO"]


class TorchAO(Adapter):
    """Says why its optimizers are not streamed."""

    module = "torchao"

    def step(self, kind: type) -> KnownStep | None:
        """A step that never runs in parts."""
        name = full_name(kind)
        if not name.startswith("torchao.optim"):
            return None
        reason = f"{name} compiles its update, and its low-bit state is not plain tensors"
        return KnownStep(lambda _: reason)
