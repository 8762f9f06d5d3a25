"""The guard: the native part that uses torch's C++ interface.

It is installed as `umem.runtime._guard_torch2_13` and the like, one for each minor version of torch
that it was built for; :func:`umem.runtime.native_guard.native_guard` loads the one that fits.
"""

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
