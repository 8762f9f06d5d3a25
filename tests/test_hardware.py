"""Hardware profiles: units, sources, inheritance, errors with their place, detection, the CLI."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from cards import GB10, GH200, H200
from command_line import Run
from hypothesis import given, settings
from hypothesis import strategies as st
from small_files import trace_of_phases
from typer.testing import CliRunner
from umem_bench.published import MACHINE

from umem.cli.hardware import app
from umem.core.classes import TensorClass
from umem.core.errors import HardwareError, UnsupportedError
from umem.hardware import (
    Source,
    capabilities,
    explain_hardware,
    figures,
    hardware_names,
    load_hardware,
    with_durations,
)
from umem.hardware.capabilities import Capabilities
from umem.hardware.cards import CARDS
from umem.hardware.load import describe_machine
from umem.hardware.measure import Measured, host_update, profile_text, save_profile
from umem.hardware.model import FIGURES, PRECISIONS, RATES, quantity_of
from umem.policy import preset_names
from umem.trace import Precision, Trace

GIB = 2**30
CHECKOUT = Path(__file__).resolve().parents[1]
PROFILES = tuple(CARDS)


def write(folder: Path, text: str, name: str = "mine.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def problems_of(source: Any) -> list[str]:
    with pytest.raises(HardwareError) as caught:
        load_hardware(source)
    return str(caught.value).splitlines()


# ---------------------------------------------------------------------------------- profiles


def test_profile_names() -> None:
    assert hardware_names() == PROFILES == tuple(sorted(PROFILES))
    assert not set(PROFILES) & set(preset_names())


@pytest.mark.parametrize(
    "name", ["mi300x", "MI300A", "strix-halo", "Ryzen-AI-Max", "amd-mi355x", "gfx942"]
)
def test_amd_is_refused_by_name(name: str) -> None:
    with pytest.raises(HardwareError, match=rf"{name}: umem needs CUDA.*AMD.*umem hardware list"):
        load_hardware(name)


def test_a_file_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write(tmp_path, "extends: h200\n", "mi300x.yaml").parent)
    assert load_hardware("mi300x.yaml").name == "mi300x"


@pytest.mark.parametrize(
    ("name", "rates"), [("h200", "measured"), ("rtx-5090", "published"), ("gb10", "assumed")]
)
def test_rates_rest_on_their_worst_source(name: str, rates: str) -> None:
    hardware = load_hardware(name)
    marks = {hardware.sources[figure].mark for figure in RATES}
    assert hardware.rates == rates
    assert rates in marks
    assert "assumed" not in marks or rates == "assumed"


def test_only_what_was_measured_on_a_card_counts_as_measured() -> None:
    for name in PROFILES:
        marks = {source.mark for source in load_hardware(name).sources.values()}
        assert ("measured" in marks) is (name in ("h100-sxm", "h200")), name


def test_rates_are_no_more_than_published_peaks() -> None:
    for name, card in CARDS.items():
        hardware = load_hardware(name)
        peaks = dict(zip(("fp32", "tf32", "fp16", "bf16", "fp8"), card.peaks, strict=True))
        for precision, peak in peaks.items():
            # A type that tensor cores lack takes the way of another one.
            assert hardware.flops_per_s[precision] <= (peak or max(card.peaks)) * 1e12
        assert hardware.memory_bytes_per_s <= card.bandwidth * 1e12
        assert card.sheet.startswith("https://")


@pytest.mark.parametrize(
    ("name", "bf16"), [("rtx-3090", 71), ("rtx-4090", 165), ("rtx-5090", 210), ("t4", 8.1)]
)
def test_small_cards_do_not_have_the_rates_of_large_ones(name: str, bf16: float) -> None:
    assert load_hardware(name).flops_per_s["bf16"] <= bf16 * 1e12


@pytest.mark.parametrize("name", [*PROFILES, MACHINE.stem])
def test_profile_loads_under_its_own_name_with_a_source_for_every_figure(name: str) -> None:
    hardware = load_hardware(MACHINE if name == MACHINE.stem else name)
    assert hardware.name == name
    assert hardware.description
    values = figures(hardware)
    assert set(hardware.sources) == set(values)
    assert all(len(source.text) > 5 for source in hardware.sources.values())
    assert set(hardware.flops_per_s) == set(PRECISIONS)
    assert hardware.one_pool == (hardware.host_bytes == 0)
    assert all(
        value > 0 or (field == "host_bytes" and hardware.one_pool)
        for field, value in values.items()
        if isinstance(value, int | float) and field.endswith(("_bytes", "bytes_per_s"))
    )


def test_faults_of_an_h200_have_the_mean_of_the_measured_rates() -> None:
    h200 = load_hardware("h200")
    pages = h200.block_bytes // h200.page_bytes
    faulting = int(h200.speculation_threshold * pages) + 1
    assert (pages, faulting) == (32, 17)
    blocks = h200.faults_per_batch // faulting
    moved = blocks * h200.block_bytes
    time_s = (
        h200.fault_batch_s
        + blocks * faulting * h200.fault_service_s
        + moved / h200.to_device_bytes_per_s
    )
    assert moved / time_s == pytest.approx(math.sqrt(5e9 * 12e9), rel=1e-3)


def test_call_cost_of_an_h200_gives_the_measured_rate_of_four_threads() -> None:
    h200 = load_hardware("h200")
    chunk = 32 * 2**20
    rate = chunk / (h200.call_s + chunk / h200.to_device_bytes_per_s)
    assert rate == pytest.approx(49e9, rel=1e-3)


def test_the_machine_of_g10() -> None:
    g10 = load_hardware(MACHINE)
    assert (g10.device_bytes, g10.host_bytes) == (40 * GIB, 128 * GIB)
    assert g10.to_device_bytes_per_s == g10.to_host_bytes_per_s == 15.754e9
    assert g10.link_bytes_per_s == 2 * 15.754e9
    assert (g10.fault_batch_s, g10.fault_service_s, g10.call_s) == (45e-6, 0, 0)
    assert (g10.fault_eviction, g10.eviction_order) == ("overlapped", "access")
    real = load_hardware("a100-40-pcie")
    assert (real.fault_eviction, real.eviction_order) == ("serial", "migration")
    assert real.fault_service_s > 0


def test_grace_hoppers_differ_in_their_memory_only() -> None:
    small, large = load_hardware("gh200-96"), load_hardware("gh200-144")
    assert small.ats
    assert large.ats
    theirs = figures(large)
    differing = {field for field, value in figures(small).items() if theirs[field] != value}
    assert differing == {"device_bytes", "memory_bytes_per_s"}


def test_load_hardware_returns_a_machine_as_it_is_and_refuses_other_types() -> None:
    hardware = load_hardware("h200")
    assert load_hardware(hardware) is hardware
    with pytest.raises(TypeError, match=r"a hardware profile is a name, .* not int"):
        load_hardware(5)  # type: ignore[arg-type]


def test_a_loaded_machine_is_frozen() -> None:
    hardware = load_hardware("h200")
    with pytest.raises(TypeError):
        hardware.flops_per_s["bf16"] = 1.0  # type: ignore[index]
    with pytest.raises(TypeError):
        hardware.sources["call_s"] = Source("", True)  # type: ignore[index]


# ---------------------------------------------------------------------------------- extends


def test_a_figure_replaces_the_inherited_one_with_its_source(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        extends: h200
        description: two cards share the link
        call_s: {value: 1 ms, assumption: slow}
        flops_per_s: {bf16: {value: 1 PFLOP/s, source: measured}}
        """,
    )
    mine, h200 = load_hardware(path), load_hardware("h200")
    assert (mine.name, mine.description) == ("mine", "two cards share the link")
    assert (mine.call_s, mine.sources["call_s"]) == (1e-3, Source("slow", True))
    assert mine.flops_per_s["bf16"] == 1e15
    assert mine.flops_per_s["fp32"] == h200.flops_per_s["fp32"]
    assert mine.sources["launch_s"] == h200.sources["launch_s"]


