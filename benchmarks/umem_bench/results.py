"""Results files: one line of JSON with the provenance, then one line for each result.

Times are seconds and sizes bytes, unless a name says otherwise.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from umem import UmemError

__all__ = [
    "BUDGETED",
    "GENERATE_VARIANTS",
    "LOAD_VARIANTS",
    "LORA_CASES",
    "METHODS",
    "SCALE_VARIANTS",
    "VARIANTS",
    "GenerateCase",
    "GenerateResult",
    "GenerateSettings",
    "GenerateVariant",
    "Header",
    "LlamaShape",
    "LoadCase",
    "LoadParts",
    "LoadResult",
    "LoadSettings",
    "LoadVariant",
    "Machine",
    "Measurement",
    "Method",
    "Migration",
    "ProcessResult",
    "Record",
    "ResultsFileError",
    "Run",
    "ScaleCase",
    "ScaleResult",
    "ScaleSettings",
    "ScaleVariant",
    "TextResult",
    "TrainingResult",
    "TrainingSettings",
    "Variant",
    "Workload",
    "WorkloadName",
    "median",
    "read_records",
    "read_results",
    "write_records",
    "write_results",
]

_LIMIT_BYTES = 64 << 20


class ResultsFileError(UmemError, ValueError):
    """The file is not a results file of `umem bench`."""


class Record(BaseModel):
    """Immutable data with no fields beyond the declared ones."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Measurement(Record):
    """One subject (an allocator, a planner, a checkout) in one case of a benchmark."""

    kind: Literal["measurement"] = "measurement"
    benchmark: str
    case: str
    subject: str
    rounds_s: tuple[float, ...] = ()
    """One time for each round. Empty where `error` says why, or where only figures are known."""
    figures: dict[str, float] = Field(default_factory=dict)
    """Further figures, their units in their names."""
    loss_hex: str | None = None
    """Loss after a few steps under torch's deterministic algorithms, in hexadecimal."""
    error: str | None = None


# ---- training under a budget ----

Method = Literal["sft", "lora"]
METHODS: tuple[Method, ...] = get_args(Method)
"""Every weight is trained, or adapters over a frozen model."""

