"""The allocator's core through its Python binding, over host memory."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
)

from umem.core.classes import TensorClass
from umem.runtime._native import Allocator, ClassSetting, Config

KIB = 1 << 10
MIB = 1 << 20
LARGE_BYTES = 2 * MIB
POOL = (0, 1)


def _allocator(
    *,
    setting: ClassSetting | None = None,
    total_bytes: int = 0,
    devices: int = 1,
    **limits: Any,
) -> Allocator:
    """Over host memory, with one setting for all classes."""
    config = Config([setting or ClassSetting()] * len(TensorClass), **limits)
    return Allocator.on_host(config, total_bytes, devices)


def _block_bytes(requested_bytes: int) -> int:
    """Size of the block for a request."""
    step = 64 * KIB if requested_bytes >= LARGE_BYTES else 512
    return -(-requested_bytes // step) * step


@dataclass(frozen=True)
class _Tensor:
    address: int
    requested_bytes: int
    block_bytes: int
    tensor_class: TensorClass
    in_pool: bool


class CoreMachine(RuleBasedStateMachine):
    """Calls in any order, compared with a dictionary of live blocks."""

    tensors: Bundle[int] = Bundle("tensors")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = _allocator()
        self.live: dict[int, _Tensor] = {}
        self.allocated = 0
        self.requested_bytes = 0
        self.peak_bytes = 0
        self.pool_begun = False
        self.pool_users = 0

    @rule(
        target=tensors,
        size=st.integers(1, 4 * KIB) | st.integers(1, 3 * MIB) | st.integers(1, 48 * MIB),
        stream=st.integers(0, 2),
        tensor_class=st.sampled_from(TensorClass),
    )
    def malloc(self, size: int, stream: int, tensor_class: TensorClass) -> int:
        with self.allocator.class_override(tensor_class.number):
            address = self.allocator.malloc(size, stream=stream)
        assert address % (64 * KIB if size >= LARGE_BYTES else 512) == 0
        tensor = _Tensor(address, size, _block_bytes(size), tensor_class, self.pool_begun)
        for other in self.live.values():
            assert (
                address + tensor.block_bytes <= other.address
                or other.address + other.block_bytes <= address
            )
        self.live[address] = tensor
        self.allocated += 1
        self.requested_bytes += size
        self.peak_bytes = max(self.peak_bytes, sum(t.block_bytes for t in self.live.values()))
        return address

    @rule(address=consumes(tensors))
    def free(self, address: int) -> None:
        self.allocator.free(address)
        del self.live[address]
        with pytest.raises(ValueError, match="no live block"):
            self.allocator.free(address)

    @rule(address=tensors, tensor_class=st.sampled_from(TensorClass))
    def retag(self, address: int, tensor_class: TensorClass) -> None:
        assert self.allocator.retag(address, tensor_class.number)
        self.live[address] = replace(self.live[address], tensor_class=tensor_class)

    @rule(address=tensors, stream=st.integers(0, 2))
    def record_stream(self, address: int, stream: int) -> None:
        self.allocator.record_stream(address, stream)

    @rule()
    def empty_cache(self) -> None:
        self.allocator.empty_cache()
        if not self.live and not self.pool_users:
            assert self.allocator.managed_bytes() == 0

    @precondition(lambda self: not self.pool_begun)
    @rule()
    def begin_pool(self) -> None:
        self.allocator.begin_pool(0, POOL)
        self.pool_begun = True
        self.pool_users += 1

    @precondition(lambda self: self.pool_begun)
    @rule()
    def end_pool(self) -> None:
        self.allocator.end_pool(0, POOL)
        self.pool_begun = False

    @precondition(lambda self: self.pool_users > 0 and not self.pool_begun)
    @rule()
    def release_pool(self) -> None:
        self.allocator.release_pool(0, POOL)
        self.pool_users -= 1

    @invariant()
    def live_blocks_are_the_tensors(self) -> None:
        expected = sorted(
            (t.address, t.requested_bytes, t.block_bytes, t.tensor_class.number, 0, "managed")
            for t in self.live.values()
        )
        assert sorted(self.allocator.live_blocks()) == expected

    @invariant()
    def statistics_are_exact(self) -> None:
        stats = self.allocator.stats(0)
        tensors = list(self.live.values())
        held_bytes = sum(t.block_bytes for t in tensors)
        assert stats["allocation"]["all"]["current"] == len(tensors)
        assert stats["allocation"]["all"]["allocated"] == self.allocated
        assert stats["allocated_bytes"]["all"]["current"] == held_bytes
        assert stats["allocated_bytes"]["all"]["peak"] == self.peak_bytes
        assert stats["requested_bytes"]["all"]["allocated"] == self.requested_bytes
        assert stats["reserved_bytes"]["all"]["current"] == self.allocator.managed_bytes()
        for tensor_class, counts in zip(TensorClass, self.allocator.class_stats(0), strict=True):
            of_class = [t for t in tensors if t.tensor_class is tensor_class]
            assert counts["allocation"]["current"] == len(of_class)
            assert counts["allocated_bytes"]["current"] == sum(t.block_bytes for t in of_class)
            assert counts["requested_bytes"]["current"] == sum(t.requested_bytes for t in of_class)

    @invariant()
    def segments_are_tiled_by_their_blocks(self) -> None:
        inactive_split = 0
        for segment in self.allocator.segments(0):
            address = segment["address"]
            for block in segment["blocks"]:
                assert block["address"] == address
                address += block["size"]
                if block["state"] == "active_allocated":
                    assert self.live[block["address"]].in_pool == (
                        segment["segment_pool_id"] == POOL
                    )
                elif len(segment["blocks"]) > 1 and block["state"] == "inactive":
                    inactive_split += block["size"]
            assert address == segment["address"] + segment["total_size"]
        stats = self.allocator.stats(0)
        assert stats["inactive_split_bytes"]["all"]["current"] == inactive_split

    def teardown(self) -> None:
        for address in self.live:
            self.allocator.free(address)
        if self.pool_begun:
            self.allocator.end_pool(0, POOL)
        for _ in range(self.pool_users):
            self.allocator.release_pool(0, POOL)
        self.allocator.empty_cache()
        assert self.allocator.managed_bytes() == 0
        assert self.allocator.segments(0) == []
        assert self.allocator.pool_stats(0) == []


TestCoreMachine = CoreMachine.TestCase
TestCoreMachine.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def test_torch_reads_the_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's summary finds every figure that it needs."""
    allocator = _allocator()
    allocator.malloc(3 * MIB - 32 * KIB)
    freed = allocator.malloc(1000)
    allocator.free(freed)
    monkeypatch.setattr(
        torch.cuda.memory, "memory_stats_as_nested_dict", lambda device: allocator.stats(0)
    )
    assert torch.cuda.memory_stats(0)["allocation.small_pool.freed"] == 1
    assert torch.cuda.max_memory_reserved(0) == 22 * MIB
    summary = torch.cuda.memory_summary(0)
    assert re.search(r"Allocated memory +\| +3072 KiB", summary)
    assert re.search(r"GPU reserved memory +\| +22528 KiB", summary)
    assert re.search(r"Requested memory +\| +3040 KiB", summary)


