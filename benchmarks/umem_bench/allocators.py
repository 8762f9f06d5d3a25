"""umem's allocator beside torch's own and RMM's: single allocations, and training steps."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from umem import UnsupportedError
from umem.core.install import install_command
from umem.core.units import format_bytes
from umem_bench.llama import build_llama
from umem_bench.machine import managed_limit_bytes
from umem_bench.results import LlamaShape, Measurement, Method, Record, Run
from umem_bench.tables import NOTHING, Check, Table, at_most, beside, provenance, times_table
from umem_bench.timing import loops_for, no_garbage_collection, time_loops_s
from umem_bench.workers import Answers, Worker, WorkerError

__all__ = [
    "ALLOCATORS",
    "ALLOC_CASES",
    "SHAPES",
    "AllocatorJob",
    "AllocatorName",
    "alloc_loop",
    "checks",
    "heading",
    "peaks",
    "reset_peaks",
    "run_alloc",
    "run_step",
    "select",
    "tables",
    "train_steps",
    "worker_limit_bytes",
]

AllocatorName = Literal["torch", "umem", "torch-again", "rmm-pool", "rmm-managed"]
ALLOCATORS: tuple[AllocatorName, ...] = get_args(AllocatorName)
"""In the order of a round and of the tables' columns. ``torch-again`` is torch's own in another
process: by as much as the two differ, a busy host makes any two processes differ."""

_STOCK = ("torch", "torch-again")

ALLOC_CASES = {
    f"{text}, {threads} thread{'s' * (threads > 1)}": (size_bytes, threads)
    for threads in (1, 8)
    for text, size_bytes in (("512 B", 512), ("1 MiB", 1 << 20), ("20 MiB", 20 << 20))
}
"""Size in bytes and number of threads by the case's name."""

_ADAPTERS: dict[str, Any] = {"lora_rank": 8, "lora_targets": ("q_proj", "v_proj")}
SHAPES = {
    # 118 million weights: the CPU that launches the kernels sets the pace, allocator included.
    "small": LlamaShape(
        hidden=1024, intermediate=2816, layers=8, heads=16, vocabulary=8000, batch=4, tokens=512,
        checkpoint=False, **_ADAPTERS,
    ),
    # 276 million weights, about 4 GiB of tensors: the GPU sets the pace.
    "large": LlamaShape(
        hidden=3072, intermediate=8192, layers=2, heads=24, vocabulary=8000, batch=4, tokens=1024,
        checkpoint=False, **_ADAPTERS,
    ),
}  # fmt: skip

MAX_ALLOC_RATIO = 1.2
MAX_STEP_RATIO = 1.01
MAX_RESERVED_RATIO = 1.1
"""Limits of `--check`, as multiples of torch's own cache."""

_MANAGED_TOTAL_BYTES = 15 << 30
"""Managed memory of all workers together, which exist at the same time."""

_MANAGED_WORKER_BYTES = 8 << 30
_POOL_GRANULE_BYTES = 2 << 20

_READY_LIMIT_S = 180.0
"""CUDA's start, the model and its first steps."""

_ANSWER_LIMIT_S = 60.0
"""One round takes one or two seconds under the slowest allocator."""

_CASE_S = 0.1
"""Time for one allocation case in one round; RMM without a pool needs it for a few hundred."""

_QUICK_FACTOR = 0.3
_CHECKED_STEPS = 3
"""Steps under deterministic algorithms, whose loss is compared."""

_WARM_STEPS = 3
_TIMED_STEPS = 10
_MIN_TIMED_STEPS = 3
_ROUND_S = 1.0
"""A round ends here with fewer steps: RMM without a pool takes some 20 times as long for one."""


# ---- choosing an allocator, in a worker ----


def select(allocator: AllocatorName, policy: str, limit_bytes: int) -> None:
    """Make `allocator` torch's for the rest of the process, before CUDA starts.

    It may hold `limit_bytes` of managed memory; `policy` is umem's.

    Raises
    ------
    UnsupportedError
        Where torch, or RMM's part for torch, does not work here.
    """
    os.environ["UMEM_MANAGED_LIMIT"] = str(limit_bytes)
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "torch sees no usable GPU: `umem bench core` needs none, `umem doctor` says what is "
            "missing"
        )
    if allocator == "umem":
        import umem

        umem.enable(policy)
    elif allocator not in _STOCK:
        _select_rmm(pooled=allocator == "rmm-pool", limit_bytes=limit_bytes)


