"""`umem tune`: the front of predicted ways to run a training."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest
from command_line import Run
from hypothesis import given
from hypothesis import strategies as st

from umem.predict.tuning import Candidate, Point, TunedWorkload, front

TINY = ("tune", "--model", "llama-tiny", "--seq", "64", "--hardware", "h100-sxm")
WHERE = ("step_s", "device_bytes", "host_bytes")


def costs(row: dict[str, Any]) -> tuple[float, int, int]:
    return -row["tokens_per_s"], row["device_bytes"], row["host_bytes"]


def is_dominated(row: tuple[float, int, int], rows: list[tuple[float, int, int]]) -> bool:
    return any(it != row and all(a <= b for a, b in zip(it, row, strict=True)) for it in rows)


def points_of(figures: list[tuple[int, int, int]]) -> list[Point]:
    """Points of steps, device bytes and host bytes."""

    def load(_: object) -> Any:
        raise AssertionError

    candidate = Candidate(TunedWorkload({}, load), {}, "plain")
    return [Point(candidate, step, 60 / step, device, host) for step, device, host in figures]


@pytest.mark.slow
@given(st.lists(st.tuples(*[st.integers(1, 6)] * 3), min_size=1, max_size=30))
def test_the_front_has_each_point_none_outdoes(
    figures: list[tuple[int, int, int]],
) -> None:
    points = points_of(figures)
    found = [it.costs for it in front(points)]
    every = [it.costs for it in points]
    assert found == sorted({it for it in every if not is_dominated(it, every)})


@pytest.mark.slow
@given(st.lists(st.tuples(*[st.integers(1, 6)] * 3), min_size=1, max_size=30), st.floats(0.0, 0.9))
def test_a_tolerance_leaves_out_what_is_hardly_faster(
    figures: list[tuple[int, int, int]], tolerance: float
) -> None:
    def is_enough(point: Point, other: Point) -> bool:
        return (
            point.speed >= other.speed * (1.0 - tolerance)
            and point.device_bytes <= other.device_bytes
            and point.host_bytes <= other.host_bytes
        )

    points = points_of(figures)
    found = front(points, tolerance)
    assert all(it in front(points) for it in found)
    assert all(any(is_enough(it, point) for it in found) for point in points)
    assert not any(is_enough(a, b) for a in found for b in found if a is not b)


@pytest.mark.slow
def test_simulate_gives_the_figures_of_each_point(run: Run, tmp_path: Path) -> None:
    """By the command that comes with it, and the policy that was written."""
    status, text, errors = run(
        *TINY, "--batch", "1,2", "--accumulate", "2", "--budget", "30MiB,50%", "--json",
        "--policy", "plain,sft,managed", "--limit", 1000, "--output", tmp_path / "policies",
    )  # fmt: skip
    assert (status, errors) == (0, "")
    found = json.loads(text)
    rows = found["points"]
    assert found["stopped"] is None
    assert found["candidates"] == found["predicted"]
    assert len(rows) >= 3
    assert not any(is_dominated(costs(it), [costs(row) for row in rows]) for it in rows)
    for row in rows:
        assert Path(row["file"]).read_text() == row["policy"]
        command = shlex.split(row["command"])
        assert command.pop(0) == "umem"
        status, text, _ = run(*command, "--json")
        (predicted,) = json.loads(text)["results"]
        assert status == 0
        assert predicted["step_s"] == row["step_s"]
        if row["step"] in ("backward", "deferred"):
            assert [predicted[name] for name in WHERE] == [row[name] for name in WHERE]


@pytest.mark.slow
@pytest.mark.parametrize("base", ["plain", "sft", "managed"])
def test_each_kind_of_policy_can_be_simulated(run: Run, tmp_path: Path, base: str) -> None:
    """Also those that a front may lack."""
    _, text, _ = run(
        *TINY, "--policy", base, "--budget", "100%", "--no-checkpoint", "--json", "-o", tmp_path
    )
    for row in json.loads(text)["points"]:
        status, text, _ = run(*shlex.split(row["command"])[1:], "--json")
        (predicted,) = json.loads(text)["results"]
        assert (status, predicted["step_s"]) == (0, row["step_s"])
        assert row["base"] == base


@pytest.mark.slow
def test_the_table_fits_80_columns(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    status, text, _ = run(*TINY, "--budget", "30MiB,100%")
    assert status == 0
    assert max(map(len, text.splitlines())) <= 80
    assert "not measured" in text


def test_a_file_to_build_on_is_found_from_anywhere(run: Run, tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "extends: sft\ndefaults: {min_bytes: 4096}\nclasses: {optimizer_state: {fraction: 0.5}}\n"
    )
    folder = tmp_path / "elsewhere"
    status, text, _ = run(
        *TINY, "--no-checkpoint", "--policy", mine, "--budget", "1GiB", "--json", "-o", folder
    )
    row = json.loads(text)["points"][0]
    assert status == 0
    assert row["host_bytes"] > 0
    status, text, _ = run(*shlex.split(row["command"])[1:], "--json")
    assert (status, json.loads(text)["results"][0]["step_s"]) == (0, row["step_s"])


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        (("--batch", "x"), "--batch"),
        (("--accumulate", "0"), "--accumulate"),
        (("--budget", "30MiB,nothing"), "--budget"),
        (("--budget", "900GiB"), "--budget"),
        (("--policy", "sft,nowhere"), "nowhere"),
        (("--mode", "both"), "--mode"),
        (("--output", os.devnull), "--output"),
        (("--limit", "0"), "--limit"),
        (("--limit", "nan"), "--limit"),
        (("--budget", "1MiB", "--no-checkpoint"), "1 MiB"),
    ],
)
def test_bad_input_is_named(run: Run, arguments: tuple[str, ...], place: str) -> None:
    status, text, errors = run(*TINY, *arguments)
    assert (status, text) == (2, "")
    assert place in errors


@pytest.mark.slow
def test_a_trace_has_one_form(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "step.npz"
    run("trace", "--model", "llama-tiny", "--seq", "64", "--output", file)
    status, text, _ = run("tune", "--trace", file, "--budget", "50%,100%", "--json")
    assert status == 0
    assert "batch" not in json.loads(text)["points"][0]
    assert run("tune", "--trace", file, "--batch", "2")[0] == 2


SCRIPT = """
import torch

