"""The hint engine on a real GPU: pages arrive, values stay, the training thread does not wait."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from managed_memory import ManagedBytes

from umem import cuda as ucuda
from umem.core.classes import TensorClass
from umem.core.schedule import HintOp
from umem.cuda import Location, Range
from umem.runtime.hints import HintBatch, HintEngine, HintOutcome

MIB = 1 << 20
GIB = 1 << 30
DEVICE = Location.device(0)
HOST = Location.host()
PATIENCE_S = 60.0
SLEEP_CYCLES = 400_000_000  # 0.2 s at 2 GHz

MakeManaged = Callable[[int], Range]


def runtime() -> Any:
    """cuda-python's runtime, which other machines may lack."""
    return pytest.importorskip("cuda.bindings.runtime")


@pytest.fixture
def managed(engine: HintEngine) -> Iterator[MakeManaged]:
    """Allocates managed memory, and frees it as a user of the engine should."""
    rt = runtime()
    ranges: list[Range] = []

    def make(size_bytes: int) -> Range:
        error, pointer = rt.cudaMallocManaged(size_bytes, rt.cudaMemAttachGlobal)
        assert int(error) == 0, error
        ranges.append(Range(int(pointer), size_bytes))
        return ranges[-1]

    yield make
    torch.cuda.synchronize()
    for range_ in ranges:
        assert engine.forget(range_.address, range_.size_bytes)
        assert int(rt.cudaFree(range_.address)[0]) == 0


def as_tensor(range_: Range) -> torch.Tensor:
    """A tensor of bytes over managed memory."""
    return torch.as_tensor(ManagedBytes(range_), device="cuda")


def fill(range_: Range) -> torch.Tensor:
    """Fill a range with random bytes; return a copy of them."""
    tensor = as_tensor(range_)
    tensor.random_(0, 256)
    expected = tensor.to("cpu", copy=True)
    torch.cuda.synchronize()
    return expected


def holds(range_: Range, expected: torch.Tensor) -> bool:
    """Whether the GPU reads these bytes."""
    return torch.equal(as_tensor(range_).cpu(), expected)


def ask(engine: HintEngine, op: HintOp, range_: Range) -> int:
    ticket = engine.submit(op, range_.address, range_.size_bytes)
    assert ticket != 0
    return ticket


def batch_of(engine: HintEngine, op: HintOp, ranges: Sequence[Range]) -> HintBatch:
    return engine.batch(
        [op] * len(ranges),
        [range_.address for range_ in ranges],
        [range_.size_bytes for range_ in ranges],
        [TensorClass.WEIGHTS] * len(ranges),
    )


def expect_done(engine: HintEngine, ticket: int) -> None:
    outcome = engine.wait(ticket, timeout_s=PATIENCE_S)
    assert outcome is HintOutcome.DONE, (outcome, engine.statistics().failures)


def _calls(engine: HintEngine) -> int:
    """Number of chunks issued so far."""
    return sum(counts.calls for counts in engine.statistics().counts.values())


