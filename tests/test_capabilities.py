"""Capabilities of known machines, from the attributes that their drivers give."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from other_process import run_forked

from umem.core.errors import UnsupportedError
from umem.hardware import capabilities
from umem.hardware.capabilities import Capabilities, NumaNode, detect, detect_all, numa_nodes
from umem.hardware.host_memory import HostMemory

GIB = 1 << 30


@dataclass(frozen=True)
class Machine:
    """A machine that is not at hand, with the functions of `umem.cuda.bindings`."""

    name: str
    attributes: Mapping[str, int]
    total_bytes: int
    architecture: str = "x86_64"
    c2c: bool | None = False
    card: tuple[int, int] | None = None
    nodes: tuple[NumaNode, ...] = (NumaNode(0, 512 * GIB, True),)
    version: int = 13000
    count: int = 1
    asked: list[str] = field(default_factory=list)

    def driver_version(self) -> int:
        return self.version

    def driver_release(self) -> str | None:
        return "580.159"

    def bindings_version(self) -> int:
        return 12090

    def device_count(self) -> int:
        return self.count

    def device_name(self, device: int) -> str:
        return self.name

    def device_total_bytes(self, device: int) -> int:
        return self.total_bytes

    def device_attribute(self, device: int, name: str) -> int:
        self.asked.append(name)
        return self.attributes[name]

    def device_pci_address(self, device: int) -> str:
        return f"0000:{device:02}:00.0"

    def nvml_memory_bytes(self, pci_address: str) -> tuple[int, int] | None:
        return self.card

    def nvml_pcie_link(self, pci_address: str) -> tuple[int, int] | None:
        return (5, 16)

    def nvml_nvlink_c2c(self, pci_address: str) -> bool | None:
        return self.c2c


Detect = Callable[[Machine], Capabilities]


@pytest.fixture
def detect_on(monkeypatch: pytest.MonkeyPatch) -> Detect:
    """`detect` on the device, the CPU and the NUMA nodes of a machine."""

    def detect_on(machine: Machine) -> Capabilities:
        monkeypatch.setattr("platform.machine", lambda: machine.architecture)
        monkeypatch.setattr(capabilities, "numa_nodes", lambda: machine.nodes)
        return detect(driver=machine)

    return detect_on


# Values as CUDA's documentation gives them for each kind of machine: heterogeneous memory
# management on x86 with the open kernel driver, address translation services on Grace.
H200_ATTRIBUTES = {
    "COMPUTE_CAPABILITY_MAJOR": 9,
    "COMPUTE_CAPABILITY_MINOR": 0,
    "CONCURRENT_MANAGED_ACCESS": 1,
    "PAGEABLE_MEMORY_ACCESS": 1,
    "PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES": 0,
    "DIRECT_MANAGED_MEM_ACCESS_FROM_HOST": 0,
    "ASYNC_ENGINE_COUNT": 3,
    "INTEGRATED": 0,
    "HOST_NUMA_ID": 0,
    "NUMA_CONFIG": 0,
    "NUMA_ID": -1,
}
GRACE = {
    "PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES": 1,
    "DIRECT_MANAGED_MEM_ACCESS_FROM_HOST": 1,
    "NUMA_CONFIG": 1,
    "NUMA_ID": 1,
}

H200 = Machine("NVIDIA H200", H200_ATTRIBUTES, 140 * GIB)
A100 = Machine(
    "NVIDIA A100-SXM4-80GB",
    H200_ATTRIBUTES | {"COMPUTE_CAPABILITY_MAJOR": 8, "PAGEABLE_MEMORY_ACCESS": 0},
    80 * GIB,
)
GH200 = Machine(
    "NVIDIA GH200 480GB",
    H200_ATTRIBUTES | GRACE,
    95 * GIB,
    architecture="aarch64",
    c2c=True,
    nodes=(NumaNode(0, 480 * GIB, True), NumaNode(1, 95 * GIB, False)),
)
GB200 = replace(
    GH200,
    name="NVIDIA GB200",
    attributes=H200_ATTRIBUTES | GRACE | {"COMPUTE_CAPABILITY_MAJOR": 10},
)
GB10 = replace(
    GH200,
    name="NVIDIA GB10",
    attributes=H200_ATTRIBUTES | GRACE | {"INTEGRATED": 1, "NUMA_CONFIG": 0},
    total_bytes=120 * GIB,
    c2c=None,
    nodes=(NumaNode(0, 120 * GIB, True),),
)
ONE_AT_A_TIME = H200_ATTRIBUTES | {"CONCURRENT_MANAGED_ACCESS": 0}
ARM_SERVER = replace(H200, architecture="aarch64")


@pytest.mark.parametrize(
    ("machine", "grace_hopper", "coherent", "ats"),
    [
        pytest.param(H200, False, False, False, id="H200"),
        pytest.param(A100, False, False, False, id="A100"),
        pytest.param(GH200, True, True, True, id="GH200"),
        pytest.param(GB200, False, True, True, id="GB200"),
        pytest.param(ARM_SERVER, False, False, False, id="H200 over PCIe on an Arm server"),
    ],
)
def test_coherent_machines_and_grace_hopper_are_recognized(
    detect_on: Detect, machine: Machine, grace_hopper: bool, coherent: bool, ats: bool
) -> None:
    found = detect_on(machine)
    assert found.is_grace_hopper is grace_hopper
    assert found.is_coherent is coherent
    assert found.ats is ats


def test_grace_hopper_with_ats_switched_off_is_recognized_by_its_name(detect_on: Detect) -> None:
    found = detect_on(replace(GH200, attributes=H200_ATTRIBUTES, c2c=None))
    assert found.is_grace_hopper
    assert not found.ats


def test_every_field_of_a_grace_hopper(detect_on: Detect) -> None:
    found = detect_on(GH200)
    assert found.device_name == "NVIDIA GH200 480GB"
    assert found.compute_capability == (9, 0)
    assert found.total_bytes == 95 * GIB
    assert found.concurrent_managed_access
    assert found.pageable_memory_access
    assert found.direct_managed_access_from_host
    assert found.driver_version == (13, 0)
    assert found.bindings_version == (12, 9)
    assert found.copy_engines == 3
    assert found.pcie_link == (5, 16)
    assert found.nvlink_c2c is True
    assert (found.host_numa_node, found.device_numa_node) == (0, 1)
    assert [node.has_cpus for node in found.numa_nodes] == [True, False]


@pytest.mark.parametrize(
    ("machine", "discards"),
    [
        pytest.param(H200, True, id="all that it needs"),
        pytest.param(replace(H200, version=12080), False, id="a driver before CUDA 13"),
        pytest.param(replace(H200, attributes=ONE_AT_A_TIME), False, id="no concurrent access"),
    ],
)
def test_what_batch_prefetch_and_discard_need(machine: Machine, discards: bool) -> None:
    assert detect(driver=machine).discard is discards


def test_a_driver_before_cuda_12_2_is_not_asked_for_numa_attributes() -> None:
    old = replace(H200, version=12010, asked=[])
    found = detect(driver=old)
    assert (found.host_numa_node, found.device_numa_node) == (None, None)
    assert not {"HOST_NUMA_ID", "NUMA_CONFIG", "NUMA_ID"} & set(old.asked)


@pytest.mark.parametrize(
    ("card", "free_bytes"),
    [
        pytest.param(None, None, id="no NVML"),
        pytest.param((141 * GIB, 100 * GIB), 100 * GIB, id="whole card"),
        pytest.param((141 * GIB, 141 * GIB), 140 * GIB, id="never more than the device"),
        pytest.param((1120 * GIB, 900 * GIB), None, id="the card around a MIG slice"),
    ],
)
def test_free_memory(card: tuple[int, int] | None, free_bytes: int | None) -> None:
    assert detect(driver=replace(H200, card=card)).free_bytes == free_bytes


@pytest.mark.parametrize(
    ("memory", "free_bytes"),
    [
        (HostMemory(120 * GIB, 90 * GIB, limit=None), 90 * GIB),
        (HostMemory(121 * GIB, 121 * GIB, limit=None), 120 * GIB),
        (None, None),
    ],
)
def test_free_memory_of_one_pool_is_what_the_kernel_calls_available(
    monkeypatch: pytest.MonkeyPatch, memory: HostMemory | None, free_bytes: int | None
) -> None:
    monkeypatch.setattr(capabilities, "host_memory", lambda: memory)
    found = detect(driver=replace(GB10, card=(120 * GIB, 3 * GIB)))
    assert found.integrated
    assert found.free_bytes == free_bytes
    assert not detect(driver=H200).integrated


def test_every_device_has_its_own_ordinal() -> None:
    found = detect_all(driver=replace(H200, count=2))
    assert [device.device_index for device in found] == [0, 1]


@pytest.mark.parametrize("device", [-1, 2])
def test_the_error_for_a_wrong_ordinal_says_how_many_devices_there_are(device: int) -> None:
    with pytest.raises(UnsupportedError, match="sees 2; check CUDA_VISIBLE_DEVICES"):
        detect(device, driver=replace(H200, count=2))


def test_fields_and_properties_go_through_json(detect_on: Detect) -> None:
    found = json.loads(json.dumps(detect_on(GH200).to_dict()))
    assert found["is_grace_hopper"] is True
    assert found["is_coherent"] is True
    assert found["ats"] is True
    assert found["numa_nodes"][1] == {"number": 1, "total_bytes": 95 * GIB, "has_cpus": False}


def write_node(root: Path, number: int, total_kib: int, cpus: str) -> None:
    """Write one node as the kernel shows it."""
    directory = root / f"node{number}"
    directory.mkdir()
    (directory / "cpulist").write_text(f"{cpus}\n")
    (directory / "meminfo").write_text(
        f"Node {number} MemTotal:       {total_kib} kB\nNode {number} MemFree:        10 kB\n"
    )


def test_numa_nodes_of_a_grace_hopper(tmp_path: Path) -> None:
    # GPU memory is a node without CPUs. The kernel reserves nodes without memory for MIG.
    write_node(tmp_path, 0, 500_000_000, "0-71")
    write_node(tmp_path, 10, 0, "")
    write_node(tmp_path, 1, 99_000_000, "")
    (tmp_path / "possible").write_text("0-10\n")
    assert numa_nodes(tmp_path) == (
        NumaNode(0, 500_000_000 * 1024, True),
        NumaNode(1, 99_000_000 * 1024, False),
    )


def test_a_kernel_without_numa_has_no_nodes(tmp_path: Path) -> None:
    assert numa_nodes(tmp_path / "absent") == ()


@pytest.mark.slow
def test_detect_without_a_gpu_is_an_error_and_does_not_start_cuda_in_torch() -> None:
    code = (
        "import torch\n"
        "from umem.hardware.capabilities import detect\n"
        "from umem.core.errors import UnsupportedError\n"
        "try:\n"
        "    detect()\n"
        "except UnsupportedError as error:\n"
        "    print(error)\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    said = run_forked(code, CUDA_VISIBLE_DEVICES="")
    assert "no NVIDIA driver" in said or "sees no GPU" in said
