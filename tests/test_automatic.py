"""Trainings that `umem.enable` manages by itself."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

import pytest
import torch
from other_process import run_forked
from torch import nn, optim
from torch.optim import optimizer as torch_optimizer

import umem.managing
import umem.streaming
from umem.core.errors import EnableError, PlanError
from umem.swap import manage_automatically
from umem.torch_compat import runs_compiled

SCRIPT = """
import sys
import torch
from umem.swap import manage_automatically

model = torch.nn.Linear(4, 4)
manage_automatically(lambda: [model])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
before = "umem.managing" in sys.modules
for _ in range(2):
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
print(before, "umem.managing" in sys.modules)
"""


@pytest.mark.slow
def test_the_executor_is_loaded_for_a_training_and_its_refusal_stops_nothing() -> None:
    assert run_forked(SCRIPT).split() == ["False", "True"]


@pytest.fixture
def roots() -> Iterator[list[nn.Module]]:
    """The modules called so far, while trainings are managed automatically."""
    called: list[nn.Module] = []
    hooks = dict(torch_optimizer._global_optimizer_post_hooks)
    manage_automatically(lambda: called)
    yield called
    torch_optimizer._global_optimizer_post_hooks.clear()
    torch_optimizer._global_optimizer_post_hooks.update(hooks)


@pytest.fixture
def managed(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The models that got a manager."""
    found: list[nn.Module] = []
    monkeypatch.setattr(umem.managing, "manage", lambda model, _: found.append(model))
    return found


def test_the_model_holds_most_of_the_trained_parameters(
    roots: list[nn.Module], managed: list[nn.Module]
) -> None:
    small, large = nn.Linear(2, 2), nn.Linear(64, 64)
    roots += [small, large, nn.Linear(128, 128)]
    optim.SGD([*small.parameters(), *large.parameters()], lr=0.1).step()
    assert managed == [large]


@pytest.mark.parametrize("fails", ["import", "manage", "roots"])
def test_no_error_of_umem_reaches_the_training(
    fails: str,
    roots: list[nn.Module],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One warning for the process, and the traceback at debug level."""

    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    model = nn.Linear(4, 4)
    roots.append(model)
    if fails == "import":
        monkeypatch.setitem(sys.modules, "umem.managing", None)
    elif fails == "manage":
        monkeypatch.setattr(umem.managing, "manage", fail)
    else:
        monkeypatch.setattr(model, "parameters", fail)
    with caplog.at_level(logging.DEBUG, "umem"):
        for _ in range(2):
            tensor = model.weight
            before = tensor.detach().clone()
            tensor.grad = torch.ones_like(tensor)
            optim.SGD([tensor], lr=0.1).step()
            assert not tensor.equal(before)
    warning, trace = caplog.records
    assert warning.levelno == logging.WARNING
    assert ("ModuleNotFoundError" if fails == "import" else "broken") in warning.getMessage()
    assert warning.exc_info is None
    assert trace.levelno == logging.DEBUG
    assert trace.exc_info is not None


@pytest.mark.slow
def test_compilers_see_no_search(roots: list[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of umem's own code it would make graphs, which fail for sizes that vary."""
    seen: list[bool] = []
    monkeypatch.setattr(umem.managing, "manage", lambda *_: seen.append(runs_compiled()))
    model = nn.Linear(4, 4)
    roots.append(model)
    optimizer = optim.AdamW(model.parameters(), foreach=True)
    model(torch.ones(1, 4)).sum().backward()
    torch.compile(optimizer.step, backend="eager")()
    assert seen == [False]


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[nn.Module], list[nn.Module]]]:
    """The modules called so far, and the models whose optimizer state is streamed."""
    called: list[nn.Module] = []
    found: list[nn.Module] = []
    monkeypatch.setattr(umem.streaming, "stream_state", lambda model, _: found.append(model))
    hooks = dict(torch_optimizer._global_optimizer_post_hooks)
    manage_automatically(lambda: called, is_planned=False, streams_state=True)
    yield called, found
    torch_optimizer._global_optimizer_post_hooks.clear()
    torch_optimizer._global_optimizer_post_hooks.update(hooks)


