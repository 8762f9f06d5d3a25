"""Whatever uses a guarded tensor waits for its update, and memory of several tensors is found."""

from __future__ import annotations

import copy
import ctypes
import functools
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from fresh_attributes import forget_guards
from late_updates import LateUpdate
from torch import nn
from torch.multiprocessing import reductions

from umem import torch_compat
from umem.runtime.aliases import has_alias
from umem.runtime.guard import Guard, guard_of, settle
from umem.runtime.torch_hooks.memory_access import watch_exports
from umem.runtime.unguarded import PastGuards
from umem.torch_compat import storage_address

ALIASES: dict[str, Callable[[torch.Tensor], object]] = {
    "detached": torch.Tensor.detach,
    "a view": lambda tensor: tensor[1:],
    "other metadata": lambda tensor: tensor.data.t(),
    "a parameter": nn.Parameter,
}


@pytest.mark.parametrize("with_objects", [(), (0,), (1,), (0, 1, 2)])
def test_only_memory_of_one_tensor_alone_has_no_alias(with_objects: tuple[int, ...]) -> None:
    tensors = [torch.zeros(4, 4) for _ in range(3)]
    for number in with_objects:
        tensors[number].untyped_storage()
    assert not has_alias(tensors)
    for tensor in tensors:
        for make in ALIASES.values():
            alias = make(tensor)
            assert has_alias(tensors)
            assert has_alias([tensor])
            del alias
            assert not has_alias(tensors)


def test_what_has_no_storage_may_be_shared() -> None:
    assert has_alias([torch.zeros(4, 4).to_sparse()])


@pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this torch is built without torch.distributed"
)
@pytest.mark.parametrize("name", ["allreduce", "broadcast", "_allgather_base", "send", "alltoall"])
def test_a_collective_that_a_backend_is_asked_for_is_a_use(name: str) -> None:
    uses: list[None] = []
    guard, tensor = Guard(lambda: uses.append(None)), torch.ones(2)
    guard.hold([tensor])
    with pytest.raises(TypeError, match="incompatible function arguments"):
        getattr(torch_compat.ProcessGroupBackend, name)(None, [tensor])
    assert uses
    guard.release()


# ------------------------------------------------------------------ what is no operator


top: Any = torch
exports: Any = torch.utils.dlpack
nothing: Any = functools.partial(torch.zeros, 0)


def at(address: int) -> Any:
    return np.ctypeslib.as_array((ctypes.c_float * 4).from_address(address)).copy()


def stored(storage: Any) -> Any:
    return nothing().set_(storage).clone()


def saved(tensor: torch.Tensor) -> Any:
    file = io.BytesIO()
    torch.save({"weight": tensor}, file)
    file.seek(0)
    return torch.load(file)["weight"]


def taken_back(capsule: Any) -> Any:
    return torch.utils.dlpack.from_dlpack(capsule).clone()


def copied_optimizer(tensor: torch.Tensor) -> Any:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(4))])
    optimizer.state[optimizer.param_groups[0]["params"][0]]["momentum_buffer"] = tensor
    (state,) = copy.deepcopy(optimizer).state.values()
    return state["momentum_buffer"]


def sent(tensor: torch.Tensor) -> Any:
    rebuild, arguments = reductions.reduce_tensor(tensor)
    return rebuild(*arguments)


ROUTES: dict[str, Callable[[torch.Tensor], Any]] = {
    "data_ptr": lambda it: at(it.data_ptr()),
    "untyped_storage": lambda it: stored(it.untyped_storage()),
    "storage": lambda it: stored(it.storage().untyped()),
    "data": lambda it: it.data.numpy(),
    "__dlpack__": lambda it: taken_back(it.__dlpack__()),
    "from_dlpack": lambda it: np.from_dlpack(it),
    "utils.dlpack.to_dlpack": lambda it: taken_back(exports.to_dlpack(it)),
    "to_dlpack": lambda it: taken_back(top.to_dlpack(it)),
    "save": saved,
    "pickle": lambda it: pickle.loads(pickle.dumps(it)),
    "copy": lambda it: copy.copy(it).clone(),
    "deepcopy": copy.deepcopy,
    "share_memory_": lambda it: it.share_memory_().clone(),
    "numpy": lambda it: it.numpy().copy(),
    "asarray": lambda it: np.asarray(it).copy(),
    "another process": sent,
    "tolist": torch.Tensor.tolist,
    "set_": lambda it: nothing().set_(it).clone(),
}


