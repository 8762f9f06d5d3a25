"""`umem plan`: what a plan moves, and why."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from command_line import Run
from umem_bench.published import MACHINE

from umem.core.schedule import HintOp
from umem.hardware import load_hardware, with_durations
from umem.pages.plan import plan
from umem.policy import load_policy, resolve
from umem.trace import load_trace

MIB = 1 << 20
LAYERS = 8
PAGES = ("--budget", "256MiB", "--hardware", str(MACHINE))
"""Half of the layers, on a machine where nothing gains by being used in place."""
LAYER_BYTES = 64 * MIB


@pytest.fixture
def run(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """`umem plan` in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return partial(run, "plan")


@pytest.fixture
def layers(tmp_path: Path) -> str:
    """A trace of layers of weights, read forward and written backward: 512 MiB."""
    forward: list[tuple[int, list[int]]] = [(layer, []) for layer in range(LAYERS)]
    backward = [(layer, [layer]) for layer in reversed(range(LAYERS))]
    document = {
        "format": "umem-trace/1",
        "tensors": [
            {"id": layer, "bytes": LAYER_BYTES, "class": "weights", "persistent": True}
            for layer in range(LAYERS)
        ],
        "phases": [
            {"name": f"layer {layer}", "duration_us": 4000, "reads": [layer], "writes": writes}
            for layer, writes in [*forward, *backward]
        ],
    }
    (tmp_path / "layers.json").write_text(json.dumps(document), encoding="utf-8")
    return "layers.json"


def planned(run: Run, *arguments: str) -> dict[str, Any]:
    status, output, errors = run(*arguments, "--json")
    assert (status, errors) == (0, "")
    return json.loads(output)


def test_the_summary_is_of_the_plan(run: Run, layers: str) -> None:
    data = planned(run, "--trace", layers, *PAGES)
    assert data["planning_s"] > 0
    assert data["device_budget_bytes"] == 256 * MIB
    hardware = load_hardware(MACHINE)
    trace = with_durations(load_trace(layers), hardware)
    policy = resolve(load_policy("managed"), hardware, {"UMEM_DEVICE_BUDGET": "256MiB"})
    schedule = plan(trace, hardware, policy)
    told = sum(row["count"] for by_class in data["hints"].values() for row in by_class.values())
    assert told == schedule.hint_count > 0
    prefetched = schedule.hint_tensor[schedule.hint_op == HintOp.PREFETCH]
    assert data["hints"]["prefetch"]["weights"] == {
        "count": len(prefetched),
        "bytes": len(prefetched) * LAYER_BYTES,
    }
    rows = [row for by_class in data["residency"].values() for row in by_class.values()]
    assert sum(row["count"] for row in rows) == LAYERS
    assert sum(row["bytes"] for row in rows) == LAYERS * LAYER_BYTES


def test_tables(run: Run, layers: str) -> None:
    status, output, errors = run("--trace", layers, *PAGES)
    assert (status, errors) == (0, "")
    assert re.search(r"planner planned, made in [\d.]+ (µs|ms|s)", output)
    assert re.search(r"^prefetch +weights +\d+ +\d", output, re.MULTILINE)
    assert re.search(r"^duplicate +weights +8 +512 MiB$", output, re.MULTILINE)


@pytest.mark.slow
def test_a_plan_says_why_a_tensor_was_evicted(run: Run, layers: str) -> None:
    arguments = ("--trace", layers, *PAGES, "--explain", "tensor 0")
    data = planned(run, *arguments)
    intervals = sum(row["count"] for by in data["reasons"].values() for row in by.values())
    assert intervals == 2 * LAYERS  # each layer waits for its backward pass, and for the next step
    (waits,) = [it for it in data["decisions"] if it["last_use"] == 0]
    assert waits["tensor"] == "tensor 0"
    assert waits["next_use"] == 2 * LAYERS - 1
    assert waits["leaves"]
    assert waits["reason"].startswith("pressure")
    assert data["reasons"][waits["reason"]]["weights"]["count"] > 0
    _, output, _ = run(*arguments)
    assert re.search(r"^tensor 0 +layer 0 +layer 0 +leaves", output, re.MULTILINE)

    of_class = planned(run, *arguments[:-1], "weights")
    assert {it["tensor"] for it in of_class["decisions"]} == {
        f"tensor {layer}" for layer in range(LAYERS)
    }
    phase = f"layer {LAYERS - 1}"
    for_phase = planned(run, *arguments[:-1], phase)
    assert all(it["leaves"] for it in for_phase["decisions"])

    status, output, _ = run(*arguments[:-1], "layer 0")  # whose room nothing leaves for
    assert status == 0
    assert "no tensor leaves" in output

    status, _, errors = run("--trace", layers, "--explain", "tensor 99")
    assert status == 2
    assert "'tensor 99'" in errors
    _, _, errors = run("--trace", layers, "--explain", "weihgts")
    assert "did you mean 'weights'?" in errors
    status, _, errors = run("--trace", layers, "--explain", "tensor 0", "--planner", "lookahead")
    assert status == 2
    assert "--explain" in errors


