"""Failures around a managed training on the CPU, which must not change its values."""

from __future__ import annotations

import gc
import logging
import random
import re
import zlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from managed_training import MIB, Net, Training, host_machine
from other_process import run_forked

from umem.core.classes import TensorClass
from umem.core.schedule import HintOp
from umem.managing import manage_on
from umem.offloading import Mover
from umem.pages import Manager, ManagerState
from umem.pages.run.machine import within_host
from umem.policy import PolicyPlanner
from umem.runtime.hints import HintEngine, HintSettings

SCRIPT = Path(__file__).parent / "support" / "ending.py"


@pytest.fixture(scope="module")
def stock() -> Training:
    training = Training()
    training.steps(12)
    return training


@pytest.mark.slow
@pytest.mark.parametrize("planner", ["planned", "fault"])
def test_every_hint_may_fail(planner: str, stock: Training) -> None:
    """Pages stay where they were."""
    training = Training()
    manager = training.manage(planner, 34 * MIB, devices=0)
    training.steps(12)
    assert training.equals(stock)
    assert manager.status().state is ManagerState.RUNNING
    assert manager.status().steps == 5
    counts = manager.engine.statistics().counts.values()
    assert sum(of.done for of in counts) == 0
    assert sum(of.wasted for of in counts) > 20
    assert manager.engine.statistics().open_requests == 0


@pytest.mark.slow
def test_the_engine_may_be_shut_down_during_training(stock: Training) -> None:
    training = Training()
    manager = training.manage("planned", 34 * MIB)
    training.steps(9)
    assert manager.engine.shutdown(timeout_s=10)
    wait_timeouts = manager.status().wait_timeouts
    training.steps(3)
    assert manager.status().wait_timeouts == wait_timeouts
    assert training.equals(stock)
    assert manager.status().state is ManagerState.RUNNING
    assert manager.engine.statistics().refused > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "planner"),
    [
        *((call, "planned") for call in ("record", "open", "prefetch")),
        *((call, "lookahead") for call in ("query", "evict", "synchronize")),
    ],
)
def test_every_driver_call_may_fail_once(call: str, planner: str, stock: Training) -> None:
    training = Training()
    manager = training.manage(planner, 34 * MIB, fail={call: 3 if call != "open" else 1})
    training.steps(12)
    assert training.equals(stock)
    status = manager.status()
    assert (status.state, status.steps, status.diverged_steps) == (ManagerState.RUNNING, 5, 0)
    statistics = manager.engine.statistics()
    counts = statistics.counts.values()
    lost = sum(of.wasted for of in counts)
    assert lost >= 1
    assert sum(of.done for of in counts) > 20


@pytest.mark.slow
def test_the_hint_queue_may_be_full(stock: Training) -> None:
    training = Training()
    settings = HintSettings(capacity=2)
    manager = training.manage("lookahead", 34 * MIB, settings=settings, bytes_per_s=200e6)
    training.steps(12)
    assert training.equals(stock)
    assert manager.engine.statistics().refused > 0


@pytest.mark.slow
def test_waits_for_late_pages_are_limited(stock: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("umem.pages.run.runner.MAX_WAIT_S", 0.01)
    training = Training()
    manager = training.manage("planned", 34 * MIB, bytes_per_s=20e6)
    training.steps(12)
    assert training.equals(stock)
    assert manager.status().wait_timeouts > 0


@pytest.mark.slow
def test_no_plan_fills_a_full_host(stock: Training, caplog: pytest.LogCaptureFixture) -> None:
    machine = host_machine(34 * MIB)
    full = within_host(machine.hardware, host_bytes=lambda: 3 * MIB)
    assert full.host_bytes == 3 * MIB
    training = Training()
    manager = manage_on(
        training.model, training.optimizer, lambda: replace(machine, hardware=full), "planned"
    )
    with caplog.at_level(logging.WARNING, "umem"):
        training.steps(12)
    assert training.equals(stock)
    assert manager.status().state is ManagerState.OFF
    (record,) = caplog.records
    said = record.getMessage()
    assert "MiB off the device, and h200 has host_bytes of 3 MiB" in said
    assert "raise the budget" in said
    assert manager.engine.statistics().counts == {}


def test_the_profile_counts_where_host_memory_is_unknown() -> None:
    hardware = host_machine(34 * MIB).hardware
    assert within_host(hardware, host_bytes=lambda: None) is hardware
    assert within_host(hardware, host_bytes=lambda: 1 << 50) == hardware


@pytest.mark.slow
def test_activations_stay_where_the_host_is_nearly_full(stock: Training) -> None:
    class NearlyFullHost(Mover):
        available_bytes = (2 << 30) + 5 * MIB

        def host_memory_bytes(self) -> tuple[int, int]:
            return 16 << 30, self.available_bytes

        def allocate_host(self, size_bytes: int) -> torch.Tensor:
            self.available_bytes -= size_bytes
            return super().allocate_host(size_bytes)

    training = Training()
    machine = replace(host_machine(40 * MIB), mover=NearlyFullHost())
    manager = manage_on(training.model, training.optimizer, lambda: machine, "planned")
    with pytest.warns(RuntimeWarning, match="of which 2 GiB stay in reserve"):
        training.steps(12)
    assert training.equals(stock)
    statistics = manager.store.statistics
    assert statistics.kept_for_lack_of_host_bytes > 0
    assert statistics.peak_pinned_bytes == 4 * MIB
    assert statistics.bytes_out > 0
    assert manager.status().state is ManagerState.RUNNING


@pytest.mark.slow
def test_memory_may_be_freed_while_its_hints_are_queued(stock: Training) -> None:
    """A model is dropped while hints on its memory are behind others in the queue."""
    engine = HintEngine.on_host(bytes_per_s=20e6)
    first, second = Training(), Training()
    for training, budget_bytes in ((first, 34 * MIB), (second, 400 * MIB)):
        make_machine = partial(replace, host_machine(budget_bytes), engine=engine)
        manage_on(training.model, training.optimizer, make_machine, "lookahead")
    first.steps(8)
    first.forward().backward()
    assert engine.statistics().open_requests
    del first, training
    gc.collect()
    second.steps(12)  # mostly in the memory that was freed
    assert second.equals(stock)
    assert engine.statistics().failures == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "status", "output"), [("exit", 0, ""), ("raise", 3, ""), ("fork", 0, "running 0\n")]
)
def test_a_process_may_end_or_fork_while_pages_move(how: str, status: int, output: str) -> None:
    """One that waits for its hints fails by its time."""
    found = run_forked(SCRIPT.read_text(encoding="utf-8"), how, status=status)
    # On a machine that plans for the first time.
    assert re.sub("umem: compiling the planner, .*\n", "", found) == output