Variant = Literal[
    "stock",
    "umem",
    "umem-backward-step",
    "umem-planned",
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
"""In the order in which they run and in which the tables show them."""

BUDGETED: dict[Variant, Literal["planned", "lookahead", "fault"] | None] = {
    "umem": None,
    "umem-backward-step": None,
    "umem-planned": "planned",
    "umem-lookahead": "lookahead",
    "umem-fault": "fault",
}
"""The variants that train within a budget, and their planner of pages; None where state streams."""

WorkloadName = Literal["long", "activations", "short", "trainer", "pair-lora", "pair-sft"]


class LlamaShape(Record):
    """A Llama with random weights, and its batches."""

    hidden: int = 1280
    intermediate: int = 3456
    layers: int = 24
    heads: int = 20
    key_value_heads: int | None = None
    """None for as many as `heads`."""
    vocabulary: int = 32_000
    weights: Literal["bfloat16", "float32"] = "bfloat16"
    """Their type. Float32 weights are trained under autocast to bfloat16."""
    lora_rank: int = 16
    lora_targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    batch: int = Field(default=1, ge=1)
    tokens: int = Field(default=8192, ge=2)
    """In each sequence."""
    checkpoint: bool = True
    """Keep only each layer's input, and compute the rest again in the backward pass."""
    loss_chunk_tokens: int = Field(default=2048, ge=1)
    """Tokens of each sequence whose logits exist at once."""
    head_dim: int | None = None
    """None for hidden / heads."""
    experts: int = 0
    """0: a Llama. Else Qwen3's mixture, whose experts have `intermediate` each; to generate."""
    experts_per_token: int = 0

    @property
    def chosen_share(self) -> float:
        """Of the experts of a layer, what a token of each sequence chooses at most."""
        if not self.experts:
            return 1.0
        return min(1.0, self.batch * self.experts_per_token / self.experts)

    @property
    def matrix_sizes(self) -> list[int]:
        """Elements of each matrix, or table of experts: the weights but those of norms."""
        hidden, wide = self.hidden, self.intermediate * max(1, self.experts)
        head = self.head_dim or hidden // self.heads
        of_queries, of_keys = head * self.heads, head * (self.key_value_heads or self.heads)
        layer = [hidden * of_queries, hidden * of_keys] * 2 + [hidden * wide] * 3
        if self.experts:
            layer.append(hidden * self.experts)
        return [self.vocabulary * hidden] * 2 + self.layers * layer

    @property
    def weight_bytes(self) -> int:
        """All matrices."""
        return sum(self.matrix_sizes) * (4 if self.weights == "float32" else 2)


class Workload(Record):
    """A model to train, and the methods, variants and budgets to train it with."""

    name: WorkloadName
    model: LlamaShape
    methods: tuple[Method, ...]
    variants: tuple[Variant, ...]
    budgets_percent: tuple[float, ...]
    """As percentages of the stock variant's peak allocation."""
    trainer_batches: int | None = None
    """Batches that the `Trainer` of transformers accumulates for a step; None for a plain loop with
    one batch a step."""


class TrainingSettings(Record):
    """Settings of `umem bench training`."""

    workloads: tuple[Workload, ...]
    steps: int
    deterministic: bool
    managed_limit_bytes: int

    def workload(self, name: WorkloadName) -> Workload:
        """The workload of this name."""
        return next(it for it in self.workloads if it.name == name)


class Migration(Record):
    """Unified-memory transfers of one step under :func:`umem.profile`; bytes by direction."""

    fault_batches: int
    um_time_share: float | None = None
    """Share of the time of all memory operations; None where copies were not recorded."""
    um_ops_share: float | None = None
    """The same of their number."""
    um_bytes_share: float | None = None
    """And of their bytes."""
    predicted_shares: tuple[float, float, float] | None = None
    """All three by the plan: of time, number and bytes."""
    moved_bytes: dict[str, int]
    predicted_bytes: dict[str, int] | None = None
    """According to the plan of this step."""
    is_lower_bound: bool = False
    """Records of demand paging are missing, so that more moved and faulted."""


class ProcessResult(Record):
    """A training that had a process to itself; `reason` says why nothing was measured."""

    variant: str
    budget_bytes: int | None = None
    state: Literal[
        "measured",
        "off",
        "failed",
        "out of memory",
        "not installed",
        "not comparable",
        "left out",
    ]
    """``off``: umem's manager gave up, for instance because a phase does not fit. ``not
    comparable``: the variant would do other work. ``left out``: no time or no room was left."""
    reason: str | None = None
    timed_out: bool = False
    process_s: float = 0.0
    """From the start of the process to its end."""
    parameters: int | None = None
    """Of the model, adapters included."""
    steps_s: tuple[float, ...] = ()
    losses_hex: tuple[str, ...] = ()
    """Of the first steps."""
    plan_running: bool | None = None
    """Whether every timed step followed umem's plan."""
    card_peak_bytes: int | None = None
    """In use on the card by NVML, less the idle card's, in samples until the last timed step."""
    base_bytes: int | None = None
    """The same, once the process has a CUDA context and nothing else."""
    outside_bytes: int | None = None
    """The same after the timed steps, less what torch's allocator has reserved: context and
    kernels."""
    process_bytes: int | None = None
    """Peak that NVML accounts to processes; None where it does not."""
    host_bytes: int | None = None
    """Peak of the whole host, less what was in use before."""
    notes: tuple[str, ...] = ()


class TrainingResult(ProcessResult):
    """One variant with one budget."""

    kind: Literal["training"] = "training"
    workload: WorkloadName
    method: Method
    variant: Variant
    budget_percent: float | None = None
    predicted_step_s: float | None = None
    peak_allocated_bytes: int | None = None
    """Most that the allocator gave out in the timed steps; under umem part of it is on the host."""
    resident_bytes: int | None = None
    """Upper bound of what umem kept on the device. This figure and the two below are of files
    without NVML's peak."""
    host_state_bytes: int | None = None
    """Optimizer state on the host in whole blocks, of ``umem-optimizer-host``."""
    paged_state_bytes: int | None = None
    """Managed memory of bitsandbytes' paged optimizer, which torch does not count."""
    migration: Migration | None = None


# ---- training at real scale ----

ScaleCase = str
"""A name in :attr:`ScaleSettings.cases`."""

LORA_CASES: tuple[ScaleCase, ...] = (
    "llama-2-7b-lora",
    "llama-2-13b-lora",
    "code-llama-34b-lora",
    "qwen2.5-32b-lora-24gib",
)
"""Adapters over a frozen model; every weight is trained in the others."""

ScaleVariant = Literal[
    "umem",
    "floor",
    "torchao",
    "umem-backward",
    "stock",
    "deepspeed",
    "deepspeed-3",
    "fsdp-offload",
    "save-on-cpu",
    "umem-waiting",
]
SCALE_VARIANTS: tuple[ScaleVariant, ...] = get_args(ScaleVariant)
"""In the order in which they run: the comparisons that matter most come first."""


class ScaleSettings(Record):
    """Settings of `umem bench scale`."""

    cases: dict[ScaleCase, LlamaShape]
    policy: str
    """umem's where every weight is trained; that of LoRA is ``lora``."""
    budget_bytes: int | None
    """umem's; None for the case's own."""
    budgets_bytes: dict[ScaleCase, int] = Field(default_factory=dict)
    """umem's of cases; others have the card's free memory, less what is kept free."""
    steps: int
    accumulate: int
    """Batches of an optimizer step."""
    accumulates: dict[ScaleCase, int] = Field(default_factory=dict)
    """The same of cases that have a number of their own."""
    holds_all: bool = False
    """Whether a case's budget holds for every variant but the floor, not for umem's alone."""
    clip: bool
    """Gradients to a norm of at most 1, except where the step is part of the backward pass."""
    deterministic: bool

    def batches(self, case: ScaleCase) -> int:
        """Batches of an optimizer step of a case."""
        return self.accumulates.get(case, self.accumulate)


class ScaleResult(ProcessResult):
    """One variant of one case."""

    kind: Literal["scale"] = "scale"
    case: ScaleCase
    variant: ScaleVariant
    commit: str | None = None
    """What ran: a file may be continued after a correction of umem."""
    wall_s: float | None = None
    """All timed steps together, from an idle GPU to an idle GPU."""
    first_step_s: float | None = None
    """From the built model to the end of the first step: the optimizer and its state are made."""
    third_step_s: float | None = None
    """By the wall clock, from an idle GPU to an idle GPU: the first under a plan."""
    host_process_bytes: int | None = None
    """VmHWM. Page-locked memory that the driver allocates is not in it."""
    host_locked_bytes: int | None = None
    """Of older files: VmLck and VmPin, in which the driver's page-locked memory is not."""
    predicted_s: float | None = None
    """A step by committed predictions, where they have the case and the card."""


# ---- text generation within a budget ----

GenerateCase = Literal["llama-2-7b", "llama-2-13b", "code-llama-34b", "qwen3-30b-a3b", "tiny"]

GenerateVariant = Literal["stock", "umem", "accelerate", "zero-inference"]
GENERATE_VARIANTS: tuple[GenerateVariant, ...] = get_args(GenerateVariant)
"""In the order in which they run and in which the tables show them."""


class GenerateSettings(Record):
    """Settings of `umem bench generate`."""

    cases: dict[GenerateCase, LlamaShape]
    """Their `batch` and `tokens` are the prompts'."""
    budgets_bytes: dict[GenerateCase, int]
    """Of device memory, for every variant but stock."""
    tokens: int
    """New ones of a timed generation."""
    rounds: int


class TextResult(ProcessResult):
    """What a process that makes text with streamed weights says of them."""

    commit: str | None = None
    """What ran: a file may be continued after a correction of umem."""
    tokens_hash: str | None = None
    """BLAKE2 of the prompt and the new tokens."""
    logits_hash: str | None = None
    """BLAKE2 of the logits of one forward pass over them, or of the new token."""
    host_process_bytes: int | None = None
    """VmHWM. Page-locked memory that the driver allocates is not in it, and mapped pages of files
    are."""
    host_locked_bytes: int | None = None
    """Of older files: VmLck and VmPin, in which the driver's page-locked memory is not."""
    streamed_bytes: int | None = None
    """Weights that umem stages for each use, at the end."""
    resident_bytes: int | None = None
    """Weights that umem keeps on the device."""


class GenerateResult(TextResult):
    """One variant of one case."""

    kind: Literal["generate"] = "generate"
    case: GenerateCase
    variant: GenerateVariant
    built_s: float | None = None
    """Until the weights are where the variant has them."""
    first_s: float | None = None
    """The first generation, of two tokens."""
    token_s: tuple[float, ...] = ()
    """Seconds a token, one figure for each round."""
    buffer_bytes: int | None = None
    """umem's staging buffers."""
    cache_bytes: int | None = None
    """umem's cache of experts."""
    cached_share: float | None = None
    """Of the chosen experts in all rounds, those that were in the cache."""
    plans: int | None = None
    """How often umem placed the weights."""


# ---- from the start of a process to the first token ----

LoadCase = Literal["llama-2-7b", "tiny"]

LoadVariant = Literal["read", "stock", "umem", "accelerate"]
LOAD_VARIANTS: tuple[LoadVariant, ...] = get_args(LoadVariant)
"""In the order in which they run and in which the tables show them. ``read`` only reads the files:
what the page cache or the disk gives."""


class LoadSettings(Record):
    """Settings of `umem bench load`."""

    cases: dict[LoadCase, LlamaShape]
    """Their `batch` and `tokens` are the prompts'."""
    budgets_bytes: dict[LoadCase, int]
    """Of device memory, for umem and accelerate."""
    rounds: int
    """Processes of each row."""
    cold: bool = False
    """Whether the files are dropped from the page cache before each round."""


class LoadParts(Record):
    """The times of one process, one after the other."""

    python_s: float
    """From the start of the process to its first line."""
    imports_s: float
    """torch, and the model's class."""
    enable_s: float
    """umem: its import, and `umem.enable`. CUDA starts in it; elsewhere in the next one."""
    load_s: float
    """`from_pretrained`."""
    pass_s: float
    """The prompt's pass, to the first token."""

    @property
    def total_s(self) -> float:
        """From the start of the process to the first token."""
        return self.python_s + self.imports_s + self.enable_s + self.load_s + self.pass_s


class LoadResult(TextResult):
    """One variant of one case."""

    kind: Literal["load"] = "load"
    case: LoadCase
    variant: LoadVariant
    file_bytes: int | None = None
    read_s: tuple[float, ...] = ()
    """Of ``read``: all files, one figure for each round."""
    parts: tuple[LoadParts, ...] = ()
    """Of the others, for each round."""


# ---- files ----


class Machine(Record):
    """Where a benchmark ran; None for what is missing there."""

    gpu: str | None = None
    driver: str | None = None
    cuda: str | None = None
    cpu: str | None = None
    cpu_count: int | None = None
    system: str | None = None
    python: str | None = None


class Header(Record):
    """Provenance: the first line of a results file."""

    format: Literal["umem-bench-2"] = "umem-bench-2"
    benchmark: Literal[
        "allocators",
        "training",
        "scale",
        "generate",
        "load",
        "planning",
        "published",
        "bounds",
        "systems",
        "sound",
        "predicted",
        "small-cards",
        "verify",
    ]
    date: str | None
    commit: str | None
    umem: str
    machine: Machine
    packages: dict[str, str]
    """Versions of what is installed."""
    settings: (
        TrainingSettings
        | ScaleSettings
        | GenerateSettings
        | LoadSettings
        | dict[str, str | int | float]
    )


_Result = Measurement | TrainingResult | ScaleResult | GenerateResult | LoadResult
_Line = Annotated[_Result, Field(discriminator="kind")]
_LINE: TypeAdapter[Any] = TypeAdapter(_Line)
_Kind = TypeVar("_Kind", bound=Record)


@dataclass(frozen=True)
class Run:
    """The content of a results file."""

    header: Header
    results: tuple[_Result, ...]

    def measurements(self, benchmark: str) -> list[Measurement]:
        """The measurements of one benchmark."""
        known = [it for it in self.results if isinstance(it, Measurement)]
        return [it for it in known if it.benchmark == benchmark]

    @property
    def trainings(self) -> list[TrainingResult]:
        """The results of trainings."""
        return [it for it in self.results if isinstance(it, TrainingResult)]

    @property
    def scales(self) -> list[ScaleResult]:
        """The results of trainings at real scale."""
        return [it for it in self.results if isinstance(it, ScaleResult)]

    @property
    def generations(self) -> list[GenerateResult]:
        """The results of text generation."""
        return [it for it in self.results if isinstance(it, GenerateResult)]

    @property
    def loads(self) -> list[LoadResult]:
        """The results of loading."""
        return [it for it in self.results if isinstance(it, LoadResult)]

    @property
    def training_settings(self) -> TrainingSettings:
        """The settings of a run of trainings."""
        assert isinstance(self.header.settings, TrainingSettings), self.header.benchmark
        return self.header.settings

    @property
    def scale_settings(self) -> ScaleSettings:
        """The settings of a run at real scale."""
        assert isinstance(self.header.settings, ScaleSettings), self.header.benchmark
        return self.header.settings

    @property
    def generate_settings(self) -> GenerateSettings:
        """The settings of a run of text generation."""
        assert isinstance(self.header.settings, GenerateSettings), self.header.benchmark
        return self.header.settings

    @property
    def load_settings(self) -> LoadSettings:
        """The settings of a run of loading."""
        assert isinstance(self.header.settings, LoadSettings), self.header.benchmark
        return self.header.settings


def median(times_s: Iterable[float]) -> float | None:
    """Median of times; None without any."""
    known = list(times_s)
    return statistics.median(known) if known else None


def write_results(run: Run, path: Path) -> None:
    """Write a results file in one piece: a reader sees the old file or the whole new one.

    Raises
    ------
    OSError
        If the file cannot be written; an old file then stays.
    """
    write_records(run.header, run.results, path)


def write_records(header: Header, results: Iterable[Any], path: Path) -> None:
    """Write a header, then a line for each record with its ``kind``; see `write_results`."""
    from umem.io.files import replace_file

    rows = [{"kind": it.kind} | it.model_dump(mode="json", exclude_defaults=True) for it in results]
    lines = [header.model_dump_json(), *map(json.dumps, rows)]
    replace_file(path, "".join(f"{line}\n" for line in lines).encode())


def read_records(path: Path, record: type[_Kind], words: str) -> tuple[Header, tuple[_Kind, ...]]:
    """Read what `write_records` wrote. Raises ``UmemError`` if the file is no such one."""
    try:
        first, *others = path.read_text().splitlines()
        header = Header.model_validate_json(first)
        return header, tuple(map(record.model_validate_json, others))
    except (OSError, ValueError, ValidationError) as error:
        raise UmemError(f"{path}: no results of {words}: {error}") from error


def read_results(path: Path) -> Run:
    """Read a results file of at most 64 MiB. It is data, and may come from a stranger.

    Raises
    ------
    ResultsFileError
        If the file cannot be read, or a line is not what `umem bench` writes; the message names
        file, line and field.
    """
    from umem.io.files import read_file

    try:
        lines = read_file(path, _LIMIT_BYTES).splitlines()
    except (OSError, ValueError) as error:
        words = error.strerror if isinstance(error, OSError) else error
        raise ResultsFileError(f"{path}: cannot be read ({words})") from error
    records: list[Any] = []
    for number, line in enumerate(lines or [b""], 1):
        try:
            read = Header.model_validate_json if number == 1 else _LINE.validate_json
            records.append(read(line))
            if number == 1 and records[0].benchmark == "systems":
                raise ResultsFileError(
                    f"{path}: a matrix of systems: print it by tests/systems/matrix.py --report"
                )
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "the line"
            raise ResultsFileError(
                f"{path}, line {number}: not written by `umem bench --output`: {place}: "
                f"{first['msg']}"
            ) from error
    return Run(records[0], tuple(records[1:]))
