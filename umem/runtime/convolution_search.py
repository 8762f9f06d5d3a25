"""Leaves off cuDNN's search for the fastest algorithm, ``torch.backends.cudnn.benchmark``.

The search asks the allocator for its largest cached block. torch does not pass the question on to a
pluggable allocator but raises an error, within the program's convolution.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from umem.patches import replace
from umem.torch_compat import PRIVATE_NAMES

__all__ = ["leave_search_off"]

_LOG = logging.getLogger("umem")


def leave_search_off() -> None:
    """Leave the search off from now on, with one warning to a program that switches it on.

    ``torch.backends.cudnn.benchmark`` is False whatever the program sets.
    """
    set_flag = PRIVATE_NAMES["set_cudnn_benchmark"].find()
    has_warned = False

    def leave_off(wanted: Any) -> None:
        nonlocal has_warned
        if wanted is not True:
            set_flag(wanted)  # torch refuses what is no bool
            return
        if not has_warned:
            has_warned = True
            _LOG.warning(
                "umem: torch.backends.cudnn.benchmark stays False: cuDNN's search for the fastest "
                "algorithms needs torch's own allocator, and convolutions use those that cuDNN "
                "takes without a search"
            )

    was_on = torch.backends.cudnn.benchmark
    replace("set_cudnn_benchmark", leave_off)
    flag = vars(type(torch.backends.cudnn)).get("benchmark")  # the attribute is its value
    replace("cudnn_benchmark", leave_off, owner=flag)
    if was_on:
        set_flag(False)
        leave_off(True)
