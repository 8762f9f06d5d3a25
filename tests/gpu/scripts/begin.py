"""What scripts have in common: umem enabled or not, checksums, and what their last line says."""

from __future__ import annotations

import json
import os
import zlib
from typing import Any

import torch
from torch import distributed

import umem

IS_MANAGED = "UMEM_POLICY" in os.environ


def begin() -> None:
    """Ask for deterministic algorithms, and enable umem if ``UMEM_POLICY`` is set."""
    torch.use_deterministic_algorithms(True)
    if IS_MANAGED:
        assert umem.enable(os.environ["UMEM_POLICY"])


def crc(tensor: torch.Tensor) -> int:
    """A checksum of a tensor's bits, of a type that NumPy has."""
    return zlib.crc32(tensor.detach().cpu().contiguous().numpy().tobytes())


def crcs(tensors: Any) -> list[int]:
    """A checksum of each."""
    return [crc(it) for it in tensors]


def state_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """All tensors of an optimizer's state."""
    return [it for values in optimizer.state.values() for it in values.values()]


def print_of_all_ranks(mine: Any) -> None:
    """Print what each rank has found out, in the first one; the group of processes ends."""
    ranks: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(ranks, mine)
    if distributed.get_rank() == 0:
        print(json.dumps(ranks))
    distributed.destroy_process_group()
