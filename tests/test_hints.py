"""The hint engine from Python, over host memory."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading

import pytest

from umem.core.classes import TensorClass
from umem.core.errors import UnsupportedError
from umem.core.schedule import HintOp
from umem.runtime._native import Allocator, ClassSetting, Config
from umem.runtime.hints import HintBatch, HintEngine, HintOutcome, HintSettings

MIB = 1 << 20
BLOCK = 2 * MIB
BASE = 1 << 40
PATIENCE_S = 20.0
SMALL = HintSettings(chunk_bytes=BLOCK, in_flight_bytes=4 * MIB, prefetch_workers=1)


def at(block: int) -> int:
    return BASE + block * BLOCK


def slow_engine() -> HintEngine:
    """An engine that takes 0.2 s for a chunk of 2 MiB: longer than threads are delayed."""
    return HintEngine.on_host(SMALL, bytes_per_s=BLOCK / 0.2)


class TestRequests:
    @pytest.mark.parametrize("op", [HintOp.PREFETCH, HintOp.EVICT])
    def test_done_and_counted(self, op: HintOp) -> None:
        with HintEngine.on_host(SMALL) as engine:
            ticket = engine.submit(op, at(0), 3 * BLOCK, tensor_class=TensorClass.WEIGHTS)
            assert engine.wait(ticket, timeout_s=PATIENCE_S) is HintOutcome.DONE
            stats = engine.statistics()
            ((key, counts),) = stats.counts.items()
            assert key == (op.name.lower(), TensorClass.WEIGHTS)
            assert counts.done == 1
            assert counts.calls == 3
            assert counts.moved_bytes == counts.asked_bytes == 3 * BLOCK
            assert stats.open_requests == 0
            assert not stats.failures

    def test_advice(self) -> None:
        with HintEngine.on_host() as engine:
            ticket = engine.advise(at(0), BLOCK, placement="host", accessed_by_device=True)
            assert engine.wait(ticket, timeout_s=PATIENCE_S) is HintOutcome.DONE
            assert list(engine.statistics().counts) == [("advise", TensorClass.OTHER)]
            with pytest.raises(ValueError, match="placement: moon"):
                engine.advise(at(0), BLOCK, placement="moon")  # type: ignore[arg-type]

    def test_invalid_requests(self) -> None:
        with HintEngine.on_host() as engine:
            with pytest.raises(ValueError, match="address cannot be 0"):
                engine.submit(HintOp.PREFETCH, 0, BLOCK)
            with pytest.raises(ValueError, match="cannot be empty"):
                engine.submit(HintOp.PREFETCH, at(0), 0)
            with pytest.raises(ValueError, match="beyond all addresses"):
                engine.submit(HintOp.PREFETCH, at(0), 2**64 - 1)
            with pytest.raises(ValueError, match="cannot be negative"):
                engine.submit(HintOp.PREFETCH, at(0), BLOCK, device=-1)
            for op in (HintOp.DISCARD, HintOp.COPY_OUT):
                with pytest.raises(ValueError, match=f"operation: {op}"):
                    engine.submit(op, at(0), BLOCK)
            with pytest.raises(ValueError, match="timeout_s"):
                engine.wait(1, timeout_s=-1)
            with pytest.raises(KeyError, match="ticket 77"):
                engine.wait(77, timeout_s=0)
            assert engine.statistics().counts == {}

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            (HintSettings(chunk_bytes=4096), "chunk_bytes: at least 2 MiB"),
            (HintSettings(in_flight_bytes=0), "in_flight_bytes"),
            (HintSettings(capacity=0), "capacity"),
            (HintSettings(prefetch_workers=17), "prefetch_workers: from 1 to 16"),
            (HintSettings(poll_s=0), "poll_ns"),
            (HintSettings(poll_s=-1), "poll_s: a number of seconds"),
        ],
    )
    def test_settings_out_of_range(self, settings: HintSettings, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            HintEngine.on_host(settings)


class TestWaiting:
    @pytest.mark.slow
    def test_timeout_and_end(self) -> None:
        with slow_engine() as engine:
            ticket = engine.submit(HintOp.PREFETCH, at(0), BLOCK)
            assert engine.wait(ticket, timeout_s=1e-3) is HintOutcome.OPEN
            assert engine.wait(ticket, timeout_s=PATIENCE_S) is HintOutcome.DONE


class TestLateAndEarly:
    def test_late(self) -> None:
        with slow_engine() as engine:
            ticket = engine.submit(HintOp.PREFETCH, at(0), BLOCK)
            engine.mark_needed(ticket)
            engine.wait(ticket, timeout_s=PATIENCE_S)
            counts = engine.statistics().counts["prefetch", TensorClass.OTHER]
            assert (counts.late, counts.early) == (1, 0)
            assert 0 < counts.late_s < PATIENCE_S
            assert counts.driver_s >= 0.2

    def test_many_are_marked_at_once(self) -> None:
        with HintEngine.on_host() as engine:
            tickets = [engine.submit(HintOp.PREFETCH, at(2 * i), BLOCK) for i in range(100)]
            for ticket in tickets:
                engine.wait(ticket, timeout_s=PATIENCE_S)
            engine.mark_needed(0, *tickets)
            engine.mark_needed()
            counts = engine.statistics().counts["prefetch", TensorClass.OTHER]
            assert (counts.late, counts.early) == (0, 100)


class TestQueue:
    def test_forget(self) -> None:
        with slow_engine() as engine:
            ticket = engine.submit(HintOp.EVICT, at(0), 20 * BLOCK)
            assert engine.forget(at(0), 20 * BLOCK)
            assert engine.wait(ticket, timeout_s=0) is HintOutcome.FORGOTTEN
            assert engine.statistics().counts["evict", TensorClass.OTHER].moved_bytes <= 2 * BLOCK


def batch_of(engine: HintEngine, count: int) -> HintBatch:
    """Prefetches of blocks that are not adjacent."""
    return engine.batch(
        [HintOp.PREFETCH] * count,
        [at(2 * i) for i in range(count)],
        [BLOCK] * count,
        [TensorClass.WEIGHTS] * count,
    )


class TestBatches:
    def test_a_batch_can_be_submitted_repeatedly(self) -> None:
        ops = [HintOp.PREFETCH, HintOp.EVICT, HintOp.PREFETCH]
        classes = [TensorClass.WEIGHTS, TensorClass.GRADIENTS, TensorClass.OTHER]
        with HintEngine.on_host(SMALL) as engine:
            batch = engine.batch(ops, [at(0), at(10), at(20)], [BLOCK] * 3, classes)
            assert len(batch.tickets) == 0
            for round_ in (1, 2):
                last = engine.submit_batch(batch, 7)
                assert batch.tickets == range(last - 2, last + 1)
                for ticket in batch.tickets:
                    assert engine.wait(ticket, timeout_s=PATIENCE_S) is HintOutcome.DONE
                counts = engine.statistics().counts
                assert set(counts) == {
                    (op.name.lower(), of) for op, of in zip(ops, classes, strict=True)
                }
                assert {of.moved_bytes for of in counts.values()} == {round_ * BLOCK}

    def test_entries_without_an_address_are_skipped(self) -> None:
        with HintEngine.on_host(SMALL) as engine:
            batch = batch_of(engine, 3)
            batch.set_address(0, 0)
            batch.set_address(2, at(100))
            last = engine.submit_batch(batch, 0)
            assert len(batch.tickets) == 2
            assert engine.wait(last, timeout_s=PATIENCE_S) is HintOutcome.DONE
            for index in (1, 2):
                batch.set_address(index, 0)
            assert engine.submit_batch(batch, 0) == 0
            assert len(batch.tickets) == 0

    def test_a_full_queue_takes_the_first_entries(self) -> None:
        settings = HintSettings(chunk_bytes=BLOCK, capacity=3, prefetch_workers=1)
        with HintEngine.on_host(settings, bytes_per_s=BLOCK / 0.2) as engine:
            batch = batch_of(engine, 5)
            assert engine.submit_batch(batch, 0) == 3
            assert batch.tickets == range(1, 4)
            assert engine.statistics().refused == 2

    @pytest.mark.slow
    def test_prefetches_wait_for_the_evictions_before_them(self) -> None:
        settings = HintSettings(chunk_bytes=BLOCK)
        with HintEngine.on_host(settings, bytes_per_s=BLOCK / 0.05) as engine:
            out = [engine.submit(HintOp.EVICT, at(2 * number), BLOCK) for number in range(3)]
            batch = batch_of(engine, 3)
            for index in range(3):
                batch.set_address(index, at(100 + 2 * index))
            engine.submit_batch(batch, 0, [0, out[0], out[2]])
            for ticket, before in zip(batch.tickets, (0, 1, 3), strict=True):
                assert engine.wait(ticket, timeout_s=PATIENCE_S) is HintOutcome.DONE
                ended = [engine.wait(it, timeout_s=0) for it in out[:before]]
                assert ended == [HintOutcome.DONE] * before
            with pytest.raises(ValueError, match="after: one ticket for each entry"):
                engine.submit_batch(batch, 0, out[:2])

    def test_invalid_requests(self) -> None:
        with HintEngine.on_host() as engine:
            with pytest.raises(ValueError, match="of the same length"):
                engine.batch([HintOp.EVICT], [at(0), at(1)], [BLOCK], [TensorClass.OTHER])
            with pytest.raises(ValueError, match="operation: 3"):
                engine.batch([HintOp.COPY_IN], [at(0)], [BLOCK], [TensorClass.OTHER])
            with pytest.raises(ValueError, match="cannot be empty"):
                engine.batch([HintOp.EVICT], [at(0)], [0], [TensorClass.OTHER])
            with pytest.raises(ValueError, match="cannot be negative"):
                engine.batch([HintOp.EVICT], [at(0)], [BLOCK], [TensorClass.OTHER], device=-1)
            batch = batch_of(engine, 1)
            with pytest.raises(IndexError):
                batch.set_address(1, at(0))
            with pytest.raises(ValueError, match="beyond all addresses"):
                batch.set_address(0, 2**64 - 1)


class TestFinish:
    @pytest.mark.slow
    def test_all_requests_have_ended(self) -> None:
        with slow_engine() as engine:
            ticket = engine.submit(HintOp.EVICT, at(0), 4 * BLOCK)
            assert not engine.finish(timeout_s=0)
            assert engine.finish(timeout_s=PATIENCE_S)
            assert engine.wait(ticket, timeout_s=0) is HintOutcome.DONE


class TestReleases:
    def test_released_segments_are_forgotten(self) -> None:
        allocator = Allocator.on_host(Config([ClassSetting()] * len(TensorClass)))
        with slow_engine() as engine:
            engine.listen_to_releases(allocator)
            address = allocator.malloc(20 * BLOCK)
            ticket = engine.submit(HintOp.EVICT, address, 20 * BLOCK)
            allocator.free(address)
            allocator.empty_cache()
            assert engine.wait(ticket, timeout_s=0) is HintOutcome.FORGOTTEN
            allocator.set_release_listener(None)
        allocator.malloc(20 * BLOCK)

    @pytest.mark.slow
    def test_other_threads_run_during_a_release(self) -> None:
        """The release of the cache waits for the driver call under way."""
        allocator = Allocator.on_host(Config([ClassSetting()] * len(TensorClass)))
        with slow_engine() as engine:
            engine.listen_to_releases(allocator)
            address = allocator.malloc(20 * BLOCK)
            first = engine.submit(HintOp.EVICT, at(0), BLOCK)
            engine.submit(HintOp.EVICT, address, 20 * BLOCK)
            engine.wait(first, timeout_s=PATIENCE_S)
            allocator.free(address)
            ran = threading.Event()
            threading.Timer(0.01, ran.set).start()
            allocator.empty_cache()
            assert ran.is_set()
            assert engine.statistics().counts["evict", TensorClass.OTHER].moved_bytes == 2 * BLOCK


class TestFailures:
    def test_counted_and_printed_once(self, capfd: pytest.CaptureFixture[str]) -> None:
        with HintEngine.on_host(devices=2) as engine:
            tickets = [
                engine.submit(HintOp.PREFETCH, at(10 * i), BLOCK, device=5) for i in range(4)
            ]
            outcomes = {engine.wait(ticket, timeout_s=PATIENCE_S) for ticket in tickets}
            assert outcomes == {HintOutcome.FAILED}
            good = engine.submit(HintOp.PREFETCH, at(0), BLOCK, device=1)
            assert engine.wait(good, timeout_s=PATIENCE_S) is HintOutcome.DONE
            (failure,) = engine.statistics().failures
            assert (failure.call, failure.text) == ("open", "no such device")
            assert failure.count == 4
        assert capfd.readouterr().err.count("umem: hint: open failed: no such device") == 1

    @pytest.mark.parametrize(
        ("call", "outcome"),
        [
            ("record", HintOutcome.DROPPED),
            ("open", HintOutcome.FAILED),
            ("query", HintOutcome.DROPPED),
            ("evict", HintOutcome.FAILED),
            ("synchronize", HintOutcome.FAILED),
        ],
    )
    def test_injected_failures(
        self, call: str, outcome: HintOutcome, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """The named call fails once; the next one succeeds."""
        with HintEngine.on_host(SMALL, fail={call: 1}) as engine:
            outcomes = []
            batch = engine.batch([HintOp.EVICT], [at(0)], [BLOCK], [TensorClass.OTHER])
            for _ in range(3):
                ticket = engine.submit_batch(batch, 7)
                outcomes.append(engine.wait(ticket, timeout_s=PATIENCE_S))
            assert outcomes == [outcome, HintOutcome.DONE, HintOutcome.DONE]
            (failure,) = engine.statistics().failures
            assert (failure.call, failure.count) == (call, 1)
        assert capfd.readouterr().err.count(f"umem: hint: {call} failed") == 1

    @pytest.mark.parametrize(
        ("fail", "message"),
        [({"map": 1}, "no such call: map"), ({"evict": 0}, "numbered from 1: evict")],
    )
    def test_invalid_injections(self, fail: dict[str, int], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            HintEngine.on_host(fail=fail)

    def test_no_gpu_is_a_clear_error(self) -> None:
        import torch

        if torch.cuda.is_available():
            pytest.skip("this machine has a GPU")
        with pytest.raises(UnsupportedError, match="NVIDIA driver"):
            HintEngine.on_cuda()


class TestThreadsAndProcesses:
    @pytest.mark.slow
    def test_waiting_lets_other_threads_run(self) -> None:
        with slow_engine() as engine:
            ticket = engine.submit(HintOp.EVICT, at(0), 2 * BLOCK)
            ran = threading.Event()
            threading.Timer(0.01, ran.set).start()
            engine.wait(ticket, timeout_s=PATIENCE_S)
            assert ran.is_set()

    def test_shutdown(self) -> None:
        engine = slow_engine()
        tickets = [engine.submit(HintOp.PREFETCH, at(10 * i), BLOCK) for i in range(50)]
        assert engine.shutdown()
        assert engine.shutdown()
        assert engine.wait(tickets[-1], timeout_s=0) is HintOutcome.DROPPED
        assert engine.submit(HintOp.PREFETCH, at(0), BLOCK) == 0

    @pytest.mark.slow
    def test_a_stuck_call_is_waited_for_once(self) -> None:
        threads = len(os.listdir("/proc/self/task"))
        engine = HintEngine.on_host(SMALL, bytes_per_s=BLOCK / 5.0)
        first = engine.submit(HintOp.EVICT, at(10), 4096)
        engine.submit(HintOp.EVICT, at(0), BLOCK)
        engine.wait(first, timeout_s=PATIENCE_S)
        assert not engine.shutdown(timeout_s=1e-3)
        del engine
        gc.collect()
        assert len(os.listdir("/proc/self/task")) > threads  # in its call still

    @pytest.mark.slow
    def test_a_collected_engine_ends_its_threads(self) -> None:
        before = set(os.listdir("/proc/self/task"))  # threads of other tests may end meanwhile
        engine = HintEngine.on_host()
        engine.wait(engine.submit(HintOp.PREFETCH, at(0), BLOCK), timeout_s=PATIENCE_S)
        threads = set(os.listdir("/proc/self/task")) - before
        assert len(threads) == 3
        del engine
        gc.collect()
        assert not threads & set(os.listdir("/proc/self/task"))

    @pytest.mark.slow
    def test_a_process_ends_with_hints_under_way(self) -> None:
        code = (
            "from umem.runtime.hints import HintEngine, HintSettings\n"
            "from umem.core.schedule import HintOp\n"
            "settings = HintSettings(chunk_bytes=2 << 20)\n"
            "engine = HintEngine.on_host(settings, bytes_per_s=20e6)\n"
            "for i in range(1000):\n"
            "    assert engine.submit(HintOp(i % 2), (1 << 40) + (i << 22), 2 << 20)\n"
            "print('asked')\n"
        )
        done = subprocess.run(  # all requests would take over 100 s
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "asked\n", "")
