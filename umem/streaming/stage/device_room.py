"""Device memory of the process against its budget."""

from __future__ import annotations

from typing import Protocol

__all__ = ["DeviceRoom"]


class DeviceRoom(Protocol):
    """Device memory of the process against its budget.

    Live tensors that the budget has put into host memory count as if they were on the device.
    """

    budget_bytes: int

    def find_homes(self) -> None:
        """Look at which tensors have their home in host memory: they never count."""

    def take_peak_bytes(self) -> int:
        """Most bytes of live tensors since the last call."""

    def spilled_bytes(self) -> int:
        """Host memory that is held because of the budget."""

    def spills(self) -> int:
        """How many tensors the budget has put into host memory so far, cached memory or not."""
        return 0

    def trim(self) -> None:
        """Give back all memory that no tensor has."""

    def lock_ahead(self, home_bytes: int) -> None:
        """Begin to lock host memory for homes of so many bytes in all."""
        return
