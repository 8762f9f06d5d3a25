"""The pictures of the pages show what is planned, on light and dark pages."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from umem_bench.pictures import planned_step, with_both_schemes

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"


@pytest.mark.slow
def test_tasks_of_a_lane_follow_each_other_and_fill_the_step() -> None:
    step = planned_step("llama-tiny", {"extends": "sft", "device_budget": "450MiB"})
    assert step.prediction.plan.copied
    for lane in step.lanes:
        for before, behind in pairwise(lane):
            assert before.begin_s <= before.end_s <= behind.begin_s + 1e-9
    passes = step.lanes[-1]
    assert passes[-1].end_s == pytest.approx(step.step_s)
    assert step.step_s == pytest.approx(step.prediction.plan.predicted.step_s)


@pytest.mark.parametrize("path", sorted(PICTURES.glob("*.svg")), ids=lambda path: path.name)
def test_every_colour_of_a_committed_picture_has_one_for_dark_pages(path: Path) -> None:
    svg = path.read_text(encoding="utf-8")
    rules = re.search(r"<style>@media\(prefers-color-scheme:dark\)\{(.*?)\}</style>", svg)
    assert rules
    drawn = set(re.findall(r'(fill|stroke): (#[0-9a-f]{6})(?=[;"][^]])', svg))
    assert len(drawn) > 3
    assert {f'[style*="{what}: {colour}"]' for what, colour in drawn} == set(
        re.findall(r"\[.*?\]", rules[1])
    )


def test_a_colour_keeps_its_light_value_without_rules() -> None:
    svg = with_both_schemes('<svg><defs></defs><path style="fill: #0072b2"/></svg>')
    assert '<path style="fill: #0072b2"/>' in svg
    assert svg.count("!important") == 1