def test_requests_are_counted_by_what_served_them(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = _allocator()
    for _ in range(3):
        allocator.free(allocator.malloc(3 * MIB))
    served = allocator.stats(0)["served"]
    assert {name: count for name, count in served.items() if count} == {"segment": 1, "cached": 2}
    monkeypatch.setattr(
        torch.cuda.memory, "memory_stats_as_nested_dict", lambda device: allocator.stats(0)
    )
    assert torch.cuda.memory_stats(0)["served.cached"] == 2
    allocator.reset_accumulated_stats(0)
    assert set(allocator.stats(0)["served"].values()) == {0}


def test_torch_reads_the_snapshot() -> None:
    """torch's tools for snapshots read ours."""
    from torch.cuda import _memory_viz

    allocator = _allocator()
    allocator.malloc(3 * MIB)
    allocator.malloc(1000, stream=7)
    segments = allocator.segments(0)
    assert {segment["segment_type"] for segment in segments} == {"small", "large"}
    summary = _memory_viz.segsum({"segments": segments, "device_traces": []})
    assert "segments: 2" in summary
    assert "total_reserved: 22.0MiB" in summary
    assert "total_allocated: 3.0MiB" in summary  # as asked for


def test_a_model_reserves_little_more_than_its_tensors() -> None:
    """A Llama of width 1280 in bfloat16, whose tensors are a little above a multiple of 2 MiB."""
    allocator = _allocator()
    layer = [3200 * KIB] * 4 + [8640 * KIB] * 3
    asked_bytes = 24 * sum(layer)
    for size in layer * 24:
        allocator.malloc(size)
    stats = allocator.stats(0)
    assert stats["allocated_bytes"]["all"]["current"] == asked_bytes
    assert stats["reserved_bytes"]["all"]["current"] < 1.06 * asked_bytes


@pytest.mark.parametrize(
    ("limits", "remedy"),
    [
        ({"managed_limit_bytes": 32 * MIB}, "UMEM_MANAGED_LIMIT"),
        ({"total_bytes": 32 * MIB}, "smaller batch"),
        (
            {
                "device_budget_bytes": 32 * MIB,
                "pinned_limit_bytes": 8 * MIB,
                "setting": ClassSetting(kind="device"),
            },
            "device budget, 32.00 MiB.*page-locked host memory, 8.00 MiB",
        ),
    ],
)
def test_a_limit_is_a_memory_error(limits: dict[str, Any], remedy: str) -> None:
    allocator = _allocator(**limits)
    held = allocator.malloc(30 * MIB)
    with pytest.raises(MemoryError, match=r"^CUDA out of memory\..*" + remedy):
        allocator.malloc(10 * MIB)
    assert allocator.stats(0)["num_ooms"] == 1
    allocator.free(held)
    assert allocator.malloc(32 * MIB) != 0


@pytest.mark.slow
def test_accelerate_finds_a_batch_that_fits() -> None:
    """From the error's text. torch raises what the allocator throws as a RuntimeError."""
    memory = pytest.importorskip("accelerate.utils")
    allocator = _allocator(
        device_budget_bytes=64 * MIB,
        pinned_limit_bytes=64 * MIB,
        setting=ClassSetting(kind="device"),
    )
    tried = []

    @memory.find_executable_batch_size(starting_batch_size=32)  # type: ignore[untyped-decorator, unused-ignore]
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        held: list[int] = []
        try:
            while len(held) < batch_size:
                held.append(allocator.malloc(14 * MIB))
        except MemoryError as error:
            raise RuntimeError(str(error)) from error
        finally:
            for address in held:
                allocator.free(address)
        return batch_size

    # Four are on the device, and four more in page-locked memory of the host.
    assert train() == 8
    assert len(tried) > 2
    assert allocator.stats(0)["num_ooms"] == len(tried) - 1


def test_a_memory_fraction_bounds_reserved_memory() -> None:
    allocator = _allocator(total_bytes=100 * MIB)
    allocator.set_memory_fraction(0.2, 0)
    assert allocator.memory_fraction(0) == 0.2
    with pytest.raises(MemoryError, match="set_per_process_memory_fraction"):
        allocator.malloc(30 * MIB)
    for wrong in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="between 0 and 1"):
            allocator.set_memory_fraction(wrong, 0)


