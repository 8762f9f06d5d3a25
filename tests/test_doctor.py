"""The doctor: its checks on recorded environments, and the command on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cards
import pytest
from cards import GB10, GH200
from command_line import Run

import umem
from umem.core.install import install_command
from umem.core.units import format_bytes
from umem.doctor import (
    PACKAGES,
    Check,
    Environment,
    Feature,
    GuardLibrary,
    Host,
    Native,
    Report,
    Status,
    Torch,
    Verdict,
    collect,
    diagnose,
)
from umem.hardware.capabilities import Capabilities, NumaNode
from umem.hardware.host_memory import HostMemory, MemoryLimit
from umem.hardware.load import measured_profile
from umem.torch_compat import PRIVATE_NAMES

GIB = 1 << 30

HOST = Host(
    system="Linux 6.8.0",
    distribution="Ubuntu 24.04.2 LTS",
    cpu_architecture="x86_64",
    cpu_model="Intel(R) Xeon(R) Platinum 8480C",
    cpu_count=16,
    memory=HostMemory(512 * GIB, 500 * GIB, limit=None),
    chooses_nodes=True,
    shm_bytes=64 * GIB,
    processes=0,
)
H200 = replace(cards.H200, free_bytes=139 * GIB, pageable_memory_access=True)  # through HMM
TORCH = Torch("2.11.0+cu130", "/venv/torch", cuda="13.0", missing=(), cuda_started=False)
NATIVE = Native("/venv/umem/_native.so", True, cuda_version="13.0", rmm_version="26.10.00")

HEALTHY = Environment(
    host=HOST,
    python_version="3.12.8",
    python_path="/venv/bin/python",
    umem_version="0.1.0",
    umem_path="/venv/umem",
    packages=dict.fromkeys(PACKAGES, "13.0.1") | {"librmm": "26.10.0", "rmm": "26.10.0"},
    torch=TORCH,
    torch_error="",
    native=NATIVE,
    native_error="",
    guard=GuardLibrary("/venv/umem/_guard_torch2_11.so", problem="", remedy=""),
    devices=(H200,),
    devices_error="",
    variables={},
)


def without(*packages: str) -> dict[str, str | None]:
    """The healthy packages, less some."""
    return {**HEALTHY.packages, **dict.fromkeys(packages)}


def check(report: Report, name: str) -> Check:
    """The one check of this name."""
    (found,) = [one for part in report.sections for one in part.checks if one.name == name]
    return found


def feature(report: Report, words: str) -> Feature:
    """The one feature whose name holds these words."""
    (found,) = [one for one in report.features if words in one.name]
    return found


def test_healthy_machine() -> None:
    report = diagnose(HEALTHY)
    assert report.swap_works
    assert feature(report, "one-line swap").verdict is Verdict.YES
    statuses = {one.status for part in report.sections for one in part.checks}
    assert statuses == {Status.OK, Status.INFO}


def test_nothing_installed() -> None:
    report = diagnose(
        replace(
            HEALTHY,
            packages=dict.fromkeys(PACKAGES),
            torch=None,
            torch_error="No module named 'torch'",
            native=None,
            native_error="No module named 'umem.runtime._native'",
            guard=None,
            devices=None,
            devices_error="umem.cuda needs cuda-python",
        )
    )
    failed = {one.name: one.remedy for one in report.failures}
    assert set(failed) == {"native library", "torch", "librmm", "cuda-python", "numba", "GPU"}
    assert "[cuda13]" in failed["native library"]
    assert failed["torch"].startswith("pip install 'torch>=2.8,<2.16' --index-url")
    assert failed["GPU"] == install_command("cuda13")
    assert {one.verdict for one in report.features} == {Verdict.NO}


def test_without_the_guard() -> None:
    """The swap works; what does not is named, with the command that builds it."""
    guard = GuardLibrary("", "umem was built without the headers of torch 2.11", "pip install umem")
    report = diagnose(replace(HEALTHY, guard=guard))
    assert report.swap_works
    found = check(report, "guard")
    assert (found.status, found.remedy) == (Status.WARN, "pip install umem")
    assert guard.problem in found.why
    assert "step()" in found.why
    caught = feature(report, "torch.OutOfMemoryError")
    assert caught.verdict is Verdict.NO
    assert "CUDA out of memory." in caught.remedy


CORE_ONLY = replace(NATIVE, has_cuda=False, cuda_version="", rmm_version="")
OTHER_RMM = {**HEALTHY.packages, "librmm": "26.12.0"}
NOT_PLUGGABLE = replace(TORCH, missing=(PRIVATE_NAMES["change_allocator"],))


@pytest.mark.parametrize(
    ("name", "remedy", "change"),
    [
        ("torch", "torch>=2.8", {"torch": replace(TORCH, version="2.7.1")}),
        ("torch's CUDA", "download.pytorch.org/whl/cu130", {"torch": replace(TORCH, cuda=None)}),
        *(
            ("allocator can be swapped", remedy, {"torch": torch})
            for remedy, torch in (
                ("call umem.enable() before", replace(TORCH, cuda_started=True)),
                ("--force-reinstall", NOT_PLUGGABLE),
            )
        ),
        ("CUDA versions match", "[cuda12]", {"torch": replace(TORCH, cuda="12.8")}),
        ("native library", "[cuda13]", {"native": CORE_ONLY}),
        ("RMM versions match", "pip install 'rmm-cu13==26.10.*'", {"packages": OTHER_RMM}),
        ("cuda-python", "[cuda13]", {"packages": without("cuda-python")}),
        ("operating system", "run under Linux", {"host": replace(HOST, system="Darwin 24.5.0")}),
        ("driver", "580 or newer", {"devices": (replace(H200, driver_version=(12, 8)),)}),
        *(
            (name, f"unset {name}", {"variables": {name: value}})
            for name, value in (
                ("UMEM_MANAGED_LIMIT", "16G"),
                ("UMEM_DEVICE_BUDGET", "0%"),
                ("UMEM_POLICY", "no-such-policy"),
                ("UMEM_PLANNER", "plannd"),
                ("UMEM_WITHOUT", "prefech"),
                ("UMEM_POISON", "yes"),
            )
        ),
    ],
)
def test_what_keeps_the_swap_from_working(name: str, remedy: str, change: dict[str, Any]) -> None:
    """Each fault alone fails one check, with a remedy, and takes the swap's features along."""
    report = diagnose(replace(HEALTHY, **change))
    assert [one.name for one in report.failures] == [name]
    assert remedy in check(report, name).remedy
    assert check(report, name).why
    assert feature(report, "one-line swap").verdict is Verdict.NO
    assert name in feature(report, "one-line swap").why
    assert feature(report, "numba").why.startswith("needs the one-line swap")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("torch", {"torch": replace(TORCH, version="2.16.0")}),
        (
            "allocator can be swapped",  # and nothing traced
            {"torch": replace(TORCH, missing=(PRIVATE_NAMES["FakeTensorMode"],))},
        ),
        ("/dev/shm", {"host": replace(HOST, shm_bytes=64 << 20)}),  # docker's
        ("Python", {"python_version": "3.14.0"}),
        *(
            (name, {"variables": {name: value}})
            for name, value in (
                ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
                ("CUDA_LAUNCH_BLOCKING", "1"),
            )
        ),
        ("GPU 0 managed memory", {"devices": (replace(H200, concurrent_managed_access=False),)}),
    ],
)
def test_what_only_deserves_a_warning(name: str, change: dict[str, Any]) -> None:
    report = diagnose(replace(HEALTHY, **change))
    found = check(report, name)
    assert found.status is Status.WARN
    assert found.why
    assert found.remedy
    assert report.swap_works


