"""The history of memory, of the allocator over host memory, as torch's page reads it."""

from __future__ import annotations

import gc
import pickle
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.cuda import _memory_viz

from umem.core.classes import TensorClass
from umem.hardware import load_hardware
from umem.policy import load_policy, resolve
from umem.runtime.memory_stats import install_memory_stats
from umem.runtime.native_library import native
from umem.runtime.state import native_config

MIB = 1 << 20


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An allocator whose optimizer state is page-locked, behind torch's functions."""
    policy = load_policy(
        {"defaults": {"kind": "device"}, "classes": {"optimizer_state": {"kind": "pinned"}}}
    )
    resolved = resolve(policy, load_hardware("h200"), environ={})
    made = native().Allocator.on_host(native_config(resolved), 1 << 30, 2)

    def put(key: str, value: object) -> None:
        names = {
            "cuda_memory_snapshot": "_cuda_memorySnapshot",
            "cuda_empty_cache": "_cuda_emptyCache",
            "cuda_memory_history": "_cuda_record_memory_history",
            "cuda_memory_history_legacy": "_cuda_record_memory_history_legacy",
        }
        if key in names:
            monkeypatch.setattr(torch._C, names[key], value, raising=False)

    monkeypatch.setattr("umem.runtime.memory_stats.replace", put)
    install_memory_stats(made)
    yield made
    made.set_block_listener(None)


def allocate(allocator: Any, name: TensorClass, size_bytes: int, device: int = 0) -> int:
    with allocator.class_override(name.number):
        address: int = allocator.malloc(size_bytes, device)
    return address


def record(allocator: Any) -> tuple[int, int]:
    """Blocks of weights and of state that live, and one of activations that does not."""
    kept = allocate(allocator, TensorClass.WEIGHTS, 3 * MIB, 1)
    state = allocate(allocator, TensorClass.OPTIMIZER_STATE, 2 * MIB)
    allocator.free(allocate(allocator, TensorClass.ACTIVATIONS, 30 * MIB))
    allocator.empty_cache()
    return kept, state


def events(trace: list[dict[str, Any]]) -> list[tuple[str, int, str]]:
    return [(it["action"], it["size"], it.get("category", "")) for it in trace]


def test_events_are_by_class_and_device_and_host_apart(allocator: Any) -> None:
    torch.cuda.memory._record_memory_history()
    kept, state = record(allocator)
    snapshot = torch.cuda.memory._snapshot()
    first, second, host = snapshot["device_traces"]
    assert events(first) == [
        ("alloc", 30 * MIB, "activations"),
        ("free_requested", 30 * MIB, "activations"),
        ("free_completed", 30 * MIB, "activations"),
        ("segment_free", 30 * MIB, ""),
        ("snapshot", 0, "unknown"),
    ]
    assert events(second) == [("alloc", 3 * MIB, "weights"), ("snapshot", 0, "unknown")]
    assert events(host) == [("alloc", 2 * MIB, "optimizer_state"), ("snapshot", 0, "unknown")]
    places = {
        block["address"]: it["device"] for it in snapshot["segments"] for block in it["blocks"]
    }
    assert (places[kept], places[state]) == (1, 2)


def test_frames_are_those_of_the_program(allocator: Any) -> None:
    torch.cuda.memory._record_memory_history()
    kept, _ = record(allocator)
    (block,) = [
        block
        for segment in torch.cuda.memory_snapshot()
        for block in segment["blocks"]
        if block["address"] == kept
    ]
    words = [(it["filename"], it["name"]) for it in block["frames"][:3]]
    assert words == [
        ("umem", "weights in device memory"),
        (__file__, "allocate"),
        (__file__, "record"),
    ]
    line = block["frames"][2]["line"]
    assert (
        "TensorClass.WEIGHTS" in Path(__file__).read_text(encoding="utf-8").splitlines()[line - 1]
    )