def test_a_budget_sends_managed_memory_to_the_host() -> None:
    allocator = _allocator(device_budget_bytes=32 * MIB)
    allocator.malloc(30 * MIB)
    allocator.malloc(10 * MIB)
    assert allocator.kind_stats(0)["managed"] == {
        "reserved_bytes": 40 * MIB,
        "spilled_bytes": 10 * MIB,
    }


def test_a_budget_sends_device_memory_to_page_locked_host_memory() -> None:
    allocator = _allocator(device_budget_bytes=32 * MIB, setting=ClassSetting(kind="device"))
    allocator.malloc(30 * MIB)
    spilled = allocator.malloc(10 * MIB)
    assert allocator.kind_stats(0)["device"] == {"reserved_bytes": 30 * MIB, "spilled_bytes": 0}
    assert allocator.kind_stats(0)["pinned"] == {
        "reserved_bytes": 10 * MIB,
        "spilled_bytes": 10 * MIB,
    }
    assert {block[0]: block[-1] for block in allocator.live_blocks()}[spilled] == "pinned"
    assert allocator.stats(0)["budget_bytes"]["current"] == 30 * MIB


def test_page_locked_memory_has_a_limit() -> None:
    allocator = _allocator(pinned_limit_bytes=32 * MIB, setting=ClassSetting(kind="pinned"))
    allocator.malloc(30 * MIB)
    with pytest.raises(MemoryError, match=r"page-locked host memory, 32.00 MiB, holds 30.00 MiB"):
        allocator.malloc(10 * MIB)


def test_a_budget_can_be_lifted_at_run_time() -> None:
    allocator = _allocator(device_budget_bytes=32 * MIB)
    allocator.set_device_budget(0, 0)
    allocator.malloc(64 * MIB)
    assert allocator.kind_stats(0)["managed"]["spilled_bytes"] == 0
    allocator.set_device_budget(0, 64 * MIB)
    allocator.malloc(10 * MIB)
    assert allocator.kind_stats(0)["managed"]["spilled_bytes"] == 10 * MIB
    with pytest.raises(IndexError):
        allocator.set_device_budget(1, 0)