class TestMoves:
    def test_to_the_host_and_back(self, engine: HintEngine, managed: MakeManaged) -> None:
        """300 MiB is two chunks and a part; the driver records the location."""
        range_ = managed(300 * MIB)
        expected = fill(range_)
        for op, place in [(HintOp.EVICT, HOST), (HintOp.PREFETCH, DEVICE)] * 2:
            expect_done(engine, ask(engine, op, range_))
            assert ucuda.last_prefetch_location(range_) == place
        assert holds(range_, expected)
        expect_done(engine, ask(engine, HintOp.EVICT, range_))
        assert holds(range_, expected)

    def test_read_mostly_pages_keep_their_values(
        self, engine: HintEngine, managed: MakeManaged
    ) -> None:
        """They leave by dropping the device's copy; its time is in benchmarks/results."""
        range_ = managed(256 * MIB)
        expected = fill(range_)
        ticket = engine.advise(
            range_.address, range_.size_bytes, placement="device", read_mostly=True
        )
        expect_done(engine, ticket)
        for op in (HintOp.EVICT, HintOp.PREFETCH, HintOp.PREFETCH) * 4:
            expect_done(engine, ask(engine, op, range_))
        assert ucuda.is_read_mostly(range_)
        assert holds(range_, expected)

    def test_neighbours(self, engine: HintEngine, managed: MakeManaged) -> None:
        """Sixty-four tensors of 2 MiB need a few calls only."""
        range_ = managed(128 * MIB)
        expected = fill(range_)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP_CYCLES // 10)
        calls_before = _calls(engine)
        parts = [Range(range_.address + i * 2 * MIB, 2 * MIB) for i in range(64)]
        batch = batch_of(engine, HintOp.EVICT, parts)
        engine.submit_batch(batch, stream.cuda_stream)
        for ticket in batch.tickets:
            expect_done(engine, ticket)
        assert _calls(engine) - calls_before <= 4
        assert ucuda.last_prefetch_location(range_) == HOST
        assert holds(range_, expected)

    def test_advice(self, engine: HintEngine, managed: MakeManaged) -> None:
        range_ = managed(4 * MIB)
        ticket = engine.advise(
            range_.address, range_.size_bytes, placement="host", accessed_by_device=True
        )
        expect_done(engine, ticket)
        assert ucuda.preferred_location(range_) == HOST
        assert DEVICE in ucuda.accessed_by(range_)
        expect_done(engine, engine.advise(range_.address, range_.size_bytes, placement="any"))
        assert ucuda.preferred_location(range_) is None
        assert DEVICE not in ucuda.accessed_by(range_)


class TestWaiting:
    def test_an_event(self, engine: HintEngine, managed: MakeManaged) -> None:
        range_ = managed(16 * MIB)
        expected = fill(range_)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP_CYCLES)
        batch = batch_of(engine, HintOp.EVICT, [range_])
        ticket = engine.submit_batch(batch, stream.cuda_stream)
        assert engine.wait(ticket, timeout_s=0.02) is HintOutcome.OPEN
        stream.synchronize()
        expect_done(engine, ticket)
        assert holds(range_, expected)

    def test_an_eviction_does_not_hold_up_launches(
        self, engine: HintEngine, managed: MakeManaged
    ) -> None:
        """From the primary context every launch would stall until the eviction has ended."""
        range_ = managed(2 * GIB)
        left = torch.randn(512, 512, device="cuda", dtype=torch.bfloat16)
        product = torch.mm(left, left)  # loads the kernel
        as_tensor(range_).zero_()
        torch.cuda.synchronize()
        calls_before = _calls(engine)
        ticket = ask(engine, HintOp.EVICT, range_)
        while _calls(engine) == calls_before:  # until the first of several has ended
            assert engine.wait(ticket, timeout_s=0) is HintOutcome.OPEN
        torch.mm(left, left, out=product)
        torch.cuda.current_stream().synchronize()
        assert engine.wait(ticket, timeout_s=0) is HintOutcome.OPEN
        expect_done(engine, ticket)


def evicted(engine: HintEngine, range_: Range) -> torch.Tensor:
    """Fill a range with random bytes and evict it; return a copy of them."""
    expected = fill(range_)
    expect_done(engine, ask(engine, HintOp.EVICT, range_))
    return expected


