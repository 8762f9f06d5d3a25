"""Checks of the machine, and the default limit, before `umem.enable` swaps anything."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import pytest
from cards import GH200, H200

from umem import swap
from umem.core.errors import UnsupportedError
from umem.hardware import load_hardware
from umem.hardware.host_memory import HostMemory, host_memory_bytes
from umem.policy import ResolvedPolicy, load_policy, resolve
from umem.runtime.array_libraries import import_libraries
from umem.swap import check_devices, pinned_limit_bytes, with_default_limit

GIB = 1 << 30


def policy(**keys: object) -> ResolvedPolicy:
    return resolve(load_policy(keys), load_hardware("h200-pcie"), environ={})


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
    """The cap on managed memory if neither the policy nor the environment sets one."""

    def test_named_limits_hold(self) -> None:
        named = policy(limits={"managed_bytes": "7GiB"})
        assert with_default_limit(named, (H200,)).managed_limit_bytes == 7 * GIB

    def test_a_share_of_the_cards(self) -> None:
        limit = with_default_limit(policy(), (H200, H200)).managed_limit_bytes
        assert limit == int(0.9 * 2 * H200.total_bytes)

    def test_under_a_budget_host_memory_is_added(self) -> None:
        host = host_memory_bytes()
        assert host is not None
        limit = with_default_limit(policy(device_budget="50GiB"), (H200,)).managed_limit_bytes
        assert limit is not None
        assert 50 * GIB < limit < 50 * GIB + host[0]

    def test_coherent_cards_have_none(self) -> None:
        assert with_default_limit(policy(), (GH200,)).managed_limit_bytes is None

    def test_page_locked_memory_leaves_some_of_the_host(self) -> None:
        host = host_memory_bytes()
        assert host is not None
        assert 0 < pinned_limit_bytes() < host[0]

    def test_the_ranks_of_a_host_share_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        host = HostMemory(100 * GIB, 80 * GIB, limit=None)
        monkeypatch.setattr(swap, "host_memory", lambda: host)
        budgeted = policy(device_budget="50GiB")
        alone = pinned_limit_bytes(), with_default_limit(budgeted, (H200,)).managed_limit_bytes
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
        among = pinned_limit_bytes(), with_default_limit(budgeted, (H200,)).managed_limit_bytes
        assert alone == (int(0.85 * 80 * GIB), 90 * GIB)
        assert among == (int(0.85 * 10 * GIB), 55 * GIB)