def _select_rmm(*, pooled: bool, limit_bytes: int) -> None:
    """RMM's own recipe for torch over managed memory, with a limit."""
    try:
        import rmm
        from rmm.allocators.torch import rmm_torch_allocator
    except ImportError as error:
        raise UnsupportedError(
            f"RMM is not installed ({error}): {install_command('cuda13')} (or cuda12), or leave "
            "rmm-pool and rmm-managed out of --allocators"
        ) from error
    if rmm_torch_allocator is None:
        raise UnsupportedError("RMM finds no GPU that torch can use: see `umem doctor`")
    if pooled:
        limit_bytes -= limit_bytes % _POOL_GRANULE_BYTES
        initial_bytes = limit_bytes // 2
        rmm.reinitialize(
            pool_allocator=True,
            managed_memory=True,
            initial_pool_size=initial_bytes - initial_bytes % _POOL_GRANULE_BYTES,
            maximum_pool_size=limit_bytes,
        )
    else:
        managed = rmm.mr.ManagedMemoryResource()
        rmm.mr.set_current_device_resource(
            rmm.mr.LimitingResourceAdaptor(managed, allocation_limit=limit_bytes)
        )
    torch.cuda.memory.change_current_allocator(rmm_torch_allocator)


def reset_peaks(allocator: AllocatorName) -> None:
    """Start the peaks afresh, where the allocator counts them."""
    if allocator in (*_STOCK, "umem"):
        torch.cuda.reset_peak_memory_stats()


def peaks(allocator: AllocatorName) -> dict[str, float]:
    """Peaks since `reset_peaks`, without those that the allocator does not count.

    RMM's pool never shrinks: its size now is its peak.
    """
    if allocator in (*_STOCK, "umem"):
        return {
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        }
    if allocator == "rmm-pool":
        import rmm

        pool: Any = rmm.mr.get_current_device_resource()
        return {"peak_reserved_bytes": pool.pool_size()}
    return {}


# ---- measuring, in a worker ----


class AllocatorJob(Record):
    """What a worker measures; `method` and `size` are for steps only."""

    allocator: AllocatorName
    policy: str
    limit_bytes: int
    rounds: int
    quick: bool
    method: Method = "sft"
    size: str = "small"


@dataclass(frozen=True)
class _Answer:
    times_s: dict[str, float] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    loss_hex: str | None = None


