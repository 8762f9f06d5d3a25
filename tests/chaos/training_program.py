"""A training that writes files: ``training_program.py STEPS TRACE FOLDER``, ended at any time.

On the CPU it streams state and weights on :class:`HostLanes`, on a GPU as ``umem run``
does. The first line says that it has begun, the last one is a checksum.
"""

from __future__ import annotations

import os
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from streamed_programs import Program, bits

from umem.capture.offline.trace_cache import cache_trace
from umem.io.files import replace_file
from umem.streaming.stage import HostLanes
from umem.trace import load_trace

CHECKPOINT_BYTES = 1 << 20


class TrainedProgram(Program):
    """Trains where its model is."""

    def batch(self) -> torch.Tensor:
        """The next batch."""
        return super().batch().to(self.model.scale.device)


def main(steps: int, trace_file: str, folder: str) -> None:
    print("begun", flush=True)
    is_stock = "STOCK" in os.environ
    lanes: Any = None if is_stock else lambda _: HostLanes()
    program = TrainedProgram(lanes, streams_weights=True)
    trace = load_trace(trace_file)
    program.step()
    if torch.cuda.is_available():
        program.model.cuda()
        program.optimizer = program.make_optimizer(program.model.parameters())
    else:
        program.stream()
    for step in range(steps):
        program.step()
        with torch.no_grad():
            program.seen.append(program.model(program.batch()))
        if not is_stock and step % 3 == 0:
            replace_file(Path(folder) / "checkpoint", bytes([step % 256]) * CHECKPOINT_BYTES)
            cache_trace(trace, {"step": step % 8})
    weights = [it.detach().cpu() for it in program.model.parameters()]
    print(zlib.crc32(repr(bits([*(it.cpu() for it in program.seen[-2:]), *weights])).encode()))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
