"""What `umem bench training` leaves behind: its data types and its file."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

from pydantic import Field, field_validator

from umem.policy import PolicyPlanner
from umem_bench.results import Machine
from umem_bench.results_file import Record, read_results, write_results

__all__ = [
    "BUDGETED",
    "METHODS",
    "PLANNERS",
    "VARIANTS",
    "Figures",
    "HintedStep",
    "ManagerFigures",
    "Measurand",
    "Method",
    "Outcome",
    "OutcomeState",
    "ProfiledStep",
    "Sitting",
    "TrainingModel",
    "TrainingRun",
    "TrainingSettings",
    "TransferTotal",
    "Variant",
    "Workload",
    "WorkloadName",
    "read_training",
    "write_training",
]

Method = Literal["sft", "lora"]

METHODS: tuple[Method, ...] = get_args(Method)
"""Every weight is trained, or adapters over a frozen model."""

Variant = Literal[
    "stock",
    "umem-planned",
    "umem-backward-step",
    "umem-lookahead",
    "umem-fault",
    "umem-optimizer-host",
    "backward-step",
    "save-on-cpu",
    "bnb-paged-adamw",
    "torchao-offload",
    "deepspeed-offload",
    "rmm-pool",
    "stock-again",
]

VARIANTS: tuple[Variant, ...] = get_args(Variant)
"""What is compared, in the order of the tables."""

PLANNERS: dict[Variant, PolicyPlanner] = {
    "umem-planned": "planned",
    "umem-backward-step": "planned",
    "umem-lookahead": "lookahead",
    "umem-fault": "fault",
}
"""umem's planner, of variants whose memory it moves."""

BUDGETED: tuple[Variant, ...] = tuple(PLANNERS)
"""Variants that are told a device budget."""

WorkloadName = Literal["long", "activations"]
"""One long sequence with checkpoints, where computing dominates; a shorter one without checkpoints,
where what is kept for the backward pass does."""

OutcomeState = Literal["measured", "off", "failed", "not installed", "not comparable", "left out"]
"""``off``: umem's manager gave up, for instance because a phase does not fit the budget. ``not
comparable``: it would do other work than the other variants."""

_FORMER_NAMES = {"rmm-managed": "rmm-pool"}
"""Variants in files of earlier days. Elsewhere in umem the former name means: without a pool."""


class TrainingModel(Record):
    """The Llama that is trained, and its batches. Weights are bfloat16 and random."""

    hidden: int = 1280
    intermediate: int = 3456
    layers: int = 24
    heads: int = 20
    vocabulary: int = 32_000
    tied: bool = False
    """Whether the embedding's weights are also the head's."""
    lora_rank: int = 16
    batch: int = Field(default=1, ge=1)
    tokens: int = Field(default=8192, ge=2)
    """In each sequence."""
    checkpoint: bool = True
    """Keep only each layer's input, and compute the rest again in the backward pass."""
    loss_chunk_tokens: int = Field(default=2048, ge=1)
    """Tokens of each sequence whose logits are there at once."""


class Workload(Record):
    """What is trained in one way, and with which variants and budgets."""

    name: WorkloadName
    model: TrainingModel
    methods: tuple[Method, ...]
    variants: tuple[Variant, ...]
    budgets_percent: tuple[float, ...]
    """Device budgets, of what the stock variant has allocated at its peak."""

    @field_validator("variants", mode="before")
    @classmethod
    def _with_their_names_of_today(cls, names: object) -> object:
        if not isinstance(names, (list, tuple)):
            return names
        return tuple(map(_name_of_today, names))


class TrainingSettings(Record):
    """What was asked for; sizes in bytes, times in seconds."""

    workloads: tuple[Workload, ...]
    steps: int
    deterministic: bool
    managed_limit_bytes: int
    seconds_limit: float

    def workload(self, name: WorkloadName) -> Workload:
        """One of the workloads, by its name."""
        return next(it for it in self.workloads if it.name == name)


class TransferTotal(Record):
    """Unified-memory transfers of one direction and cause in the profiled step."""

    direction: str
    cause: str
    bytes: int
    count: int
    seconds: float


class ProfiledStep(Record):
    """One step as :func:`umem.profile` saw it, after the timed ones."""

    step_s: float
    um_time_share: float | None
    """This and the next two are None where copies and memory sets were not recorded."""
    um_ops_share: float | None
    um_bytes_share: float | None
    fault_batches: int
    gpu_faults: int
    cpu_faults: int
    fault_bytes: int
    transfers: tuple[TransferTotal, ...]
    notes: tuple[str, ...]
    predicted_bytes: dict[str, int] | None = None
    """Unified-memory transfers by direction, as the plan of this step has them."""
    is_lower_bound: bool = False
    """Whether records of demand paging are missing, so that more moved and faulted."""

    def moved_bytes(self, direction: str) -> int:
        """Bytes that moved in one direction."""
        return sum(it.bytes for it in self.transfers if it.direction == direction)