class TestBatches:
    def test_requests_behind_one_event_while_kernels_run(
        self, engine: HintEngine, managed: MakeManaged
    ) -> None:
        count = 30
        range_ = managed(count * 4 * MIB)
        fill(range_)
        parts = [Range(range_.address + i * 4 * MIB, 2 * MIB) for i in range(count)]
        batch = batch_of(engine, HintOp.PREFETCH, parts)
        stream = torch.cuda.current_stream().cuda_stream
        work = torch.zeros(1 << 20, device="cuda")
        for _ in range(200):
            work.add_(1)
            last = engine.submit_batch(batch, stream)
        assert len(batch.tickets) == count
        assert engine.wait(last, timeout_s=PATIENCE_S) is HintOutcome.DONE

    def test_a_chain_of_evictions_and_prefetches(self, managed: MakeManaged) -> None:
        """Eight ranges through room for two; the training thread waits on the host for each."""
        count, size_bytes = 8, 64 * MIB
        ranges = [managed(size_bytes) for _ in range(count)]
        with HintEngine.on_cuda() as own:
            own.start(0)
            expected = [evicted(own, range_) for range_ in ranges]
            tensors = [as_tensor(range_) for range_ in ranges]
            stream = torch.cuda.current_stream().cuda_stream
            coming, going = (
                [batch_of(own, op, [range_]) for range_ in ranges]
                for op in (HintOp.PREFETCH, HintOp.EVICT)
            )
            sums = []
            arriving = [own.submit_batch(batch, stream) for batch in coming[:2]]
            for i, tensor in enumerate(tensors):
                expect_done(own, arriving[i])
                sums.append(tensor.sum(dtype=torch.int64))
                leaving = own.submit_batch(going[i], stream)
                # Its room comes from the eviction before it, which is under way or waits itself.
                arriving += [
                    own.submit_batch(batch, stream, [leaving]) for batch in coming[i + 2 : i + 3]
                ]
            expect_done(own, leaving)
            for total, bytes_ in zip(sums, expected, strict=True):
                assert total.item() == int(bytes_.sum(dtype=torch.int64))
            for range_ in ranges:
                assert own.forget(range_.address, range_.size_bytes)

    def test_none_in_a_capture(self, engine: HintEngine, managed: MakeManaged) -> None:
        """No event can be recorded: the requests are dropped, and the graph is valid."""
        range_ = managed(4 * MIB)
        inputs = torch.zeros(1024, device="cuda")
        batch = batch_of(engine, HintOp.EVICT, [range_])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ticket = engine.submit_batch(batch, torch.cuda.current_stream().cuda_stream)
            outputs = inputs + 1
        assert engine.wait(ticket, timeout_s=PATIENCE_S) is HintOutcome.DROPPED
        graph.replay()
        torch.cuda.synchronize()
        assert outputs[0].item() == 1


class TestTrainingThread:
    def test_allocations_beside_a_prefetch(self, engine: HintEngine, managed: MakeManaged) -> None:
        """Calls that wait for the device neither hang beside a prefetch nor spoil it."""
        rt = runtime()
        range_ = managed(GIB)
        expected = evicted(engine, range_)
        torch.cuda.synchronize()
        ticket = ask(engine, HintOp.PREFETCH, range_)
        turns = 0
        while engine.wait(ticket, timeout_s=0) is HintOutcome.OPEN:
            error, pointer = rt.cudaMalloc(64 * MIB)
            assert int(error) == 0, error
            own = torch.ones(16 * MIB, dtype=torch.uint8, device="cuda")
            assert own.sum(dtype=torch.int64).item() == 16 * MIB
            del own
            torch.cuda.empty_cache()
            assert int(rt.cudaFree(pointer)[0]) == 0
            turns += 1
        assert engine.wait(ticket, timeout_s=0) is HintOutcome.DONE
        assert turns > 0
        assert holds(range_, expected)


