"""Hints, stalls, residency and predictions in every rendering of a recorded run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import Run, umem_command

from umem.core.classes import TensorClass
from umem.core.report import HintReport, HintUse
from umem.telemetry import Recording, Residency, records_of, save_recording

MIB = 1 << 20
GIB = 1 << 30


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`umem`."""
    return umem_command(monkeypatch, capsys)


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
        use("discard", TensorClass.OTHER, moved_bytes=0, late_s=0.0, driver_s=0.0),
    ),
    refused=3,
    failures=1,
    over_budget_bytes=4 * MIB,
)


def saved(path: Path, **changes: Any) -> Path:
    """Two steps of 100 ms with hints and residency; one transfer in each was recorded."""
    rows = [(0, at, at + 50_000, 4096, 2 * MIB, 0, 1, 0, 0) for at in (10_000_000, 110_000_000)]
    sizes = np.zeros((4, len(TensorClass)), np.int64)
    sizes[:, TensorClass.WEIGHTS.number] = np.array([4, 3, 4, 3]) * GIB
    made = {
        "workload": "layers",
        "hardware": "NVIDIA H200",
        "policy": "sft",
        "source": "cupti",
        "duration_ns": 200_000_000,
        "records": records_of(rows),
        "tensor_class": np.array([3, 3], np.int8),
        "tensor": np.array([-1, -1], np.int32),
        "tensor_names": (),
        "step_start_ns": np.array([0, 100_000_000]),
        "step_end_ns": np.array([100_000_000, 200_000_000]),
        "phases": (),
        "dropped": 0,
        "notes": (),
        "ideal_s": 0.08,
        "hints": (HINTS, HINTS),
        "residency": Residency(np.array([0, 50, 100, 150]) * 1_000_000, sizes),
        **changes,
    }
    save_recording(Recording(**made), path)
    return path


def by_hints(path: Path) -> Path:
    return saved(
        path,
        source="hints",
        records=records_of([]),
        tensor_class=np.zeros(0, np.int8),
        tensor=np.zeros(0, np.int32),
        notes=("memory operations were not recorded: CUPTI is taken",),
    )


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self.images: list[str | None] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag == "img":
            self.images.append(dict(attributes)["alt"])

    def handle_endtag(self, tag: str) -> None:
        self.text += " " if tag == "td" else ""

    def handle_data(self, data: str) -> None:
        self.text += data


def page_of(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text())
    return page


def test_tables_of_a_recording(run: Run, tmp_path: Path) -> None:
    code, out, err = run("report", saved(tmp_path / "run.npz"))
    assert (code, err) == (0, "")
    assert "exposed stall: 20 ms, 20.0 % of the step (all resident: 80 ms)" in out
    assert re.search(r"prefetch +optimizer_state +1,200 +1,100 +30 +1,000 +2 +98 +2 GiB", out), out
    assert "hints late by 12.5 ms in all; 3 refused, 1 driver calls failed" in out
    assert "4 MiB over the budget" in out
    assert "on the device at most 4 GiB; by class: weights 4 GiB" in out
    assert re.search(r"to device +hint +optimizer_state +2 MiB", out)
    assert max(map(len, out.splitlines())) <= 80


