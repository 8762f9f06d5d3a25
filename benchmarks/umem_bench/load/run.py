"""Runs the benchmark of loading: its rows, the files that they read, and their processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from umem.core.units import format_bytes
from umem_bench.card import Card, MemorySampler
from umem_bench.generate.measure import ACCELERATE_LEFT_BYTES, POLICY
from umem_bench.generate.run import CASES as GENERATE_CASES
from umem_bench.load.files import drop_from_page_cache, read_all, weight_files, write_model
from umem_bench.machine import git_commit, header
from umem_bench.results import (
    LOAD_VARIANTS,
    LlamaShape,
    LoadCase,
    LoadParts,
    LoadResult,
    LoadSettings,
    LoadVariant,
    Run,
    median,
)
from umem_bench.rows import (
    continued,
    find_card,
    memory_ran_out,
    rows_named,
    run_missing,
    why_no_host_room,
)
from umem_bench.scale.measure import MANAGED_LIMIT_BYTES

__all__ = ["BUDGETS_BYTES", "CASES", "Row", "parse_rows", "run_load"]

_GIB = 1 << 30

CASES: dict[LoadCase, LlamaShape] = {
    "llama-2-7b": GENERATE_CASES["llama-2-7b"],
    # For tests, on the CPU too.
    "tiny": GENERATE_CASES["tiny"],
}

BUDGETS_BYTES: dict[LoadCase, int] = {"llama-2-7b": 8 * _GIB}
"""A case without a budget has the variants read and stock only."""

_DISK_LEFT_BYTES = 1 << 30
"""Of the disk, never used."""

_PROCESS_LIMIT_S = 120.0

_LAST_LINES = 3

Row = tuple[LoadCase, LoadVariant]
"""What one result is of."""


def parse_rows(text: str) -> list[Row]:
    """The rows that a text names, as :func:`umem_bench.rows.rows_named` reads it."""
    variants = {it: LOAD_VARIANTS if it in BUDGETS_BYTES else LOAD_VARIANTS[:2] for it in CASES}
    return rows_named(text, variants, LOAD_VARIANTS)


def run_load(
    settings: LoadSettings,
    rows: Sequence[Row],
    on_progress: Callable[[str], None],
    on_results: Callable[[Run], None] = lambda _: None,
    *,
    seconds_limit: float,
    folder: Path | None = None,
    earlier: Run | None = None,
    again: bool = False,
    host_limit_bytes: int | None = None,
) -> Run:
    """Start a process for every row and round, never two at a time, that loads and makes a token.

    Rows and rounds are left out, with the reason, where the time, the disk or the host's memory
    does not suffice. The files are written once, below `folder`, and removed at the end.

    Without a GPU only ``tiny`` runs. With `earlier` results of the same settings and machine, the
    rows that they lack are run; with `again` all `rows` are. A row may take `host_limit_bytes` of
    host memory; by default what is available less 16 GiB.

    Raises
    ------
    UnsupportedError
        Where torch sees no GPU and a row needs one.
    UmemError
        If the earlier results are of other settings, another machine or other versions.
    """
    card = find_card([case for case, _ in rows], "loading")
    begun = continued(
        earlier, Run(header("load", settings, "safetensors", "accelerate"), ()), same_commit=False
    )
    earlier_results = {(it.case, it.variant): it for it in begun.loads}
    with tempfile.TemporaryDirectory(prefix="umem-bench-load-", dir=folder) as place:
        runner = _Runner(
            settings,
            card,
            Path(place),
            on_progress,
            time.monotonic() + seconds_limit,
            host_limit_bytes,
            git_commit(),
        )

        def measure_one(row: Row, _: list[LoadResult], __: LoadResult | None) -> LoadResult:
            result = runner.measure(*row)
            on_progress(_line(result))
            return result

        return run_missing(begun, rows, earlier_results, measure_one, on_results, again=again)


@dataclass
class _Runner:
    settings: LoadSettings
    card: Card | None
    place: Path
    on_progress: Callable[[str], None]
    end_s: float
    host_limit_bytes: int | None
    commit: str | None

    def measure(self, case: LoadCase, variant: LoadVariant) -> LoadResult:
        told: dict[str, Any] = {"case": case, "variant": variant, "commit": self.commit}
        if variant in ("umem", "accelerate"):
            told["budget_bytes"] = self.settings.budgets_bytes[case]
        shape = self.settings.cases[case]
        # What is written exists in memory first, and what is read in the end.
        reason = why_no_host_room(shape.weight_bytes, self.host_limit_bytes)
        reason = reason or self._why_not_written(case) or self._why_not_idle()
        if reason:
            return LoadResult(**told, state="left out", reason=reason)
        files = weight_files(self.place / case)
        told["file_bytes"] = sum(it.stat().st_size for it in files)
        began_s = time.monotonic()
        rounds: list[dict[str, Any]] = []
        while len(rounds) < self.settings.rounds:
            took_s = (time.monotonic() - began_s) / max(1, len(rounds))
            if rounds and self.end_s - time.monotonic() < took_s:
                break
            if self.settings.cold:
                drop_from_page_cache(files)
            if variant == "read":
                rounds.append({"state": "measured", "read_s": read_all(files)})
            else:
                rounds.append(self._ask(case, variant))
            if rounds[-1]["state"] != "measured":
                break
        return LoadResult(**told | self._joined(rounds))

    def _why_not_written(self, case: LoadCase) -> str:
        """Write a case's files, if they do not exist yet; why that cannot be, or an empty text."""
        target, shape = self.place / case, self.settings.cases[case]
        if target.is_dir():
            return ""
        free_bytes = shutil.disk_usage(self.place).free - _DISK_LEFT_BYTES
        if free_bytes < shape.weight_bytes:
            return (
                f"files of {format_bytes(shape.weight_bytes)} have no room: "
                f"{format_bytes(max(0, free_bytes))} are free in {self.place.parent}, less "
                f"{format_bytes(_DISK_LEFT_BYTES)}: give another --folder"
            )
        self.on_progress(f"{case}: writing {format_bytes(shape.weight_bytes)} to {target}")
        write_model(shape, target)
        return ""

    def _why_not_idle(self) -> str:
        if self.end_s < time.monotonic():
            return "no time was left: give a longer limit, or go on with --continue"
        return self.card.why_not_idle() if self.card else ""

    def _ask(self, case: LoadCase, variant: LoadVariant) -> dict[str, Any]:
        """What one process measures, and the peaks of memory meanwhile; or why it does not."""
        card = self.card and self.card.between_processes()
        budget_bytes, shape = self.settings.budgets_bytes.get(case), self.settings.cases[case]
        is_spread = variant == "accelerate" and budget_bytes is not None
        job: dict[str, Any] = {
            "folder": str(self.place / case),
            "variant": variant,
            "policy": POLICY,
            "weights": shape.weights,
            "device_map": "auto" if is_spread else "cpu" if card is None else "cuda",
            "device_bytes": (budget_bytes or 0) - ACCELERATE_LEFT_BYTES if is_spread else None,
            # More than the model, so that nothing goes to the disk.
            "host_bytes": 2 * shape.weight_bytes,
            "batch": shape.batch,
            "tokens": shape.tokens,
            "card": None if card is None else card.model_dump(),
        }
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ("UMEM_POLICY", "UMEM_DEVICE_BUDGET", "UMEM_PLANNER")
        }
        environment["UMEM_MANAGED_LIMIT"] = str(MANAGED_LIMIT_BYTES)
        environment["HF_HUB_OFFLINE"] = "1"
        if variant == "umem":
            environment["UMEM_DEVICE_BUDGET"] = str(budget_bytes)
        began_s = time.monotonic()
        with MemorySampler(card) as sampler:
            told = _run_program(job, environment)
            told |= sampler.figures()
        return told | {"process_s": time.monotonic() - began_s}

    def _joined(self, rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """One result of all rounds: the largest of sizes, and the last round's rest."""
        told = dict(rounds[-1])
        if told["state"] != "measured":
            return told | memory_ran_out(told)
        notes = {note: None for it in rounds for note in it.get("notes", ())}
        if len(rounds) < self.settings.rounds:
            wanted = self.settings.rounds
            notes[f"no time was left for more than {len(rounds)} of {wanted} rounds"] = None
        for name in ("tokens_hash", "logits_hash"):
            if len({it.get(name) for it in rounds}) > 1:
                notes[f"{name.partition('_')[0]} differ between the rounds"] = None
        for name in ("card_peak_bytes", "host_bytes", "host_process_bytes", "process_bytes"):
            if name in told:
                told[name] = max(it[name] for it in rounds)
        told["notes"] = tuple(notes)
        if "read_s" in told:
            return told | {"read_s": tuple(it["read_s"] for it in rounds)}
        return told | {"parts": tuple(LoadParts(**it["parts"]) for it in rounds)}


def _run_program(job: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
    """What a new process prints, or why it did not."""
    command = [sys.executable, "-m", "umem_bench.load.program"]
    job["started_s"] = time.perf_counter()
    try:
        done = subprocess.run(
            [*command, json.dumps(job)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_PROCESS_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        reason = f"no answer within {_PROCESS_LIMIT_S:.0f} s"
        return {"state": "failed", "reason": reason, "timed_out": True}
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        words = [f"ended with status {done.returncode}", *lines[-_LAST_LINES:]]
        return {"state": "failed", "reason": " / ".join(words)}
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {"state": "measured"} | told


def _line(result: LoadResult) -> str:
    words = f"{result.case}, {result.variant}"
    if (read_s := median(result.read_s)) is not None:
        return f"{words}: {read_s:.3g} s"
    total_s = median(it.total_s for it in result.parts)
    if total_s is None:
        return f"{words}: {result.state}: {result.reason}"
    load_s = median(it.load_s for it in result.parts)
    return f"{words}: {total_s:.3g} s to the first token, {load_s:.3g} s of them load"