def test_harmless_variables() -> None:
    """Switched off, or read only when umem is built."""
    variables = {"CUDA_LAUNCH_BLOCKING": "0", "UMEM_CUDA": "13"}
    (settings,) = [
        part
        for part in diagnose(replace(HEALTHY, variables=variables)).sections
        if part.title == "Settings"
    ]
    assert settings.checks == (Check("CUDA_LAUNCH_BLOCKING", Status.INFO, "0"),)


@pytest.mark.parametrize(("version", "major"), [("11.8", 12), ("12.8", 12), ("14.0", 13)])
def test_remedies_name_a_cuda_that_umem_has(version: str, major: int) -> None:
    report = diagnose(replace(HEALTHY, torch=replace(TORCH, cuda=version), packages=without("rmm")))
    assert check(report, "rmm").remedy == install_command(f"cuda{major}")


def test_misspelt_variable() -> None:
    report = diagnose(replace(HEALTHY, variables={"UMEM_MANAGED_LIMT": "8GiB"}))
    assert check(report, "UMEM_MANAGED_LIMT").remedy == "use UMEM_MANAGED_LIMIT"


@pytest.mark.slow
def test_valid_variables() -> None:
    variables = {
        "UMEM_DEVICE_BUDGET": "80%",
        "UMEM_MANAGED_LIMIT": "8 GiB",
        "UMEM_PLANNER": "lookahead",
        "UMEM_POLICY": "sft",
        "UMEM_COMMIT": "0123456789ab",
    }
    report = diagnose(replace(HEALTHY, variables=variables))
    assert report.swap_works
    for name, value in variables.items():
        assert check(report, name) == Check(name, Status.OK, value)