class Disturber:
    """Submits hints that are in no plan, between the phases of each step.

    Parameters
    ----------
    training
        Its weights, gradients, optimizer state and outputs are moved.
    manager
        Its engine takes the hints. Its store moves groups of activations at the wrong times.
    """

    def __init__(self, training: Training, manager: Manager) -> None:
        self._training = training
        self._engine = manager.engine
        self._store = manager.store
        self._random = random.Random(7)
        self.hints = 0
        for module in training.model.modules():
            module.register_forward_hook(self._after_forward)

    def _after_forward(self, _module: object, _args: object, output: torch.Tensor) -> None:
        self._disturb()
        op = self._random.choice([HintOp.PREFETCH, HintOp.EVICT])
        self._engine.submit(
            op, output.data_ptr(), output.nbytes, tensor_class=TensorClass.ACTIVATIONS
        )
        output.register_hook(self._disturb)

    def _tensors(self) -> Iterator[tuple[TensorClass, torch.Tensor]]:
        for parameter in self._training.model.parameters():
            yield TensorClass.WEIGHTS, parameter
            if parameter.grad is not None:
                yield TensorClass.GRADIENTS, parameter.grad
            state = self._training.optimizer.state.get(parameter, {})
            for name in ("exp_avg", "exp_avg_sq"):
                if name in state:
                    yield TensorClass.OPTIMIZER_STATE, state[name]

    def _disturb(self, *_: object) -> None:
        of_class, tensor = self._random.choice(list(self._tensors()))
        address, size_bytes, engine = tensor.data_ptr(), tensor.nbytes, self._engine
        kind = self._random.choice(["prefetch", "evict", "map", "unmap", "activations"])
        self.hints += 1
        if kind in ("map", "unmap"):
            engine.advise(
                address,
                size_bytes,
                placement="host" if kind == "map" else "device",
                accessed_by_device=kind == "map",
                tensor_class=of_class,
            )
        elif kind == "activations":
            for block in ("layers.0", "layers.1", "head"):
                move = self._random.choice(
                    [self._store.send, self._store.release, self._store.fetch]
                )
                move((block, 0))
        else:
            op = HintOp.PREFETCH if kind == "prefetch" else HintOp.EVICT
            engine.submit(op, address, size_bytes, tensor_class=of_class)


def checksums(training: Training, steps: int) -> list[int]:
    """Checksums of the output, all gradients, weights and state, in each step."""
    found = []
    for _ in range(steps):
        output = training.model(training.batch())
        found.append(zlib.crc32(output.detach().numpy().data))
        loss = output.square().mean()
        loss.backward()
        gradients = [p.grad for p in training.model.parameters()]
        found += [
            zlib.crc32(gradient.numpy().data) for gradient in gradients if gradient is not None
        ]
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.losses.append(loss.item())
        found += [zlib.crc32(tensor.numpy().data) for tensor in training.state()]
    return found


def check_disturbed_steps(planner: PolicyPlanner, expected: list[int]) -> None:
    training = Training(lambda: Net(2))
    manager = training.manage(planner, 32 * MIB)
    disturber = Disturber(training, manager)
    found = checksums(training, 20)
    assert disturber.hints > 100
    assert manager.status().state is ManagerState.RUNNING
    assert manager.status().steps > 10
    assert found == expected
    done = {
        of_class for (_, of_class), of in manager.engine.statistics().counts.items() if of.calls
    }
    assert done >= {
        TensorClass.WEIGHTS,
        TensorClass.GRADIENTS,
        TensorClass.OPTIMIZER_STATE,
        TensorClass.ACTIVATIONS,
    }


@pytest.mark.slow
def test_no_hint_changes_a_value() -> None:
    expected = checksums(Training(lambda: Net(2)), 20)
    for planner in ("planned", "fault"):
        check_disturbed_steps(planner, expected)
