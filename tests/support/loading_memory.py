"""Memory for loading weights without a GPU: a device on the CPU, whose copies arrive late."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from umem.runtime.unfilled_memory import unfilled


class HostLoadingMemory:
    """A device that is the CPU. A copy is made when it is waited for.

    With a `home_share` so many of the weights are at home; else all or none, by `has_room`.
    """

    device_type = "cpu"

    def __init__(self, home_share: float = 0.0) -> None:
        self.has_room = True
        self.has_buffers = True
        self.fails_at: int | None = None
        """The number of the copy that cannot be started."""
        self.made = self.sent = self.finished = self.under_way = 0
        self.addresses: set[int] = set()
        """Of weights."""
        self._home_share = home_share
        self._homes: set[int] = set()
        self._lock = threading.Lock()
        self._of_thread = threading.local()

    def new_weight(
        self, size: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Memory full of ones."""
        made = unfilled(size, dtype, device)
        made.view(-1).view(torch.uint8).fill_(255)
        with self._lock:
            self.made += 1
            self.addresses.add(made.data_ptr())
            share = len(self._homes) / self.made
            if not self.has_room or share < self._home_share:
                self._homes.add(made.data_ptr())
        return made

    def is_home(self, tensor: torch.Tensor) -> bool:
        """Whether it was born there."""
        return tensor.data_ptr() in self._homes

    def finish(self, device: torch.device) -> None:
        """Count the call."""
        del device
        with self._lock:
            self.finished += 1

    def buffers(self, device: torch.device, size_bytes: int) -> list[torch.Tensor]:
        """The thread's two."""
        if not self.has_buffers:
            return []
        if not hasattr(self._of_thread, "buffers"):
            self._of_thread.buffers = [
                torch.empty(size_bytes, dtype=torch.uint8, device=device) for _ in range(2)
            ]
        return self._of_thread.buffers

    def send(self, to: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        """Copy when it is waited for."""
        with self._lock:
            if self.sent == self.fails_at:
                raise RuntimeError("the device is lost")
            self.sent += 1
            self.under_way += 1
        is_done = False

        def wait() -> None:
            nonlocal is_done
            if is_done:
                return
            is_done = True
            to.copy_(source)
            with self._lock:
                self.under_way -= 1

        return wait
