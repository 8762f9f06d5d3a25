"""torch's memory functions under umem: their figures are exact, and their effects happen."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from poisoned import NOT_POISONED

import umem
from umem.runtime.state import runtime

pytestmark = pytest.mark.usefixtures("settled")

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
LONG_CYCLES = 400_000_000
"""Clock cycles that keep a GPU of 1 to 2 GHz busy for 0.2 to 0.4 s."""


def empty(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, device="cuda")


def stat(name: str) -> int:
    return torch.cuda.memory_stats()[name]


def managed_limit_bytes() -> int:
    limit = runtime().resolved.managed_limit_bytes
    assert limit is not None, "the session's fixture sets UMEM_MANAGED_LIMIT"
    return limit


class TestStatistics:
    @pytest.mark.parametrize(
        ("asked", "given"),
        [
            (1, 512),
            (512, 512),
            (513, KIB),
            (MIB, MIB),
            (MIB + 1, MIB + 512),
            (2 * MIB, 2 * MIB),
            (2 * MIB + 1, 2 * MIB + 64 * KIB),
            (20 * MIB + 7, 20 * MIB + 64 * KIB),
        ],
    )
    @NOT_POISONED
    def test_bytes_are_exact(self, asked: int, given: int) -> None:
        names = ("allocated_bytes", "requested_bytes", "active_bytes", "allocation")
        before = {name: stat(f"{name}.all.current") for name in names}
        tensor = empty(asked)
        grown = {name: stat(f"{name}.all.current") - before[name] for name in names}
        assert grown == {
            "allocated_bytes": given,
            "requested_bytes": asked,
            "active_bytes": given,
            "allocation": 1,
        }
        boundary = 64 * KIB if given >= 2 * MIB else 512
        assert tensor.data_ptr() % boundary == 0, hex(tensor.data_ptr())
        assert torch.cuda.memory_allocated() == before["allocated_bytes"] + given
        del tensor
        assert {name: stat(f"{name}.all.current") for name in names} == before

    def test_peaks_and_their_reset(self) -> None:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == before
        tensor = empty(32 * MIB)
        reserved = torch.cuda.memory_reserved()
        del tensor
        assert torch.cuda.memory_allocated() == before
        assert torch.cuda.max_memory_allocated() == before + 32 * MIB
        torch.cuda.empty_cache()
        assert torch.cuda.max_memory_reserved() >= reserved > torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == before
        assert torch.cuda.max_memory_reserved() == torch.cuda.memory_reserved()

    def test_accumulated_and_their_reset(self) -> None:
        torch.cuda.reset_accumulated_memory_stats()
        for _ in range(3):
            empty(MIB)
        assert stat("allocation.all.allocated") == 3
        assert stat("allocation.all.freed") == 3
        assert stat("allocated_bytes.all.allocated") == 3 * MIB
        assert stat("allocated_bytes.all.freed") == 3 * MIB
        torch.cuda.reset_accumulated_memory_stats()
        assert stat("allocation.all.allocated") == 0

    def test_every_documented_statistic_exists(self) -> None:
        stats = torch.cuda.memory_stats()
        nested = (
            *("allocation", "allocated_bytes", "segment", "reserved_bytes", "active"),
            *("active_bytes", "inactive_split", "inactive_split_bytes", "requested_bytes"),
        )
        metrics = ("current", "peak", "allocated", "freed")
        wanted = {
            f"{name}.{pool}.{metric}"
            for name in nested
            for pool in ("all", "large_pool", "small_pool")
            for metric in metrics
        }
        wanted |= {f"oversize_{what}.{m}" for what in ("allocations", "segments") for m in metrics}
        wanted |= {"num_alloc_retries", "num_ooms", "max_split_size", "num_sync_all_streams"}
        wanted |= {"num_device_alloc", "num_device_free"}
        assert wanted - set(stats) == set()

    def test_pools_add_up(self) -> None:
        kept = [empty(700), empty(MIB), empty(3 * MIB), empty(30 * MIB)]
        stats = torch.cuda.memory_stats()
        for name in [key for key in stats if ".all.current" in key]:
            parts = [stats[name.replace(".all.", f".{pool}.")] for pool in _POOLS]
            assert stats[name] == sum(parts), name
        assert stats["reserved_bytes.all.current"] >= stats["active_bytes.all.current"]
        assert len(kept) == 4

    def test_summary(self) -> None:
        kept = empty(64 * MIB)
        text = torch.cuda.memory_summary()
        for row in ("Allocated memory", "Requested memory", "GPU reserved memory", "Allocations"):
            assert row in text, text
        allocated = re.search(r"\| Allocated memory +\| +(\d+ \w+)", text)
        assert allocated is not None, text
        assert (
            allocated[1]
            == f"{torch.cuda.memory_allocated() // _UNIT[allocated[1][-3:]]} " + (allocated[1][-3:])
        )
        assert len(torch.cuda.memory_summary(abbreviated=True)) < len(text)
        assert kept.numel() == 64 * MIB

    def test_accelerator_functions_agree(self) -> None:
        if not hasattr(torch, "accelerator") or not hasattr(torch.accelerator, "memory_allocated"):
            pytest.skip(f"torch {torch.__version__} has no torch.accelerator.memory_*")
        accelerator = torch.accelerator
        kept = empty(16 * MIB)
        assert accelerator.memory_allocated() == torch.cuda.memory_allocated() >= kept.numel()
        assert accelerator.memory_reserved() == torch.cuda.memory_reserved()
        assert accelerator.memory_stats()["allocation.all.current"] == stat(
            "allocation.all.current"
        )
        accelerator.reset_peak_memory_stats()
        peak = accelerator.max_memory_allocated()
        assert peak == torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated()
        accelerator.reset_accumulated_memory_stats()
        assert stat("allocation.all.allocated") == 0
        del kept
        reserved = torch.cuda.memory_reserved()
        accelerator.empty_cache()
        assert torch.cuda.memory_reserved() <= reserved - 16 * MIB
        assert accelerator.max_memory_reserved() == torch.cuda.max_memory_reserved()


_POOLS = ("small_pool", "large_pool")
_UNIT = {"KiB": KIB, "MiB": MIB, "GiB": GIB}


class TestSnapshot:
    def test_blocks_cover_their_segments(self) -> None:
        kept = [empty(size) for size in (700, MIB, 3 * MIB + 5, 30 * MIB)]
        here = torch.cuda.current_device()
        segments = [s for s in torch.cuda.memory_snapshot() if s["device"] == here]
        assert sum(s["total_size"] for s in segments) == torch.cuda.memory_reserved()
        assert sum(s["allocated_size"] for s in segments) == torch.cuda.memory_allocated()
        assert sum(s["active_size"] for s in segments) == stat("active_bytes.all.current")
        for segment in segments:
            address = segment["address"]
            for block in segment["blocks"]:
                assert block["address"] == address, segment
                address += block["size"]
            assert address == segment["address"] + segment["total_size"], segment
        blocks = {block["address"]: block for s in segments for block in s["blocks"]}
        for tensor in kept:
            block = blocks[tensor.data_ptr()]
            assert block["state"] == "active_allocated"
            assert block["requested_size"] == tensor.numel() <= block["size"]

    def test_it_has_the_form_of_torchs_snapshot(self) -> None:
        kept = empty(MIB)
        snapshot = torch.cuda.memory._snapshot()
        assert {"segments", "device_traces"} <= set(snapshot)
        segment = snapshot["segments"][0]
        assert {
            *("device", "address", "total_size", "allocated_size", "active_size", "stream"),
            *("segment_type", "segment_pool_id", "blocks"),
        } <= set(segment)
        assert segment["segment_type"] in ("small", "large")
        assert {"address", "size", "requested_size", "state"} <= set(segment["blocks"][0])
        assert kept.numel() == MIB

    def test_dump_for_the_memory_viewer(self, tmp_path: Path) -> None:
        path = tmp_path / "snapshot.pickle"
        torch.cuda.memory._dump_snapshot(str(path))
        assert "segments" in pickle.loads(path.read_bytes())


class TestCache:
    def test_same_stream_reuses_at_once(self) -> None:
        first = empty(64 * MIB)
        address, reserved = first.data_ptr(), torch.cuda.memory_reserved()
        del first
        assert empty(64 * MIB).data_ptr() == address
        assert torch.cuda.memory_reserved() == reserved

    def test_streams_keep_their_blocks(self) -> None:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            first = empty(64 * MIB)
        address = first.data_ptr()
        del first
        assert empty(64 * MIB).data_ptr() != address
        with torch.cuda.stream(side):
            assert empty(64 * MIB).data_ptr() == address

    def test_empty_cache_releases_segments(self) -> None:
        tensor = empty(64 * MIB)
        kept = empty(64 * MIB)
        del tensor
        held = torch.cuda.memory_reserved()
        assert held >= torch.cuda.memory_allocated() + 64 * MIB
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() <= held - 64 * MIB
        assert torch.cuda.memory_reserved() >= torch.cuda.memory_allocated() >= kept.numel()

    def test_mem_get_info(self) -> None:
        free, total = torch.cuda.mem_get_info()
        assert 0 < free <= total
        expected = torch.cuda.get_device_properties(0).total_memory
        assert total == pytest.approx(expected, rel=0.01)

    def test_raw_allocations(self) -> None:
        """Allocations by address, as other frameworks make them through torch."""
        before = torch.cuda.memory_allocated()
        side = torch.cuda.Stream()
        addresses = [
            torch.cuda.caching_allocator_alloc(5 * MIB + 1),
            torch.cuda.caching_allocator_alloc(5 * MIB + 1, stream=side),
        ]
        assert torch.cuda.memory_allocated() == before + 10 * MIB + 128 * KIB
        assert set(addresses) <= {block.address for block in umem.tensors()}
        for address in addresses:
            torch.cuda.caching_allocator_delete(address)
        assert torch.cuda.memory_allocated() == before


@NOT_POISONED
class TestRecordStream:
    """A block that another stream uses is not reused before that work ends."""

    @pytest.fixture
    def side(self) -> torch.cuda.Stream:
        """A stream whose kernels are loaded: to load one would wait for the GPU."""
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(1)
            empty(MIB).fill_(1)
        torch.cuda.synchronize()
        return side

    def test_not_reused_before_its_work_ends(self, side: torch.cuda.Stream) -> None:
        tensor, spare = empty(64 * MIB), empty(64 * MIB)
        address, spare_address = tensor.data_ptr(), spare.data_ptr()
        del spare  # serves the next request: a new segment would wait for the GPU
        reserved = torch.cuda.memory_reserved()
        torch.cuda.synchronize()

        work_done = torch.cuda.Event()
        with torch.cuda.stream(side):
            torch.cuda._sleep(LONG_CYCLES)
            tensor.fill_(1)
            work_done.record()
        tensor.record_stream(side)
        del tensor
        during = empty(64 * MIB)
        awaiting = [
            block["size"]
            for segment in torch.cuda.memory_snapshot()
            for block in segment["blocks"]
            if block["state"] == "active_awaiting_free"
        ]
        pending = stat("active_bytes.all.current") - stat("allocated_bytes.all.current")
        assert not work_done.query(), "the side stream's work ended too early for this test"
        assert during.data_ptr() == spare_address != address
        assert awaiting == [64 * MIB]
        assert pending == 64 * MIB

        side.synchronize()
        after = empty(64 * MIB)
        assert after.data_ptr() == address
        assert torch.cuda.memory_reserved() == reserved
        assert stat("active_bytes.all.current") == stat("allocated_bytes.all.current")

    def test_all_blocks_are_reused(self, side: torch.cuda.Stream) -> None:
        for _ in range(20):
            tensor = empty(8 * MIB)
            with torch.cuda.stream(side):
                torch.cuda._sleep(100_000)
                tensor.fill_(1)
            tensor.record_stream(side)
            del tensor
        torch.cuda.synchronize()
        empty(512)  # events are looked at when memory is asked for
        assert stat("active.all.current") == stat("allocation.all.current")
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() < 160 * MIB

    def test_empty_cache_waits_for_the_work(self, side: torch.cuda.Stream) -> None:
        tensor = empty(64 * MIB)
        work_done = torch.cuda.Event()
        with torch.cuda.stream(side):
            torch.cuda._sleep(LONG_CYCLES // 10)
            tensor.fill_(1)
            work_done.record()
        tensor.record_stream(side)
        reserved = torch.cuda.memory_reserved()
        del tensor
        torch.cuda.empty_cache()
        assert work_done.query()
        assert torch.cuda.memory_reserved() <= reserved - 64 * MIB


@pytest.fixture
def room() -> Iterator[Callable[[int], None]]:
    """Set the memory fraction so that torch can allocate so many more bytes."""

    def leave(size_bytes: int) -> None:
        torch.cuda.empty_cache()
        _, total_bytes = torch.cuda.mem_get_info()
        fraction = (torch.cuda.memory_reserved() + size_bytes) / total_bytes
        torch.cuda.set_per_process_memory_fraction(fraction)

    yield leave
    torch.cuda.set_per_process_memory_fraction(1.0)


class TestOutOfMemory:
    def test_memory_fraction(self, room: Callable[[int], None]) -> None:
        torch.cuda.set_per_process_memory_fraction(0.5)
        if hasattr(torch.cuda, "get_per_process_memory_fraction"):
            assert torch.cuda.get_per_process_memory_fraction() == 0.5
        room(64 * MIB)
        fits = empty(40 * MIB)
        with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory\.") as caught:
            empty(256 * MIB)
        assert "set_per_process_memory_fraction" in str(caught.value)
        torch.cuda.set_per_process_memory_fraction(1.0)
        assert empty(256 * MIB).data_ptr() not in (0, fits.data_ptr())

    def test_beyond_the_managed_limit(self) -> None:
        failures, allocated = stat("num_ooms"), torch.cuda.memory_allocated()
        with pytest.raises(RuntimeError) as caught:
            empty(managed_limit_bytes() + GIB)
        text = str(caught.value)
        assert text.startswith("CUDA out of memory."), text
        assert "UMEM_MANAGED_LIMIT" in text
        assert stat("num_ooms") == failures + 1
        assert torch.cuda.memory_allocated() == allocated
        assert int(torch.ones(4, device="cuda").sum()) == 4

    @pytest.mark.parametrize("size_bytes", [1 << 50, 1 << 62])
    def test_absurd_sizes(self, size_bytes: int) -> None:
        with pytest.raises(RuntimeError, match=r"^CUDA out of memory\."):
            empty(size_bytes)

    def test_accelerate_finds_a_batch_that_fits(self, room: Callable[[int], None]) -> None:
        memory = pytest.importorskip("accelerate.utils")
        room(256 * MIB)
        tried = []

        @memory.find_executable_batch_size(starting_batch_size=32)  # type: ignore[untyped-decorator, unused-ignore]
        def train(batch_size: int) -> int:
            tried.append(batch_size)
            activations = torch.ones(batch_size, 4 * MIB, device="cuda")  # 16 MiB for each
            assert int(activations[:, -1].sum()) == batch_size
            return batch_size

        fitting = train()
        assert tried[0] == 32
        assert 8 <= fitting <= 16, tried

    def test_lightning_recognises_it(self) -> None:
        memory = pytest.importorskip("lightning.pytorch.utilities.memory")
        with pytest.raises(RuntimeError) as caught:
            empty(managed_limit_bytes() + GIB)
        assert memory.is_cuda_out_of_memory(caught.value)
        assert memory.is_oom_error(caught.value)

    def test_in_backward(self) -> None:
        """Raised in autograd's thread, by one of torch's kernels."""
        count = (managed_limit_bytes() + GIB) // 4
        leaf = torch.zeros(1, device="cuda", requires_grad=True)
        index = torch.zeros(1, dtype=torch.int64, device="cuda")
        # The gradient of gather has the size of what was gathered from, which here is one number.
        picked = torch.gather(leaf.expand(count), 0, index)
        with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory\."):
            picked.sum().backward()
        torch.gather(leaf.expand(100), 0, index).sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.item() == 1

    def test_in_an_optimizer_step(
        self, room: Callable[[int], None], class_of: Callable[[torch.Tensor], Any]
    ) -> None:
        """The step can be repeated, and later allocations are not optimizer state."""
        torch.manual_seed(0)
        layer = torch.nn.Linear(4096, 4096, bias=False, device="cuda")  # 64 MiB
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9, foreach=False)
        inputs = torch.randn(8, 4096, device="cuda")

        def backward() -> float:
            optimizer.zero_grad()
            loss = layer(inputs).square().mean()
            loss.backward()
            return loss.item()

        first = backward()
        room(32 * MIB)
        with pytest.raises(RuntimeError, match=r"^CUDA out of memory\.") as caught:
            optimizer.step()
        assert "optimizer_state" in str(caught.value)
        assert runtime().allocator.phase() == umem.TensorClass.ACTIVATIONS.number
        assert class_of(empty(MIB)) is umem.TensorClass.ACTIVATIONS

        torch.cuda.set_per_process_memory_fraction(1.0)
        optimizer.step()
        momentum = optimizer.state[layer.weight]["momentum_buffer"]
        assert class_of(momentum) is umem.TensorClass.OPTIMIZER_STATE
        assert class_of(layer.weight) is umem.TensorClass.WEIGHTS
        assert backward() < first


class TestHistory:
    """As `tests/test_memory_history.py`, of torch's operators, autograd's threads too."""

    @pytest.fixture(autouse=True)
    def recording(self) -> Iterator[None]:
        torch.cuda.memory._record_memory_history(max_entries=10_000)
        yield
        torch.cuda.memory._record_memory_history(None)

    def test_a_step_opens_in_torchs_tools(self, tmp_path: Path) -> None:
        model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4))).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.ones(64, 512, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        file = tmp_path / "snapshot.pickle"
        torch.cuda.memory._dump_snapshot(str(file))
        snapshot = pickle.loads(file.read_bytes())
        assert torch.cuda._memory_viz.trace(snapshot)
        assert torch.cuda._memory_viz.trace_plot(snapshot)
        allocated = [
            it for trace in snapshot["device_traces"] for it in trace if it["action"] == "alloc"
        ]
        assert {it["category"] for it in allocated} >= {"weights", "gradients", "activations"}
        assert any(frame["filename"] == __file__ for it in allocated for frame in it["frames"])
        freed = sum(
            it["action"] == "free_completed" for trace in snapshot["device_traces"] for it in trace
        )
        assert 0 < freed <= len(allocated)

    def test_live_blocks_have_frames(self) -> None:
        tensor = empty(3 * MIB)
        blocks = [it for segment in torch.cuda.memory_snapshot() for it in segment["blocks"]]
        (frames,) = [it["frames"] for it in blocks if it["address"] == tensor.data_ptr()]
        assert [it["name"] for it in frames[1:3]] == ["empty", "test_live_blocks_have_frames"]
