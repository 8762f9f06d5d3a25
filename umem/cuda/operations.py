"""Operations on managed memory, with their arguments checked before any call into CUDA."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from umem.core.errors import UnsupportedError
from umem.core.install import install_command
from umem.cuda import bindings as _bindings
from umem.cuda.targets import Location, Range, as_range, as_stream, whole_pages

__all__ = [
    "Advice",
    "accessed_by",
    "advise",
    "discard",
    "is_read_mostly",
    "last_prefetch_location",
    "managed_buffer",
    "preferred_location",
    "prefetch",
    "unadvise",
]

# cudaStreamLegacy: the default stream under its other name.
_LEGACY_STREAMS = (0, 1)


class Advice(StrEnum):
    """Standing advice on a range; :func:`unadvise` removes it."""

    READ_MOSTLY = "ReadMostly"
    """Mostly read: every processor that reads gets its own copy."""
    PREFERRED_LOCATION = "PreferredLocation"
    """Where the pages should stay."""
    ACCESSED_BY = "AccessedBy"
    """A processor that keeps the pages mapped, wherever they are."""


def prefetch(target: Any, location: Location, *, stream: Any) -> None:
    """Migrate `target` to `location`, in the order of `stream`.

    Parameters
    ----------
    target : torch.Tensor, Range, (address, bytes), or ``__cuda_array_interface__``
        Managed memory; tensors and arrays contiguous. The driver rounds outwards to pages.
    location : Location
        Where the pages should be.
    stream : int, torch.cuda.Stream, or an object with ``__cuda_stream__``
        The stream to queue on.

    Raises
    ------
    TypeError, ValueError
        For a target that is empty, not contiguous, or not in managed memory.
    umem.core.errors.UnsupportedError
        Without a driver or a GPU, or for a location that the driver does not know.
    umem.core.errors.CudaError
        When CUDA refuses.

    Warnings
    --------
    The call is asynchronous only on an idle stream: behind queued work it blocks the calling
    thread until that work is done, and towards the host it returns when the pages have moved.

    Examples
    --------
    >>> prefetch(weight, Location.device(0), stream=torch.cuda.current_stream())
    """
    handle = as_stream(stream)
    _bindings.prefetch(_managed(target, location), location, handle)


def advise(target: Any, advice: Advice, location: Location | None = None) -> None:
    """Give the driver standing advice on `target`; nothing moves.

    `location` is required for `PREFERRED_LOCATION`, and for `ACCESSED_BY`, where it is a device or
    the host as a whole; `READ_MOSTLY` has none. A location that the advice lacks or cannot have is
    a ``ValueError``; targets and other errors are those of :func:`prefetch`.

    Examples
    --------
    >>> advise(moments, Advice.PREFERRED_LOCATION, Location.host())
    >>> advise(moments, Advice.ACCESSED_BY, Location.device(0))
    """
    needed = advice is not Advice.READ_MOSTLY
    place = _advice_location("advise", advice, location, needed=needed)
    _bindings.advise(_managed(target, place), f"Set{advice.value}", place)


def unadvise(target: Any, advice: Advice, location: Location | None = None) -> None:
    """Remove advice. `location` is required for `ACCESSED_BY`; the others have none.

    Parameters and errors are those of :func:`advise`.
    """
    needed = advice is Advice.ACCESSED_BY
    place = _advice_location("unadvise", advice, location, needed=needed)
    _bindings.advise(_managed(target, place), f"Unset{advice.value}", place)


def discard(target: Any, *, stream: Any) -> None:
    """Declare the contents of `target` dead: they need not be written back.

    Only whole pages inside the target are discarded, so a neighbour that shares the first or last
    page keeps its data; a target without a whole page is a ``ValueError``. Until a page is written
    or prefetched again, reading it gives an indeterminate value. CUDA does not take the default
    stream here. Other parameters and errors are those of :func:`prefetch`; ``UnsupportedError``
    also if the driver or cuda-python is older than CUDA 13.
    """
    handle = as_stream(stream)
    if handle in _LEGACY_STREAMS:
        raise ValueError(
            "CUDA discards on no default stream; pass a stream of your own, such as "
            "torch.cuda.Stream()"
        )
    pages = _managed(whole_pages(as_range(target)), None)
    _bindings.discard(pages, handle)


def managed_buffer(target: Any) -> Any:
    """Return a ``cuda.core.ManagedBuffer`` over `target`, for what cuda.core has beside.

    Its ``prefetch_batch``, ``discard_batch`` and ``discard_prefetch_batch`` take many targets in
    one call. The buffer owns no memory, and keeps `target` itself alive.

    Parameters and errors are those of :func:`prefetch`; ``UnsupportedError`` also where cuda.core
    is older than 1.1 or missing, and ``ValueError`` for memory of the system's allocator, which
    cuda.core does not take.

    Warnings
    --------
    cuda.core discards the range as it is. :func:`discard` leaves out pages shared with a neighbour.

    Examples
    --------
    >>> from cuda.core import Device, Stream
    >>> from cuda.core.utils import prefetch_batch
    >>> stream = Stream.from_handle(torch.cuda.current_stream().cuda_stream)
    >>> prefetch_batch(stream, [managed_buffer(it) for it in weights], Device(0))
    """
    range_ = _managed(target, None, system=False)
    try:
        from cuda.core import ManagedBuffer
    except ImportError as error:
        raise UnsupportedError(
            f"managed_buffer needs cuda.core 1.1 or newer ({error}); cuda-python 13.4 brings it: "
            f"{install_command('cuda13')}"
        ) from error
    return ManagedBuffer.from_handle(range_.address, range_.size_bytes, owner=target)


def is_read_mostly(target: Any) -> bool:
    """Return whether every page of `target` has read-mostly advice; errors as :func:`prefetch`."""
    return _bindings.is_read_mostly(_managed(target, None))


def preferred_location(target: Any) -> Location | None:
    """Return the preferred location that all pages of `target` share, None if they share none.

    Errors are those of :func:`prefetch`.
    """
    return _bindings.range_location(_managed(target, None), "preferred")


def last_prefetch_location(target: Any) -> Location | None:
    """Return the location of the last prefetch of all pages, None if they share none.

    Faults and evictions since that prefetch do not change it, and the prefetch may still be
    running. Errors are those of :func:`prefetch`.

    Examples
    --------
    >>> prefetch(weight, Location.host(), stream=0)
    >>> last_prefetch_location(weight)
    Location(kind='host', number=0)
    """
    return _bindings.range_location(_managed(target, None), "last_prefetch")


def accessed_by(target: Any) -> tuple[Location, ...]:
    """Return the processors that every page has accessed-by advice for; errors as `prefetch`."""
    return _bindings.accessed_by(_managed(target, None))


def _advice_location(
    verb: str, advice: Advice, location: Location | None, *, needed: bool
) -> Location:
    if not isinstance(advice, Advice):
        raise TypeError(
            f"advice must be one of {', '.join(f'Advice.{it.name}' for it in Advice)}, "
            f"not {advice!r}"
        )
    if needed and location is None:
        raise ValueError(f"{verb}(..., Advice.{advice.name}) needs a location")
    if not needed and location is not None:
        raise ValueError(f"{verb}(..., Advice.{advice.name}) takes no location, got {location}")
    if advice is Advice.ACCESSED_BY and location is not None and "numa" in location.kind:
        raise ValueError(
            f"Advice.ACCESSED_BY is for a device or the host as a whole, not {location}; use "
            "Location.host()"
        )
    # CUDA ignores the location of advice that has none; it must be a valid one all the same.
    return Location.host() if location is None else location


def _managed(target: Any, location: Location | None, *, system: bool = True) -> Range:
    """Check that a target is managed memory and a location a Location; return the range.

    With `system`, memory of the system's allocator will do where the GPU can reach it.
    """
    range_ = as_range(target)
    if location is not None and not isinstance(location, Location):
        raise TypeError(
            f"location must be a Location, not {location!r}; for example Location.device(0) or "
            "Location.host()"
        )
    found = _bindings.memory_type(range_.address)
    if found == "cudaMemoryTypeManaged":
        return range_
    # Memory from malloc: the calls take it if the GPU can reach pageable memory.
    if (
        system
        and found == "cudaMemoryTypeUnregistered"
        and _bindings.device_attribute(0, "PAGEABLE_MEMORY_ACCESS")
    ):
        return range_
    raise ValueError(
        f"{range_} are not managed memory: cudaPointerGetAttributes says {found}; allocate with "
        "cudaMallocManaged, or enable a umem policy whose class has kind 'managed'"
    )