def make_step():
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    print("made")

    def step():
        model(torch.ones(32, 256)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
"""


@pytest.mark.slow
@pytest.mark.parametrize("words", [("--params", "10m", "--seq", "64"), ("train.py:make_step",)])
def test_a_size_and_a_script_are_tuned_and_simulated(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    status, text, _ = run(
        "tune", *words, "--policy", "sft", "--budget", "100%", "--json", "-o", "."
    )
    found = json.loads(text)  # without what the script prints
    assert status == 0
    for row in found["points"]:
        status, text, _ = run(*shlex.split(row["command"])[1:], "--json")
        (predicted,) = json.loads(text)["results"]
        assert (status, predicted["step_s"]) == (0, row["step_s"])
    assert ("batch" in found["points"][0]) == (words[0] == "--params")


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (("--params", "huge"), "--params"),
        (("--params", "7b", "--model", "llama-tiny"), "--model and --params"),
        (("train.py", "--trace", "step.npz"), "a script and --trace"),
        (("train.py", "--seq", "8"), "--seq"),
        (("nowhere.py:make_step",), "nowhere.py"),
    ],
)
def test_a_workload_that_cannot_be_is_named(run: Run, words: tuple[str, ...], place: str) -> None:
    for command in ("tune", "simulate", "plan"):
        status, text, errors = run(command, *words)
        assert (status, text) == (2, "")
        assert place in errors
