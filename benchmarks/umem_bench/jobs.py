"""What a worker is asked to do, and what it answers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from umem_bench.results import AllocatorName
from umem_bench.results_file import Record

__all__ = [
    "ALLOC_CASES",
    "MODES",
    "SIZES",
    "AllocCase",
    "Answer",
    "Job",
    "LlamaSize",
    "Mode",
    "cases_of",
    "step_case",
]

Mode = Literal["lora", "sft"]

MODES: tuple[Mode, ...] = ("lora", "sft")


class AllocCase(Record):
    """Blocks of one size, allocated and freed in so many threads at once."""

    name: str
    size_bytes: int
    threads: int


ALLOC_CASES: tuple[AllocCase, ...] = tuple(
    AllocCase(
        name=f"{text}, {threads} thread{'s' * (threads > 1)}", size_bytes=size, threads=threads
    )
    for threads in (1, 8)
    for text, size in (("512 B", 512), ("1 MiB", 1 << 20), ("20 MiB", 20 << 20))
)


class LlamaSize(Record):
    """The dimensions of a Llama and of its batches."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    vocabulary: int
    batch: int
    tokens: int


SIZES: dict[str, LlamaSize] = {
    # 118 million weights; the CPU that launches the kernels sets the pace, allocator included.
    "small": LlamaSize(
        hidden=1024, intermediate=2816, layers=8, heads=16, vocabulary=8000, batch=4, tokens=512
    ),
    # 276 million weights; the GPU sets the pace. About 4 GiB of tensors.
    "large": LlamaSize(
        hidden=3072, intermediate=8192, layers=2, heads=24, vocabulary=8000, batch=4, tokens=1024
    ),
}


class Job(Record):
    """One worker's task: `mode` and `size` are for the benchmark `step` only."""

    benchmark: Literal["alloc", "step"]
    allocator: AllocatorName
    policy: str
    managed_limit_bytes: int
    quick: bool
    mode: Mode = "sft"
    size: str = "small"


class Answer(Record):
    """A worker's answer to one command; what the command does not ask for stays empty."""

    times_s: dict[str, float] = Field(default_factory=dict)
    peak_reserved_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    loss_hex: str | None = None
    error: str | None = None


def step_case(mode: Mode, size: str) -> str:
    """The name of a training step among the cases."""
    return f"{'LoRA' if mode == 'lora' else 'SFT'}, {size}"


def cases_of(job: Job) -> tuple[str, ...]:
    """The cases that a job measures."""
    if job.benchmark == "alloc":
        return tuple(case.name for case in ALLOC_CASES)
    return (step_case(job.mode, job.size),)
