"""Hooks on models that a program calls, or whose ``forward`` it runs itself, past torch's hooks.

Files, copies, tracers and graphs find a managed model as a program has made it.
"""

from __future__ import annotations

import copy
import functools
import gc
import io
import multiprocessing
import pickle
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lazy_lanes import LazyLanes
from other_process import run_forked
from streamed_programs import WIDTH, Net, Program, bits
from torch import nn

from umem.runtime.torch_hooks.graphed import graphed_tensors, watch_graphing
from umem.runtime.torch_hooks.hidden import hidden_in, hide, uncalled
from umem.runtime.torch_hooks.modules import enter_running_forward, hook_calls, hook_running_forward
from umem.streaming.training import graphing_begins

SUPPORT = Path(__file__).parent / "support"


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
            return self.second(self.first(x)) * scale

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


class Scripted(nn.Module):
    """Uses a function of this file."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return tripled(self.first(x))


def tripled(x: torch.Tensor) -> torch.Tensor:
    return 3 * x


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_forward_that_is_hooked_is_scripted_as_before() -> None:
    net, x = Scripted(), torch.ones(2, 4)
    expected, log = net(x), Log(net)
    net.forward(x)
    assert log.found == [net]
    calls = list(log.calls)
    assert torch.equal(torch.jit.script(net)(x), expected)
    traced: Any = torch.jit.trace(net, (x,), check_trace=False)
    assert torch.equal(traced(x), expected)
    assert log.calls == calls
    net.forward(x)
    assert len(log.calls) == len(calls) + 2


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


# ---------------------------------------------------------------------- hidden hooks


def doubled(_module: nn.Module, _args: object, output: torch.Tensor) -> torch.Tensor:
    """A hook of a program."""
    return 2 * output


def added(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """A hook of a program."""
    return (args[0] + 1,)


def test_hidden_hooks_run_around_those_of_the_program() -> None:
    module, calls = nn.Linear(2, 2), list[str]()

    def note(name: str) -> Callable[..., None]:
        return lambda *_: calls.append(name)

    module.register_forward_pre_hook(note("old"))
    module.register_forward_hook(note("result"))
    undo = [
        *hook_calls(module, note("enter"), lambda *_, failed: calls.append(f"leave {failed}")),
        hide(module.register_forward_pre_hook(note("last")), "last"),
        hide(module.register_forward_pre_hook(note("first")), "first"),
    ]
    module.register_forward_pre_hook(note("new"), prepend=True)
    module.register_forward_pre_hook(note("later"))
    module(torch.ones(1, 2))
    expected = ["first", "new", "old", "enter", "later", "last", "result", "leave False"]
    assert calls == expected
    with pytest.raises(RuntimeError, match="shapes"):
        module(torch.ones(1, 3))
    assert calls[len(expected) :] == [*expected[:6], "leave True"]
    calls.clear()
    with uncalled():
        module(torch.ones(1, 2))
    assert calls == ["new", "old", "later", "result"]
    calls.clear()
    for it in undo:
        it()
    module(torch.ones(1, 2))
    assert calls == ["new", "old", "later", "result"]


def test_the_dictionaries_show_what_is_the_programs_alone() -> None:
    stock, module = nn.Linear(2, 2), nn.Linear(2, 2)
    handles = [
        [it.register_forward_pre_hook(added), it.register_forward_hook(doubled)]
        for it in (stock, module)
    ]
    known = [module._forward_pre_hooks, module._forward_hooks]
    undo = hook_calls(module, lambda *_: None, lambda *_, failed: None)
    undo.append(hide(module.register_load_state_dict_pre_hook(lambda *_: None)))
    assert known[0] is module._forward_pre_hooks
    for name, expected in vars(stock).items():
        if not name.endswith(("_hooks", "_kwargs", "_called")):
            continue
        found = vars(module)[name]
        assert isinstance(found, OrderedDict)
        assert len(found) == len(expected)
        assert [*dict(found).values()] == [*expected.values()]
        assert [found[key] for key in found] == [*expected.values()]
        assert type(found.copy()) is type(copy.copy(found)) is OrderedDict
        assert found == found.copy()
        assert repr(found) == repr(found.copy())
    assert [hidden_in(it) for it in known] == [1, 1]
    x = torch.ones(1, 2)
    with torch.no_grad():
        stock.weight.copy_(module.weight)
        stock.bias.copy_(module.bias)
        assert torch.equal(module(x), stock(x))
        for some in handles:  # those of the program work as before
            some[0].remove()
        assert torch.equal(module(x), stock(x))
    assert len(module._forward_pre_hooks) == 0
    for it in undo:
        it()
    assert all(type(vars(module)[name]) is type(vars(stock)[name]) for name in vars(stock))


def test_a_dictionary_that_dies_leaves_its_class_as_it_was() -> None:
    def hooked() -> None:
        module = nn.Linear(1, 1)
        hook_calls(module, lambda *_: None)
        kinds.add(type(module._forward_pre_hooks))

    kinds = set[Any]()
    hooked()
    (kind,) = kinds
    gc.collect()
    before = sys.getrefcount(kind)
    for _ in range(100):
        hooked()
    gc.collect()
    assert sys.getrefcount(kind) == before


def test_the_fast_path_of_an_encoder_is_taken() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = bits(encoder(x))
        inner = list[object]()
        for it in encoder.layers:
            hook_calls(it, lambda *_: None, lambda *_, failed: None)
            hook_calls(it.linear1, lambda *_: inner.append(1))
        assert bits(encoder(x)) == expected
    assert inner == []


# ---------------------------------------------------------------------- managed models


WAYS: dict[str, dict[str, Any]] = {
    "state": {},
    "weights": {"streams_weights": True},
    "gradients": {"copied_gradients": frozenset({"layers.0", "layers.1"})},
}


def hooked_net() -> Net:
    """A model with hooks of the program."""
    net = Net()
    net.layers[0].register_forward_hook(doubled)
    net.head.register_forward_pre_hook(added)
    return net


def compare(change: Callable[[Program], Any], way: str, **program: Any) -> None:
    """What a program makes of its model between steps, against a stock run, and the training."""

    def change_and_see(run: Program) -> None:
        run.seen.append(change(run))

    stock = Program(None, **program).run(change_and_see)
    managed = Program(LazyLanes, **program, **WAYS[way])
    assert bits(managed.run(change_and_see)) == bits(stock)
    assert managed.training is not None
    assert managed.training.counts.streamed > 0


def own_hooks(model: nn.Module) -> list[Any]:
    """All hooks of a model, and the classes of their dictionaries."""
    return [
        (name, value, type(value) is OrderedDict)
        for module in model.modules()
        for name, value in vars(module).items()
        if name.endswith("_hooks")
    ]


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_has_the_hooks_of_the_program_alone(way: str) -> None:
    def look(run: Program) -> Any:
        made = copy.deepcopy(run.model)
        twin = copy.deepcopy(run.optimizer)
        assert {key for key in vars(twin) if "umem" in key} == set()
        assert all(is_plain for _, _, is_plain in own_hooks(made))
        hooks = [hook for _, hooks, _ in own_hooks(made) for hook in hooks.values()]
        assert hooks == [doubled, added]
        x = torch.ones(3, WIDTH)
        return [made(x), [*made.parameters()], [it.grad for it in made.parameters()]]

    compare(look, way, make_model=hooked_net)


LOAD = """
import sys
sys.modules["umem"] = None  # an import of it raises
sys.path.insert(0, sys.argv[1])
import torch
torch.serialization.add_safe_globals([torch.nn.Sequential, torch.nn.Linear, set])
found = []
for weights_only in (True, False):
    model = torch.load(sys.argv[2], weights_only=weights_only)
    found.append([model(torch.ones(3, {width})), *model.parameters()])
