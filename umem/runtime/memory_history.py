"""The history of allocations, as torch.cuda.memory._record_memory_history keeps it.

torch's page https://pytorch.org/memory_viz shows a history in the colours of tensor classes, and
page-locked host memory as one more device, as it does the CPU's in histories of torch's profiler.
"""

from __future__ import annotations

import atexit
import sys
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from types import CodeType
from typing import TYPE_CHECKING, Any

from umem.core.classes import TensorClass
from umem.core.garbage import no_garbage_collection

if TYPE_CHECKING:
    from umem.runtime._native import Allocator

__all__ = ["MemoryHistory"]

_CLASSES = tuple(TensorClass)
_HOST = "pinned"
_Stack = tuple[tuple[CodeType, int], ...]


@dataclass(slots=True)
class _Event:
    """A block that is allocated or freed."""

    is_born: bool
    address: int
    bytes: int
    requested_bytes: int
    tensor_class: TensorClass
    """Of a block that is allocated: its last one, for classes are known after the allocation."""
    device: int
    kind: str
    stream: int
    stack: _Stack
    time_us: int


class MemoryHistory:
    """Allocations and frees of an allocator, with the Python stacks that made them."""

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self._live: dict[int, _Event] = {}
        self._events: deque[_Event] = deque()
        self._context: str | None = None
        self._skipped: Collection[str] = ()

    def record(
        self,
        enabled: str | None = "all",
        context: str | None = "all",
        stacks: str = "all",
        max_entries: int = sys.maxsize,
        clear_history: bool = False,
        _compile_context: bool = False,
        _annotations: bool = False,
        skip_actions: Collection[str] = (),
    ) -> None:
        """Begin or end, as `torch.cuda.memory._record_memory_history` says.

        `max_entries` counts the frees and allocations of all devices. Stacks are Python's, also
        where `stacks` asks for those of C++.
        """
        if enabled not in (None, "state", "all") or context not in (None, "state", "alloc", "all"):
            raise RuntimeError(
                f"expected state/all/None and state/alloc/all/None, got {enabled!r}, {context!r}"
            )
        if stacks not in ("python", "all"):
            raise RuntimeError(f"expected stacks to be python or all, but got {stacks!r}")
        self._context, self._skipped = context, skip_actions
        kept = () if clear_history else self._events
        self._events = deque(kept, max(0, max_entries) if enabled == "all" else 0)
        if enabled is None:
            self._live.clear()
        else:
            atexit.register(self._allocator.set_block_listener, None)
        self._allocator.set_block_listener(None if enabled is None else self._note)

    def record_legacy(
        self, enabled: bool, with_context: bool = True, max_entries: int = 1, *_: object
    ) -> None:
        """Begin or end, as older calls of torch's function say it."""
        self.record("all" if enabled else None, "all" if with_context else None, "all", max_entries)

    def add_frames(self, segments: Iterable[dict[str, Any]]) -> None:
        """Add the stacks to the live blocks of a snapshot."""
        for segment in segments:
            for block in segment["blocks"]:
                event = self._live.get(block["address"])
                if event is not None and block["state"] == "active_allocated":
                    event.tensor_class = TensorClass(block["tensor_class"])
                    block["frames"] = _frames(event)

    def traces(self, segments: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        """The events of each device, and those of page-locked memory as of one more.

        Segments that events were in, and that are gone, end behind the events: the page places each
        block in a segment.
        """
        host = self._allocator.device_count()
        traces: list[list[dict[str, Any]]] = [[] for _ in range(host + 1)]
        gone: list[list[tuple[int, int]]] = [[] for _ in traces]
        present = sorted((it["address"], it["address"] + it["total_size"]) for it in segments)
        with no_garbage_collection():  # which may free tensors, and add events
            events = list(self._events)
        for event in events:
            place = host if event.kind == _HOST else event.device
            traces[place] += self._entries(event)
            ends = event.address + event.bytes
            before = bisect_right(present, event.address, key=itemgetter(0))
            if not before or ends > present[before - 1][1]:
                gone[place].append((event.address, ends))
        for trace, ranges in zip(traces, gone, strict=True):
            for begin, end in _merged(ranges):
                trace.append(_entry("segment_free", begin, end - begin, 0, [], events[-1].time_us))
            if trace:
                # The page fails on a history with categories of which none is this one.
                last = _entry("snapshot", 0, 0, 0, [], time.time_ns() // 1000)
                trace.append(last | {"category": "unknown"})
        return traces

    def _entries(self, event: _Event) -> Iterator[dict[str, Any]]:
        for action in ("alloc",) if event.is_born else ("free_requested", "free_completed"):
            if action not in self._skipped:
                entry = _entry(
                    action,
                    event.address,
                    event.requested_bytes,
                    event.stream,
                    _frames(event),
                    event.time_us,
                )
                yield entry | {"category": event.tensor_class.value}

    def _note(
        self,
        is_born: bool,
        address: int,
        size_bytes: int,
        requested_bytes: int,
        number: int,
        device: int,
        kind: str,
        stream: int,
    ) -> None:
        """Keep an event: the allocator calls this, in the thread of the allocation or free."""
        without_stack = (None,) if is_born else (None, "state", "alloc")
        event = _Event(
            is_born,
            address,
            size_bytes,
            requested_bytes,
            _CLASSES[number],
            device,
            kind,
            stream,
            () if self._context in without_stack else _stack(),
            time.time_ns() // 1000,
        )
        if is_born:
            self._live[address] = event
        elif (born := self._live.pop(address, None)) is not None:
            born.tensor_class = event.tensor_class
        self._events.append(event)


def _stack() -> _Stack:
    """The Python stack of the caller's caller, the innermost call first."""
    found = []
    frame = sys._getframe(1).f_back
    while frame is not None:
        found.append((frame.f_code, frame.f_lineno or 0))
        frame = frame.f_back
    return tuple(found)


def _frames(event: _Event) -> list[dict[str, Any]]:
    """The stack in torch's form, below a line that says the class and the kind of memory."""
    words = f"{event.tensor_class.value} in {event.kind} memory"
    return [
        {"filename": "umem", "line": 0, "name": words},
        *(
            {"filename": code.co_filename, "line": line, "name": code.co_name}
            for code, line in event.stack
        ),
    ]


def _entry(
    action: str, address: int, size: int, stream: int, frames: list[Any], time_us: int
) -> dict[str, Any]:
    return {
        "action": action,
        "addr": address,
        "size": size,
        "stream": stream,
        "frames": frames,
        "time_us": time_us,
    }


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged
