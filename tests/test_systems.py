"""Programs of the systems that people use have the same losses under `umem run`, on the CPU.

There umem cannot take over, and ``--fallback`` leaves torch's own allocator in place. What is
shown is that the command starts programs as Python or torchrun does, and that the programs and the
matrix work.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda_names import cuda_means_cpu
from forked_programs import ForkedPrograms
from matrix import PROGRAMS, Runner
from rank_processes import result_file, run_ranks
from shared import checksum
from torch import distributed
from umem_bench.card import Card

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (ROOT / "benchmarks", ROOT / "tests" / "support")
SEARCHED = os.pathsep.join(filter(None, (*map(str, FOLDERS), os.environ.get("PYTHONPATH", ""))))

SYSTEMS = (*("hf_trainer_qlora", "ddp", "trl_sft", "deepspeed_zero2", "transformer_lens_cache"),)
"""By Python and by torchrun; `make systems` and tests/gpu/test_systems.py run all of them."""

TWO_GPUS = ("megatron_core_tensor", "megatron_core_pipeline", "transformer_lens_two_devices")

RANKS = 2
MEGATRON = ("data", "tensor", "pipeline")
"""What the ranks divide."""


def matrix(*arguments: str) -> str:
    """Output of the matrix's command."""
    done = run_matrix(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_matrix(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The matrix's command, which has ended."""
    return subprocess.run(
        [sys.executable, str(ROOT / "tests" / "systems" / "matrix.py"), *arguments],
        env={**os.environ, "PYTHONPATH": SEARCHED},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("system", SYSTEMS)
def test_losses_equal_stocks(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", SEARCHED)
    run = runner(0, 1)
    stock = run.measure((system, "stock"), (), None)
    if stock.state == "not installed":
        pytest.skip(f"{system}: {stock.reason}")
    assert stock.losses_hex is not None, stock.reason
    assert len(stock.losses_hex) == run.steps
    assert len(set(stock.losses_hex)) > 1
    assert run.measure((system, "umem-fallback"), (stock,), None).losses_hex == stock.losses_hex


def test_the_command_runs_stock_twice_and_umems_fallback(tmp_path: Path) -> None:
    file = tmp_path / "systems.jsonl"
    matrix(
        *("--cpu", "--size", "tiny", "--deterministic", "--forked"),
        *("--systems", "hf_trainer_sft", "--output", str(file)),
    )
    header, *rows = map(json.loads, file.read_text().splitlines())
    assert header["benchmark"] == "systems"
    assert [row["variant"] for row in rows] == ["stock", "stock-again", "umem-fallback"]
    stock, *others = (row["losses_hex"] for row in rows)
    assert len(stock) == header["settings"]["steps"]
    assert len(set(stock)) > 1
    assert others == [stock] * 2


GIB = 1 << 30
HEADER = {
    "format": "umem-bench-2",
    "benchmark": "systems",
    "date": None,
    "commit": None,
    "umem": "0.1.0",
    "machine": {"gpu": "a card", "driver": "580.1"},
    "packages": {"torch": "2.11.0"},
    "settings": {"size": "small", "steps": 3, "deterministic": 1, "budget_percent": 60},
}


def reported(folder: Path, rows: Sequence[Mapping[str, Any]], *options: str) -> list[list[str]]:
    """The cells of the tables of a results file."""
    file = folder / "systems.jsonl"
    file.write_text("".join(json.dumps(it) + "\n" for it in (HEADER, *rows)))
    shown = matrix("--report", str(file), "--markdown", *options)
    return [line.strip("| ").split(" | ") for line in shown.splitlines() if line.startswith("|")]


def test_the_table_of_a_results_file(tmp_path: Path) -> None:
    stock = {
        "system": "ddp",
        "variant": "stock",
        "state": "measured",
        "steps_s": [*[0.1] * 12, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
        "work_s": [*[9.0] * 12, 0.2, 0.2, 0.2, 0.2, 0.2, 0.4],
        "losses_hex": ["0x1p+1", "0x1p+0"],
        "weights_hex": "0x1p+3",
        "card_peak_bytes": 11 * GIB,
        "outside_bytes": GIB,
    }
    same = {
        **stock,
        "variant": "umem",
        "steps_s": [*[9.0] * 12, 4.0, 4.0, 4.0, 1.0, 1.25, 1.25],
        "work_s": [*[9.0] * 12, 0.4, 0.4, 0.4, 0.2, 0.2, 0.2],
        "card_peak_bytes": 7 * GIB,
        "plan_running": True,
        "budget_bytes": 6 * GIB,
        "notes": ["it is slow"],
    }
    other = {
        **stock,
        "variant": "umem-budget",
        "work_s": [0.4] * 18,
        "losses_hex": ["0x1p+1", "0x1p+2"],
        "weights_hex": "0x1p+4",
        "plan_running": False,
        "budget_bytes": 6 * GIB,
    }
    lacking = {"state": "not installed", "reason": "it lacks trl", "system": "trl_sft"}
    absent = (lacking | {"variant": it} for it in ("stock", "umem"))
    cells = reported(tmp_path, [stock, same, other, *absent])
    assert [it[:5] for it in cells if it[0] == "ddp"] == [
        ["ddp", "stock", "—", "100 % (100 %)", "100 %"],
        ["ddp", "umem", "equal, equal", "38.1 % (100 %)", "80 %"],
        ["ddp", "umem-budget", "differ from step 2 on, differ", "100 % (100 %)", "—"],
    ]
    assert [it[5:8] for it in cells if it[:2] == ["ddp", "umem"]] == [
        ["7 GiB (1 GiB)", "6 GiB", "yes"]
    ]
    assert [it[5:8] for it in cells if it[:2] == ["ddp", "umem-budget"]] == [
        ["11 GiB (1 GiB), over its budget", "6 GiB", "no"]
    ]
    assert [it[1:3] for it in cells if it[0] == "trl_sft"] == [
        ["stock", "not installed: it lacks trl"]
    ]
    assert ["ddp, umem", "6 GiB", "note", "it is slow"] in cells


def test_budgets_are_shares_of_stocks_memory_or_that_of_checkpoints(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Machine(monkeypatch)
    run = runner(1, 1)
    known = [run.measure(("gan", it), (), None) for it in ("stock",)]
    assert run.measure(("gan", "umem-at-checkpoints"), known, None).reason == (
        "checkpoints was not measured"
    )
    known.append(run.measure(("gan", "checkpoints"), known, None))
    budgets = [
        run.measure(("gan", it), known, None).budget_bytes
        for it in ("umem-budget", "umem-budget-40", "umem-at-checkpoints")
    ]
    assert budgets == [600, 400, 1000]
    assert "--checkpoints" in list(run.command("gan", "checkpoints"))
    assert "--checkpoints" not in list(run.command("gan", "umem-at-checkpoints"))
    assert run.measure(("lstm", "checkpoints"), known, None).state == "not comparable"


def runner(cards: int, ranks: int) -> Runner:
    """One with so many cards, of which NVML says nothing."""
    return Runner(
        size="tiny",
        steps=4,
        deterministic=True,
        cards=tuple(
            Card(pci_address=f"card {number}", idle_bytes=0, free_bytes=1 << 30)
            for number in range(cards)
        ),
        ranks=ranks,
        end_s=math.inf,
        say=print,
    )


class Machine:
    """In the place of processes, and of what NVML says of their memory."""

    WORDS = "0.2 s of each step went to memory that had to be made free or put together first"

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.sampled: list[str] = []
        self.writers: list[str] = []
        patch.setattr("matrix.is_installed", lambda _: True)
        patch.setattr("matrix.MemorySampler", self.sampler)
        patch.setattr("matrix.end_status", self.end_status)

    def sampler(self, card: Card) -> contextlib.AbstractContextManager[Any]:
        self.sampled.append(card.pci_address)
        return contextlib.nullcontext(SimpleNamespace(figures=lambda: {"card_peak_bytes": 1100}))

    def end_status(self, command: Sequence[str], _: object, __: Path, log: Any, *___: float) -> int:
        log.write(f"umem: 9 steps of Net\numem: {self.WORDS}\n".encode())
        self.writers.append(command[command.index("--writer") + 1])
        found = {
            "losses": ["0x1p+1"],
            "weights": "0x1p+1",
            "seconds": [1.0],
            "work_seconds": [1.0],
            "card_used_bytes": 900,
            "reserved_bytes": 800,
        }
        Path(command[-1]).write_text(json.dumps(found))
        return 0


@pytest.mark.parametrize(("name", "card"), list(zip(TWO_GPUS, (0, 1, 0), strict=True)))
def test_the_card_of_the_rank_that_writes_is_sampled(
    name: str, card: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch)
    stock = runner(2, 2).measure((name, "stock"), (), None)
    within = runner(2, 2).measure((name, "umem-budget"), (stock,), stock)
    assert within.budget_bytes == 600
    assert within.notes == (machine.WORDS,)
    assert machine.sampled == [f"card {card}"] * 2
    assert machine.writers == [str(card)] * 2


def test_programs_are_forked_from_one_that_has_imported_their_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module is found that only this process's path leads to."""
    (tmp_path / "imported_once.py").write_text("import os\nNUMBER = os.getpid()\n")
    program, log = tmp_path / "program.py", tmp_path / "log"
    program.write_text(
        "import imported_once, os, sys, time\n"
        "print(imported_once.NUMBER != os.getpid(), os.environ['WORD'], sys.argv[1:])\n"
        "sys.stderr.write('the end')\n"
        "time.sleep(float(sys.argv[1]))\n"
        "sys.exit(7)\n"
    )
    with pytest.raises(OSError, match="ended"):
        ForkedPrograms(["imported_once"], os.environ, 60)
    monkeypatch.syspath_prepend(str(tmp_path))
    with contextlib.closing(ForkedPrograms(["imported_once"], os.environ, 60)) as programs:
        for seconds, limit_s, status in (("0", 60.0, 7), ("600", 2.0, None), ("0", 60.0, 7)):
            words = [str(program), seconds]
            ended = programs.run(
                words, tmp_path, log, log, limit_s, variables={"WORD": f"for {seconds}"}
            )
            assert ended == status
            if status is not None:
                assert {"the end", f"True for {seconds} ['{seconds}']"} <= set(
                    log.read_text().replace("the end", "the end\n").splitlines()
                )


def test_a_checksum_shows_the_least_difference_of_large_sums() -> None:
    large = torch.full((3,), 2**60)
    other = large.clone()
    other[1] += 1
    assert float(2**60) == float(2**60 + 1)
    assert checksum(large) != checksum(other)
    assert checksum(large[:1], other) != checksum(other[:1], large)


def train_megatron(rank: int, folder: Path) -> None:
    """The main function of a rank's process: Megatron's program, with what the folder's name says.

    Each rank writes its own losses, and the last batch that it saw.
    """
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    patch = pytest.MonkeyPatch()
    cuda_means_cpu(patch)
    init, meeting = distributed.init_process_group, (folder / "meeting").as_uri()

    def meet(_backend: str) -> None:
        init("gloo", meeting, rank=rank, world_size=RANKS)

    patch.setattr(distributed, "init_process_group", meet)
    parallel = () if folder.name == "data" else ("--parallel", folder.name)
    program = str(PROGRAMS / "megatron_core.py")
    output = folder / f"output{rank}"
    words = (program, "--size", "tiny", "--steps", "3", "--writer", str(rank), *parallel)
    patch.setattr(sys, "argv", [*words, "--output", str(output)])
    logging.disable()
    names = runpy.run_path(program)
    found = json.loads(output.read_text())
    batch = names["batch"]["input_ids"].tolist()
    result_file(folder, rank).write_text(json.dumps(found | {"batch": batch}))
    patch.undo()


@pytest.mark.skipif(not find_spec("megatron"), reason="Megatron-core is not installed")
@pytest.mark.parametrize("divided", MEGATRON)
def test_megatron_divides_data_or_weights_or_layers(divided: str, tmp_path: Path) -> None:
    folder = tmp_path / divided
    folder.mkdir()
    first, second = run_ranks(train_megatron, folder, RANKS)
    assert len(set(first["losses"])) == 3
    # Ranks that divide a model see the same data, and the first one knows the last one's losses.
    same = divided != "data"
    assert (first["batch"] == second["batch"]) == same
    assert (first["losses"] == second["losses"]) == same
    assert all((it["parameters"] < 60_000) == same for it in (first, second))  # of 115,328