@pytest.mark.parametrize(
    ("variables", "policy", "budget", "why"),
    [
        ({}, "sft", "138 GiB", "139 GiB free, less 1 GiB"),
        ({"UMEM_DEVICE_BUDGET": "20GiB"}, "sft", "20 GiB", "UMEM_DEVICE_BUDGET"),
        ({"UMEM_POLICY": "rmm-managed"}, "rmm-managed", "none", "evicts"),
    ],
)
def test_what_the_budget_comes_to(
    variables: dict[str, str], policy: str, budget: str, why: str
) -> None:
    found = check(
        diagnose(replace(HEALTHY, variables=variables)), f"GPU 0 device budget, policy {policy}"
    )
    assert (found.status, found.value) == (Status.INFO, budget)
    assert why in found.why


class TestHostMemory:
    """Pages evicted from a card need room on the host."""

    limit = MemoryLimit(
        Path("/sys/fs/cgroup/batch.slice/memory.max"), 32 * GIB, 20 * GIB, 17 * GIB, 5 * GIB
    )
    small = replace(HEALTHY, host=replace(HOST, memory=HostMemory(32 * GIB, 20 * GIB, limit)))

    def test_less_than_the_card(self) -> None:
        """The limit to set is worked out: four fifths of what is available."""
        found = check(diagnose(self.small), "host memory")
        assert found.status is Status.WARN
        assert found.remedy == "export UMEM_MANAGED_LIMIT=16GiB"

    @pytest.mark.parametrize(("limit", "status"), [("8GiB", Status.OK), ("64GiB", Status.WARN)])
    def test_with_a_limit(self, limit: str, status: Status) -> None:
        limited = replace(self.small, variables={"UMEM_MANAGED_LIMIT": limit})
        assert check(diagnose(limited), "host memory").status is status

    def test_the_limit_that_binds_is_named(self) -> None:
        """A control group by its file, so that its owner can raise it."""
        found = check(diagnose(self.small), "host memory limit")
        assert found.value == "/sys/fs/cgroup/batch.slice/memory.max: 32 GiB"
        assert all(part in found.why for part in ("17 GiB", "5 GiB", "20 GiB"))
        assert "machine" in check(diagnose(HEALTHY), "host memory limit").value

    @pytest.mark.parametrize(
        ("processes", "most", "share", "why"),
        [
            (None, "17 GiB", "20 GiB", "20 GiB available"),
            ("8", "2.12 GiB", "2.5 GiB", "8 processes (LOCAL_WORLD_SIZE)"),
            ("x", "17 GiB", "20 GiB", "20 GiB available"),
        ],
    )
    def test_page_locked_memory(
        self, processes: str | None, most: str, share: str, why: str
    ) -> None:
        variables = {} if processes is None else {"LOCAL_WORLD_SIZE": processes}
        report = diagnose(replace(self.small, variables=variables))
        found = check(report, "host memory share")
        assert (found.value, found.status) == (share, Status.INFO)
        assert found.why.endswith(why)
        locked = check(report, "page-locked memory")
        assert most in locked.value
        assert f"85 % of {share}" in locked.why

    def test_processes_that_are_seen_divide_what_is_left(self) -> None:
        host = replace(self.small.host, processes=3)
        report = diagnose(replace(self.small, variables={}, host=host))
        found = check(report, "host memory share")
        assert found.value == "5 GiB"
        assert "4 processes (those of yours that are under umem" in found.why
        locked = check(report, "page-locked memory")
        assert host.memory is not None
        left_bytes = 20 * GIB - 0.15 * host.memory.total_bytes
        assert locked.value == f"at most {format_bytes(int(left_bytes / 4))} for a process"

    def test_memory_of_other_nodes_is_named(self) -> None:
        """A Grace Hopper's kernel counts the GPU's memory as the host's."""
        memory = HostMemory(480 * GIB, 450 * GIB, None, other_nodes_bytes=90 * GIB)
        found = check(diagnose(replace(HEALTHY, host=replace(HOST, memory=memory))), "host memory")
        assert found.value.startswith("480 GiB, 450 GiB available, without 90 GiB")

    @pytest.mark.parametrize(("may_choose", "status"), [(True, Status.OK), (False, Status.WARN)])
    def test_the_node_of_page_locked_memory(self, may_choose: bool, status: Status) -> None:
        """Named on a host with several, where a sandbox may forbid to choose one."""
        nodes = tuple(NumaNode(number, 256 * GIB, has_cpus=True) for number in range(2))
        card = replace(H200, host_numa_node=1, numa_nodes=nodes)
        host = replace(HOST, chooses_nodes=may_choose)
        name = "page-locked memory for GPU 0"
        found = check(diagnose(replace(HEALTHY, devices=(card,), host=host)), name)
        assert found.status is status
        assert ("SYS_NICE" in found.remedy) is not may_choose
        one = replace(card, numa_nodes=nodes[:1])
        report = diagnose(replace(HEALTHY, devices=(one,), host=host))
        assert name not in {it.name for part in report.sections for it in part.checks}

    def test_unknown(self) -> None:
        report = diagnose(replace(HEALTHY, host=replace(HOST, memory=None)))
        assert check(report, "host memory").value == "unknown"

    def test_one_pool(self) -> None:
        """It is counted once, nothing is page-locked, and the limit does not bound the GPU."""
        report = diagnose(replace(self.small, devices=(GB10,)))
        assert "in one pool" in check(report, "GPU 0").value
        found = check(report, "host memory")
        assert (found.status, found.remedy) == (Status.OK, "")
        assert "share one pool" in found.value
        assert check(report, "page-locked memory").value == "none"
        group = check(report, "control group and GPU memory")
        assert group.status is Status.WARN
        assert "memory.max" in group.value
        assert "UMEM_DEVICE_BUDGET" in group.remedy
        assert check(report, "GPU 0 device budget, policy sft").value == "85 GiB"

    def test_coherent_machine(self) -> None:
        assert check(diagnose(replace(self.small, devices=(GH200,))), "host memory").status is (
            Status.OK
        )


