"""Stretches of a forward pass, cut by the bytes that autograd saves, whatever modules save them.

Blocks are the units of activations where a model is a chain of them. Where one block saves most, as
a recurrent net does whose cell is called for each word, or a late one much, as the last one of a
U-Net does, the tape of what it saves is cut instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["Cuts", "Save", "block_of", "find_cuts"]

_STRETCH = ".."
"""Behind the name of a block in that of a stretch, and in no module's."""

_STRETCHES = 16
"""Stretches of as many bytes in a pass, beside those that begin with a block. Two of them are on
the device when the backward pass needs one, and each costs the time of a few calls."""

_MOST_SHARE = 0.25
"""Part of all bytes that a block may save to be a unit as a whole, unless all save as much. One
that saves more is cut if less is saved behind it: to run it twice makes room for a short time."""

_LEAST_SAVES = 5
"""Tensors that such a block saves: of fewer a plan has no choice."""

Cuts = dict[str, dict[int, str]]
"""For each block, and for the model outside of blocks, how many tensors its calls have saved in a
pass when a stretch begins, with the name of the stretch."""


class Save(NamedTuple):
    """A tensor that autograd saves, in the order of the forward pass."""

    unit: str
    """The block that it counts for while blocks are the units."""
    block: str
    """The block in whose call it is saved, or the model outside of blocks."""
    number: int
    """How many tensors of the block's were saved before in the pass."""
    size_bytes: int
    """Bytes that may leave."""


def block_of(name: str) -> str:
    """The block in which a unit begins: the unit itself, unless it is a stretch."""
    return name.partition(_STRETCH)[0]


def find_cuts(saves: Iterable[Save], outside: str = "", last: str | None = None) -> Cuts:
    """Where the stretches of later passes begin; nowhere if blocks do as units.

    A stretch begins with the first call of each block as well. What later calls save, and the model
    outside of blocks, which is named `outside`, counts for the stretch that has begun last. The
    `last` block called has the loss, too: nothing of it is away for long.
    """
    units: list[list[Save]] = [[]]
    seen = {outside}
    for save in saves:
        if save.unit not in seen:
            seen.add(save.unit)
            units.append([])
        units[-1].append(save)
    sizes = [sum(save.size_bytes for save in its) for its in units]
    all_bytes = sum(sizes)
    saving = sum(size_bytes > 0 for size_bytes in sizes)
    most_bytes = all_bytes * min(0.5, max(_MOST_SHARE, 2 / max(1, saving)))
    cuts: Cuts = {}
    behind_bytes = all_bytes
    for its, size_bytes in zip(units, sizes, strict=True):
        behind_bytes -= size_bytes
        share_bytes = all_bytes / 2 if its and its[0].unit == last else most_bytes
        if size_bytes <= max(share_bytes, behind_bytes) or len(its) < _LEAST_SAVES:
            continue
        since_bytes = 0
        for save in its:
            if since_bytes and (since_bytes + save.size_bytes) * _STRETCHES > all_bytes:
                names = cuts.setdefault(save.block, {})
                names[save.number] = f"{save.block}{_STRETCH}{2 + len(names)}"
                since_bytes = 0
            since_bytes += save.size_bytes
    return cuts
