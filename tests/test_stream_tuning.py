"""A training that measures its steps, plans what stays on the device, and copies the rest."""

from __future__ import annotations

import gc
import logging
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from activation_chain import LazyMover
from faults import let_out
from host_updates import StockHost
from lazy_lanes import HostStateMemory, LazyLanes
from measured_models import (
    BASE,
    LAYER_STATE,
    LAYERS,
    ROWS,
    SAVED,
    SLACK,
    WIDTH,
    Compute,
    Machine,
    Net,
    RepeatableLayer,
    WallClockOf,
    batch,
)
from torch import nn

from umem.capture.live import NO_BLOCK, Block, PhaseTracker, find_blocks
from umem.capture.live.timing import Clock
from umem.core.classes import TensorClass
from umem.hardware import Hardware, load_hardware
from umem.offloading import ActivationStore
from umem.runtime.giving_back import let_go
from umem.runtime.managed_runs import managed_runs
from umem.runtime.native_library import native
from umem.runtime.program_waits import program_waits
from umem.runtime.torch_hooks.modules import HookErrors
from umem.streaming import StreamedTraining
from umem.streaming.activations import SlicedLosses
from umem.streaming.plan import StreamUnit, TrainingPlan, plan_with_recomputation
from umem.streaming.stage import CudaRoom
from umem.streaming.tune import (
    TRANSITIONS,
    MeasuredBlock,
    MeasuredStep,
    MeasuredSteps,
    StepMeter,
    StreamTuner,
    TuningEvent,
    TuningState,
    planning,
    tuner,
)
from umem.streaming.tune.launches import Launches
from umem.streaming.weights import ModelWeights

Log = pytest.LogCaptureFixture
Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def usual_slack(monkeypatch: Patch) -> None:
    """Half of it would have room for these small models as a whole."""
    monkeypatch.setattr(planning, "_SLACK_SHARES", (1.0,))


# ------------------------------------------------------------------ one measured step


class Measured:
    """A model whose steps are measured."""

    def __init__(self, machine: Machine, model: Net, placed_bytes: int = 0) -> None:
        blocks = find_blocks(model)
        root = Block(NO_BLOCK, model)
        self.machine, self.model = machine, model
        self.meter = StepMeter(
            machine, machine, root, blocks, lambda: placed_bytes, lambda: machine.away()
        )
        self.tracker = PhaseTracker(root, blocks, HookErrors(let_out), self.meter)
        self.tracker.start()

    def step(self, batches: int = 1, clipping_s: float = 0.0) -> MeasuredStep | None:
        for number in range(batches):
            self.model(batch(number)).sum().backward()
        self.machine.now_s += clipping_s
        self.tracker.optimizer_begins()
        self.machine.now_s += 100.0  # the updates
        self.tracker.optimizer_ends()
        return self.meter.take()


@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_seconds_and_bytes_of_blocks(is_checkpointed: bool, batches: int) -> None:
    machine = Machine()
    measured = Measured(machine, Net(machine, is_checkpointed), placed_bytes=1000)
    with torch.no_grad():
        measured.model(batch(9))  # an evaluation does not count
    machine.live = machine.peak = BASE
    found = measured.step(batches, clipping_s=0.25)
    assert found is not None
    assert list(found.blocks) == [NO_BLOCK, *(f"layers.{it}" for it in range(LAYERS))]
    assert found.batches == batches
    assert found.other_s == pytest.approx(0.25)
    for number in range(LAYERS):
        block = found.blocks[f"layers.{number}"]
        again_s = 1.0 + number if is_checkpointed else 0.0
        assert block.forward_s == pytest.approx(1.0 + number)
        assert block.backward_s == pytest.approx(10.0 + number + again_s)
        if not is_checkpointed:
            assert block.forward_peak_bytes == BASE - 1000 + (number + 1) * SAVED
            assert block.backward_peak_bytes == BASE - 1000 + (number + 1) * SAVED
            assert found.step_peak_bytes == BASE - 1000


def test_what_is_away_counts_as_if_it_were_there() -> None:
    machine = Machine()
    measured = Measured(machine, Net(machine))
    machine.away = lambda: 500
    machine.peak -= 500
    found = measured.step()
    assert found is not None
    for number in range(LAYERS):
        assert found.blocks[f"layers.{number}"].forward_peak_bytes == BASE + (number + 1) * SAVED
    assert found.peak_bytes == BASE + LAYERS * SAVED - 500


def test_what_clipping_takes_is_over_when_the_step_begins() -> None:
    machine = Machine()
    measured = Measured(machine, Net(machine))
    measured.model(batch(0)).sum().backward()
    machine.peak = BASE + 700
    measured.tracker.optimizer_begins()
    machine.peak = BASE + 300
    measured.tracker.optimizer_ends()
    found = measured.meter.take()
    assert found is not None
    assert (found.step_peak_bytes, found.update_peak_bytes) == (BASE + 700, BASE + 300)


def test_waits_for_copies_are_no_time_of_a_block() -> None:
    machine = Machine()
    measured = Measured(machine, Net(machine))

    def wait(seconds: float) -> None:
        with program_waits:
            machine.now_s += seconds

    layers = measured.model.layers
    layers[1].up.register_forward_pre_hook(lambda *_: wait(7.0))
    layers[2].register_full_backward_hook(lambda *_: wait(3.0))
    found = measured.step()
    assert found is not None
    assert found.blocks["layers.1"].forward_s == pytest.approx(2.0 + 7.0), "nobody listens"
    measured.meter.listen()
    found = measured.step()
    assert found is not None
    for number in range(LAYERS):
        block = found.blocks[f"layers.{number}"]
        assert [block.forward_s, block.backward_s] == pytest.approx([1.0 + number, 10.0 + number])
    measured.meter.stop()
    assert not program_waits.listeners


def test_times_that_nothing_has_disturbed_count() -> None:
    def step(seconds: float, size_bytes: int, *, is_disturbed: bool) -> MeasuredStep:
        block = MeasuredBlock(seconds, seconds, size_bytes, size_bytes)
        return MeasuredStep({"a": block}, seconds, is_disturbed=is_disturbed)

    def times(*some: MeasuredStep) -> tuple[float, int, bool]:
        steps = MeasuredSteps()
        for it in some:
            steps.add(it, {})
        found = steps.figures
        assert found is not None
        block = found.blocks["a"]
        assert block.forward_s == block.backward_s == found.other_s
        return block.forward_s, block.forward_peak_bytes, found.is_disturbed

    slowed, plain = step(5.0, 100, is_disturbed=True), step(2.0, 100, is_disturbed=False)
    larger, slowed_larger = (step(6.0, 200, is_disturbed=it) for it in (False, True))
    assert times(slowed, plain) == times(plain, slowed) == (2.0, 100, False)
    assert times(slowed, step(3.0, 100, is_disturbed=True)) == (3.0, 100, True)
    assert times(plain, larger) == times(slowed, larger) == (6.0, 200, False)
    # Until the larger one is measured again, its times are the best that is known.
    assert times(plain, slowed_larger) == (6.0, 200, True)
    assert times(plain, slowed_larger, step(4.0, 200, is_disturbed=False)) == (4.0, 200, False)