def test_a_block_has_the_class_that_it_got_later(allocator: Any) -> None:
    torch.cuda.memory._record_memory_history()
    freed, kept = (allocate(allocator, TensorClass.OTHER, MIB) for _ in range(2))
    for address in (freed, kept):
        allocator.retag(address, TensorClass.GRADIENTS.number)
    allocator.free(freed)
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    assert {it["category"] for it in trace if it["action"] == "alloc"} == {"gradients"}


def test_a_file_opens_in_torchs_tools(allocator: Any, tmp_path: Path) -> None:
    """They are the page's readers, but for its JavaScript."""
    torch.cuda.memory._record_memory_history(max_entries=1000)
    record(allocator)
    file = tmp_path / "snapshot.pickle"
    torch.cuda.memory._dump_snapshot(str(file))
    snapshot = pickle.loads(file.read_bytes())
    assert "weights in device memory" in _memory_viz.memory(snapshot, format_flamegraph=str)
    assert "30.0MiB" in _memory_viz.trace(snapshot)
    assert "snapshot.pickle" in _memory_viz.trace_plot(snapshot)
    for trace in snapshot["device_traces"]:
        # The page has a place in a segment for each block, and knows the category unknown.
        ranges = [(it["addr"], it["size"]) for it in trace if it["action"] == "segment_free"]
        ranges += [(it["address"], it["total_size"]) for it in snapshot["segments"]]
        for it in trace:
            if it["action"] == "alloc":
                assert any(begin <= it["addr"] < begin + size for begin, size in ranges)
        assert any(it.get("category") == "unknown" for it in trace)


def test_what_is_kept_is_what_was_asked_for(allocator: Any) -> None:
    history: Any = torch.cuda.memory._record_memory_history
    history("state")
    kept, _ = record(allocator)
    assert torch.cuda.memory._snapshot()["device_traces"] == [[], [], []]
    assert len(frames_of(kept)) > 2
    history(None)
    assert frames_of(kept) == []
    history("all", context="alloc", max_entries=3, skip_actions=["free_completed"])
    for _ in range(5):
        allocator.free(allocate(allocator, TensorClass.WEIGHTS, MIB))
    (trace, *_) = torch.cuda.memory._snapshot()["device_traces"]
    actions = [it["action"] for it in trace]
    assert actions[:3] == ["free_requested", "alloc", "free_requested"]
    assert len(trace[0]["frames"]) == 1 < len(trace[1]["frames"])
    history("all", context=None, clear_history=True)
    assert torch.cuda.memory._snapshot()["device_traces"] == [[], [], []]
    history(False)
    allocate(allocator, TensorClass.WEIGHTS, MIB)
    assert torch.cuda.memory._snapshot()["device_traces"] == [[], [], []]
    with pytest.raises(RuntimeError, match="'some'"):
        history("some")


def frames_of(address: int) -> list[Any]:
    blocks = [block for it in torch.cuda.memory_snapshot() for block in it["blocks"]]
    (frames,) = [it["frames"] for it in blocks if it["address"] == address]
    return list(frames)


def test_threads_and_the_collector_free_while_a_snapshot_is_made(allocator: Any) -> None:
    torch.cuda.memory._record_memory_history()

    class Tensor:
        def __init__(self) -> None:
            self.me = self
            self.address = allocate(allocator, TensorClass.ACTIVATIONS, MIB)

        def __del__(self) -> None:
            allocator.free(self.address)

    def work() -> None:
        for _ in range(300):
            Tensor()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        torch.cuda.memory._snapshot()
    gc.collect()
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    actions = Counter(it["action"] for it in trace)
    assert actions["alloc"] == actions["free_requested"] == actions["free_completed"] == 900
    assert {it["category"] for it in trace if it["action"] == "alloc"} == {"activations"}


def test_what_is_held_goes_before_cache(allocator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    held = allocate(allocator, TensorClass.ACTIVATIONS, 30 * MIB)
    monkeypatch.setattr("umem.runtime.memory_stats.let_go", lambda: allocator.free(held))
    monkeypatch.setattr("torch.cuda.memory.is_initialized", lambda: True)
    assert allocator.kind_stats(0)["device"]["reserved_bytes"]
    torch.cuda.empty_cache()
    assert not allocator.kind_stats(0)["device"]["reserved_bytes"]
