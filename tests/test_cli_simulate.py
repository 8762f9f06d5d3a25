"""`umem simulate`, and predictions as rows."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import Run

from umem.cli import load_command
from umem.core.report import CAUSES
from umem.hardware import load_hardware
from umem.policy import load_policy, resolve
from umem.predict.prediction import predict, report_row
from umem.trace import load_trace

MIB = 1 << 20
LAYERS = 16
LAYER_BYTES = 64 * MIB
PHASE_US = 4000

ROW_KEYS = {
    *("workload", "planner", "hardware", "policy", "step_s", "ideal_s", "lower_bound_s", "regret"),
    *("exposed_stall_s", "um_time_share", "um_ops_share", "um_bytes_share", "bytes", "moved_bytes"),
    *("fault_pages", "fault_batches", "hints", "stall_s"),
}


def layers_document(name: str = "layers") -> dict[str, Any]:
    """Forward and backward passes through layers of weights, each with its activations."""
    weights = [
        {"id": layer, "bytes": LAYER_BYTES, "class": "weights", "persistent": True}
        for layer in range(LAYERS)
    ]
    activations = [
        {"id": LAYERS + layer, "bytes": LAYER_BYTES, "class": "activations", "persistent": False}
        for layer in range(LAYERS)
    ]
    forward = [
        {
            "name": f"forward {layer}",
            "duration_us": PHASE_US,
            "reads": [layer],
            "writes": [LAYERS + layer],
        }
        for layer in range(LAYERS)
    ]
    backward = [
        {
            "name": f"backward {layer}",
            "duration_us": PHASE_US,
            "reads": [layer, LAYERS + layer],
            "writes": [layer],
        }
        for layer in reversed(range(LAYERS))
    ]
    return {
        "format": "umem-trace/1",
        "name": name,
        "tensors": weights + activations,
        "phases": forward + backward,
    }


@pytest.fixture
def layers(tmp_path: Path) -> Path:
    path = tmp_path / "layers.json"
    path.write_text(json.dumps(layers_document()), encoding="utf-8")
    return path


def rows_of(output: str) -> list[dict[str, Any]]:
    document = json.loads(output)
    assert list(document) == ["results"]
    return document["results"]


# ---------------------------------------------------------------------------------- predictions


def test_rows_are_the_reports(layers: Path) -> None:
    hardware = load_hardware("gh200-96")
    pages = {"device_budget": "1GiB", "defaults": {"mechanism": "migrate"}}
    policy = resolve(load_policy(pages), hardware, {})
    told: list[str] = []
    reports = predict(
        load_trace(layers), hardware, policy, ("fault", "planned"), progress=told.append
    )
    assert [report.planner for report in reports] == ["fault", "planned"]
    assert told == [
        "Planning layers with fault",
        "Simulating layers with fault",
        "Planning layers with planned",
        "Simulating layers with planned",
    ]
    for report in reports:
        row = report_row(report)
        assert set(row) >= ROW_KEYS
        assert json.loads(json.dumps(row)) == row
        assert row["ideal_s"] == pytest.approx(2 * LAYERS * PHASE_US * 1e-6)
        assert row["regret"] == pytest.approx(row["step_s"] / row["lower_bound_s"])
        for direction, by_cause in row["bytes"].items():
            assert set(by_cause) <= set(CAUSES)
            total = sum(size for by_class in by_cause.values() for size in by_class.values())
            assert total == row["moved_bytes"][direction] == report.moved_bytes(direction)
    fault, planned = map(report_row, reports)
    # Half of what is live does not fit, so both have to move something.
    assert fault["fault_pages"] > 0
    assert fault["stall_s"]["fault"] > 0
    assert planned["moved_bytes"]["to_host"] > 0
    assert planned["step_s"] < fault["step_s"]
    assert planned["hints"]["issued"] > 0


# ---------------------------------------------------------------------------------- the command


@pytest.mark.slow
def test_json_is_all_that_is_printed(run: Run, layers: Path) -> None:
    status, output, errors = run(
        "simulate", "--trace", layers, "--budget", "1GiB", "--planner", "planned,fault", "--json"
    )
    assert (status, errors) == (0, "")
    rows = rows_of(output)
    assert [(row["workload"], row["planner"]) for row in rows] == [
        ("layers", "planned"),
        ("layers", "fault"),
    ]
    assert all(row["hardware"] == "gh200-96" and row["policy"] == "managed" for row in rows)
    assert all(row["step_s"] >= 0.999 * row["lower_bound_s"] for row in rows)


@pytest.mark.slow
def test_the_table_has_a_row_for_each_planner_and_fits_80_columns(run: Run, layers: Path) -> None:
    status, output, errors = run("simulate", "--trace", layers, "--budget", "1GiB")
    assert (status, errors) == (0, "")
    assert "layers on gh200-96, policy managed, 1 GiB of device memory" in output
    assert "all resident 128 ms" in output
    rows = {line.split()[0]: line for line in output.splitlines() if line}
    assert {"fault", "planned"} <= set(rows)
    assert "…" not in output
    assert all(len(line) <= 80 for line in output.splitlines())
    assert "published" not in output


@pytest.mark.slow
def test_a_published_share_stands_below_the_table(run: Run, layers: Path) -> None:
    layers.write_text(json.dumps(layers_document("llama-2-7b-lora")), encoding="utf-8")
    status, output, errors = run("simulate", "--trace", layers, "--budget", "1GiB")
    assert (status, errors) == (0, "")
    assert "published: 1.1 % of memory operations" in output
    assert "NVIDIA" in output


def test_verbose_shows_causes_and_stalls(run: Run, layers: Path) -> None:
    arguments = ("simulate", "--trace", layers, "--budget", "1GiB", "--planner", "fault", "-v")
    _, output, _ = run(*arguments)
    assert re.search(r"to device +fault +(weights|activations) ", output)
    assert re.search(r"to host +eviction ", output)
    assert re.search(r"stalls: .* page faults", output)
    assert all(len(line) <= 80 for line in output.splitlines())


def test_what_fits_costs_nothing(run: Run, layers: Path) -> None:
    _, output, _ = run("simulate", "--trace", layers, "--json")
    for row in rows_of(output):
        assert row["exposed_stall_s"] == pytest.approx(0, abs=1e-6)
        assert row["bytes"] == {}
        assert row["um_time_share"] == 0


def test_a_budget_in_percent_is_of_the_device(run: Run, layers: Path) -> None:
    share = 100 * (1 << 30) / load_hardware("gh200-96").device_bytes
    outputs = []
    for budget in ("1GiB", f"{share:.9f}%"):
        _, output, _ = run(
            "simulate", "--trace", layers, "--budget", budget, "--planner", "fault", "--json"
        )
        outputs.append(rows_of(output)[0]["fault_pages"])
    assert outputs[0] > 0
    assert outputs[0] == pytest.approx(outputs[1], rel=0.02)


@pytest.mark.slow
def test_pictures(run: Run, layers: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    layers.write_text(json.dumps(layers_document("../odd name")), encoding="utf-8")
    folder = tmp_path / "pictures"
    status, output, errors = run(
        "simulate", "--trace", layers, "--budget", "1GiB", "--plot", folder
    )
    assert (status, errors) == (0, "")
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["residency--odd-name-fault.png", "residency--odd-name-planned.png"]
    assert sorted(re.findall(r"^wrote (.*)$", output, re.MULTILINE)) == [
        str(folder / name) for name in names
    ]
    assert not [*tmp_path.glob("*odd*")]


@pytest.mark.slow
def test_both_modes_of_a_model(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    status, output, errors = run(
        "simulate", "--model", "llama-tiny", "--batch", "1", "--seq", "64", "--planner", "planned",
        "--json",
    )  # fmt: skip
    assert (status, errors) == (0, "")
    assert [(row["workload"], row["policy"]) for row in rows_of(output)] == [
        ("llama-tiny-lora", "managed"),
        ("llama-tiny-sft", "managed"),
    ]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "lama-2-7b"], "--model: 'lama-2-7b' is not known, did you mean 'llama-2-7b'?"),
        (["--model", "llama-2-7b", "--mode", "stf"], "--mode: 'stf' is not known, did you mean"),
        (["--trace", "{layers}", "--planner", "plan"], "did you mean 'planned'? Known: fault, "),
        (["--trace", "{layers}", "--planner", "fault,"], "--planner: '' is not known. Known: "),
        (["--trace", "{layers}", "--hardware", "gh200-69"], "'gh200-96'"),
        (["--trace", "{layers}", "--policy", "stf"], "did you mean 'sft'?"),
        (["--trace", "{layers}", "--budget", "16G"], "--budget: '16G' could mean 16GiB or 16GB"),
        (["--trace", "{layers}", "--budget", "120%"], "and a percent sign, such as '80%'\n"),
        (["--trace", "{layers}", "--budget", "20"], "--budget: 20 has no unit: give one, such as"),
        (["--trace", "{layers}", "--budget", "0"], "--budget: 0 is not within the device memory"),
        (["--trace", "{layers}", "--budget", "1TiB"], "give a size above 0 and at most that"),
        (["--trace", "{layers}", "--budget", "64MiB"], "uses 128 MiB at once"),
        (["--trace", "{layers}", "--model", "llama-2-7b"], "--model and --trace: give one"),
        (["--trace", "{layers}", "--mode", "sft"], "give --mode or --trace"),
        (["--trace", "{layers}", "--no-checkpoint"], "give --checkpoint or --trace"),
        (["--trace", "nowhere.json"], "umem: nowhere.json: "),
        (["--trace", "{broken}"], "broken.json: not valid JSON"),
        (["--json"], "--params, such as 7b, --trace FILE, or a script"),
        (["--trace", "{layers}", "--plot", "{layers}"], "layers.json is a file and no folder"),
        (["--trace", "{layers}", "--plot", "{layers}/p"], "layers.json is a file and no folder"),
    ],
)
def test_bad_input_gets_one_message(
    run: Run, layers: Path, tmp_path: Path, arguments: list[str], says: str
) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text('{"format": "umem-trace/1"', encoding="utf-8")
    before = sorted(tmp_path.rglob("*"))
    named = [word.format(layers=layers, broken=broken) for word in arguments]
    status, output, errors = run("simulate", *named)
    assert (status, output) == (2, "")
    assert says in errors
    assert errors.startswith("umem: ")
    assert len(errors.splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_numbers_out_of_range_get_one_message(run: Run) -> None:
    status, output, errors = run("simulate", "--model", "llama-2-7b", "--batch", "0")
    assert (status, output) == (2, "")
    assert "--batch" in errors
    assert "Traceback" not in errors


def test_missing_matplotlib_is_told_before_the_work(
    run: Run, layers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    folder = tmp_path / "pictures"
    status, output, errors = run("simulate", "--trace", layers, "--plot", folder)
    assert (status, output) == (2, "")
    assert "[plots]'" in errors
    assert not folder.exists()


def test_a_trace_that_takes_no_time_is_refused(run: Run, layers: Path) -> None:
    document = layers_document()
    for phase in document["phases"]:
        phase["duration_us"] = 0
    layers.write_text(json.dumps(document), encoding="utf-8")
    status, output, errors = run("simulate", "--trace", layers, "--json")
    assert (status, output) == (2, "")
    assert "takes no time at all: give its phases durations above 0" in errors


# ---------------------------------------------------------------------------------- docs

DOCS = (Path(__file__).resolve().parent.parent / "docs" / "simulate.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["simulate", "trace", "plan"])
def test_docs_name_every_option(name: str) -> None:
    options = [option for option in load_command(name).params if option.param_type_name == "option"]
    assert len(options) > 5
    for option in options:
        assert any(re.search(rf"`[^`]*{word}\b", DOCS) for word in option.opts), option.opts


def test_docs_name_every_key_of_a_row(run: Run, layers: Path) -> None:
    _, output, _ = run("simulate", "--trace", layers, "--planner", "fault", "--json")
    missing = [key for key in rows_of(output)[0] if f"`{key}`" not in DOCS]
    assert missing == []


@pytest.mark.slow
def test_the_example_in_the_docs_runs(
    layers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    layers.rename("step.npz")
    (example,) = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
    exec(compile(example, "docs/simulate.md", "exec"), {})
    assert (tmp_path / "residency.png").is_file()


def test_models_have_the_names_that_umem_fit_knows(run: Run) -> None:
    words = ("--mode", "sft", "--seq", 16, "--json")
    named, spelled = (
        run("simulate", "--model", it, *words) for it in ("llama-tiny", "umem/Llama_Tiny-hf")
    )
    assert named == spelled
    assert named[0] == 0
    status, _, errors = run("simulate", "--model", "llama-tony")
    assert status == 2
    assert "did you mean 'llama-tiny'" in errors


def test_what_was_predicted_before_is_said_again_without_a_search(
    run: Run, layers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = run("simulate", "--trace", layers, "--budget", "512MiB", "--json")
    kept = list((tmp_path / "umem" / "predictions").iterdir())
    assert len(kept) == 2  # by planner
    found = []

    def searched(*arguments: Any, **options: Any) -> Any:
        found.append(arguments)
        return predict(*arguments, **options)

    monkeypatch.setattr("umem.predict.prediction_cache.predict", searched)
    assert run("simulate", "--trace", layers, "--budget", "512MiB", "--json") == first
    assert not found
    kept[0].write_text("{")  # damaged
    assert run("simulate", "--trace", layers, "--budget", "512MiB", "--json") == first
    assert len(found) == 1
    run("simulate", "--trace", layers, "--budget", "640MiB")
    assert len(found) == 3