def test_a_step_with_an_exception_is_not_measured() -> None:
    machine = Machine()
    measured = Measured(machine, Net(machine))

    def fail(*_: object) -> None:
        raise KeyError("on purpose")

    handle = measured.model.layers[2].up.register_forward_hook(fail)
    with pytest.raises(KeyError, match="on purpose"):
        measured.model(batch(0))
    handle.remove()
    assert measured.step() is None
    assert measured.step() is not None


def test_the_room_counts_what_was_spilled_and_no_homes() -> None:
    library = native()
    kinds = {TensorClass.OPTIMIZER_STATE: "pinned"}
    settings = [library.ClassSetting(kind=kinds.get(it, "device")) for it in TensorClass]
    budget_bytes = 64 << 20
    config = library.Config(settings, device_budget_bytes=budget_bytes)
    allocator = library.Allocator.on_host(config)
    room = CudaRoom(allocator, 0, budget_bytes, [TensorClass.OPTIMIZER_STATE])

    def born(tensor_class: TensorClass, size_bytes: int) -> int:
        with allocator.class_override(tensor_class.number):
            return allocator.malloc(size_bytes)

    born(TensorClass.OPTIMIZER_STATE, 32 << 20)  # at home on the host
    born(TensorClass.WEIGHTS, 40 << 20)
    room.find_homes()
    room.take_peak_bytes()
    assert (room.take_peak_bytes(), room.spilled_bytes()) == (40 << 20, 0)
    for number in range(2):
        assert room.spills() == number
        saved = born(TensorClass.ACTIVATIONS, 30 << 20)  # beyond the budget, then cached there
        allocator.free(saved)
    assert room.take_peak_bytes() == 70 << 20
    assert room.take_peak_bytes() == 40 << 20
    assert room.spilled_bytes() >= 30 << 20
    room.trim()
    assert room.spilled_bytes() == 0
    room.take_peak_bytes()
    born(TensorClass.OPTIMIZER_STATE, 8 << 20)
    room.find_homes()
    assert room.take_peak_bytes() == 40 << 20


# ------------------------------------------------------------------ plans


class Training:
    """A training, streamed and copied; or stock, without a machine."""

    def __init__(
        self,
        machine: Machine | None = None,
        *,
        is_checkpointed: bool = False,
        streams_state: bool = True,
        copies_gradients: bool = False,
        make_model: Callable[[Machine], nn.Module] | None = None,
        mover: Any = None,
        clips: bool = True,
        born_on_device: int = 0,
        streams_weights: bool = False,
        share: float = 1.0,
        hardware: Hardware | None = None,
        has_weights: bool = False,
        losses: SlicedLosses | None = None,
        may_recompute: bool = False,
    ) -> None:
        torch.manual_seed(0)
        self.machine = machine or Machine()
        made = make_model or (lambda it: Net(it, is_checkpointed))
        self.model: Any = made(self.machine)
        unheld = getattr(self.model, "unheld", ())
        self.optimizer = torch.optim.AdamW([*self.model.parameters(), *unheld], lr=1e-2)
        self.clips = clips
        self.steps = 0
        self.losses: list[float] = []
        self.tuner: Any = None
        self.step()
        if machine is None:
            return
        self.memory = memory = HostStateMemory(
            1024, parameters=self.model.parameters(), has_weights=has_weights
        )
        for state in list(self.optimizer.state.values())[:born_on_device]:
            memory.place(state["exp_avg"], on_device=True)
            memory.place(state["exp_avg_sq"], on_device=True)
        store = ActivationStore("cpu", mover or LazyMover(), min_bytes=1024)
        clock = WallClockOf(machine)
        hardware = hardware or load_hardware("h200")
        lanes = LazyLanes(self.model, 0.5, 1)
        self.weights: Any = None
        if streams_weights:
            self.weights = ModelWeights(
                self.model, lanes, memory, machine, store, min_bytes=1024, share=share
            )
            machine.placed = lambda: self.weights.placed_bytes if self.weights else 0
        self.tuner = StreamTuner(
            self.model,
            hardware,
            clock,
            machine,
            store,
            weights=self.weights,
            state_share=share,
            may_recompute=may_recompute,
            losses=losses,
        )
        self.training = StreamedTraining(
            self.model,
            self.optimizer,
            lanes,
            memory,
            self.tuner,
            streams_state=streams_state,
            copies_gradients=copies_gradients,
            weights=self.weights,
        )
        reference = weakref.ref(self.tuner)

        def away() -> int:
            tuner = reference()
            return 0 if tuner is None else int(tuner.away_bytes())

        machine.away = away

        def placed() -> int:
            weights_bytes = 0 if self.weights is None else self.weights.placed_bytes
            state_bytes = self.training.step.units.device_bytes
            return state_bytes + weights_bytes

        def at_home() -> int:
            weights = self.weights
            return 0 if weights is None else weights.placed_bytes - weights.device_bytes

        machine.placed, machine.at_home = placed, at_home

    @property
    def status(self) -> Any:
        """A `TuningStatus`, of a training that is streamed."""
        return self.training.status().tuning

    def loss(self, y: torch.Tensor) -> torch.Tensor:
        return y.square().mean()

    def step(self, rows: int = ROWS, batches: int = 1) -> None:
        self.steps += 1
        self.optimizer.zero_grad()
        for number in range(batches):
            loss = self.loss(self.model(batch(10 * self.steps + number, rows)))
            loss.backward()
            self.losses.append(float(loss.detach()))
        if self.clips:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()

    def run(self, steps: int, **options: Any) -> list[Any]:
        for _ in range(steps):
            self.step(**options)
        return [self.losses, [it.detach().numpy().tobytes() for it in self.model.parameters()]]


def exact(machine: Machine, steps: int = 8, **options: Any) -> Training:
    """A streamed training after some steps, whose bits are stock's."""
    of_stock = ("is_checkpointed", "make_model", "clips")
    run = Training(machine, **options)
    stock = Training(**{name: it for name, it in options.items() if name in of_stock})
    assert run.run(steps) == stock.run(steps)
    return run


class Classifying(Training):
    """A training whose loss takes more memory than all else, unless it is computed in slices."""

    smoothing = 0.0

    def loss(self, y: torch.Tensor) -> torch.Tensor:
        target = torch.arange(len(y)) % WIDTH
        loss = nn.functional.cross_entropy(y, target, label_smoothing=self.smoothing)
        assert loss.grad_fn is not None
        self.is_sliced = loss.grad_fn.name() == "_SlicedCrossEntropyBackward"
        loss_bytes = SAVED // 4 if self.is_sliced else 10 * LAYERS * SAVED
        for more_bytes in (loss_bytes, -loss_bytes):
            self.machine.compute(0.0, more_bytes)
        return loss


class Smoothing(Classifying):
    smoothing = 0.1


