"""The driver of the campaign: verdicts, its results file, and the page that shows its tables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from small_trainings import HOST_SIZE, PROGRAMS, Program, Run, checksum
from sound import PROCESS_LIMIT_S, Comparison, Runner, read
from sound_programs import KINDS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def process(told: dict[str, Any], status: int | None = 0) -> dict[str, Any]:
    """What a run tells."""
    return {"status": status, "words": "", "deferred_steps": 3} | told


def environment() -> dict[str, str]:
    """For the driver, with the project's umem."""
    found = (ROOT / "benchmarks", ROOT / "tests" / "support", os.environ.get("PYTHONPATH", ""))
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, map(str, found)))}


class Told(Runner):
    """Runs nothing: the answers of the processes are given."""

    def __init__(
        self, stock: dict[str, Any], own: dict[str, Any], own_s: float = PROCESS_LIMIT_S
    ) -> None:
        super().__init__("", float("inf"), Path())
        self._answers = {"stock": (process(stock), 1.0), "late": (process(own), own_s)}

    def _run(self, program: Program, variant: str, budget_bytes: int | None) -> Any:
        return self._answers[variant]


STOCK = {"records": {"000.loss": "a", "001.loss": "b"}, "again": {"000.loss": "a", "001.loss": "b"}}


@pytest.mark.parametrize(
    ("stock", "own", "verdict", "detail"),
    [
        (STOCK, {"records": STOCK["records"]}, "EQUAL", ""),
        (STOCK, {"records": {"000.loss": "a", "001.loss": "c"}}, "DIFFERENT", "001.loss"),
        (STOCK, {"records": {"000.loss": "a"}}, "DIFFERENT", "001.loss"),
        (STOCK, {"records": STOCK["records"], "deferred_steps": 0}, "NO-PLAN", ""),
        (STOCK, {"error": "PlanError: umem", "error_module": "umem.core"}, "LOUD", "PlanError"),
        (STOCK, {"error": "ValueError: x", "error_module": "builtins"}, "CRASH", "ValueError"),
        (STOCK, {"status": -11}, "CRASH", "-11"),
        (STOCK, {"status": None}, "HANG", "in time"),
        (STOCK | {"again": {"000.loss": "a"}}, {}, "STOCK-DIFFERS", "001.loss"),
        ({"error": "ValueError: x"}, {}, "STOCK-DIFFERS", "ValueError"),
    ],
)
def test_verdicts(stock: Any, own: Any, verdict: str, detail: str) -> None:
    result = Told(stock, own).compare(PROGRAMS["plain"])
    assert result.verdict == verdict
    assert detail in result.detail
    assert result.is_right == (verdict == "EQUAL")


def test_a_budget_that_is_not_kept_is_wrong() -> None:
    kept, over = (
        Comparison(program="p", file="loops", verdict="EQUAL", beyond_bytes=beyond << 20)
        for beyond in (60, 70)
    )
    assert (kept.is_right, over.is_right) == (True, False)


@pytest.mark.parametrize("is_own", [False, True])
def test_a_training_that_umem_leaves_alone_is_wrong(is_own: bool) -> None:
    words = "umem: this training is not measured any more: KeyError: 3"
    warnings = (words if is_own else "umem: all that can leave does: it takes 3 s",)
    result = Comparison(program="p", file="loops", verdict="EQUAL", warnings=warnings)
    assert result.is_right == (not is_own)
    assert result.errors == ([words] if is_own else [])


@pytest.mark.parametrize("place", [0, 17, 1 << 20, (1 << 20) + 1, (1 << 21) - 1])
def test_a_changed_bit_changes_the_checksum(place: int) -> None:
    tensor = torch.ones(1 << 21)
    before = checksum(tensor)
    for bit in (0, 31):
        tensor.view(torch.int32)[place] ^= torch.tensor(-(1 << 31) if bit else 1).to(torch.int32)
        assert checksum(tensor) != before
    assert checksum(torch.tensor([1.0, 2.0])) != checksum(torch.tensor([2.0, 1.0]))
    assert checksum(torch.zeros(2)) != checksum(torch.zeros(3))
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))


@pytest.mark.parametrize(
    "value",
    [
        torch.empty(0),
        torch.tensor(True),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.eye(2).to_sparse(),
        torch.ones(2, 3, dtype=torch.bfloat16).t(),
    ],
)
def test_any_tensor_has_a_checksum(value: torch.Tensor) -> None:
    assert checksum(value) == checksum(value.clone())


def test_each_program_says_what_it_does_and_is_of_a_kind() -> None:
    for each in PROGRAMS.values():
        assert each.train.__doc__, each.name
        assert each.kind in KINDS
        assert (each.expected == ("EQUAL",)) == (each.page == ""), each.name
        assert not each.page or (DOCS / each.page).is_file(), each.name


def test_records_of_one_name_are_kept_apart() -> None:
    run = Run(HOST_SIZE, "cpu")
    run.record("a", 1)
    run.record("a", [2, torch.ones(1)])
    run.record("a", 3)
    assert list(run.results()) == ["000.a", "000.a.0", "000.a.1", "000.a#2"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_tiny_campaign_fills_a_page(tmp_path: Path) -> None:
    results, page = tmp_path / "sound.jsonl", tmp_path / "page.md"
    driver = ROOT / "tests" / "sound" / "sound.py"
    subprocess.run(
        [
            *(sys.executable, str(driver), "--cpu", "--only", "plain"),
            *("--readers", "0", "--jobs", "2", "--output", str(results)),
        ],
        env=environment(),
        check=True,
        stdout=subprocess.DEVNULL,
    )
    campaign = read(results)
    assert campaign.header.benchmark == "sound"
    (result,) = campaign.results
    assert (result.program, result.verdict) == ("plain", "EQUAL")
    assert result.records
    assert result.deferred_steps
    report = f"<!-- python tests/sound/sound.py --report {results} --markdown -->"
    page.write_text(f"{report}\nold\n<!-- end of report -->\n")
    subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "fill_pages.py"), str(page)],
        cwd=ROOT,
        check=True,
    )
    filled = page.read_text()
    assert filled.startswith(f"{report}\n")
    assert "old" not in filled
    assert "| loops | 1 | 1 |" in filled


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_some_programs_on_a_gpu(tmp_path: Path) -> None:
    names = ("plain", "average_replayed", "average_scripted", "weights_changed_by_script")
    output = tmp_path / "sound.jsonl"
    done = subprocess.run(
        [
            *(sys.executable, str(ROOT / "tests" / "sound" / "sound.py")),
            *("--only", ",".join(names), "--readers", "60", "--jobs", "3"),
            *("--output", str(output)),
        ],
        env=environment(),
        capture_output=True,
        text=True,
    )
    results = read(output).results
    assert {it.program: (it.verdict, it.detail) for it in results} == {
        it.program: ("EQUAL", "") for it in results
    }, done.stderr
    assert len(results) == len(names) + 1
    assert all(it.keeps_budget is not False for it in results)
