"""Ends a process in the middle of a managed training: ``ending.py exit|fork|raise``."""

from __future__ import annotations

import os
import sys
import warnings

import torch
from managed_training import MIB, Training


def main(how: str) -> None:
    training = Training()
    # A hint of 2 MiB takes a twentieth of a second: some are always under way.
    manager = training.manage("lookahead", 34 * MIB, bytes_per_s=40e6)
    training.steps(8)
    assert manager.status().state == "running"
    training.forward().backward()
    assert manager.engine.statistics().open_requests
    if how == "raise":
        raise SystemExit(3)
    if how == "fork":
        fork(training)
        training.optimizer.step()
        training.steps(1)
        print(manager.status().state, manager.status().diverged_steps)


def fork(training: Training) -> None:
    warnings.filterwarnings("ignore", "This process", DeprecationWarning)
    child = os.fork()
    if child == 0:
        with torch.no_grad():
            training.model(training.batch())
        sys.exit(0)  # and not os._exit: what Python does at the end of a process is done
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


if __name__ == "__main__":
    main(sys.argv[1])