@pytest.mark.slow
@pytest.mark.parametrize("room", [2, 200])
def test_a_loss_is_sliced_where_no_plan_has_room_for_it(caplog: Log, room: int) -> None:
    """Until the training ends."""
    caplog.set_level(logging.INFO, "umem")
    expected = Classifying().run(10)
    losses = SlicedLosses("cpu", least_bytes=1, slice_bytes=WIDTH * 4 * 8)
    run = Classifying(Machine(room * LAYER_STATE + LAYERS * SAVED), losses=losses)
    assert run.run(10) == expected
    assert run.is_sliced == run.status.slices_losses == (room == 2)
    assert run.status.state == TuningState.PLANNED
    said = [it for it in caplog.messages if "in slices" in it]
    assert len(said) == (room == 2)
    run.training.close()
    run.step()
    assert not run.is_sliced


@pytest.mark.slow
def test_a_loss_that_cannot_be_sliced_is_named_with_what_to_change(caplog: Log) -> None:
    expected = Smoothing().run(10)
    losses = SlicedLosses("cpu", least_bytes=1)
    run = Smoothing(Machine(2 * LAYER_STATE), losses=losses)
    assert run.run(10) == expected
    assert not run.status.slices_losses
    assert run.status.state == TuningState.NO_PLAN_FITS
    (said,) = (it for it in caplog.messages if "used in host memory" in it)
    for word in (f"{ROWS} tokens x {WIDTH}", "smooths labels", "Liger"):
        assert word in said
    run.training.close()


SLOW_LINK = replace(
    load_hardware("h200"),
    copy_to_device_bytes_per_s=2e3,
    copy_to_host_bytes_per_s=2e3,
    copy_link_bytes_per_s=4e3,
    host_update_bytes_per_s=1e5,
)
"""A layer's state takes 16 s each way, and the host's update of it 1 to 2 s."""

HOSTS: dict[str, Any] = {
    "hardware": SLOW_LINK,
    "copies_gradients": True,
    "has_weights": True,
    "share": 0.0,
}


def test_the_host_updates_units_where_the_link_is_slow(monkeypatch: Patch) -> None:
    monkeypatch.setattr(StreamedTraining, "host_updater", lambda it: StockHost(it.optimizer))
    run = exact(Machine(2 * LAYER_STATE + LAYERS * SAVED), **HOSTS)
    plan = run.tuner.plan
    assert plan.hosts
    assert plan.hosts <= plan.copied_gradients
    assert plan.hosts.isdisjoint(plan.resident)
    assert run.training.counts.by_host >= 2 * len(plan.hosts)


def test_the_host_updates_nothing_that_it_has_no_form_for(monkeypatch: Patch) -> None:
    monkeypatch.setattr(StreamedTraining, "host_updater", lambda _: None)
    run = exact(Machine(2 * LAYER_STATE + LAYERS * SAVED), **HOSTS)
    assert run.tuner.status().state == TuningState.PLANNED
    assert not run.tuner.plan.hosts


def test_a_host_that_cannot_update_has_no_units_any_more(monkeypatch: Patch) -> None:
    host: Any = None

    def make(training: Any) -> StockHost:
        nonlocal host
        host = StockHost(training.optimizer)
        host.refuses = lambda: True
        return host

    monkeypatch.setattr(StreamedTraining, "host_updater", make)
    run = exact(Machine(2 * LAYER_STATE + LAYERS * SAVED), 12, **HOSTS)
    assert host is not None
    assert host.updates == 0
    assert run.tuner.status().state == TuningState.PLANNED
    assert not run.tuner.plan.hosts


LAYER_WEIGHTS = 4 * 2 * WIDTH * 2 * WIDTH


@pytest.mark.slow
@pytest.mark.parametrize(
    ("frozen", "room"),
    # Frozen layers save less that could leave.
    [(0, 3 * SAVED), (LAYERS - 1, 4 * SAVED + 2 * LAYER_STATE)],
)
def test_weights_leave_where_the_rest_has_no_room(frozen: int, room: int) -> None:
    def freeze(machine: Machine) -> nn.Module:
        model = Net(machine)
        for layer in model.layers[LAYERS - frozen :]:
            layer.requires_grad_(False)
        return model

    # For the least of all else, and the weights of three layers.
    machine = Machine(room + 3 * LAYER_WEIGHTS)
    run = exact(machine, make_model=freeze, streams_weights=True)
    status = run.weights.status()
    assert run.weights.is_driven
    assert run.tuner.status().state == TuningState.PLANNED
    assert status.streamed_bytes > 0
    assert status.counts.fetched > 8
    planned = run.tuner.plan.peak_bytes + run.weights.device_bytes
    assert planned <= machine.budget_bytes - SLACK


def test_weights_that_fit_come_to_the_device() -> None:
    run = exact(Machine(10**8), 6, streams_weights=True)
    assert run.weights.status().streamed_bytes == 0
    assert run.weights.status().resident_bytes == LAYERS * LAYER_WEIGHTS


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_share_of_weights_and_state_stays_where_all_would_fit(share: float) -> None:
    run = exact(Machine(10**8), streams_weights=True, share=share)
    status, tuning = run.weights.status(), run.tuner.status()
    assert tuning.state == TuningState.PLANNED
    assert status.resident_bytes <= share * LAYERS * LAYER_WEIGHTS
    assert tuning.resident_bytes <= share * LAYERS * LAYER_STATE
    assert (tuning.resident_bytes > 0) == (share > 0.0)
    assert run.training.step.units.resident_bytes == tuning.resident_bytes
    assert run.training.counts.streamed > 0


@pytest.mark.slow
def test_a_budget_for_nothing_streams_all_weights(caplog: Log) -> None:
    run = exact(Machine(-BASE), 6, streams_weights=True)
    assert run.tuner.status().state == TuningState.NO_PLAN_FITS
    assert run.weights.status().streamed_bytes == LAYERS * LAYER_WEIGHTS
    assert "raise device_budget" in caplog.text


@pytest.mark.slow
def test_a_step_in_the_backward_pass_is_planned_anew() -> None:
    """Its gradients are freed, which leaves more room for state."""
    room = LAYERS * (LAYER_STATE + SAVED)
    run = Training(Machine(room), clips=False)
    gradients = room - 3 * LAYER_STATE

    def count_gradients(*_: object) -> None:
        is_freed = run.training.status().step_in_backward
        run.machine.compute(0.0, 0 if is_freed else gradients)

    def count_no_gradients(*_: object) -> None:
        run.machine.live = BASE

    run.optimizer.register_step_pre_hook(count_gradients)
    run.optimizer.register_step_post_hook(count_no_gradients)
    expected = Training(clips=False)
    for it in (run, expected):
        it.run(6)
    status = run.status
    assert status.resident_bytes < LAYERS * LAYER_STATE
    before = status.resident_bytes
    run.training.move_into_backward()
    assert run.run(8) == expected.run(8)
    assert run.training.status().step_in_backward
    status = run.status
    assert status.resident_bytes > before
    assert run.training.counts.ahead > 0


