"""The training benchmark's figures, tables, picture and file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from training_runs import GIB, made_up_run, outcome
from typer.testing import CliRunner
from umem_bench.cli.commands import app
from umem_bench.report import Grid, markdown
from umem_bench.results_file import ResultsFileError
from umem_bench.train.figures import FLOPS_FORMULA, fits, lower_bound_s, step_flops, tokens_per_s
from umem_bench.train.order import WORKLOADS
from umem_bench.train.report import grids, heading
from umem_bench.train.results import (
    BUDGETED,
    VARIANTS,
    Outcome,
    Sitting,
    TrainingModel,
    TrainingRun,
    Variant,
    read_training,
    write_training,
)

from umem.core.errors import UmemError

PAGE = 64 << 10


def table(run: TrainingRun, title: str) -> Grid:
    return next(grid for grid in grids(run) if grid.title.startswith(title))


# --- what fits ---


@pytest.mark.parametrize(
    ("entry", "fitted"),
    [
        (outcome("stock"), [100]),
        (outcome("save-on-cpu", peak_bytes=6 * GIB), [100, 60]),
        (outcome("save-on-cpu", peak_bytes=6 * GIB + PAGE - 1), [100, 60]),
        (outcome("save-on-cpu", peak_bytes=6 * GIB + PAGE), [100]),
        (outcome("torchao-offload", peak_bytes=3 * GIB), [100, 60, 30]),
        (outcome("torchao-offload", peak_bytes=11 * GIB), []),
        # Its optimizer's state is on the host.
        (outcome("umem-optimizer-host", optimizer_state_bytes=4 * GIB), [100, 60]),
        # It keeps to its budget, whatever is allocated, unless it is seen not to.
        (outcome("umem-planned", peak_bytes=12 * GIB, percent=60.0), [100, 60]),
        (outcome("umem-planned", percent=60.0, resident_bytes=6 * GIB + PAGE - 1), [100, 60]),
        (outcome("umem-planned", percent=60.0, resident_bytes=6 * GIB + PAGE), []),
        # Nobody counts.
        (outcome("rmm-pool", peak_bytes=None), []),
        (outcome("save-on-cpu", peak_bytes=GIB, state="failed", steps_s=()), []),
    ],
)
def test_a_variant_fits_the_budgets_that_its_peak_fits(entry: Outcome, fitted: list[float]) -> None:
    run = made_up_run(outcome("stock"), entry)

    assert [it for it in (100, 60, 30) if fits(run, entry, it)] == fitted


def test_nothing_fits_where_the_working_set_is_not_known() -> None:
    entry = outcome("save-on-cpu", peak_bytes=GIB)

    assert not fits(made_up_run(entry), entry, 100)
    assert not fits(made_up_run(outcome("stock", method="lora"), entry), entry, 100)


@pytest.mark.parametrize(("bandwidth", "bound_s"), [(16 * GIB, 0.25), (80 * GIB, 0.1)])
def test_the_bound_is_the_larger_of_compute_and_traffic(bandwidth: float, bound_s: float) -> None:
    state = outcome(
        "umem-optimizer-host", 0.3, optimizer_state_bytes=2 * GIB, mapped_bytes_per_s=bandwidth
    )

    assert lower_bound_s(made_up_run(outcome("stock"), state), "long") == pytest.approx(bound_s)
    assert lower_bound_s(made_up_run(state), "long") is None
    assert lower_bound_s(made_up_run(outcome("stock")), "long") is None


def test_speed_is_of_the_median_step() -> None:
    run = made_up_run()

    assert tokens_per_s(run, run.outcomes[0]) == pytest.approx(10_000)


def test_flops_follow_the_formula() -> None:
    model = TrainingModel(checkpoint=False)
    layer = 4 * 1280**2 + 3 * 1280 * 3456
    weights, head = 24 * layer + 1280 * 32_000, 1280 * 32_000
    attention = 24 * 1280 * 8192**2 / 2

    whole = 6 * weights * 8192 + 12 * attention
    again = 2 * 24 * layer * 8192 + 4 * attention
    of_head = 2 * head * 8192

    assert step_flops(model, "sft") == pytest.approx(whole + of_head)
    assert step_flops(TrainingModel(), "sft") == pytest.approx(whole + of_head + again)
    assert step_flops(TrainingModel(batch=3), "sft") == 3 * step_flops(TrainingModel(), "sft")
    # With checkpoints, all is computed four times in place of three.
    assert step_flops(TrainingModel(), "sft") == pytest.approx(whole * 4 / 3)
    frozen = 4 * weights * 8192 + 12 * attention
    assert step_flops(model, "lora") == pytest.approx(frozen + of_head)


# --- tables, picture, file ---


def test_speeds_are_by_variant_and_budget() -> None:
    over = outcome("umem-lookahead", percent=60.0, resident_bytes=7 * GIB)
    run = made_up_run(*made_up_run().outcomes, over)

    grid = table(run, "Full fine-tuning (SFT), batches of 1 x 1,000 tokens, checkpoints at every ")

    assert grid.title.endswith("working set 10 GiB: tokens/s (share of stock's) by device budget")
    assert grid.columns == ("variant", "told no budget", "100 %", "60 %", "30 %")
    reason = "off: phases[3] uses 8 GiB at once, and the device budget is 3 GiB"
    no = "does not fit"
    assert {row[0]: row[1:] for row in grid.rows} == {
        "stock": ("10,000, 10 GiB", "10,000", no, no),
        "umem-planned": ("—", "—", "5,000 (50 %)", "2,500 (25 %) without its plan"),
        "umem-lookahead": ("—", "—", "over its budget", "—"),
        "umem-fault": ("—", "—", "—", reason),
        "umem-optimizer-host": ("3,333 (33.3 %), 8 GiB", "3,333 (33.3 %)", no, no),
        "save-on-cpu": ("2,000 (20 %), 6 GiB", "2,000 (20 %)", "2,000 (20 %)", no),
        "torchao-offload": ("1,250 (12.5 %), 7 GiB", "1,250 (12.5 %)", no, no),
        "rmm-pool": ("8,000 (80 %), not counted", no, no, no),
    }


def test_intensity_is_of_the_stock_variant() -> None:
    run = made_up_run()
    model = run.settings.workloads[0].model

    grid = table(run, "What is computed, everything resident")

    flops = step_flops(model, "sft")
    assert FLOPS_FORMULA in grid.title
    assert grid.columns[-1] == "of 660 TFLOP/s"
    assert grid.rows == (
        (
            "long, sft", "batches of 1 x 1,000 tokens, checkpoints at every layer",
            f"{flops / 1e12:.4g}", "10 GiB", f"{flops / 10 / GIB:,.0f}", f"{flops / 1e11:.4g}",
            f"{100 * flops / 0.1 / 660e12:.3g} %",
        ),
    )  # fmt: skip


def test_steps_are_beside_the_stock_variant() -> None:
    (grid,) = (it for it in grids(made_up_run()) if it.title.endswith(": a training step"))

    rows = {(row[0], row[1]): row[2:] for row in grid.rows}
    assert rows["stock", "—"] == (
        "10 GiB", "100 [90 to 120]", "1800", "10,000", "100 %", "10 GiB", "100", "—", "10.2500"
    )  # fmt: skip
    assert rows["umem-planned", "60 %, 6 GiB"] == (
        "10 GiB", "200 [180 to 240]", "1756", "5,000", "50 %", "6 GiB", "100, 60", "190 / 160",
        "10.2500 same bits",
    )  # fmt: skip
    assert grid.columns[2:5] == ("allocated at most", "step, ms", "SM clock, MHz")
    assert rows["umem-planned", "30 %, 3 GiB"][1:3] == ("400 [360 to 480], without its plan", "—")
    assert rows["umem-fault", "30 %, 3 GiB"][1:3] == (
        "off: phases[3] uses 8 GiB at once, and the device budget is 3 GiB", "—"
    )  # fmt: skip
    assert rows["save-on-cpu", "—"][5:7] == ("6 GiB", "100, 60")
    assert rows["rmm-pool", "—"][5:7] == ("—", "none")
    # Another optimizer: its losses are not compared.
    assert rows["torchao-offload", "—"][-1] == "10.2500"
    assert [row[0] for row in grid.rows] == sorted(
        (row[0] for row in grid.rows),
        key=["stock", "umem-planned", "umem-fault", "umem-optimizer-host", "save-on-cpu",
             "torchao-offload", "rmm-pool"].index,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("variant", "percent"),
    [("umem-planned", 60.0), ("umem-backward-step", 60.0), ("backward-step", None),
     ("stock-again", None)],
)  # fmt: skip
@pytest.mark.parametrize(("deterministic", "word"), [(True, "10.2500 differs"), (False, "10.2500")])
def test_other_losses_differ_where_they_must_not(
    deterministic: bool, word: str, variant: Variant, percent: float | None
) -> None:
    losses_hex = tuple(it.hex() for it in (10.5, 10.25))
    other = outcome(variant, percent=percent, losses_hex=((10.75).hex(), *losses_hex[1:]))
    stock = outcome("stock", losses_hex=losses_hex)
    run = made_up_run(stock, other, deterministic=deterministic)

    (grid,) = (it for it in grids(run) if it.title.endswith(": a training step"))
    assert grid.rows[1][-1] == word


def test_umem_s_own_peak_is_beside_its_budget() -> None:
    more = outcome("umem-fault", peak_bytes=12 * GIB, percent=100.0)
    run = made_up_run(outcome("stock"), more)

    (grid,) = (it for it in grids(run) if it.title.endswith(": a training step"))
    assert grid.rows[1][1:3] == ("100 %, 10 GiB", "12 GiB")


def test_a_run_in_one_sitting_says_nothing_of_sittings() -> None:
    run = made_up_run().model_copy(update={"sittings": (Sitting(date="2026-01-02", seconds=9.0),)})

    assert "sitting" not in heading(run)
    assert not [it for it in grids(run) if "sitting" in it.title]


def test_sittings_are_named_with_the_drift_of_stock_between_them() -> None:
    first = Sitting(date="2026-01-02T03:04:05+00:00", seconds=60.0)
    again = outcome("stock", 0.11, sm_clock_mhz=1700.0, date="2026-01-03T04:05:07+00:00")
    failed = outcome("stock", method="lora", state="failed", reason="why", steps_s=())
    second = Sitting(date="2026-01-03T04:05:06+00:00", seconds=60.0, stock=(again, failed))
    run = made_up_run().model_copy(update={"sittings": (first, second)})

    assert heading(run).endswith("in 2 sittings, the last 2026-01-03T04:05:06+00:00")
    assert table(run, "Stock in each sitting").rows == (
        ("long, sft", "2026-01-02T03:04:05+00:00", "100 [90 to 120]", "1800",
         "2026-01-03T04:05:07+00:00", "110 [99 to 132]", "1700", "+10.0 %"),
    )  # fmt: skip


def test_optimizer_state_off_the_device_is_beside_its_bound() -> None:
    grid = table(made_up_run(), "SFT (long) with the optimizer's state off the device")

    assert "2 GiB, used in place at 16 GB/s" in grid.title
    bound_s = 2 * 2 * GIB / 16e9
    over = {row[0]: row[3] for row in grid.rows}
    assert over == {
        "stock": "—",
        "umem-optimizer-host": f"{0.3 / bound_s:.2f}x",
        "save-on-cpu": "—",
        "torchao-offload": f"{0.8 / bound_s:.2f}x",
        "lower bound": "1.00x",
    }
    assert grid.rows[-1][1] == f"{bound_s * 1e3:.4g}"


def test_predictions_are_beside_what_was_measured() -> None:
    grid = table(made_up_run(), "Predicted by umem's plans, and measured")

    assert grid.rows == (
        ("long, sft, umem-planned", "60 %, 6 GiB", "step", "190 ms", "200 ms", "+10 ms", "+5.3 %"),
        ("long, sft, umem-planned", "30 %, 3 GiB", "to device", "1 GiB", "2 GiB", "+1 GiB",
         "+100.0 %"),
        ("long, sft, umem-planned", "30 %, 3 GiB", "to host", "1 GiB", "1 GiB", "0 B", "+0.0 %"),
        ("long, sft, rmm-pool", "—", "to device", "1 GiB", "2 GiB", "+1 GiB", "+100.0 %"),
        ("long, sft, rmm-pool", "—", "to host", "1 GiB", "1 GiB", "0 B", "+0.0 %"),
    )  # fmt: skip
    managers = table(made_up_run(), "What umem's manager said")
    assert managers.rows == (
        ("long, sft, umem-planned", "60 %, 6 GiB", "running", "17", "1", "1.5", "6 GiB"),
    )


def test_migration_names_causes() -> None:
    grid = table(made_up_run(), "Unified memory in one profiled step")

    assert grid.rows[0] == (
        "long, sft, umem-planned", "30 %, 3 GiB", "250", "50 / 25 / 12.5", "3,456", "12", "512 MiB",
        "2 GiB (hint 1.5 GiB, fault 512 MiB)", "1 GiB (hint 1 GiB)",
    )  # fmt: skip
    assert [row[0] for row in grid.rows] == ["long, sft, umem-planned", "long, sft, rmm-pool"]


def test_what_is_missing_is_said_with_its_reason() -> None:
    run = made_up_run()

    assert table(run, "Not measured").rows == (
        ("long, sft, umem-fault", "30 %, 3 GiB", "off",
         "phases[3] uses 8 GiB at once, and the device budget is 3 GiB"),
        ("long, sft, deepspeed-offload", "—", "not installed", "no such package"),
    )  # fmt: skip
    notes = table(run, "Notes").rows
    assert ("long, sft, torchao-offload", "—", "made up") in notes
    assert any("of 17 planned steps: 2 strayed" in note for _, _, note in notes)


@pytest.mark.parametrize(
    ("stock_mhz", "own_mhz", "words"),
    [
        (1800.0, 1764.0, None),
        (1800.0, 1763.0, "1763 MHz, and 1800 under stock"),
        (1800.0, 1837.0, "1837 MHz, and 1800 under stock"),
        (1800.0, None, None),
        (None, 1800.0, None),
    ],
)
def test_clocks_that_differ_are_noted(
    stock_mhz: float | None, own_mhz: float | None, words: str | None
) -> None:
    run = made_up_run(
        outcome("stock", sm_clock_mhz=stock_mhz),
        outcome("save-on-cpu", sm_clock_mhz=own_mhz),
        # Another method's clock is its own stock's to compare.
        outcome("save-on-cpu", method="lora", sm_clock_mhz=900.0),
    )

    notes = [row for grid in grids(run) if grid.title == "Notes" for row in grid.rows]

    assert notes == (
        []
        if words is None
        else [
            ("long, sft, save-on-cpu", "—",
             f"the SM clock was {words}: compare their times with care"),
        ]
    )  # fmt: skip


def test_heading_names_the_machine_and_the_model() -> None:
    text = heading(made_up_run())

    for part in ("Made-up GPU", "driver 1.2", "CUDA 13.0", "torch 2.13.0", "rmm 26.10.0",
                 "transformers 5.0", "umem 0.1.0 (0123456789ab)", "558 million parameters",
                 "24 layers", "3 steps", "2026-01-02"):  # fmt: skip
        assert part in text
    assert "deepspeed" not in text


def test_the_picture_shows_who_fits() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.patches import Rectangle
    from matplotlib.text import Annotation
    from umem_bench.train.picture import training_figure

    figure = training_figure(made_up_run())

    (axes,) = figure.axes
    assert [text.get_text() for text in axes.get_xticklabels()] == [
        "100 %\n10 GiB", "60 %\n6 GiB", "30 %\n3 GiB"
    ]  # fmt: skip
    (line,) = axes.lines
    assert set(line.get_ydata()) == {10_000.0}  # type: ignore[arg-type]
    bars = [
        (round(bar.get_height()), round(bar.get_x() + bar.get_width() / 2), bool(bar.get_hatch()))
        for bar in axes.patches
        if isinstance(bar, Rectangle)
    ]
    # save-on-cpu has 6 GiB on the device, torchao-offload 7, and nobody knows of RMM.
    assert {bar for bar in bars if bar[0] == 2000} == {
        (2000, 0, False), (2000, 1, False), (2000, 2, True)
    }  # fmt: skip
    assert [bar for bar in bars if bar[0] == 1250] == [
        (1250, 0, False), (1250, 1, True), (1250, 2, True)
    ]  # fmt: skip
    assert all(hatched for height, _, hatched in bars if height == 8000)
    # What is told a budget stands in its own group only.
    assert [bar for bar in bars if bar[0] in (5000, 2500)] == [(5000, 1, False), (2500, 2, False)]
    (reason,) = axes.texts
    assert isinstance(reason, Annotation)
    assert reason.get_text() == "off"
    assert " ".join(axes.get_xlabel().split()) == (
        "device budget, of the working set off: umem-fault at 30 %: phases[3] uses 8 GiB at once, "
        "and the device budget is 3 GiB"
    )
    assert round(reason.xy[0]) == 2


def test_the_picture_has_a_panel_for_each_workload_and_method() -> None:
    pytest.importorskip("matplotlib")
    from umem_bench.train.picture import training_figure

    outcomes = [
        outcome(variant, method=method, workload=workload.name)
        for workload in WORKLOADS.values()
        for method in workload.methods[: 1 if workload.name == "long" else 2]
        for variant in ("stock", "save-on-cpu")
    ]
    run = made_up_run(*outcomes)
    settings = run.settings.model_copy(update={"workloads": tuple(WORKLOADS.values())})

    figure = training_figure(run.model_copy(update={"settings": settings}))

    assert [axes.get_title() for axes in figure.axes if axes.axison] == [
        "Full fine-tuning (SFT)\nbatches of 1 x 8,192 tokens, checkpoints at every layer",
        "Full fine-tuning (SFT)\nbatches of 1 x 4,096 tokens, no checkpoints",
        "LoRA\nbatches of 1 x 4,096 tokens, no checkpoints",
    ]


def test_every_variant_has_a_bar_of_its_own_colour() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.patches import Patch
    from umem_bench.train.picture import training_figure

    barred = [it for it in VARIANTS if it not in ("stock", "stock-again")]
    run = made_up_run(
        outcome("stock"),
        *(outcome(it, percent=60.0 if it in BUDGETED else None) for it in barred),
        outcome("stock-again"),
    )

    figure = training_figure(run)

    (legend,) = figure.legends
    colours = {
        text.get_text(): patch.get_facecolor()
        for text, patch in zip(legend.get_texts(), legend.legend_handles, strict=True)
        if isinstance(patch, Patch) and not patch.get_hatch()
    }
    assert list(colours) == barred
    assert len(set(colours.values())) == len(barred)


def test_there_is_no_picture_of_the_stock_variant_alone() -> None:
    pytest.importorskip("matplotlib")
    from umem_bench.train.picture import training_figure

    with pytest.raises(UmemError, match="no variant to draw beside the stock one"):
        training_figure(made_up_run(outcome("stock"), outcome("stock-again")))


def test_results_survive_the_file_and_are_shown(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path, picture = tmp_path / "results.json", tmp_path / "picture.png"
    run = made_up_run()
    write_training(run, path)
    words = ["training", "--show", str(path)]

    plain = CliRunner().invoke(app, [*words, "--plot", str(picture)])
    as_markdown = CliRunner().invoke(app, [*words, "--markdown"])
    as_json = CliRunner().invoke(app, [*words, "--json"])

    assert read_training(path) == run
    assert [it.sm_clock_mhz for it in read_training(path).outcomes[:3]] == [1800.0, 1755.5, None]
    assert plain.exit_code == as_markdown.exit_code == as_json.exit_code == 0
    assert "Made-up GPU" in plain.stdout
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert all(markdown(grid) in as_markdown.stdout for grid in grids(run))
    assert json.loads(as_json.stdout) == json.loads(path.read_text())


def test_tables_are_printed_even_where_the_picture_cannot_be_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "results.json"
    write_training(made_up_run(), path)

    def fail(_: TrainingRun) -> None:
        raise RuntimeError("no fonts")

    monkeypatch.setattr("umem_bench.train.picture.training_figure", fail)
    words = ["training", "--show", str(path), "--plot", str(tmp_path / "picture.png")]

    done = CliRunner().invoke(app, words)

    assert str(done.exception) == "no fonts"
    assert "Made-up GPU" in done.stdout


def test_a_former_name_is_read_as_that_of_today(tmp_path: Path) -> None:
    run = made_up_run(outcome("stock"), outcome("rmm-pool"), variants=("stock", "rmm-pool"))
    path = tmp_path / "results.json"
    write_training(run, path)
    path.write_text(path.read_text().replace("rmm-pool", "rmm-managed"))

    assert read_training(path) == run


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("{", "not a file of `umem bench training --output`: the file"),
        ('{"format": "umem-bench-1"}', "not a file of `umem bench training --output`: format"),
    ],
)
def test_file_without_results(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "other.json"
    if content is not None:
        path.write_text(content)

    with pytest.raises(ResultsFileError, match=message):
        read_training(path)