torch.save(found, sys.argv[3])
"""
"""Loads a whole model in a process without umem."""


def plain_net() -> nn.Module:
    """A model of torch's classes, which a process without umem knows."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


@pytest.mark.slow
def test_a_saved_model_loads_where_there_is_no_umem(tmp_path: Path) -> None:
    file, result = tmp_path / "model.pt", tmp_path / "result.pt"

    def save(run: Program) -> Any:
        torch.save(run.model, file)
        if run.is_stock:
            made = [run.model(torch.ones(3, WIDTH)), *map(torch.clone, run.model.parameters())]
            return [made, made]
        run_forked(LOAD.format(width=WIDTH), str(SUPPORT), str(file), str(result))
        return torch.load(result)

    compare(save, "weights", make_model=plain_net)


@pytest.mark.parametrize("way", WAYS)
def test_pickles_are_those_of_stock(way: str) -> None:
    def dump(run: Program) -> Any:
        torch.save(run.model, buffer := io.BytesIO())
        dumped = [pickle.dumps(it) for it in (run.model, run.optimizer)]
        assert not any(b"umem" in it for it in (*dumped, buffer.getvalue()))
        model = pickle.loads(dumped[0])
        state = [*pickle.loads(dumped[1]).state.values()]
        return [model(torch.ones(3, WIDTH)), model.state_dict(), state]

    compare(dump, way, make_model=hooked_net)


