"""A checksum of a tensor's bits, to detect in-place changes that bypass the version counter."""

from __future__ import annotations

import torch

__all__ = ["bit_checksum"]

_ROWS = 63
"""Number of rows with different weights, so that moved elements change the sum too. The number is
odd: with an even one, the same change of every exponent, as by a division by 2, could sum to 0."""

_WHOLE_NUMBERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WORD_BYTES = 8


def bit_checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum over a tensor's bits, which is equal for equal bits in any order of summation.

    The sum is exact: bits are added as integers modulo 2**64. The tensor is read once in place,
    and the call does not synchronise with the device.

    Parameters
    ----------
    tensor
        Strided, of any type.

    Returns
    -------
    int64 tensor without dimensions
        On the tensor's device.
    """
    tensor = tensor.detach()
    flat = _flat(torch.view_as_real(tensor) if tensor.is_complex() else tensor)
    kind = _WHOLE_NUMBERS[flat.element_size()]
    per_word = _WORD_BYTES // flat.element_size()
    if flat.storage_offset() % per_word:
        flat = flat.clone()
    # Words of 8 bytes are added directly: torch would first copy narrower ones to a wider type.
    split = flat.numel() // (per_word * _ROWS) * per_word * _ROWS
    words = flat[:split].view(torch.int64).view(_ROWS, -1)
    rows = words.sum(1)
    if per_word == 1:  # of the highest bit, modulo 2**64, only its parity is left
        rows += (words < 0).sum(1)
    weights = torch.arange(1, 2 * _ROWS, 2, device=rows.device)
    rest = flat[split:].view(kind)
    return (rows * weights).sum() + rest.sum(dtype=torch.int64) + (rest < 0).sum()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """All elements in the order of their memory, without a copy if the tensor is dense.

    The checksum depends on this order, so compare tensors of equal layout only.
    """
    by_stride = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(by_stride).reshape(-1).contiguous()