def _measure_allocations(job: AllocatorJob) -> Iterator[_Answer]:
    """Allocate through torch and let go; one answer when ready, for each round, and at the end."""
    select(job.allocator, job.policy, job.limit_bytes)
    cases = []
    for name, (size_bytes, threads) in ALLOC_CASES.items():
        loop = alloc_loop(size_bytes)
        loops = loops_for(loop, _CASE_S * (_QUICK_FACTOR if job.quick else 1), threads)
        cases.append((name, loop, loops, threads))
    yield _Answer()
    for _ in range(job.rounds):
        times_s = {}
        for name, loop, loops, threads in cases:
            loop(max(1, loops // 2))  # the process has waited: its core and caches come up again
            times_s[name] = time_loops_s(loop, loops, threads)
        yield _Answer(times_s)
    yield _Answer()


def alloc_loop(size_bytes: int) -> Callable[[int], None]:
    """A loop that allocates a block on the GPU through torch and lets it go."""
    device = torch.device("cuda", 0)

    def loop(passes: int) -> None:
        empty, dtype = torch.empty, torch.uint8
        for _ in itertools.repeat(None, passes):
            empty(size_bytes, dtype=dtype, device=device)

    return loop


def _measure_steps(job: AllocatorJob) -> Iterator[_Answer]:
    """Train a Llama on one batch; answers as those of allocations."""
    # cuBLAS reads it when it starts; torch's deterministic algorithms ask for it.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    select(job.allocator, job.policy, job.limit_bytes)
    shape = SHAPES[job.size]
    step = train_steps(shape, job.method)
    batch = torch.randint(0, shape.vocabulary, (shape.batch, shape.tokens), device="cuda")

    # The fused attention kernels have no deterministic backward pass on every GPU. The plain one
    # has, and takes so much memory that it sees one sequence only.
    torch.use_deterministic_algorithms(True)
    with sdpa_kernel(SDPBackend.MATH):
        for _ in range(_CHECKED_STEPS):
            loss = step(batch[:1])
    loss_hex = float(loss).hex()
    torch.use_deterministic_algorithms(False)
    del loss
    torch.cuda.empty_cache()  # ordinary steps start without blocks left over from these
    reset_peaks(job.allocator)
    for _ in range(_WARM_STEPS):
        step(batch)
    torch.cuda.synchronize()
    yield _Answer()
    for _ in range(job.rounds):
        yield _Answer({_step_case(job.method, job.size): _time_steps_s(step, batch, job.quick)})
    yield _Answer(figures=peaks(job.allocator), loss_hex=loss_hex)


def train_steps(shape: LlamaShape, method: Method) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that trains one step on a batch and returns the loss."""
    model = build_llama(shape, method, torch.device("cuda"))
    trained = [it for it in model.parameters() if it.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _time_steps_s(
    step: Callable[[torch.Tensor], object], batch: torch.Tensor, quick: bool
) -> float:
    """Mean wall time of a step in one round, from an idle GPU to an idle GPU."""
    factor = _QUICK_FACTOR if quick else 1
    steps = max(_MIN_TIMED_STEPS, round(_TIMED_STEPS * factor))
    end_s = time.perf_counter() + _ROUND_S * factor
    step(batch)  # the GPU's clocks come up again after other workers' turns
    torch.cuda.synchronize()
    times_s: list[float] = []
    with no_garbage_collection():
        while len(times_s) < _MIN_TIMED_STEPS or (
            len(times_s) < steps and time.perf_counter() < end_s
        ):
            began_s = time.perf_counter()
            step(batch)
            torch.cuda.synchronize()
            times_s.append(time.perf_counter() - began_s)
    return statistics.mean(times_s)


def _step_case(method: Method, size: str) -> str:
    return f"{'LoRA' if method == 'lora' else 'SFT'}, {size}"


# ---- running the workers ----


def worker_limit_bytes(allocators: Sequence[AllocatorName]) -> int:
    """Managed memory that one worker may hold.

    UMEM_MANAGED_LIMIT, or 8 GiB, and in any case an equal share of 15 GiB: all workers together
    hold less than 16 GiB.
    """
    holders = sum(name not in _STOCK for name in allocators)
    share_bytes = _MANAGED_TOTAL_BYTES // max(1, holders)
    if "UMEM_MANAGED_LIMIT" not in os.environ:
        share_bytes = min(share_bytes, _MANAGED_WORKER_BYTES)
    return managed_limit_bytes(share_bytes)


def run_alloc(
    jobs: Sequence[AllocatorJob], on_progress: Callable[[str], None]
) -> list[Measurement]:
    """Time one allocation and its free under each job's allocator."""
    return _take_turns("alloc", _measure_allocations, jobs, tuple(ALLOC_CASES), on_progress)


def run_step(
    jobs: Sequence[AllocatorJob], sizes: Sequence[str], on_progress: Callable[[str], None]
) -> list[Measurement]:
    """Time a training step under each job's allocator, LoRA and SFT."""
    results = []
    methods: tuple[Method, ...] = ("lora", "sft")
    for size, method in itertools.product(sizes, methods):
        own = [it.model_copy(update={"method": method, "size": size}) for it in jobs]
        cases = (_step_case(method, size),)
        results += _take_turns("step", _measure_steps, own, cases, on_progress)
    return results


def _take_turns(
    benchmark: str,
    measure: Answers,
    jobs: Sequence[AllocatorJob],
    cases: Sequence[str],
    on_progress: Callable[[str], None],
) -> list[Measurement]:
    """Start a worker for each allocator, then let them measure in turn, never two at a time.

    A machine that grows warm or busy does so for all. A worker that fails does not end the run:
    its measurements say why.
    """
    label = f"{benchmark}: {cases[0]}" if len(cases) == 1 else benchmark
    failures: dict[str, str] = {}
    answers: dict[str, list[_Answer]] = {job.allocator: [] for job in jobs}
    rounds = jobs[0].rounds
    with ExitStack() as stack:
        on_progress(f"{label}: starting {len(jobs)} workers")
        workers = {
            it.allocator: stack.enter_context(Worker(measure, it, [__name__])) for it in jobs
        }
        for worker in workers.values():
            worker.request()
        for number in range(rounds + 2):
            if 0 < number <= rounds and len(failures) < len(jobs):
                on_progress(f"{label}: round {number} of {rounds}")
            for name, worker in workers.items():
                if name in failures:
                    continue
                try:
                    if number == 0:
                        worker.answer(_READY_LIMIT_S)
                    else:
                        answers[name].append(worker.ask(_ANSWER_LIMIT_S))
                except WorkerError as error:
                    failures[name] = str(error)
                    on_progress(f"{label}: {name} failed: {error}")
    return [
        Measurement(
            benchmark=benchmark,
            case=case,
            subject=name,
            rounds_s=() if name in failures else tuple(it.times_s[case] for it in own[:-1]),
            figures=own[-1].figures if own else {},
            loss_hex=own[-1].loss_hex if own else None,
            error=failures.get(name),
        )
        for name, own in answers.items()
        for case in cases
    ]


# ---- tables and checks ----

_TITLES = {
    "alloc": ("One allocation and its free through torch, µs", 1e6),
    "step": ("One training step, ms", 1e3),
    "core": (
        "The native core over host memory, from Python: allocation with free, and hook, ns",
        1e9,
    ),
}


def heading(run: Run) -> str:
    """One line that says where, when and with what a run was made."""
    settings = run.header.settings
    assert isinstance(settings, dict)
    words = f"policy {settings['policy']}"
    rounds = f"medians of {settings['rounds']} rounds [minimum to maximum]"
    return provenance(run.header, words, rounds)


def tables(run: Run) -> Iterator[Table]:
    """Times by benchmark, then the memory and losses of the steps."""
    for benchmark, (title, scale) in _TITLES.items():
        if found := run.measurements(benchmark):
            yield times_table(title, found, scale)
    steps = run.measurements("step")
    if steps:
        names = tuple(dict.fromkeys(it.subject for it in steps))
        yield Table(
            "Peak reserved memory of those steps; loss after a few deterministic ones",
            ("case", *names),
            [
                (case, *(_memory(row.get(it), row.get("torch")) for it in names))
                for case, row in beside(steps).items()
            ],
        )


def _memory(own: Measurement | None, stock: Measurement | None) -> str:
    if own is None or own.error:
        return NOTHING if own is None else "failed"
    words = []
    if size_bytes := own.figures.get("peak_reserved_bytes"):
        stock_bytes = stock and stock.figures.get("peak_reserved_bytes")
        ratio = f" {size_bytes / stock_bytes:.2f}x" if stock_bytes and own is not stock else ""
        words.append(format_bytes(int(size_bytes)) + ratio)
    if own.loss_hex is not None:
        loss = f"{float.fromhex(own.loss_hex):.6f}"
        if stock is not None and own is not stock:
            loss += " same bits" if own.loss_hex == stock.loss_hex else " differs"
        words.append(loss)
    return "; ".join(words) or NOTHING


def checks(run: Run) -> Iterator[Check]:
    """Hold umem against torch's own cache, case by case.

    Of two processes with torch's cache, the slower one counts. Steps are compared by the fastest
    round of each, which other work of the machine has disturbed least.
    """
    held: tuple[tuple[str, float, str, Callable[[Sequence[float]], float]], ...] = (
        ("alloc", MAX_ALLOC_RATIO, "time", statistics.median),
        ("step", MAX_STEP_RATIO, "least of the rounds", min),
    )
    for benchmark, limit, words, figure in held:
        for case, row in beside(run.measurements(benchmark)).items():
            subject = f"{benchmark}: {case}"
            if not {"umem", "torch"} <= row.keys():
                yield Check(subject, None, "needs both torch and umem among the allocators")
                continue
            umem, stock = row["umem"], row["torch"]
            if umem.error or stock.error:
                yield Check(subject, False, str(umem.error or stock.error))
                continue
            stock_s = [figure(row[it].rounds_s) for it in _STOCK if it in row and row[it].rounds_s]
            itself = f", which is {max(stock_s) / min(stock_s):.3f}x itself" * (len(stock_s) > 1)
            yield at_most(
                f"{subject}, {words} of torch's{itself}",
                figure(umem.rounds_s),
                max(stock_s),
                limit,
            )
            if benchmark == "step":
                own, its = (it.figures.get("peak_reserved_bytes") for it in (umem, stock))
                yield at_most(f"{subject}, peak reserved", own, its, MAX_RESERVED_RATIO)
                yield Check(
                    f"{subject}, loss to the last bit",
                    umem.loss_hex == stock.loss_hex,
                    f"umem {umem.loss_hex}, torch {stock.loss_hex}",
                )
