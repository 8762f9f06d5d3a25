"""Runs small programs stock and under umem, and compares checksums of every step: `make sound`.

Each program has processes of its own: stock, which trains twice, then umem within a share of
stock's peak. Several programs run at a time. Exit status 1 if a verdict is not the expected one or
a budget was not kept.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

from drawn_readers import reader_programs
from small_trainings import Program, Verdict
from sound_programs import KINDS, PROGRAMS
from umem_bench.card_processes import Peaks
from umem_bench.machine import git_commit, header
from umem_bench.processes import end_status, environment
from umem_bench.results import Header, Record, read_records, write_records
from umem_bench.rows import require_gpu
from umem_bench.tables import NOTHING, Table, print_tables, provenance, size_text

from umem import UmemError
from umem.cuda import bindings

HERE = Path(__file__).resolve().parent

MANAGED_LIMIT = "512MiB"
PROCESS_LIMIT_S = 90.0
MARGIN_BYTES = 64 << 20
"""That a process may have on the card beyond budget and what stock's has beside its tensors."""

_LEAST_S = 15.0
"""For a program that is begun."""

_NO_TIME = "no time was left"

_OWN_ERROR = re.compile(r": \w+Error: ")

_MOST_NAMED = 3
_MOST_LETTERS = 400


class Comparison(Record):
    """What a program's runs gave."""

    kind: Literal["program"] = "program"
    program: str
    file: str
    """Where it is: its kind."""
    verdict: Verdict
    expected: tuple[Verdict, ...] = ("EQUAL",)
    page: str = ""
    """Of docs/, which names why another verdict is expected."""
    detail: str = ""
    """What differs first, or an error's message."""
    trace: str = ""
    """Where a program failed."""
    records: int = 0
    """Checksums and texts that stock recorded."""
    different: int = 0
    deferred_steps: int = 0
    away_steps: int = 0
    peak_bytes: int | None = None
    """Of stock's tensors."""
    budget_bytes: int | None = None
    beyond_bytes: int | None = None
    """NVML's peak of the process less the budget and what stock's process has beside its tensors;
    None where NVML does not tell processes apart."""
    stock_s: float = 0.0
    umem_s: float = 0.0
    warnings: tuple[str, ...] = ()
    commit: str | None = None

    @property
    def is_right(self) -> bool:
        """Whether the verdict is an expected one, the budget was kept, and umem did not give up."""
        is_expected = self.verdict in (*self.expected, "NOT-RUN")
        return is_expected and self.keeps_budget is not False and not self.errors

    @property
    def errors(self) -> list[str]:
        """Warnings of umem's own errors, behind which it leaves a training alone."""
        return [it for it in self.warnings if _OWN_ERROR.search(it)]

    @property
    def keeps_budget(self) -> bool | None:
        """Whether the process stayed within its budget; None where that is not known."""
        return None if self.beyond_bytes is None else self.beyond_bytes <= MARGIN_BYTES


@dataclass(frozen=True)
class Campaign:
    """The content of a results file."""

    header: Header
    results: tuple[Comparison, ...]


# ---- running ----


