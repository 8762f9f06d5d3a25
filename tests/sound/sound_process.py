"""Runs one program in this process: ``sound_process.py NAME VARIANT RESULT LOCK [PCI_ADDRESS]``.

The variants are ``stock``, which trains twice, ``umem`` on a GPU, and ``late`` on the CPU's late
lanes. What came of it is written to RESULT as JSON, also where the program fails.
"""

from __future__ import annotations

import contextlib
import json
import logging.handlers
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from drawn_readers import readers_program
from small_trainings import DEVICE_SIZE, HOST_SIZE, Program, Run
from sound_programs import PROGRAMS
from umem_bench.card_processes import find_own_number

_MOST_WARNINGS, _MOST_LETTERS = 6, 300


class UmemRun(Run):
    """A run on a GPU under umem, which has been enabled."""

    is_umem = True

    def __init__(self) -> None:
        super().__init__(DEVICE_SIZE, "cuda")
        self.deferred_steps = 0
        """Steps whose updates were queued."""
        self.away_steps = 0
        """Steps in which weights came from the host, or were read there."""
        self._streamed = self._away = 0

    def step_ended(self) -> None:
        """Count."""
        from umem.streaming import streamed_trainings
        from umem.streaming.weights import weights_of

        streamed = sum(training.counts.streamed for training in streamed_trainings())
        self.deferred_steps += streamed > self._streamed
        managed = [its for model, _ in self.trained if (its := weights_of(model)) is not None]
        counts = [its.streamed.counts for its in managed]
        away = sum(each.fetched + each.in_place + each.experts_in_place for each in counts)
        self.away_steps += away > self._away
        self._streamed, self._away = streamed, away


def named_program(name: str) -> Program:
    """A program of the table, or one of drawn readers: ``readers:OPTIMIZER:SEED:STEPS``."""
    if name.startswith("readers:"):
        return readers_program(name)
    return PROGRAMS[name]


def _train(program: Program, run: Run, told: dict[str, Any], name: str) -> None:
    """Run a program, and tell its records; where it fails, the step."""
    told["failed_step"] = None
    try:
        program.train(run)
    except BaseException:
        told["failed_step"] = run.step
        raise
    told[name] = run.results()


def _stock(program: Program, told: dict[str, Any], device: str) -> None:
    for name in ("records", "again"):
        size = DEVICE_SIZE if device == "cuda" else HOST_SIZE
        _train(program, Run(size, device), told, name)
        if device == "cuda" and name == "records":
            told["peak_bytes"] = torch.cuda.max_memory_allocated()
    if device == "cuda":
        told["reserved_bytes"] = torch.cuda.max_memory_reserved()


def _umem(program: Program, told: dict[str, Any]) -> None:
    run = UmemRun()
    try:
        _train(program, run, told, "records")
    finally:
        told |= {"deferred_steps": run.deferred_steps, "away_steps": run.away_steps}


def _late(program: Program, told: dict[str, Any]) -> None:
    from late_runs import LateRun

    run = LateRun()
    try:
        _train(program, run, told, "records")
    finally:
        told["deferred_steps"] = run.active


def main() -> None:
    """Run what the command line names."""
    name, variant, result, lock, *address = sys.argv[1:]
    told: dict[str, Any] = {}
    device = "cuda" if address else "cpu"
    log = logging.handlers.BufferingHandler(1 << 20)
    logging.getLogger("umem").addHandler(log)
    logging.getLogger("umem").setLevel(logging.WARNING)
    try:
        torch.use_deterministic_algorithms(True)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        number: contextlib.AbstractContextManager[list[int]] = contextlib.nullcontext([])
        if address:
            number = find_own_number(address[0], Path(lock))
        with number as found:
            if variant == "umem":
                import umem

                assert umem.enable("sft")
            torch.zeros(1, device=device)
        told["number"] = found[0] if found else None
        program = named_program(name)
        if variant == "stock":
            _stock(program, told, device)
        elif variant == "umem":
            _umem(program, told)
        else:
            _late(program, told)
    except BaseException as error:
        told["error"] = f"{type(error).__name__}: {error}"[: 4 * _MOST_LETTERS]
        told["error_module"] = type(error).__module__
        told["trace"] = traceback.format_exc()[-8 * _MOST_LETTERS :]
    told["warnings"] = list(
        dict.fromkeys(record.getMessage()[:_MOST_LETTERS] for record in log.buffer)
    )[:_MOST_WARNINGS]
    Path(result).write_text(json.dumps(told))
    sys.stdout.flush()
    os._exit(0)  # the end of the interpreter is another matter


if __name__ == "__main__":
    main()
