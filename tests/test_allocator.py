"""Checks of the machine, and the default limit, before `umem.enable` swaps anything."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import pytest
from cards import GB10, GH200, H200

from umem.core.errors import UnsupportedError
from umem.hardware import load_hardware
from umem.hardware.host_share import HostShare
from umem.hardware.load import describe_machine
from umem.policy import ResolvedPolicy, load_policy, resolve
from umem.runtime._native import Allocator
from umem.runtime.array_libraries import import_libraries
from umem.runtime.host_room import divide_host
from umem.runtime.state import native_config
from umem.swap import HostCaps, check_devices, host_caps, managed_bytes_of_device

GIB = 1 << 30


def policy(**keys: object) -> ResolvedPolicy:
    return resolve(load_policy(keys), load_hardware("h200"), environ={})


class TestDevices:
    def test_managed_memory_needs_concurrent_access(self) -> None:
        card = replace(H200, concurrent_managed_access=False)
        with pytest.raises(UnsupportedError, match=r"GPU 0 .*kind: device.*fallback=True"):
            check_devices(policy(), (card,))
        check_devices(policy(defaults={"kind": "device"}), (card,))

    def test_system_memory_needs_a_gpu_that_reaches_it(self) -> None:
        system = policy(defaults={"kind": "system"})
        with pytest.raises(UnsupportedError, match="kind: managed"):
            check_devices(system, (H200,))
        check_devices(system, (GH200,))

    def test_every_gpu_is_checked(self) -> None:
        second = replace(H200, device_index=1, concurrent_managed_access=False)
        with pytest.raises(UnsupportedError, match="GPU 1"):
            check_devices(policy(), (H200, second))


@pytest.mark.parametrize(
    ("library", "absent", "package"),
    [
        ("cupy", "rmm", "rmm-cu13"),
        ("cupy", "cupy", "cupy-cuda13x"),
        ("cupy", "rmm.allocators.cupy", "rmm-cu13"),
        ("numba", "numba.cuda", "numba-cuda"),
    ],
)
def test_a_library_that_shares_memory_must_be_installed(
    library: str, absent: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("rmm", "cupy", "numba.cuda", "rmm.allocators.cupy"):
        monkeypatch.setitem(sys.modules, name, None if name == absent else ModuleType(name))
    monkeypatch.setattr("torch.version.cuda", "13.0")
    with pytest.raises(UnsupportedError, match=rf"{absent}.*pip install {package}"):
        import_libraries([library])


class TestDefaultLimit:
    """Caps if neither the policy nor the environment sets one."""

    share = HostShare(80 * GIB, ranks=1, source="", total_bytes=80 * GIB)

    def caps(self, resolved: ResolvedPolicy, share: HostShare | None = share) -> HostCaps:
        of_device = managed_bytes_of_device((resolved,), (H200,))
        return host_caps(resolved, share, has_managed_cap=any(of_device))

    def test_named_limits_hold(self) -> None:
        named = policy(limits={"managed_bytes": "7GiB"})
        assert managed_bytes_of_device((named,), (H200,)) == ()
        assert self.caps(named).managed_bytes == 7 * GIB

    def test_a_share_of_each_card(self) -> None:
        small = replace(H200, device_index=1, total_bytes=10 * GIB)
        found = managed_bytes_of_device((policy(), policy()), (H200, small))
        assert found == (int(0.9 * H200.total_bytes), 9 * GIB)
        assert self.caps(policy()).managed_bytes == 0

    def test_under_a_budget_host_memory_is_added(self) -> None:
        budgeted = policy(device_budget="50GiB")
        assert managed_bytes_of_device((budgeted,), (H200,)) == (50 * GIB,)
        assert self.caps(budgeted).managed_bytes == 40 * GIB

    def test_coherent_cards_have_none(self) -> None:
        assert managed_bytes_of_device((policy(),), (GH200,)) == ()

    @pytest.mark.parametrize("kind", ["managed", "device", "pinned"])
    def test_both_kinds_leave_some_of_the_host(self, kind: str) -> None:
        caps = self.caps(policy(device_budget="50GiB", defaults={"kind": kind}))
        assert (caps.managed_bytes or 0) + caps.pinned_bytes == int(0.85 * 80 * GIB)

    def test_a_share_of_nothing_is_a_cap(self) -> None:
        nothing = HostShare(0, ranks=1, source="", total_bytes=80 * GIB)
        assert self.caps(policy(), nothing).pinned_bytes == 1
        assert self.caps(policy(), None).pinned_bytes == 0, "unknown: no cap"


def test_the_budget_of_one_pool_is_hard() -> None:
    """What exceeds it is out of memory: nothing goes to the host, which is the same memory."""
    pool = describe_machine(GB10, GB10.total_bytes)
    resolved = resolve(load_policy("sft"), pool, {"UMEM_DEVICE_BUDGET": "64MiB"}, free_bytes=GIB)
    share = HostShare(GIB, ranks=1, source="", total_bytes=GIB)
    of_device = managed_bytes_of_device((resolved,), (GB10,))
    caps = host_caps(resolved, share, has_managed_cap=any(of_device), has_one_pool=True)
    allocator = Allocator.on_host(native_config(resolved, caps.pinned_bytes, of_device), 0, 1)
    held = allocator.malloc(60 << 20)
    with pytest.raises(MemoryError, match=r"^CUDA out of memory\..*device budget, 64.00 MiB"):
        allocator.malloc(10 << 20)
    assert allocator.kind_stats(0)["pinned"]["reserved_bytes"] == 0
    assert allocator.kind_stats(0)["managed"]["reserved_bytes"] == 0
    allocator.free(held)
    assert allocator.malloc(62 << 20) != 0


def test_a_second_process_gives_no_page_locked_memory_in_one_pool() -> None:
    allocator = Allocator.on_host(native_config(policy(), 1), 0, 1)
    before = allocator.pinned_room_bytes()
    divide_host(allocator, 0.0, 2)
    divide_host(allocator, 0.0, 1)
    assert allocator.pinned_room_bytes() == before <= 1
