"""What starts work without an operator waits for the updates that are under way."""

from __future__ import annotations

import ctypes
import functools
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lazy_lanes import LazyLanes
from streamed_programs import UNITS, WIDTH, Net, Program, bits, compare
from torch import nn

from umem.patches import PATCHES
from umem.runtime.captured_reads import CapturedReads
from umem.runtime.guard import guard_of
from umem.runtime.held_memory import is_held
from umem.runtime.torch_hooks.work_starts import STARTS, before_work
from umem.runtime.unguarded import addresses_of


class RawGraph:
    """The class in C++ under ``torch.cuda.CUDAGraph``: its work takes no tensors from torch."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work
        self.options: dict[str, Any] = {}

    def replay(self) -> None:
        self.work()

    def capture_begin(self, **options: Any) -> None:
        self.options = options
        self.work()


class Graph(RawGraph):
    """As ``torch.cuda.CUDAGraph``."""

    def replay(self) -> None:
        super().replay()

    def capture_begin(self, **options: Any) -> None:
        super().capture_begin(**options)


@pytest.fixture(autouse=True)
def raw_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """These classes are torch's."""
    monkeypatch.setattr(torch._C, "_CUDAGraph", RawGraph)


def fused(parameters: Any) -> torch.optim.Optimizer:
    """Its kernel leaves the version counters of parameters alone: an older graph may be used."""
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


# ------------------------------------------------------------------ graphs


def read(address: int, shape: torch.Size) -> torch.Tensor:
    """What is at an address, as a kernel of a graph reads it: past every guard."""
    values = torch.empty(shape)
    ctypes.memmove(values.data_ptr(), address, values.nbytes)
    return values


def average_by_a_graph(program: Program) -> None:
    """The method that replays it is kept from the first step on, before anything is streamed."""
    assert program.training is None or program.training.step.is_under_way
    program.kept()


def capture_average(program: Program) -> None:
    places = [(it.data_ptr(), it.shape) for it in program.model.parameters()]
    averages = [torch.zeros(shape) for _, shape in places]

    def work() -> None:
        for average, place in zip(averages, places, strict=True):
            average.lerp_(read(*place), 0.1)
        program.seen.append([it.clone() for it in averages])

    program.kept = Graph(work).replay


def test_a_replay_reads_updated_weights() -> None:
    assert compare(average_by_a_graph, prepare=capture_average).training.counts.early > 0


def change_by_a_graph(program: Program) -> None:
    if program.kept is None:
        program.kept = [it.data_ptr() for it in program.model.parameters()]
    else:
        assert program.training is None or program.training.step.is_under_way

    def work() -> None:
        for it in program.kept:
            ctypes.memset(it, 0, 4)  # one element

    Graph(work).replay()


@pytest.mark.parametrize("streams_weights", [False, True])
def test_a_replay_changes_updated_weights(streams_weights: bool) -> None:
    compare(change_by_a_graph, streams_weights=streams_weights)


def capture(program: Program) -> None:
    def work() -> None:
        assert program.training is None or not program.training.step.is_under_way
        program.seen.append([read(it.data_ptr(), it.shape) for it in program.model.parameters()])

    graph = Graph(work)
    graph.capture_begin(pool=(0, 1))
    assert graph.options == {"pool": (0, 1)}


def test_updates_are_over_when_a_capture_begins() -> None:
    compare(capture)


def capture_reads(program: Program, tensors: list[torch.Tensor]) -> Callable[[], None]:
    """Capture norms of tensors; returns what replays them: it reads the capture's addresses."""
    places: list[int] = []

    def capture() -> None:
        lanes = program.lazy
        if lanes is not None:
            lanes.captures = True
        with torch.no_grad():
            torch._foreach_norm(tensors)
        if lanes is not None:
            lanes.captures = False
        places.extend(addresses_of(tensors))

    def work() -> None:
        program.seen.append(
            [read(*it) for it in zip(places, (it.shape for it in tensors), strict=True)]
        )

    Graph(capture).capture_begin()
    return Graph(work).replay


