"""`umem report`: tables, rows, pictures, pages and timelines of recorded runs."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import Run
from recordings import Row, make_recording, records_of

from umem.core.classes import TensorClass
from umem.core.report import HintReport, HintUse
from umem.telemetry import MeasuredRun, load_run, measured_row, run_of, save_run
from umem.telemetry.records import Residency

MIB = 1 << 20
GIB = 1 << 30
EVIL = "<script>alert('x')</script>$\\frac$[red]\x1b[31m"


@pytest.fixture
def run(run: Run) -> Run:
    return partial(run, "report")


def recorded(workload: str = "finetune", **changes: Any) -> MeasuredRun:
    """Two steps of 1 ms: faults and hints to the device, an eviction, a copy and a memory set."""
    rows: list[Row] = [
        (0, 10_000, 60_000, 4096, 2 * MIB, 0, 2),
        (3, 9_000, 9_500, 4096, 0, 4, 0),
        (0, 100_000, 140_000, 8192, MIB, 0, 1),
        (5, 300_000, 310_000, 0, 512, 0, 0),
        (6, 400_000, 401_000, 0, 256, 0, 0),
        (0, 1_010_000, 1_060_000, 4096, 2 * MIB, 0, 2),
        (1, 120_000, 200_000, 4096, MIB // 2, 0, 4),
        (1, 1_020_000, 1_100_000, 4096, MIB // 2, 0, 4),
        (0, 1_100_000, 1_140_000, 8192, MIB, 0, 1),
        (4, 1_500_000, 1_500_000, 4096, 0, 1, 0),
    ]
    rows.sort(key=lambda row: row[1])
    classes = {(0, 2): 0, (0, 1): 3, (3, 0): 0, (1, 4): -1, (4, 0): 3}
    found = [classes.get((row[0], row[6]), -1) for row in rows]
    fields = {
        "workload": workload,
        "tensor_names": ("model.layers.0.weight",),
    }
    made = make_recording(
        rows,
        [(it, 0 if it == 0 else -1) for it in found],
        [(0, 1_000_000), (1_000_000, 2_000_000)],
        **{**fields, **changes},
    )
    return run_of(made)


def saved(path: Path, **changes: Any) -> Path:
    save_run(recorded(**changes), path)
    return path


def test_tables(run: Run, tmp_path: Path) -> None:
    code, out, err = run(saved(tmp_path / "run.json"))
    assert (code, err) == (0, "")
    assert "finetune on NVIDIA H200, policy sft, measured" in out
    assert re.search(r"median step of 2, ms +1\.000", out)
    assert re.search(r"to device +fault +weights +2 MiB +1 +50 µs", out)
    assert re.search(r"to device +hint +optimizer_state +1 MiB +1", out)
    assert re.search(r"batches of faults on the device +1\nfaults on the device +4", out)
    assert re.search(r"model\.layers\.0\.weight +weights +4 MiB +2", out)
    assert max(map(len, out.splitlines())) <= 80


def test_json_rows(run: Run, tmp_path: Path) -> None:
    paths = [saved(tmp_path / f"{name}.json", workload=name) for name in ("one", "two")]
    code, out, _ = run(*paths, "--json")
    assert code == 0
    assert json.loads(out) == {"results": [measured_row(load_run(path)) for path in paths]}


def test_a_run_without_records(run: Run, tmp_path: Path) -> None:
    path = saved(
        tmp_path / "run.json",
        source="none",
        records=records_of([]),
        notes=("memory operations were not recorded: no CUPTI",),
    )
    pictures = tmp_path / "pictures"
    code, out, _ = run(path, "--plot", pictures)
    assert code == 0
    assert "note: memory operations were not recorded: no CUPTI" in out
    assert "share" not in out
    assert "faults" not in out
    assert not pictures.exists()


@pytest.mark.slow
def test_names_from_a_file_are_escaped(run: Run, tmp_path: Path) -> None:
    path = with_hints(tmp_path / "run.json")

    content = json.loads(path.read_text())
    for step in content["steps"]:
        step.update(workload=EVIL, hardware=EVIL, policy=EVIL, notes=[EVIL])
    content["tensors"] = [{"name": EVIL, "tensor_class": "other", "bytes": 1, "count": 1}]
    path.write_text(json.dumps(content))
    code, out, _ = run(path, "--plot", tmp_path / "pictures")
    assert code == 0
    assert "\x1b" not in out
    assert "[red]" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing.json"], "missing.json: cannot be read"),
        (["{run}", "broken.json"], "broken.json: not valid JSON"),
        (["{run}", "--plot", "{run}"], "--plot: "),
    ],
)
def test_bad_input_ends_with_status_2(
    arguments: list[str], said: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = saved(tmp_path / "run.json")
    (tmp_path / "broken.json").write_text("hello")
    code, out, err = run(*(it.replace("{run}", str(path)) for it in arguments))
    assert code == 2
    assert out == ""
    assert err.startswith("umem: ")
    assert said in err
    assert sorted(it.name for it in tmp_path.iterdir()) == ["broken.json", "run.json"]


# ------------------------------------------------------------------------- hints and residency


def use(op: str, of: TensorClass, **figures: Any) -> HintUse:
    return HintUse(
        **{
            "op": op,
            "tensor_class": of,
            "asked": 1200,
            "done": 1100,
            "late": 30,
            "early": 1000,
            "missed": 2,
            "wasted": 98,
            "asked_bytes": 3 * GIB,
            "moved_bytes": 2 * GIB,
            "wasted_bytes": GIB,
            "calls": 40,
            "driver_s": 0.05,
            "late_s": 0.0125,
            **figures,
        }
    )


HINTS = HintReport(
    (
        use("prefetch", TensorClass.OPTIMIZER_STATE),
        use("evict", TensorClass.WEIGHTS, late_s=0.0, late=0, moved_bytes=GIB),
        use("advise", TensorClass.OTHER, moved_bytes=0, late_s=0.0, driver_s=0.0),
    ),
    refused=3,
    failures=1,
)


def with_hints(path: Path, **changes: Any) -> Path:
    """Save two steps of 100 ms with hints and residency; one transfer in each was recorded."""
    sizes = np.zeros((4, len(TensorClass)), np.int64)
    sizes[:, TensorClass.WEIGHTS.number] = np.array([4, 3, 4, 3]) * GIB
    fields = {
        "workload": "layers",
        "ideal_s": 0.08,
        "hints": (HINTS, HINTS),
        "residency": Residency(np.array([0, 50, 100, 150]) * 1_000_000, sizes),
        **changes,
    }
    rows: list[Row] = [
        (0, at, at + 50_000, 4096, 2 * MIB, 0, 1) for at in (10_000_000, 110_000_000)
    ]
    rows = [] if fields.get("source") == "hints" else rows
    steps = [(0, 100_000_000), (100_000_000, 200_000_000)]
    save_run(run_of(make_recording(rows, [(3, -1)] * len(rows), steps, **fields)), path)
    return path


def by_hints(path: Path) -> Path:
    """The same where CUPTI was not available."""
    notes = ("memory operations were not recorded: CUPTI is taken",)
    return with_hints(path, source="hints", notes=notes)


def test_tables_of_hints_and_residency(run: Run, tmp_path: Path) -> None:
    code, out, err = run(with_hints(tmp_path / "run.json"))
    assert (code, err) == (0, "")
    for figure, value in (
        ("exposed stall, ms", "20.000"),
        ("exposed stall, % of the step", "20.0"),
        ("all resident, ms", "80.000"),
        ("on the device at most", "4 GiB"),
        ("weights on the device at most", "4 GiB"),
    ):
        assert re.search(rf"^{figure} +{value}$", out, re.MULTILINE)
    assert re.search(
        r"prefetch +optimizer_state +1,200 +1,100 +30 +1,000 +2 +98 +2 GiB +12.500", out
    )
    words = "12.500 ms late in all, 3 requests refused, 1 driver calls failed"
    assert words in re.sub(r"\s+", " ", out)
    assert re.search(r"to device +hint +optimizer_state +2 MiB", out)
    assert max(map(len, out.splitlines())) <= 80


def test_tables_of_the_hint_engines_counts(run: Run, tmp_path: Path) -> None:
    code, out, _ = run(by_hints(tmp_path / "run.json"))
    assert code == 0
    assert "note: memory operations were not recorded: CUPTI is taken" in out
    assert "memory operations not recorded, hints as the hint engine counts them" in out
    assert re.search(r"to device +hint +optimizer_state +2 GiB +40 +50 ms", out)
    assert re.search(r"to host +hint +weights +1 GiB +40", out)
    assert "of memory operations" not in out
    assert "faults on the device" not in out
    assert "nan" not in out


@pytest.mark.slow
def test_pictures_of_the_data_that_there_is(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    paths = [with_hints(tmp_path / f"{name}.json", workload=f"{name}/..") for name in "ab"]
    code, out, _ = run(*paths, saved(tmp_path / "bare.json"), "--plot", folder)
    assert (code, out.count("wrote ")) == (0, 2)
    assert sorted(it.name for it in folder.iterdir()) == [
        "residency-0-a-.png",
        "residency-1-b-.png",
    ]
    assert all(it.read_bytes().startswith(b"\x89PNG") for it in folder.iterdir())


def test_json_rows_of_hints_and_residency(run: Run, tmp_path: Path) -> None:
    code, out, _ = run(by_hints(tmp_path / "run.json"), "--json")
    assert code == 0
    (row,) = json.loads(out)["results"]
    assert (row["source"], row["um_time_share"], row["ideal_s"]) == ("hints", None, 0.08)
    assert row["exposed_stall_s"] == pytest.approx(0.02)
    assert row["hints"]["late"] == 60
    assert row["hints"]["by_operation"]["evict"]["weights"]["moved_bytes"] == GIB
    assert row["bytes"]["to_device"]["hint"]["optimizer_state"] == 2 * GIB
    assert row["residency"]["total_peak_bytes"] == 4 * GIB