def test_an_inherited_source_does_not_serve_a_new_value(tmp_path: Path) -> None:
    path = write(tmp_path, "extends: h200\ncall_s: {value: 1 ms}\n")
    (problem,) = problems_of(path)
    assert problem.startswith(
        f"{path}:2:1: call_s.source: neither source nor assumption: say where"
    )


def test_a_mapping_may_extend_a_profile() -> None:
    mapping = {"extends": "gh200-96", "host_bytes": {"value": 2**40, "assumption": "more of it"}}
    assert load_hardware(mapping).host_bytes == 2**40
    (problem,) = problems_of({"extends": "gh200-96", "hots_bytes": {}})
    assert problem.startswith("hardware profile mapping: hots_bytes: unknown key, did you mean")


# ---------------------------------------------------------------------------------- errors


def test_all_problems_are_reported_in_order(tmp_path: Path) -> None:
    path = write(tmp_path, "extends: h200\nnme: x\ncall_s: {value: 1}\nats: {value: 1}\n")
    places = [line.removeprefix(f"{path}:").split(": ")[:2] for line in problems_of(path)]
    assert places == [
        ["2:1", "nme"],
        ["3:1", "call_s.source"],
        ["3:10", "call_s.value"],
        ["4:1", "ats.source"],
        ["4:7", "ats.value"],
    ]


