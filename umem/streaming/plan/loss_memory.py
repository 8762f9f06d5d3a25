"""Device memory of a loss over logits, which is computed whole or in slices of rows."""

from __future__ import annotations

from umem.core.units import format_bytes

__all__ = [
    "LOSS_REMEDY",
    "LOSS_SLICE_BYTES",
    "WHOLE_LOSS_BYTES",
    "logits_text",
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

_FORWARD_SLICES, _BACKWARD_SLICES = 2, 4
"""Tensors of a slice at a time."""


def whole_loss_bytes(tokens: int, vocabulary: int) -> tuple[int, int]:
    """The most for a loss that is computed whole, in its forward and in its backward pass.

    Forward, logits in bfloat16 and float32, and their logarithms; backward, three in float32.
    """
    return 10 * tokens * vocabulary, WHOLE_LOSS_BYTES * tokens * vocabulary


def sliced_loss_bytes(tokens: int, vocabulary: int) -> tuple[int, int]:
    """The most for a loss in slices, in its forward and in its backward pass.

    Forward, the logits in bfloat16; backward, their gradient beside them.
    """
    size_bytes = 2 * tokens * vocabulary
    slice_bytes = min(LOSS_SLICE_BYTES, 2 * size_bytes)
    return (
        size_bytes + _FORWARD_SLICES * slice_bytes,
        2 * size_bytes + _BACKWARD_SLICES * slice_bytes,
    )


def logits_text(tokens: int, vocabulary: int) -> str:
    """What logits take, in words."""
    size = format_bytes(4 * tokens * vocabulary)
    return f"logits of {tokens:,} tokens x {vocabulary:,} take {size} in float32"
