"""What all commands and trainings of the campaign import, and what they have compiled."""

from __future__ import annotations

from training_program import TrainedProgram
from umem_bench.compile_planner import compile_planner

from umem.__main__ import main
from umem.cli import plan, run, simulate

__all__ = ["main", "plan", "run", "simulate"]

compile_planner()
TrainedProgram(None).optimizer.zero_grad()  # imports the compiler, which takes seconds