class HintedStep(Record):
    """What umem's hint engine says of the profiled step, by direction; it needs no records.

    Of planners whose hints move the pages. Those that faulted are not in it, and those that were
    where they should go are.
    """

    moved_bytes: dict[str, int]
    predicted_bytes: dict[str, int] | None
    """What hints move by the plan of this step."""


class ManagerFigures(Record):
    """What umem's manager said after the timed steps; times in seconds."""

    state: str
    """``running`` or ``resident`` where the plan is followed."""
    reason: str
    steps: int
    diverged_steps: int
    unplanned: int
    wait_timeouts: int
    corrections: int
    """Plans made anew from measured bandwidths, up to the end of the timed steps."""
    wait_s: float
    """Time that the training thread waited for pages, of one timed step."""
    predicted_step_s: float | None
    predicted_ideal_s: float | None
    predicted_bound_s: float | None


class Figures(Record):
    """What is measured of one variant with one budget, or why there is nothing.

    Times are seconds. `peak_allocated_bytes` is the most that torch's allocator gave out during the
    timed steps, wherever it was: for umem's variants part of it is on the host. It is None where
    nobody counts. `losses_hex` are those of the first steps, in hexadecimal.
    """

    reason: str | None = None
    """Why it was not measured."""
    warm_steps: int = 0
    plan_running: bool | None = None
    """Whether umem said before and after the timed steps that its plan was running, and each of
    them went as planned."""
    manager: ManagerFigures | None = None
    steps_s: tuple[float, ...] = ()
    sm_clock_mhz: float | None = None
    """Median over the timed steps; None where NVML does not tell."""
    losses_hex: tuple[str, ...] = ()
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    resident_bytes: int | None = None
    """The most that umem can have meant to have on the device, of variants that are told a budget:
    from one look to the next, what was allocated at most, less what was away at least. Looks are in
    every layer's passes, at every gradient and at every phase and part of the optimizer's step."""
    optimizer_state_bytes: int | None = None
    host_state_bytes: int | None = None
    """What is allocated for that state on the host, of ``umem-optimizer-host``: whole blocks."""
    unseen_bytes: int | None = None
    """Managed memory of a variant's own, which nobody counts and which may be on the device."""
    mapped_bytes_per_s: float | None = None
    """Reading and writing host memory in place, both counted; of ``umem-optimizer-host`` only."""
    profile: ProfiledStep | None = None
    """None where nothing was recorded, or too little to be believed: then a note says why."""
    hinted: HintedStep | None = None
    notes: tuple[str, ...] = ()
    timed_out: bool = False
    """Whether there was no answer within its process's time."""


class Measurand(Record):
    """What is measured. Budgets are None for a variant that is told none."""

    workload: WorkloadName
    method: Method
    variant: Variant
    budget_percent: float | None
    budget_bytes: int | None


class Outcome(Figures, Measurand):
    """What became of one variant with one budget. In a file the measurand's fields come first."""

    state: OutcomeState
    process_s: float = 0.0
    """From the start of its process to its end."""
    date: str | None = None
    """When its process was started; None where there was none, and in files of earlier days."""

    @field_validator("variant", mode="before")
    @classmethod
    def _with_its_name_of_today(cls, name: object) -> object:
        return _name_of_today(name)


class Sitting(Record):
    """One call of `umem bench training` of those that a run was made in."""

    date: str
    seconds: float
    stock: tuple[Outcome, ...] = ()
    """Stock once more, in a sitting that went on with an earlier one's run."""


class TrainingRun(Record):
    """One run of `umem bench training`: the content of its file."""

    format: Literal["umem-bench-training-1"] = "umem-bench-training-1"
    date: str
    git_commit: str | None
    machine: Machine
    packages: dict[str, str | None]
    """Versions of what the variants need; None for what is not installed."""
    settings: TrainingSettings
    parameters: dict[str, int]
    """Parameters of the model by method, adapters included."""
    device_flops_per_s: float | None
    """What the device's hardware profile says of large matrix products in bfloat16."""
    outcomes: tuple[Outcome, ...]
    seconds: float
    """Of the whole run."""
    sittings: tuple[Sitting, ...] = ()
    """None in files of earlier days, whose runs had one each."""


def _name_of_today(name: object) -> object:
    return _FORMER_NAMES.get(name, name) if isinstance(name, str) else name


def write_training(run: TrainingRun, path: Path) -> None:
    """Write a results file; see :func:`umem_bench.results_file.write_results`."""
    write_results(run, path)


def read_training(path: Path) -> TrainingRun:
    """Read a results file.

    Raises
    ------
    ResultsFileError
        If the file cannot be read, or is not one that `umem bench training --output` wrote.
    """
    return read_results(TrainingRun, path, "umem bench training --output")
