"""Hooks on models that a program calls, or whose ``forward`` it runs itself, past torch's hooks."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from umem.runtime.torch_hooks.modules import (
    enter_running_forward,
    hook_calls,
    hook_running_forward,
)


def decorated(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return wrapper


def make_net(decorate: Callable[..., Any]) -> Any:
    """A class of its own for each test: hooks wrap its ``forward``."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        @decorate
        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            y: torch.Tensor = self.second(self.first(x)) * scale
            return y

        def run(self, x: torch.Tensor) -> Any:
            return self.forward(x, scale=2.0)

    return Net


class Log:
    """Finds the model around the first module that is called, and notes calls of it."""

    def __init__(self, model: Any) -> None:
        self.found: list[nn.Module | None] = []
        self.calls: list[str] = []
        self.undo: list[Callable[[], None]] = []
        self._handle = model.first.register_forward_pre_hook(self._first)

    def _first(self, module: nn.Module, _args: Any) -> None:
        self._handle.remove()
        found = hook_running_forward(module)
        self.found.append(found)
        if found is not None:
            self.undo = hook_calls(found, self._enter, self._leave)
            enter_running_forward(found)

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.calls.append(f"enter {len(args)} {sorted(kwargs)}")

    def _leave(self, output: Any, failed: bool) -> None:
        self.calls.append("failed" if failed else f"leave {type(output).__name__}")


@pytest.mark.parametrize("decorate", [lambda forward: forward, decorated])
def test_a_forward_that_the_program_runs_is_hooked(decorate: Callable[..., Any]) -> None:
    net = make_net(decorate)()
    other = copy.deepcopy(net)
    x = torch.ones(2, 4)
    expected = net.run(x)
    log = Log(net)
    assert torch.equal(net.run(x), expected)
    assert log.found == [net]
    assert log.calls == ["enter 0 []"]  # it ran already
    for model in (net, other, copy.deepcopy(net)):
        assert torch.equal(model.run(x), expected)
    assert log.calls[1:] == ["enter 1 ['scale']", "leave Tensor"]
    net(x)
    assert log.calls[3:] == ["enter 1 []", "leave Tensor"]
    with pytest.raises(TypeError):
        net(x, scale=None)
    assert log.calls[5:] == ["enter 1 ['scale']", "failed"]
    for undo in log.undo:
        undo()
    net.run(x)
    assert len(log.calls) == 7


def test_a_model_that_is_called_is_left_to_torch() -> None:
    model: Any = make_net(lambda forward: forward)()
    log = Log(model)
    model.first(torch.ones(2, 4))  # on its own
    assert log.found == [None]


def test_a_forward_of_the_object_itself_is_left_alone() -> None:
    model: Any = make_net(lambda forward: forward)()
    model.forward = functools.partial(type(model).forward, model)
    log = Log(model)
    model.run(torch.ones(2, 4))
    assert log.found == [None]


@pytest.mark.slow
def test_no_hook_is_traced() -> None:
    model: Any = make_net(lambda forward: forward)()
    x = torch.ones(2, 4)
    log = Log(model)
    expected = model.run(x)
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    calls = list(log.calls)
    assert torch.equal(compiled(x, scale=2.0), expected)
    assert log.calls == calls


def test_what_a_caller_deletes_is_freed() -> None:
    net = make_net(lambda forward: forward)()
    Log(net)

    def train(model: nn.Module) -> bool:
        batch = torch.ones(2, 4)
        freed = weakref.ref(batch)
        model(batch)
        del batch
        return freed() is None

    assert train(net)
