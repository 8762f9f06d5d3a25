"""A checksum of a tensor's bits, to detect in-place changes that bypass the version counter."""

from __future__ import annotations

import torch

__all__ = ["bit_checksum"]

_ROWS = 63
"""Parts of a tensor that count differently, so that what is moved about in it is seen too. An odd
number: by an even one the same change of each exponent, as by a division by 2, could come to 0."""

_WHOLE_NUMBERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WORD_BYTES = 8


def bit_checksum(tensor: torch.Tensor) -> torch.Tensor:
    """A sum over a tensor's bits, equal for equal bits whatever the order of the summing.

    It is exact: bits are added as whole numbers, modulo 2**64. The tensor is read once, where it
    is, and nothing waits for the result.

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
    # Words of 8 bytes are added as they are: of narrower ones torch would make a wider copy first.
    split = flat.numel() // (per_word * _ROWS) * per_word * _ROWS
    words = flat[:split].view(torch.int64).view(_ROWS, -1)
    rows = words.sum(1)
    if per_word == 1:  # the signs are the highest bits, of which only odd or even is left
        rows += (words < 0).sum(1)
    weights = torch.arange(1, 2 * _ROWS, 2, device=rows.device)
    rest = flat[split:].view(kind)
    return (rows * weights).sum() + rest.sum(dtype=torch.int64) + (rest < 0).sum()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """All of its elements in the order in which they are in memory, without a copy if it is dense.

    Of equal layouts only: the order makes a difference.
    """
    by_stride = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(by_stride).reshape(-1).contiguous()
