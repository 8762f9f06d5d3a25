"""Pictures of predictions: they show the report's figures, and files are written in one piece."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up_reports import PHASES, STEP_S, made_up_report
from small_files import trace_of_phases

from umem.core.classes import TensorClass
from umem.core.errors import UmemError, UnsupportedError
from umem.telemetry import residency_figure, save
from umem.trace import Trace
from umem.trace.published import published_share

pytest.importorskip("matplotlib")

GIB = 1 << 30
PNG = b"\x89PNG\r\n\x1a\n"


def trace_with_passes(words: list[str]) -> Trace:
    phases = len(words)
    return trace_of_phases(
        phases,
        phase_names=tuple(f"{word} layer: mm" for word in words),
        duration_s=np.full(phases, STEP_S / phases),
    )


def texts(figure: Any) -> list[str]:
    """All texts of a picture."""
    from matplotlib.text import Text

    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


def panels(figure: Any) -> list[Any]:
    """The axes of a picture."""
    return list(figure.axes)


def notes(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


# ---------------------------------------------------------------------------------- residency


def test_residency_areas_are_the_resident_bytes_by_class() -> None:
    (axes,) = panels(residency_figure(made_up_report()))
    labels = [area.get_label() for area in axes.collections]
    assert labels == ["weights", "optimizer state", "activations"]
    tops = [area.get_paths()[0].vertices[:, 1].max() for area in axes.collections]
    assert tops == pytest.approx([12, 52, 52 + PHASES - 1])
    assert axes.get_ylabel() == "on the device, GiB"
    assert axes.get_xlabel() == "time in the step, ms"
    assert axes.get_xlim() == pytest.approx((0, STEP_S * 1e3))


def test_titles_of_predictions() -> None:
    report = made_up_report()
    said = panels(residency_figure(report))[0].get_title(loc="left")
    assert said.startswith(f"predicted: {report.workload}, planner ")


def test_a_class_has_the_same_colour_in_each_picture() -> None:
    all_of_it = made_up_report()
    assert all_of_it.timeline is not None
    only_state = np.zeros_like(all_of_it.timeline.resident_bytes)
    only_state[:, TensorClass.OPTIMIZER_STATE.number] = GIB
    alone = replace(all_of_it, timeline=replace(all_of_it.timeline, resident_bytes=only_state))
    colours = []
    for report in (all_of_it, alone):
        (axes,) = panels(residency_figure(report))
        (area,) = [area for area in axes.collections if area.get_label() == "optimizer state"]
        colours.append(tuple(area.get_facecolor()[0]))
    assert colours[0] == colours[1]


def test_class_colours_differ() -> None:
    from umem.telemetry.figures import CLASS_COLOURS

    assert set(CLASS_COLOURS) == set(TensorClass)
    assert len(set(CLASS_COLOURS.values())) == len(TensorClass)


def test_the_budget_is_a_labelled_line() -> None:
    (axes,) = panels(residency_figure(made_up_report()))
    (line,) = axes.lines
    assert list(line.get_ydata()) == [60, 60]
    assert "device budget 60 GiB" in notes(axes)


def test_passes_are_marked_if_phases_are_named_by_pass() -> None:
    words = ["forward"] * 3 + ["backward"] * 3 + ["optimizer"] * 2
    (axes,) = panels(residency_figure(made_up_report(), trace_with_passes(words)))
    assert {"forward", "backward", "optimizer"} <= set(notes(axes))
    begins = [line.get_xdata()[0] for line in axes.lines if line.get_xdata()[0] > 0]
    assert begins == pytest.approx([150, 300])
    (axes,) = panels(residency_figure(made_up_report(), trace_with_passes(["gemm"] * PHASES)))
    assert notes(axes) == ["device budget 60 GiB"]


# ---------------------------------------------------------------------------------- published


@pytest.mark.parametrize(
    "changes", [{"workload": "bert"}, {"workload": "llama-2-7b-lora", "hardware": "h200"}]
)
def test_no_published_share_for_other_workloads_and_machines(changes: dict[str, str]) -> None:
    assert published_share(replace(made_up_report(), **changes)) is None  # type: ignore[arg-type]


def test_shares_are_published_of_lora_and_full_fine_tuning() -> None:
    for workload, share in (("llama-2-7b-lora", 0.011), ("llama-2-7b-sft", 0.098)):
        assert published_share(made_up_report(workload)) == share


# ---------------------------------------------------------------------------------- all of them


@pytest.mark.slow
def test_all_text_lies_within_the_picture() -> None:
    words = ["forward"] * 3 + ["backward"] * 3 + ["optimizer"] * 2
    figure = residency_figure(made_up_report(), trace_with_passes(words))
    figure.draw_without_rendering()
    width, height = figure.bbox.size
    for text in [text for axes in panels(figure) for text in axes.texts] + figure.texts:
        box = text.get_window_extent()
        assert box.x0 >= 0, text
        assert box.y0 >= 0, text
        assert box.x1 <= width, text
        assert box.y1 <= height, text


def test_a_report_without_timeline_is_refused() -> None:
    with pytest.raises(UmemError, match="no timeline to draw: simulate with timeline=True"):
        residency_figure(made_up_report(timeline=None))


@pytest.mark.slow
def test_saved_as_png_and_svg(tmp_path: Path) -> None:
    figure = residency_figure(made_up_report())
    save(figure, tmp_path / "new folder" / "shares.png")
    save(figure, tmp_path / "shares.svg")
    assert (tmp_path / "new folder" / "shares.png").read_bytes().startswith(PNG)
    drawn = (tmp_path / "shares.svg").read_text(encoding="utf-8")
    assert drawn.startswith("<?xml")
    assert "dc:date" not in drawn


@pytest.mark.slow
def test_a_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "shares.png"
    path.write_bytes(b"old")
    figure = residency_figure(made_up_report())
    figure.text(0.5, 0.5, r"$\nonsense{$")
    with pytest.raises(ValueError, match="nonsense"):
        save(figure, path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
def test_save_errors_name_the_file(tmp_path: Path) -> None:
    figure = residency_figure(made_up_report())
    with pytest.raises(UmemError, match=r"shares\.pdf: a picture's name ends in \.png or \.svg"):
        save(figure, tmp_path / "shares.pdf")
    (tmp_path / "file").touch()
    with pytest.raises(UmemError, match=r"shares\.png: cannot be written .*choose another place"):
        save(figure, tmp_path / "file" / "shares.png")


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UnsupportedError, match=r"pip install .*\[plots\]'"):
        residency_figure(made_up_report())


@pytest.mark.slow
def test_importing_the_package_loads_neither_matplotlib_nor_torch() -> None:
    check = (
        "import sys, umem.telemetry.figures\n"
        "assert not {'matplotlib', 'torch', 'numba'} & set(sys.modules), 'loaded'\n"
    )
    subprocess.run([sys.executable, "-c", check], check=True)