class TestFeatures:
    """What works and what does not, and why."""

    @pytest.mark.parametrize("words", ["torch.OutOfMemoryError", "numba", "CuPy"])
    def test_works_under_the_swap(self, words: str) -> None:
        assert feature(diagnose(HEALTHY), words).verdict is Verdict.YES

    @pytest.mark.parametrize(
        ("device", "verdict"),
        [
            pytest.param(GH200, Verdict.YES, id="ATS"),
            pytest.param(H200, Verdict.PARTLY, id="HMM"),
            pytest.param(replace(H200, pageable_memory_access=False), Verdict.NO, id="neither"),
        ],
    )
    def test_system_memory(self, device: Capabilities, verdict: Verdict) -> None:
        report = diagnose(replace(HEALTHY, devices=(device,)))
        assert feature(report, "system memory").verdict is verdict

    @pytest.mark.slow
    def test_discard_needs_cuda_13_on_both_sides(self) -> None:
        old_python = replace(H200, bindings_version=(12, 9))
        old_driver = replace(H200, discard=False)
        for device, verdict in (
            (H200, Verdict.YES),
            (old_python, Verdict.PARTLY),
            (old_driver, Verdict.NO),
        ):
            report = diagnose(replace(HEALTHY, devices=(device,)))
            assert feature(report, "discard").verdict is verdict

    def test_one_poor_device_of_two(self) -> None:
        poor = replace(H200, device_index=1, discard=False)
        report = diagnose(replace(HEALTHY, devices=(H200, poor)))
        assert feature(report, "discard").verdict is Verdict.NO
        # umem.cuda has it alone: no run discards anything.
        assert check(report, "GPU 1 managed memory").status is Status.OK

    def test_libraries_that_are_missing(self) -> None:
        report = diagnose(replace(HEALTHY, packages=without("cupy", "numba-cuda", "cupti-python")))
        assert report.swap_works
        assert feature(report, "CuPy").remedy == "pip install cupy-cuda13x"
        assert feature(report, "numba").remedy == install_command("numba")
        assert feature(report, "CUPTI").remedy == install_command("telemetry")

    @pytest.mark.parametrize(
        ("release", "verdict", "words"),
        [
            ("580.159", Verdict.YES, "has all of them"),
            (
                "570.211.01",
                Verdict.PARTLY,
                "driver 570.211.01 is not known to umem; CUPTI is asked",
            ),
            (None, Verdict.PARTLY, "driver of unknown release"),
        ],
    )
    def test_who_counts_migrations(self, release: str | None, verdict: Verdict, words: str) -> None:
        assert HEALTHY.devices is not None
        device = replace(HEALTHY.devices[0], driver_release=release)
        found = feature(diagnose(replace(HEALTHY, devices=(device,))), "migrations and faults")
        assert found.verdict is verdict
        assert words in found.why

    def test_cupti_newer_than_the_driver(self) -> None:
        packages = {**HEALTHY.packages, "cupti-python": "13.2.0"}
        found = feature(diagnose(replace(HEALTHY, packages=packages)), "CUPTI")
        assert found.verdict is Verdict.PARTLY
        assert found.remedy == "pip install 'cupti-python==13.0.*'"


