"""Saving and loading streamed weights: from their homes and into them, while copies are under way.

Both runs of a program are on the CPU, as in test_streamed_weights.py.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import pairs
from safetensors.torch import load_file, save_file
from streamed_programs import Program, bits
from streamed_programs import compare as compare_programs
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint


@dataclass(frozen=True)
class BetweenPasses:
    """The model is called right before and after: weights of its next pass are fetched already."""

    use: Callable[[Program], None]

    def __call__(self, program: Program) -> None:
        evaluate(program)
        evaluate(program)
        self.use(program)
        evaluate(program)


def compare(use: Callable[[Program], None], eagerness: float = 0.5, slots: int = 2) -> Program:
    """With weights and optimizer state streamed, and without."""
    return compare_programs(BetweenPasses(use), eagerness, slots=slots, streams_weights=True)


def evaluate(program: Program) -> None:
    with torch.no_grad():
        program.seen.append(program.model(program.batch()))


def fetched(program: Program) -> int:
    """Copies of weights to the device so far, in a run that streams."""
    return 0 if program.weights is None else program.weights.status().counts.fetched


def in_folder(use: Callable[[Program, Path], None]) -> Callable[[Program], None]:
    @wraps(use)
    def in_new_folder(program: Program) -> None:
        with tempfile.TemporaryDirectory() as folder:
            use(program, Path(folder))

    return in_new_folder


@in_folder
def save_safetensors(program: Program, folder: Path) -> None:
    save_file(program.model.state_dict(), folder / "model.safetensors")
    program.seen.append(load_file(folder / "model.safetensors"))


@in_folder
def save_distributed(program: Program, folder: Path) -> None:
    save_checkpoint(program.model.state_dict(), checkpoint_id=folder, no_dist=True)
    found = {name: torch.zeros_like(it) for name, it in program.model.state_dict().items()}
    load_checkpoint(found, checkpoint_id=folder, no_dist=True)
    program.seen.append(found)


@in_folder
def save_distributed_behind_the_training(program: Program, folder: Path) -> None:
    """torch copies the weights first, and writes while the training goes on."""
    saving: Any = async_save(get_model_state_dict(program.model), checkpoint_id=folder)
    program.step()
    saving.result()
    found = {name: torch.zeros_like(it) for name, it in program.model.state_dict().items()}
    load_checkpoint(found, checkpoint_id=folder, no_dist=True)
    program.seen.append(found)


def load(program: Program) -> None:
    program.model.load_state_dict({name: it + 1 for name, it in program.model.state_dict().items()})


def load_set(program: Program) -> None:
    state: dict[str, Any] = dict(get_model_state_dict(program.model))
    set_model_state_dict(program.model, {name: it * 2 for name, it in state.items()})


@in_folder
def load_distributed(program: Program, folder: Path) -> None:
    """Into the tensors of the model's own dictionary."""
    save_checkpoint(program.model.state_dict(), checkpoint_id=folder, no_dist=True)
    program.step()
    load_checkpoint(program.model.state_dict(), checkpoint_id=folder, no_dist=True)


@in_folder
def load_distributed_with_state(program: Program, folder: Path) -> None:
    weights, state = get_state_dict(program.model, program.optimizer)
    before = {"weights": weights, "state": state}
    save_checkpoint(before, checkpoint_id=folder, no_dist=True)
    program.step()
    weights, state = get_state_dict(program.model, program.optimizer)
    load_checkpoint({"weights": weights, "state": state}, checkpoint_id=folder, no_dist=True)
    set_state_dict(
        program.model, program.optimizer, model_state_dict=weights, optim_state_dict=state
    )


SAVES: list[Callable[[Program], None]] = [save_safetensors, save_distributed]
LOADS: list[Callable[[Program], None]] = [load, load_set]
BOTH: list[Callable[[Program], None]] = [
    save_distributed_behind_the_training,
    load_distributed,
    load_distributed_with_state,
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("use", "slots", "eagerness"), pairs([*SAVES, *LOADS, *BOTH], [2, 8], [0.0, 0.8])
)
def test_no_bit_changes_where_checkpoints_are_saved_or_loaded(
    use: Callable[[Program], None], slots: int, eagerness: float
) -> None:
    streamed = compare(use, eagerness, slots)
    assert fetched(streamed) > 8, "it streams before and after"


def addresses(model: Any) -> dict[str, int]:
    return {name: it.data_ptr() for name, it in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("use", [*SAVES, *LOADS])
def test_homes_are_read_and_written_without_the_device(use: Callable[[Program], None]) -> None:
    def watched(program: Program) -> None:
        homes, before = addresses(program.model), fetched(program)
        buffers = 0 if program.is_stock else len(program.memory.buffers)
        use(program)
        assert addresses(program.model) == homes
        assert fetched(program) == before
        assert buffers == (0 if program.is_stock else len(program.memory.buffers))

    compare(watched)


@pytest.mark.slow
def test_a_state_dictionary_has_the_homes_themselves() -> None:
    """Saving a model that is larger than the host's free memory makes no copy of it first."""

    def look(program: Program) -> None:
        homes = addresses(program.model)
        state = program.model.state_dict()
        assert {name: it.data_ptr() for name, it in state.items()} == homes
        program.seen.append(bits(state))

    compare(look)


def test_weights_that_are_assigned_are_used_from_then_on() -> None:
    def assign(program: Program) -> None:
        state = {name: it.clone() - 1 for name, it in program.model.state_dict().items()}
        program.model.load_state_dict(state, assign=True)

    compare(assign)
