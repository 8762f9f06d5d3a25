"""Predictions held to account: `umem bench predicted` and its committed results."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from umem_bench.predicted import checks, run_predicted, system_workload
from umem_bench.results import Measurement, Run, read_results
from umem_bench.shapes import SYSTEMS

from umem import load_hardware, load_policy
from umem.fit import Workload, fit_training, load_shape
from umem.fit.estimate import stock_bytes
from umem.policy import resolve

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
TIMED = ("training", "scale", "generate", "load", "systems")


@pytest.fixture(scope="module")
def run() -> Run:
    return read_results(RESULTS / "predicted.jsonl")


def measurements(run: Run) -> list[Measurement]:
    return [it for it in run.results if isinstance(it, Measurement)]


def test_no_prediction_is_off_by_more_than_its_bound(run: Run) -> None:
    held = list(checks(run))
    assert len(held) > 150
    assert [f"{it.subject}: {it.detail}" for it in held if not it.passed] == []


def test_a_row_that_is_off_or_an_exception_that_is_not_needed_is_found(run: Run) -> None:
    good = next(it for it in measurements(run) if it.case == "h100-scale-7b, llama-2-7b-fp32, umem")
    figures = good.figures | {"predicted_s": 1.11 * good.figures["measured_s"]}
    off = replace(run, results=(good.model_copy(update={"figures": figures}),))
    first, *exceptions = checks(off)
    assert first.subject == good.case
    assert not first.passed
    assert len(exceptions) > 5
    assert not any(it.passed for it in exceptions)


def test_every_measured_row_is_in_it(run: Run) -> None:
    """`umem bench predicted --output benchmarks/results/predicted.jsonl` puts them there."""
    rows: Counter[str] = Counter()
    for path in RESULTS.glob("*.jsonl"):
        header, *lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        if header["benchmark"] in TIMED:
            rows[path.stem] = sum(it["state"] == "measured" for it in lines)
    assert Counter(it.case.partition(",")[0] for it in measurements(run)) == +rows


@pytest.mark.slow
def test_predictions_are_the_present_codes(run: Run) -> None:
    found = run_predicted(RESULTS, lambda _: None)
    assert [it.case for it in found] == [it.case for it in measurements(run)]
    for now, kept in zip(found, measurements(run), strict=True):
        assert now.figures == pytest.approx(kept.figures, rel=1e-6), now.case
        assert (now.benchmark, now.error) == (kept.benchmark, kept.error)


@pytest.mark.parametrize(
    ("file", "system"),
    [
        ("h100-systems-large", "hf_trainer_sft"),
        ("h100-systems-xlarge", "hf_trainer_sft"),
        ("h100-systems-equal-speed", "hf_trainer_lora"),
        ("h100-systems-xlarge", "hf_trainer_lora"),
        ("h200-systems-lens-and-qlora", "hf_trainer_qlora"),
    ],
)
def test_bytes_of_stock_are_those_that_torch_allocated(file: str, system: str) -> None:
    header, *rows = map(json.loads, (RESULTS / f"{file}.jsonl").read_text().splitlines())
    row = next(it for it in rows if (it["system"], it["variant"]) == (system, "stock"))
    workload, _ = system_workload(system, header["settings"])
    found = stock_bytes(workload, load_hardware("h100-sxm"))
    assert found == pytest.approx(row["peak_allocated_bytes"], rel=0.02)


@pytest.mark.slow
def test_the_gh200_beside_superoffload_is_predicted_as_its_page_says() -> None:
    docs = RESULTS.parents[1] / "docs"
    page = (docs / "gh200.md").read_text(encoding="utf-8")
    of_models = (
        ("Qwen3-14B", "qwen3-14b", 4096),
        ("Phi-4", "phi-4", 4096),
        ("Llama-3.1-8B", "llama-3.1-8b", 4096),
        ("GPT-OSS-20B, 8,192 tokens", "gpt-oss-20b", 8192),
    )
    said = []
    for name, model, seq in of_models:
        cells = []
        for gpu in ("gh200-96", "gh200-144"):
            shape, hardware = load_shape(model), load_hardware(gpu)
            workload = Workload(shape, "sft", 4, seq, "bf16-master", checkpoint=True)
            policy = resolve(load_policy("sft"), hardware, {})
            step_s = fit_training(workload, hardware, policy).umem.time_s
            assert step_s is not None
            attention = 16 * len(shape.layers) * shape.hidden * seq**2
            flops = 4 * (8 * shape.parameters * seq + attention)
            speed = "" if shape.has_experts else f", {flops / step_s / 1e12:.0f} TFLOP/s"
            cells.append(f"{step_s:.2f} s{speed}")
        assert f"| {name} | {' | '.join(cells)} |" in page
        said += [cells[0].partition(", ")[2]]
    lines = (docs / "predicted.md").read_text(encoding="utf-8")
    assert f"Qwen3-14B at {said[0]} and Phi-4 at {said[1]} on a GH200 of 96 GB" in " ".join(
        lines.split()
    )


def test_the_gh200s_steps_are_those_of_the_committed_predictions() -> None:
    page = (RESULTS.parents[1] / "docs" / "gh200.md").read_text(encoding="utf-8")
    kept = (RESULTS / "predicted-streamed.txt").read_text(encoding="utf-8")
    rows = (
        ("Llama-2-7B, fp32 + autocast", "llama-2-7b --mode sft --precision fp32-autocast"),
        ("Llama-2-13B, bf16", "llama-2-13b --mode sft --precision bf16"),
        ("GPT-OSS-20B, bf16", "gpt-oss-20b --mode sft --precision bf16"),
    )
    for name, words in rows:
        cells = []
        for machine in ("h100-sxm", "gh200-96"):
            command = f"--model {words} --batch 4 --checkpoint --policy sft --hardware {machine}\n"
            found = re.search(r"deferred +([\d.]+ m?s) +(\d+ %)", kept.partition(command)[2])
            assert found
            cells.append(", ".join(found.groups()))
        first, second = cells
        assert re.search(rf"\| {re.escape(name)} \| {first}[^|]* \| {second} \|", page), cells


def test_shapes_of_the_systems_are_those_of_their_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RESULTS.parents[1] / "tests" / "systems" / "programs"))
    monkeypatch.delitem(sys.modules, "shared", raising=False)
    from shared import SHAPES

    for size, shape in SYSTEMS.items():
        program = asdict(SHAPES[size])
        assert program.pop("checkpoints") == shape.checkpoint
        assert program == shape.model_dump(include=set(program))