def test_an_empty_profile_misses_every_field(tmp_path: Path) -> None:
    problems = problems_of(write(tmp_path, "name: nothing\n"))
    assert f"{len(FIGURES) - 10} more problems" in problems.pop()
    assert len(problems) == 10
    assert any("call_s: missing: add the key" in line for line in problems)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("h20", "no hardware profile is called 'h20', did you mean 'h200'? "),
        ("5090", "did you mean 'rtx-5090'? "),
        ("h100", "did you mean 'h100-nvl', 'h100-pcie' or 'h100-sxm'? "),
        ("GH200", "did you mean 'gh200-144', 'gh200-96' or 'gh200-quad'? "),
        ("zzz", f"Known: {', '.join(PROFILES)}"),
        ("no/such.yaml", "no/such.yaml: cannot be read (no such file or directory)"),
        ("a\0.yaml", "null"),
        ("", "no hardware profile is called ''"),
    ],
)
def test_unknown_names_and_files(name: str, says: str) -> None:
    (problem,) = problems_of(name)
    assert says in problem


def test_a_mapping_that_holds_itself_is_refused() -> None:
    endless: dict[str, Any] = {}
    endless["call_s"] = endless
    (problem,) = problems_of(endless)
    assert "nested too deeply" in problem


# ---------------------------------------------------------------------------------- quantities


@pytest.mark.parametrize(
    ("figure", "text", "value"),
    [
        ("call_s", "45 us", 45e-6),
        ("call_s", "13.33us", 13.33e-6),
        ("call_s", " 0 s ", 0.0),
        ("call_s", "1_000 ns", 1e-6),
        ("link_bytes_per_s", "15.754 GB/s", 15.754e9),
        ("link_bytes_per_s", "2 GiB/s", 2.0 * GIB),
        ("link_bytes_per_s", "4.36 TB/s", 4.36e12),
        ("copy_slowdown_s_per_byte", "5 ms/GiB", 5e-3 / GIB),
        ("copy_slowdown_s_per_byte", "1 s/TB", 1e-12),
        ("flops_per_s", "1.2 PFLOP/s", 1.2e15),
        ("device_bytes", "144 GB", 144 * 10**9),
        ("device_bytes", 2**40, 2**40),
    ],
)
def test_quantities_are_read_exactly(figure: str, text: Any, value: float) -> None:
    parse = quantity_of(figure).parse
    assert parse is not None
    read = parse(text)
    assert (read, type(read)) == (value, type(value))


@pytest.mark.slow
@settings(deadline=None)
@given(st.sampled_from(PROFILES), st.floats(0.3, 3.0))
def test_shown_figures_can_be_read_back(name: str, factor: float) -> None:
    profile = load_hardware(name)
    scaled = {
        field: value * factor
        for field, value in figures(profile).items()
        if field.endswith("_per_s") and "." not in field
    }
    hardware = replace(profile, **scaled)
    written: dict[str, Any] = {"flops_per_s": {}}
    for row in explain_hardware(hardware):
        *outer, key = row.field.split(".")
        below = written[outer[0]] if outer else written
        below[key] = {"value": yaml.safe_load(row.value), "source": "shown"}
    read = figures(load_hardware(written))
    for field, value in figures(hardware).items():
        # 139.8 GiB is the only size that is rounded.
        exact = not isinstance(value, float) and field != "device_bytes"
        assert read[field] == (
            value if exact else pytest.approx(value, rel=1e-3 if field == "device_bytes" else 1e-5)
        )


@pytest.mark.parametrize(
    ("figure", "value", "text"),
    [
        ("call_s", 0.0, "0 s"),
        ("call_s", 27e-6, "27 us"),
        ("link_bytes_per_s", 1.41e12, "1.41 TB/s"),
        ("link_bytes_per_s", 999e9, "999 GB/s"),
        ("copy_slowdown_s_per_byte", 1e-7 / GIB, "0.0001 ms/GiB"),
        ("device_bytes", 40 * GIB, "40 GiB"),
        ("device_bytes", 480 * 10**9, "480 GB"),
        ("device_bytes", 150109880320, "139.8 GiB"),
    ],
)
def test_figures_are_shown_with_their_units(figure: str, value: Any, text: str) -> None:
    assert quantity_of(figure).format(value) == text


