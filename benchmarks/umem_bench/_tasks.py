"""The measured work of a worker: allocations, and training steps of a small Llama."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from umem_bench._allocators import peaks, reset_peaks
from umem_bench._timing import loops_for, no_garbage_collection, time_loops_s
from umem_bench.jobs import ALLOC_CASES, SIZES, Answer, Job, LlamaSize, Mode, step_case

__all__ = ["AllocTask", "StepTask", "Task"]

ALLOC_CASE_S = 0.1
"""Time for one case in one round; RMM without a pool needs it to make a few hundred pairs."""

WARM_SHARE = 0.5
"""Passes before a case is timed, as a share of those that are."""

CHECKED_STEPS = 3
"""Steps under deterministic algorithms, whose loss is compared."""

WARM_STEPS = 3
TIMED_STEPS = 20
MIN_TIMED_STEPS = 3
STEPS_ROUND_S = 1.0
"""A round ends here with fewer steps: RMM without a pool takes some 20 times as long for one."""

QUICK_FACTOR = 0.3

LORA_TARGETS = ["q_proj", "v_proj"]


class Task(Protocol):
    """Work that a worker prepares once, measures round by round, and then accounts for."""

    def round(self) -> Answer:
        """Measure once; times in seconds."""

    def finish(self) -> Answer:
        """What there is to say after the last round."""


class AllocTask:
    """Allocate through torch and let go, one block after the other."""

    def __init__(self, job: Job) -> None:
        case_s = ALLOC_CASE_S * (QUICK_FACTOR if job.quick else 1)
        self._loops: dict[str, tuple[Callable[[int], None], int, int]] = {}
        for case in ALLOC_CASES:
            loop = _alloc_loop(case.size_bytes)
            self._loops[case.name] = (loop, loops_for(loop, case_s, case.threads), case.threads)

    def round(self) -> Answer:
        """Time of one allocation and its free, for every case."""
        times_s = {}
        for name, (loop, loops, threads) in self._loops.items():
            # The process has waited for the others' turns: its core and caches come up again.
            loop(max(1, round(loops * WARM_SHARE)))
            times_s[name] = time_loops_s(loop, loops, threads)
        return Answer(times_s=times_s)

    def finish(self) -> Answer:
        """Nothing beyond the times."""
        return Answer()


class StepTask:
    """Train a Llama on one batch, over and over."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._factor = QUICK_FACTOR if job.quick else 1
        size = SIZES[job.size]
        torch.manual_seed(0)
        self._model = _build_llama(size, job.mode, torch.device("cuda"))
        weights = [weight for weight in self._model.parameters() if weight.requires_grad]
        self._optimizer = torch.optim.AdamW(weights, lr=1e-4, fused=True)
        shape = (size.batch, size.tokens)
        self._batch = torch.randint(0, size.vocabulary, shape, device="cuda")

        # The fused attention kernels have no deterministic backward on every GPU; the plain one
        # has, and takes so much memory that it sees one sequence only.
        torch.use_deterministic_algorithms(True)
        with sdpa_kernel(SDPBackend.MATH):
            for _ in range(CHECKED_STEPS):
                loss = self._step(self._batch[:1])
        self._loss_hex = float(loss).hex()
        # The timed steps are ordinary ones, and start with no blocks left over from these.
        torch.use_deterministic_algorithms(False)
        del loss
        torch.cuda.empty_cache()
        reset_peaks(job.allocator)
        for _ in range(WARM_STEPS):
            self._step(self._batch)
        torch.cuda.synchronize()

    def round(self) -> Answer:
        """Median time of the round's steps."""
        steps = max(MIN_TIMED_STEPS, round(TIMED_STEPS * self._factor))
        end_s = time.perf_counter() + STEPS_ROUND_S * self._factor
        self._step(self._batch)  # the GPU's clocks come up again after other workers' turns
        torch.cuda.synchronize()
        times_s: list[float] = []
        with no_garbage_collection():
            while len(times_s) < MIN_TIMED_STEPS or (
                len(times_s) < steps and time.perf_counter() < end_s
            ):
                start_s = time.perf_counter()
                self._step(self._batch)
                torch.cuda.synchronize()
                times_s.append(time.perf_counter() - start_s)
        case = step_case(self._job.mode, self._job.size)
        return Answer(times_s={case: statistics.median(times_s)})

    def finish(self) -> Answer:
        """Peaks of the ordinary steps, and the loss of the deterministic ones."""
        reserved_bytes, allocated_bytes = peaks(self._job.allocator)
        return Answer(
            peak_reserved_bytes=reserved_bytes,
            peak_allocated_bytes=allocated_bytes,
            loss_hex=self._loss_hex,
        )

    def _step(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self._model(input_ids=batch, labels=batch).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def _alloc_loop(size_bytes: int) -> Callable[[int], None]:
    device = torch.device("cuda", 0)

    def loop(passes: int) -> None:
        empty, dtype = torch.empty, torch.uint8
        for _ in itertools.repeat(None, passes):
            empty(size_bytes, dtype=dtype, device=device)

    return loop


def _build_llama(size: LlamaSize, mode: Mode, device: torch.device) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        vocab_size=size.vocabulary,
        max_position_embeddings=size.tokens,
        use_cache=False,
    )
    with device:
        usual = torch.get_default_dtype()
        # Born in bfloat16: the step's peak is not that of a conversion.
        torch.set_default_dtype(torch.bfloat16)
        try:
            model: Any = LlamaForCausalLM(config)
        finally:
            torch.set_default_dtype(usual)
    if mode == "sft":
        return model
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=8, target_modules=LORA_TARGETS))