@pytest.mark.filterwarnings("ignore:TypedStorage")
@pytest.mark.parametrize(
    "route",
    [
        *(pytest.param(route, id=name) for name, route in ROUTES.items()),
        pytest.param(copied_optimizer, marks=pytest.mark.slow),  # imports the compiler
    ],
)
def test_ways_past_operators_wait(route: Callable[[torch.Tensor], Any]) -> None:
    tensor, plain = torch.arange(4.0), torch.arange(4.0) + 1
    late = LateUpdate([tensor])
    found = route(tensor)
    assert late.uses == 1
    assert np.array_equal(np.asarray(found), np.asarray(route(plain)))


def test_memory_that_a_tensor_gives_up_is_updated_before() -> None:
    tensor = torch.zeros(4)
    memory = tensor.numpy()
    late = LateUpdate([tensor])
    tensor.data = torch.zeros(4)
    assert late.uses == 1
    assert memory.tolist() == [1.0] * 4
    assert tensor.tolist() == [0.0] * 4


def test_an_interface_for_cuda_waits_and_raises_as_torchs_own() -> None:
    tensor = torch.zeros(4)
    late = LateUpdate([tensor])
    with pytest.raises(AttributeError, match="__cuda_array_interface__"):
        _ = tensor.__cuda_array_interface__
    assert late.uses == 1
    assert not hasattr(torch.zeros(4), "__cuda_array_interface__")


def test_torch_is_as_it_was_when_nothing_is_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_guards(monkeypatch)
    watch_exports()  # these stay
    owners: list[Any] = [torch.Tensor, torch.jit.ScriptFunction]
    before = [dict(vars(it)) for it in owners]
    guards = [Guard(lambda: None) for _ in range(2)]
    tensors = [torch.zeros(4) for _ in guards]
    for guard, tensor in zip(guards, tensors, strict=True):
        guard.hold([tensor])
    assert [dict(vars(it)) for it in owners] != before
    guards[0].release()
    assert [dict(vars(it)) for it in owners] != before
    guards[1].release()
    for owner, attributes in zip(owners, before, strict=True):
        assert vars(owner).keys() == attributes.keys()
        assert all(vars(owner)[name] is it for name, it in attributes.items())


# ------------------------------------------------------------------ guards and threads


def test_two_threads_that_use_a_tensor_both_wait() -> None:
    tensor = torch.zeros(4)
    both_wait, may_go_on = threading.Barrier(3, timeout=60), threading.Event()

    def update() -> None:
        both_wait.wait()
        may_go_on.wait()

    guard = Guard(update)
    guard.hold([tensor])
    found: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(tensor + 0)) for _ in range(2)]
    for thread in threads:
        thread.start()
    both_wait.wait()
    with PastGuards():
        tensor.fill_(1)
    assert found == []
    may_go_on.set()
    for thread in threads:
        thread.join()
    guard.release()
    assert [it.tolist() for it in found] == [[1.0] * 4] * 2


def test_a_use_in_the_update_itself_does_not_wait() -> None:
    tensor = torch.zeros(4)

    def update() -> None:
        tensor.add_(1)

    guard = Guard(update)
    guard.hold([tensor])
    found = tensor + 0
    guard.release()
    assert found.tolist() == [1.0] * 4


def test_a_second_guard_does_not_get_what_another_has() -> None:
    tensor = torch.zeros(4)
    first, second = LateUpdate([tensor]), Guard(lambda: None)
    second.hold([tensor])
    assert guard_of(tensor) is first
    assert not second.is_on
    second.release()
    assert guard_of(tensor) is first
    tensor.sum()
    assert (guard_of(tensor), first.uses) == (None, 1)


def test_a_use_waits_for_a_guard_that_another_one_hands_the_tensor_to() -> None:
    uses: list[str] = []
    tensor = torch.ones(2)

    def hand_over() -> None:
        uses.append("first")
        first.release()
        second.hold([tensor])

    first, second = Guard(hand_over), Guard(lambda: uses.append("second"))
    for use in (lambda: tensor.add_(1), lambda: settle([tensor])):
        second.release()
        first.hold([tensor])
        use()
    assert uses == ["first", "second"] * 2
    second.release()


def test_a_guard_of_a_tensor_that_is_gone_is_not_asked() -> None:
    """Another storage may have its storage's address."""
    asked: list[str] = []
    gone = Guard(lambda: asked.append("gone"))
    others: list[torch.Tensor] = []
    place = None
    while not others or storage_address(others[-1]) != place:
        tensor: Any = torch.ones(2)
        place = storage_address(tensor)
        gone.watch([tensor])
        del tensor
        others.append(torch.ones(2))  # most often where that was
        assert len(others) < 1000
    moved = torch.zeros(2)

    def move() -> None:
        guard.release()
        moved.data = others[-1]

    guard = Guard(move)
    guard.hold([moved])
    assert moved.sum() == 2
    assert asked == []
