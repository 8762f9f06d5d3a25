"""What an activation store has done."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ActivationStatistics"]


@dataclass(frozen=True)
class ActivationStatistics:
    """Sums since the store was made. A tensor here is a storage: its views count once."""

    bytes_out: int
    tensors_out: int
    """Whose copy to the host was asked for."""
    bytes_in: int
    tensors_in: int
    """Whose copy to the device was asked for; the late ones are among them."""
    late_fetches: int
    """Tensors that the backward pass asked for before anybody had fetched them."""
    kept_for_lack_of_host_bytes: int
    kept_for_lack_of_host_tensors: int
    """Chosen to leave, but still on the device: the host had no room."""
    pinned_bytes: int
    """Host memory that the store holds now, in use or ready for the next step."""
    peak_pinned_bytes: int
