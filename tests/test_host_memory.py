"""Host memory of a process in control groups, read from trees of files like the kernel's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from umem.hardware.host_memory import HostMemory, host_memory, host_memory_bytes

GIB = 1 << 30
V1_UNLIMITED = 0x7FFF_FFFF_FFFF_F000
"""What version 1 shows for a group without a limit, on pages of 4 KiB."""

MACHINE_TOTAL = 128 * GIB
MACHINE_AVAILABLE = 100 * GIB

V2_MOUNT = "24 23 0:21 {top} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "35 31 0:32 {top} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
OTHERS = (
    "22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/root rw,discard",
    "33 31 0:30 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu",
)


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


class Machine:
    """A directory with the kernel's files for this process."""

    def __init__(self, root: Path) -> None:
        self.root = root
        # More lines than these, some without a unit, are in the kernel's file.
        write(
            root / "proc/meminfo",
            f"MemTotal:       {MACHINE_TOTAL >> 10} kB\nMemFree:        1024 kB\n"
            f"MemAvailable:   {MACHINE_AVAILABLE >> 10} kB\nHugePages_Total:       0",
        )

    def mount(self, *lines: str, top: str = "/") -> None:
        text = "\n".join(line.format(top=top) for line in (*OTHERS, *lines))
        write(self.root / "proc/self/mountinfo", text)

    def process_in(self, *lines: str) -> None:
        write(self.root / "proc/self/cgroup", "\n".join(lines))

    def v2_group(self, name: str, used: int, **figures: int | str) -> None:
        """Figures are limits, and pages in bytes as `memory.stat` names them."""
        directory = self.root / "sys/fs/cgroup" / name
        limits = {key: figures.pop(key, "max") for key in ("max", "high")}
        for key, value in limits.items():
            write(directory / f"memory.{key}", value)
        write(directory / "memory.current", used)
        self._stat(directory, {"anon": used, **figures})

    def v1_group(self, name: str, used: int, limit: int = V1_UNLIMITED, **figures: int) -> None:
        directory = self.root / "sys/fs/cgroup/memory" / name
        write(directory / "memory.limit_in_bytes", limit)
        write(directory / "memory.usage_in_bytes", used)
        # Without "total_" they leave out nested groups.
        self._stat(directory, {"cache": 1, "inactive_file": 2, "active_file": 3, **figures})

    @staticmethod
    def _stat(directory: Path, figures: Mapping[str, int | str]) -> None:
        text = "\n".join(f"{key} {value}" for key, value in figures.items())
        write(directory / "memory.stat", text)

    def read(self) -> HostMemory:
        found = host_memory(self.root)
        assert found is not None
        return found


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def check(
    machine: Machine, total_gib: int, available_gib: int, file: str, limit_gib: int | None = None
) -> None:
    """The limit that binds is that of a file, by default of all that the process may have."""
    found = machine.read()
    available_bytes = available_gib * GIB
    assert (found.total_bytes, found.available_bytes) == (total_gib * GIB, available_bytes)
    assert found.limit is not None
    assert found.limit.available_bytes == available_bytes
    assert found.limit.limit_bytes == (limit_gib or total_gib) * GIB
    assert found.limit.path == machine.root / "sys/fs/cgroup" / file


def test_a_machine_without_control_groups(machine: Machine) -> None:
    assert machine.read() == HostMemory(MACHINE_TOTAL, MACHINE_AVAILABLE, None)
    assert host_memory_bytes(machine.root) == (MACHINE_TOTAL, MACHINE_AVAILABLE)


def test_the_kernel_does_not_tell(tmp_path: Path) -> None:
    assert host_memory(tmp_path) is None, "as on macOS"
    assert host_memory_bytes(tmp_path) is None
    write(tmp_path / "proc/meminfo", "MemTotal: 4096 kB\nMemFree: 1024 kB")
    assert host_memory(tmp_path) is None, "a kernel before 3.14"


@pytest.fixture
def nested(machine: Machine) -> Machine:
    """A process two groups below the root of version 2, whose own group has no limit."""
    machine.mount(V2_MOUNT)
    machine.process_in("0::/batch.slice/job.scope")
    machine.v2_group("batch.slice/job.scope", 10 * GIB)
    machine.v2_group("batch.slice", 30 * GIB, max=64 * GIB)
    # The root group has figures, but neither limits nor usage.
    write(machine.root / "sys/fs/cgroup/memory.stat", "active_file 5")
    return machine


