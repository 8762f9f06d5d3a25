"""What becomes of managed models that the program captures into CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from umem.streaming.training import join, streamed_trainings
from umem.streaming.weights.managed_models import managed_weights

__all__ = ["graphing_begins"]


def graphing_begins(_modules: Sequence[nn.Module]) -> None:
    """Make parameters and buffers stay where they are, which a graph reads there without a hook.

    Updates are waited for, now and at the end of each later step: blocks within a graph are not
    called any more, and nothing else waits for their updates. Weights are streamed no more; those
    in host memory are read there.
    """
    join()
    for training in streamed_trainings():
        training.let_graphs_read()
    for weights in managed_weights():
        weights.let_graphs_read()
