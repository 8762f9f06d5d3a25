"""The hint engine: native threads that move managed memory ahead of need, and their statistics.

:meth:`HintEngine.submit` only queues a request about an address range: bring it to the device, send
it to the host. The engine's threads wait for the GPU's work where the request
says so, call the driver and record the times. ``docs/hints.md`` explains the engine.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, get_args

from umem.core.classes import TensorClass
from umem.core.errors import NativeLibraryError, UnsupportedError
from umem.core.report import HintUse, OpName
from umem.core.schedule import HintOp
from umem.policy import Refusable
from umem.runtime.native_library import native

if TYPE_CHECKING:
    from umem.runtime import _native

__all__ = [
    "HintBatch",
    "HintEngine",
    "HintFailure",
    "HintOutcome",
    "HintSettings",
    "HintStatistics",
]

_OP_NAMES: tuple[OpName, ...] = get_args(OpName)
_CLASSES = tuple(TensorClass)


class HintOutcome(StrEnum):
    """How a request ended. If parts of its range ended in different ways, the worst one counts.

    In the order of the native numbers.
    """

    OPEN = "open"
    """Queued, waiting or being issued."""
    DONE = "done"
    SUPERSEDED = "superseded"
    """A newer request made it pointless before it was issued."""
    FORGOTTEN = "forgotten"
    """Its range was freed."""
    DROPPED = "dropped"
    """The engine ended, or the event to wait for could not be recorded."""
    FAILED = "failed"
    """The driver refused; :attr:`HintStatistics.failures` says why."""


_OUTCOMES = tuple(HintOutcome)
_WASTED = _OUTCOMES[2:]


@dataclass(frozen=True)
class HintFailure:
    """A driver call that failed, and how often it failed with the same error."""

    call: str
    error: int
    text: str
    count: int


@dataclass(frozen=True)
class HintStatistics:
    """A snapshot of an engine's counters."""

    counts: Mapping[tuple[OpName, TensorClass], HintUse]
    """Only pairs that were requested."""
    failures: tuple[HintFailure, ...]
    refused: int
    """Requests without a ticket."""
    open_requests: int


@dataclass(frozen=True)
class HintSettings:
    """Settings of an engine."""

    chunk_bytes: int = 128 << 20
    """Largest range of one driver call, at least 2 MiB. The executor takes ``call_bytes`` of the
    hardware profile."""
    in_flight_bytes: int = 256 << 20
    """Most bytes in driver calls at once, in each direction, at least 2 MiB."""
    capacity: int = 8192
    """Most requests that are open at once; further ones are refused. The outcomes of as many
    ended requests are kept."""
    prefetch_workers: int = 2
    """Threads for the direction to the device, 1 to 16. The other direction always has one."""
    poll_s: float = 100e-6
    """Seconds between two queries of an event that requests wait for."""
    without: tuple[Refusable, ...] = ()
    """Calls that the engine does without, as with a driver that refuses them."""


_CALL_TIMEOUT_S = 10.0
"""How long `shutdown` and `forget` wait for a driver call under way."""

_FINISH_POLL_S = 1e-3


class HintBatch:
    """Requests to submit together, repeatedly; made by :meth:`HintEngine.batch`. Thread-safe."""

    def __init__(self, batch: _native.HintBatch) -> None:
        self._native = batch

    def set_address(self, index: int, address: int) -> None:
        """Replace an entry's address; 0 skips the entry until it has one again.

        Raises IndexError for an entry that does not exist, and ValueError for a range that ends
        beyond all addresses.
        """
        self._native.set_address(index, address)

    @property
    def tickets(self) -> range:
        """Tickets of the last submission, in the order of entries; skipped entries have none."""
        return range(*self._native.tickets())


