"""What is on the device beside a step's own tensors, which only the allocator sees."""

from __future__ import annotations

import numpy as np

from umem.recorder._memory import StepLook
from umem.recorder._temporaries import live_at_starts

__all__ = ["outside_bytes"]


def outside_bytes(look: StepLook) -> int:
    """Bytes allocated from a step's first phase to its last that are none of its tensors'.

    Such as another model, or a copy of the weights.

    Parameters
    ----------
    look
        Of the step.

    Returns
    -------
    int
        0 where no allocator tells.
    """
    if not look.start_bytes:
        return 0
    known = live_at_starts(look.storages, len(look.start_bytes))
    return max(int((np.array(look.start_bytes, np.int64) - known).min()), 0)
