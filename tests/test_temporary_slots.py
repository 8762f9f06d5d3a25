"""Slots that exist from a backward pass to the next forward pass: values are the plain step's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from streamed_programs import TEMPORARY, Program, begin, compare
from streamed_uses import USES

from umem.streaming.stage import BundleState
from umem.streaming.step import TemporaryPlan

AT_THE_STEP = TemporaryPlan(made_in=("layers.3", None, None), freed_before=TEMPORARY.freed_before)
"""Two of them are made when the step begins."""


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(
    eagerness=st.floats(0, 0.99),
    seed=st.integers(0, 1000),
    slots=st.integers(1, 4),
    most_buffers=st.sampled_from([None, 2, 4]),
    made_in=st.lists(st.integers(-1, 3), min_size=1, max_size=8),
    freed_before=st.lists(st.integers(-1, 4), min_size=8, max_size=8),
    resident=st.sets(st.sampled_from(["stem", "layers.0", "layers.2", "head", ""])),
    uses=st.lists(st.sampled_from(USES), max_size=1),
)
def test_any_plan(
    eagerness: float,
    seed: int,
    slots: int,
    most_buffers: int | None,
    made_in: list[int],
    freed_before: list[int],
    resident: set[str],
    uses: list[Callable[[Program], None]],
) -> None:
    ends = sorted(freed_before)[: len(made_in)]
    names = {-1: "", 4: None} | {it: f"layers.{it}" for it in range(4)}
    plan = TemporaryPlan(
        tuple(None if it < 0 else f"layers.{it}" for it in sorted(made_in, reverse=True)),
        tuple(names[it] for it in ends),
    )

    def change(program: Program) -> None:
        for use in uses:
            use(program)

    compare(
        change,
        eagerness,
        seed,
        slots=slots,
        most_buffers=most_buffers,
        temporary=plan,
        resident=frozenset(resident),
    )


def counted(run: Program) -> int:
    return len(run.training.step.units.ring.temporary)


def test_slots_are_made_and_freed_where_the_plan_says() -> None:
    run = begin(2, temporary=TEMPORARY)
    assert counted(run) == 3
    seen: list[tuple[str, int]] = []
    for name in ("layers.0", "layers.1", "layers.3"):
        layer = run.model.get_submodule(name)
        layer.register_forward_pre_hook(
            lambda *_, name=name: seen.append((f"forward {name}", counted(run)))
        )
        layer.register_full_backward_hook(
            lambda *_, name=name: seen.append((f"backward {name}", counted(run)))
        )
    run.backward()
    assert seen == [
        *(("forward layers.0", 3), ("forward layers.1", 2), ("forward layers.3", 1)),
        *(("backward layers.3", 1), ("backward layers.1", 3), ("backward layers.0", 3)),
    ]


def test_pieces_in_temporary_slots_are_fetched_before_the_step_and_leave_behind_it() -> None:
    run = begin(2, temporary=TEMPORARY)
    run.backward()
    pieces = [piece for unit in run.training.step.units for piece in unit.pieces]
    staged = [it for it in pieces if it.state.homes]
    states = [BundleState.COMING] * 5 + [BundleState.LEAVING]
    assert [it.where for it in staged[:6]] == states
    assert [it.slot is not it.turn for it in staged[:6]] == [False] * 2 + [True] * 3 + [False]
    run.optimizer.step()
    here = run.training.step.units.ring.here
    # And those that have the other slots last.
    assert list(here) == [*staged[2:5], *staged[-2:]]
    seen: list[int] = []
    run.model.register_forward_pre_hook(lambda *_: seen.append(len(here)))
    run.model.stem.register_forward_hook(lambda *_: seen.append(len(here)))
    run.model(run.batch())
    assert seen == [5, 0]
    assert all(it.returned is not None and it.returned.is_done for it in staged[2:5])


@pytest.mark.parametrize("batches", [1, 2])
def test_the_last_slots_are_made_when_the_step_begins(batches: int) -> None:
    plan = TemporaryPlan(AT_THE_STEP.made_in, AT_THE_STEP.freed_before, batches=batches)
    run = begin(2, temporary=plan, batches=batches)
    seen = []
    for _ in range(batches):
        run.backward()
        seen.append(counted(run))
    assert seen == [0] * (batches - 1) + [1]
    run.optimizer.step()
    assert counted(run) == 3


ACCUMULATED = TemporaryPlan(
    made_in=("layers.3", "layers.2", "layers.2"),
    freed_before=("layers.1",),
    freed_in_backward=("layers.2", ""),
    batches=2,
)
"""Two of them leave beside the first batch's backward pass."""


