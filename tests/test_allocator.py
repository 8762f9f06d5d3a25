"""What `umem.enable` decides about a machine before it swaps anything."""

from __future__ import annotations

from dataclasses import replace

import pytest

from umem.allocator import _check_devices, _with_default_limit
from umem.capabilities import Capabilities
from umem.errors import UnsupportedError
from umem.host import host_memory_bytes
from umem.policy import ResolvedPolicy, load_policy, resolve

GIB = 1 << 30

# A card behind PCIe, as far as these decisions look at it.
CARD = Capabilities(
    device_index=0,
    device_name="NVIDIA H200",
    compute_capability=(9, 0),
    total_bytes=140 * GIB,
    free_bytes=None,
    concurrent_managed_access=True,
    pageable_memory_access=False,
    pageable_uses_host_page_tables=False,
    direct_managed_access_from_host=False,
    prefetch_batch=True,
    discard=True,
    driver_version=(13, 0),
    driver_release=None,
    bindings_version=(13, 0),
    copy_engines=3,
    pcie_link=(5, 16),
    nvlink_c2c=None,
    cpu_architecture="x86_64",
    host_numa_node=0,
    device_numa_node=None,
    numa_nodes=(),
)
COHERENT = replace(CARD, pageable_memory_access=True, pageable_uses_host_page_tables=True)


def policy(**keys: object) -> ResolvedPolicy:
    return resolve(load_policy(keys), CARD.total_bytes, environ={})


class TestDevices:
    def test_managed_memory_needs_concurrent_access(self) -> None:
        card = replace(CARD, concurrent_managed_access=False)
        with pytest.raises(UnsupportedError, match=r"GPU 0 .*kind: device.*fallback=True"):
            _check_devices(policy(), (card,))
        _check_devices(policy(defaults={"kind": "device"}), (card,))

    def test_system_memory_needs_a_gpu_that_reaches_it(self) -> None:
        system = policy(defaults={"kind": "system"})
        with pytest.raises(UnsupportedError, match="kind: managed"):
            _check_devices(system, (CARD,))
        _check_devices(system, (COHERENT,))

    def test_every_gpu_is_looked_at(self) -> None:
        second = replace(CARD, device_index=1, concurrent_managed_access=False)
        with pytest.raises(UnsupportedError, match="GPU 1"):
            _check_devices(policy(), (CARD, second))


class TestDefaultLimit:
    """The cap on managed memory where the policy and the environment name none."""

    def test_named_limits_hold(self) -> None:
        named = policy(limits={"managed_bytes": "7GiB"})
        assert _with_default_limit(named, (CARD,)).managed_limit_bytes == 7 * GIB

    def test_a_share_of_the_cards(self) -> None:
        limit = _with_default_limit(policy(), (CARD, CARD)).managed_limit_bytes
        assert limit == int(0.9 * 280 * GIB)

    def test_under_a_budget_the_host_comes_on_top(self) -> None:
        host = host_memory_bytes()
        assert host is not None
        limit = _with_default_limit(policy(device_budget="50GiB"), (CARD,)).managed_limit_bytes
        assert limit is not None
        assert 50 * GIB < limit < 50 * GIB + host[0]

    def test_coherent_cards_have_none(self) -> None:
        assert _with_default_limit(policy(), (COHERENT,)).managed_limit_bytes is None