def read_weights_by_a_graph(program: Program) -> None:
    weights = list(program.model.parameters())
    is_streamed = program.training is not None
    assert not is_streamed or program.kept or program.training.step.is_under_way
    program.kept = program.kept or capture_reads(program, weights)
    program.kept()
    assert not is_streamed or all(map(is_held, weights))


def test_weights_that_a_capture_reads_behind_a_step_are_held() -> None:
    """What waits for the updates guards weights no more when their uses are looked for."""
    compare(read_weights_by_a_graph, streams_weights=True)


def read_state_by_a_graph(program: Program) -> None:
    every = [it for some in program.optimizer.state.values() for it in some.values()]
    if program.kept is None:
        program.kept = capture_reads(program, every)
        if program.training is not None:
            program.training.step.units.set_plan(frozenset(), 2)
    program.kept()


def test_state_on_the_device_that_a_capture_reads_is_held() -> None:
    """A later plan has no unit's state on the device."""
    compare(read_state_by_a_graph, resident=UNITS)


def test_a_pass_of_another_thread_ends_no_capture() -> None:
    captured, weight = CapturedReads(lambda: False), torch.ones(2)
    thread = threading.Thread(target=captured.begin, args=([weight],))
    thread.start()
    captured.end()
    thread.join()
    captured.end()
    assert guard_of(weight) is captured
    captured.begin([weight])
    captured.end()
    assert guard_of(weight) is None


class KeptGradients(Program):
    """Gradients are the same tensors in all steps, and a graph reads them before the step."""

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        self.backward()
        if self.steps > 2:
            gradients = [it.grad for it in self.model.parameters()]
            self.kept = self.kept or capture_reads(self, gradients)
            self.kept()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()


def copy_gradients(program: Program) -> None:
    if program.training is not None:
        program.training.gradients.set_plan(UNITS)


@pytest.mark.parametrize("copied", [frozenset[str](), UNITS])
@pytest.mark.parametrize("eagerness", [0.0, 0.5])
def test_gradients_that_a_capture_reads_are_held(copied: frozenset[str], eagerness: float) -> None:
    """Whether they are on the host then, or a later plan would have them there."""
    compare(copy_gradients, eagerness, steps=6, kind=KeptGradients, copied_gradients=copied)


def test_a_replay_waits_for_all_trainings() -> None:
    def run(lanes: Callable[[Any], LazyLanes] | None) -> list[Any]:
        programs = [Program(lanes, prepare=capture_average) for _ in range(2)]
        for program in programs:
            program.step()
            program.stream()
            program.backward()
        for program in programs:
            program.optimizer.step()
        assert all(it.training.step.is_under_way for it in programs if it.training)
        programs[0].kept()
        assert not any(it.training.step.is_under_way for it in programs if it.training)
        programs[1].kept()
        return [it.seen for it in programs]

    assert bits(run(LazyLanes)) == bits(run(None))


# ------------------------------------------------------------------ backward passes


def keep_a_graph(program: Program) -> None:
    """For the next call. Its nodes have saved weights."""
    model = program.model
    inputs = torch.linspace(0, 1, 4 * WIDTH).view(4, WIDTH).requires_grad_()
    program.kept = inputs, (model.norm(inputs) * model.scale).square().sum()


def gradient_of_an_older_graph(program: Program) -> None:
    if program.kept is not None:
        inputs, loss = program.kept
        assert program.training is None or program.training.step.is_under_way
        program.seen.append(torch.autograd.grad(loss, inputs))
    keep_a_graph(program)


def backward_into_an_older_graph(program: Program) -> None:
    if program.kept is not None:
        inputs, loss = program.kept
        program.optimizer.zero_grad()
        loss.backward(inputs=[inputs])
        program.seen.append(inputs.grad)
    keep_a_graph(program)


def jacobian_with_an_older_graph(program: Program) -> None:
    """The function that is differentiated uses a graph that was made before the step."""
    if program.kept is not None:
        inputs, loss = program.kept

        def slope(scale: torch.Tensor) -> torch.Tensor:
            (found,) = torch.autograd.grad(loss, inputs, retain_graph=True)
            return (found * scale).sum()

        program.seen.append(torch.autograd.functional.jacobian(slope, torch.ones(WIDTH)))
    keep_a_graph(program)


