"""The guard: the native part that uses torch's C++ interface.

It is installed as `umem.runtime._guard_torch2_13` and the like, one for each minor version of torch
that it was built for; :func:`umem.runtime.native_guard.native_guard` loads the one that fits.
"""

from collections.abc import Collection, Iterable
from types import TracebackType
from typing import Self

import torch

KEY: int
"""The dispatch key of guarded tensors, as a number of ``torch._C.DispatchKey``."""

class Guard:
    """Guards tensors. `umem.runtime.guard.Guard` is it for Python, with `use` and `run`."""

    was_used: bool
    """Whether a thread that Python does not know has used a tensor since `hold`."""

    def __init__(self, functions: list[str]) -> None: ...
    def hold(
        self,
        tensors: list[torch.Tensor],
        events: list[tuple[int, int]] | None,
        held: list[torch.Tensor] | None,
        denies_pointer: bool,
    ) -> None:
        """Guard tensors, and add those that had no guard to a list, which keeps them alive.

        Where a pointer is denied, or there are events, code that takes it gets an error.
        """

    def release(self) -> None:
        """Guard none any more."""

    def give_back(self, tensors: list[torch.Tensor]) -> None:
        """Guard some no more."""

class PastGuards:
    """A context in which no guard sees what this thread does."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

class Unguarded(PastGuards):
    """The same, in which torch functions of subclasses see nothing either."""

def guard_of(tensor: torch.Tensor) -> Guard | None:
    """The guard of a tensor."""

def are_plain(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether tensors are of torch's own classes, and not guarded."""

def addresses_of(tensors: Collection[torch.Tensor]) -> list[int]:
    """Where tensors begin in memory."""

def wait_for_use(tensor: object) -> None:
    """Wait as before an operator; anything but a tensor is left alone."""

def probe() -> bool:
    """Whether torch calls the guard in this process."""

def set_allocator(allocate: int, free: int) -> None:
    """Give the addresses of the functions that `umem_guard_malloc` and `umem_guard_free` call.

    torch calls those two, which are symbols of this library. What the first throws as an
    out-of-memory of umem, torch raises as ``torch.OutOfMemoryError``.
    """

def allocate(bytes: int) -> int:
    """Call `umem_guard_malloc` as torch does, for the device 0 and its default stream.

    Raises ``torch.OutOfMemoryError``.
    """

def allow(tensors: Collection[torch.Tensor], is_allowed: bool) -> None:
    """Have torch's operators, past guards, use tensors whose pointers are denied; or no more."""