def test_explain_has_a_row_for_every_figure() -> None:
    hardware = load_hardware("h200")
    rows = explain_hardware(hardware)
    assert [row.field for row in rows] == list(figures(hardware))
    by_field = {row.field: row for row in rows}
    assert by_field["flops_per_s.bf16"].value == "660 TFLOP/s"
    assert by_field["call_s"].value == "27 us"
    source = by_field["call_s"].source
    assert source is not None
    assert source.assumption
    made = replace(hardware, sources={})
    assert {row.source for row in explain_hardware(made)} == {None}


# ---------------------------------------------------------------------------------- roofline


def a_trace(
    flops: list[float],
    memory_bytes: list[int],
    precision: list[Precision],
    duration_s: list[float] | None = None,
) -> Trace:
    return trace_of_phases(
        len(flops),
        phase_precision=np.array(precision, np.uint8),
        flops=np.array(flops),
        memory_bytes=np.array(memory_bytes, np.int64),
        duration_s=None if duration_s is None else np.array(duration_s),
    )


def test_a_phase_takes_its_longest_time() -> None:
    h200 = load_hardware("h200")
    trace = a_trace(
        [660e12, 660e12, 51e12, 0.0, 1.0],
        [4096, 2 * 4_360 * 10**9, 0, 4_360 * 10**6, 8],
        [Precision.BF16, Precision.BF16, Precision.FP32, Precision.FP8, Precision.TF32],
    )
    timed = with_durations(trace, h200)
    assert timed.duration_s is not None
    assert timed.duration_s == pytest.approx([1.0, 2.0, 1.0, 1e-3, h200.launch_s])
    assert not timed.duration_s.flags.writeable
    assert timed.tensor_bytes is trace.tensor_bytes


@pytest.mark.parametrize(
    ("reads", "writes", "is_vectorised"),
    [
        (["wide", "wide too"], ["wide"], True),
        (["wide"], ["narrow"], True),
        (["wide", "row"], ["row"], True),
        (["narrow"], ["wide"], False),
        (["wide", "row"], ["wide too"], False),
        (["wide too"], ["wide too"], True),
        (["wide", "row"], ["wide", "row"], True),
    ],
    ids=[
        *("sum", "narrowing", "reduction", "widening", "broadcast", "in place"),
        "optimizer of several parameters",
    ],
)
def test_tensors_of_other_sizes_use_memory_at_a_lower_rate(
    reads: list[str], writes: list[str], is_vectorised: bool, make_trace: Callable[..., Trace]
) -> None:
    sizes = {"wide": 4 << 20, "wide too": 4 << 20, "narrow": 2 << 20, "row": 4096}
    trace = make_trace(
        {name: (size, TensorClass.OTHER, True) for name, size in sizes.items()},
        [(0.0, reads, writes)],
    )
    trace = replace(trace, memory_bytes=np.array([10**9], np.int64))
    h200 = load_hardware("h200")
    rate = h200.memory_bytes_per_s if is_vectorised else h200.unvectorised_bytes_per_s
    timed = with_durations(replace(trace, duration_s=None), h200)
    assert timed.duration_s == pytest.approx([10**9 / rate])


def test_thin_products_use_memory_at_a_lower_rate_in_float32() -> None:
    h200 = load_hardware("h200")
    precisions = [Precision.FP32, Precision.BF16, Precision.TF32]
    timed = with_durations(a_trace([1.0] * 3, [10**9] * 3, precisions), h200)
    rates = [h200.unvectorised_bytes_per_s, *[h200.memory_bytes_per_s] * 2]
    assert timed.duration_s == pytest.approx([10**9 / rate for rate in rates])


def test_attention_has_throughputs_of_its_own() -> None:
    h200 = load_hardware("h200")
    trace = a_trace([1e12] * 3, [0] * 3, [Precision.BF16, Precision.BF16, Precision.FP32])
    attention = "aten._scaled_dot_product_flash_attention"
    operators = (attention, f"{attention}_for_cpu_backward", attention)
    trace = replace(trace, phase_names=tuple(f"forward layer.0: {it}" for it in operators))
    timed = with_durations(trace, h200)
    rates = (
        *(h200.attention_flops_per_s, h200.attention_backward_flops_per_s),
        h200.flops_per_s["fp32"],
    )
    assert timed.duration_s == pytest.approx([1e12 / rate for rate in rates])


