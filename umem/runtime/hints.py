"""What became of hints: a request's outcome and times, and an engine's counts.

Callers find all of it in :mod:`umem.runtime.hints`.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

from umem.core.classes import TensorClass
from umem.core.errors import NativeLibraryError, UnsupportedError
from umem.core.schedule import HintOp
from umem.runtime.native_library import native

if TYPE_CHECKING:
    from types import TracebackType

    import numpy as np
    from numpy.typing import NDArray

    from umem.runtime import _native

__all__ = [
    "OUTCOMES",
    "HintBatch",
    "HintCounts",
    "HintEngine",
    "HintFailure",
    "HintSettings",
    "HintStatistics",
    "HintTimes",
    "OpName",
    "Outcome",
    "statistics_from_native",
    "times_from_native",
]

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


OUTCOMES = tuple(Outcome)
"""By native number."""


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
    """From asked to ready."""
    queued_s: float
    """From ready to issued: behind others, or for room."""
    driver_s: float
    """In driver calls. Calls of one direction that are under way together share its link and the
    time, so that ``moved_bytes / driver_s`` is the link's rate however many workers there are. A
    call that serves several requests is shared out by bytes."""
    late: int
    """Requests that were done after the phase that needs them began."""
    late_s: float
    early: int
    """Requests that were done before it began."""
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
    over_budget_bytes: int
    """Brought to a full device, because no request asked for before could make room."""


def times_from_native(found: dict[str, Any]) -> HintTimes:
    """Name the parts of one native record."""
    values = {
        **found,
        "op": _OP_NAMES[found["op"]],
        "tensor_class": _CLASSES[found["tensor_class"]],
        "outcome": Outcome(found["outcome"]),
    }
    for name in ("ready_ns", "issued_ns", "done_ns", "needed_ns"):
        values[name] = found[name] or None
    return HintTimes(**values)


def statistics_from_native(found: dict[str, Any]) -> HintStatistics:
    """Name the parts of a native snapshot."""
    values = {
        **found,
        "counts": {
            (_OP_NAMES[op], _CLASSES[number]): _counts(of)
            for (op, number), of in found["counts"].items()
        },
        "failures": tuple(HintFailure(*failure) for failure in found["failures"]),
    }
    return HintStatistics(**values)


def _counts(found: dict[str, Any]) -> HintCounts:
    requests = {Outcome(name): count for name, count in found["requests"].items()}
    return HintCounts(**{**found, "requests": requests})


# The hint engine: managed memory moved ahead of need by native threads.
#
# A request is a wish about a range of addresses: bring it to the device, send it to the host, drop
# its contents. :meth:`HintEngine.submit` only queues it; threads of the engine wait for the GPU's
# work where that is asked for, call the driver, and keep the times. ``docs/hints.md`` explains.

_MIB = 1 << 20
_PATIENCE_S = 10.0
"""What the end of a process, and the end of a range, wait for a driver call under way."""


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
    poll_s: float = 100e-6


class HintBatch:
    """Requests that are made together, again and again; from :meth:`HintEngine.batch`.

    Thread-safe.
    """

    def __init__(self, batch: _native.HintBatch) -> None:
        self._native = batch

    def __len__(self) -> int:
        return len(self._native)

    def set_address(self, index: int, address: int) -> None:
        """Replace an entry's address; 0 skips the entry until it has one again.

        Raises
        ------
        IndexError
            For an entry that does not exist.
        ValueError
            For a range that ends beyond all addresses.
        """
        self._native.set_address(index, address)

    @property
    def tickets(self) -> range:
        """Tickets of the last firing, in the order of entries; skipped entries have none."""
        return range(*self._native.tickets())


class HintEngine:
    """Threads that move managed memory; make one with :meth:`on_cuda` or :meth:`on_host`.

    Thread-safe. A driver call that fails raises nothing: it is counted, and told once on stderr.
    The engine ends with the process at the latest; in a forked child it refuses every request.

    Examples
    --------
    >>> from umem.core.schedule import HintOp
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
                "umem was built without CUDA: build it again from its sources with "
                "`UMEM_CUDA=13 pip install --force-reinstall --no-deps .` (or 12), or use "
                "HintEngine.on_host()."
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
        fail: Mapping[str, int] | None = None,
    ) -> HintEngine:
        """Make an engine over host memory: nothing moves, streams do their work at once.

        Parameters
        ----------
        settings : HintSettings, optional
        devices : int
            Devices that exist; requests for others fail.
        bytes_per_s : float
            What a link seems to carry in each direction, shared by the direction's workers; 0 for
            moves that take no time at all.
        fail : mapping of str to int, optional
            Which call fails, by its name: ``{"evict": 2}`` for the second eviction. Each fails
            once. The names are those of :attr:`HintStatistics.failures`: ``record``, ``open``,
            ``load``, ``query``, ``prefetch``, ``evict``, ``discard``, ``copy``, ``advise``,
            ``synchronize``.

        Raises
        ------
        ValueError
            For settings out of range, and for a call that cannot fail.
        """
        return cls(
            native().HintEngine.on_host(
                _native_settings(settings), devices, bytes_per_s, dict(fail or {})
            )
        )

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
        """Queue standing advice, which replaces whatever the range had.

        Parameters
        ----------
        placement : str
            Preferred location: the device, the host, or none.
        accessed_by_device : bool
            Whether `device` keeps a mapping of the range, wherever its pages are.
        read_mostly : bool
            Whether reading makes a copy on the reader's side, and leaves the other.

        The other parameters, what is returned and what is raised are as for :meth:`submit`.
        """
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

    def batch(
        self,
        ops: Sequence[HintOp] | NDArray[np.integer[Any]],
        addresses: Sequence[int] | NDArray[np.integer[Any]],
        sizes: Sequence[int] | NDArray[np.integer[Any]],
        classes: Sequence[TensorClass] | NDArray[np.integer[Any]],
        device: int = 0,
    ) -> HintBatch:
        """Check requests once, to be made with one :meth:`fire` as often as needed.

        Parameters
        ----------
        ops : sequence of HintOp, or array of their numbers, shape (n,)
            ``PREFETCH``, ``EVICT`` or ``DISCARD``.
        addresses : sequence of int, shape (n,)
            0 for an entry that is skipped until :meth:`HintBatch.set_address` gives it one.
        sizes : sequence of int, shape (n,)
            Bytes.
        classes : sequence of TensorClass, or array of their numbers, shape (n,)
        device : int
            For all entries, as in :meth:`submit`.

        Raises
        ------
        ValueError
            For lengths that differ, copies, and what :meth:`submit` would refuse.
        """
        numbers = [of.number if isinstance(of, TensorClass) else int(of) for of in classes]
        return HintBatch(
            self._native.batch(
                [int(op) for op in ops],
                [int(address) for address in addresses],
                [int(size) for size in sizes],
                numbers,
                device,
            )
        )

    def fire(self, batch: HintBatch, stream: int, after: Sequence[int] = ()) -> int:
        """Make all requests of a batch, behind the work that a stream holds now.

        One driver call, which records an event, and one lock.

        Parameters
        ----------
        batch : HintBatch
        stream : int
            A handle, on the batch's device.
        after : sequence of int, shape (n,)
            For each entry, skipped ones included, the ticket of an eviction or discard on the same
            device; 0 for none. A prefetch waits until it and all of these that were asked for
            before it have ended, whatever became of them, so that nobody else has to wait for the
            room that they make. Later prefetches do not overtake it.

        Returns
        -------
        int
            The last ticket: those of one firing are consecutive (:attr:`HintBatch.tickets`). 0 when
            nothing was taken. What a full queue refuses is counted; it is the end of the batch.
            Requests may end in another order, so :meth:`wait` for each that is needed.

        Raises
        ------
        ValueError
            For another number of tickets in `after` than there are entries.
        """
        return self._native.fire(batch._native, stream, after)

    def mark_needed(self, *tickets: int) -> None:
        """Say that the phase that needs these requests begins now. Tickets of 0 are passed over."""
        self._native.mark_needed(tickets)

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
        """Keep prefetches from filling a device past a number of bytes. 0: no bound.

        Past it a prefetch waits for the evictions, discards and copies out that were asked for
        before it. When these have ended it goes on, over the budget: room that is asked for later
        may depend on it.
        """
        self._native.set_budget(device, size_bytes)

    def set_resident(self, device: int, address: int, size_bytes: int, *, resident: bool) -> None:
        """Tell of a range that came to be on a device, or left it, without a hint."""
        self._native.set_resident(device, address, size_bytes, resident)

    def forget(self, address: int, size_bytes: int, *, timeout_s: float = _PATIENCE_S) -> bool:
        """Drop what is queued of a range, and wait until no driver call is at work on it.

        The range may also be, or lie in, the host block of copies.

        Returns
        -------
        bool
            True: the memory may be unmapped or written. False: the time ran out first.

        Raises
        ------
        ValueError
            For a range that cannot be meant, or a time below 0.
        """
        return self._native.forget(address, size_bytes, timeout_s)

    def listen_to_releases(self, allocator: _native.Allocator) -> None:
        """Forget by itself what the allocator gives back to its source, before it does.

        One engine per allocator. ``allocator.set_release_listener(None)`` ends it. Blocks that the
        allocator keeps in its cache are not forgotten: do not discard an allocator's blocks.
        """
        allocator.set_release_listener(self._native)

    def wait(self, ticket: int, *, timeout_s: float) -> Outcome:
        """Wait for a request's end. Where it has ended already, no lock is taken.

        Returns
        -------
        Outcome
            ``OPEN`` when the time ran out.

        Raises
        ------
        KeyError
            For a ticket that is not on record any more, or never was; 0 among them.
        ValueError
            For a time below 0.
        """
        outcome = self._native.wait(ticket, timeout_s)
        if outcome is None:
            raise KeyError(f"no hint on record has ticket {ticket}")
        return OUTCOMES[outcome]

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
        return times_from_native(found)

    def statistics(self) -> HintStatistics:
        """Take a snapshot of all counts."""
        return statistics_from_native(self._native.statistics())

    def shutdown(self, *, timeout_s: float = _PATIENCE_S) -> bool:
        """End the engine: running driver calls end, the rest is dropped. More calls do nothing.

        Returns
        -------
        bool
            False when a driver call did not end in time; its thread is left to itself, and not
            waited for again.

        Raises
        ------
        ValueError
            For a time below 0.
        """
        ended = self._native.shutdown(timeout_s)
        self._finalizer.detach()
        return ended

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
