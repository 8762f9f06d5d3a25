"""Gradients that leave for host memory in the backward pass: no bit changes, and memory is free.

Both runs of a program are on the CPU. The copies run late, or at random moments, and homes begin as
NaN, so that a gradient that is used too early, or from the wrong place, shows in the values.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pairs import pairs
from streamed_programs import BACK, EAGERNESS, UNITS, WIDTH, Net, Program, begin, compare
from streamed_uses import backward_twice, differentiate_twice
from torch import nn
from torch.utils.checkpoint import checkpoint

LAST = frozenset(["layers.3", "norm", "head"])


def accumulate(program: Program) -> None:
    """Two batches, the second behind a look at a gradient."""
    program.optimizer.zero_grad()
    program.backward()
    program.seen.append(program.model.layers[3].weight.grad.clone())
    program.backward()


def write_past_versions(program: Program) -> None:
    """`data` has no version: autograd does not notice."""
    program.optimizer.zero_grad()
    program.backward()
    for parameter in program.model.parameters():
        parameter.grad.data.mul_(0.5)
    program.optimizer.step()


def write_in_a_hook(program: Program) -> None:
    """A hook of the program changes gradients while their copies are under way."""

    def halve(parameter: nn.Parameter) -> None:
        last = program.model.head.weight.grad
        for gradient in (parameter.grad, last):
            if gradient is not None:
                gradient.data.mul_(0.5)

    if program.is_first("hook"):
        program.model.layers[0].weight.register_post_accumulate_grad_hook(halve)
        program.model.layers[3].weight.register_post_accumulate_grad_hook(halve)


def keep_gradients(program: Program) -> None:
    """What the program keeps of a step stays as it was when later steps use the memory."""
    kept = [it.grad for it in program.model.parameters()]
    program.optimizer.zero_grad(set_to_none=True)
    program.step()
    program.seen.append([it.clone() for it in kept])


def keep_views(program: Program) -> None:
    """Views of gradients whose copies are under way stay views of them."""
    program.optimizer.zero_grad()
    views: dict[str, torch.Tensor] = {}

    def look(name: str, parameter: nn.Parameter) -> None:
        gradient: Any = parameter.grad
        views[name] = gradient[:1]

    handles = [
        program.model.get_parameter(name).register_post_accumulate_grad_hook(
            lambda it, name=name: look(name, it)
        )
        for name in ("head.weight", "layers.3.weight", "stem.weight")
    ]
    program.backward()
    for handle in handles:
        handle.remove()
    for name, view in views.items():
        view.mul_(2.0)
        program.seen.append(program.model.get_parameter(name).grad.clone())
    program.optimizer.step()


EARLY = [accumulate, write_past_versions, write_in_a_hook, backward_twice, keep_gradients]
EARLY += [keep_views, differentiate_twice]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize(
    ("change", "copied", "eagerness", "returning"),
    pairs(EARLY, [UNITS, LAST], EAGERNESS, [{}, BACK]),
)
def test_no_bit_changes_where_gradients_are_used_early(
    change: Callable[[Program], None],
    copied: frozenset[str],
    eagerness: float,
    returning: dict[str, str],
) -> None:
    compare(change, eagerness, copied_gradients=copied, returning=returning)


class CalledAgain(Net):
    """A block before and behind the others, in checkpoints that go backward by themselves."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in (1, 0, 1):
            called: Any = checkpoint(self.layers[number], x + self.scale, use_reentrant=True)
            x = torch.tanh(called)
        return x


def test_autograd_adds_to_a_gradient_whose_copy_is_under_way() -> None:
    for eagerness in (0.0, 0.8):
        compare(make_model=CalledAgain, copied_gradients=UNITS, returning=BACK, eagerness=eagerness)


def copying(copied: frozenset[str], **options: Any) -> Any:
    program = begin(1, copied_gradients=copied, clips=False, **options)
    program.optimizer.zero_grad()
    return program


def homes(program: Any) -> list[str]:
    """Parameters whose gradients have the host's memory."""
    return [
        name
        for name, it in program.model.named_parameters()
        if it.grad is not None and program.memory.was_sent_home(it.grad)
    ]