@pytest.mark.slow
def test_what_is_used_in_place_stays_on_the_host(run: Run, layers: str) -> None:
    Path("mapped.yaml").write_text(
        "extends: managed\nclasses: {weights: {mechanism: map, placement: host}}\n"
    )
    data = planned(run, "--trace", layers, "--policy", "mapped.yaml", "--explain", "weights")
    assert {it["reason"] for it in data["decisions"]} == {"in_place"}


@pytest.mark.slow
def test_the_reasons_of_a_large_class_are_summed_up(run: Run) -> None:
    words = ("--model", "llama-tiny", "--seq", "64", "--explain")
    decisions = planned(run, *words, "weights")["decisions"]
    _, output, _ = run(*words, "weights")
    (more,) = re.findall(r"^and ([\d,]+) more", output, re.MULTILINE)
    assert 0 < int(more.replace(",", "")) < len(decisions)
    _, summary = output.split("in all")
    counts = re.findall(r" ([\d,]+)$", summary.split("\n\n")[0].rstrip(), re.MULTILINE)
    assert sum(int(it.replace(",", "")) for it in counts) == len(decisions)


def test_a_plan_without_hints(run: Run, layers: str) -> None:
    status, output, _ = run("--trace", layers, "--planner", "fault")
    assert status == 0
    assert "no hints: nothing is moved ahead of need" in output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--trace", "layers.json", "--planner", "plannd"], "did you mean 'planned'?"),
        (["--trace", "layers.json", "--planner", "fault,planned"], "--planner: 'fault,planned'"),
        (["--trace", "layers.json", "--budget", "32MiB"], "raise the budget"),
        (["--model", "llama-tiny", "--mode", "both"], "--mode: 'both' is not known"),
        (["--json"], "--params, such as 7b, --trace FILE, or a script"),
    ],
)
def test_bad_input_ends_with_one_message(
    run: Run, layers: str, tmp_path: Path, arguments: list[str], says: str
) -> None:
    before = sorted(tmp_path.iterdir())
    status, output, errors = run(*arguments)
    assert (status, output) == (2, "")
    assert says in errors
    assert errors.startswith("umem: ")
    assert len(errors.splitlines()) == 1
    assert sorted(tmp_path.iterdir()) == before


def test_a_model_by_its_size_and_precision(run: Run) -> None:
    def state_bytes(*words: str) -> int:
        data = planned(run, "--params", "10m", "--seq", "64", *words)
        assert data["workload"] == "llama-10m-sft"
        return sum(it["optimizer_state"]["bytes"] for it in data["residency"].values())

    assert state_bytes() == pytest.approx(3 * state_bytes("--precision", "bf16"), rel=1e-3)


def test_a_streamed_plan_says_what_happens_to_activations(run: Run) -> None:
    """Under a policy that streams state there are blocks, and no hints."""
    pytest.importorskip("transformers")
    model = ("--model", "llama-tiny", "--batch", 8, "--seq", 512, "--precision", "bf16")
    words = (*model, "--policy", "sft", "--budget", "420MiB", "--hardware", "h100-sxm")
    status, text, errors = run(*words, "--explain", "*")
    assert (status, errors) == (0, "")
    assert "blocks resident" in text
    assert re.search(r"computed twice +model.layers.0 to model.layers.1 ", text)
    assert re.search(r"kept +model.layers.2 to model.layers.3 ", text)
    data = json.loads(run(*words, "--explain", "*", "--json")[1])
    chosen = {it["unit"]: it for it in data["activations"] if it["choice"] == "computed twice"}
    assert set(chosen) == set(data["recomputed"])
    assert all(it["compute_s"] < it["copy_s"] for it in chosen.values())
    assert json.loads(run(*words, "--json")[1])["activations"] == []
