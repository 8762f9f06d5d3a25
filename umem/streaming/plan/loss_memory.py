"""Device memory of a loss over logits, which is computed whole or in slices of rows."""

from __future__ import annotations

from umem.core.units import format_bytes

__all__ = [
    "LEAST_LOSS_BYTES",
    "LOSS_REMEDY",
    "LOSS_SLICE_BYTES",
    "WHOLE_LOSS_BYTES",
    "is_large_loss",
    "logits_text",
    "loss_slice_bytes",
    "sliced_loss_bytes",
    "whole_loss_bytes",
]

WHOLE_LOSS_BYTES = 12
"""Bytes of each logit in the backward pass of a loss that is computed whole."""

LOSS_SLICE_BYTES = 128 << 20
"""A slice of a loss in float32. With 128 k classes these are 256 rows, which occupy all processors
of a large GPU."""

LOSS_REMEDY = (
    "Fewer tokens in a batch need less, as do head and loss in chunks, such as Liger's fused "
    "linear cross entropy"
)

LEAST_LOSS_BYTES = 256 << 20
"""Logits that take less in float32 are not sliced."""

_LARGE_SHARE = 0.25
"""Part of the budget from which on a loss is computed in slices at once: its logarithms take less
time than what would leave for it."""

_LEAST_SLICES = 16
_FORWARD_SLICES, _BACKWARD_SLICES = 2, 4
"""Tensors of a slice at a time."""


def whole_loss_bytes(tokens: int, vocabulary: int) -> tuple[int, int]:
    """The most for a loss that is computed whole, in its forward and in its backward pass.

    Forward, logits in bfloat16 and float32, and their logarithms; backward, three in float32.
    """
    return 10 * tokens * vocabulary, WHOLE_LOSS_BYTES * tokens * vocabulary


def is_large_loss(logits: int, budget_bytes: int) -> bool:
    """Whether a loss of so many numbers is computed in slices before a plan asks for that."""
    return WHOLE_LOSS_BYTES * logits > _LARGE_SHARE * budget_bytes


def sliced_loss_bytes(tokens: int, vocabulary: int) -> tuple[int, int]:
    """The same for a loss in slices, which small ones never are.

    Forward, the logits in bfloat16; backward, their gradient beside them.
    """
    size_bytes = 4 * tokens * vocabulary
    if size_bytes < LEAST_LOSS_BYTES:
        return whole_loss_bytes(tokens, vocabulary)
    slice_bytes = loss_slice_bytes(size_bytes)
    return (
        size_bytes // 2 + _FORWARD_SLICES * slice_bytes,
        size_bytes + _BACKWARD_SLICES * slice_bytes,
    )


def loss_slice_bytes(size_bytes: int) -> int:
    """A slice of logits that take so much in float32."""
    return min(LOSS_SLICE_BYTES, size_bytes // _LEAST_SLICES)


def logits_text(tokens: int, vocabulary: int) -> str:
    """What logits take, in words."""
    size = format_bytes(4 * tokens * vocabulary)
    return f"logits of {tokens:,} tokens x {vocabulary:,} take {size} in float32"
