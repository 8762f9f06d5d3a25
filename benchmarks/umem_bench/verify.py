"""`umem verify`: what umem is on this machine, as a page and a file to send.

Doctor, rates, five trainings and a generation that are predicted before they run, the losses' bits,
the budget by NVML, and LoRA and full fine-tuning in managed memory, beside what NVIDIA published.
Each process has the GPU to itself, and both files are written again behind each.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from umem import UmemError, load_hardware
from umem.core.units import format_bytes
from umem.doctor import Report as Diagnosis
from umem.doctor import Status
from umem.hardware import figures
from umem.hardware.capabilities import Capabilities
from umem.hardware.load import nearest_card
from umem.hardware.measure import Measured, measure, profile_text, save_profile
from umem.hardware.model import quantity_of
from umem.io.files import write_file
from umem.trace.published import PUBLISHED_UM_SHARES
from umem_bench.card import Card
from umem_bench.compile_planner import compile_planner
from umem_bench.generate.measure import GenerateJob
from umem_bench.generate.measure import measure as measure_generation
from umem_bench.machine import header, managed_limit_bytes
from umem_bench.predicted import NotPredictedError, predict_generation, predict_training
from umem_bench.results import Header, LlamaShape, Method, Record, median
from umem_bench.rows import PRELOADED, ask_worker, why_no_host_room
from umem_bench.scale.measure import ScaleJob
from umem_bench.scale.measure import measure as measure_step
from umem_bench.shapes import LLAMA_2_7B
from umem_bench.tables import NOTHING, Check, Table, markdown, provenance, seconds, size_text
from umem_bench.training.measure import measure as measure_pages
from umem_bench.training.tables import CARD_MARGIN_BYTES, shares
from umem_bench.training.variants import PUBLISHED_ROOM, TrainingJob
from umem_bench.workers import Worker, WorkerError

__all__ = [
    "LEAST_FREE_BYTES",
    "PAGE",
    "RECORD",
    "Verification",
    "managed_bytes",
    "measure_figures",
]

PAGE, RECORD = "umem-verify.md", "umem-verify.json"
"""Names of the files."""

LEAST_FREE_BYTES, _ENOUGH_BYTES = 14 << 30, 20 << 30
"""Of the card's memory: for smaller batches, and for whole ones."""
_MANAGED_BYTES, _MOST_MANAGED_BYTES = 8 << 30, 16 << 30
"""Managed memory of a process by default, and at most: a card that is filled with it can hang."""

_ROOM = 0.6
"""Budgets, as a share of what stock's tensors take."""

_LEAST_S = 45.0
"""For a process to be begun."""

_LONG_S = 480.0
"""With so much time, rates are measured for two minutes, at the clock that the power allows."""

_SHORT_MEASURE_S = 60.0
_STEPS, _TOKENS, _ROUNDS = 8, 32, 2

_FULL = LlamaShape(
    hidden=2048, intermediate=5632, layers=12, heads=16, weights="float32", batch=4, tokens=2048
)
"""0.75 billion parameters, whose kernels take longer than the calls that launch them."""
_QUARTER = LLAMA_2_7B.model_copy(update={"layers": 8, "batch": 4, "tokens": 2048})
_TEXT = _QUARTER.model_copy(update={"batch": 1, "tokens": 64})
_PAGES = LlamaShape(tokens=4096, loss_chunk_tokens=1024)


class _Case(NamedTuple):
    """What one process runs."""

    name: str
    shape: LlamaShape
    method: Method | Literal["inference"]
    variant: Any
    is_paged: bool = False
    """In managed memory."""


_CASES = (
    _Case("SFT, stock", _FULL, "sft", "stock"),
    _Case("SFT, umem", _FULL, "sft", "umem"),
    _Case("SFT, umem, step in the backward pass", _FULL, "sft", "umem-backward"),
    _Case("LoRA, stock", _QUARTER, "lora", "stock"),
    _Case("LoRA, umem", _QUARTER, "lora", "umem"),
    _Case("generation, umem", _TEXT, "inference", "umem"),
    _Case("SFT, stock", _PAGES, "sft", "stock", is_paged=True),
    _Case("LoRA, demand paging", _PAGES, "lora", "umem-fault", is_paged=True),
    _Case("SFT, demand paging", _PAGES, "sft", "umem-fault", is_paged=True),
    _Case("SFT, planned", _PAGES, "sft", "umem-planned", is_paged=True),
)
_PUBLISHED = {name.rpartition("-")[2]: share for name, share in PUBLISHED_UM_SHARES.items()}


