"""The hint engine: managed memory moved ahead of need by native threads.

A request is a wish about a range of addresses: bring it to the device, send it to the host, drop
its contents. :meth:`HintEngine.submit` only queues it; threads of the engine wait for the GPU's
work where that is asked for, call the driver, and keep the times. ``docs/hints.md`` explains.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

from umem._library import native
from umem.classes import TensorClass
from umem.errors import NativeLibraryError, UnsupportedError
from umem.schedule import HintOp

if TYPE_CHECKING:
    from types import TracebackType

    from umem import _native

__all__ = [
    "HintCounts",
    "HintEngine",
    "HintFailure",
    "HintSettings",
    "HintStatistics",
    "HintTimes",
    "Outcome",
]

_MIB = 1 << 20
_PATIENCE_S = 10.0
"""What the end of a process waits for a driver call that is under way."""

_ADVISE = len(HintOp)
"""The native number of advice, which moves nothing and so is no `HintOp`."""

OpName = Literal["prefetch", "evict", "discard", "copy_in", "copy_out", "advise"]
_OP_NAMES: dict[int, OpName] = {
    HintOp.PREFETCH: "prefetch",
    HintOp.EVICT: "evict",
    HintOp.DISCARD: "discard",
    HintOp.COPY_IN: "copy_in",
    HintOp.COPY_OUT: "copy_out",
    _ADVISE: "advise",
}
_CLASSES = tuple(TensorClass)


class Outcome(StrEnum):
    """What became of a request; the worst part of its range speaks for the whole."""

    OPEN = "open"
    """Queued, waiting or under way."""
    DONE = "done"
    SUPERSEDED = "superseded"
    """A newer request made it pointless before it was issued."""
    FORGOTTEN = "forgotten"
    """Its range was freed."""
    DROPPED = "dropped"
    """The engine ended, or the event to wait for could not be had."""
    FAILED = "failed"
    """The driver refused; :attr:`HintStatistics.failures` says why."""


@dataclass(frozen=True)
class HintSettings:
    """How an engine is set up.

    Parameters
    ----------
    chunk_bytes : int
        Largest range of one driver call, at least 2 MiB. On one H200, 128 MiB is where prefetches
        reach 44 GB/s beside an eviction at 21 GB/s without slowing the compute next to them.
    in_flight_bytes : int
        Most bytes in driver calls at once, in each direction, at least 2 MiB.
    capacity : int
        Most requests that are open at once; further ones are refused. As many ended ones stay on
        record.
    prefetch_workers : int
        Threads for the direction to the device, 1 to 16. The other direction always has one.
    poll_s : float
        Seconds between two looks at an event that requests wait for.
    """

    chunk_bytes: int = 128 * _MIB
    in_flight_bytes: int = 256 * _MIB
    capacity: int = 8192
    prefetch_workers: int = 2
    poll_s: float = 50e-6


@dataclass(frozen=True)
class HintTimes:
    """One request's history. Times are those of `time.monotonic_ns`; None: not yet."""

    op: OpName
    tensor_class: TensorClass
    address: int
    size_bytes: int
    moved_bytes: int
    outcome: Outcome
    asked_ns: int
    ready_ns: int | None
    """The event that it waited for was over."""
    issued_ns: int | None
    """Its first driver call began."""
    done_ns: int | None
    needed_ns: int | None
    """The phase that needs it began."""


@dataclass(frozen=True)
class HintCounts:
    """What requests of one operation on one tensor class came to."""

    requests: Mapping[Outcome, int]
    asked_bytes: int
    moved_bytes: int
    wasted_bytes: int
    """Superseded, forgotten, dropped or failed."""
    calls: int
    """Chunks issued; one may serve several requests."""
    event_wait_s: float
    queued_s: float
    """From ready to issued: behind others, or for room."""
    driver_s: float
    late: int
    """Requests that were done after the phase that needs them began."""
    late_s: float
    early: int
    early_s: float
    missed: int
    """Requests that were needed but never wholly done."""


@dataclass(frozen=True)
class HintFailure:
    """A driver call that failed, and how often it did so in the same way."""

    call: str
    error: int
    text: str
    count: int