class TestVersion2:
    def test_a_group_around_the_process_has_the_limit(self, nested: Machine) -> None:
        check(nested, 64, 34, "batch.slice/memory.max")

    def test_the_group_with_the_least_left_decides(self, nested: Machine) -> None:
        nested.v2_group("batch.slice/job.scope", 10 * GIB, max=70 * GIB)
        nested.v2_group("batch.slice", 60 * GIB, max=90 * GIB)
        check(nested, 70, 30, "batch.slice/memory.max", limit_gib=90)

    def test_page_cache_can_be_dropped(self, nested: Machine) -> None:
        """But for what must be written first; tmpfs is in `file` and in neither list."""
        nested.v2_group(
            "batch.slice",
            64 * GIB,  # full
            max=64 * GIB,
            file=50 * GIB,
            shmem=9 * GIB,
            active_file=11 * GIB,
            inactive_file=30 * GIB,
            file_dirty=2 * GIB,
            file_writeback=1 * GIB,
            slab_reclaimable=3 * GIB,
        )
        assert nested.read().available_bytes == 38 * GIB

    def test_figures_that_were_not_read_at_one_moment(self, nested: Machine) -> None:
        nested.v2_group("batch.slice", 65 * GIB, max=64 * GIB, active_file=1, file_dirty=GIB)
        assert nested.read().available_bytes == 0
        nested.v2_group("batch.slice", 1 * GIB, max=64 * GIB, active_file=2 * GIB)
        assert nested.read().available_bytes == 64 * GIB

    def test_throttling_begins_at_the_high_limit(self, nested: Machine) -> None:
        nested.v2_group("batch.slice/job.scope", 10 * GIB, max=40 * GIB, high=36 * GIB)
        check(nested, 36, 26, "batch.slice/job.scope/memory.high")

    @pytest.mark.parametrize(
        ("used", "limit"),
        [
            pytest.param(GIB, 120 * GIB, id="its groups may take more than the machine has"),
            pytest.param(MACHINE_TOTAL - GIB, MACHINE_TOTAL, id="a limit beyond the machine"),
        ],
    )
    def test_the_machine_may_have_the_least(self, nested: Machine, used: int, limit: int) -> None:
        nested.v2_group("batch.slice", used, max=limit)
        assert nested.read() == HostMemory(limit, MACHINE_AVAILABLE, None)

    def test_files_may_be_missing(self, nested: Machine) -> None:
        """A group that was removed, and one whose figures may not be read."""
        nested.process_in("0::/batch.slice/job.scope/gone (deleted)")
        (nested.root / "sys/fs/cgroup/batch.slice/memory.stat").unlink()
        assert nested.read().available_bytes == 34 * GIB
        (nested.root / "proc/self/mountinfo").unlink()
        assert nested.read().limit is None


class TestContainers:
    """A container's processes see a part of the tree, in one of several ways."""

    @pytest.mark.parametrize(
        ("group", "top"),
        [
            pytest.param("/", "/", id="a cgroup namespace"),
            pytest.param("/docker/0815", "/docker/0815", id="only the mount hides the host"),
            pytest.param("/docker/0815", "/", id="the host's name in a namespace's tree"),
            pytest.param("/", "/..", id="a mount older than the namespace"),
            pytest.param("/a:b c", r"/a:b\040c", id="a colon and a space in a name"),
        ],
    )
    def test_the_limit_is_on_top_of_a_mount(self, group: str, top: str, machine: Machine) -> None:
        machine.process_in(f"0::{group}")
        machine.mount(V2_MOUNT, top=top)
        machine.v2_group("", 6 * GIB, max=16 * GIB, inactive_file=2 * GIB)
        machine.v2_group("other", 4 * GIB, max=5 * GIB)
        check(machine, 16, 12, "memory.max")

    def test_a_group_nested_in_a_container(self, machine: Machine) -> None:
        machine.process_in("0::/inner")
        machine.mount(V2_MOUNT)
        machine.v2_group("", 6 * GIB, max=16 * GIB)
        machine.v2_group("inner", 3 * GIB, max=4 * GIB)
        check(machine, 4, 1, "inner/memory.max")

    @pytest.mark.parametrize(
        ("group", "top"),
        [
            pytest.param("/../0816", "/", id="moved to a group beside the container's"),
            pytest.param("/../../0816", "/..", id="moved further away"),
            pytest.param("/", "/docker/0815", id="a mount of another group"),
            pytest.param("/docker/08", "/docker/0815", id="a name that begins alike"),
        ],
    )
    def test_limits_of_others_do_not_count(self, group: str, top: str, machine: Machine) -> None:
        machine.process_in(f"0::{group}")
        machine.mount(V2_MOUNT, top=top)
        machine.v2_group("", 6 * GIB, max=16 * GIB)
        assert machine.read() == HostMemory(MACHINE_TOTAL, MACHINE_AVAILABLE, None)