class HintEngine:
    """Threads that move managed memory; make one with :meth:`on_cuda` or :meth:`on_host`.

    Thread-safe. A failing driver call raises nothing: it is counted, and printed once on stderr.
    The engine ends with the process at the latest; in a forked child it refuses every request.

    Examples
    --------
    >>> from umem.core.schedule import HintOp
    >>> with HintEngine.on_host() as engine:
    ...     ticket = engine.submit(HintOp.PREFETCH, 1 << 40, 2 << 20)
    ...     engine.wait(ticket, timeout_s=10)
    <HintOutcome.DONE: 'done'>
    """

    def __init__(self, engine: _native.HintEngine) -> None:
        self._native = engine
        # It runs at the end of the process too, while CUDA can still complete its calls.
        self._finalizer = weakref.finalize(self, engine.shutdown, _CALL_TIMEOUT_S)

    @classmethod
    def on_cuda(cls, settings: HintSettings | None = None) -> HintEngine:
        """Make an engine for the GPUs of this process. Its threads start with the first request.

        Raises ValueError for settings out of range, NativeLibraryError if umem was built without
        CUDA, and UnsupportedError without an NVIDIA driver or a GPU.
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
        """Make an engine over host memory: nothing moves, and streams are always idle.

        Requests for a device beyond `devices` fail. `bytes_per_s` simulates the link in each
        direction, shared by the direction's workers; 0 for moves that take no time. `fail` names
        calls that fail once: ``{"evict": 2}`` for the second eviction. The names are those of
        :attr:`HintStatistics.failures`: ``record``, ``open``, ``second_context``, ``query``,
        ``prefetch``, ``evict``, ``advise``, ``synchronize``. A call that cannot fail and settings
        out of range raise ValueError.
        """
        return cls(
            native().HintEngine.on_host(
                _native_settings(settings), devices, bytes_per_s, dict(fail or {})
            )
        )

    def start(self, device: int = 0) -> None:
        """Start the threads now, and let each create its contexts and streams on `device`.

        That takes up to a second, which is better spent before training than in its first step.
        """
        self._native.start(device)

    def submit(
        self,
        op: HintOp,
        address: int,
        size_bytes: int,
        *,
        device: int = 0,
        tensor_class: TensorClass = TensorClass.OTHER,
    ) -> int:
        """Queue a request about a range of managed memory. No driver call is made here.

        `op` is ``PREFETCH`` or ``EVICT``: the range moves to `device` or leaves it. The request
        waits for no work of the GPU. It is counted in the statistics of `tensor_class`.

        Returns
        -------
        int
            A ticket; 0 when the queue is full or the engine has stopped. Another operation and an
            invalid range or device raise ValueError.
        """
        return self._native.submit(op, address, size_bytes, device, tensor_class.number)

    def advise(
        self,
        address: int,
        size_bytes: int,
        *,
        placement: Literal["device", "host", "any"],
        accessed_by_device: bool = False,
        read_mostly: bool = False,
        device: int = 0,
        tensor_class: TensorClass = TensorClass.OTHER,
    ) -> int:
        """Queue standing advice, which replaces the advice that the range had.

        `placement` is the preferred location, ``any`` for none. With `accessed_by_device`, `device`
        keeps a mapping of the range wherever its pages are. With `read_mostly`, a read makes a copy
        on the reader's side and keeps the other one. The rest is as in :meth:`submit`.
        """
        number = tensor_class.number
        return self._native.advise(
            address, size_bytes, placement, accessed_by_device, read_mostly, device, number
        )

    def batch(
        self,
        ops: Sequence[HintOp],
        addresses: Sequence[int],
        sizes: Sequence[int],
        classes: Sequence[TensorClass],
        device: int = 0,
    ) -> HintBatch:
        """Check n requests once, to submit them together with :meth:`submit_batch` repeatedly.

        Operations are ``PREFETCH`` or ``EVICT``. An entry with address 0 is skipped until
        :meth:`HintBatch.set_address` gives it one. Sizes are bytes. Lengths that differ, and
        entries that :meth:`submit` would refuse, raise ValueError.
        """
        numbers = [it.number for it in classes]
        return HintBatch(self._native.batch(ops, addresses, sizes, numbers, device))

    def submit_batch(self, batch: HintBatch, stream: int, after: Sequence[int] = ()) -> int:
        """Submit all requests of a batch, ordered behind the work now queued on a stream.

        It takes one driver call, which records an event, and one lock. `stream` is a handle of the
        batch's device. `after` has for each entry, skipped ones included, the ticket of an eviction
        on the same device, 0 for none; another length raises ValueError. A prefetch waits until
        that request and all evictions submitted before it have ended, in any way, so that no other
        thread has to wait for the room that they make. Later prefetches do not overtake it.

        Returns
        -------
        int
            The last ticket; those of one submission are consecutive (:attr:`HintBatch.tickets`). 0
            if no request was queued. A full queue refuses the last entries of the batch, and counts
            them. Requests may end in another order, so :meth:`wait` for each that is needed.
        """
        return self._native.fire(batch._native, stream, after)

    def mark_needed(self, *tickets: int) -> None:
        """Record that the phase that needs these requests begins now. Tickets of 0 are ignored."""
        self._native.mark_needed(tickets)

    def forget(self, address: int, size_bytes: int, *, timeout_s: float = _CALL_TIMEOUT_S) -> bool:
        """Drop the queued requests of a range, and wait until no driver call works on it.

        True: the memory may be unmapped or written. False: the time ran out first. An invalid
        range or a time below 0 raises ValueError.
        """
        return self._native.forget(address, size_bytes, timeout_s)

    def listen_to_releases(self, allocator: _native.Allocator) -> None:
        """Forget every segment before the allocator returns it to its source.

        One engine per allocator. ``allocator.set_release_listener(None)`` ends it. Blocks that the
        allocator keeps in its cache are not forgotten.
        """
        allocator.set_release_listener(self._native)

    def wait(self, ticket: int, *, timeout_s: float) -> HintOutcome:
        """Wait until a request has ended; ``OPEN`` if the time ran out first.

        If it has ended already, no lock is taken. A ticket whose outcome is not kept any more, or
        that never was, as 0, raises KeyError; a time below 0 raises ValueError.
        """
        outcome = self._native.wait(ticket, timeout_s)
        if outcome is None:
            raise KeyError(f"no hint on record has ticket {ticket}")
        return _OUTCOMES[outcome]

    def finish(self, *, timeout_s: float) -> bool:
        """Wait until all requests have ended; False if the time ran out first.

        Requests that other threads submit meanwhile are waited for too.
        """
        end_s = time.monotonic() + timeout_s
        while self.statistics().open_requests:
            if time.monotonic() > end_s:
                return False
            time.sleep(_FINISH_POLL_S)
        return True

    def statistics(self) -> HintStatistics:
        """Take a snapshot of all counters."""
        found = self._native.statistics()
        uses = [
            _use(_OP_NAMES[op], _CLASSES[number], **counts)
            for (op, number), counts in found["counts"].items()
        ]
        found["counts"] = {(use.op, use.tensor_class): use for use in uses}
        found["failures"] = tuple(HintFailure(*failure) for failure in found["failures"])
        return HintStatistics(**found)

    def shutdown(self, *, timeout_s: float = _CALL_TIMEOUT_S) -> bool:
        """End the engine: driver calls under way complete, queued requests are dropped.

        A second call does nothing. False if a driver call did not complete in time; its thread is
        detached, and not waited for again. A time below 0 raises ValueError.
        """
        ended = self._native.shutdown(timeout_s)
        self._finalizer.detach()
        return ended

    def __enter__(self) -> HintEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _use(
    op: OpName, tensor_class: TensorClass, requests: Mapping[str, int], **figures: Any
) -> HintUse:
    """Counts of one operation on one class, of which the native ones have requests by outcome."""
    return HintUse(
        op,
        tensor_class,
        asked=sum(requests.values()),
        done=requests.get(HintOutcome.DONE, 0),
        wasted=sum(requests.get(outcome, 0) for outcome in _WASTED),
        **figures,
    )


def _native_settings(settings: HintSettings | None) -> _native.HintSettings:
    made: _native.HintSettings = native().HintSettings(**vars(settings or HintSettings()))
    return made