class TestSafety:
    def test_freed_while_moving(self, engine: HintEngine) -> None:
        """After forget the memory can be freed during a move; CUDA stays usable."""
        rt = runtime()
        for op in (HintOp.EVICT, HintOp.PREFETCH):
            error, pointer = rt.cudaMallocManaged(GIB, rt.cudaMemAttachGlobal)
            assert int(error) == 0, error
            range_ = Range(int(pointer), GIB)
            as_tensor(range_).zero_()
            torch.cuda.synchronize()
            if op is HintOp.PREFETCH:
                expect_done(engine, ask(engine, HintOp.EVICT, range_))
            ticket = ask(engine, op, range_)
            time.sleep(5e-3)
            assert engine.forget(range_.address, range_.size_bytes)
            assert int(rt.cudaFree(pointer)[0]) == 0
            assert engine.wait(ticket, timeout_s=0) in (HintOutcome.FORGOTTEN, HintOutcome.DONE)
        assert torch.ones(10, device="cuda").sum().item() == 10

    def test_a_failed_call_is_counted(
        self, engine: HintEngine, managed: MakeManaged, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """cudaMalloc's memory cannot migrate. The error affects neither torch nor the next hint."""
        rt = runtime()
        error, pointer = rt.cudaMalloc(4 * MIB)
        assert int(error) == 0, error
        ticket = engine.submit(HintOp.EVICT, int(pointer), 4 * MIB)
        assert engine.wait(ticket, timeout_s=PATIENCE_S) is HintOutcome.FAILED
        assert any(failure.call == "evict" for failure in engine.statistics().failures)
        assert "umem: hint: evict failed: CUDA_ERROR" in capfd.readouterr().err
        assert int(rt.cudaFree(pointer)[0]) == 0
        torch.cuda.synchronize()
        range_ = managed(4 * MIB)
        expected = fill(range_)
        expect_done(engine, ask(engine, HintOp.EVICT, range_))
        assert holds(range_, expected)

    def test_hints_during_a_capture(self, engine: HintEngine, managed: MakeManaged) -> None:
        """Hints beside a capture do not break it."""
        range_ = managed(64 * MIB)
        expected = fill(range_)
        inputs = torch.zeros(1024, device="cuda")
        graph = torch.cuda.CUDAGraph()
        tickets = []
        with torch.cuda.graph(graph):
            for op in (HintOp.EVICT, HintOp.PREFETCH):
                tickets.append(ask(engine, op, range_))
                engine.wait(tickets[-1], timeout_s=PATIENCE_S)
            outputs = inputs + 1
        for ticket in tickets:
            expect_done(engine, ticket)
        inputs.fill_(4)
        graph.replay()
        torch.cuda.synchronize()
        assert outputs[0].item() == 5
        assert holds(range_, expected)

    def test_a_process_ends_with_hints_under_way(self) -> None:
        done = _run(
            "ranges = [malloc(1 << 28) for _ in range(4)]\n"
            "for i in range(200):\n"
            "    engine.submit(HintOp(i % 2), ranges[i % 4], 1 << 28)\n"
            "print('asked')\n"
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "asked\n", "")

    def test_a_forked_child_refuses(self) -> None:
        done = _run(
            "import os\n"
            "address = malloc(1 << 28)\n"
            "ticket = engine.submit(HintOp.EVICT, address, 1 << 28)\n"
            "child = os.fork()\n"
            "if child == 0:\n"
            "    assert engine.submit(HintOp.PREFETCH, address, 1 << 28) == 0\n"
            "    assert engine.forget(address, 1 << 28)\n"
            "    engine.shutdown()\n"
            "    os._exit(0)\n"
            "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0\n"
            "assert engine.wait(ticket, timeout_s=60) == 'done'\n"
            "print('waited')\n"
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "waited\n", "")


def _run(code: str) -> subprocess.CompletedProcess[str]:
    """A script in another process, with torch's allocator, an engine and `malloc`."""
    preamble = (
        "import torch\n"
        "from cuda.bindings import runtime\n"
        "from umem.runtime.hints import HintEngine\n"
        "from umem.core.schedule import HintOp\n"
        "torch.zeros(1, device='cuda')\n"
        "engine = HintEngine.on_cuda()\n"
        "def malloc(size):\n"
        "    error, address = runtime.cudaMallocManaged(size, runtime.cudaMemAttachGlobal)\n"
        "    assert int(error) == 0, error\n"
        "    return int(address)\n"
    )
    return subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", preamble + code],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