@dataclass
class Runner:
    """Runs programs, on a GPU or on the CPU's late lanes.

    Parameters
    ----------
    pci_address
        Of the GPU; empty for the CPU.
    end_s
        When no process may run any more, on the monotonic clock.
    """

    pci_address: str
    end_s: float
    folder: Path
    peaks: Peaks | None = None
    commit: str | None = field(default_factory=git_commit)

    def compare(self, program: Program) -> Comparison:
        """Run a program stock and under umem."""
        told: dict[str, Any] = {
            "program": program.name,
            "file": program.kind,
            "expected": program.expected,
            "page": program.page,
            "commit": self.commit,
        }
        if reason := self._why_not(program):
            return Comparison(**told, verdict="NOT-RUN", detail=reason)
        stock, told["stock_s"] = self._run(program, "stock", None)
        reason = _why_stock_differs(stock)
        if reason:
            trace = stock.get("trace", "")
            return Comparison(**told, verdict="STOCK-DIFFERS", detail=reason, trace=trace)
        told["records"] = len(stock["records"])
        if self.pci_address:
            told["peak_bytes"] = stock["peak_bytes"]
            told["budget_bytes"] = int(stock["peak_bytes"] * program.budget)
        variant = "umem" if self.pci_address else "late"
        own, told["umem_s"] = self._run(program, variant, told.get("budget_bytes"))
        if own["status"] is None and told["umem_s"] < PROCESS_LIMIT_S:
            return Comparison(**told, verdict="NOT-RUN", detail=_NO_TIME)
        told |= {name: own.get(name) or 0 for name in ("deferred_steps", "away_steps")}
        told["warnings"] = tuple(own.get("warnings", ()))
        told["beyond_bytes"] = _beyond_bytes(stock, own, told.get("budget_bytes"))
        return Comparison(**told | _judged(stock, own))

    def _why_not(self, program: Program) -> str:
        lacking = [name for name in ("cupy", "triton") if name in program.needs]
        lacking = [name for name in lacking if find_spec(name) is None]
        if lacking:
            return f"{', '.join(lacking)} is not installed"
        if time.monotonic() > self.end_s - _LEAST_S:
            return _NO_TIME
        return ""

    def _run(
        self, program: Program, variant: str, budget_bytes: int | None
    ) -> tuple[dict[str, Any], float]:
        """What a process tells, and its time. ``status`` is None where its time ran out."""
        began_s = time.monotonic()
        name = program.name.replace(":", "-")
        result = self.folder / f"{name}-{variant}.json"
        log = self.folder / f"{name}-{variant}.log"
        command = [
            *(sys.executable, "-W", "ignore", str(HERE / "sound_process.py")),
            *(program.name, variant, str(result), str(self.folder / "lock")),
            *filter(None, [self.pci_address]),
        ]
        left_s = max(1.0, min(PROCESS_LIMIT_S, self.end_s - began_s))
        with log.open("wb") as words:
            status = end_status(command, _variables(budget_bytes), self.folder, words, left_s)
        told: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {}
        told["status"] = status
        told["words"] = log.read_text(errors="replace")[-_MOST_LETTERS:]
        if self.peaks is not None and told.get("number") is not None:
            told["card_bytes"] = self.peaks.take(told["number"])
        return told, time.monotonic() - began_s


def _variables(budget_bytes: int | None) -> dict[str, str]:
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    own = [str(HERE), str(HERE.parent / "support")]
    paths = dict.fromkeys([*own, *(os.path.abspath(it) for it in given if it)])
    return environment(
        budget_bytes,
        MANAGED_LIMIT,
        CUBLAS_WORKSPACE_CONFIG=":4096:8",
        OMP_NUM_THREADS="1",
        PYTHONDONTWRITEBYTECODE="1",
        PYTHONPATH=os.pathsep.join(paths),
        UMEM_POISON="1",
    )


# ---- judging ----


def _failure(told: dict[str, Any]) -> str:
    """Why a process has no records; empty where it has."""
    if told["status"] is None:
        return "it did not end in time"
    if told.get("error"):
        return f"step {told.get('failed_step')}: {told['error']}"
    if "records" not in told:
        return f"status {told['status']}: {told['words']}"
    return ""


def _why_stock_differs(stock: dict[str, Any]) -> str:
    if reason := _failure(stock):
        return f"stock fails: {reason}"[:_MOST_LETTERS]
    differing = _differing(stock["records"], stock["again"])
    return f"its second run differs: {differing[0]}" if differing else ""


def _differing(stock: dict[str, str], own: dict[str, str]) -> list[str]:
    """Names of the records that differ, or that only one run has."""
    return [name for name in {**stock, **own} if stock.get(name) != own.get(name)]


