"""bitsandbytes, as of 0.50: 32-bit Adam and AdamW, and weights of 4 bits.

* https://github.com/bitsandbytes-foundation/bitsandbytes/blob/0.50.2/bitsandbytes/optim/optimizer.py
* https://github.com/bitsandbytes-foundation/bitsandbytes/blob/0.50.2/bitsandbytes/nn/modules.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from umem.adapters.interface import Adapter, KnownStep, full_name

__all__ = ["Bitsandbytes"]

_KNOWN = [
    f"bitsandbytes.optim.{name.lower()}.{name}{bits}"
    for name in ("Adam", "AdamW")
    for bits in ("", "32bit")
]


class Bitsandbytes(Adapter):
    """Its Adam and AdamW but for paged and 8-bit state, and the scales of its weights."""

    module = "bitsandbytes"
    optimizers = "bitsandbytes' 32-bit Adam and AdamW"

    def step(self, kind: type) -> KnownStep | None:
        """A step of kernels that have one parameter each, which is contiguous by then."""
        return KnownStep(_refusal) if full_name(kind) in _KNOWN else None

    def more_tensors(self, weight: torch.Tensor) -> Iterator[torch.Tensor]:
        """The scales of a weight of 4 bits, up to an eighth of its bytes, in an attribute.

        They may be quantised too, with scales of their own. Its tables of codes are left out:
        weights share them.
        """
        state = vars(weight).get("quant_state")
        while state is not None:
            scales = getattr(state, "absmax", None)
            if isinstance(scales, torch.Tensor):
                yield scales
            state = getattr(state, "state2", None)


def _refusal(optimizer: Any) -> str:
    name = full_name(type(optimizer))
    if optimizer.is_paged:
        return f"{name} pages its state by itself: take the optimizer without Paged"
    if optimizer.mng.index2config:
        return f"{name} has settings by a parameter's place in its group (GlobalOptimManager)"
    if any("qmap1" in values for values in optimizer.state.values()):
        return f"{name} has 8-bit state, whose quantization maps belong to several parameters"
    return ""
