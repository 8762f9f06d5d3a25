"""The tensors that a weight is made of, quantised or not."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from umem.runtime.model_parts import plain_tensors

__all__ = ["weight_parts"]


def weight_parts(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors of a weight or buffer, each with a storage.

    bitsandbytes keeps the scales of a weight in 4 bits, up to an eighth of its bytes, in an
    attribute, which is neither parameter nor buffer. They may be quantised too, with scales of
    their own. Its tables of codes are left out: weights share them.
    """
    yield from plain_tensors(weight)
    state = getattr(weight, "__dict__", {}).get("quant_state")
    while state is not None:
        scales = getattr(state, "absmax", None)
        if isinstance(scales, torch.Tensor):
            yield from plain_tensors(scales)
        state = getattr(state, "state2", None)