def test_slots_are_freed_in_the_first_of_several_backward_passes() -> None:
    run = begin(2, temporary=ACCUMULATED, batches=2)
    seen: list[tuple[str, int]] = []
    for name in ("layers.3", "layers.2", "layers.0"):
        layer = run.model.get_submodule(name)
        layer.register_forward_hook(lambda *_, name=name: seen.append((name, counted(run))))
        layer.register_full_backward_hook(lambda *_, name=name: seen.append((name, counted(run))))
    run.backward()
    forward = [("layers.0", 3), ("layers.2", 2), ("layers.3", 2)]
    assert seen == [*forward, ("layers.3", 2), ("layers.2", 1), ("layers.0", 1)]
    assert counted(run) == 0
    run.backward()
    assert counted(run) == 3  # they are made in the last one


def test_slots_that_no_backward_pass_has_freed_do_not_outlive_the_next_pass() -> None:
    run = begin(2, temporary=ACCUMULATED, batches=2)
    run.model(run.batch())
    assert counted(run) == 2
    run.model(run.batch())
    assert counted(run) == 0


@pytest.mark.parametrize("eagerness", [0.0, 0.8])
@pytest.mark.parametrize("clips", [True, False])
def test_no_bit_changes_where_batches_are_accumulated(eagerness: float, clips: bool) -> None:
    plan = TemporaryPlan(
        ACCUMULATED.made_in, ACCUMULATED.freed_before, ACCUMULATED.freed_in_backward, 3
    )
    run = compare(
        eagerness=eagerness,
        clips=clips,
        batches=3,
        temporary=plan,
        copied_gradients=frozenset(["layers.1", "layers.2", "layers.3", "norm", "head"]),
        final_gradients=frozenset(["layers.1", "head"]),
        returning={"layers.2": "layers.2"},
        hosts=frozenset(["layers.1", "layers.3"]),
        resident=frozenset(["stem"]),
    )
    assert run.training.counts.by_host > 0


def test_an_evaluation_frees_them() -> None:
    for plan in (TEMPORARY, ACCUMULATED):
        run = begin(2, temporary=plan, batches=plan.batches)
        assert counted(run) == 3
        with torch.no_grad():
            run.model(run.batch())
        assert counted(run) == 0


def test_a_pass_that_no_step_follows_leaves_nothing_behind() -> None:
    run = begin(2, temporary=TEMPORARY)
    for _ in range(3):
        run.backward()
        assert counted(run) == 3
    run.optimizer.zero_grad()
    with torch.no_grad():
        run.model(run.batch())
    assert counted(run) == 0


def test_none_are_asked_for_again_where_the_device_has_no_room() -> None:
    run = begin(2, temporary=TEMPORARY)
    asked: list[int] = []
    run.memory.buffer = asked.append
    run.step()
    run.step()
    assert len(asked) == 1
    assert counted(run) == 0


def test_a_new_plan_and_the_end_free_them() -> None:
    run = begin(2, temporary=TEMPORARY)
    run.training.temporary.set_plan(TemporaryPlan())
    assert counted(run) == 0
    run.training.temporary.set_plan(TEMPORARY)
    run.step()
    assert counted(run) == 3
    run.training.close()
    assert counted(run) == 0
    assert run.lazy.open_tasks == 0
