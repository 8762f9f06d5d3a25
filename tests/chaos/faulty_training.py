"""Trainings that meet errors at any moment of a step, skip that work and go on."""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from typing import Any

from faults import Fault, Interrupt, OutOfMemory, Signal, came_in_update, mend_torch_modes
from random_training import Pair, RandomProgram, Step, values

from umem.core.errors import PlanError
from umem.streaming.stage import HostLanes

_SMALL = Step(rows=(2,))
"""What the program does where a step has failed."""

_CALLS = 20
"""Of a fault's calls, those that an error names."""


def train_with_faults(
    seed: int, make: type[Interrupt | OutOfMemory | Signal], faults: int
) -> list[str]:
    """Train two programs, of which the streamed one meets faults, and compare all bits.

    The program goes on with a smaller batch, and without the work that has failed. Where an
    optimizer was updating parameters, it loads the state of before, as it had to without umem; and
    where umem refuses to go on, as it may where units are updated in the backward pass.

    Parameters
    ----------
    seed
        Chooses programs, schedule and faults.
    make
        The kind of fault.
    faults
        How many.

    Returns
    -------
    list
        For each fault, what the program did then; behind "refused in " if umem refused to go on.
    """
    in_backward = seed % 4 == 3
    # Work runs when it is queued, as on a GPU it is launched then. A driver's calls are not
    # interrupted, but the code of lazy lanes is.
    lanes = (lambda _: HostLanes()) if issubclass(make, Signal) else None
    pair = Pair(seed, eagerness=1.0, lanes=lanes, in_backward=in_backward)
    # With or without the steps that are watched before updates in the backward pass.
    pair.train(pair.chance.randint(0, 3))
    moments, met = 0, list[str]()
    while len(met) < faults:
        pair.train(pair.chance.randint(0, 2))
        # The first one counts the moments of a step only.
        fault = make(pair.chance.randrange(moments) if moments else sys.maxsize)
        found = _load_with(pair, fault) if pair.chance.random() < 0.1 else _step_with(pair, fault)
        if found:
            met.append(found)
        else:
            moments = max(moments, fault.moments)
        try:
            pair.check()
        except AssertionError as error:
            # A signal comes elsewhere in the next run.
            calls = " < ".join(fault.came_in[:_CALLS]) or "no call"
            raise AssertionError(
                f"{error}, behind {found or 'a step'} and a fault in {calls}"
            ) from error
    return met


def _load_with(pair: Pair, fault: Fault) -> str:
    state = _state(pair.stock)
    try:
        with fault:
            _load(pair.streamed, state)
    except fault.error:
        mend_torch_modes()
        _load(pair.streamed, state)
        return "load"
    return ""


def _step_with(pair: Pair, fault: Fault) -> str:
    stock, streamed = pair.programs
    number, whole = stock.steps, _whole(pair.next_step())
    streamed.plan = stock.plan = whole
    in_update = False
    try:
        with fault:
            streamed.step()
    except fault.error as error:
        mend_torch_modes()
        in_update = came_in_update(error)
    else:
        stock.step()
        return ""
    found, before = streamed.phase, _state(stock)
    try:
        _make_small_step(streamed, number)
    except (PlanError, KeyError):  # torch's own where it found no memory for all of new state
        found = f"refused in {found}"
        _load(streamed, before)
        _make_small_step(streamed, number)
    else:
        if in_update:  # some parameters are updated, and others are not
            _load(streamed, before)
            _make_small_step(streamed, number)
    _make_small_step(stock, number)
    if fault.may_come_late and values(streamed) != values(stock):
        _load(stock, before)
        stock.plan, stock.steps = whole, number
        stock.step()
        _make_small_step(stock, number)
    return found


def _whole(step: Step) -> Step:
    """What leaves nothing of an earlier step, and nothing behind if it fails."""
    return replace(step, learning_rate=None, resident=None, zeroes_first=True)


def _make_small_step(program: RandomProgram, number: int) -> None:
    """What the program does where a step has failed."""
    program.plan, program.steps = _SMALL, number
    program.seen.clear()
    program.step()


def _state(program: RandomProgram) -> tuple[Any, Any]:
    return copy.deepcopy((program.model.state_dict(), program.optimizer.state_dict()))


def _load(program: RandomProgram, state: tuple[Any, Any]) -> None:
    program.model.load_state_dict(state[0])
    program.optimizer.load_state_dict(copy.deepcopy(state[1]))
