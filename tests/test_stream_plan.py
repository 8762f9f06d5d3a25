"""Streamed optimizer state: hand-computed steps, properties of every step, and plans."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from umem.core.classes import TensorClass
from umem.core.errors import PlanError
from umem.hardware import Hardware, load_hardware
from umem.streaming.plan import (
    LaneKind,
    LaneTasks,
    NoShorterStepError,
    StreamPlan,
    StreamProblem,
    StreamUnit,
    TemporarySlot,
    TrainingPlan,
    WeightUnit,
    home_bytes,
    largest_slot_bytes,
    plan_stream,
    plan_training,
    plan_with_host_updates,
    simulate_lanes,
    simulate_stream,
    with_weights,
)

MIB = 2**20
MS = 1e-3
RATE = 40e3 * MIB
"""Of a copy either way alone: 40 MiB a millisecond."""
STATE = TensorClass.OPTIMIZER_STATE


@pytest.fixture(scope="module")
def two_way(machine: Hardware) -> Hardware:
    """A link that carries both directions at once at full speed."""
    return replace(machine, copy_link_bytes_per_s=2 * RATE)


def unit(size_mib: float = 40, update_ms: float = 0.5, forward_ms: float = 0.25) -> StreamUnit:
    return StreamUnit("block", int(size_mib * MIB), update_ms * MS, forward_ms * MS, 0.0)


def saving(saved_mib: float, before_mib: float, **changes: Any) -> StreamUnit:
    """A unit without state, whose passes take 1 and 2 ms.

    It saves activations; units before it have saved others.
    """
    peak_bytes = int((before_mib + saved_mib) * MIB)
    plain = StreamUnit(
        "block", 0, 0.0, 1 * MS, 2 * MS, int(saved_mib * MIB), peak_bytes, peak_bytes
    )
    return replace(plain, **changes)


def fastest(units: Sequence[StreamUnit], **settings: Any) -> StreamPlan:
    return plan_stream(StreamProblem(units, **settings))


def milliseconds(values: Sequence[float]) -> Any:
    return pytest.approx([value * MS for value in values], rel=1e-12)


# ---------------------------------------------------------------------------------- by hand

THREE = [unit()] * 3
COPIES = unit(update_ms=0, forward_ms=0)
BACK = replace(unit(), backward_s=1 * MS)
WITH_WEIGHTS = replace(unit(), trained_weight_bytes=20 * MIB)
LARGE = StreamUnit("block", 160 * MIB, 0.0, 0.0, 1 * MS)
SAVES, MUCH = [saving(40, 0)] * 3, [saving(120, 0)] * 3
IN_BACKWARD: dict[str, Any] = {"other_s": 0.0, "in_backward": True}
ONE_COPIED: dict[str, Any] = {"other_s": 0.0, "copied": {0: 3}}


def case(name: str, units: list[StreamUnit], slots: int, expected: Any, **settings: Any) -> Any:
    return pytest.param(units, slots, expected, settings, id=name)


def ms(**expected: Any) -> dict[str, Any]:
    return expected


@pytest.mark.parametrize(
    ("units", "slots", "expected", "settings"),
    [
        case(
            *("resident state costs nothing", THREE, 0),
            ms(step=12.25, compute=12.25, exposed=0, slowed=0, update_end=[1.5] * 3),
            resident=range(3),
        ),
        # In two slots, with copies of 1 ms. The third unit's copy waits until the first is written
        # back at 1.5, and ends at 2.5. Its update ends at 3. The forward pass is through with the
        # first two units by then, since 1.5.
        case(
            *("the third of three units waits for the first slot", THREE, 2),
            ms(update_end=[0.5, 1, 3], step=13.25, compute=12.25, exposed=1, slowed=0, home=4),
        ),
        case(
            *("a step that waits does so for all updates", THREE, 2),
            ms(update_end=[0.5, 1, 3], step=13.75, exposed=1.5, home=4),
            is_deferred=False,
        ),
        # The third unit is there when the step begins, and leaves last, from 2.5 to 3.5. The second
        # forward pass could begin at 1.75, the backward pass at 2.25.
        *(
            case(
                *(f"a temporary slot is freed before {freed_before}", THREE, 2),
                ms(update_end=[0.5, 1, 1.5], step=step, exposed=exposed, home=3.5),
                is_deferred=False,
                temporary=[TemporarySlot(made_in=1, freed_before=freed_before)],
            )
            for freed_before, step, exposed in [(3, 13.5, 1.25), (1, 14.0, 1.75)]
        ),
        # Weights of 20 MiB come from 0 to 0.5 and from 0.5 to 1; updates end at 1 and 1.5. The
        # first unit leaves from 1 to 2.5, the second one's weights until 3: the forward passes
        # begin. Its state leaves until 4, and the backward pass waits for that.
        case(
            *("weights at home leave before state in temporary slots", [WITH_WEIGHTS] * 2, 1),
            ms(update_end=[1, 1.5], home=4, step=14),
            is_deferred=False,
            temporary=[TemporarySlot(made_in=0, freed_before=2)],
        ),
        # The first unit's pass runs from 1 to 2, the second's until the third's update at 2.5.
        case(
            *("an update interrupts the forward pass", [unit(forward_ms=1)] * 3, 2),
            ms(update_end=[0.5, 1, 3], step=14.5, exposed=0),
        ),
        # The third unit arrives while the second leaves, each at three quarters of the speed.
        case(
            *("both directions share the link", THREE, 2),
            ms(update_end=[0.5, 1, 2 + 4 / 3], step=1.5 + 4 / 3 + 0.75 + 10, exposed=4 / 3),
            link=1.5,
        ),
        # The unit leaves from 1 to 2 and comes back until 3; meanwhile 4/5 of 2 ms is computed.
        case(
            *("copies slow the computation beside them", [unit(update_ms=1, forward_ms=1)], 1),
            ms(step=12.4, slowed=0.4, exposed=0),
            slowdown=0.25,
        ),
        case(
            *("a step of copies takes as long as the link", [COPIES] * 4, 2),
            ms(step=4, exposed=4, home=5),
            other_s=0.0,
        ),
        # One unit leaves for 1 ms and comes back for 1 ms, however many slots are free.
        *(
            case(f"nothing is fetched early to {slots}", [COPIES], slots, ms(step=2), other_s=0.0)
            for slots in (1, 2, 8)
        ),
        # Nothing but copies: a step begins when the third unit has arrived, in the slot of the
        # first. It leaves until 1. Then the first one comes until 2, the second until 3, beside
        # which the first leaves, and the third until 4.
        case(
            *("the first slot is free when its last unit is home", [COPIES] * 3, 2),
            ms(update_end=[2, 3, 4], step=4, home=5),
            other_s=0.0,
        ),
        # The passes of both units take 0.25 and 1 ms. The second's update runs from 1.5 to 2, the
        # first's from 3, where the backward pass is over, to 3.5, where the next one begins.
        case(
            *("units are updated in the backward pass in reverse", [BACK] * 2, 2),
            ms(step=3.5, compute=3.5, exposed=0, update_end=[0, -1.5], home=1),
            **IN_BACKWARD,
        ),
        case("they follow in one slot", [BACK] * 2, 1, ms(step=5, exposed=1.5), **IN_BACKWARD),
        case(
            *("they are resident", [BACK] * 2, 0, ms(step=3.5, exposed=0)),
            **IN_BACKWARD,
            resident=(0, 1),
        ),
        # The states arrive at 4, 8, 12 and 16, and the first three backward passes end at 3. The
        # last one waits for the first update until 4. The step ends after the second, at 8.
        case(
            *("more gradients wait than two units have", [LARGE] * 4, 4),
            ms(step=16, exposed=12, update_end=[8, 4, 0, -4]),
            **IN_BACKWARD,
        ),
        # Forward passes end at 1, 2 and 3, backward passes at 5, 7 and 9 or later.
        case("activations leave and come back", SAVES, 0, ms(step=9, exposed=0), **ONE_COPIED),
        # 3 ms each way, so that they leave until 4, where the backward pass begins. From 6 on they
        # come back too late, from 4 on in time.
        case("they come back late", MUCH, 0, ms(step=11, exposed=2), **ONE_COPIED, fetch_ahead=1),
        case("they come early", MUCH, 0, ms(step=10, exposed=1), **ONE_COPIED, fetch_ahead=2),
        # If their memory is needed before the third forward pass, that is from 4 to 5.
        case(
            *("the forward pass waits for memory", MUCH, 0, ms(step=11, exposed=2)),
            other_s=0.0,
            copied={0: 2},
            fetch_ahead=2,
        ),
        # The state of one unit, and the activations of another, come back from 3 on, each in 2 ms.
        # The forward passes end at 2, the second backward pass at 3, the first begins at 4.
        case(
            "copies in the same direction share it",
            [saving(40, 0, state_bytes=40 * MIB), saving(40, 0, backward_s=1 * MS)],
            *(1, ms(step=1 + 1 + 1 + 1 + 2 + 10, exposed=1)),
            is_deferred=False,
            copied={0: 2},
        ),
    ],
)
def test_a_step_takes_as_long_as_by_hand(
    machine: Hardware, units: list[StreamUnit], slots: int, expected: Any, settings: dict[str, Any]
) -> None:
    """Times in milliseconds, with 10 ms of clipping unless the settings say otherwise."""
    usual: dict[str, Any] = {"resident": (), "other_s": 10 * MS, "link": 2.0, "slowdown": 0.0}
    options = usual | settings
    hardware = replace(
        machine,
        copy_link_bytes_per_s=options.pop("link") * RATE,
        copy_slowdown_s_per_byte=options.pop("slowdown") * MS / (40 * MIB),
    )
    timing = simulate_stream(units, slots=slots, hardware=hardware, **options)
    for name, times in expected.items():
        found = np.divide(getattr(timing, f"{name}_s"), MS)
        assert found == pytest.approx(np.array(times), rel=1e-12, abs=1e-12), name


def test_updates_that_the_device_waits_for_are_launched_one_by_one(two_way: Hardware) -> None:
    """The program goes on after them; state on the device is updated by the optimizer at once."""
    fast = replace(two_way, copy_link_bytes_per_s=1e6 * RATE)
    fast = replace(fast, copy_to_device_bytes_per_s=1e6 * RATE, copy_to_host_bytes_per_s=1e6 * RATE)
    units = [replace(BACK, piece_bytes=(10 * MIB, BACK.state_bytes - 10 * MIB))] * 3
    for resident, pieces in (((0, 1, 2), 0), ((1,), 4), ((), 6)):
        usual = simulate_stream(units, resident, 2, hardware=fast)
        timing = simulate_stream(units, resident, 2, hardware=fast, launch_s=2 * MS)
        # Updates run meanwhile.
        assert timing.step_s >= usual.step_s + pieces * 2 * MS - 1.5 * MS
        assert timing.step_s <= usual.step_s + pieces * 2 * MS + 1e-9
        assert timing.compute_s == usual.compute_s
        parts_s = timing.compute_s + timing.slowed_s + timing.exposed_s
        assert timing.step_s == pytest.approx(parts_s)
        in_backward = simulate_stream(
            units, resident, 2, hardware=fast, launch_s=2 * MS, in_backward=True
        )
        assert in_backward == simulate_stream(units, resident, 2, hardware=fast, in_backward=True)


def test_activations_leave_for_state_whose_launches_are_waited_for(two_way: Hardware) -> None:
    """Both hide their copies; the fewest activations leave where that is all."""
    units = [
        saving(40, 40 * number, state_bytes=40 * MIB, update_s=0.5 * MS, forward_s=4 * MS)
        for number in range(6)
    ]
    budget_bytes = 8 * 40 * MIB
    usual = fastest(units, budget_bytes=budget_bytes, hardware=two_way)
    waiting = fastest(units, budget_bytes=budget_bytes, hardware=two_way, launch_s=2 * MS)
    assert len(usual.resident) < len(waiting.resident)
    assert len(usual.copied) < len(waiting.copied)


def test_bytes_are_counted_by_class(two_way: Hardware) -> None:
    for resident, slots, size_bytes in (((0, 1, 2), 0, {}), ((), 2, {STATE: 120 * MIB})):
        timing = simulate_stream(THREE, resident, slots, hardware=two_way)
        assert timing.to_device_bytes == timing.to_host_bytes == size_bytes
    timing = simulate_stream(SAVES, (), 0, hardware=two_way, copied={0: 3})
    assert timing.to_device_bytes == timing.to_host_bytes == {TensorClass.ACTIVATIONS: 40 * MIB}
    # Every batch copies its activations.
    units = [replace(BACK, saved_bytes=10 * MIB)] * 3
    timing = simulate_stream(units, (), 2, hardware=two_way, copied={0: 3, 1: 3}, batches=3)
    assert timing.to_host_bytes == {STATE: 120 * MIB, TensorClass.ACTIVATIONS: 60 * MIB}
    assert timing.compute_s == pytest.approx(3 * (0.5 + 3 * 1.25) * MS)


def test_clipping_takes_longer_for_gradients_on_the_host(two_way: Hardware) -> None:
    hardware = replace(
        two_way,
        memory_bytes_per_s=30 * RATE,
        mapped_read_bytes_per_s=RATE,
        mapped_bytes_per_s=2 * RATE,
    )
    units = [saving(0, 0, saved_bytes=0, gradient_bytes=20 * MIB) for _ in range(2)]

    def step_s(other_s: float, **settings: Any) -> float:
        return simulate_stream(
            units, (), 0, hardware=hardware, other_s=other_s, copied_gradients=[1], **settings
        ).step_s

    # Three times 40 MiB through memory take 0.1 ms: a norm, and a product read and written.
    clipping_s = 3 * 40 * MIB / (30 * RATE)
    nothing_s = step_s(0.0)
    # On the host 20 MiB are read and written in 0.5 ms. Norms are known.
    assert step_s(clipping_s) - nothing_s == pytest.approx(clipping_s + 0.5 * MS)
    assert step_s(clipping_s / 3) - nothing_s == pytest.approx((clipping_s + 0.5 * MS) / 3)
    assert step_s(100 * MS) - nothing_s == pytest.approx(100 * MS + 0.5 * MS)
    # A second batch changes those on the host: then they are read, too.
    for adds_at_home, longer_s in ((False, 0.5 * MS), (True, 1 * MS)):
        settings = {"batches": 2, "adds_at_home": adds_at_home}
        clips_s = step_s(clipping_s, **settings) - step_s(0.0, **settings)
        assert clips_s == pytest.approx(clipping_s + longer_s)


def test_clipping_takes_no_longer_where_updates_have_copies_of_gradients(two_way: Hardware) -> None:
    at_once: dict[str, Any] = {"copy_to_device_bytes_per_s": 1e18, "copy_to_host_bytes_per_s": 1e18}
    hardware = replace(two_way, **at_once, copy_link_bytes_per_s=1e18, memory_bytes_per_s=30 * RATE)
    with_state: dict[str, Any] = {
        "state_bytes": 40 * MIB,
        "update_s": 1 * MS,
        "gradient_bytes": 20 * MIB,
    }
    units = [saving(0, 0, **with_state)] * 2

    def step_s(*, stages_operands: bool) -> float:
        return simulate_stream(
            units,
            (),
            2,
            hardware=hardware,
            other_s=5 * MS,
            copied_gradients=[1],
            stages_operands=stages_operands,
        ).step_s

    assert step_s(stages_operands=True) == pytest.approx((2 * 3 + 2 + 5) * MS)
    assert step_s(stages_operands=False) > (2 * 3 + 2 + 5.5) * MS


def test_the_host_updates_a_unit_beside_the_passes(two_way: Hardware) -> None:
    """Its gradient leaves in 0.5 ms, then its weights; 140 MiB take the host 1 ms."""
    hardware = replace(two_way, host_update_bytes_per_s=140 * MIB / MS)
    units = [replace(BACK, gradient_bytes=20 * MIB, name=name) for name in ("first", "second")]
    for number, step in enumerate((0.5 + 0.5 + 1 + 0.5, 0.5 + 0.5 + 1 + 0.5 - 0.25)):
        timing = simulate_stream(
            units, [1 - number], 0, hardware=hardware, copied_gradients=[number], hosts=[number]
        )
        # The other unit is updated by the program, before it goes on.
        hidden = 0.5 if number == 0 else 0.5 + 0.5
        assert timing.step_s == pytest.approx((2 * 1.25 + 0.5 + step - hidden) * MS), number
        assert timing.compute_s == pytest.approx((2 * 1.25 + 0.5) * MS)
        assert timing.to_host_bytes[TensorClass.WEIGHTS] == 20 * MIB
        assert timing.to_device_bytes == {TensorClass.WEIGHTS: 20 * MIB}


@pytest.mark.parametrize(
    ("settings", "step", "exposed", "back_mib"),
    [
        # The update reads them in 3 ms.
        ({"copied_gradients": [3]}, 6 + 3, 2, 0),
        # They come back for a second batch, from the end of its forward pass on, and leave again.
        ({"copied_gradients": [3], "batches": 2}, 6 + 3 + 6 + 3, 2 + 3 + 2, 120),
        # Or stay: then nothing waits for them any more, and the update finds them there.
        (
            {"copied_gradients": [3], "batches": 2, "returning_gradients": {3: 3}},
            6 + 3 + 4,
            2 + 3,
            120,
        ),
        # A second batch is added to them, read and written.
        ({"copied_gradients": [3], "batches": 2, "adds_at_home": True}, 6 + 4 + 6 + 3, 2, 0),
        # They leave in the last batch only.
        ({"copied_gradients": [3], "batches": 2, "final_gradients": [3]}, 4 + 6 + 3, 2, 0),
        # They come back after the first unit's backward pass, and the update finds them there.
        ({"copied_gradients": [3], "returning_gradients": {3: 0}}, 6 + 3, 2 + 3, 120),
        # Those of the first unit have left when the second batch begins, come back beside its
        # backward pass, from the fourth unit's on, and leave before the step.
        ({"copied_gradients": [0], "batches": 2}, 4 + 3 + 1 + 3 + 1 + 3 + 3, 3 + 1 + 3, 120),
    ],
)
def test_gradients_leave_and_are_used_on_the_host(
    two_way: Hardware, settings: dict[str, Any], step: float, exposed: float, back_mib: int
) -> None:
    """Of four units; the last one's backward pass ends at 1, and its gradients have left at 4.

    The second unit's backward pass waits for that from 2 on.
    """
    hardware = replace(two_way, mapped_bytes_per_s=RATE, mapped_read_bytes_per_s=RATE)
    units = [StreamUnit("block", 0, 0.0, 0.0, 1 * MS, gradient_bytes=120 * MIB)] * 4
    timing = simulate_stream(units, (), 0, hardware=hardware, **settings)
    assert [timing.step_s, timing.exposed_s] == milliseconds([step, exposed])
    again = bool(settings.get("batches") and back_mib and not settings.get("returning_gradients"))
    assert timing.to_host_bytes == {TensorClass.GRADIENTS: (1 + again) * 120 * MIB}
    assert timing.to_device_bytes == ({TensorClass.GRADIENTS: back_mib * MIB} if back_mib else {})


def test_tasks_that_wait_for_each_other_are_an_error(machine: Hardware) -> None:
    tasks = LaneTasks(LaneKind.TO_DEVICE, LaneKind.COMPUTE)
    copy, passes = tasks.add(0, 1e6), tasks.add(1, 1e-3)
    tasks.wait(copy, passes)
    tasks.wait(passes, copy)
    with pytest.raises(PlanError, match="wait for each other"):
        simulate_lanes(tasks, machine)


def test_without_a_slot_state_is_updated_in_host_memory(machine: Hardware) -> None:
    """Of two of three units: three passes over 40 MiB, both ways at 80 MiB/ms, take 3 ms each."""
    both_ways = replace(machine, mapped_bytes_per_s=2 * RATE)
    timing = simulate_stream([unit(40, 1)] * 3, [1], 0, hardware=both_ways, other_s=10 * MS)
    assert [timing.step_s, timing.exposed_s] == milliseconds([3 * (1 + 0.25) + 10 + 2 * 3, 0])
    assert timing.to_device_bytes == timing.to_host_bytes == {}
    assert timing.home_s == 0.0


# ---------------------------------------------------------------------------------- properties

CLOSE = 1e-6
"""Steps repeat to the byte, and the smallest unit has millions of them."""
MACHINES = st.tuples(st.sampled_from([1.0, 1.5, 2.0]), st.sampled_from([0.0, 0.05, 0.3]))
"""The link's share of both directions' speed, and what a millisecond of a copy adds."""
TIMES = st.integers(0, 40).map(lambda number: number / 16)
UNITS = st.lists(
    st.builds(unit, st.sampled_from([0, 5, 20, 40, 80]), TIMES, TIMES), min_size=1, max_size=8
)
BACKWARD = st.sampled_from([0.0, 1 * MS, 5 * MS, 30 * MS])


def machine_of(machine: Hardware, figures: tuple[float, float]) -> Hardware:
    link, slowdown = figures
    return replace(
        machine, copy_link_bytes_per_s=link * RATE, copy_slowdown_s_per_byte=slowdown / RATE
    )


@pytest.mark.slow
@given(UNITS, st.sets(st.integers(0, 7)), st.integers(1, 5), MACHINES, BACKWARD, st.booleans())
@example([unit(5, 0, 0), unit(20, 0, 0)], set(), 2, (1.0, 0.05), 1 * MS, False)
@example(
    [unit(0, 0, 0.75), unit(40, 0, 1.9375), unit(40, 0, 1.875), unit(40, 0, 0.125)],
    *(set(), 2, (1.0, 0.05), 1 * MS, True),
)
@example([unit(5, 1.0625, 0), unit(80, 0, 2)], set(), 2, (1.0, 0.0), 1 * MS, False)
def test_every_step(
    machine: Hardware,
    units: list[StreamUnit],
    resident: set[int],
    slots: int,
    figures: tuple[float, float],
    backward_s: float,
    is_deferred: bool,
) -> None:
    hardware = machine_of(machine, figures)
    timing = simulate_stream(
        units, resident, slots, hardware=hardware, other_s=backward_s, is_deferred=is_deferred
    )
    sizes = {number: it.state_bytes for number, it in enumerate(units) if number not in resident}
    streamed = [number for number, size in sizes.items() if size]
    copied_bytes = sum(sizes.values())

    # No bytes are lost, and no time.
    assert timing.to_device_bytes == timing.to_host_bytes
    assert sum(timing.to_host_bytes.values()) == copied_bytes
    whole_s = timing.compute_s + timing.slowed_s + timing.exposed_s
    assert timing.step_s == pytest.approx(whole_s, rel=1e-9)

    # Nothing is faster than the computation, and than the link.
    bound_s = max(timing.compute_s, copied_bytes / RATE, 2 * copied_bytes / (figures[0] * RATE))
    assert timing.step_s >= bound_s * (1 - CLOSE)

    # Streamed updates run one after the other, and none before its data arrived. Where steps
    # alternate, the latest may have taken longer than the mean, by what copies have slowed it or
    # it has waited for.
    late_s = timing.slowed_s + timing.exposed_s
    assert np.all(
        np.diff([timing.update_end_s[it] for it in streamed], prepend=-late_s)
        >= np.array([units[it].update_s for it in streamed]) * (1 - CLOSE)
    )
    behind_bytes = 0
    for number in streamed[slots:]:
        behind_bytes += sizes[number]
        arrival_s = behind_bytes / RATE
        assert timing.update_end_s[number] >= (arrival_s + units[number].update_s) * (1 - CLOSE)
    # The state is at home a copy after the last streamed update, or later.
    if streamed:
        last = streamed[-1]
        home_s = timing.update_end_s[last] + sizes[last] / RATE
        assert timing.home_s >= home_s * (1 - CLOSE)


@pytest.mark.slow
@given(UNITS, st.sets(st.integers(0, 7)), st.integers(1, 5), MACHINES, BACKWARD)
def test_a_deferred_step_is_never_slower(
    machine: Hardware,
    units: list[StreamUnit],
    resident: set[int],
    slots: int,
    figures: tuple[float, float],
    backward_s: float,
) -> None:
    hardware = machine_of(machine, figures)
    deferred, waiting = (
        simulate_stream(
            units, resident, slots, hardware=hardware, other_s=backward_s, is_deferred=is_deferred
        ).step_s
        for is_deferred in (True, False)
    )
    # A link that both directions share may serve the less urgent one first.
    copy_s = 0.0 if figures[0] == 2 else 2 * 80 * MIB / (figures[0] * RATE)
    assert deferred <= waiting * (1 + CLOSE) + copy_s


# ---------------------------------------------------------------------------------- plans


def planned(
    machine: Hardware, units: Sequence[StreamUnit], spare_mib: float, **kwargs: Any
) -> StreamPlan:
    settings: dict[str, Any] = {"other_s": 10 * MS} | kwargs
    return fastest(units, budget_bytes=int(spare_mib * MIB), hardware=machine, **settings)


def test_what_fits_is_resident(machine: Hardware) -> None:
    plan = planned(machine, [unit(40)] * 4, 160)
    assert plan.resident == {0, 1, 2, 3}
    assert (plan.slots, plan.slot_bytes) == (0, 0)
    assert plan.predicted.exposed_s == 0
    assert planned(machine, [], 0).resident == frozenset()


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("spare_mib", [90, 250, 10_000])
def test_a_share_of_state_may_be_resident(machine: Hardware, spare_mib: int, share: float) -> None:
    """A large unit is resident beside smaller slots only where the share allows it."""
    units = [unit(30), *[unit(20)] * 6, unit(44), unit(0)]
    all_bytes = sum(it.state_bytes for it in units)
    plan = planned(machine, units, spare_mib, state_share=share)
    resident_bytes = sum(units[it].state_bytes for it in plan.resident)
    assert resident_bytes <= share * all_bytes
    assert (plan.slots == 0) == (share == 1.0 and spare_mib * MIB >= all_bytes)
    if share == 1.0:
        assert plan == planned(machine, units, spare_mib)


@pytest.mark.parametrize("most_mib", [60, 100, 150])
def test_state_takes_no_more_than_it_may(machine: Hardware, most_mib: int) -> None:
    """As where others on the device have the rest. What all else needs is not made less for it."""
    units = [saving(10, 100, state_bytes=30 * MIB)] * 6
    plan = planned(machine, units, 10_000, most_state_bytes=most_mib * MIB)
    resident_bytes = sum(units[it].state_bytes for it in plan.resident)
    state_bytes = resident_bytes + plan.slots * plan.slot_bytes
    assert state_bytes <= most_mib * MIB
    assert planned(machine, units, 10_000).resident == frozenset(range(6))
    assert not plan.copied
    with pytest.raises(PlanError):
        planned(machine, units, 10_000, most_state_bytes=60 * MIB - 1)


def test_units_without_state_need_no_memory(machine: Hardware) -> None:
    plan = planned(machine, [unit(0), unit(40), unit(40), unit(40), unit(0)], 80)
    assert plan.resident == {0, 4}
    assert (plan.slots, plan.slot_bytes) == (2, 40 * MIB)


@pytest.mark.parametrize("spare_mib", [90, 130, 170, 250, 330])
def test_resident_state_and_slots_fit_the_memory(machine: Hardware, spare_mib: int) -> None:
    units = [unit(30), *[unit(40)] * 6, unit(44), unit(40), unit(40)]
    plan = planned(machine, units, spare_mib)
    streamed = [units[it].state_bytes for it in range(len(units)) if it not in plan.resident]
    resident_bytes = sum(units[it].state_bytes for it in plan.resident)
    assert plan.slots >= 2
    assert plan.slot_bytes == max(streamed)
    assert resident_bytes + plan.slots * plan.slot_bytes <= spare_mib * MIB
    assert plan.predicted == simulate_stream(
        units, plan.resident, plan.slots, hardware=machine, other_s=10 * MS
    )


def test_no_other_number_of_resident_units_and_slots_is_faster(two_way: Hardware) -> None:
    units = [unit(40, update_ms=0.1, forward_ms=0.2)] * 12
    plan = planned(two_way, units, 8 * 40)
    for slots in range(2, 9):
        for first in range(len(units) - (8 - slots) + 1):
            resident = range(first, first + 8 - slots)
            other = simulate_stream(units, resident, slots, hardware=two_way, other_s=10 * MS)
            assert plan.predicted.step_s <= other.step_s * (1 + 1e-9), (slots, first)


@pytest.mark.parametrize("large_mib", [52, 160])
def test_a_large_unit_stays_if_smaller_slots_pay_for_it(machine: Hardware, large_mib: int) -> None:
    units = [unit(large_mib), *[unit(40)] * 12]
    plan = planned(machine, units, 320)
    assert 0 in plan.resident
    assert plan.slot_bytes == 40 * MIB


def test_memory_that_gains_nothing_is_left_free(two_way: Hardware) -> None:
    """Behind a long forward pass everything hides: two slots are enough."""
    units = [unit(40, update_ms=0, forward_ms=10)] * 10
    plan = planned(two_way, units, 9 * 40, other_s=100 * MS)
    assert (plan.resident, plan.slots) == (frozenset(), 2)
    assert plan.predicted.exposed_s == 0


@pytest.mark.parametrize(
    ("budget_mib", "staged_mib"),
    [(76 << 10, 256), (8 << 10, 128), (3 << 10, 48), (2 << 10, 40), (1 << 10, 32), (100, 16)],
)
def test_what_is_staged_is_a_small_part_of_a_small_budget(budget_mib: int, staged_mib: int) -> None:
    assert largest_slot_bytes(budget_mib * MIB) == staged_mib * MIB


def test_too_little_memory_is_an_error_with_the_bytes_and_the_remedy(machine: Hardware) -> None:
    units = [*[unit(40)] * 4, replace(unit(160), name="head")]
    with pytest.raises(PlanError, match=f"{240 * MIB} bytes") as error:
        planned(machine, units, 239)
    assert "device_budget by 1 MiB" in str(error.value)
    assert planned(machine, units, 240).resident == {4}
    with pytest.raises(PlanError, match="may take 0 B: raise device_budget by 81 MiB"):
        planned(machine, [unit(40)] * 3, -1)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(TIMES, TIMES), min_size=3, max_size=16), MACHINES, BACKWARD, st.booleans()
)
def test_more_memory_is_never_slower(
    machine: Hardware,
    times: list[tuple[float, float]],
    figures: tuple[float, float],
    backward_s: float,
    is_deferred: bool,
) -> None:
    hardware = machine_of(machine, figures)
    units = [unit(40, *each) for each in times]
    steps_s = [
        planned(
            hardware, units, spare * 40, other_s=backward_s, is_deferred=is_deferred
        ).predicted.step_s
        for spare in range(2, len(units) + 1)
    ]
    assert np.all(np.diff(steps_s) <= 1e-9 * steps_s[0])
    assert steps_s[-1] == pytest.approx(sum(sum(each) for each in times) * MS + backward_s)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.builds(unit, st.sampled_from([20, 28, 40, 80]), TIMES, TIMES), min_size=3, max_size=12
    ),
    MACHINES,
    BACKWARD,
)
def test_more_memory_with_units_of_all_sizes_costs_at_most_one_copy_and_update(
    machine: Hardware, units: list[StreamUnit], figures: tuple[float, float], backward_s: float
) -> None:
    """It may hold an early unit in the place of a later one, for whose slot others then wait."""
    hardware = machine_of(machine, figures)
    link, slowdown = figures
    copy_s = 2 * 80 * MIB / RATE * (1 / link + slowdown)  # with the computation that it slows
    update_s = max(it.update_s for it in units)
    fastest_s = float("inf")
    for spare in range(160, sum(it.state_bytes // MIB for it in units) + 1, 20):
        step_s = planned(hardware, units, spare, other_s=backward_s).predicted.step_s
        assert step_s <= fastest_s + copy_s + update_s
        fastest_s = min(fastest_s, step_s)


# ---------------------------------------------------------------------------------- activations


def model(layers: int, saved_mib: float, weights_mib: float, **changes: Any) -> list[StreamUnit]:
    """Equal units over weights; what they save lives from forward to backward pass."""
    return [
        saving(saved_mib, weights_mib + number * saved_mib, **changes) for number in range(layers)
    ]


def most_bytes(
    units: Sequence[StreamUnit], plan: StreamPlan, step_bytes: int = 0, update_bytes: int = 0
) -> int:
    """Device memory at the fullest moment of a plan, by what `StreamPlan` says of its fields."""
    state_bytes = plan.slots * plan.slot_bytes
    state_bytes += sum(units[it].state_bytes for it in plan.resident)
    early = [it.made_in for it in plan.temporary if it.made_in is not None]
    used = [
        step_bytes + len(early) * plan.temporary_slot_bytes,
        update_bytes + len(plan.temporary) * plan.temporary_slot_bytes,
    ]
    for number, each in enumerate(units):
        left = [it for it in plan.copied if plan.left_before[it] <= number]
        there = sum(it.freed_before > number for it in plan.temporary) * plan.temporary_slot_bytes
        used.append(each.forward_peak_bytes + there - sum(units[it].saved_bytes for it in left))
        away = [it for it in plan.copied if it + plan.fetch_ahead < number]
        freed = 2 * len(units) - 1 - number
        there = max(
            sum(made_in >= number for made_in in early),
            sum(it.freed_before > freed for it in plan.temporary),
        )
        there *= plan.temporary_slot_bytes
        used.append(each.backward_peak_bytes + there - sum(units[it].saved_bytes for it in away))
    return max(used) + state_bytes


def test_temporary_slots_where_a_step_waits(two_way: Hardware) -> None:
    """Two slots for eight units of 40 MiB; beside all but the last unit there is room for four.

    So there is in clipping, and for two more in the step.
    """
    units = [
        replace(
            unit(40, update_ms=0.1, forward_ms=2),
            backward_s=4 * MS,
            forward_peak_bytes=peak_mib * MIB,
            backward_peak_bytes=peak_mib * MIB,
        )
        for peak_mib in (*[140] * 7, 300)
    ]
    settings: dict[str, Any] = {
        "hardware": two_way,
        "budget_bytes": 380 * MIB,
        "step_peak_bytes": 140 * MIB,
    }
    with_none = plan_stream(
        StreamProblem(units, is_deferred=False, may_have_temporary=False, **settings)
    )
    plan = fastest(units, is_deferred=False, **settings)
    assert (len(with_none.temporary), len(plan.temporary)) == (0, 4)
    assert {it.made_in for it in plan.temporary} == {6}
    assert {it.freed_before for it in plan.temporary} == {7}
    assert plan.predicted.step_s < 0.95 * with_none.predicted.step_s
    assert plan.peak_bytes == most_bytes(units, plan, 140 * MIB, 140 * MIB) <= 380 * MIB
    units = [replace(units[0], forward_peak_bytes=60 * MIB), *units[1:]]
    more = plan_stream(
        StreamProblem(units, is_deferred=False, update_peak_bytes=60 * MIB, **settings)
    )
    assert [it.made_in for it in more.temporary] == [6] * 4 + [None] * 2
    assert [it.freed_before for it in more.temporary] == [1] * 2 + [7] * 4
    assert more.predicted.step_s < plan.predicted.step_s
    assert more.peak_bytes == most_bytes(units, more, 140 * MIB, 60 * MIB) <= 380 * MIB
    # A deferred step waits for nothing, and no more memory is taken for it.
    deferred = fastest(units, **settings)
    assert (deferred.temporary, deferred.predicted.exposed_s) == ((), 0.0)
    assert fastest(units, in_backward=True, **settings).temporary == ()
    assert fastest(units, most_state_bytes=10**12, **settings).temporary == ()


def test_as_few_activations_leave_as_fit(machine: Hardware) -> None:
    units = model(10, 40, 100)
    everything = fastest(units, budget_bytes=500 * MIB, hardware=machine)
    assert (everything.copied, everything.peak_bytes) == (frozenset(), 500 * MIB)
    plan = fastest(units, budget_bytes=400 * MIB, hardware=machine)
    # The last forward pass needs 500, and the last unit's activations come back early.
    assert plan.copied == {0, 1, 2}
    assert plan.peak_bytes == most_bytes(units, plan) <= 400 * MIB
    # The copies end at 2, 3 and 4 ms; the memory is needed from the eighth unit on.
    assert plan.left_before == {0: 7, 1: 8, 2: 9}
    assert plan.predicted.exposed_s == 0


def test_more_activations_leave_where_state_then_stays(two_way: Hardware) -> None:
    """The forward pass hides copies of activations, and not those of state."""
    units = model(8, 40, 0, state_bytes=120 * MIB)
    budget_bytes = (8 * 120 + 4 * 40) * MIB
    plan = fastest(units, budget_bytes=budget_bytes, hardware=two_way)
    assert plan.copied
    assert plan.predicted.exposed_s == 0
    kept = [replace(each, saved_bytes=0) for each in units]
    assert (
        plan_stream(
            StreamProblem(kept, budget_bytes=budget_bytes, hardware=two_way)
        ).predicted.exposed_s
        > 0
    )


def test_the_memory_of_the_step_bounds_state_but_in_the_backward_pass(two_way: Hardware) -> None:
    units = [unit(40)] * 8
    settings: dict[str, Any] = {"budget_bytes": 400 * MIB, "hardware": two_way}
    plan = fastest(units, step_peak_bytes=240 * MIB, **settings)
    assert plan.peak_bytes <= 400 * MIB
    assert len(plan.resident) + plan.slots <= 4
    plan = plan_stream(
        StreamProblem(units, step_peak_bytes=240 * MIB, in_backward=True, **settings)
    )
    assert len(plan.resident) == 8
    with pytest.raises(PlanError, match=f"{480 * MIB} bytes"):
        fastest(units, step_peak_bytes=400 * MIB, **settings)


def test_resident_units_are_spread_if_updates_are_in_the_backward_pass(
    two_way: Hardware,
) -> None:
    """The copies of neighbours would hold up the backward pass, and then nothing be copied."""
    units = [replace(unit(40, update_ms=0.1), backward_s=0.6 * MS)] * 16
    plan = plan_stream(
        StreamProblem(units, budget_bytes=10 * 40 * MIB, hardware=two_way, in_backward=True)
    )
    early = simulate_stream(
        units, range(len(plan.resident)), plan.slots, hardware=two_way, in_backward=True
    )
    assert plan.predicted.exposed_s < 0.5 * early.exposed_s


def with_gradients(gradients: Sequence[int], batches: int, holds: bool) -> tuple[Any, int]:
    """Units whose gradients come with their passes, over weights of 100 MiB; and MiB at the step.

    If it `holds` gradients, each unit's live until its update, in the next forward pass.
    """
    every = sum(gradients)
    pending = [sum(gradients[number:]) for number in range(len(gradients))]
    units = [
        replace(
            unit(0),
            gradient_bytes=size * MIB,
            forward_peak_bytes=(100 + (every if batches > 1 else left * holds)) * MIB,
            backward_peak_bytes=(100 + (every + size if batches > 1 else left)) * MIB,
        )
        for size, left in zip(gradients, pending, strict=True)
    ]
    return units, 100 + every


@pytest.mark.parametrize(
    ("batches", "holds", "copied"),
    [(1, False, {5, 6, 7}), (1, True, {5, 6, 7}), (2, False, {4, 5, 6, 7})],
)
def test_gradients_of_the_last_units_leave_where_nothing_else_is_enough(
    machine: Hardware, batches: int, holds: bool, copied: set[int]
) -> None:
    """Weights take 100 MiB, and each of eight units makes 40 MiB of gradients."""
    units, step = with_gradients([40] * 8, batches, holds)
    settings: dict[str, Any] = {
        "hardware": machine,
        "step_peak_bytes": step * MIB,
        "holds_gradients": holds,
    }
    plan = fastest(units, budget_bytes=300 * MIB, batches=batches, **settings)
    assert plan.copied_gradients == copied
    assert plan.peak_bytes == 300 * MIB
    assert plan.predicted.to_host_bytes == {TensorClass.GRADIENTS: len(copied) * 40 * MIB}
    enough = fastest(units, budget_bytes=460 * MIB, batches=batches, **settings)
    assert enough.copied_gradients == frozenset()
    with pytest.raises(PlanError, match="gradients of 8 copied out"):
        fastest(units, budget_bytes=120 * MIB, batches=batches, **settings)


@pytest.mark.slow
@given(
    st.lists(st.sampled_from([0, 10, 40, 80]), min_size=1, max_size=9),
    st.integers(1, 2),
    st.integers(0, 9),
    st.booleans(),
)
def test_memory_with_gradients_on_the_host(
    machine: Hardware, gradients: list[int], batches: int, on_host: int, holds: bool
) -> None:
    """By going through the moments of a step, batch after batch."""
    units, step = with_gradients(gradients, batches, holds)
    budget_mib = step - sum(gradients[::-1][:on_host])
    try:
        plan = plan_stream(
            StreamProblem(
                units,
                budget_bytes=budget_mib * MIB,
                hardware=machine,
                step_peak_bytes=step * MIB,
                batches=batches,
                holds_gradients=holds,
            )
        )
    except PlanError:
        return
    back = plan.returning_gradients
    live, home, most = dict.fromkeys(range(len(units)), 0), set(), 0
    for batch in range(batches):
        for number in reversed(range(len(units))):
            came = {it for it, unit in back.items() if batch == batches - 1 and unit >= number}
            if plan.adds_at_home or batches == 1:
                assert all(number < it - 2 for it in came)  # otherwise they have not left yet
                home |= {it for it in plan.copied_gradients if it > number + 2 and live[it]}
            else:  # some are on their way back, or to the host
                near = range(number - 2, number + 3)
                home = {it for it in plan.copied_gradients if it not in near and live[it]}
            home -= came
            there = sum(size for it, size in live.items() if it not in home)
            most = max(most, 100 + there + gradients[number])
            live[number] = gradients[number]
        home |= plan.copied_gradients
    home -= back.keys()
    for number in range(len(units)):  # each unit's gradients live until its update
        there = sum(size for it, size in live.items() if it >= number and it not in home)
        most = max(most, 100 + there)
    assert most <= plan.peak_bytes / MIB <= budget_mib


@pytest.mark.parametrize(
    ("first_mib", "unseen", "returning"),
    [(0, 9, {4: 1, 5: 2, 6: 3, 7: 4}), (260, 9, {4: 1, 5: 2}), (0, 2, {4: 1, 5: 1, 6: 3, 7: 4})],
)
def test_gradients_come_back_where_activations_have_made_room(
    machine: Hardware, first_mib: int, unseen: int, returning: dict[int, int]
) -> None:
    """At the second batch's loss all gradients and activations are there, and 200 MiB more.

    Of each unit, gradients take 40 MiB and activations 20. Half of the gradients have to leave. A
    unit may have no backward pass of its own, so that it is not known when it makes them.
    """
    units = [
        replace(
            unit(0),
            backward_s=0.0 if number == unseen else 1 * MS,
            gradient_bytes=40 * MIB,
            forward_peak_bytes=(100 + 8 * 40 + 20 * (number + 1)) * MIB,
            backward_peak_bytes=(100 + 9 * 40 + 20 * (number + 1) + more_mib) * MIB,
        )
        for number, more_mib in enumerate([first_mib, 0, 0, 0, 0, 0, 0, 200])
    ]
    plan = plan_stream(
        StreamProblem(
            units,
            budget_bytes=660 * MIB,
            hardware=machine,
            step_peak_bytes=(100 + 8 * 40) * MIB,
            batches=2,
            adds_at_home=True,
        )
    )
    assert plan.copied_gradients == {4, 5, 6, 7}
    assert plan.returning_gradients == returning
    back_bytes = 40 * MIB * len(returning)
    assert plan.predicted.to_device_bytes == {TensorClass.GRADIENTS: back_bytes}


def test_gradients_come_back_for_later_batches_if_some_have_room(
    machine: Hardware,
) -> None:
    """Weights take 100 MiB, and each of sixteen units makes 40 MiB of gradients."""
    units, step = with_gradients([40] * 16, 3, holds=False)
    units = [replace(it, backward_s=1 * MS) for it in units]
    settings: dict[str, Any] = {"hardware": machine, "step_peak_bytes": step * MIB, "batches": 3}
    plan = fastest(units, budget_bytes=460 * MIB, **settings)
    assert not plan.adds_at_home
    # Beside 40 MiB that a unit makes, there are those of five that come, or leave.
    assert plan.copied_gradients == set(range(16 - 13, 16))
    assert plan.peak_bytes <= 460 * MIB
    # At the pass's end fewer do, and one has room to stay.
    assert plan.returning_gradients == {3: 3}
    assert plan.predicted.to_host_bytes[TensorClass.GRADIENTS] == (3 * 13 - 1) * 40 * MIB
    least = fastest(units, budget_bytes=300 * MIB, **settings)
    assert least.adds_at_home
    assert least.predicted.step_s > plan.predicted.step_s


def test_temporary_slots_where_batches_are_accumulated(two_way: Hardware) -> None:
    """Where a forward pass ends, all gradients of later batches are there, and no room for state.

    State comes beside the last backward pass, and goes home beside the first, where the gradients
    of the step before are gone.
    """
    units, step = with_gradients([20] * 8, 4, holds=False)
    units = [
        replace(it, state_bytes=40 * MIB, forward_s=0.5 * MS, backward_s=1.5 * MS) for it in units
    ]
    units = [*units[:-1], replace(units[-1], forward_peak_bytes=400 * MIB)]
    settings: dict[str, Any] = {
        "hardware": two_way,
        "budget_bytes": 480 * MIB,
        "step_peak_bytes": step * MIB,
        "batches": 4,
    }
    without = plan_stream(StreamProblem(units, may_have_temporary=False, **settings))
    plan = fastest(units, **settings)
    assert plan.temporary
    assert not without.temporary
    assert plan.predicted.exposed_s < 0.1 * without.predicted.exposed_s
    assert plan.peak_bytes <= 480 * MIB
    assert all(it.made_in is not None for it in plan.temporary)
    assert not fastest(units, **settings | {"batches": 1}).temporary


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([0, 20, 40]),  # state
            st.sampled_from([0, 10, 60]),  # saved
            st.integers(0, 50),  # temporary, in the forward pass
            st.integers(0, 50),  # and in the backward pass
        ),
        min_size=1,
        max_size=10,
    ),
    st.integers(50, 1000),
    st.sampled_from(["deferred", "waits", "in backward"]),
    st.integers(1, 2),
    st.tuples(st.integers(0, 300), st.integers(0, 300)),
)
def test_every_plan_fits_its_budget(
    machine: Hardware,
    sizes: list[tuple[int, int, int, int]],
    budget_mib: int,
    updates: str,
    batches: int,
    between: tuple[int, int],
) -> None:
    units, before = [], 100
    for state, saved, forward, backward in sizes:
        before += saved
        units.append(
            replace(
                unit(state),
                backward_s=0.5 * MS,
                saved_bytes=saved * MIB,
                forward_peak_bytes=(before + forward) * MIB,
                backward_peak_bytes=(before + backward) * MIB,
            )
        )
    settings: dict[str, Any] = {
        "hardware": machine,
        "is_deferred": updates != "waits",
        "in_backward": updates == "in backward",
        "batches": batches,
    }
    update_bytes, step_bytes = (it * MIB for it in sorted(between))
    peaks: dict[str, Any] = {"step_peak_bytes": step_bytes, "update_peak_bytes": update_bytes}
    try:
        plan = fastest(units, budget_bytes=budget_mib * MIB, **peaks, **settings)
    except PlanError as error:
        (needed,) = re.findall(r"\((\d+) bytes\)", str(error))
        assert int(needed) > budget_mib * MIB
        plan = fastest(units, budget_bytes=int(needed), **peaks, **settings)
        budget_mib = int(needed) // MIB
    if updates == "in backward":
        step_bytes = update_bytes = 0
    assert plan.peak_bytes == most_bytes(units, plan, step_bytes, update_bytes) <= budget_mib * MIB
    for number, before in plan.left_before.items():
        assert number + 2 <= before <= len(units)
    assert set(plan.left_before) == plan.copied
    timing = plan.predicted
    assert timing.step_s == pytest.approx(timing.compute_s + timing.slowed_s + timing.exposed_s)
    assert timing == simulate_stream(
        units,
        plan.resident,
        plan.slots,
        copied=plan.left_before,
        fetch_ahead=plan.fetch_ahead,
        temporary=plan.temporary,
        **settings,
    )


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(*[st.sampled_from([0, 10, 40])] * 4),  # state, saved, gradients, weights
        min_size=1,
        max_size=8,
    ),
    st.integers(20, 400),
    st.integers(1, 2),
    st.booleans(),
    MACHINES,
)
def test_what_is_known_of_a_plan_before_it_is_made(
    machine: Hardware,
    sizes: list[tuple[int, int, int, int]],
    budget_mib: int,
    batches: int,
    is_trained: bool,
    figures: tuple[float, float],
) -> None:
    """Its host memory, within bounds, and a time that its step is not below."""
    units, saved_mib = [], 0
    for state, saved, gradients, weights in sizes:
        saved_mib += saved
        units.append(
            replace(
                saving(saved, saved_mib - saved),
                state_bytes=state * MIB,
                gradient_bytes=gradients * MIB,
                weight_bytes=weights * MIB,
                trained_weight_bytes=weights * MIB * is_trained,
            )
        )
    problem = StreamProblem(
        units,
        budget_mib * MIB,
        machine_of(machine, figures),
        step_peak_bytes=sum(size for _, _, size, _ in sizes) * MIB,
        batches=batches,
        weight_slots=2,
    )
    try:
        plan = plan_stream(problem)
    except PlanError:
        with pytest.raises(PlanError):
            home_bytes(problem)
        return
    every = set(range(len(units)))
    planned_bytes = sum(units[it].state_bytes for it in every - plan.resident)
    planned_bytes += sum(units[it].saved_bytes for it in plan.copied)
    planned_bytes += sum(units[it].gradient_bytes for it in plan.copied_gradients)
    least, most = home_bytes(problem)
    assert least <= planned_bytes <= most
    assert plan_stream(problem, plan.predicted.step_s * (1 + 1e-9)) == plan
    with pytest.raises(NoShorterStepError):
        plan_stream(problem, 0.0)


# ---------------------------------------------------------------------------------- measured


def llama_2_7b(hardware: Hardware) -> list[StreamUnit]:
    """In fp32 on one H100, 4 x 2,048 tokens with checkpointing: 34 units with 54 GB of state.

    The passes are measured, and divided by arithmetic. The update is a measured one (fused AdamW on
    64 M parameters: 0.58 ms on an H200), at this card's bandwidth of device memory.
    """
    width, inner, vocabulary = 4096, 11008, 32000
    layer = 4 * width**2 + 3 * width * inner + 2 * width
    parameters = [vocabulary * width, *[layer] * 32, vocabulary * width + width]
    update_s = 0.58e-3 / 64e6 * load_hardware("h200").memory_bytes_per_s
    forward_work = sum(parameters[1:])
    return [
        StreamUnit(
            name=f"unit {number}",
            state_bytes=8 * count,
            update_s=update_s * count / hardware.memory_bytes_per_s,
            # The embedding is a look-up.
            forward_s=0.27 * count / forward_work if number else 0.0,
            backward_s=0.80 * count / forward_work if number else 0.0,
        )
        for number, count in enumerate(parameters)
    ]


def test_measured_steps_are_predicted_within_a_twentieth() -> None:
    """A prototype with 9 resident units and 6 slots, and umem itself with 16 GiB for both.

    Clipping, which was part of the measured steps, reads the gradients twice and writes them once.
    """
    hardware = load_hardware("h100-sxm")
    units = llama_2_7b(hardware)
    clipping_s = 12 / 8 * sum(it.state_bytes for it in units) / hardware.memory_bytes_per_s
    timing = simulate_stream(units, range(9), 6, hardware=hardware, other_s=clipping_s)
    assert timing.step_s == pytest.approx(1.545, rel=0.05)
    # Measured with a step that returned when all state was home.
    assert timing.home_s + 1.07 + clipping_s == pytest.approx(1.893, rel=0.05)
    plan = plan_stream(
        StreamProblem(units, budget_bytes=16 * 2**30, hardware=hardware, other_s=clipping_s)
    )
    assert plan.predicted.step_s == pytest.approx(1.61, rel=0.05)


# ---------------------------------------------------------------------------------- the host


def planned_with_the_host(name: str, gib: int, **options: Any) -> tuple[TrainingPlan, TrainingPlan]:
    """Llama-2-7B in float32, whose gradients are there from the backward pass to the updates."""
    hardware = load_hardware(name)
    units = llama_2_7b(hardware)
    gradients = [it.state_bytes // 2 for it in units]
    units = [
        replace(
            it,
            gradient_bytes=gradients[number],
            forward_peak_bytes=sum(gradients[number:]),
            backward_peak_bytes=sum(gradients[number:]),
        )
        for number, it in enumerate(units)
    ]
    given: dict[str, Any] = {
        "budget_bytes": gib << 30,
        "hardware": hardware,
        "step_peak_bytes": sum(gradients),
        "holds_gradients": True,
        **options,
    }
    return plan_training(units, None, **given), plan_with_host_updates(units, None, **given)


def test_the_host_updates_some_units_of_those_that_are_streamed() -> None:
    without, plan = planned_with_the_host("h200", 48)
    hosts = plan.stream.hosts
    assert 3 < len(hosts) < 15
    assert hosts.isdisjoint(plan.stream.resident)
    assert hosts <= plan.stream.copied_gradients
    assert hosts.isdisjoint(plan.stream.returning_gradients)
    assert plan.step_s < 0.92 * without.step_s
    # Its gradients make room for the state of others.
    assert len(plan.stream.resident) > len(without.stream.resident)
    assert plan.device_bytes <= 48 << 30


def test_weights_of_the_hosts_units_stay_where_others_leave() -> None:
    """Without that each unit has some at home, and the host none to update."""
    hardware, budget_bytes = load_hardware("h200"), 48 << 30
    units = [
        replace(it, gradient_bytes=it.state_bytes // 2, name=f"layers.{number}")
        for number, it in enumerate(llama_2_7b(hardware))
    ]
    weights = {
        it.name: WeightUnit((it.gradient_bytes // 4,) * 4, trained=frozenset(range(4)))
        for it in units
    }
    rest_bytes = budget_bytes - sum(it.gradient_bytes for it in units)
    units = [
        replace(it, forward_peak_bytes=rest_bytes, backward_peak_bytes=rest_bytes) for it in units
    ]
    options: dict[str, Any] = {
        "budget_bytes": budget_bytes,
        "hardware": hardware,
        "step_peak_bytes": rest_bytes,
    }
    without = plan_training(units, weights, **options)
    plan = plan_with_host_updates(units, weights, **options)
    assert without.weights is not None
    assert plan.weights is not None
    assert sum(map(bool, without.weights.streamed)) > len(units) // 2
    assert plan.stream.hosts
    assert not any(plan.weights.streamed[number] for number in plan.stream.hosts)
    assert plan.weights.streamed_bytes
    assert plan.step_s < 0.95 * without.step_s
    assert plan.stream.peak_bytes + plan.weights.device_bytes == plan.device_bytes <= budget_bytes
    # Weights are somewhere once.
    placed = plan.weights
    placed_bytes = placed.resident_bytes + placed.streamed_bytes + placed.in_place_bytes
    assert placed_bytes == sum(sum(it.part_bytes) for it in weights.values())
    assert list(plan.units) == list(with_weights(units, weights, placed))


@pytest.mark.parametrize(
    ("name", "gib", "options"),
    [
        ("gh200-96", 48, {}),  # whose link is as fast as the host
        ("h200", 100, {}),  # room for all
        ("h200", 48, {"is_deferred": False}),
        ("h200", 48, {"in_backward": True}),
        ("h200", 48, {"is_trial": True}),
    ],
)
def test_the_host_updates_nothing_where_that_gains_nothing(
    name: str, gib: int, options: dict[str, Any]
) -> None:
    without, plan = planned_with_the_host(name, gib, **options)
    assert plan == without
    assert not plan.stream.hosts