def test_durations_of_a_trace_are_kept() -> None:
    h200 = load_hardware("h200")
    trace = a_trace([660e12], [0], [Precision.BF16], [5.0])
    assert with_durations(trace, h200) is trace
    timed = with_durations(replace(trace, duration_s=None), h200)
    assert timed.duration_s == pytest.approx([1.0])


def test_the_error_for_a_missing_precision_names_it() -> None:
    h200 = load_hardware("h200")
    poor = replace(h200, flops_per_s={"fp32": 1e12})
    assert with_durations(a_trace([0.0], [0], [Precision.FP8]), poor).duration_s is not None
    with pytest.raises(HardwareError, match=r"no throughput for fp8.* add flops_per_s\.fp8 to"):
        with_durations(a_trace([1.0, 1.0], [0, 0], [Precision.FP32, Precision.FP8]), poor)


# ---------------------------------------------------------------------------------- detection


def test_the_machine_of_a_profile_keeps_its_figures() -> None:
    profile = load_hardware("h200")
    found = describe_machine(H200, 128 * GIB)
    assert (found.name, found.host_bytes) == ("NVIDIA H200", 128 * GIB)
    for field, value in figures(profile).items():
        assert figures(found)[field] == value or field == "host_bytes"
    assert found.sources["device_bytes"] == Source("detected", False)
    assert found.sources["fault_service_s"] == profile.sources["fault_service_s"]
    assert found.sources["to_device_bytes_per_s"] == profile.sources["to_device_bytes_per_s"]
    assert found.description.startswith("This machine, PCIe 5 x16; ")
    assert found.rates == "measured"


NAMES = {
    "a100-80-sxm": "NVIDIA A100-SXM4-80GB",
    "h100-sxm": "NVIDIA H100 80GB HBM3",
    "h100-pcie": "NVIDIA H100 PCIe",
    "b200": "NVIDIA B200",
    "rtx-3090": "NVIDIA GeForce RTX 3090",
    "rtx-5090": "NVIDIA GeForce RTX 5090",
    "rtx-pro-6000": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "t4": "Tesla T4",
}
"""Names of devices, as CUDA has them."""


@pytest.mark.parametrize(("profile", "device_name"), NAMES.items())
def test_a_card_has_the_figures_of_its_profile(profile: str, device_name: str) -> None:
    theirs = load_hardware(profile)
    generation, lanes = map(int, re.findall(r"\d+", CARDS[profile].link))
    machine = replace(
        H200,
        device_name=device_name,
        total_bytes=theirs.device_bytes,
        pcie_link=(generation, lanes),
    )
    found = describe_machine(machine, None)
    assert found.rates == theirs.rates
    assert found.flops_per_s == theirs.flops_per_s
    assert found.copy_link_bytes_per_s == theirs.copy_link_bytes_per_s
    assert found.description.endswith(f"{profile}'s")


