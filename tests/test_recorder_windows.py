"""Each timed step measures some of the blocks, and together they measure the whole step."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import umem
from umem.capture.live import StepRecording, WallClock
from umem.capture.live import collector as _collector
from umem.capture.live.collector import RecordedSteps
from umem.capture.live.timing import Window, find_windows

WIDTH = 8
GAPS = ("forward Net", "backward Net")
ENDS = ["forward loss", "backward loss"]


def windows_of(labels: list[str], steps: int = 9) -> tuple[Window, ...]:
    names = {label.split()[1] for label in labels if label[-1].isdigit()}
    blocks = {
        f"{kind} {name}": name for kind in ("forward", "backward", "recompute") for name in names
    }
    return find_windows(labels, list(range(len(labels))), blocks, GAPS, steps)


def step_labels(count: int, *, gaps: bool) -> list[str]:
    """Of a step through a chain of blocks."""
    between = GAPS if gaps else ("", "")
    forward = [part for n in range(count) for part in (f"forward {n}", between[0])]
    backward = [part for n in reversed(range(count)) for part in (f"backward {n}", between[1])]
    labels = [GAPS[0], *forward, *ENDS, *backward, "after backward", "optimizer"]
    return [label for label in labels if label]


def timed_phases(window: Window, count: int) -> list[int]:
    """Phases between two marks; the last mark is that of the step's end."""
    return [first for first, end in pairwise([*window.marked, count]) if end == first + 1]


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("count", [4, 5, 6, 15])
def test_windows_time_every_phase_and_skip_blocks(count: int, gaps: bool) -> None:
    labels = step_labels(count, gaps=gaps)
    windows = windows_of(labels)
    assert len(windows) == (2 if count < 6 else 3)
    found = Counter(phase for window in windows for phase in timed_phases(window, len(labels)))
    assert set(found) == set(range(len(labels)))
    for window in windows:
        assert window.skipped
        assert window.labels[0] == "forward Net"
        assert window.labels[-1] == "optimizer"
        assert not {label.split()[-1] for label in window.labels} & window.skipped


def test_a_window_is_a_run_of_blocks_and_the_edges_of_its_neighbours() -> None:
    window = windows_of(step_labels(9, gaps=False))[1]  # of 3, 4 and 5
    assert window.skipped == frozenset("0178")
    assert window.labels == (
        "forward Net",
        *(f"forward {number}" for number in (2, 3, 4, 5, 6)),
        *ENDS,
        *(f"backward {number}" for number in (6, 5, 4, 3, 2)),
        "after backward",
        "optimizer",
    )


@pytest.mark.parametrize(("steps", "count"), [(1, 1), (5, 1), (6, 2), (8, 2), (9, 3), (20, 3)])
def test_there_are_as_many_windows_as_three_samples_allow(steps: int, count: int) -> None:
    assert len(windows_of(step_labels(15, gaps=False), steps)) == count


def test_few_blocks_are_one_window() -> None:
    labels = step_labels(3, gaps=False)
    (window,) = windows_of(labels)
    assert window.skipped == frozenset()
    assert window.labels == tuple(labels)


def test_a_block_that_is_called_again_is_in_one_window() -> None:
    labels = step_labels(6, gaps=False)
    half = labels[:-1]
    windows = windows_of([*half, *half, "optimizer"])
    for window in windows:
        counts = Counter(window.labels)
        assert all(counts[label] == 2 for label in counts if label != "optimizer")


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(7)
        )
        self.kind = kind
        if kind == "frozen":
            for part in (self.first, self.layers[0], self.layers[3]):
                part.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.first(inputs)
        kept = []
        for layer in [*self.layers, *self.layers] if self.kind == "shared" else self.layers:
            if self.kind in ("reentrant", "checkpointed"):
                result: Any = checkpoint(layer, hidden, use_reentrant=self.kind == "reentrant")
            else:
                result = layer(hidden)
            hidden = result.exp() if self.kind == "gaps" else result
            kept.append(hidden)
        return hidden + kept[0] if self.kind == "skip" else hidden


