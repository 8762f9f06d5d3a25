"""A training with streamed state on the CPU, which answers `umem top` and steps at commands.

Started by tests as a program: each line of standard input is a step.
"""

from __future__ import annotations

import sys

import torch
from lazy_lanes import HostStateMemory, LazyLanes
from streamed_programs import WIDTH, Net

from umem.cli.run_end import end_lines
from umem.runtime.live_figures import live_figures
from umem.runtime.live_socket import serve
from umem.streaming import StreamedTraining

if __name__ == "__main__":
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    training = StreamedTraining(model, optimizer, LazyLanes(model, 0.5, 1), HostStateMemory(1024))
    serve(live_figures)
    print("ready", flush=True)
    for _ in sys.stdin:
        optimizer.zero_grad()
        model(torch.randn(3, WIDTH)).square().mean().backward()
        optimizer.step()
        print("stepped", flush=True)
    print(*end_lines(), sep="\n")