def test_a_part_of_a_card_is_not_the_card() -> None:
    part = replace(H200, total_bytes=H200.total_bytes // 2)
    assert describe_machine(part, None).rates == "unknown"


@pytest.mark.slow
def test_figures_of_the_link_are_scaled_to_another_link() -> None:
    profile = load_hardware("h200")
    found = describe_machine(replace(H200, pcie_link=(4, 16)), None)
    assert found.to_device_bytes_per_s == pytest.approx(profile.to_device_bytes_per_s / 2)
    assert found.mapped_bytes_per_s == pytest.approx(profile.mapped_bytes_per_s / 2)
    assert found.copy_link_bytes_per_s == pytest.approx(profile.copy_link_bytes_per_s / 2)
    assert found.to_host_bytes_per_s == profile.to_host_bytes_per_s  # the host bounds it
    assert found.host_bytes == profile.host_bytes
    source = found.sources["to_device_bytes_per_s"]
    assert source == Source("51 GB/s of h200 behind PCIe 5 x16, scaled to PCIe 4 x16", True)
    assert (profile.rates, found.rates) == ("measured", "assumed")
    narrow = describe_machine(replace(H200, pcie_link=(4, 4)), None)
    assert narrow.to_host_bytes_per_s == narrow.to_device_bytes_per_s
    unknown = describe_machine(replace(H200, pcie_link=None), None)
    assert unknown.to_device_bytes_per_s == profile.to_device_bytes_per_s
    assert unknown.sources["link_bytes_per_s"] == profile.sources["link_bytes_per_s"]


UNKNOWN = replace(
    H200,
    device_name="NVIDIA GeForce RTX 4060",
    compute_capability=(8, 9),
    total_bytes=8 * GIB,
    pcie_link=(4, 8),
)


def test_the_rates_of_a_card_without_a_profile_are_unknown() -> None:
    found = describe_machine(UNKNOWN, None)
    assert found.device_bytes == 8 * GIB
    assert found.rates == "unknown"
    assert "`umem hardware measure`" in found.description
    assert found.sources["block_bytes"].assumption
    assert found.sources["block_bytes"].text.startswith("as t4, nearest: the driver")
    assert not found.sources["device_bytes"].assumption


@pytest.mark.parametrize(
    ("total_bytes", "profile"), [(int(94.5 * GIB), "gh200-96"), (142 * GIB, "gh200-144")]
)
def test_a_grace_hopper_is_matched_by_its_memory(total_bytes: int, profile: str) -> None:
    # The kernel counts the GPU's memory as the host's too.
    name = "NVIDIA GH200 480GB" if profile == "gh200-96" else "NVIDIA GH200 144G HBM3e"
    machine = replace(GH200, device_name=name, total_bytes=total_bytes)
    found = describe_machine(machine, 575 * GIB)
    assert found.description.endswith(f"{profile}'s")
    assert (found.ats, found.host_bytes) == (True, 480 * GIB)
    theirs = load_hardware(profile)
    assert found.memory_bytes_per_s == theirs.memory_bytes_per_s
    assert found.to_device_bytes_per_s == theirs.to_device_bytes_per_s
    assert found.description.startswith("This machine, NVLink-C2C; ")
    assert found.sources["memory_bytes_per_s"] == theirs.sources["memory_bytes_per_s"]


def test_ats_may_be_switched_off() -> None:
    found = describe_machine(replace(GH200, pageable_uses_host_page_tables=False), None)
    assert not found.ats
    assert found.description.endswith("gh200-96's")


def test_without_a_gpu_the_remedy_is_a_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: int) -> Capabilities:
        raise UnsupportedError("no NVIDIA driver on this machine")

    monkeypatch.setattr(capabilities, "detect", refuse)
    says = r"no GPU 0 to describe \(no NVIDIA driver.*choose a profile \(`umem hardware list`\)"
    with pytest.raises(HardwareError, match=says):
        load_hardware("detect")
    with pytest.raises(HardwareError, match=says):
        load_hardware("detect")


def test_one_pool_is_counted_once() -> None:
    found = describe_machine(GB10, GB10.total_bytes)
    assert (found.one_pool, found.host_bytes) == (True, 0)
    assert found.device_bytes == GB10.total_bytes
    assert found.description.startswith("This machine, one pool of memory; ")
    unknown = describe_machine(replace(GB10, device_name="NVIDIA N1"), GB10.total_bytes)
    assert (unknown.rates, unknown.one_pool, unknown.host_bytes) == ("unknown", True, 0)


def test_a_profile_of_one_pool_has_no_host_memory_beside_it(tmp_path: Path) -> None:
    (problem,) = problems_of(
        write(tmp_path, "extends: gb10\nhost_bytes: {value: 64 GiB, source: counted twice}\n")
    )
    assert "host_bytes.value: device_bytes counts the one pool: give 0 B" in problem


# ---------------------------------------------------------------------------------- measured


def rates(**changes: float) -> dict[str, Measured]:
    """Figures as if they had been measured."""
    values = {
        "flops_per_s.bf16": 60e12,
        "memory_bytes_per_s": 0.25e12,
        "attention_flops_per_s": 40e12,
        "attention_backward_flops_per_s": 30e12,
        "copy_to_device_bytes_per_s": 13e9,
        "copy_to_host_bytes_per_s": 12e9,
        "copy_link_bytes_per_s": 20e9,
        "to_device_bytes_per_s": 12.5e9,
        "host_update_bytes_per_s": 40e9,
        **changes,
    }
    return {name: Measured(name, value, "by hand") for name, value in values.items()}


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where profiles of the user are."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "umem" / "hardware"