@pytest.mark.parametrize(
    ("device", "status", "rates"),
    [
        (H200, Status.INFO, "measured"),
        (GB10, Status.INFO, "assumed"),
        (replace(H200, device_name="NVIDIA X"), Status.WARN, "unknown"),
    ],
)
def test_what_predictions_rest_on(device: Capabilities, status: Status, rates: str) -> None:
    found = check(diagnose(replace(HEALTHY, devices=(device,))), "GPU 0 rates")
    assert (found.status, found.value) == (status, rates)
    assert ("umem hardware measure" in found.remedy) is (rates == "unknown")


def test_a_users_profile_that_is_unreadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = measured_profile(H200.device_name)
    path.parent.mkdir(parents=True)
    path.write_text("extends: h200\nnme: x\n", encoding="utf-8")
    found = check(diagnose(HEALTHY), "GPU 0 rates")
    assert found.status is Status.FAIL
    assert f"{path}:2:1" in found.why
    assert "umem hardware measure" in found.remedy


def test_grace_hopper_is_recognised() -> None:
    report = diagnose(replace(HEALTHY, devices=(GH200,)))
    assert "Grace Hopper" in check(report, "GPU 0").value
    assert "NVLink-C2C" in check(report, "GPU 0 link").value
    assert "1: 95 GiB without CPUs" in check(report, "NUMA nodes").value


def test_to_dict_goes_through_json() -> None:
    report = diagnose(replace(HEALTHY, devices=(GH200,)))
    data = json.loads(json.dumps(report.to_dict()))
    assert data["swap_works"] is True
    assert data["devices"][0]["is_grace_hopper"] is True
    assert data["sections"][0]["checks"][0]["status"] == "ok"
    assert {one["verdict"] for one in data["features"]} == {"yes"}


# The command, on a recorded environment.

NO_GPU = replace(HEALTHY, devices=None, devices_error="no CUDA-capable device is detected")