def test_parameters_of_no_module_are_streamed_beside_the_largest_trained_one(
    streamed: tuple[list[nn.Module], list[nn.Module]],
) -> None:
    called, found = streamed
    small, frozen, large = nn.Linear(2, 2), nn.Linear(128, 128), nn.Linear(64, 64)
    frozen.requires_grad_(False)
    elsewhere = nn.Linear(256, 256, device="meta")
    called += [small, frozen, elsewhere]
    optimizer = optim.AdamW([torch.zeros(4, requires_grad=True)])
    optimizer.step()
    called.append(large)  # it may still come
    assert found == []
    for _ in range(3):
        optimizer.step()
    assert found == [large]


def test_an_optimizer_may_step_before_its_model_is_called(
    roots: list[nn.Module], managed: list[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(4, 4)
    optimizer = optim.AdamW(model.parameters())
    for parameter in model.parameters():  # as torch.distributed.checkpoint creates the state
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(7):
        optimizer.step()
    assert managed == []
    roots.append(model)
    for _ in range(3):
        optimizer.step()
    assert managed == [model]
    assert caplog.records == []


def test_parameters_of_no_module_get_one_warning(
    roots: list[nn.Module], managed: list[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    tensor = torch.zeros(4, requires_grad=True, device="meta")
    tensor.grad = torch.ones(4, device="meta")
    optimizer = optim.SGD([tensor], lr=0.1)
    roots.append(nn.Linear(4, 4))
    with caplog.at_level(logging.INFO, "umem"):
        for _ in range(20):
            optimizer.step()
    (record,) = caplog.records
    assert "SGD is not managed: no module that was called in 8 steps" in record.getMessage()
    # What it costs, and what to do.
    assert "page faults" in record.getMessage()
    assert "optimizer_state: {mechanism: stream}" in record.getMessage()
    assert managed == []


def test_state_beside_no_model_gets_one_warning(
    streamed: tuple[list[nn.Module], list[nn.Module]], caplog: pytest.LogCaptureFixture
) -> None:
    called, found = streamed
    called.append(nn.Linear(4, 4, device="meta").requires_grad_(False))
    optimizer = optim.AdamW([torch.zeros(4, requires_grad=True, device="meta")])
    for _ in range(20):
        optimizer.step()
    (record,) = caplog.records
    assert "AdamW is not managed: no module with trained parameters" in record.getMessage()
    assert "used in host memory" in record.getMessage()
    assert "umem.manage(model, optimizer)" in record.getMessage()
    assert found == []


@pytest.mark.parametrize(
    ("device", "error", "level"),
    [
        ("meta", EnableError("it is on 2 GPUs: move it to one"), "WARNING"),
        ("cpu", EnableError("it is on 0 GPUs: move it to one"), "INFO"),
        ("meta", PlanError("the program manages it with another model"), "INFO"),
    ],
    ids=["spread over GPUs", "on the CPU", "managed otherwise"],
)
def test_what_a_refusal_costs_is_said(
    device: str,
    error: Exception,
    level: str,
    roots: list[nn.Module],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(umem.managing, "manage", refuse)
    model = nn.Linear(4, 4, device=device)
    roots.append(model)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with caplog.at_level(logging.INFO, "umem"):
        for _ in range(3):
            optimizer.step()
    (record,) = caplog.records
    assert record.levelname == level
    assert str(error) in record.getMessage()
    assert ("host memory, which is slow" in record.getMessage()) == (level == "WARNING")


def test_an_optimizer_on_the_cpu_gets_no_warning(
    streamed: tuple[list[nn.Module], list[nn.Module]], caplog: pytest.LogCaptureFixture
) -> None:
    """Such as with DeepSpeed's `offload_optimizer`."""
    called, found = streamed
    called.append(nn.Linear(4, 4, device="meta"))
    optimizer = optim.AdamW([torch.zeros(4, requires_grad=True)])
    with caplog.at_level(logging.INFO, "umem"):
        for _ in range(20):
            optimizer.step()
    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert "on the CPU" in record.getMessage()
    assert found == []


def test_parameters_without_memory_count_by_their_number(
    streamed: tuple[list[nn.Module], list[nn.Module]],
) -> None:
    """ZeRO-3 takes the memory of all parameters between their uses."""
    called, found = streamed
    called += [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))]
    for module in called:
        for it in module.parameters():
            it.data = torch.empty(0)
    optimizer = optim.AdamW([torch.zeros(4, requires_grad=True)])
    for _ in range(3):
        optimizer.step()
    assert found == called[1:]