@pytest.mark.slow
def test_gradients_of_chosen_units_are_on_the_host_and_free_the_device() -> None:
    program = copying(LAST)
    storages: dict[str, Any] = {}
    gone: list[str] = []

    def note(name: str, parameter: nn.Parameter) -> None:
        gradient: Any = parameter.grad
        storages[name] = weakref.ref(gradient.untyped_storage())
        gc.collect()
        gone[:] = [it for it, storage in storages.items() if storage() is None]

    for name in ("head.weight", "layers.3.weight", "layers.0.weight"):
        parameter = program.model.get_parameter(name)
        parameter.register_post_accumulate_grad_hook(lambda it, name=name: note(name, it))
    program.backward()
    # Two units behind the last one that leaves, all have left.
    assert {"head.weight", "layers.3.weight"} <= set(homes(program))
    assert set(gone) >= {"head.weight", "layers.3.weight"}
    assert "layers.0.weight" not in homes(program)


def added_to_at_home(program: Any, names: list[str]) -> dict[str, list[bool]]:
    """For each backward pass, whether autograd has just added to a gradient in host memory."""
    found: dict[str, list[bool]] = {name: [] for name in names}
    for name in names:
        parameter = program.model.get_parameter(name)
        parameter.register_post_accumulate_grad_hook(
            lambda it, name=name: found[name].append(program.memory.was_sent_home(it.grad))
        )
    return found


def test_gradients_come_back_for_later_batches_and_leave_again() -> None:
    program = copying(UNITS, batches=3)
    weights = [f"{name}.weight" for name in ("head", "layers.3", "layers.1", "layers.0", "stem")]
    at_home = added_to_at_home(program, weights)
    before = None
    for _ in range(3):
        program.backward()
        program.training.gradients.settle()
        gradient = program.model.head.weight.grad
        assert before is None or gradient is before
        before = gradient
        assert set(weights) <= set(homes(program))
    assert at_home == {name: [False] * 3 for name in weights}


def test_gradients_that_have_no_room_for_a_later_batch_are_added_to_on_the_host() -> None:
    program = copying(LAST, batches=2)
    at_home = added_to_at_home(program, ["head.weight"])
    program.backward()
    program.memory.new_on_device = lambda *_: None
    program.backward()
    assert at_home == {"head.weight": [False, True]}


def test_some_leave_in_the_last_batch_only_and_some_stay_behind_it() -> None:
    program = copying(
        LAST, returning={"layers.3": "layers.3"}, batches=3, final_gradients=frozenset(["head"])
    )
    found = []
    for _ in range(3):
        program.backward()
        program.training.gradients.settle()
        found.append([it for it in ("head.weight", "layers.3.weight") if it in homes(program)])
    assert found == [["layers.3.weight"], ["layers.3.weight"], ["head.weight"]]


@pytest.mark.parametrize("batches", [1, 2])
def test_gradients_are_back_on_the_device_when_the_step_begins(batches: int) -> None:
    returning = {"head": "layers.1", "layers.3": "layers.0"}
    program = copying(UNITS, returning=returning, batches=batches)
    found = []
    for _ in range(batches):
        program.backward()
        program.training.gradients.settle()
        found.append(set(homes(program)))
    back = {"head.weight", "layers.3.weight"}
    assert all(back <= it for it in found[:-1])  # only the last batch needs them no more
    assert not back & found[-1]
    assert "layers.2.weight" in found[-1]  # it has no unit to come back in
    assert program.model.head.weight.grad.isfinite().all()


def test_gradients_without_room_on_the_device_stay_on_the_host() -> None:
    program = copying(LAST, returning={"head": "layers.1"})
    program.memory.new_on_device = lambda *_: None
    program.backward()
    assert "head.weight" in homes(program)


def test_small_gradients_stay() -> None:
    program = copying(UNITS)
    program.backward()
    program.training.join()
    small = {name for name, it in program.model.named_parameters() if it.nbytes < 64}
    assert small
    assert not small & set(homes(program))
    sizes = program.training.gradients.sizes()
    assert sizes["layers.0"] == 4 * (WIDTH * WIDTH + WIDTH)
    assert sizes["head"] == 4 * 4 * WIDTH


def test_no_unit_is_copied_any_more_behind_close() -> None:
    program = copying(UNITS)
    program.training.close()
    program.backward()
    assert homes(program) == []


def test_an_error_ends_the_copies_only(caplog: pytest.LogCaptureFixture) -> None:
    program = copying(UNITS)

    def fail(*_: object) -> Any:
        raise MemoryError("no page-locked memory")

    program.memory.new_home = fail
    program.backward()
    assert "no page-locked memory" in caplog.text
    assert homes(program) == []
    program.optimizer.step()
    program.step()