def _judged(stock: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Verdict and detail of a run under umem, given a stock one that equals itself."""
    detail, trace = _failure(own)[:_MOST_LETTERS], own.get("trace", "")
    if own["status"] is None:
        return {"verdict": "HANG", "detail": detail}
    if detail:
        is_umems = own.get("error_module", "").split(".")[0] == "umem" or "umem" in own.get(
            "error", ""
        )
        return {"verdict": "LOUD" if is_umems else "CRASH", "detail": detail, "trace": trace}
    if differing := _differing(stock["records"], own["records"]):
        return {
            "verdict": "DIFFERENT",
            "detail": ", ".join(differing[:_MOST_NAMED]),
            "different": len(differing),
        }
    is_active = own["deferred_steps"] or own.get("away_steps")
    return {"verdict": "EQUAL" if is_active else "NO-PLAN"}


def _beyond_bytes(
    stock: dict[str, Any], own: dict[str, Any], budget_bytes: int | None
) -> int | None:
    if budget_bytes is None or not (stock.get("card_bytes") and own.get("card_bytes")):
        return None
    beside_bytes = stock["card_bytes"] - stock["reserved_bytes"]
    return int(own["card_bytes"] - budget_bytes - beside_bytes)


def run_programs(
    programs: Sequence[Program],
    runner: Runner,
    settings: dict[str, str | int | float],
    jobs: int,
    on_results: Callable[[Campaign], None],
) -> Campaign:
    """Compare programs, some at a time. `on_results` gets the results so far after each one."""
    begun = header("sound", settings, "cupy-cuda12x", "cupy-cuda13x", "triton")
    found: dict[str, Comparison] = {}
    campaign = Campaign(begun, ())
    with ThreadPoolExecutor(jobs) as pool:
        for each in as_completed(pool.submit(runner.compare, program) for program in programs):
            result = each.result()
            found[result.program] = result
            print(_line(result), file=sys.stderr, flush=True)
            ordered = tuple(found[it.name] for it in programs if it.name in found)
            campaign = Campaign(begun, ordered)
            on_results(campaign)
    return campaign


def _line(result: Comparison) -> str:
    words = (
        f"{result.program:32} {result.verdict:14} {' '.join([result.detail, *result.errors])[:120]}"
    )
    beyond = "" if result.keeps_budget is not False else f" {size_text(result.beyond_bytes)} over"
    return f"{words}{beyond}".rstrip()


# ---- files ----


def write(campaign: Campaign, path: Path) -> None:
    """Write a results file: a line with the provenance, then one for each program."""
    write_records(campaign.header, campaign.results, path)


def read(path: Path) -> Campaign:
    """Read a results file. Raises ``UmemError`` if it is none."""
    return Campaign(*read_records(path, Comparison, "this campaign"))


# ---- the tables ----


def tables(campaign: Campaign) -> Iterator[Table]:
    """Verdicts by kind of program, then the programs that are not equal."""
    verdicts = [
        verdict
        for verdict in get_args(Verdict)
        if verdict == "EQUAL" or any(it.verdict == verdict for it in campaign.results)
    ]
    columns = ("programs", "run", *map(str.lower, verdicts), "values compared", "budgets kept")
    files = dict.fromkeys(it.file for it in campaign.results)
    rows = [
        _counts(file, [it for it in campaign.results if it.file == file], verdicts)
        for file in sorted(files, key=_place)
    ]
    yield Table("Verdicts", columns, [*rows, _counts("all", campaign.results, verdicts)])
    others = [it for it in campaign.results if it.verdict != "EQUAL" or not it.is_right]
    if others:
        named = ("program", "verdict", "expected", "what")
        yield Table("Not equal", named, list(map(_explained, others)))


def _place(file: str) -> int:
    return KINDS.index(file) if file in KINDS else len(KINDS)


def _counts(
    name: str, results: Sequence[Comparison], verdicts: Sequence[Verdict]
) -> tuple[str, ...]:
    counted = Counter(it.verdict for it in results)
    known = [it.keeps_budget for it in results if it.keeps_budget is not None]
    return (
        name,
        str(len(results)),
        *(str(counted[verdict]) for verdict in verdicts),
        f"{sum(it.records for it in results if it.verdict in ('EQUAL', 'DIFFERENT')):,}",
        f"{sum(known)} of {len(known)}" if known else NOTHING,
    )


def _explained(result: Comparison) -> tuple[str, ...]:
    words = " ".join(it.splitlines()[0] for it in (result.detail, *result.errors) if it)
    if result.keeps_budget is False:
        words = f"{words} {size_text(result.beyond_bytes)} beyond its budget".strip()
    expected = "" if result.expected == ("EQUAL",) else " or ".join(result.expected).lower()
    page = f" ({result.page})" if result.page else ""
    return result.program, result.verdict.lower(), f"{expected}{page}" or "equal", words


def show(campaign: Campaign, *, as_markdown: bool) -> None:
    """Print the tables."""
    settings = campaign.header.settings
    assert isinstance(settings, dict)
    words = f"{settings['jobs']} programs at a time, budgets of their own share of stock's peak"
    on_cpu = "late lanes on the CPU" if settings["cpu"] else words
    print_tables(provenance(campaign.header, on_cpu), tables(campaign), as_markdown=as_markdown)


# ---- the command ----


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--only", help="programs, with commas between; default: all, and none for an empty text"
    )
    parser.add_argument("--skip", default="", help="names of programs to leave out")
    parser.add_argument("--readers", type=int, default=0, metavar="N", help="drawn readers, too")
    parser.add_argument("--seed", type=int, default=0, help="of the first drawn ones")
    parser.add_argument("--minutes", type=float, default=8.0, help="what takes more is not run")
    parser.add_argument("--jobs", type=int, default=5, help="programs at a time")
    parser.add_argument("--output", type=Path, metavar="FILE")
    parser.add_argument("--cpu", action="store_true", help="on late lanes")
    parser.add_argument("--report", type=Path, metavar="FILE", help="print its tables, run nothing")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    if options.report is not None:
        show(read(options.report), as_markdown=options.markdown)
        return 0
    if not options.cpu:
        require_gpu("the campaign")
    chosen = _chosen(parser, options)
    address = "" if options.cpu else bindings.device_pci_address(0)
    peaks = Peaks(address) if address else None
    with tempfile.TemporaryDirectory(prefix="umem-sound-") as folder:
        runner = Runner(address, time.monotonic() + 60 * options.minutes, Path(folder), peaks)
        settings = {
            "jobs": options.jobs,
            "readers": options.readers,
            "seed": options.seed,
            "cpu": int(options.cpu),
        }
        campaign = run_programs(
            chosen,
            runner,
            settings,
            options.jobs,
            lambda so_far: write(so_far, options.output) if options.output else None,
        )
    if peaks is not None:
        peaks.close()
    show(campaign, as_markdown=options.markdown)
    return int(not all(it.is_right for it in campaign.results))


def _chosen(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[Program]:
    only = ",".join(PROGRAMS) if options.only is None else options.only
    names = [name.strip() for name in only.split(",") if name.strip()]
    if unknown := [name for name in names if name not in PROGRAMS]:
        parser.error(f"{', '.join(unknown)}: none of {', '.join(PROGRAMS)}")
    skipped = options.skip.split(",")
    programs = [PROGRAMS[name] for name in names if name not in skipped]
    if options.cpu:
        programs = [each for each in programs if not each.needs & {"cuda"}]
    drawn = reader_programs(options.readers, options.seed, on_cpu=options.cpu)
    return [*programs, *drawn]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UmemError as error:
        sys.exit(f"sound.py: {error}")
