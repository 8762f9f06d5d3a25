"""Memory whose address a program keeps stays where it is, and the values are right there.

Programs read and write at addresses past torch, right after a step, with lanes that run as late as
the waits allow.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from lazy_lanes import LazyLanes
from pairs import pairs
from streamed_programs import UNITS, Net, NetWithFlat, Program, begin, compare
from torch import nn

import umem
from umem.core.errors import PlanError
from umem.runtime.aliases import has_alias
from umem.runtime.held_memory import is_held, note_export
from umem.runtime.unguarded import Unguarded
from umem.streaming.step import TemporaryPlan

pytestmark = pytest.mark.slow

address_of = torch.Tensor.data_ptr  # as it is while no guard waits at this attribute

Place = tuple[int, int]
"""An address, and a number of float32."""


def weights(program: Program) -> list[torch.Tensor]:
    return list(program.model.parameters())


def gradients(program: Program) -> list[torch.Tensor]:
    return [it.grad for it in program.model.parameters() if it.grad is not None]


def moments(program: Program) -> list[torch.Tensor]:
    return [values["exp_avg"] for values in program.optimizer.state.values()]


def places(tensors: Iterable[torch.Tensor]) -> list[Place]:
    """Where tensors are, which is no use of them."""
    with Unguarded():
        return [(address_of(it), it.numel()) for it in tensors]


def array(place: Place) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.ctypeslib.as_array((ctypes.c_float * place[1]).from_address(place[0]))


def read(found: list[Place]) -> list[bytes]:
    return [array(it).tobytes() for it in found]


def halve(found: list[Place]) -> None:
    for it in found:
        array(it)[:] *= np.float32(0.5)


def keep_by_hold(tensors: list[torch.Tensor]) -> Any:
    return umem.hold(tensors)


def keep_storages(tensors: list[torch.Tensor]) -> Any:
    return [it.untyped_storage() for it in tensors]


def keep_capsules(tensors: list[torch.Tensor]) -> Any:
    """An export, as whatever waits before memory leaves torch notes it."""
    capsules = [it.detach().__dlpack__() for it in tensors]
    note_export(tensors)
    return capsules


WAYS = [keep_by_hold, keep_storages, keep_capsules]
PROGRAMS: dict[str, dict[str, Any]] = {
    "late": {},
    "random": {"eagerness": 0.8},
    "in spans": {"make_model": NetWithFlat},
    "all in slots": {"slots": 8},
    "no slots": {"most_buffers": 0},
    "partly resident": {"resident": frozenset(("layers.1", "head"))},
    "weights": {"streams_weights": True},
    "weights and gradients": {"streams_weights": True, "copied_gradients": UNITS},
    "batches": {"copied_gradients": UNITS, "returning": {"head": "layers.1"}, "batches": 2},
    "in backward": {"in_backward": True, "clips": False, "steps": 6},
    "temporary slots": {
        "temporary": TemporaryPlan(("layers.3", "layers.3"), ("layers.2", "layers.2"))
    },
}


@pytest.mark.parametrize(("way", "of", "name"), pairs(WAYS, [weights, moments], [*PROGRAMS]))
def test_kept_addresses_have_stocks_values_after_each_step(
    way: Callable[[list[torch.Tensor]], Any], of: Callable[[Program], list[torch.Tensor]], name: str
) -> None:
    def change(run: Program) -> None:
        if run.kept is None:
            some = of(run)[1::2]  # others of the same unit go on as they are
            run.kept = way(some), places(some)
        run.seen.append(read(run.kept[1]))
        halve(run.kept[1])
        run.seen.append(read(run.kept[1]))

    run = compare(change, **PROGRAMS[name])
    assert run.training.counts.in_line == 0
    assert places(of(run)[1::2]) == run.kept[1]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("program", [{}, {"copied_gradients": UNITS}, {"streams_weights": True}])
def test_gradients_may_be_written_at_their_addresses_after_a_step(
    way: Callable[[list[torch.Tensor]], Any], program: dict[str, Any]
) -> None:
    def change(run: Program) -> None:
        for it in gradients(run):
            it.zero_()
        kept = way(gradients(run))
        found = places(gradients(run))
        run.backward()
        halve(found)
        run.seen.append(read(found))
        run.optimizer.step()
        run.seen.append(read(found))
        halve(found)
        run.backward()  # adds to them
        run.seen.append(read(found))
        run.optimizer.step()
        halve(found)
        del kept

    compare(change, **program)


@pytest.mark.parametrize("of", [weights, moments, gradients])
@pytest.mark.parametrize("name", PROGRAMS)
def test_join_leaves_all_at_home(of: Callable[[Program], list[torch.Tensor]], name: str) -> None:
    def change(run: Program) -> None:
        umem.join()
        some = of(run)
        if not run.in_backward or of is not gradients:  # an update takes those away
            run.seen.append(read(places(some)))
            halve(places(some))
            run.seen.append([it.clone() for it in some])

    run = compare(change, **PROGRAMS[name])
    assert run.training.counts.streamed > 0


def test_join_leaves_copies_that_were_fetched_ahead() -> None:
    """State that the program changes past torch amid a step, after a join."""

    def change(run: Program) -> None:
        run.optimizer.zero_grad()
        loss = run.model(run.batch()).square().mean()  # its end fetches state for the next step
        umem.join()
        halve(places(moments(run)))
        loss.backward()
        run.optimizer.step()

    compare(change, slots=8)


class Exporting(nn.Linear):
    """Exports its weight in a call, and changes it at that address in each later one."""

    calls = 0
    place: Place | None = None
    has_moved = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = super().forward(x)
        if self.calls == 3:
            before = places([self.weight])
            note_export(self.weight)
            (self.place,) = places([self.weight])
            self.has_moved = [self.place] != before
        elif self.place is not None:
            halve([self.place])
        return y + super().forward(x)


class Exports(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = Exporting(16, 16)


def test_a_weight_that_is_exported_in_its_own_block_gets_its_home_back() -> None:
    def change(run: Program) -> None:
        place = run.model.layers[1].place
        run.seen.append(None if place is None else read([place]))

    run = compare(change, make_model=Exports, streams_weights=True)
    assert run.model.layers[1].has_moved


def test_released_memory_moves_and_is_deferred_again() -> None:
    run = begin(1)
    counts = run.training.counts
    assert counts.waited == 0
    with umem.hold(run.optimizer):
        run.step()
        waited = counts.waited
        assert waited > 0
        assert run.lazy.open_tasks == 0
        assert all(map(is_held, (*weights(run), *moments(run))))
    assert not any(map(is_held, (*weights(run), *moments(run))))
    run.step()
    run.step()
    assert counts.waited == waited
    assert run.lazy.open_tasks > 0
    run.training.step.units.set_plan(UNITS, 2)
    before = places(moments(run))
    run.step()
    assert places(moments(run)) != before
    run.training.close()


@pytest.mark.parametrize("copied", [frozenset[str](), UNITS])
def test_what_a_captured_step_uses_stays(copied: frozenset[str]) -> None:
    """Replays use the addresses of the capture, of gradients that were added in it too."""
    run = begin(1, clips=False, copied_gradients=copied)
    run.lazy.captures = True
    run.optimizer.zero_grad()
    run.backward()
    if copied:
        assert all(map(is_held, gradients(run)))
    run.optimizer.step()
    run.lazy.captures = False
    every = [*weights(run), *gradients(run), *moments(run)]
    assert all(map(is_held, every))
    before = places(every)
    run.training.step.units.set_plan(UNITS, 2)
    run.backward()
    run.optimizer.step()
    umem.join()
    assert places(every) == before
    run.training.close()


def test_state_that_is_read_in_a_capture_stays() -> None:
    run = begin(1, clips=False)
    run.lazy.captures = True
    sum(it.sum() for it in moments(run))
    run.lazy.captures = False
    assert all(is_held(it) for it in moments(run) if run.memory.may_stage(it))  # others never move
    assert not any(map(is_held, weights(run)))
    run.training.close()


def test_held_state_stays_at_home_where_a_plan_has_it_on_the_device() -> None:
    def change(run: Program) -> None:
        if run.kept is None:
            run.kept = umem.hold(run.optimizer.state), places(moments(run))
            if run.training is not None:
                run.training.step.units.set_plan(UNITS, 2)
        run.seen.append(read(run.kept[1]))

    run = compare(change, steps=4)
    assert places(moments(run)) == run.kept[1]


def test_a_hold_keeps_no_memory_and_never_stands_for_other_memory() -> None:
    tensor = torch.zeros(1 << 16)
    kept = umem.hold(tensor)
    note_export(tensor)
    alive = tensor.untyped_storage()._weak_ref()
    assert is_held(tensor)
    assert is_held(tensor.view(2, -1)[1])
    del tensor
    gc.collect()
    assert torch.UntypedStorage._expired(alive)
    torch.UntypedStorage._free_weak_ref(alive)
    kept.release()
    for _ in range(100):
        note_export(torch.zeros(4))
        assert not is_held(torch.zeros(4))  # its storage has the same address, if it may


def test_holds_count() -> None:
    tensor = torch.zeros(4)
    first, second = umem.hold([tensor, tensor]), umem.hold({"a": (tensor,)})
    first.release()
    first.release()
    assert is_held(tensor)
    second.release()
    assert not is_held(tensor)
    with umem.hold(iter([tensor])):
        note_export(tensor)
    assert is_held(tensor)  # another library has the address still


def test_entries_of_memory_that_is_gone_go() -> None:
    for _ in range(2000):
        note_export(torch.zeros(1))
    from umem.runtime import held_memory

    assert len(held_memory._held) < 1000


def test_everything_in_a_module_and_an_optimizer_is_held() -> None:
    model = nn.BatchNorm1d(4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 4)).square().sum().backward()
    optimizer.step()
    state = [it for values in optimizer.state.values() for it in values.values()]
    grads = [it.grad for it in model.parameters()]
    with umem.hold(model):
        assert all(map(is_held, (*model.parameters(), *model.buffers())))
        assert not any(map(is_held, (*grads, *state)))
    with umem.hold(optimizer):
        assert all(map(is_held, (*model.parameters(), *grads, *state)))
        assert not any(map(is_held, model.buffers()))


@pytest.mark.parametrize("value", [3, "weights", None, torch.zeros(1).untyped_storage()])
def test_what_is_no_tensor_is_refused(value: object) -> None:
    tensor = torch.zeros(1)
    with pytest.raises(TypeError, match=rf"tensors: got {type(value).__name__}.*give the tensor"):
        umem.hold([tensor, value])
    assert not is_held(tensor)


@pytest.mark.parametrize("with_objects", [(), (0,), (0, 1)])
def test_a_storages_object_that_the_program_keeps_is_an_alias(with_objects: list[int]) -> None:
    tensors = [torch.zeros(4), nn.Parameter(torch.zeros(4))]
    for number in with_objects:
        tensors[number].untyped_storage()
    for tensor in tensors:
        assert not has_alias(tensors)
        kept = tensor.untyped_storage()
        assert has_alias(tensors)
        assert has_alias([tensor])
        del kept
        assert not has_alias(tensors)


def test_nothing_is_held_between_an_update_in_the_backward_pass_and_the_step() -> None:
    run = Program(LazyLanes, in_backward=True, clips=False)
    run.step()
    run.stream()
    for _ in range(4):
        run.step()
    run.optimizer.zero_grad()
    run.backward()
    with pytest.raises(PlanError, match=r"optimizer\.step\(\)"):
        umem.hold(run.model)
    run.optimizer.step()
    assert not any(map(is_held, weights(run)))
    with umem.hold(run.model):
        run.step()
    run.training.close()
