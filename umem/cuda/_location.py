"""Where pages can be: a device, the host, or one of the host's NUMA nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Location", "LocationKind"]

LocationKind = Literal["device", "host", "host_numa", "host_numa_current"]


@dataclass(frozen=True)
class Location:
    """A place for pages, in the terms of CUDA's ``cudaMemLocation``.

    Build one with :meth:`device`, :meth:`host`, :meth:`host_numa` or
    :meth:`host_numa_current`.

    Parameters
    ----------
    kind : {"device", "host", "host_numa", "host_numa_current"}
        What the place is.
    number : int
        The device's ordinal or the host's NUMA node; 0 for the other kinds.

    Raises
    ------
    ValueError
        For a negative number, or a number where the kind has none.

    Examples
    --------
    >>> Location.device(0)
    Location(kind='device', number=0)
    >>> str(Location.host_numa(1))
    'host NUMA node 1'
    """

    kind: LocationKind
    number: int = 0

    def __post_init__(self) -> None:
        if self.kind in ("device", "host_numa"):
            if self.number < 0:
                raise ValueError(
                    f"a {self.kind} location needs a number of 0 or more, not {self.number}; "
                    "the host is Location.host()"
                )
        elif self.kind in ("host", "host_numa_current"):
            if self.number != 0:
                raise ValueError(
                    f"a {self.kind} location has no number, got {self.number}; "
                    "for one node of the host use Location.host_numa(node)"
                )
        else:
            raise ValueError(
                f"unknown kind of location {self.kind!r}; one of device, host, host_numa, "
                "host_numa_current"
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

    @classmethod
    def host_numa_current(cls) -> Location:
        """Return the host NUMA node nearest to the calling thread's CPU."""
        return cls("host_numa_current")

    def __str__(self) -> str:
        if self.kind == "device":
            return f"device {self.number}"
        if self.kind == "host_numa":
            return f"host NUMA node {self.number}"
        return "host" if self.kind == "host" else "the calling thread's host NUMA node"