def test_detect_has_the_figures_that_were_measured(own_folder: Path) -> None:
    measured = rates()
    path = save_profile(profile_text(UNKNOWN, measured), None, UNKNOWN.device_name)
    assert path == own_folder / "nvidia-geforce-rtx-4060.yaml"
    found = describe_machine(UNKNOWN, 64 * GIB)
    assert found.rates == "measured"
    assert str(path) in found.description
    for name, one in measured.items():
        assert figures(found)[name] == pytest.approx(one.value, rel=1e-5)
        assert found.sources[name].text.startswith("measured on one NVIDIA GeForce RTX 4060, ")
    assert (found.host_bytes, found.ats) == (64 * GIB, False)
    assert found.sources["faults_per_batch"].assumption
    # In proportion to the copies, and no less than a direction that was measured.
    assert found.mapped_read_bytes_per_s < 14e9
    assert found.link_bytes_per_s >= found.to_device_bytes_per_s
    assert describe_machine(UNKNOWN, 64 * GIB, measured=False).rates == "unknown"


def test_measured_figures_are_of_one_device(own_folder: Path) -> None:
    save_profile(profile_text(UNKNOWN, rates()), None, UNKNOWN.device_name)
    other = replace(UNKNOWN, total_bytes=16 * GIB)  # the same name, with more memory
    assert describe_machine(other, None).rates == "unknown"
    assert describe_machine(H200, None).rates == "measured"
    assert describe_machine(H200, None).copy_link_bytes_per_s == 100e9


def test_a_second_measurement_does_not_rest_on_the_first(own_folder: Path) -> None:
    save_profile(profile_text(UNKNOWN, rates(launch_s=7e-6)), None, UNKNOWN.device_name)
    save_profile(profile_text(UNKNOWN, rates()), None, UNKNOWN.device_name)
    found = describe_machine(UNKNOWN, None)
    assert found.launch_s == load_hardware("t4").launch_s
    assert found.sources["launch_s"].assumption


def test_a_measured_profile_is_a_file_like_others(tmp_path: Path) -> None:
    path = save_profile(profile_text(GB10, rates()), tmp_path / "mine.yaml", GB10.device_name)
    found = load_hardware(path)
    assert (found.name, found.one_pool, found.host_bytes) == ("NVIDIA GB10", True, 0)
    blocked = tmp_path / "mine.yaml" / "below.yaml"
    with pytest.raises(HardwareError, match=r"mine\.yaml: cannot be made .*--output"):
        save_profile("", blocked, GB10.device_name)


@pytest.mark.slow
def test_adamw_on_the_host_is_measured_in_bytes() -> None:
    (found,) = host_update(16 << 20, 0.05)
    assert found.figure == "host_update_bytes_per_s"
    assert 1e8 < found.value < 1e13
    assert list(host_update(0, 0.05)) == []  # no memory to measure with


def test_without_a_gpu_nothing_is_measured(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: int) -> Capabilities:
        raise UnsupportedError("no NVIDIA driver on this machine")

    monkeypatch.setattr("umem.cli.hardware.detect", refuse, raising=False)
    status, output, errors = run("hardware", "measure")
    assert (status, output) == (2, "")
    assert errors == "umem: there is no GPU 0 to measure: no NVIDIA driver on this machine\n"