class FiguresJob(Record):
    """What a worker that measures rates is asked for."""

    short: bool


def measure_figures(job: FiguresJob) -> Iterator[dict[str, Any]]:
    """Measure rates in a worker; yields a figure at a time, and at last an empty one."""
    from umem.hardware.capabilities import detect

    for one in measure(detect(0), lambda _: None, short=job.short):
        yield one._asdict()
    yield {}


def managed_bytes(card: Card) -> int:
    """Managed memory that a process may take.

    Raises `UmemError` for a ``UMEM_MANAGED_LIMIT`` above 16 GiB or half of the card's free memory.
    """
    safe_bytes = min(_MOST_MANAGED_BYTES, card.free_bytes // 2)
    if "UMEM_MANAGED_LIMIT" not in os.environ:
        return min(_MANAGED_BYTES, safe_bytes)
    limit_bytes = managed_limit_bytes(sys.maxsize)
    if limit_bytes > safe_bytes:
        raise UmemError(
            f"UMEM_MANAGED_LIMIT: {format_bytes(limit_bytes)} is not safe here, where a card that "
            f"is filled with managed memory can hang: set at most {safe_bytes >> 20}MiB"
        )
    return limit_bytes


@dataclass
class Verification:
    """What is found out, in the order in which it is, written to a folder again and again."""

    diagnosis: Diagnosis
    machine: Capabilities
    card: Card
    folder: Path
    minutes: float
    say: Callable[[str], None]
    """Shows what is done next."""
    tell: Callable[[str], None]
    """Prints what was found."""
    state: str = "not finished"
    found: dict[str, Measured] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    paged: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.managed_bytes = managed_bytes(self.card)
        self.provenance: Header = header("verify", {"minutes": self.minutes})
        self.hardware = load_hardware("detect")
        self.end_s = time.monotonic() + 60 * self.minutes

    @property
    def left_s(self) -> float:
        """Until the time is up."""
        return self.end_s - time.monotonic()

    def run(self) -> None:
        """Find all of it out; what an exception ends is in the files up to there."""
        self.write()
        for part in (self._measure, self._run_cases):
            for _ in part():
                self.write()
        self.state = "finished"
        self.write()

    # ---- parts: each yields where there is more to write ----

    def _measure(self) -> Iterator[None]:
        short = 60 * self.minutes < _LONG_S
        with Worker(measure_figures, FiguresJob(short=short), PRELOADED) as worker:
            try:
                while True:
                    self.say(f"Measuring this machine: {len(self.found)} rates so far")
                    one = worker.ask(max(_SHORT_MEASURE_S, self.left_s / 2))
                    if not one:
                        break
                    self.found[one["figure"]] = Measured(**one)
            except WorkerError as error:
                self.tell(f"not all rates are measured: {error}")
        text = profile_text(self.machine, self.found)
        path = save_profile(text, self.folder / "umem-verify-hardware.yaml", "")
        self.hardware = load_hardware(str(path))
        self.tell(f"{len(self.found)} rates are measured")
        yield

    def _run_cases(self) -> Iterator[None]:
        stock: dict[tuple[str, bool], dict[str, Any]] = {}
        for case in _CASES:
            # Of managed memory, LoRA gets the room of full fine-tuning.
            group = ("sft" if case.is_paged else case.method, case.is_paged)
            shape = case.shape
            if self.card.free_bytes < _ENOUGH_BYTES and not case.is_paged:
                shape = shape.model_copy(update={"batch": max(1, shape.batch // 2)})
            unit = "a token" if case.method == "inference" else "a step"
            row: dict[str, Any] = {"name": case.name, "unit": unit}
            (self.paged if case.is_paged else self.rows).append(row)
            if case.variant == "stock":
                stock[group] = row
            else:
                row["budget_bytes"] = _budget(case, stock.get(group))
                if row["budget_bytes"] is None:
                    row |= {"state": "left out", "reason": "stock was not measured"}
                    continue
                if case.is_paged:
                    row["published_share"] = _PUBLISHED[case.method]
            if not case.is_paged:
                self._predict(row, case, shape)
            yield
            self._ask(row, case, shape)
            if case.variant in ("umem", "umem-planned", "umem-fault"):
                mine, its = (it.get("losses_hex") for it in (row, stock.get(group, {})))
                if mine and its and case.method == group[0]:
                    row["same_bits"] = all(map(str.__eq__, mine, its))
            yield

    # ---- one process ----

    def _predict(self, row: dict[str, Any], case: _Case, shape: LlamaShape) -> None:
        self.say(f"Predicting {case.name}")
        budget_bytes = row.get("budget_bytes")
        try:
            if case.method == "inference":
                time_s = predict_generation(shape, _TOKENS, self.hardware, budget_bytes)
            else:
                given = case.method, case.variant, self.hardware, budget_bytes
                time_s = predict_training(shape, *given)
            row["predicted_s"] = time_s
        except (NotPredictedError, UmemError) as error:
            row["why_not_predicted"] = str(error)

    def _ask(self, row: dict[str, Any], case: _Case, shape: LlamaShape) -> None:
        reason = why_no_host_room(3 * shape.weight_bytes, None) if row.get("budget_bytes") else ""
        if self.left_s < _LEAST_S:
            reason = "the time is up: give more --minutes"
        if reason := reason or self.card.why_not_idle():
            row |= {"state": "left out", "reason": reason}
        else:
            if case.is_paged and case.variant != "stock":
                self.say("Compiling the planner")
                compile_planner()
            answers, job = self._job(case, shape, row.get("budget_bytes"))
            self.say(f"Running {case.name}: at most {self.left_s:.0f} s are left")
            parts = 2 if case.is_paged else 1
            row |= ask_worker(answers, job, self.card, self.left_s, parts=parts)
        row["measured_s"] = median(row.pop("steps_s", None) or row.pop("token_s", None) or ())
        self.tell(f"{case.name}: {_told(row)}")

    def _job(self, case: _Case, shape: LlamaShape, budget_bytes: int | None) -> tuple[Any, Record]:
        told: dict[str, Any] = {"model": shape, "variant": case.variant, "card": self.card}
        if case.method == "inference":
            told |= {"budget_bytes": budget_bytes, "tokens": _TOKENS, "rounds": _ROUNDS}
            return measure_generation, GenerateJob(**told, limit_s=self.left_s)
        told |= {"method": case.method, "deterministic": True}
        if case.is_paged:
            told |= {"budget_bytes": budget_bytes, "steps": _STEPS // 2}
            return measure_pages, TrainingJob(**told, managed_limit_bytes=self.managed_bytes)
        # Stock trains for as long as umem, which measures and plans first.
        told |= {"steps": _STEPS if budget_bytes else 3 * _STEPS, "accumulate": 1}
        told |= {"policy": case.method, "limit_bytes": budget_bytes}
        return measure_step, ScaleJob(**told, clip=case.variant != "umem-backward")

    # ---- what it says ----

    def checks(self) -> Iterator[Check]:
        """What has to hold on every machine: bits, and budgets by NVML."""
        outside = (it["outside_bytes"] for it in self.rows if it.get("outside_bytes"))
        beside = next(outside, 0)  # what a process takes of the card beside tensors
        for where, rows in (("", self.rows), (" in managed memory", self.paged)):
            for row in rows:
                if (same := row.get("same_bits")) is not None:
                    words = "losses of all steps have stock's bits" if same else "losses differ"
                    yield Check(f"{row['name']}{where}: bits", same, words)
                if row.get("state") in ("failed", "off"):
                    yield Check(f"{row['name']}{where}: runs", False, str(row.get("reason")))
                elif not where and row.get("budget_bytes") and row.get("card_peak_bytes"):
                    over_bytes = row["card_peak_bytes"] - beside - row["budget_bytes"]
                    sizes = (row["card_peak_bytes"], row["budget_bytes"], beside)
                    words = "{} by NVML: budget {}, process {}".format(*map(size_text, sizes))
                    yield Check(f"{row['name']}: budget", over_bytes <= CARD_MARGIN_BYTES, words)

    def write(self) -> None:
        """Write the page and the file for programs."""
        data = {
            "state": self.state,
            "header": self.provenance.model_dump(mode="json"),
            "doctor": self.diagnosis.to_dict(),
            "hardware": {name: it._asdict() for name, it in self.found.items()},
            "rows": self.rows,
            "managed": self.paged,
            "checks": [asdict(it) for it in self.checks()],
        }
        text = json.dumps(data, indent=2, default=lambda it: it.model_dump(mode="json"))
        write_file(self.folder / RECORD, text.encode())
        write_file(self.folder / PAGE, self.page().encode())

    def page(self) -> str:
        """The page, in Markdown."""
        rates = f"rates of {self.hardware.name}: {self.hardware.rates}"
        parts = [
            f"# umem on {self.machine.device_name}",
            provenance(self.provenance, rates, self.state),
            *map(markdown, self._tables()),
        ]
        return "\n\n".join(parts) + "\n"

    def _tables(self) -> Iterator[Table]:
        yield Table(
            "What has to hold",
            ("what", "holds", "by"),
            [(it.subject, "yes" if it.passed else "**NO**", it.detail) for it in self.checks()],
        )
        yield Table(
            "Predicted before it ran, and measured",
            ("run", "predicted", "measured", "off", "budget", "card's peak"),
            [_cells(it) for it in self.rows],
        )
        yield Table(
            "In managed memory; unified memory's share of memory operations (predicted)",
            ("run", "step", "of time / number / bytes", "published, of 7B on a GH200", "budget"),
            [
                (
                    it["name"],
                    seconds(it.get("measured_s")) if it.get("measured_s") else _told(it),
                    shares(it["migration"]) if it.get("migration") else NOTHING,
                    f"{100 * it['published_share']:.1f} %" if "published_share" in it else NOTHING,
                    size_text(it.get("budget_bytes")),
                )
                for it in self.paged
            ],
        )
        known = figures(load_hardware(nearest_card(self.machine)))
        yield Table(
            "This machine's rates",
            ("figure", "measured", f"in {nearest_card(self.machine)}", "how"),
            [
                (
                    name,
                    quantity_of(name).format(float(f"{it.value:.3g}")),
                    quantity_of(name).format(known[name]) if name in known else NOTHING,
                    it.how,
                )
                for name, it in self.found.items()
            ],
        )
        rows = [
            (check.name, check.status, f"{check.value} {check.why}".strip())
            for section in self.diagnosis.sections
            for check in section.checks
            if check.status in (Status.WARN, Status.FAIL) or section.title == "GPUs"
        ]
        yield Table("From umem doctor", ("what", "status", "found"), rows)
        notes = [
            (it["name"], note)
            for it in (*self.rows, *self.paged)
            for note in (it.get("why_not_predicted"), it.get("reason"), *it.get("notes", ()))
            if note
        ]
        if notes:
            yield Table("Notes", ("run", "note"), notes)


def _budget(case: _Case, stock: dict[str, Any] | None) -> int | None:
    """A share of what stock's tensors take of the card; None where stock was not measured."""
    if case.method == "inference":
        return int(_ROOM * case.shape.weight_bytes)
    if stock is None or not stock.get("measured_s"):
        return None
    share = PUBLISHED_ROOM if case.is_paged else _ROOM
    return int(share * (stock["card_peak_bytes"] - stock["outside_bytes"]))


def _off(row: dict[str, Any]) -> str:
    predicted_s, measured_s = row.get("predicted_s"), row.get("measured_s")
    return f"{100 * (predicted_s / measured_s - 1):+.0f} %" if predicted_s and measured_s else ""


def _told(row: dict[str, Any]) -> str:
    if not row.get("measured_s"):
        return f"{row.get('state', 'not run')}: {row.get('reason') or 'no figure'}"
    words = f"{seconds(row['measured_s'])} {row['unit']}"
    if row.get("predicted_s"):
        words += f", predicted {seconds(row['predicted_s'])} before ({_off(row)})"
    if row.get("budget_bytes"):
        words += f", within {format_bytes(row['budget_bytes'])}"
    return words


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    measured = row.get("measured_s")
    return (
        row["name"],
        seconds(row.get("predicted_s")),
        f"{seconds(measured)} {row['unit']}" if measured else row.get("state", "running"),
        _off(row) or NOTHING,
        size_text(row.get("budget_bytes")),
        size_text(row.get("card_peak_bytes")),
    )
