"""The activation store under autograd: checks, threads, ends of graphs, other code's hooks."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from activation_chain import (
    KIB,
    TENSOR_BYTES,
    LazyMover,
    chain,
    gradient,
    group,
    make_input,
    released,
    saved,
)
from torch.utils.checkpoint import checkpoint

from umem.offloading import ActivationStore, Mover
from umem.runtime.torch_hooks import saved_tensors

MIB = 1 << 20


@pytest.fixture(params=[Mover, LazyMover])
def store(request: pytest.FixtureRequest) -> ActivationStore:
    return ActivationStore("cpu", request.param(), min_bytes=KIB)


@pytest.fixture
def expected() -> torch.Tensor:
    x = make_input()
    return gradient(chain(x), x)


class TestAutograd:
    @pytest.mark.parametrize("verbs", ["", "send", "send release", "send release fetch"])
    def test_in_place_modification_raises(self, store: ActivationStore, verbs: str) -> None:
        x = make_input()
        with group(store, "a"):
            y = (x * 2).exp()
            z = y.sin()
        for verb in verbs.split():
            getattr(store, verb)("a")
        y.add_(1)
        with pytest.raises(
            RuntimeError, match=r"inplace.*FloatTensor \[64, 64\]\] is at version 1"
        ):
            gradient(z, x)

    def test_in_place_changes_of_a_tensor_that_stays_raise(self, store: ActivationStore) -> None:
        x = torch.ones(3, requires_grad=True)
        with group(store, "a"):
            y = x.exp()
        y.mul_(2)
        with pytest.raises(RuntimeError, match="is at version 1; expected version 0 instead"):
            gradient(y, x)

    def test_retained_graph(self, store: ActivationStore, expected: torch.Tensor) -> None:
        x = make_input()
        y = saved(store, "a", x)
        store.send("a")
        for _ in range(3):
            store.release("a")
            store.fetch("a")
            assert torch.equal(gradient(y, x, retain_graph=True), expected)
        counts = store.statistics
        assert (counts.tensors_out, counts.tensors_in, counts.late_fetches) == (3, 9, 0)

    def test_double_backward(self, store: ActivationStore) -> None:
        def second(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            first = torch.autograd.grad(y.sum(), x, create_graph=True)[0]
            return gradient(first.square(), x)

        x = make_input()
        wanted = second(chain(x), x)
        y = released(store, "a", x)
        assert torch.equal(second(y, x), wanted)

    def test_custom_functions(self, store: ActivationStore) -> None:
        class Cube(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                square = x * x
                ctx.save_for_backward(x, square)
                return square * x

            @staticmethod
            def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
                _, square = ctx.saved_tensors
                return gradients[0] * 3 * square

        x = make_input()
        with group(store, "a"):
            cube: Any = Cube.apply
            y = cube(x)
        assert store.send("a") == TENSOR_BYTES
        store.release("a")
        assert torch.equal(gradient(y, x), 3 * (x * x))

    def test_backward_in_a_thread(self, store: ActivationStore, expected: torch.Tensor) -> None:
        x = make_input()
        y = released(store, "a", x)
        found: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: found.append(gradient(y, x)))
        thread.start()
        thread.join()
        assert torch.equal(found[0], expected)

    def test_many_threads_at_once(self, expected: torch.Tensor) -> None:
        store = ActivationStore("cpu", LazyMover(), min_bytes=KIB)
        wrong: list[int] = []

        def train(number: int) -> None:
            for step in range(20):
                x = make_input()
                y = saved(store, (number, step), x)
                store.send((number, step))
                store.release((number, step))
                store.fetch((number, step), [step % 5])
                if not torch.equal(gradient(y, x), expected):
                    wrong.append(step)

        threads = [threading.Thread(target=train, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert store.statistics.tensors_out == 4 * 20 * 3


class TestEndsOfGraphs:
    """A graph that ends gives back all memory."""

    @pytest.mark.parametrize(
        "verbs", ["", "send", "send release", "send release fetch", "send release fetch release"]
    )
    def test_a_graph_without_a_backward_pass(self, store: ActivationStore, verbs: str) -> None:
        x = make_input()
        held = []
        for _ in range(5):
            with group(store, "a"):
                inner = (x * 2).exp()
                y = inner.sin()
            held.append(weakref.ref(inner.untyped_storage()))
            for verb in verbs.split():
                getattr(store, verb)("a")
            del inner, y
        store.send("nothing")  # memory with a copy under way goes with the next call
        assert [storage() for storage in held] == [None] * 5
        pinned = store.statistics.pinned_bytes
        assert pinned <= 2 * MIB, "the buffer is used again"
        store.close()
        assert store.statistics.pinned_bytes == 0
        assert store.statistics.peak_pinned_bytes == pinned

    @pytest.mark.parametrize(("verbs", "waits"), [("send", 1), ("send release fetch", 2)])
    def test_memory_of_a_copy_under_way_outlives_the_graph(self, verbs: str, waits: int) -> None:
        mover = LazyMover()
        store = ActivationStore("cpu", mover, min_bytes=KIB)
        with group(store, "a"):
            y = make_input().exp()
        storage = weakref.ref(y.untyped_storage())
        z = y.sum()
        del y
        for verb in verbs.split():
            getattr(store, verb)("a")
        del z
        assert (storage() is None) == ("release" in verbs)
        assert mover.waits == waits - 1
        store.send("nothing")
        assert storage() is None
        assert mover.waits == waits

    def test_no_cycle_keeps_the_graph(self, store: ActivationStore) -> None:
        gc.collect()
        gc.disable()
        try:
            with group(store, "a"):
                # Both save their own output: the first leaves, the second stays.
                outputs = [make_input().exp(), torch.ones(3, requires_grad=True).exp()]
            storages = [weakref.ref(output.untyped_storage()) for output in outputs]
            del outputs
            assert [storage() for storage in storages] == [None, None]
        finally:
            gc.enable()

    def test_the_backward_pass_frees_all_memory(self, store: ActivationStore) -> None:
        x = make_input()
        y = released(store, "a", x)
        store.fetch("a")
        gradient(y, x)
        # The graph still exists, but its saved tensors are gone.
        assert store.release("a") == store.fetch("a") == 0

    def test_an_exception_within(self, store: ActivationStore, expected: torch.Tensor) -> None:
        def fail() -> None:
            store.open_group("a")
            try:
                chain(make_input())
                raise ValueError("in the model")
            finally:
                store.close_group()

        with pytest.raises(ValueError, match="in the model"):
            fail()
        assert store.send("a") == 0
        x = make_input()
        y = saved(store, "a", x)
        assert store.send("a") == 3 * TENSOR_BYTES
        assert torch.equal(gradient(y, x), expected)

    def test_buffers_are_used_from_step_to_step(self, store: ActivationStore) -> None:
        x = make_input()
        for step in range(4):
            y = released(store, step, x)
            gradient(y, x)
        assert store.statistics.pinned_bytes == 3 * 2 * MIB

    def test_a_closed_store_is_empty(self, store: ActivationStore, expected: torch.Tensor) -> None:
        x = make_input()
        y = released(store, "a", x)
        store.close()
        assert store.statistics.pinned_bytes == 3 * 2 * MIB
        assert torch.equal(gradient(y, x), expected)
        del y
        assert store.statistics.pinned_bytes == 0

    def test_the_graph_outlives_the_store(self, expected: torch.Tensor) -> None:
        store = ActivationStore("cpu", LazyMover(), min_bytes=KIB)
        x = make_input()
        y = released(store, "a", x)
        store.close()
        del store
        assert torch.equal(gradient(y, x), expected)


class TestHooksOfOtherCode:
    def test_stays_out_under_other_hooks(self, store: ActivationStore) -> None:
        x = make_input()
        packed: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            packed.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            assert not store.open_group("a")
            y = chain(x)
            store.close_group()
        assert len(packed) == 5
        assert store.send("a") == 0
        assert y.requires_grad

    def test_a_checkpoint_in_a_group(self, store: ActivationStore, expected: torch.Tensor) -> None:
        x = make_input()
        with group(store, "a"):
            y = checkpoint(lambda x: (x * 2).exp(), x, use_reentrant=False)
            z = (y.sin() * y).tanh()
        assert store.send("a") == 3 * TENSOR_BYTES
        store.release("a")
        assert torch.equal(gradient(z, x), expected)

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_a_group_inside_a_checkpoint(
        self, store: ActivationStore, expected: torch.Tensor, use_reentrant: bool
    ) -> None:
        x = make_input()
        y = checkpoint(lambda x: saved(store, "a", x), x, use_reentrant=use_reentrant)
        assert store.send("a") == 0
        y.sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, expected)

    def test_groups_may_nest(self, store: ActivationStore, expected: torch.Tensor) -> None:
        x = make_input()
        with group(store, "outer"):
            y = (x * 2).exp()
            with group(store, "inner") as is_open:
                assert is_open
                y = y.sin() * y
            z = y.tanh()
        assert store.send("inner") == 2 * TENSOR_BYTES
        assert store.send("outer") == TENSOR_BYTES
        for key in ("inner", "outer"):
            store.release(key)
        assert torch.equal(gradient(z, x), expected)

    def test_other_hooks_that_outlast_a_group(
        self, store: ActivationStore, expected: torch.Tensor
    ) -> None:
        others = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
        with group(store, "a"):
            others.__enter__()
        others.__exit__()
        x = make_input()
        assert store.open_group("b"), "those of the first group are gone"
        y = chain(x)
        store.close_group()
        assert store.send("b") == 3 * TENSOR_BYTES
        assert torch.equal(gradient(y, x), expected)
        assert saved_tensors.innermost() is None

    def test_without_gradients(self, store: ActivationStore) -> None:
        with torch.no_grad():
            assert not store.open_group("a")
            store.close_group()
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            assert not store.open_group("a")
            store.close_group()
        assert store.open_group("a")
        store.close_group()