def test_each_peak_is_since_the_last_call() -> None:
    allocator = _allocator()
    kept = allocator.malloc(4 * MIB)
    allocator.free(allocator.malloc(6 * MIB))
    allocator.reset_peak_stats(0)
    assert allocator.take_peak_bytes(0) == 10 * MIB
    assert allocator.take_peak_bytes(0) == 4 * MIB
    allocator.reset_accumulated_stats(0)
    assert allocator.stats(0)["highest_bytes"] == 10 * MIB
    allocator.free(kept)
    assert allocator.take_peak_bytes(0) == 4 * MIB
    assert allocator.take_peak_bytes(0) == 0
    with pytest.raises(IndexError):
        allocator.take_peak_bytes(1)


@pytest.mark.parametrize("kind", ["managed", "device", "system", "pinned"])
def test_kinds_are_counted(kind: str) -> None:
    allocator = _allocator(setting=ClassSetting(kind=kind))
    allocator.malloc(12 * MIB)
    reserved = {name: stats["reserved_bytes"] for name, stats in allocator.kind_stats(0).items()}
    assert reserved == {
        name: 12 * MIB if name == kind else 0 for name in ("managed", "device", "system", "pinned")
    }
    assert allocator.managed_bytes() == (12 * MIB if kind == "managed" else 0)


def test_an_allocation_of_0_bytes_has_no_address() -> None:
    allocator = _allocator()
    assert allocator.malloc(0) == 0
    allocator.free(0)
    assert allocator.stats(0)["allocation"]["all"]["allocated"] == 0


def test_devices_are_independent() -> None:
    allocator = _allocator(devices=2)
    assert allocator.device_count() == 2
    address = allocator.malloc(1000, device=1)
    with pytest.raises(ValueError, match="on this device"):
        allocator.free(address, device=0)
    with pytest.raises(ValueError, match="on this device"):
        allocator.record_stream(address, 7, device=0)
    assert allocator.base_allocation(address + 999) == (address, 2 * MIB)
    assert allocator.stats(0)["segment"]["all"]["current"] == 0
    assert allocator.stats(1)["segment"]["all"]["current"] == 1
    with pytest.raises(IndexError):
        allocator.malloc(1000, device=2)
    with pytest.raises(KeyError):
        allocator.base_allocation(1)


def test_peaks_can_be_reset() -> None:
    allocator = _allocator()
    allocator.free(allocator.malloc(4 * MIB))
    allocator.reset_peak_stats(0)
    allocator.reset_accumulated_stats(0)
    zero = {"current": 0, "peak": 0, "allocated": 0, "freed": 0}
    assert allocator.stats(0)["allocated_bytes"]["all"] == zero
    assert allocator.class_stats(0)[TensorClass.WEIGHTS.number]["allocated_bytes"] == zero


def test_the_phase_is_the_class_of_new_blocks() -> None:
    allocator = _allocator()
    assert allocator.phase() == TensorClass.WEIGHTS.number
    allocator.set_phase(TensorClass.ACTIVATIONS.number)
    override = allocator.class_override(TensorClass.OTHER.number)
    with override:
        overridden = allocator.malloc(1000)
    plain = allocator.malloc(1000)
    classes = {address: number for address, _, _, number, _, _ in allocator.live_blocks()}
    assert classes == {
        overridden: TensorClass.OTHER.number,
        plain: TensorClass.ACTIVATIONS.number,
    }
    with pytest.raises(ValueError, match="begun no such block"):
        override.__exit__()


def test_an_override_is_for_one_block_at_a_time() -> None:
    override = _allocator().class_override(TensorClass.OTHER.number)
    with override, pytest.raises(ValueError, match="begun already"), override:
        pass
    with override:
        pass


def test_wrong_names_and_numbers_are_errors() -> None:
    with pytest.raises(ValueError, match="manged"):
        ClassSetting(kind="manged")
    with pytest.raises(ValueError, match="gpu"):
        ClassSetting(placement="gpu")
    with pytest.raises(ValueError, match="six classes"):
        Config([ClassSetting()] * 5)
    for number in (-1, len(TensorClass)):
        with pytest.raises(ValueError, match="tensor class"):
            _allocator().set_phase(number)