def run_model(model: nn.Module, sent: Any) -> None:
    """What a spawned process does with a model: a function of this file."""
    with torch.no_grad():
        sent.put(model(torch.ones(3, WIDTH)).tolist())


@pytest.mark.slow
def test_a_spawned_process_gets_the_model() -> None:
    context = multiprocessing.get_context("spawn")

    def spawn(run: Program) -> Any:
        if run.is_stock or not run.is_first("spawn"):
            with torch.no_grad():
                return run.model(torch.ones(3, WIDTH)).tolist()
        sent = context.Queue()
        worker = context.Process(target=run_model, args=(run.model, sent))
        worker.start()
        found = sent.get(timeout=120)
        worker.join()
        return found

    compare(spawn, "state", make_model=hooked_net)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "trace",
    [
        torch.jit.script,
        lambda model: torch.jit.trace(model, (torch.ones(2, WIDTH),), check_trace=False),
        torch.fx.symbolic_trace,
    ],
    ids=["script", "trace", "fx"],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_traced_model_is_that_of_stock(trace: Callable[[nn.Module], Any], way: str) -> None:
    def use(run: Program) -> Any:
        if run.training is not None:
            run.training.join()  # scripted code reads weights past the guard
        made = trace(run.model)
        run.extra = made  # it has the weights of the model
        x = torch.ones(3, WIDTH)
        with torch.no_grad():
            return [made(x), [*made.state_dict()]]

    compare(use, way)


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_model_is_that_of_stock(*, strict: bool) -> None:
    def use(run: Program) -> Any:
        x = torch.ones(2, WIDTH)
        made = torch.export.export(run.model, (x,), strict=strict)
        with torch.no_grad():
            return [made.module()(x), made.graph_module.code]

    compare(use, "state", make_model=hooked_net)


# ---------------------------------------------------------------------- graphs


def make_graphed(model: nn.Module, samples: tuple[torch.Tensor, ...]) -> nn.Module:
    """What torch does before a capture, without a GPU."""
    every = (model._backward_hooks, model._forward_hooks, model._forward_pre_hooks)
    assert [len(it) for it in every] == [0, 0, 0]
    result = model(*samples)
    grads = [it for it in model.parameters() if it.requires_grad]
    torch.autograd.grad(result.sum(), grads)
    return model


@pytest.mark.parametrize("way", WAYS)
def test_a_model_is_graphed_in_mid_training(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", graph_with_check(called := []))
    monkeypatch.setattr(torch.cuda.graphs, "make_graphed_callables", None)
    undo = watch_graphing(graphing_begins)

    def graph(run: Program) -> Any:
        if not run.is_first("graph"):
            return None
        if run.training is not None:
            hook_calls(run.model.layers[0], lambda *_: called.append("hook"))
        samples = (torch.ones(2, WIDTH),)
        run.model = torch.cuda.make_graphed_callables(run.model, samples)
        assert len(graphed_tensors(run.model)) == len([*run.model.parameters()])
        if run.training is None:
            return None
        assert not run.training.step.is_under_way
        addresses = [it.data_ptr() for it in run.model.parameters()]
        for _ in range(2):
            run.step()
            # A replay reads what is there.
            assert not run.training.step.is_under_way
            assert [it.data_ptr() for it in run.model.parameters()] == addresses
        return None

    try:
        run = Program(LazyLanes, **WAYS[way])
        run.run(graph)
        stock = Program(None)
        stock.run(step_twice)
        assert bits([*run.model.parameters()]) == bits([*stock.model.parameters()])
        assert called.count("graphed") == 1
        assert called.index("hook") > called.index("graphed")
    finally:
        undo()


def step_twice(run: Program) -> None:
    if run.is_first("graph"):
        run.step()
        run.step()


def graph_with_check(called: list[str]) -> Callable[..., Any]:
    """Stands in for torch's function, and notes that it was called."""

    def make(model: nn.Module, samples: tuple[torch.Tensor, ...]) -> nn.Module:
        made = make_graphed(model, samples)
        called.append("graphed")
        return made

    return make
