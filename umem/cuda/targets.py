"""Locations, address ranges and streams, and how to read them from tensors and arrays."""

from __future__ import annotations

import mmap
import sys
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Location", "Range", "as_range", "as_stream", "whole_pages"]

LocationKind = Literal["device", "host", "host_numa"]


@dataclass(frozen=True)
class Location:
    """A place for pages, as in CUDA's ``cudaMemLocation``.

    Build one with :meth:`device`, :meth:`host` or :meth:`host_numa`. A negative number, or one for
    the host, is a ``ValueError``.

    Examples
    --------
    >>> Location.device(0)
    Location(kind='device', number=0)
    >>> str(Location.host_numa(1))
    'host NUMA node 1'
    """

    kind: LocationKind
    number: int = 0
    """The device's ordinal or the host's NUMA node; 0 for the host as a whole."""

    def __post_init__(self) -> None:
        if self.kind in ("device", "host_numa"):
            if self.number < 0:
                raise ValueError(
                    f"a {self.kind} location needs a number of 0 or more, not {self.number}; "
                    "the host is Location.host()"
                )
        elif self.kind != "host":
            raise ValueError(
                f"unknown kind of location {self.kind!r}; one of device, host, host_numa"
            )
        elif self.number != 0:
            raise ValueError(
                f"a host location has no number, got {self.number}; "
                "for one node of the host use Location.host_numa(node)"
            )

    @classmethod
    def device(cls, number: int) -> Location:
        """Return the memory of the CUDA device with this ordinal."""
        return cls("device", number)

    @classmethod
    def host(cls) -> Location:
        """Return host memory, the node left to the driver."""
        return cls("host")

    @classmethod
    def host_numa(cls, node: int) -> Location:
        """Return the host memory of one NUMA node."""
        return cls("host_numa", node)

    def __str__(self) -> str:
        if self.kind == "device":
            return f"device {self.number}"
        return f"host NUMA node {self.number}" if self.kind == "host_numa" else "host"


@dataclass(frozen=True)
class Range:
    """A contiguous address range; ``ValueError`` for a null address or an empty range."""

    address: int
    size_bytes: int

    def __post_init__(self) -> None:
        if self.address <= 0:
            raise ValueError(
                f"a range cannot start at address {self.address}; pass the address of allocated "
                "memory, such as tensor.data_ptr()"
            )
        if self.size_bytes <= 0:
            raise ValueError(
                f"the range at {self.address:#x} is empty ({self.size_bytes} bytes); leave empty "
                "targets out"
            )

    def __str__(self) -> str:
        return f"{self.size_bytes} bytes at {self.address:#x}"


def as_range(target: Any) -> Range:
    """Return the addresses that `target` occupies; makes no CUDA call.

    It is a `Range`, a pair (address, bytes), a tensor, or an object with
    ``__cuda_array_interface__``; tensors and arrays must be contiguous, else ``ValueError``, as for
    an empty target. ``TypeError`` for any other kind of object, and a tensor that is not a strided
    CUDA tensor.
    """
    if isinstance(target, Range):
        return target
    if isinstance(target, tuple):
        if len(target) != 2 or not all(_is_integer(part) for part in target):
            raise TypeError(f"a tuple target is (address, bytes), two integers; got {target!r}")
        return Range(*target)
    # A tensor can only exist once torch is loaded: no need to load it to ask.
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(target, torch.Tensor):
        return _tensor_range(target, torch)
    interface = getattr(target, "__cuda_array_interface__", None)
    if interface is not None:
        return _array_range(interface)
    raise TypeError(
        f"{type(target).__name__} names no device memory; pass a CUDA tensor, an object with "
        "__cuda_array_interface__, a Range, or a tuple (address, bytes)"
    )


def as_stream(stream: Any) -> int:
    """Return the ``cudaStream_t`` of `stream` as an integer; makes no CUDA call.

    It may be an integer (0 is the legacy default stream), a ``torch.cuda.Stream``, or an object
    with ``__cuda_stream__`` or ``cuda_stream``; ``TypeError`` for any other kind.
    """
    if _is_integer(stream):
        return int(stream)
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        # CUDA's stream protocol gives (version, handle); older objects made it an attribute.
        pair = protocol() if callable(protocol) else protocol
        return int(pair[1])
    handle = getattr(stream, "cuda_stream", None)
    if handle is not None:
        return int(handle)
    raise TypeError(
        f"stream must be an int, a torch.cuda.Stream or an object with __cuda_stream__, not "
        f"{type(stream).__name__}; torch's own is torch.cuda.current_stream()"
    )


def whole_pages(range_: Range) -> Range:
    """Return the whole host pages inside `range_`; ``ValueError`` if there are none."""
    page_bytes = mmap.PAGESIZE
    start = -(-range_.address // page_bytes) * page_bytes
    end = (range_.address + range_.size_bytes) // page_bytes * page_bytes
    if end <= start:
        raise ValueError(
            f"{range_} hold no whole page of {page_bytes} bytes: discarding would touch a "
            "neighbour's data; leave such small targets out"
        )
    return Range(start, end - start)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _tensor_range(tensor: Any, torch: Any) -> Range:
    if tensor.layout is not torch.strided:
        raise TypeError(
            f"a tensor of layout {tensor.layout} has no single range; pass its parts, such as "
            "tensor.values()"
        )
    if not tensor.is_cuda:
        raise TypeError(
            f"the tensor is on {tensor.device}, not on a CUDA device; move it with "
            "tensor.to('cuda')"
        )
    if tensor.numel() == 0:
        raise ValueError(f"the tensor of shape {tuple(tensor.shape)} is empty; leave it out")
    if not tensor.is_contiguous():
        raise ValueError(
            f"the tensor of shape {tuple(tensor.shape)} and strides {tuple(tensor.stride())} is "
            "not contiguous, so its range holds others' elements; pass the tensor that it is a "
            "view of, or a Range"
        )
    return Range(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def _array_range(interface: dict[str, Any]) -> Range:
    shape = tuple(interface["shape"])
    item_bytes = int(interface["typestr"].lstrip("<>|=")[1:])
    size_bytes = item_bytes
    # Strides of a C-contiguous array, last axis first; an axis of one element may have any.
    strides = interface.get("strides")
    contiguous = True
    for axis in reversed(range(len(shape))):
        if strides is not None and shape[axis] > 1:
            contiguous &= strides[axis] == size_bytes
        size_bytes *= shape[axis]
    if size_bytes == 0:
        raise ValueError(f"the array of shape {shape} is empty; leave it out")
    if not contiguous:
        raise ValueError(
            f"the array of shape {shape} and strides {strides} is not C-contiguous, so its "
            "range holds others' elements; pass the array that it is a view of, or a Range"
        )
    return Range(int(interface["data"][0]), size_bytes)
