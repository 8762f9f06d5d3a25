"""What torch's own cheap modules compute, to do it once more without a call of the module.

Whatever a program's own module does may depend on all that it can reach, and to note that for each
call takes longer than most small calls. A module of exactly one of these classes calls one function
with a few of its attributes, and draws no random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from umem.runtime.torch_hooks.saved_tensors import check_version
from umem.streaming.activations.call_states import Settings
from umem.torch_compat import version_counter

__all__ = ["BATCH_NORMS", "KnownFunction", "known_function"]

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

_FUNCTIONS: Mapping[type[nn.Module], tuple[Callable[..., torch.Tensor], tuple[str, ...]]] = {
    nn.ReLU: (functional.relu, ("inplace",)),
    nn.LeakyReLU: (functional.leaky_relu, ("negative_slope", "inplace")),
    nn.GELU: (functional.gelu, ("approximate",)),
    nn.SiLU: (functional.silu, ("inplace",)),
    nn.Hardswish: (functional.hardswish, ("inplace",)),
    nn.Sigmoid: (torch.sigmoid, ()),
    nn.Tanh: (torch.tanh, ()),
    nn.LayerNorm: (functional.layer_norm, ("normalized_shape", "weight", "bias", "eps")),
    nn.GroupNorm: (functional.group_norm, ("num_groups", "weight", "bias", "eps")),
    nn.RMSNorm: (functional.rms_norm, ("normalized_shape", "weight", "eps")),
    **dict.fromkeys(BATCH_NORMS, (functional.batch_norm, ("weight", "bias", "eps"))),
}
"""By class, the function of its forward pass, and its arguments, which are attributes."""

_FORWARDS = {kind: kind.forward for kind in _FUNCTIONS}
"""A class whose forward function the program has replaced since is not known."""

_BATCH_AVERAGES = {"running_mean": None, "running_var": None, "training": True}
"""The running averages change once, in the first call; in training they are not used."""


class KnownFunction:
    """A function of one argument, with the others as they are now.

    Parameters
    ----------
    function
        Of torch.
    others
        Its other arguments. A change of a tensor among them is autograd's error.
    settings
        Those of torch that it depends on; None for one that depends on none.
    """

    __slots__ = ("_function", "_others", "_settings", "_versions")

    def __init__(
        self,
        function: Callable[..., torch.Tensor],
        others: dict[str, Any],
        settings: Settings | None = None,
    ) -> None:
        self._function, self._others, self._settings = function, others, settings
        self._versions = [
            (it, version_counter(it)) for it in others.values() if isinstance(it, torch.Tensor)
        ]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Call it; raises as autograd does where a tensor was changed in place."""
        for tensor, version in self._versions:
            check_version(tensor, version)
        if self._settings is None:
            return self._function(x, **self._others)
        with self._settings.put_back():
            return self._function(x, **self._others)


def known_function(module: nn.Module) -> KnownFunction | None:
    """What a call of a module computes now, but for averages; None if it is not known."""
    kind = type(module)
    if kind not in _FUNCTIONS or kind.forward is not _FORWARDS[kind]:
        return None
    function, names = _FUNCTIONS[kind]
    others = {name: getattr(module, name) for name in names}
    if kind not in BATCH_NORMS:
        return KnownFunction(function, others)
    if not module.training:
        return None
    # cuDNN may compute it, if its flags say so.
    return KnownFunction(function, others | _BATCH_AVERAGES, Settings())