class Counting(WallClock):
    """Counts marks."""

    def __init__(self) -> None:
        self.count = 0

    def mark(self) -> int:
        self.count += 1
        return super().mark()


KINDS = ["plain", "gaps", "reentrant", "checkpointed", "shared", "frozen", "accumulated", "skip"]


def record(kind: str, **options: Any) -> tuple[StepRecording, list[int]]:
    """A recording, and how many marks each step took."""
    torch.manual_seed(0)
    model, clock = Net(kind), Counting()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.01)
    counts: list[int] = []
    with umem.record(model, optimizer, clock=clock, **options) as recording:
        for _ in range(15):
            for _ in range(2 if kind == "accumulated" else 1):
                model(torch.ones(2, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            counts.append(clock.count - sum(counts))
    assert not recording.failed
    return recording, counts


def steps_of(recording: StepRecording) -> RecordedSteps:
    assert recording.done
    assert recording._recorded is not None
    return recording._recorded


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_each_phase_is_timed_three_times_or_more(kind: str) -> None:
    recording, counts = record(kind)
    found, (whole, whole_counts) = steps_of(recording), record(kind, steps=5)
    assert len(found.windows) == 3
    assert min(map(len, found.seconds)) >= 3
    assert len(found.totals) == 9
    assert recording.trace.phase_names == whole.trace.phase_names
    # Two to warm up, and one whose memory is tracked.
    assert max(counts[3:12]) < 0.75 * max(whole_counts[3:8])
    assert counts[12:] == [0] * 3


def test_the_phases_add_up_to_the_step() -> None:
    class Work(WallClock):
        """A clock that modules put forward by the work that they do."""

        def __init__(self) -> None:
            self.now = 0

        def mark(self) -> int:
            return self.now

        def add(self, seconds: int) -> None:
            self.now += seconds * 10**9

    class Working(nn.Module):
        def __init__(self, seconds: int) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.seconds = seconds

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            clock.add(self.seconds)
            result: torch.Tensor = self.linear(hidden)
            result.register_hook(lambda _: clock.add(2 * self.seconds))
            return result

    clock = Work()
    model = nn.Sequential(*(Working(number + 1) for number in range(9)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with umem.record(model, optimizer, clock=clock) as recording:
        for _ in range(12):
            model(torch.ones(2, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    trace = recording.trace
    assert trace.duration_s is not None
    assert trace.duration_s.sum() == pytest.approx(3 * sum(range(10)))
    assert trace.metadata["median_step_s"] == pytest.approx(trace.duration_s.sum())
    assert trace.duration_s[trace.phase_names.index("forward 4")] == pytest.approx(5)


def test_the_step_is_measured_from_begin_to_end() -> None:
    class Ticks(WallClock):
        """Each mark is a second after the one before it."""

        def __init__(self) -> None:
            self.now = 0

        def mark(self) -> int:
            self.now += 1
            return self.now

        def seconds(self, first: int, second: int) -> float:
            return second - first

    torch.manual_seed(0)
    model = Net("plain")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with umem.record(model, optimizer, clock=Ticks()) as recording:
        for _ in range(12):
            model(torch.ones(2, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = steps_of(recording)
    assert found.totals == [float(len(found.windows[n % 3].marked)) for n in range(9)]
    np.testing.assert_array_equal([np.median(part) for part in found.seconds], 1)


def test_windows_with_unexpected_phases_are_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong(*given: Any) -> tuple[Window, ...]:
        windows = find_windows(*given)
        return tuple(replace(window, labels=window.labels[::-1]) for window in windows)

    monkeypatch.setattr(_collector, "find_windows", wrong)
    recording, counts = record("plain")
    found = steps_of(recording)
    assert found.windows == (found.whole,)
    # One step was lost, and each of the others has all phases.
    assert {len(part) for part in found.seconds} == {9}
    assert counts[3] < counts[4] == counts[12]
    assert counts[13:] == [0] * 2