@pytest.fixture
def run(run: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`umem doctor` on a machine without a GPU."""
    monkeypatch.setattr("umem.cli.doctor.collect", lambda: NO_GPU, raising=False)
    return partial(run, "doctor")


def test_json_is_all_that_is_printed(run: Run) -> None:
    status, output, errors = run("--json")
    assert (status, errors) == (1, "")
    assert output == json.dumps(diagnose(NO_GPU).to_dict(), indent=2) + "\n"


def test_exit_status_where_the_swap_works(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("umem.cli.doctor.collect", lambda: HEALTHY, raising=False)
    status, output, errors = run()
    assert (status, errors) == (0, "")
    assert "umem.enable() works here" in output


@pytest.mark.parametrize("columns", [60, 100])
def test_a_table_without_colours(run: Run, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """Marks are words, all fits the terminal, and the lines of a command can be copied as one."""
    monkeypatch.setenv("COLUMNS", str(columns))
    path = f"/home/{'deep' * 30}/umem"
    facts = replace(NO_GPU, packages=without("numba-cuda"), umem_path=path, torch=None)
    monkeypatch.setattr("umem.cli.doctor.collect", lambda: facts, raising=False)
    status, output, errors = run()
    assert (status, errors) == (1, "")
    assert "FAIL  GPU" in output
    assert "\x1b" not in output
    assert "…" not in output
    lines = output.splitlines()
    words = max(len(word) for word in install_command("numba").split())
    assert all(len(line) <= max(columns, words + 10) for line in lines)
    joined = "".join(line.strip().removesuffix("\\") for line in lines)
    assert facts.umem_path in joined
    for command in (install_command("numba"), facts.install_torch(">=2.8,<2.16")):
        assert command.replace(" ", "") in joined.replace(" ", "")
    assert "umem.enable() does not work here: torch, GPU." in output


def test_brackets_are_not_markup(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = replace(NO_GPU, variables={"UMEM_[bold]": "[red]"})
    monkeypatch.setattr("umem.cli.doctor.collect", lambda: environment, raising=False)
    _, output, _ = run()
    assert "UMEM_[bold]" in output
    assert "[red]" in output


# Facts of the machine that the tests run on.


def test_facts_on_another_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    host = collect().host
    assert host.cpu_count == os.cpu_count()


def run_doctor(before: str = "", after: str = "pass") -> dict[str, dict[str, str]]:
    """Run the command in a process that sees no GPU; return its checks by name."""
    code = f"{before}\nfrom umem.cli.doctor import app\ntry:\n    app()\nfinally:\n    {after}\n"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("UMEM_")}
    done = subprocess.run(
        [sys.executable, "-c", code, "--json"],
        capture_output=True,
        text=True,
        check=False,
        env=kept | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert (done.returncode, done.stderr) == (1, "")
    report = json.loads(done.stdout)
    assert report["swap_works"] is False
    assert report["devices"] == []
    return {one["name"]: one for part in report["sections"] for one in part["checks"]}


@pytest.mark.slow
def test_run_without_a_gpu() -> None:
    """The missing GPU is a finding, and CUDA is not started: the allocator could be swapped."""
    found = run_doctor(after="import torch; assert not torch.cuda.is_initialized()")
    assert found["GPU"]["status"] == "fail"
    assert found["Python"]["value"].startswith(sys.version.split()[0])
    assert found["umem"]["status"] == "ok"
    assert found["umem"]["value"].endswith(str(Path(umem.__file__).parent))


@pytest.mark.slow
def test_run_with_libraries_missing() -> None:
    """An import that fails is a finding with a remedy, not a crash."""
    missing = {"torch": "torch", "umem.runtime._native": "native library", "cuda": "GPU"}
    names = [*missing, "numba", "rmm"]
    found = run_doctor(before=f"import sys; sys.modules |= dict.fromkeys({names})")
    for module, name in missing.items():
        assert found[name]["status"] == "fail"
        assert module in found[name]["why"]
        assert found[name]["remedy"]


def test_a_library_of_a_conda_environment_has_its_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """conda has RMM's library without a Python package."""
    noted = tmp_path / "conda-meta"
    noted.mkdir()
    (noted / "librmm-26.10.00-cuda13_261007_ab12cd34.json").touch()
    (noted / "librmm-tests-26.12.00-cuda13_261207_ab12cd34.json").touch()
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    monkeypatch.setattr("umem.doctor.facts.PACKAGES", {"librmm": ("librmm-cu99", "librmm")})
    assert collect().packages == {"librmm": "26.10.00"}
