"""Events that are recorded on a stream wait for what was added to the stream's order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from umem.runtime.torch_hooks.stream_order import StreamOrder


class Stream:
    """A stream that knows the work that is over when its next work begins."""

    def __init__(self) -> None:
        self.done: set[str] = set()

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        event = Event()
        event.record(stream)
        self.wait_event(event)

    def synchronize(self) -> None:
        HOST.done |= self.done

    def query(self) -> bool:
        return True


class Event:
    """An event with the work that is over when it has passed."""

    def __init__(self, done: set[str] | None = None, *, has_passed: bool = True) -> None:
        self.done = done or set()
        self.has_passed = has_passed

    def record(self, stream: Stream | None = None) -> None:
        self.done = set((stream or CURRENT[0]).done)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or CURRENT[0]).done |= self.done

    def synchronize(self) -> None:
        HOST.done |= self.done

    def query(self) -> bool:
        return self.has_passed


HOST = Stream()
CURRENT = [Stream()]
_PLAIN = [dict(vars(kind)) for kind in (Stream, Event)]


@pytest.fixture
def order() -> Iterator[StreamOrder]:
    """The order of these streams."""
    CURRENT[0] = Stream()
    HOST.done.clear()
    yield StreamOrder(Stream, Event, lambda: CURRENT[0])
    for kind, plain in zip((Stream, Event), _PLAIN, strict=True):
        for name in ("record", "wait", "synchronize", "query"):
            if name in plain:
                setattr(kind, name, plain[name])


@pytest.fixture
def training(order: StreamOrder) -> Stream:
    """A stream whose step is deferred: its updates are under way, and it has not waited."""
    order.add(CURRENT[0], Event({"update"}, has_passed=False))
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


def test_listeners_hear_of_streams_that_wait(training: Stream) -> None:
    order = StreamOrder(Stream, Event, lambda: CURRENT[0])
    heard: list[Stream] = []
    end = order.on_wait(heard.append)
    side, event = Stream(), Event()
    side.wait_stream(training)
    event.wait()
    event.synchronize()
    assert heard == [side, training]
    end()
    side.wait_stream(training)
    assert len(heard) == 2
