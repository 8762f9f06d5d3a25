"""Events that are recorded on a stream wait for what was added to the stream's order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import pytest
import torch
from other_process import run_forked

from umem import patches
from umem.patches import PATCHES
from umem.runtime.torch_hooks.stream_order import StreamOrder


class AnyStream:
    """A stream as ``torch.Stream``. Objects with one number are one stream."""

    device = torch.device("cuda", 0)
    device_index, device_type = 0, 1
    work: ClassVar[dict[int, set[str]]] = {}
    captured: ClassVar[set[int]] = set()

    def __init__(self, stream_id: int | None = None, **_: int) -> None:
        self.stream_id = len(self.work) + 1 if stream_id is None else stream_id
        self.work.setdefault(self.stream_id, set())

    @property
    def done(self) -> set[str]:
        """The work that is over when the stream's next work begins."""
        return self.work[self.stream_id]

    def has(self, event: AnyEvent) -> None:
        """The wait itself. A graph can wait for nothing outside of it; a wait for it joins it."""
        if event.is_captured:
            self.captured.add(self.stream_id)
        elif self.stream_id in self.captured:
            raise RuntimeError("an event from outside of the capture")
        self.work[self.stream_id] |= event.done

    def record_event(self, event: AnyEvent | None = None) -> AnyEvent:
        event = AnyEvent() if event is None else event
        event.is_of(self)  # in C, past record()
        return event

    def wait_event(self, event: AnyEvent) -> None:
        self.has(event)

    def wait_stream(self, stream: AnyStream) -> None:
        event = AnyEvent()
        event.is_of(stream)
        self.has(event)

    def synchronize(self) -> None:
        HOST.has(AnyEvent(self.done))

    def query(self) -> bool:
        return True


class Stream(AnyStream):
    """A stream as ``torch.cuda.Stream``."""

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def record_event(self, event: AnyEvent | None = None) -> AnyEvent:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: AnyEvent) -> None:
        event.wait(self)

    def wait_stream(self, stream: AnyStream) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        HOST.has(AnyEvent(self.done))

    def query(self) -> bool:
        return True


class AnyEvent:
    """An event as ``torch.Event``, with the work that is over when it has passed."""

    __slots__ = ("done", "has_passed", "is_captured")
    device = torch.device("cuda")

    def __init__(self, done: set[str] | None = None, *, has_passed: bool = True) -> None:
        self.done = done or set()
        self.has_passed = has_passed
        self.is_captured = False

    def is_of(self, stream: AnyStream) -> None:
        """The record itself."""
        self.done = set(stream.done)
        self.is_captured = stream.stream_id in stream.captured

    def record(self, stream: AnyStream | None = None) -> None:
        self.is_of(stream or CURRENT[0])

    def wait(self, stream: AnyStream | None = None) -> None:
        (stream or CURRENT[0]).has(self)

    def synchronize(self) -> None:
        HOST.has(self)

    def query(self) -> bool:
        return self.has_passed


class Event(AnyEvent):
    """An event as ``torch.cuda.Event``."""

    def record(self, stream: AnyStream | None = None) -> None:
        self.is_of(stream or CURRENT[0])

    def wait(self, stream: AnyStream | None = None) -> None:
        (stream or CURRENT[0]).has(self)

    def synchronize(self) -> None:
        HOST.has(self)

    def query(self) -> bool:
        return self.has_passed


HOST = Stream(0)
CURRENT = [Stream()]
METHODS = [key for key, it in PATCHES.items() if it.made_in.endswith("/stream_order.py")]


@pytest.fixture
def order() -> Iterator[StreamOrder]:
    """The order of these streams."""
    CURRENT[0] = Stream()
    HOST.done.clear()
    captured = AnyStream.captured
    yield StreamOrder(Stream, Event, AnyStream, AnyEvent, lambda: CURRENT[0], captured.__contains__)
    AnyStream.captured.clear()
    patches.undo(*METHODS)


@pytest.fixture(params=["an event", "an event that comes later"])
def training(request: pytest.FixtureRequest, order: StreamOrder) -> Stream:
    """A stream whose step is deferred: its updates are under way, and it has not waited."""
    event = Event({"update"}, has_passed=False)
    order.add(CURRENT[0], event if request.param == "an event" else lambda: event)
    return CURRENT[0]


def test_a_stream_that_waits_for_the_stream_has_the_updates(training: Stream) -> None:
    side = Stream()
    side.wait_stream(training)
    assert side.done == {"update"}
    assert training.done == set()


def test_an_event_has_the_updates_later_too(training: Stream) -> None:
    event = Event()
    event.record()
    assert not event.query()
    side = Stream()
    side.wait_event(event)
    assert side.done == {"update"}
    event.synchronize()
    assert HOST.done == {"update"}


def test_waiting_for_the_stream_on_the_host_waits_for_the_updates(training: Stream) -> None:
    assert not training.query()
    training.synchronize()
    assert HOST.done == {"update"}


def test_other_streams_are_as_they_were(training: Stream) -> None:
    other, side = Stream(), Stream()
    event = Event()
    event.record(other)
    side.wait_event(event)
    other.synchronize()
    assert other.query()
    assert side.done == HOST.done == set()
    event.record(training)
    event.record(other)  # again, for the other stream
    side.wait_event(event)
    assert side.done == set()