@dataclass(frozen=True)
class HintStatistics:
    """What an engine has done so far, and what it is at now."""

    counts: Mapping[tuple[OpName, TensorClass], HintCounts]
    """Only pairs that were asked for."""
    failures: tuple[HintFailure, ...]
    refused: int
    """Requests without a ticket."""
    open_requests: int
    peak_open_requests: int
    queued_bytes: int
    in_flight_bytes: tuple[int, int]
    """To the device, to the host."""
    room_waits: int
    """Requests that found the device full."""
    resident_bytes: Mapping[int, int]
    """By device, as far as the engine was told or moved it."""


class HintEngine:
    """Threads that move managed memory; make one with :meth:`on_cuda` or :meth:`on_host`.

    Thread-safe. A driver call that fails raises nothing: it is counted, and told once on stderr.
    The engine ends with the process at the latest; in a forked child it refuses every request.

    Examples
    --------
    >>> from umem.schedule import HintOp
    >>> with HintEngine.on_host() as engine:
    ...     ticket = engine.submit(HintOp.PREFETCH, 1 << 40, 2 << 20)
    ...     engine.wait(ticket, timeout_s=10)
    <Outcome.DONE: 'done'>
    """

    def __init__(self, engine: _native.HintEngine) -> None:
        self._native = engine
        # Also at the end of the process, when CUDA is still there to end calls with.
        self._finalizer = weakref.finalize(self, engine.shutdown, _PATIENCE_S)

    @classmethod
    def on_cuda(cls, settings: HintSettings | None = None) -> HintEngine:
        """Make an engine for the GPUs of this process. Its threads start with the first request.

        Raises
        ------
        ValueError
            For settings out of range.
        NativeLibraryError
            If umem was built without CUDA.
        UnsupportedError
            Without an NVIDIA driver or a GPU.
        """
        library = native()
        if not library.HAS_CUDA:
            raise NativeLibraryError(
                "umem was built without CUDA: reinstall it with `pip install 'umem[cuda13]'` (or "
                "cuda12), or use HintEngine.on_host()."
            )
        try:
            return cls(library.HintEngine.on_cuda(_native_settings(settings)))
        except RuntimeError as error:
            raise UnsupportedError(
                f"hints need an NVIDIA driver and a GPU ({error}): see `umem doctor`, or use "
                "HintEngine.on_host()."
            ) from error

    @classmethod
    def on_host(
        cls,
        settings: HintSettings | None = None,
        *,
        devices: int = 1,
        bytes_per_s: float = 0.0,
    ) -> HintEngine:
        """Make an engine over host memory: nothing moves, streams do their work at once.

        Parameters
        ----------
        settings : HintSettings, optional
        devices : int
            Devices that exist; requests for others fail.
        bytes_per_s : float
            How fast a move seems to be; 0 for no time at all.

        Raises
        ------
        ValueError
            For settings out of range.
        """
        library = native()
        return cls(library.HintEngine.on_host(_native_settings(settings), devices, bytes_per_s))

    def start(self, device: int = 0) -> None:
        """Start the threads now, and let each get what it needs of `device`.

        Contexts and streams take a worker up to a second: better before training than in it.
        """
        self._native.start(device)

    def submit(
        self,
        op: HintOp,
        address: int,
        size_bytes: int,
        *,
        device: int = 0,
        event: int = 0,
        tensor_class: TensorClass = TensorClass.OTHER,
        host_address: int = 0,
    ) -> int:
        """Queue a request. No driver call is made here.

        Parameters
        ----------
        op : HintOp
            What to do. ``DISCARD`` and ``COPY_OUT`` end with undefined contents at `address`: call
            :meth:`forget`, or wait for the ticket, before anything writes there again.
        address, size_bytes : int
            The range. Managed memory, that of copies included.
        device : int
            The device to bring it to, or that it is sent away from.
        event : int
            From :meth:`record`: the request waits until the work before it is over. 0 for nothing.
        tensor_class : TensorClass
            Under which the request is counted.
        host_address : int
            Copies only: the host-resident block, as long as the range.

        Returns
        -------
        int
            A ticket; 0 when the queue is full or the engine has stopped.

        Raises
        ------
        ValueError
            For a range, a device or a copy that cannot be meant.
        """
        return self._native.submit(
            op, address, size_bytes, device, event, tensor_class.number, host_address
        )

    def advise(
        self,
        address: int,
        size_bytes: int,
        *,
        placement: Literal["device", "host", "any"],
        accessed_by_device: bool = False,
        read_mostly: bool = False,
        device: int = 0,
        event: int = 0,
        tensor_class: TensorClass = TensorClass.OTHER,
    ) -> int:
        """Queue standing advice, which replaces whatever the range had. Arguments as `submit`."""
        return self._native.advise(
            address,
            size_bytes,
            placement,
            accessed_by_device,
            read_mostly,
            device,
            event,
            tensor_class.number,
        )

    def mark_needed(self, ticket: int) -> None:
        """Say that the phase that needs the request begins now."""
        self._native.mark_needed(ticket)

    def record(self, device: int, stream: int) -> int:
        """Mark the end of the work that a stream holds now.

        Parameters
        ----------
        device, stream : int
            The stream's device and handle, such as ``torch.cuda.current_stream().cuda_stream``.

        Returns
        -------
        int
            An event for :meth:`submit`, to be given back with :meth:`release`. Where none can be
            had, as during a graph's capture, one whose requests are dropped.
        """
        return self._native.record(device, stream)

    def release(self, event: int) -> None:
        """Give an event back, once the requests that wait for it are submitted."""
        self._native.release(event)

    def set_budget(self, device: int, size_bytes: int) -> None:
        """Bound what is resident on a device by prefetches: past it they wait. 0: no bound."""
        self._native.set_budget(device, size_bytes)

    def set_resident(self, device: int, address: int, size_bytes: int, *, resident: bool) -> None:
        """Tell of a range that came to be on a device, or left it, without a hint."""
        self._native.set_resident(device, address, size_bytes, resident)

    def forget(self, address: int, size_bytes: int, *, timeout_s: float = _PATIENCE_S) -> bool:
        """Drop what is queued of a range, and wait until no driver call is at work on it.

        Returns
        -------
        bool
            True: the memory may be unmapped or written. False: the time ran out first.
        """
        return self._native.forget(address, size_bytes, timeout_s)

    def wait(self, ticket: int, *, timeout_s: float) -> Outcome:
        """Wait for a request's end.

        Returns
        -------
        Outcome
            ``OPEN`` when the time ran out.

        Raises
        ------
        KeyError
            For a ticket that is not on record any more, or never was.
        """
        outcome = self._native.wait(ticket, timeout_s)
        if outcome is None:
            raise KeyError(f"no hint on record has ticket {ticket}")
        return Outcome(outcome)

    def times(self, ticket: int) -> HintTimes:
        """Look up one request's history.

        Raises
        ------
        KeyError
            As :meth:`wait`.
        """
        found = self._native.find(ticket)
        if found is None:
            raise KeyError(f"no hint on record has ticket {ticket}")
        found["op"] = _OP_NAMES[found["op"]]
        found["tensor_class"] = _CLASSES[found["tensor_class"]]
        found["outcome"] = Outcome(found["outcome"])
        for name in ("ready_ns", "issued_ns", "done_ns", "needed_ns"):
            found[name] = found[name] or None
        return HintTimes(**found)

    def statistics(self) -> HintStatistics:
        """Take a snapshot of all counts."""
        found = self._native.statistics()
        counts = {
            (_OP_NAMES[op], _CLASSES[number]): _counts(values)
            for (op, number), values in found.pop("counts").items()
        }
        failures = tuple(HintFailure(*failure) for failure in found.pop("failures"))
        return HintStatistics(counts=counts, failures=failures, **found)

    def shutdown(self, *, timeout_s: float = _PATIENCE_S) -> bool:
        """End the engine: running driver calls end, the rest is dropped. More calls do nothing.

        Returns
        -------
        bool
            False when a driver call did not end in time; its thread is left to itself.
        """
        return self._native.shutdown(timeout_s)

    def __enter__(self) -> HintEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()


def _native_settings(settings: HintSettings | None) -> _native.HintSettings:
    chosen = HintSettings() if settings is None else settings
    native_settings: _native.HintSettings = native().HintSettings(**vars(chosen))
    return native_settings


def _counts(values: dict[str, Any]) -> HintCounts:
    requests = {Outcome(name): count for name, count in values.pop("requests").items()}
    return HintCounts(requests=requests, **values)
