"""Copies between a GPU and pinned host memory in one direction, beside the training's kernels.

Plain device memory goes by the copy engines. On one H200, driver 580.159, CUDA 13.0, a
``cudaMemcpyAsync`` between managed memory and pinned memory kept kernels from running beside it:
products that took 34 ms alone took 20 ms longer beside 1 GiB, nearly the time of the copy. So
managed memory goes by way of a few MiB of plain device memory, which a kernel copies to or from
(benchmarks/results/h200-staged-copies.txt).
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from umem._library import native
from umem.allocator import is_enabled
from umem.cuda import _bindings
from umem.cuda_events import new_event

__all__ = ["Link"]

_LOG = logging.getLogger("umem")


class Link:
    """One direction.

    Parameters
    ----------
    device
        The GPU.
    leaves
        Whether copies go to the host.
    """

    def __init__(self, device: torch.device, *, leaves: bool) -> None:
        self._leaves = leaves
        self._pages = torch.cuda.Stream(device)
        """What reads and writes managed memory."""
        self._link = torch.cuda.Stream(device)
        """What goes over the link."""
        self._staged: Any = None
        # torch's own allocator gives plain device memory only.
        self._may_be_managed = is_enabled()

    def wait_stream(self, stream: torch.cuda.Stream) -> None:
        """Let copies from now on wait for what a stream holds now."""
        mark = new_event()
        mark.record(stream)
        self._link.wait_event(mark)
        self._pages.wait_event(mark)

    def wait_event(self, event: torch.cuda.Event) -> None:
        """Let copies from now on wait for an event before they use host memory."""
        self._link.wait_event(event)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event:
        """Copy bytes between device and pinned memory.

        Returns
        -------
        torch.cuda.Event
            When it is over.
        """
        with torch.cuda.stream(self._pages):  # with its device
            end = self._copy(to, source)
        mark = new_event()
        mark.record(end)
        return mark

    def _copy(self, to: torch.Tensor, source: torch.Tensor) -> torch.cuda.Stream:
        """Returns the stream that the copy ends on."""
        addresses = to.data_ptr(), source.data_ptr()
        if self._may_be_managed and _is_managed(addresses[1] if self._leaves else addresses[0]):
            if self._staged is None:
                self._staged = self._make_staged()
            if self._staged is not None and self._staged.fits(*addresses):
                streams = self._pages.cuda_stream, self._link.cuda_stream
                self._staged.copy(*addresses, source.nbytes, *streams)
                return self._link if self._leaves else self._pages
        with torch.cuda.stream(self._link):
            to.copy_(source, non_blocking=True)
        return self._link

    def _make_staged(self) -> Any:
        try:
            return native().StagedCopy(self._pages.device_index, self._leaves)
        except RuntimeError as error:
            self._may_be_managed = False
            _LOG.warning(
                "umem: activations go by cudaMemcpyAsync, which keeps kernels waiting: %s", error
            )
            return None


def _is_managed(address: int) -> bool:
    return _bindings.memory_type(address) == "cudaMemoryTypeManaged"
