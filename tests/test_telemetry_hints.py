"""Hints in a profile: what a real engine over host memory did, step by step."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
from collectors import StandInCollector

from umem.core.classes import TensorClass
from umem.core.report import HintReport, HintUse
from umem.core.schedule import HintOp
from umem.runtime.hints import HintEngine, HintOutcome, HintSettings
from umem.telemetry import Profile, measured_row, run_of
from umem.telemetry.live import current_residency, current_statistics, ideal_step_s
from umem.telemetry.reports import hint_traffic, hints_between

MIB = 1 << 20
BLOCK = 2 * MIB
BASE = 1 << 40
PATIENCE_S = 20.0
REFUSALS = {"start": "CUPTI is taken", "stop": "CUPTI broke"}
SMALL = HintSettings(chunk_bytes=BLOCK, in_flight_bytes=4 * MIB, prefetch_workers=1)


@pytest.fixture
def engine() -> Iterator[HintEngine]:
    with HintEngine.on_host(SMALL) as made:
        yield made


def move(
    engine: HintEngine,
    op: HintOp,
    blocks: int,
    of: TensorClass = TensorClass.WEIGHTS,
    device: int = 0,
) -> int:
    ticket = engine.submit(op, BASE, blocks * BLOCK, tensor_class=of, device=device)
    assert engine.wait(ticket, timeout_s=PATIENCE_S) is not HintOutcome.OPEN
    return ticket


def use_of(report: HintReport, op: str, of: TensorClass = TensorClass.WEIGHTS) -> HintUse:
    (found,) = [use for use in report.uses if (use.op, use.tensor_class) == (op, of)]
    return found


def test_hints_between_two_statistics(engine: HintEngine) -> None:
    move(engine, HintOp.PREFETCH, 3)
    before = engine.statistics()
    engine.mark_needed(move(engine, HintOp.PREFETCH, 2))
    move(engine, HintOp.EVICT, 1, TensorClass.OPTIMIZER_STATE)
    report = hints_between(before, engine.statistics())
    assert [(use.op, use.tensor_class) for use in report.uses] == [
        ("prefetch", TensorClass.WEIGHTS),
        ("evict", TensorClass.OPTIMIZER_STATE),
    ]
    prefetch = use_of(report, "prefetch")
    assert (prefetch.asked, prefetch.done, prefetch.early, prefetch.late) == (1, 1, 1, 0)
    assert (prefetch.missed, prefetch.wasted, prefetch.wasted_bytes) == (0, 0, 0)
    assert prefetch.asked_bytes == prefetch.moved_bytes == 2 * BLOCK
    assert prefetch.calls == 2
    assert (report.refused, report.failures) == (0, 0)
    # Nothing has happened since.
    assert hints_between(engine.statistics(), engine.statistics()).uses == ()


@pytest.mark.slow
def test_late_and_wasted_hints_are_counted_apart() -> None:
    with HintEngine.on_host(SMALL, bytes_per_s=BLOCK / 0.2) as slow:
        before = slow.statistics()
        late = slow.submit(HintOp.PREFETCH, BASE, BLOCK)
        slow.mark_needed(late)
        slow.wait(late, timeout_s=PATIENCE_S)
        forgotten = slow.submit(HintOp.PREFETCH, BASE, 8 * BLOCK)
        assert slow.forget(BASE, 8 * BLOCK)
        slow.mark_needed(forgotten)
        other = move(slow, HintOp.PREFETCH, 1, device=7)
        assert slow.wait(other, timeout_s=0) is HintOutcome.FAILED
        report = hints_between(before, slow.statistics())
    use = use_of(report, "prefetch", TensorClass.OTHER)
    assert (use.asked, use.late, use.wasted) == (2, 1, 1)
    assert use.late_s > 0
    assert use.missed == 1
    assert 0 < use.wasted_bytes <= 8 * BLOCK
    failed = use_of(report, "prefetch")
    assert (failed.asked, failed.done, failed.wasted) == (1, 0, 1)
    assert report.failures == 1


def test_a_new_engine_begins_at_zero(engine: HintEngine) -> None:
    move(engine, HintOp.PREFETCH, 3)
    move(engine, HintOp.EVICT, 1)
    with HintEngine.on_host(SMALL) as other:
        move(other, HintOp.PREFETCH, 1)
        # Without the eviction in `before`, it must be another engine.
        for before in (engine.statistics(), None):
            report = hints_between(before, other.statistics())
            assert use_of(report, "prefetch").asked_bytes == BLOCK


def use(op: Any, moved_bytes: int, **changes: Any) -> HintUse:
    figures = {"asked": 1, "done": 1, "late": 0, "early": 0, "missed": 0, "wasted": 0}
    return HintUse(
        op=op,
        tensor_class=TensorClass.WEIGHTS,
        asked_bytes=moved_bytes,
        moved_bytes=moved_bytes,
        wasted_bytes=0,
        calls=1,
        driver_s=0.5,
        late_s=0.0,
        **{**figures, **changes},
    )


def test_hints_as_traffic() -> None:
    uses = tuple(use(op, 8) for op in ("evict", "prefetch", "advise"))
    moved = hint_traffic(HintReport(uses, 0, 0))
    assert [(it.direction, it.cause, it.bytes, it.seconds, it.count) for it in moved] == [
        ("to_device", "hint", 8, 0.5, 1),
        ("to_host", "hint", 8, 0.5, 1),
    ]


def test_a_profile_reports_the_hints_of_each_step(engine: HintEngine) -> None:
    move(engine, HintOp.PREFETCH, 5)  # before the profile
    with Profile(StandInCollector(), hints=engine.statistics) as profile:
        for blocks in (1, 3):
            move(engine, HintOp.PREFETCH, blocks)
            profile.step()
        move(engine, HintOp.EVICT, 1)  # after the last step
    first, second = profile.step_reports()
    assert first.hints is not None
    assert second.hints is not None
    assert use_of(first.hints, "prefetch").moved_bytes == BLOCK
    assert use_of(second.hints, "prefetch").moved_bytes == 3 * BLOCK
    assert [it.op for it in second.hints.uses] == ["prefetch"]
    # Traffic is what the collector recorded, not the engine's counts.
    assert (first.source, first.collected, first.traffic) == ("cupti", True, ())
    row = measured_row(run_of(profile.recording))
    assert [step["hints"]["issued"] for step in row["per_step"]] == [1, 1]
    faster = min(row["per_step"], key=lambda step: float(step["step_s"]))
    assert row["hints"] == faster["hints"]  # of two steps the lower median


def test_without_marks_hints_are_those_of_the_whole_run(engine: HintEngine) -> None:
    with Profile(StandInCollector(), hints=engine.statistics) as profile:
        move(engine, HintOp.PREFETCH, 1)
        move(engine, HintOp.PREFETCH, 1)
    hints = profile.report().hints
    assert hints is not None
    assert use_of(hints, "prefetch").asked == 2


@pytest.mark.parametrize("at", ["start", "stop"])
def test_the_engines_counts_replace_records_that_are_missing(engine: HintEngine, at: str) -> None:
    with Profile(StandInCollector(REFUSALS[at], at), hints=engine.statistics) as profile:
        for blocks in (2, 2):
            move(engine, HintOp.PREFETCH, blocks)
            move(engine, HintOp.EVICT, 1, TensorClass.OPTIMIZER_STATE)
            profile.step()
    report = profile.report()
    assert (report.source, report.collected, report.step_count) == ("hints", False, 2)
    assert [(it.direction, it.cause, it.tensor_class, it.bytes) for it in report.traffic] == [
        ("to_device", "hint", TensorClass.WEIGHTS, 2 * BLOCK),
        ("to_host", "hint", TensorClass.OPTIMIZER_STATE, BLOCK),
    ]
    assert report.um_time_share != report.um_time_share  # not a number
    words = {"start": "not recorded: CUPTI is taken", "stop": "lost: CUPTI broke"}[at]
    assert any(words in note for note in report.notes)
    assert any("the hint engine's own count" in note for note in report.notes)
    row = measured_row(run_of(profile.recording))
    assert row["moved_bytes"] == {"to_device": 2 * BLOCK, "to_host": BLOCK, "between_devices": 0}
    assert row["um_time_share"] is row["fault_batches"] is row["memory_ops"] is None


def test_cupti_that_breaks_does_not_end_the_training() -> None:
    with Profile(StandInCollector("CUPTI broke", "stop")) as profile:
        profile.step()
    report = profile.report()
    assert (report.source, report.collected, report.hints) == ("none", False, None)
    assert report.step_s > 0
    assert any("CUPTI broke" in note for note in report.notes)


def test_refusals_of_the_driver_are_noted(engine: HintEngine) -> None:
    move(engine, HintOp.PREFETCH, 1, device=7)
    with Profile(StandInCollector(), hints=engine.statistics) as profile:
        move(engine, HintOp.PREFETCH, 1, device=7)
        profile.step()
    (note,) = [it for it in profile.report().notes if "refused" in it]
    assert note.startswith("the driver refused hints: open, no such device (1), count 1")


def test_a_running_executor_is_asked(engine: HintEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = types.ModuleType("umem.managing")
    executor.current_statistics = engine.statistics  # type: ignore[attr-defined]
    executor.ideal_step_s = lambda: 1e-9  # type: ignore[attr-defined]
    executor.residency = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "umem.managing", executor)
    with Profile(StandInCollector()) as profile:
        move(engine, HintOp.PREFETCH, 1)
        profile.step()
    report = profile.report()
    assert report.hints is not None
    assert report.ideal_s == 1e-9
    assert report.exposed_stall_s == report.step_s - 1e-9
    with Profile(StandInCollector(), ideal_s=2e-9) as profile:
        profile.step()
    assert profile.report().ideal_s == 2e-9


def test_the_executor_has_what_a_profile_asks_of_it() -> None:
    importlib.import_module("umem.managing")
    assert current_statistics() is None
    assert current_residency() is None
    assert ideal_step_s() is None


def test_a_profile_does_not_import_the_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "umem.managing", raising=False)
    with Profile(StandInCollector()) as profile:
        profile.step()
    assert "umem.managing" not in sys.modules
    assert profile.report().hints is None
    assert profile.recording.residency is None
