"""Shared set-up: a small machine and small traces; GPU tests are skipped where there is no GPU."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from umem.core.classes import TensorClass
from umem.hardware import Hardware
from umem.trace import Access, Trace, check_trace, ranges

# Before torch is loaded, and for the processes of tests. Threads of small operators would only wait
# for each other where several workers share the cores, and the last bit of a function may depend on
# how they share its numbers.
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(autouse=True)
def no_manager_outlives_its_test() -> Iterator[None]:
    """A test's model may be garbage that is not collected yet, and its manager still at work."""
    yield
    managers = sys.modules.get("umem.managing")  # most tests need no planner loaded
    for manager in [] if managers is None else managers.managers():
        manager.close()
    training = sys.modules.get("umem.streaming.training")
    if training is None:
        return
    for it in training.streamed_trainings():
        it.abandon()
    if hasattr(sys.modules["torch"].autograd.backward, "__wrapped__"):  # somebody follows it
        gc.collect()


@pytest.fixture(autouse=True)
def the_log_is_as_before() -> Iterator[None]:
    """A command that a test runs in this process sets it up, and later tests would see no INFO."""
    log = logging.getLogger("umem")
    level, handlers, filters = log.level, log.handlers[:], log.filters[:]
    yield
    log.setLevel(level)
    log.handlers[:], log.filters[:] = handlers, filters


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """The command `umem`, in the test's process."""
    from command_line import umem_command  # most tests run no command

    return umem_command(monkeypatch, capsys)


@pytest.fixture
def fork_server() -> None:
    """For tests of workers, whose own call comes too late to say what the server imports."""
    from fork_server import start_fork_server  # most tests start no process

    start_fork_server()


_MANY_MODULES = 100
_known_modules = 0


def leave_out_what_stays() -> None:
    """Leave it out of later collections, and of looks for tensors: there are thousands of both."""
    global _known_modules
    _known_modules = len(sys.modules)
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    """All test modules have been imported."""
    leave_out_what_stays()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """A file's tests are over, of which pytest keeps some, or a test has imported much."""
    is_last = nextitem is None or nextitem.path != item.path
    if is_last or len(sys.modules) >= _known_modules + _MANY_MODULES:
        leave_out_what_stays()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked `gpu` on a machine without one."""
    needing_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not needing_gpu:
        return
    reason = _why_no_gpu()
    if reason:
        for item in needing_gpu:
            item.add_marker(pytest.mark.skip(reason=reason))


def _why_no_gpu() -> str:
    """Why GPU tests cannot run here, or ""."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    # Through NVML: the driver is not started, so that tests may still fork.
    if torch.cuda.device_count() == 0:
        return "torch sees no NVIDIA GPU"
    return ""


@pytest.fixture(scope="session")
def machine() -> Hardware:
    """A machine of round numbers: 20 blocks of 2 MiB a millisecond to the device, 10 back."""
    mebibyte = 2.0**20
    return Hardware(
        name="round",
        description="round numbers for tests",
        device_bytes=2**40,
        host_bytes=2**44,
        block_bytes=2**21,
        page_bytes=2**16,
        flops_per_s=dict.fromkeys(("fp32", "tf32", "fp16", "bf16", "fp8"), 1e14),
        memory_bytes_per_s=1e12,
        unvectorised_bytes_per_s=1e12,
        attention_flops_per_s=1e14,
        attention_backward_flops_per_s=1e14,
        launch_s=1e-6,
        to_device_bytes_per_s=40e3 * mebibyte,
        to_host_bytes_per_s=20e3 * mebibyte,
        link_bytes_per_s=60e3 * mebibyte,
        call_s=0.0,
        call_bytes=2**27,
        copy_to_device_bytes_per_s=40e3 * mebibyte,
        copy_to_host_bytes_per_s=40e3 * mebibyte,
        copy_link_bytes_per_s=60e3 * mebibyte,
        copy_slowdown_s_per_byte=0.0,
        page_slowdown_s_per_byte=0.0,
        mapped_read_bytes_per_s=40e3 * mebibyte,
        mapped_write_bytes_per_s=40e3 * mebibyte,
        mapped_bytes_per_s=60e3 * mebibyte,
        mapped_slowdown_s_per_byte=0.0,
        host_update_bytes_per_s=100e9,
        fault_batch_s=50e-6,
        faults_per_batch=256,
        fault_service_s=1e-6,
        speculation_threshold=0.51,
        fault_eviction="serial",
        eviction_order="migration",
        ats=True,
        one_pool=False,
        access_counter_threshold=256,
        sources={},
    )


