"""The Python binding of the allocator, over host memory; tests/native has its core."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from umem.core.classes import TensorClass
from umem.runtime._native import Allocator, ClassSetting, Config

KIB = 1 << 10
MIB = 1 << 20
POOL = (0, 1)


def _allocator(
    *, setting: ClassSetting | None = None, total_bytes: int = 0, devices: int = 1, **limits: Any
) -> Allocator:
    """Over host memory, with one setting for all classes."""
    config = Config([setting or ClassSetting()] * len(TensorClass), **limits)
    return Allocator.on_host(config, total_bytes, devices)


def test_blocks_of_a_pool_and_of_classes() -> None:
    """Pools, classes and streams pass the binding as they are given."""
    allocator = _allocator()
    allocator.begin_pool(0, POOL)
    with allocator.class_override(TensorClass.OTHER.number):
        address = allocator.malloc(1000, stream=2)
    allocator.end_pool(0, POOL)
    assert allocator.retag(address, TensorClass.GRADIENTS.number)
    assert allocator.live_blocks() == [
        (address, 1000, 1024, TensorClass.GRADIENTS.number, 0, "managed")
    ]
    (segment,) = allocator.segments(0)
    assert (segment["segment_pool_id"], segment["stream"]) == (POOL, 2)
    counts = allocator.class_stats(0)[TensorClass.GRADIENTS.number]
    assert counts["requested_bytes"]["current"] == 1000
    allocator.free(address)
    with pytest.raises(ValueError, match="no live block"):
        allocator.free(address)
    allocator.release_pool(0, POOL)
    allocator.empty_cache()
    assert (allocator.segments(0), allocator.pool_stats(0)) == ([], [])


def test_torch_reads_the_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's summary finds every figure that it needs."""
    allocator = _allocator()
    allocator.malloc(3 * MIB - 32 * KIB)
    allocator.free(allocator.malloc(1000))
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


def test_the_phase_is_the_class_of_new_blocks() -> None:
    allocator = _allocator()
    assert allocator.phase() == TensorClass.WEIGHTS.number
    allocator.set_phase(TensorClass.ACTIVATIONS.number)
    override = allocator.class_override(TensorClass.OTHER.number)
    with override:
        overridden = allocator.malloc(1000)
    plain = allocator.malloc(1000)
    classes = {address: number for address, _, _, number, _, _ in allocator.live_blocks()}
    assert classes == {overridden: TensorClass.OTHER.number, plain: TensorClass.ACTIVATIONS.number}
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
