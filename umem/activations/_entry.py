"""One storage that may wait in host memory, and the tensors that autograd saved of it."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from umem.saved_tensor_hooks import check_version

if TYPE_CHECKING:
    from umem.activations._group import Group
    from umem.activations._host_pool import HostBuffer, HostPool

__all__ = ["Entry", "Handle", "Retired"]

Retired = tuple[torch.UntypedStorage, Any, Any]
"""Device memory that a copy was still at work on when its entry ended, the copy's mark, and the
stream that the memory belongs to."""


class Entry:
    """A storage: on the device, in a host buffer, or in both.

    It lives as long as the handles that autograd holds, and then gives everything back. That may
    happen in any thread and at any moment, so it takes no lock and makes no call to the device.

    Attributes
    ----------
    storage
        The device's copy; None after its release.
    size_bytes
        Bytes of the storage.
    version
        The newest version of the storage that was saved.
    stream
        What the device's copy belongs to.
    buffer
        The host's copy, once it was asked for.
    mark
        The last copy that the device's memory is part of.
    sent_with
        All marks of the copies that left together with it, in order; None where the last copy is
        one to the device.
    is_arriving
        Whether the last copy is one to the device.
    is_settled
        Whether `stream` has waited for the mark.
    is_kept
        Whether it stays because the host had no room.
    wanted_by
        The groups that have not released it. Weak: those of a graph that is gone do not count.
    """

    __slots__ = (
        "__weakref__",
        "_gone",
        "_pool",
        "_retired",
        "buffer",
        "is_arriving",
        "is_kept",
        "is_settled",
        "mark",
        "sent_with",
        "size_bytes",
        "storage",
        "stream",
        "version",
        "wanted_by",
    )

    def __init__(
        self,
        storage: torch.UntypedStorage,
        version: int,
        stream: Any,
        pool: HostPool,
        retired: deque[Retired],
    ) -> None:
        self.storage: torch.UntypedStorage | None = storage
        self.size_bytes = storage.nbytes()
        self.version = version
        self.stream = stream
        self.buffer: HostBuffer | None = None
        self.mark: Any = None
        self.sent_with: Sequence[Any] | None = None
        self.is_arriving = False
        self.is_settled = True
        self.is_kept = False
        self.wanted_by: set[weakref.ref[Group]] = set()
        self._gone: weakref.ref[torch.UntypedStorage] | None = None
        self._pool = pool
        self._retired = retired

    def is_wanted(self) -> bool:
        """Whether a group that is still there has not released it."""
        return any(group() is not None for group in self.wanted_by)

    def leaves(self, mark: Any, sent_with: Sequence[Any]) -> None:
        """A copy to the host was asked for."""
        self.mark, self.sent_with = mark, sent_with
        self.is_arriving, self.is_settled = False, mark is None

    def arrives(self, mark: Any) -> None:
        """A copy to the device was asked for."""
        self.mark, self.sent_with = mark, None
        self.is_arriving, self.is_settled = True, mark is None

    def let_go(self) -> None:
        """Hold the device's copy no more."""
        assert self.storage is not None
        self._gone = weakref.ref(self.storage)
        self.storage = None

    def find_again(self) -> bool:
        """Hold the device's copy again, if somebody else has held it all the time.

        It is as it was for its stream. Had it been modified, the saved tensors could not be used.
        """
        storage = None if self._gone is None else self._gone()
        if storage is None or storage.nbytes() != self.size_bytes:
            return False
        self.storage = storage
        return True

    def __del__(self) -> None:
        if self.storage is not None and not self.is_settled:
            self._retired.append((self.storage, self.mark, self.stream))
        if self.buffer is not None:
            self._pool.give_back(self.buffer)


class Handle:
    """What autograd keeps in place of a saved tensor: where it is, and how it looks."""

    __slots__ = ("_dtype", "_offset", "_probe", "_size", "_stride", "_version", "entry", "group")

    def __init__(self, tensor: torch.Tensor, entry: Entry, group: Group) -> None:
        self.entry = entry
        self.group = group
        self._dtype = tensor.dtype
        self._offset = tensor.storage_offset()
        self._size = tensor.size()
        self._stride = tensor.stride()
        self._version = tensor._version
        # Shares the counter of in-place modifications with the tensor, but none of its memory.
        self._probe = tensor.detach()
        self._probe.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def check(self) -> None:
        """Raise autograd's error if the tensor was modified in place since it was saved."""
        check_version(self._probe, self._version, self._size)

    def rebuild(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor over a storage."""
        tensor = torch.empty(0, dtype=self._dtype, device=storage.device)
        return tensor.set_(storage, self._offset, self._size, self._stride)