@pytest.fixture(scope="session")
def make_trace() -> Callable[..., Trace]:
    """Builds a trace of {name: (bytes, class, persistent)} and [(seconds, reads, writes)]."""
    return _trace


@pytest.fixture(scope="session")
def random_trace() -> Callable[..., Trace]:
    """Builds a trace of [(bytes, persistent)] and, by phase, [(tensor, access mode)]."""

    def build(
        sizes: Sequence[tuple[int, bool]], phases: Sequence[Sequence[tuple[int, int]]]
    ) -> Trace:
        names = [str(number) for number in range(len(sizes))]
        classes = list(TensorClass)
        return _trace(
            {
                name: (size, classes[int(name) % len(classes)], persistent)
                for name, (size, persistent) in zip(names, sizes, strict=True)
            },
            [
                (
                    1e-4 * (1 + index % 3),
                    [names[tensor] for tensor, mode in accesses if mode & Access.READ],
                    [names[tensor] for tensor, mode in accesses if mode & Access.WRITE],
                )
                for index, accesses in enumerate(phases)
            ],
        )

    return build


def _trace(
    tensors: Mapping[str, tuple[Any, ...]],
    phases: Sequence[tuple[float, Sequence[str], Sequence[str]]],
) -> Trace:
    names = list(tensors)
    size = [entry[0] for entry in tensors.values()]
    persistent = [entry[2] if len(entry) > 2 else True for entry in tensors.values()]
    first, last = [0] * len(names), [len(phases) - 1] * len(names)
    used: list[int] = []
    mode: list[int] = []
    counts: list[int] = []
    seen: set[int] = set()
    for phase, (_, reads, writes) in enumerate(phases):
        modes: dict[int, int] = {}
        for group, bit in ((reads, Access.READ), (writes, Access.WRITE)):
            for name in group:
                modes[names.index(name)] = modes.get(names.index(name), 0) | int(bit)
        for tensor in modes:
            if not persistent[tensor]:
                first[tensor] = first[tensor] if tensor in seen else phase
                last[tensor] = phase
                seen.add(tensor)
        used += modes.keys()
        mode += modes.values()
        counts.append(len(modes))
    trace = Trace(
        name="by hand",
        source="tests",
        tensor_names=tuple(names),
        tensor_bytes=np.array(size, np.int64),
        tensor_class=np.array(
            [TensorClass(entry[1]).number for entry in tensors.values()], np.uint8
        ),
        persistent=np.array(persistent, np.bool_),
        first_phase=np.array(first, np.int32),
        last_phase=np.array(last, np.int32),
        phase_names=tuple(f"phase {number}" for number in range(len(phases))),
        phase_kind=np.zeros(len(phases), np.uint8),
        phase_precision=np.zeros(len(phases), np.uint8),
        flops=np.zeros(len(phases)),
        memory_bytes=np.zeros(len(phases), np.int64),
        duration_s=np.array([seconds for seconds, _, _ in phases], np.float64),
        access_start=ranges(np.array(counts, np.int64)),
        access_tensor=np.array(used, np.int32),
        access_mode=np.array(mode, np.uint8),
    )
    check_trace(trace, "by hand")
    return trace
