"""Grad mode in a block of umem's, which Ctrl-C does not leave to the program."""

from __future__ import annotations

import torch

from umem.torch_compat import InferenceMode

__all__ = ["kept_grad_mode"]


def kept_grad_mode() -> InferenceMode:
    """Return a context manager behind whose block grad mode is what it was before.

    The block may change it, by ``torch.set_grad_enabled``. ``torch.no_grad`` is written in Python:
    an interrupt in its begin or end leaves the program without gradients. This one is torch's own
    guard of C++, which keeps all of these modes; inference mode stays what it is.
    """
    return InferenceMode(torch.is_inference_mode_enabled())