def penalty_of_an_older_graph(program: Program) -> None:
    """It has saved no weight; its gradients are there when they are clipped."""
    program.optimizer.zero_grad()
    penalty = sum(it.bias.sum() for it in program.model.layers) + program.model.head.bias.sum()
    program.backward()
    program.optimizer.step()
    program.optimizer.zero_grad()
    penalty.backward()
    program.seen.append(sum(it.grad is not None for it in program.model.parameters()))
    program.seen.append(torch.nn.utils.clip_grad_norm_(program.model.parameters(), 1e-2))
    program.optimizer.step()


@pytest.mark.parametrize("eagerness", [0.0, 0.8])
@pytest.mark.parametrize(
    "use",
    [
        gradient_of_an_older_graph,
        backward_into_an_older_graph,
        jacobian_with_an_older_graph,
        penalty_of_an_older_graph,
    ],
    ids=lambda it: it.__name__,
)
def test_a_backward_pass_into_an_old_graph(
    use: Callable[[Program], None], eagerness: float
) -> None:
    compare(use, eagerness, make_optimizer=fused)


# ------------------------------------------------------------------ operators past Python


@torch.jit.script
def scripted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A function of TorchScript."""
    return x + torch.tanh(weight).sum(0)


def differentiated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The gradient of a penalty, by ``torch.func``."""
    return x + torch.func.grad(lambda it: (it**3).sum())(weight).sum(0)


def mapped(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Row by row, by ``torch.vmap``."""
    return torch.vmap(lambda row, it: row + torch.tanh(it).sum(0), (0, None))(x, weight)


@pytest.mark.parametrize("function", [scripted, differentiated, mapped])
def test_a_function_in_the_forward_pass_takes_the_weight_of_a_later_block(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    class Borrowing(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            later: Any = self.layers[3]
            return super().forward(function(x, later.weight))

    compare(make_model=Borrowing)


# ------------------------------------------------------------------ what is replaced


def original(key: str) -> Any:
    """What stands in torch under an entry of :data:`PATCHES`; None where this torch lacks it."""
    patch = PATCHES[key]
    owner = patch.owner()
    return None if owner is None else vars(owner).get(patch.attribute)


def collect_trainings_of_other_tests() -> None:
    """Those too that were there when conftest.py left all objects out of collections."""
    gc.unfreeze()
    gc.collect()


@pytest.mark.slow
def test_torch_is_as_it_was_when_nothing_listens_any_more() -> None:
    collect_trainings_of_other_tests()
    before = {key: original(key) for key in STARTS}
    heard: list[str] = []
    ends = [before_work(functools.partial(heard.append, name)) for name in "ab"]
    now = {key: original(key) for key in before}
    assert all(now[key] is not it for key, it in before.items() if it is not None)
    assert sum(it is not None for it in now.values()) >= 4
    Graph(lambda: heard.append("work")).replay()
    assert heard == ["a", "b", "work"]
    ends[0]()
    torch.ones(2, requires_grad=True).sum().backward()
    assert heard[3:] == ["b"]
    ends[1]()
    ends[1]()
    assert {key: original(key) for key in before} == before
    torch.ones(2, requires_grad=True).sum().backward()
    assert len(heard) == 4


def test_what_has_replaced_a_start_since_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    end = before_work(lambda: heard.append("first"))
    ours: Any = RawGraph.replay

    def replay(graph: RawGraph) -> None:
        heard.append("other")
        ours(graph)

    monkeypatch.setattr(RawGraph, "replay", replay)
    end()
    assert RawGraph.replay is replay
    Graph(lambda: heard.append("work")).replay()
    assert heard == ["other", "work"]
    end = before_work(lambda: heard.append("again"))
    Graph(lambda: heard.append("work")).replay()
    end()
    assert heard[2:] == ["again", "other", "again", "work"]


@pytest.mark.slow
def test_a_training_that_is_gone_leaves_torch_as_it_was() -> None:
    collect_trainings_of_other_tests()
    before = original("run_backward")
    program = Program(LazyLanes)
    program.run(lambda _: None)
    assert original("run_backward") is not before
    del program
    gc.collect()
    assert original("run_backward") is before
