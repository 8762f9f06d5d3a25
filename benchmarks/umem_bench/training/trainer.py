"""The `Trainer` of transformers with its defaults, whose steps are taken one by one."""

from __future__ import annotations

import tempfile
import threading
from queue import SimpleQueue
from typing import Any

import torch

from umem import UmemError
from umem_bench.llama import SEED
from umem_bench.results import LlamaShape

__all__ = ["SteppedTrainer"]

_OTHER_STEPS = 100
"""Steps at most beside the timed ones: warm-up, a profile, and those whose losses are kept."""


class SteppedTrainer:
    """A `Trainer` in a thread of its own, which waits at the end of each step.

    A `Trainer` calls the loop, and cannot be called step by step. Waiting in its own callback lets
    its steps be warmed up, timed and profiled as those of every other loop.

    Parameters
    ----------
    network
        A causal language model of transformers.
    shape
        Its batches. Float32 weights are trained under autocast to bfloat16.
    batches
        That are accumulated for a step.
    timed_steps
        That will be measured, for the length of the training.
    """

    def __init__(self, network: Any, shape: LlamaShape, batches: int, timed_steps: int) -> None:
        from transformers import Trainer, TrainerCallback, TrainingArguments

        steps = _OTHER_STEPS + timed_steps
        generator = torch.Generator().manual_seed(SEED)
        size = (shape.batch * batches * steps, shape.tokens)
        tokens = torch.randint(shape.vocabulary, size, generator=generator)
        arguments = TrainingArguments(
            output_dir=tempfile.gettempdir(),  # nothing is written there
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            max_steps=steps,
            per_device_train_batch_size=shape.batch,
            gradient_accumulation_steps=batches,
            bf16=shape.weights == "float32",
            use_cpu=network.device.type == "cpu",
        )
        losses: list[torch.Tensor] = []
        asked: SimpleQueue[bool] = SimpleQueue()
        ended: SimpleQueue[BaseException | None] = SimpleQueue()

        class WithLosses(Trainer):
            def training_step(self, *given: Any, **named: Any) -> torch.Tensor:
                losses.append(super().training_step(*given, **named))
                return losses[-1]

        class Wait(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                ended.put(None)
                control.should_training_stop = not asked.get()

        def train() -> None:
            try:
                if asked.get():
                    trainer.train()
                ended.put(UmemError(f"the Trainer has ended after {steps} steps"))
            except BaseException as error:  # raised again by the thread that measures
                ended.put(error)

        trainer = WithLosses(
            network,
            arguments,
            train_dataset=[{"input_ids": it, "labels": it} for it in tokens],
            callbacks=[Wait()],
        )
        self._losses, self._asked, self._ended = losses, asked, ended
        self._thread = threading.Thread(target=train, name="Trainer", daemon=True)
        self._thread.start()

    def step(self) -> torch.Tensor:
        """Train one step and return the mean loss of its tokens; raises what the Trainer raises."""
        self._losses.clear()
        self._asked.put(True)
        error = self._ended.get()
        if error is not None:
            raise error
        return torch.stack(self._losses).sum()  # each is its batch's share of the mean

    def close(self) -> None:
        """End the training."""
        self._asked.put(False)
        self._thread.join()