@pytest.mark.slow
def test_no_plan_is_made_for_a_step_that_will_move_into_the_backward_pass(caplog: Log) -> None:
    """The plan for gradients that are all kept would be for a budget that it is too large for."""
    caplog.set_level(logging.INFO, "umem")
    run = Training(Machine(2 * LAYER_STATE + 4 * SAVED), clips=False)
    run.training.move_into_backward()
    while not run.training.status().step_in_backward:
        run.step()
        assert run.tuner.status().plans == 0
    computed_s = sum(11.0 + 2 * it for it in range(LAYERS))

    def slow_down(*_: object) -> None:
        """As updates beside the backward pass do, in the steps that are measured now."""
        run.machine.compute(5.0)

    handle = run.model.layers[1].register_full_backward_hook(slow_down)
    run.run(4)
    handle.remove()
    status = run.tuner.status()
    assert status.plans == 1
    assert status.plan.predicted.compute_s == pytest.approx(computed_s, rel=1e-3)
    assert not [it for it in caplog.records if it.levelno >= logging.WARNING]


@pytest.mark.slow
def test_where_all_fits_nothing_moves(caplog: Log) -> None:
    caplog.set_level(logging.INFO, "umem")
    run = exact(Machine())
    status = run.status
    assert status.state == TuningState.PLANNED
    assert (status.plans, status.copied_blocks, status.spilled_bytes) == (1, 0, 0)
    assert status.resident_bytes == LAYERS * LAYER_STATE
    assert run.training.step.units.slots_bytes == 0
    assert status.predicted_s is not None
    assert status.predicted_s == pytest.approx(sum(11.0 + 2 * it for it in range(LAYERS)), rel=1e-3)
    assert run.training.counts.resident > 0
    (told,) = (it for it in caplog.messages if "plan 1: state of 6 of 6 blocks" in it)
    assert " 0 B of host memory" in told
    managed = managed_runs()[-1]
    assert run.training.status().measured_s == managed.measured_s is not None
    assert (managed.model, managed.predicted_s) == ("Net", status.predicted_s)
    assert 0 < managed.planned < managed.count
    assert managed.late() == 0


@pytest.mark.slow
def test_a_step_for_which_nothing_moves_marks_no_moment(monkeypatch: Patch) -> None:
    """Events take time, and nothing would wait for them."""
    run = Training(Machine(), copies_gradients=True, streams_weights=True)
    run.run(8)
    assert run.tuner.is_settled
    moments: Counter[str] = Counter()

    def count(name: str) -> None:
        original = getattr(LazyLanes, name)

        def counted(*args: Any) -> Any:
            moments[name] += 1
            return original(*args)

        monkeypatch.setattr(LazyLanes, name, counted)

    for name in ("mark", "run"):
        count(name)
    resident = run.training.counts.resident
    run.run(3)
    assert run.training.counts.resident == resident + 3
    assert not moments
    run.training.step.units.set_plan(frozenset(), 2)
    run.optimizer.load_state_dict(run.optimizer.state_dict())  # there is something to look at
    run.run(3)
    assert run.training.counts.resident == resident + 3
    assert moments["mark"] > 0
    assert moments["run"] > 0


@pytest.mark.slow
def test_steps_rest_where_all_fits_until_something_changes(monkeypatch: Patch) -> None:
    machine = Machine(LAYERS * LAYER_STATE + LAYERS * SAVED + SAVED)
    run, expected = Training(machine), Training()
    looks = 0

    def take_peak_bytes() -> int:
        nonlocal looks
        looks += 1
        return Machine.take_peak_bytes(machine)

    monkeypatch.setattr(machine, "take_peak_bytes", take_peak_bytes)

    def steps(count: int, rows: int = ROWS) -> int:
        """How often memory was looked at."""
        nonlocal looks
        looks = 0
        for it in (run, expected):
            it.run(count, rows=rows)
        return looks

    def rests() -> bool:
        return steps(1) == 0

    assert steps(10) > 0
    counts, (managed, *_) = run.training.counts.resident, managed_runs()[::-1]
    managed_count = managed.count
    assert rests()
    assert (run.training.counts.resident, managed.count) == (counts + 1, managed_count + 1)
    for it in (run, expected):
        it.optimizer.load_state_dict(it.optimizer.state_dict())
    assert not rests()
    steps(10)
    assert rests()
    for it in (run, expected):
        it.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert not rests()
    steps(10)
    assert rests()
    plans = run.tuner.status().plans
    assert steps(8, 2 * ROWS) > 0
    assert run.tuner.status().plans > plans
    assert run.losses == expected.losses


def test_a_training_that_rests_keeps_no_state_of_an_optimizer_that_is_gone() -> None:
    run = Training(Machine())
    run.run(10)
    assert run.tuner.is_idle
    first = weakref.ref(next(iter(run.optimizer.state.values()))["exp_avg"])
    training = run.training
    del run.optimizer
    gc.collect()
    assert first() is None
    assert training.is_closed


@pytest.mark.slow
def test_what_does_not_fit_is_streamed_and_copied() -> None:
    # Beside two slots there is room for the activations of four of six layers.
    machine = Machine(2 * LAYER_STATE + 4 * SAVED)
    run = Training(machine)
    machine.highest = 0
    assert run.run(10) == Training().run(10)
    status = run.status
    assert status.state == TuningState.PLANNED
    assert status.copied_blocks >= 2
    assert status.copied_bytes >= SAVED
    assert status.activations.tensors_out > 0
    assert status.activations.late_fetches == 0
    machine.highest = 0
    run.run(2)
    assert machine.highest <= machine.budget_bytes - SLACK - run.training.step.units.slots_bytes