def test_a_stream_that_is_left_out_has_what_the_stream_itself_has_waited_for(
    order: StreamOrder, training: Stream
) -> None:
    training.done.add("kernel")
    gathering, side = Stream(), Stream()
    order.leave_out(gathering)
    for it in (gathering, side):
        it.wait_stream(training)
    assert gathering.done == {"kernel"}
    assert side.done == {"kernel", "update"}
    event = Event()
    event.record(training)
    gathering.wait_event(event)
    assert gathering.done == {"kernel"}
    CURRENT[0] = gathering
    event.wait()  # some other code's
    assert gathering.done == {"kernel", "update"}


# ------------------------------------------------------------------ other objects and classes


def test_another_object_for_the_stream_has_the_updates(training: Stream) -> None:
    """As ``torch.cuda.ExternalStream`` makes one of a handle."""
    side = Stream()
    side.wait_stream(Stream(training.stream_id))
    assert side.done == {"update"}
    Stream(training.stream_id).synchronize()
    assert HOST.done == {"update"}


def test_an_event_of_the_other_class_has_the_updates(training: Stream) -> None:
    """The event carries nothing, so the stream has waited."""
    for stream in (None, training, AnyStream(training.stream_id)):
        event, side = AnyEvent(), AnyStream()
        event.record(stream)
        side.wait_event(event)
        assert side.done == {"update"}
        assert training.done == {"update"}
        training.done.clear()


def test_a_stream_of_the_other_class_has_the_updates(training: Stream) -> None:
    same = AnyStream(training.stream_id)
    side = AnyStream()
    side.wait_stream(same)
    assert side.done == {"update"}
    assert training.done == set()
    assert not same.query()
    same.synchronize()
    assert HOST.done == {"update"}


def test_an_event_of_a_stream_of_the_other_class_has_the_updates(training: Stream) -> None:
    side, event = Stream(), AnyEvent()
    side.wait_event(AnyStream(training.stream_id).record_event())
    assert side.done == {"update"}
    training.done.clear()
    assert AnyStream(training.stream_id).record_event(event) is event
    assert event.done == {"update"}


def test_classes_are_mixed(training: Stream) -> None:
    same = AnyStream(training.stream_id)
    event = Event()
    event.record(same)
    sides = AnyStream(), Stream(), AnyStream(), Stream()
    event.wait(sides[0])
    sides[1].wait_stream(same)
    sides[2].wait_event(event)
    sides[3].wait_event(training.record_event(AnyEvent()))
    assert [it.done for it in sides] == [{"update"}] * 4


def test_streams_of_other_devices_are_as_they_were(
    training: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AnyStream, "device", torch.device("cpu"))
    monkeypatch.setattr(AnyEvent, "device", torch.device("cpu"))
    event, side = AnyEvent(), AnyStream()
    event.record(side)
    event.wait()
    event.record()
    side.wait_stream(AnyStream(training.stream_id))
    assert side.query()
    side.synchronize()
    assert side.done == training.done == HOST.done == set()


# ------------------------------------------------------------------ captures


@pytest.mark.parametrize("kind", [Stream, AnyStream])
def test_a_captures_fork_has_no_event_from_outside(training: Stream, kind: type[AnyStream]) -> None:
    AnyStream.captured.add(training.stream_id)
    forked = kind()
    forked.wait_stream(training)
    assert forked.stream_id in AnyStream.captured
    training.wait_stream(forked)
    event = AnyEvent()
    event.record(training)
    assert forked.done == training.done == event.done == set()


def test_a_capture_waits_for_an_external_event_alone(training: Stream) -> None:
    event, captured = Event(), Stream()
    event.record(training)
    event.is_captured = True  # a node of its own waits, as for one of external=True
    AnyStream.captured.add(captured.stream_id)
    captured.wait_event(event)
    assert captured.done == set()


def test_streams_outside_of_a_capture_have_the_updates(training: Stream) -> None:
    AnyStream.captured.add(Stream().stream_id)
    side = Stream()
    side.wait_stream(training)
    assert side.done == {"update"}


# ------------------------------------------------------------------ torch's own classes


def test_methods_of_torch_in_c_are_replaced_and_put_back() -> None:
    stream = torch.Stream(device="cpu")
    query = torch.Stream.query
    assert stream.query()
    seen = []

    def noted(it: torch.Stream) -> bool:
        seen.append(it)
        return query(it)

    patches.replace("stream_query", noted)
    try:
        others = stream, torch.Stream(device="cpu")
        assert all(it.query() for it in others)
        assert len(seen) == 2
    finally:
        patches.undo("stream_query")
    assert torch.Stream.query is query
    assert stream.query()
    assert len(seen) == 2


@pytest.mark.slow
def test_torchs_classes_can_be_wrapped() -> None:
    """In a process of its own: the wraps stay."""
    code = """
import torch
from umem.runtime.torch_hooks.stream_order import cuda_stream_order
names = {torch.Stream: "record_event wait_event wait_stream synchronize query",
         torch.Event: "record wait", torch.cuda.Event: "record wait synchronize query",
         torch.cuda.Stream: "synchronize query"}
before = [getattr(kind, name) for kind, all in names.items() for name in all.split()]
cuda_stream_order().install()
now = [getattr(kind, name) for kind, all in names.items() for name in all.split()]
assert all(a is not b and b.__wrapped__ is a for a, b in zip(before, now, strict=True))
stream = torch.Stream(device="cpu")
assert stream.query()
stream.synchronize()
assert isinstance(stream, torch.Stream)
for use in (lambda: torch.Event(device="cpu").record(), lambda: stream.wait_stream(stream),
            lambda: stream.record_event()):
    try:
        use()
    except RuntimeError as error:
        assert "support events" in str(error), error
    else:
        raise AssertionError("no error")
"""
    run_forked(code)