@pytest.mark.slow
def test_a_card_without_a_profile_gets_bytes_and_then_seconds(
    own_folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("umem.cli.hardware.detect", lambda device: UNKNOWN, raising=False)
    monkeypatch.setattr(capabilities, "detect", lambda device: UNKNOWN)
    monkeypatch.setattr("umem.hardware.measure.measure", lambda *_, short: iter(rates().values()))
    fit = ("fit", "llama-3.2-1b", "--mode", "lora", "--gpu", "detect")
    status, output, _ = run(*fit)
    assert status == 0
    assert "tokens/s" in output
    assert not re.search(r"\d m?s\b", output)
    assert "umem hardware measure" in output
    (row,) = json.loads(run(*fit, "--json")[1])["results"]
    assert row["rates"] == "unknown"
    assert row["ways"]["umem"]["fits"]
    assert {row["ways"][way]["step_s"] for way in row["ways"]} == {None}
    assert row["ways"]["umem"]["device_bytes"] > 0

    predict = ("simulate", "--model", "llama-tiny", "--hardware", "detect")
    status, output, errors = run(*predict)
    assert (status, output) == (2, "")
    assert "`umem hardware measure`" in errors

    status, output, _ = run("hardware", "measure", "--short")
    assert status == 0
    assert re.search(r"^flops_per_s\.bf16 +60 TFLOP/s  by hand$", output, re.M)
    assert str(own_folder) in output
    status, output, _ = run(*fit)
    assert re.search(r"\d m?s\b", output)
    assert "with measured rates" in " ".join(output.split())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gb10", "jetson-thor"])
def test_a_fit_into_one_pool_moves_nothing(name: str, run: Run) -> None:
    words = ("--gpu", name, "--host-ram", "64GiB", "--json")
    small, large = (
        json.loads(run("fit", model, "--checkpoint", *words)[1])["results"][0]
        for model in ("llama-3.2-1b", "llama-2-13b")
    )
    assert small["host_limit_bytes"] == large["host_limit_bytes"] == 0
    assert small["ways"]["umem"]["fits"]
    assert not large["ways"]["umem"]["fits"]
    assert {place["host_bytes"] for place in small["classes"].values()} == {0}
    for found in (small, large):
        assert found["ways"].keys() == {"umem", "stock"}
        assert found["ways"]["umem"] == found["ways"]["stock"]
    assert "of device memory; " in large["ways"]["umem"]["why_not"]
    status, text, _ = run("fit", "llama-3.2-1b", "--gpu", name)
    assert status == 0
    assert "the memory that host and device share" in " ".join(text.split())
    assert "host memory: needs" not in text
    assert "CPU offload" not in text


# ---------------------------------------------------------------------------------- CLI, docs

runner = CliRunner()


@pytest.mark.slow
def test_cli_list() -> None:
    result = runner.invoke(app, ["list"], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    assert [name for name in PROFILES if name in result.stdout] == list(PROFILES)
    assert "…" not in result.stdout
    listed = json.loads(runner.invoke(app, ["list", "--json"]).stdout)
    assert [profile["name"] for profile in listed] == list(PROFILES)


def test_cli_show_has_a_line_for_every_figure() -> None:
    result = runner.invoke(app, ["show", "gh200-144"], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    for row in explain_hardware(load_hardware("gh200-144")):
        assert re.search(rf"^{re.escape(row.field)} +{re.escape(row.value)} ", result.stdout, re.M)
    assert re.search(r"^call_s +27 us +assumed ", result.stdout, re.M)
    assert re.search(r"^memory_bytes_per_s +4.17 TB/s +published ", result.stdout, re.M)
    assert "…" not in result.stdout


def test_cli_show_json_is_the_machine() -> None:
    shown = json.loads(runner.invoke(app, ["show", "h200", "--json"]).stdout)
    hardware = load_hardware("h200")
    assert {field: shown[field]["value"] for field in figures(hardware)} == figures(hardware)
    assert shown["call_s"]["assumption"] == hardware.sources["call_s"].text
    assert (shown["call_s"]["is"], shown["launch_s"]["is"]) == ("assumed", "measured")
    assert shown["rates"] == "measured"
    assert shown["launch_s"]["source"] == hardware.sources["launch_s"].text


def test_cli_errors_are_plain(run: Run) -> None:
    status, output, errors = run("hardware", "show", "h20")
    assert (status, output) == (2, "")
    assert "did you mean 'h200'?" in errors
    assert len(errors.splitlines()) == 1


def documentation() -> str:
    return (CHECKOUT / "docs" / "hardware.md").read_text(encoding="utf-8")


def test_docs_name_every_field() -> None:
    first_cells = set(re.findall(r"^\| `([^`]+)` \|", documentation(), flags=re.MULTILINE))
    assert first_cells == set(FIGURES) | set(PROFILES)


def test_docs_have_the_figures_of_the_profiles() -> None:
    columns = (
        "device_bytes",
        "memory_bytes_per_s",
        "flops_per_s.bf16",
        "copy_to_device_bytes_per_s",
        "copy_to_host_bytes_per_s",
    )
    for name in PROFILES:
        hardware = load_hardware(name)
        values = {row.field: row.value for row in explain_hardware(hardware)}
        cells = " | ".join(values[column] for column in columns)
        assert f"| `{name}` | {cells} | {hardware.rates} |" in documentation()


def test_the_example_in_the_docs_is_valid(tmp_path: Path) -> None:
    (example,) = re.findall(r"```yaml\n(extends:.*?)```", documentation(), flags=re.DOTALL)
    hardware = load_hardware(write(tmp_path, example))
    assert hardware.to_host_bytes_per_s == 12.5e9
    assert hardware.sources["host_bytes"].assumption