class WithHead(Net):
    """What comes behind its layers takes as much memory as the state of four of them."""

    forward_s = backward_s = 1.0

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.machine = machine

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        compute: Any = Compute.apply
        # For eight rows.
        return compute(x.repeat(1, HEAD_COLUMNS // WIDTH), self)


HEAD_COLUMNS = 4 * LAYER_STATE // (8 * 4 * 5 // 2) // WIDTH * WIDTH


def never_defer(run: Training) -> None:
    run.training.step.may_defer = False


def read_weights_after_each_step(run: Training) -> None:
    def read(*_: Any) -> None:
        for parameter in run.model.parameters():
            parameter.sum()

    run.optimizer.register_step_post_hook(read)


@pytest.mark.slow
@pytest.mark.parametrize("have_wait", [never_defer, read_weights_after_each_step])
def test_steps_that_wait_have_slots_of_activations(
    have_wait: Callable[[Training], None],
) -> None:
    rows = 8
    more_bytes = 6 * LAYER_STATE + LAYERS * SAVED * rows // ROWS
    machine = Machine(more_bytes)
    # Copies of a layer's state take four seconds, its shortest pass one.
    slow = replace(
        load_hardware("h200"),
        copy_to_device_bytes_per_s=LAYER_STATE / 4,
        copy_to_host_bytes_per_s=LAYER_STATE / 4,
        copy_link_bytes_per_s=LAYER_STATE / 2,
    )
    run = Training(machine, hardware=slow, make_model=WithHead)
    have_wait(run)
    seen: list[int] = []
    run.optimizer.register_step_post_hook(
        lambda *_: seen.append(len(run.training.step.units.ring.temporary))
    )
    assert run.run(14, rows=rows) == Training(make_model=WithHead).run(14, rows=rows)
    status = run.status
    planned = len(status.plan.temporary)
    assert planned > 0
    assert seen[-1] == planned
    machine.highest_in_all = 0
    run.run(2, rows=rows)
    assert machine.spilled == 0
    assert machine.highest_in_all <= machine.budget_bytes - SLACK


@pytest.mark.slow
def test_state_that_was_made_on_the_device_counts_once() -> None:
    expected = Training(Machine(4 * LAYER_STATE + LAYERS * SAVED))
    run = Training(Machine(4 * LAYER_STATE + LAYERS * SAVED), born_on_device=4)
    assert run.run(8) == expected.run(8)
    assert run.status.plan == expected.status.plan is not None


@pytest.mark.slow
@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_no_bit_changes(is_checkpointed: bool, batches: int) -> None:
    run = Training(Machine(2 * LAYER_STATE + 4 * SAVED), is_checkpointed=is_checkpointed)
    expected = Training(is_checkpointed=is_checkpointed)
    assert run.run(10, batches=batches) == expected.run(10, batches=batches)


def test_activations_are_copied_where_no_state_is_streamed() -> None:
    run = exact(Machine(4 * SAVED), streams_state=False)
    assert run.status.copied_blocks >= 2
    counts = run.training.counts
    assert run.status.resident_bytes == counts.streamed == counts.in_line == counts.resident == 0


@pytest.mark.slow
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_budget_that_is_too_small_copies_all(caplog: Log, in_backward: bool) -> None:
    run = Training(Machine(-(10**5)), clips=False)
    if in_backward:
        run.training.move_into_backward()
    assert run.run(8) == Training(clips=False).run(8)
    assert run.status.state == TuningState.NO_PLAN_FITS
    assert run.status.copied_blocks == LAYERS - 1
    (said,) = (it for it in caplog.messages if "used in host memory" in it)
    assert ("Without step_in_backward" in said) == in_backward


@pytest.mark.slow
@pytest.mark.parametrize(
    ("room", "slots", "ahead"),
    [(4 * SAVED // 2, 1, 1), (3 * SAVED // 2, 0, 1), (2 * SAVED // 2, 1, 0), (SAVED // 2, 0, 0)],
)
def test_copies_are_waited_for_before_anything_is_used_in_host_memory(
    room: int, slots: int, ahead: int
) -> None:
    run, expected = Training(Machine(2 * LAYER_STATE + room)), Training()
    machine = run.machine
    assert run.run(8) == expected.run(8)
    status = run.status
    assert (status.state, status.overflow_bytes) == (TuningState.PLANNED, 0)
    assert (status.plan.slots, status.plan.fetch_ahead) == (slots, ahead)
    machine.highest_in_all = machine.spilled = 0
    assert run.run(4) == expected.run(4)
    assert machine.highest_in_all <= machine.budget_bytes - SLACK
    assert machine.spilled == 0
    assert len(run.training.step.units.ring.slots) == slots
    assert run.training.counts.streamed > 8


@pytest.mark.slow
def test_what_has_no_room_is_as_much_as_planned_and_leads_to_no_other_plan(caplog: Log) -> None:
    machine = Machine(LAYER_STATE)
    run, expected = Training(machine), Training()
    assert run.run(10) == expected.run(10)
    status = run.status
    assert status.state == TuningState.NO_PLAN_FITS
    assert status.overflow_bytes > 0
    assert status.predicted_s > sum(11.0 + 2 * it for it in range(LAYERS))
    managed = managed_runs()[-1]
    assert (managed.predicted_s, managed.planned > 0) == (status.predicted_s, True)
    machine.highest_in_all = 0
    assert run.run(40) == expected.run(40)
    over_bytes = machine.highest_in_all - (machine.budget_bytes - SLACK)
    assert over_bytes == machine.spilled == status.overflow_bytes
    assert run.status.plans == status.plans
    (said,) = (it for it in caplog.messages if "used in host memory" in it)
    assert "raise device_budget by" in said


@pytest.mark.slow
@pytest.mark.parametrize("room", [SAVED // 2, 0, -BASE // 2])
@pytest.mark.parametrize("clips", [False, True])
def test_no_bit_changes_where_too_little_has_room(room: int, clips: bool) -> None:
    run = exact(Machine(room), 14, clips=clips, copies_gradients=True, streams_weights=True)
    assert run.status.plan is not None
    assert run.weights.status().resident_bytes == 0


class SlowMachine(Machine):
    """Computes as long as its layers say, times a factor."""

    factor: Callable[[], float] = staticmethod(lambda: 1.0)

    def compute(self, seconds: float, more_bytes: int = 0) -> None:
        super().compute(self.factor() * seconds, more_bytes)


COMPUTED_S = sum(11.0 + 2 * it for it in range(LAYERS))


@pytest.mark.slow
def test_a_plan_of_slowed_steps_under_which_nothing_moves_stays() -> None:
    machine = SlowMachine()
    machine.factor = lambda: 4.0
    run = Training(machine)
    run.run(2)
    machine.factor = lambda: 1.0
    run.run(20)
    assert run.status.plans == 1
    assert run.status.measured_s == pytest.approx(COMPUTED_S)


TIGHT = 2 * LAYER_STATE + 4 * SAVED


@pytest.mark.slow
def test_steps_that_use_cached_host_memory_are_slow_too(monkeypatch: Patch) -> None:
    """The plan of weights counts it as theirs, where the passes of earlier batches have left it."""
    machine = SlowMachine(TIGHT)
    run, spills = Training(machine), 0

    def count_spills() -> int:
        nonlocal spills
        spills += run.status.plans == 0
        return spills

    monkeypatch.setattr(machine, "spilled_bytes", int)
    monkeypatch.setattr(machine, "spills", count_spills)
    machine.factor = lambda: 1.0 if run.status.plans else 1.05
    run.run(8)
    status = run.status
    assert (status.state, status.plans) == (TuningState.PLANNED, 2)
    assert status.plan.predicted.compute_s == pytest.approx(COMPUTED_S, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("is_dry", [False, True])
def test_launches_that_a_device_waits_for_are_planned(is_dry: bool, monkeypatch: Patch) -> None:
    """Each as if it took 36 s; none takes any time where the processor is ahead."""
    monkeypatch.setattr(Clock, "has_run_dry", lambda *_: is_dry)
    known: Any = Launches.waited_s
    slow = property(lambda it: 36.0 * (known.fget(it) > 0.0))
    monkeypatch.setattr(Launches, "waited_s", slow)
    run = Training(Machine(TIGHT), share=0.5)  # of all state, at most
    run.run(8)
    assert (run.status.plan.predicted.exposed_s >= 36.0) == is_dry
    assert run.losses == Training().run(8)[0]


@pytest.mark.slow
def test_a_plan_of_slowed_steps_is_replaced_once(caplog: Log) -> None:
    caplog.set_level(logging.INFO, "umem")
    machine = SlowMachine(TIGHT)
    machine.factor = lambda: 4.0
    run = Training(machine)
    run.run(2)
    assert run.status.plan.predicted.compute_s == pytest.approx(4 * COMPUTED_S, rel=1e-3)
    assert run.status.measured_s is None
    machine.factor = lambda: 1.0
    run.run(20)
    status = run.status
    assert (status.state, status.plans) == (TuningState.PLANNED, 2)
    assert status.plan.predicted.compute_s == pytest.approx(COMPUTED_S, rel=1e-3)
    assert status.measured_s == pytest.approx(COMPUTED_S)
    told = f"umem: plan 2: {COMPUTED_S:.3f} s a step measured, {COMPUTED_S:.3f} s predicted"
    assert told in caplog.messages


@pytest.mark.slow
def test_steps_that_are_always_slow_when_they_are_measured_lead_to_few_plans() -> None:
    machine = SlowMachine(TIGHT)
    run = Training(machine)
    machine.factor = lambda: 4.0 if run.tuner.is_measuring else 1.0
    run.run(60)
    assert run.status.plans <= 4
    assert run.tuner.is_settled
    # No step is shorter than its passes.
    assert run.status.plan.predicted.compute_s == pytest.approx(COMPUTED_S, rel=1e-3)


@pytest.mark.slow
def test_a_plan_of_a_slow_time_is_looked_at_again_when_steps_are_fast(
    monkeypatch: Patch,
) -> None:
    """No matter how many plans were replaced at once."""
    monkeypatch.setattr(tuner, "_MOST_CORRECTIONS", 0)
    machine = SlowMachine(TIGHT)
    run = Training(machine)
    machine.factor = lambda: 4.0
    run.run(14)
    status = run.status
    assert status.measured_s == pytest.approx(4 * COMPUTED_S)
    assert status.plan.predicted.compute_s == pytest.approx(4 * COMPUTED_S, rel=1e-3)
    assert run.tuner.is_settled
    machine.factor = lambda: 1.0
    run.run(40)
    assert run.status.measured_s == pytest.approx(COMPUTED_S)
    assert run.status.plan.predicted.compute_s == pytest.approx(COMPUTED_S, rel=1e-3)


@pytest.mark.slow
def test_a_step_that_is_held_up_is_no_time_of_a_plan() -> None:
    machine = SlowMachine(TIGHT)
    run = Training(machine)
    while run.status.measured_s is None:
        machine.factor = lambda: 9.0 if run.steps % 3 == 0 else 1.0
        run.step()
        assert run.steps < 20
    assert run.status.measured_s == pytest.approx(COMPUTED_S)


def test_passes_take_no_longer_than_a_step_that_was_measured() -> None:
    def measured() -> MeasuredSteps:
        steps = MeasuredSteps()
        blocks = {name: MeasuredBlock(1.0, 3.0) for name in "ab"}
        steps.add(MeasuredStep(blocks, other_s=2.0, batches=2), {})
        return steps

    def limited(step_s: float, again: str = "", left_out: str = "") -> tuple[float, ...]:
        steps = measured()
        steps.limit(step_s, again, left_out)
        found = steps.figures
        assert found is not None
        block = found.blocks["a"]
        return block.forward_s, block.backward_s, found.other_s, found.computed_s

    whole = (1.0, 3.0, 2.0, 18.0)
    assert limited(18.0) == limited(20.0, "a") == limited(14.0, left_out="ab") == whole
    assert limited(9.0) == limited(11.0, "ab") == limited(8.0, left_out="a") == (0.5, 1.5, 1.0, 9.0)


class LockingMover(LazyMover):
    """Locks host memory, which takes the program longer than all passes."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine
        self.locked = 0

    def allocate_host(self, size_bytes: int) -> torch.Tensor:
        self.locked += 1
        self.machine.compute(1000.0)
        return super().allocate_host(size_bytes)


def with_repeatable_layers(machine: Machine) -> nn.Module:
    return Net(machine, kind=RepeatableLayer)


def running_twice(machine: SlowMachine, monkeypatch: Patch) -> Training:
    """A training that seems slow when it is measured first, with blocks that its plan runs twice.

    To copy what a block saves takes 160 s each way.
    """
    machine.factor = lambda: 4.0
    run = Training(
        machine,
        make_model=with_repeatable_layers,
        mover=LockingMover(machine),
        hardware=replace(
            SLOW_LINK,
            copy_to_device_bytes_per_s=500,
            copy_to_host_bytes_per_s=500,
            copy_link_bytes_per_s=1000,
        ),
        streams_state=False,
        may_recompute=True,
    )
    machine.away = int  # it counts what lives
    monkeypatch.setattr(machine, "spilled_bytes", int)
    run.run(3)
    machine.factor = lambda: 1.0
    assert run.status.plans == 1
    assert run.status.recomputed_blocks > 0
    assert run.status.copied_bytes < SAVED
    return run


def second_passes_s(run: Training) -> float:
    return sum(run.model.get_submodule(it).forward_s for it in run.tuner._planning.recomputed)


@pytest.mark.slow
def test_blocks_that_run_twice_do_so_while_times_are_measured(monkeypatch: Patch) -> None:
    """Copies in their place would have memory locked, and a plan of such times would copy."""
    run = running_twice(SlowMachine(ROOM_TO_REPEAT), monkeypatch)
    before = run.status
    run.run(20)
    assert run.losses == Training(make_model=with_repeatable_layers).run(23)[0]
    status = run.status
    assert status.recomputed_blocks == before.recomputed_blocks
    assert status.activations.bytes_out == 20 * before.copied_bytes
    computed_s = COMPUTED_S + second_passes_s(run)
    assert status.measured_s == pytest.approx(computed_s)
    assert status.plan.predicted.compute_s == pytest.approx(computed_s, rel=1e-3)
    for unit in run.tuner._planning.units[1:-1]:
        layer = run.model.get_submodule(unit.name)
        assert unit.backward_s == pytest.approx(layer.backward_s + layer.forward_s)
    assert run.tuner.is_settled


ROOM_TO_REPEAT = 7 * SAVED // 4


def without_repetition(
    monkeypatch: Patch, step_s: float | None = None
) -> list[Sequence[StreamUnit]]:
    """Plans from now on have no blocks that run twice, and promise `step_s`."""
    asked = list[Sequence[StreamUnit]]()

    def plan(
        units: Sequence[StreamUnit], freed: Any, *others: Any, are_slowed: bool
    ) -> TrainingPlan:
        asked.append(units)
        found = plan_with_recomputation(units, {}, *others)
        predicted = replace(found.stream.predicted, step_s=step_s or found.stream.predicted.step_s)
        return replace(found, stream=replace(found.stream, predicted=predicted))

    monkeypatch.setattr(planning, "plan_with_recomputation", plan)
    return asked


@pytest.mark.slow
def test_blocks_run_twice_until_times_are_of_steps_that_nothing_has_slowed() -> None:
    """Beside slowed passes, copies seem to hide; to lock memory for them is in vain if they do not.

    These do hide, so that the next plan has them.
    """
    machine = SlowMachine(4 * SAVED)
    run = Training(
        machine, make_model=with_repeatable_layers, streams_state=False, may_recompute=True
    )
    machine.away = int
    plans = []
    for _ in range(12):
        run.step()
        plans.append((run.status.recomputed_blocks, run.status.copied_bytes > SAVED))
    assert list(dict.fromkeys(plans)) == [(0, False), (LAYERS - 1, False), (0, True)]
    assert run.losses == Training(make_model=with_repeatable_layers).run(12)[0]


@pytest.mark.slow
def test_a_plan_stays_if_another_promises_longer_steps(monkeypatch: Patch, caplog: Log) -> None:
    caplog.set_level(logging.INFO, "umem")
    run = running_twice(SlowMachine(ROOM_TO_REPEAT), monkeypatch)
    before, asked = run.status, without_repetition(monkeypatch)
    run.run(20)
    status = run.status
    assert asked
    assert (status.state, status.plans) == (TuningState.PLANNED, 1)
    assert status.recomputed_blocks == before.recomputed_blocks
    assert status.predicted_s < before.predicted_s / 2
    assert run.tuner.is_settled
    (told,) = (it for it in caplog.messages if "plan 1 stays" in it)
    assert f"{status.measured_s:.3f} s" in told


@pytest.mark.slow
def test_the_fastest_plan_that_was_measured_is_put_back(monkeypatch: Patch) -> None:
    """Where a later one promised more than it holds."""
    machine = SlowMachine(ROOM_TO_REPEAT)
    run = running_twice(machine, monkeypatch)
    before = run.status
    machine.factor = lambda: 1.0 if run.status.recomputed_blocks else 2.0
    without_repetition(monkeypatch, step_s=1.0)
    run.run(60)
    status = run.status
    assert status.plans > 2
    assert status.recomputed_blocks == before.recomputed_blocks
    assert status.measured_s == pytest.approx(COMPUTED_S + second_passes_s(run))
    assert run.tuner.is_settled


@pytest.mark.slow
def test_a_measured_plan_does_not_stay_for_other_uses() -> None:
    run = Training(Machine(TIGHT), share=0.0)
    run.run(14)
    before = run.status
    assert before.measured_s is not None
    read_weights_after_each_step(run)
    run.run(12)
    assert run.status.plans == before.plans + 1


@pytest.mark.slow
def test_a_plan_under_which_memory_runs_short_is_not_put_back(monkeypatch: Patch) -> None:
    machine = SlowMachine(ROOM_TO_REPEAT)
    run = running_twice(machine, monkeypatch)
    asked = without_repetition(monkeypatch)
    run.run(20)
    assert run.status.recomputed_blocks > 0
    asked.clear()
    monkeypatch.setattr(machine, "spilled_bytes", lambda: 1)
    run.run(20)
    assert asked
    assert run.status.recomputed_blocks == 0


def test_a_small_budget_has_a_plan_with_less_slack(monkeypatch: Patch) -> None:
    monkeypatch.setattr(planning, "_SLACK_SHARES", (1.0, 0.5))
    machine = Machine()
    machine.budget_bytes = SLACK // 2 + BASE + 10 * LAYER_STATE
    assert exact(machine).status.state == TuningState.PLANNED


@pytest.mark.slow
def test_gradients_are_copied_where_activations_alone_leave_too_little_room(caplog: Log) -> None:
    """All are there at the fullest moment, the loss of the second batch."""

    def run(budget_bytes: int, **options: Any) -> tuple[Any, Any]:
        machine = Machine()
        machine.budget_bytes = SLACK + budget_bytes
        training = Training(machine, **options)
        found = training.run(8, batches=2)
        return training.training.status().tuning, found

    assert run(BASE)[0].state == TuningState.NO_PLAN_FITS
    (needed,) = (int(it) for it in re.findall(r"\((\d+) bytes\)", caplog.text))
    assert run(needed)[0].state == TuningState.PLANNED
    layer_bytes = LAYER_STATE // 2
    assert run(needed - layer_bytes)[0].plan.slots == 1
    status, found = run(needed - layer_bytes, copies_gradients=True)
    assert status.state == TuningState.PLANNED
    assert status.plan.slots > 1
    assert status.copied_gradients_bytes == layer_bytes
    assert status.returning_gradients_bytes == layer_bytes
    assert found == Training().run(8, batches=2)


@pytest.mark.parametrize("moves", [True, False])
def test_memory_on_the_device_is_nobodys_once_the_program_has_replaced_it(moves: bool) -> None:
    memory, tensor = HostStateMemory(), torch.zeros(WIDTH, WIDTH)
    memory.place(tensor, on_device=True)
    assert memory.device_bytes == tensor.nbytes
    if moves:
        tensor.data = tensor.data.clone()
    else:
        tensor = torch.zeros(WIDTH, WIDTH)
    assert memory.device_bytes == 0
    assert memory.is_home(tensor)


@pytest.mark.slow
def test_a_training_that_was_moved_away_goes_on_by_its_plan(monkeypatch: Patch) -> None:
    """Coming back puts more on the host than steps do; they run no shorter of memory for that."""
    machine = Machine(2 * LAYER_STATE + 4 * SAVED)
    run, stock = Training(machine, share=0.5), Training()
    assert run.run(12) == stock.run(12)
    before = run.status
    assert before.activations.pinned_bytes > 0
    for _ in range(3):
        state = [it for of in run.optimizer.state.values() for it in of.values() if it.numel() > 1]
        for tensor in state:
            tensor.data = moved = tensor.data.clone()
            run.memory.moved[moved.data_ptr()] = moved
        let_go()
        assert run.training.status().slots_bytes == 0
        assert run.status.activations.pinned_bytes == 0
        run.memory.moved.clear()
        more_bytes = machine.spilled_bytes() + LAYER_STATE
        monkeypatch.setattr(machine, "spilled_bytes", lambda bytes=more_bytes: bytes)
        assert run.run(6) == stock.run(6)
    assert run.training.status().slots_bytes
    assert (run.status.plans, run.status.plan) == (before.plans, before.plan)


def test_a_larger_batch_is_planned_for() -> None:
    machine = Machine(2 * LAYER_STATE + 8 * SAVED)
    run, expected = Training(machine), Training()
    pairs = (run, expected)
    for it in pairs:
        it.run(8)
    before = run.status
    for it in pairs:
        it.run(12, rows=2 * ROWS)
    status = run.status
    assert status.plans > before.plans
    assert status.copied_bytes > before.copied_bytes
    machine.spilled = 0
    for it in pairs:  # it holds for the largest step
        for rows in (ROWS, 2 * ROWS, ROWS // 2, 2 * ROWS):
            it.step(rows=rows)
    assert machine.spilled == 0
    assert run.losses == expected.losses


@pytest.mark.slow
def test_memory_that_stays_short_ends_in_a_bounded_number_of_plans(caplog: Log) -> None:
    machine = Machine(10**6)
    run = Training(machine)
    machine.spilled = 1  # in both steps that the first plan is made from
    plans: list[int] = []
    for _ in range(1200):
        run.step()
        machine.spilled += 1  # whatever the plan, such as by fragments
        status = run.status
        if len(plans) < status.plans:
            plans.append(run.steps)
    between = [after - before for before, after in pairwise(plans)]
    assert len(plans) == 8
    assert between == sorted(between)
    assert between[1] < 10, "steps that were slow when they were measured make nobody wait"
    assert between[-1] >= 100
    assert len([it for it in caplog.messages if "after 8 plans" in it]) == 1


@pytest.mark.slow
def test_a_compiled_model_streams_by_its_parameters() -> None:
    def make_model(machine: Machine) -> nn.Module:
        torch._dynamo.reset()
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        model.compile(backend="eager")
        del machine
        return model

    state_bytes = 2 * 4 * WIDTH * WIDTH
    run = exact(Machine(3 * state_bytes), make_model=make_model)
    status = run.status
    assert status.state == TuningState.PLANNED
    assert status.resident_bytes == state_bytes
    assert status.copied_blocks == 0


class WithFlatPartitions(Net):
    """Scales its input by parameters of a layer's size, which it does not register."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.flats = tuple(nn.Parameter(torch.ones(4 * WIDTH * WIDTH)) for _ in range(3))

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return chain(super().parameters(recurse), self.flats)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * torch.stack(self.flats).mean())


@pytest.mark.slow
def test_flat_partitions_are_planned_as_what_is_due_first() -> None:
    run = exact(Machine(5 * LAYER_STATE + 2 * SAVED), make_model=WithFlatPartitions)
    status = run.status
    assert status.plan.slot_bytes == LAYER_STATE
    assert status.plan.resident <= {0, 1, 2}
    assert status.plan.resident
    assert min(status.plan.copied) == 3  # the first layer comes behind them


class WithOneFlatPartition(WithFlatPartitions):
    """All in one parameter, which is staged in three pieces of a layer's size."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.flats = (nn.Parameter(torch.ones(3 * 4 * WIDTH * WIDTH)),)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more_bytes", "resident"),
    [(4 * LAYER_STATE + 2 * SAVED, 1), (5 * LAYER_STATE + 2 * SAVED, 3), (10**9, 9)],
)
def test_a_flat_partition_is_on_the_device_whole_or_not(more_bytes: int, resident: int) -> None:
    run = exact(Machine(more_bytes), make_model=WithOneFlatPartition)
    status = run.status
    assert status.plan.slot_bytes == (0 if resident == 9 else LAYER_STATE)
    assert status.resident_bytes == resident * LAYER_STATE


class WithUnheldParameters(Net):
    """Scales its input by parameters of which only the optimizer knows."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.unheld = tuple(nn.Parameter(torch.ones(16 * WIDTH * WIDTH)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * torch.stack(self.unheld).mean())


def with_unheld_parameters(more_bytes: int) -> Training:
    run = Training(Machine(more_bytes), make_model=WithUnheldParameters)
    for it in (*run.model.parameters(), *run.model.unheld):
        run.memory.place(it, on_device=True)
    machine, activations_away, placed = run.machine, run.machine.away, run.machine.placed
    machine.live += sum(it.nbytes for it in run.model.unheld)

    def at_home() -> int:
        return sum(it.nbytes for it in run.model.unheld if run.memory.is_home(it))

    # At home they count as placed.
    machine.away = lambda: activations_away() + at_home()
    machine.placed = lambda: placed() + at_home()
    machine.at_home = at_home
    return run


@pytest.mark.slow
@pytest.mark.parametrize(("more_bytes", "must_leave"), [(9 * LAYER_STATE, True), (10**9, False)])
def test_parameters_that_no_module_holds_leave_where_nothing_else_makes_room(
    more_bytes: int, must_leave: bool
) -> None:
    run = with_unheld_parameters(more_bytes)
    unheld_bytes = sum(it.nbytes for it in run.model.unheld)
    assert run.run(12) == Training(make_model=WithUnheldParameters).run(12)
    assert run.status.state == TuningState.PLANNED
    assert [run.memory.is_home(it) for it in run.model.unheld] == [must_leave] * 3
    weights = sum(it.trained_weight_bytes for it in run.tuner._planning.units)
    assert weights == unheld_bytes * must_leave
    assert run.machine.spilled == 0


@pytest.mark.slow
@pytest.mark.parametrize(("lacking", "leave"), [(SLACK, False), (SLACK + 1, True)])
def test_they_stay_where_little_memory_is_lacking(lacking: int, leave: bool) -> None:
    """A plan with twice the slack would have room without them only."""
    run = with_unheld_parameters(10**8)
    run.run(8)
    run.machine.spilled += lacking
    run.run(8)
    status = run.status
    assert status.state == TuningState.PLANNED
    assert status.plans == (1 if leave else 2)  # counted anew when they have left
    assert [run.memory.is_home(it) for it in run.model.unheld] == [leave] * 3


@pytest.mark.slow
def test_a_training_that_is_closed_is_stock() -> None:
    run, expected = Training(Machine(2 * LAYER_STATE + 4 * SAVED)), Training()
    run.run(8)
    expected.run(8)
    run.training.close()
    assert run.run(3) == expected.run(3)
    assert run.status.state == TuningState.OFF
    assert not run.model._forward_hooks
    assert not run.model._forward_pre_hooks


def test_an_error_of_a_measurement_does_not_reach_the_training(caplog: Log) -> None:
    class Broken(Machine):
        def find_homes(self) -> None:
            raise RuntimeError("no figures")

    run = exact(Broken(), 6)
    assert run.status.state == TuningState.OFF
    assert len([it for it in caplog.messages if "no figures" in it]) == 1


def test_the_table_of_states_leads_everywhere_and_always_out() -> None:
    assert {state for state, _ in TRANSITIONS} == set(TuningState)
    assert set(TRANSITIONS.values()) == set(TuningState)
    assert {event for _, event in TRANSITIONS} == set(TuningEvent)
    for state in TuningState:
        assert TRANSITIONS[state, TuningEvent.ENDED] is TuningState.OFF
    # One that has ended measures nothing until it begins anew.
    out_of_off = {event for state, event in TRANSITIONS if state is TuningState.OFF}
    assert out_of_off == {TuningEvent.BEGINS, TuningEvent.ENDED}


def test_the_page_of_the_tuner_has_its_states() -> None:
    page = (Path(__file__).parents[1] / "docs" / "streaming.md").read_text(encoding="utf-8")
    rows = page[page.index("| state | event | state then |") :].split("\n\n")[0]
    for state in TuningState:
        assert f"`{state}`" in rows