def test_tables_of_the_hint_engines_counts(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("report", by_hints(tmp_path / "run.npz"))
    assert code == 0
    assert "note: memory operations were not recorded: CUPTI is taken" in out
    assert "by the hint engine's own count, without what faulted:" in out
    assert re.search(r"to device +hint +optimizer_state +2 GiB +40 +50 ms", out)
    assert re.search(r"to host +hint +weights +1 GiB +40", out)
    assert "share of memory operations" not in out
    assert "faulted on the device" not in out
    assert "nan" not in out


@pytest.mark.parametrize("kind", [saved, by_hints])
def test_html_page(kind: Callable[[Path], Path], run: Run, tmp_path: Path) -> None:
    page_path = tmp_path / "run.html"
    assert run("report", kind(tmp_path / "run.npz"), "--html", page_path)[0] == 0
    page = page_of(page_path)
    assert "exposed stall, % of the step 20.0" in page.text
    assert "prefetch optimizer_state 1,200 1,100 30 1,000 2 98 2 GiB 12.500" in page.text
    assert "3 requests refused, 1 driver calls failed, 4 MiB over" in page.text
    assert "nan" not in page.text
    pictures = [
        "Bytes on the device over the recording",
        "Bytes moved by direction, cause and class",
    ]
    if kind is saved:
        pictures.insert(1, "Rate of transfers over the recording")
        assert "recorded by CUPTI" in page.text
    else:
        assert "hints as the hint engine counts them" in page.text
        assert "moved to the device by hints 2 GiB" in page.text
        assert "faulted on the device" not in page.text
    assert page.images == pictures


def test_pictures_of_the_data_that_there_is(run: Run, tmp_path: Path) -> None:
    for kind, expected in ((saved, 3), (by_hints, 2)):
        folder = tmp_path / kind.__name__
        assert run("report", kind(tmp_path / "run.npz"), "--plot", folder)[0] == 0
        files = sorted(it.name for it in folder.iterdir())
        assert len(files) == expected
        assert "residency-layers.png" in files


def test_timeline_with_hints_and_residency(run: Run, tmp_path: Path) -> None:
    trace = tmp_path / "run.perfetto.json"
    assert run("report", saved(tmp_path / "run.npz"), "--perfetto", trace)[0] == 0
    events = json.loads(trace.read_text())["traceEvents"]
    assert [it["args"] for it in events if it["ph"] == "C"] == [
        {"weights": size * GIB} for size in (4, 3, 4, 3)
    ]
    (first, _) = [it for it in events if it["name"].startswith("step ")]
    assert first["args"]["hints late"] == 60
    assert first["args"]["hints refused"] == 3


def test_timeline_labels_what_is_missing(run: Run, tmp_path: Path) -> None:
    trace = tmp_path / "run.perfetto.json"
    assert run("report", by_hints(tmp_path / "run.npz"), "--perfetto", trace)[0] == 0
    said = {it["name"]: it["args"] for it in json.loads(trace.read_text())["traceEvents"][:2]}
    assert said["process_name"]["name"].endswith("memory operations not recorded")
    assert said["process_labels"]["labels"].endswith("CUPTI is taken")


def test_json_rows(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("report", by_hints(tmp_path / "run.npz"), "--json")
    assert code == 0
    (row,) = json.loads(out)["results"]
    assert (row["source"], row["um_time_share"], row["ideal_s"]) == ("hints", None, 0.08)
    assert row["exposed_stall_s"] == pytest.approx(0.02)
    assert row["hints"]["late"] == 60
    assert row["hints"]["by_operation"]["evict"]["weights"]["moved_bytes"] == GIB
    assert row["bytes"]["to_device"]["hint"]["optimizer_state"] == 2 * GIB
    assert row["residency"]["total_peak_bytes"] == 4 * GIB


# ---------------------------------------------------------------------------------- predictions


@pytest.fixture
def predictions(run: Run, tmp_path: Path) -> Path:
    """What `umem simulate --json` prints of a step of 16 layers of 64 MiB."""
    tensors = [
        {"id": n, "bytes": 64 * MIB, "class": "weights", "persistent": True} for n in range(16)
    ]
    phases = [
        {"name": f"forward {n}", "duration_us": 4000, "reads": [n], "writes": []} for n in range(16)
    ]
    trace = tmp_path / "layers.json"
    trace.write_text(
        json.dumps(
            {"format": "umem-trace/1", "name": "layers", "tensors": tensors, "phases": phases}
        )
    )
    words = ("--hardware", "h200-pcie", "--budget", "512MiB", "--json")
    code, out, err = run("simulate", "--trace", trace, *words)
    assert code == 0, err
    path = tmp_path / "predicted.json"
    path.write_text(out)
    return path


def test_against_predictions(run: Run, tmp_path: Path, predictions: Path) -> None:
    path = saved(tmp_path / "run.npz")
    code, out, err = run("report", path, "--against", predictions)
    assert (code, err) == (0, "")
    for planner in ("fault", "planned"):
        assert (
            f"against layers on h200-pcie, policy managed, planner {planner}, predicted"
            in re.sub(r"\s+", " ", out)
        )
    assert re.search(r"step +[\d.]+ ms +100 ms +\+[\d.]+ ms +\+[\d.]+ %", out)
    assert re.search(r"to device\.optimizer state +0 B +2 MiB +\+2 MiB", out)
    assert max(map(len, out.splitlines())) <= 80


def test_json_comparisons(run: Run, tmp_path: Path, predictions: Path) -> None:
    path = saved(tmp_path / "run.npz")
    code, out, _ = run("report", path, "--against", predictions, "--json")
    assert code == 0
    found = json.loads(out)
    assert [it["predicted"]["planner"] for it in found["comparisons"]] == ["fault", "planned"]
    figure = found["comparisons"][0]["figures"]["step_s"]
    assert figure["measured"] == pytest.approx(0.1)
    assert figure["absolute"] == pytest.approx(0.1 - figure["predicted"])
    # Without predictions there is nothing about them.
    assert list(json.loads(run("report", path, "--json")[1])) == ["results"]


def test_only_the_same_workload_is_compared_where_there_is_one(
    run: Run, tmp_path: Path, predictions: Path
) -> None:
    data = json.loads(predictions.read_text())
    data["results"].append({**data["results"][0], "workload": "another"})
    predictions.write_text(json.dumps(data))
    for workload, count in (("layers", 2), ("another", 1), ("train", 3)):
        path = saved(tmp_path / "run.npz", workload=workload)
        _, out, _ = run("report", path, "--against", predictions, "--json")
        assert len(json.loads(out)["comparisons"]) == count


def test_a_file_without_predictions(run: Run, tmp_path: Path) -> None:
    path = saved(tmp_path / "run.npz")
    code, out, err = run("report", path, "--against", path)
    assert (code, out) == (2, "")
    assert "give the output of `umem simulate --json`" in err