@pytest.fixture
def hybrid(machine: Machine) -> Machine:
    """Both versions mounted, with the memory controller in version 1."""
    machine.mount(V1_MOUNT, "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw")
    machine.process_in("8:pids:/jobs", "4:memory:/jobs/17", "1:cpu:/jobs/17", "0::/jobs/17")
    write(machine.root / "sys/fs/cgroup/unified/jobs/17/cgroup.procs", 4711)
    machine.v1_group("", 50 * GIB)
    machine.v1_group("jobs", 20 * GIB)
    machine.v1_group("jobs/17", 20 * GIB)
    return machine


class TestVersion1:
    def test_no_limits(self, hybrid: Machine) -> None:
        assert hybrid.read() == HostMemory(MACHINE_TOTAL, MACHINE_AVAILABLE, None)

    def test_a_nested_limit_less_page_cache(self, hybrid: Machine) -> None:
        cache = {"active_file": 5, "inactive_file": 4, "dirty": 2, "writeback": 1}
        figures = {f"total_{name}": gib * GIB for name, gib in cache.items()}
        hybrid.v1_group("jobs", 32 * GIB, 32 * GIB, **figures)
        check(hybrid, 32, 6, "memory/jobs/memory.limit_in_bytes")

    @pytest.mark.parametrize(
        ("process", "top", "mount", "available_gib"),
        [
            pytest.param(
                *(["4:cpu,memory:/docker/0815"], "/docker/0815", V1_MOUNT + ",cpu", 3),
                id="docker shows its own group at the top",
            ),
            pytest.param(
                *(["3:cpuset:/", "2:name=systemd:/"], "/", V1_MOUNT, None),
                id="other controllers have no memory limits",
            ),
        ],
    )
    def test_the_group_of_the_memory_controller_counts(
        self, process: list[str], top: str, mount: str, available_gib: int | None, machine: Machine
    ) -> None:
        machine.process_in(*process)
        machine.mount(mount, top=top)
        machine.v1_group("", 5 * GIB, 8 * GIB)
        if available_gib is None:
            assert machine.read().limit is None
        else:
            check(machine, 8, available_gib, "memory/memory.limit_in_bytes")

    def test_a_limit_that_a_container_does_not_see(self, hybrid: Machine) -> None:
        """Of a group above its mount: the kernel tells the least of all."""
        hybrid.v1_group("", 20 * GIB, hierarchical_memory_limit=64 * GIB)
        hybrid.v1_group("jobs/17", 20 * GIB, hierarchical_memory_limit=24 * GIB)
        check(hybrid, 24, 4, "memory/jobs/17/memory.limit_in_bytes")


class TestNodes:
    """Memory that the kernel counts and this process may not have."""

    @staticmethod
    def node(
        machine: Machine, number: int, total: int, free: int, cpus: str, cache: int = 0
    ) -> None:
        directory = machine.root / f"sys/devices/system/node/node{number}"
        write(directory / "cpulist", cpus)
        write(
            directory / "meminfo",
            f"Node {number} MemTotal:  {total >> 10} kB\nNode {number} MemFree:  {free >> 10} kB\n"
            f"Node {number} Active(file):  {cache >> 11} kB\n"
            f"Node {number} Inactive(file):  {cache >> 11} kB\nNode {number} HugePages_Total:  0",
        )

    def test_the_memory_of_a_gpu(self, machine: Machine) -> None:
        """A Grace Hopper's is a node without CPUs."""
        self.node(machine, 0, 100 * GIB, 75 * GIB, "0-71")
        self.node(machine, 1, 28 * GIB, 20 * GIB, "", cache=2 * GIB)
        expected = HostMemory(100 * GIB, 78 * GIB, None, other_nodes_bytes=22 * GIB)
        assert machine.read() == expected

    def test_nodes_that_the_process_is_kept_from(self, machine: Machine) -> None:
        write(machine.root / "proc/self/status", "Name:\tx\nMems_allowed_list:\t0,2-3")
        for number in range(4):
            self.node(machine, number, 32 * GIB, 20 * GIB, f"{number}")
        assert machine.read() == HostMemory(96 * GIB, 80 * GIB, None, other_nodes_bytes=20 * GIB)

    def test_a_group_may_leave_less_than_its_nodes(self, machine: Machine) -> None:
        self.node(machine, 0, 100 * GIB, 75 * GIB, "0-71")
        self.node(machine, 1, 28 * GIB, 20 * GIB, "")
        machine.mount(V2_MOUNT)
        machine.process_in("0::/job")
        machine.v2_group("job", 10 * GIB, max=110 * GIB)
        assert machine.read().limit is None, "more than all that the CPUs have"
        machine.v2_group("job", 10 * GIB, max=50 * GIB)
        assert machine.read().available_bytes == 40 * GIB


def test_this_machine() -> None:
    found = host_memory()
    if not Path("/proc/meminfo").exists():
        assert found is None
        return
    assert found is not None
    assert 0 < found.available_bytes <= found.total_bytes
