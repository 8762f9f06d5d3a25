"""The activation store: what leaves, what stays, and that every bit comes back."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from umem.activations import ActivationStore, HostBuffer, HostMover, OffloadError
from umem.activations._host_pool import HostPool

KIB, MIB = 1 << 10, 1 << 20
SIDE = 64
TENSOR_BYTES = SIDE * SIDE * 4

Mark = list[Any]


class LazyMover(HostMover):
    """Copies at the last moment allowed: when a stream, or the host, waits for the mark.

    Until then what is to arrive is NaN, and what is to leave must still be there.
    """

    def __init__(self) -> None:
        self.waits = 0

    def copy_out(
        self, pairs: Sequence[tuple[torch.UntypedStorage, HostBuffer]], stream: Any
    ) -> Any:
        mark: Mark = []
        for storage, buffer in pairs:
            before, buffer.mark = buffer.mark, mark
            mark.append((weakref.ref(storage), storage._cdata, buffer.memory, before))
        return mark

    def copy_in(
        self, buffers: Sequence[tuple[HostBuffer, int]], stream: Any
    ) -> list[tuple[torch.UntypedStorage, Any]]:
        moved: list[tuple[torch.UntypedStorage, Any]] = []
        for buffer, size_bytes in buffers:
            block = torch.full((size_bytes,), 0xFF, dtype=torch.uint8)
            mark: Mark = [(block, buffer.memory[:size_bytes], buffer.mark)]
            buffer.mark = mark
            moved.append((block.untyped_storage(), mark))
        return moved

    def wait(self, stream: Any, mark: Mark) -> None:
        self.waits += 1
        self.finish(mark)

    def finish(self, mark: Mark) -> None:
        while mark:
            *what, before = mark.pop()
            if before:
                self.finish(before)
            if isinstance(what[0], torch.Tensor):
                what[0].copy_(what[1])
            else:
                storage = what[0]()
                assert storage is not None, "dropped before it was copied"
                source = torch.empty(0, dtype=torch.uint8).set_(storage)
                what[2][: source.numel()].copy_(source)


@pytest.fixture(params=[HostMover, LazyMover])
def store(request: pytest.FixtureRequest) -> ActivationStore:
    return ActivationStore("cpu", request.param(), min_bytes=KIB)


def make_input() -> torch.Tensor:
    return torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(0), requires_grad=True)


def chain(x: torch.Tensor) -> torch.Tensor:
    """Saves four tensors, each for one node but the second for two."""
    y = (x * 2).exp()
    return (y.sin() * y).tanh()


def saved(
    store: ActivationStore, key: object, x: torch.Tensor, chosen: set[int] | None = None
) -> torch.Tensor:
    store.open_group(key, chosen)
    try:
        return chain(x)
    finally:
        store.close_group()


def gradient(y: torch.Tensor, x: torch.Tensor, **options: Any) -> torch.Tensor:
    return torch.autograd.grad(y.sum(), x, **options)[0]


@pytest.fixture
def expected() -> torch.Tensor:
    x = make_input()
    return gradient(chain(x), x)


class TestVerbs:
    @pytest.mark.parametrize(
        ("verbs", "in_tensors", "late"),
        [
            ("", 0, 0),
            ("send", 0, 0),
            ("release", 0, 0),
            ("send release", 3, 3),
            ("send fetch", 0, 0),
            ("send release fetch", 3, 0),
            ("send send release release fetch fetch", 3, 0),
            ("send release fetch release fetch", 6, 0),
            ("send release fetch release", 6, 3),
        ],
    )
    def test_gradients_are_equal_to_the_bit(
        self,
        store: ActivationStore,
        expected: torch.Tensor,
        verbs: str,
        in_tensors: int,
        late: int,
    ) -> None:
        x = make_input()
        y = saved(store, "a", x)
        for verb in verbs.split():
            getattr(store, verb)("a")
        assert torch.equal(gradient(y, x), expected)
        told = store.statistics
        assert told.tensors_out == (3 if "send" in verbs else 0)
        assert told.bytes_out == told.tensors_out * TENSOR_BYTES
        assert (told.tensors_in, told.bytes_in) == (in_tensors, in_tensors * TENSOR_BYTES)
        assert told.late_fetches == late

    def test_verbs_return_bytes(self, store: ActivationStore) -> None:
        x = make_input()
        y = saved(store, "a", x)
        verbs = (store.send, store.send, store.release, store.release, store.fetch, store.fetch)
        moved = [verb("a") for verb in verbs]
        all_bytes = 3 * TENSOR_BYTES
        assert moved == [all_bytes, 0, all_bytes, 0, all_bytes, 0]
        assert y.requires_grad
        assert [verb("unknown") for verb in verbs] == [0] * 6

    def test_release_lets_go_of_the_memory(self, store: ActivationStore) -> None:
        x = make_input()
        held: list[weakref.ref[torch.UntypedStorage]] = []
        store.open_group("a")
        inner = (x * 2).exp()
        held.append(weakref.ref(inner.untyped_storage()))
        y = inner.sin()
        store.close_group()
        del inner
        assert held[0]() is not None
        store.send("a")
        assert held[0]() is not None
        store.release("a")
        assert held[0]() is None
        assert torch.equal(gradient(y, x), gradient((x * 2).exp().sin(), x))

    def test_ordinals(self, store: ActivationStore, expected: torch.Tensor) -> None:
        x = make_input()
        y = saved(store, "a", x)
        sizes = [store.send("a", [ordinal]) // TENSOR_BYTES for ordinal in range(6)]
        # Of exp: its output, then as input of sin; of sin's result and exp's in their product.
        assert sum(sizes) == 3
        assert store.release("a", [0]) == TENSOR_BYTES
        assert store.fetch("a", [0, 99]) == TENSOR_BYTES
        assert torch.equal(gradient(y, x), expected)

    def test_only_the_chosen_leave(self, store: ActivationStore, expected: torch.Tensor) -> None:
        x = make_input()
        y = saved(store, "a", x, chosen={4})
        assert store.send("a") == TENSOR_BYTES
        assert store.release("a") == TENSOR_BYTES
        assert torch.equal(gradient(y, x), expected)

    def test_ordinals_count_every_tensor(self, store: ActivationStore) -> None:
        small = torch.ones(2, requires_grad=True)
        x = make_input()
        store.open_group("a", chosen={1})
        first = small.exp()
        second = x.exp()
        store.close_group()
        assert store.send("a") == TENSOR_BYTES
        assert store.send("a", [0]) == 0
        assert first.requires_grad
        assert second.requires_grad

    def test_a_new_group_takes_the_name(
        self, store: ActivationStore, expected: torch.Tensor
    ) -> None:
        x = make_input()
        first = saved(store, "a", x)
        store.send("a")
        store.release("a")
        second = saved(store, "a", x)
        assert store.fetch("a") == 0
        assert torch.equal(gradient(first, x), expected)
        assert store.statistics.late_fetches == 3
        assert torch.equal(gradient(second, x), expected)
        assert store.statistics.late_fetches == 3


class TestSharedStorage:
    def test_views_are_one_entry(self, store: ActivationStore) -> None:
        x = make_input()

        def compute() -> torch.Tensor:
            y = x * 3
            halves = y[: SIDE // 2], y[SIDE // 2 :]
            return (halves[0] * halves[1]).sum() + (y.t()[1:, ::2] ** 2).sum()

        store.open_group("a")
        z = compute()
        store.close_group()
        assert store.send("a") == TENSOR_BYTES
        assert store.release("a") == TENSOR_BYTES
        assert torch.equal(gradient(z, x), gradient(compute(), x))
        assert store.statistics.tensors_in == 1

    def test_two_groups_share_one_copy(self, store: ActivationStore) -> None:
        x = make_input()
        between = x * 3
        results = []
        for key in "ab":
            store.open_group(key)
            results.append(between.square())
            store.close_group()
        wanted = gradient(sum(results, torch.zeros(())), x, retain_graph=True)
        del between
        assert [store.send(key) for key in "ab"] == [TENSOR_BYTES, 0]
        # The second group still wants it.
        assert [store.release(key) for key in "ab"] == [0, TENSOR_BYTES]
        assert [store.fetch(key) for key in "ba"] == [TENSOR_BYTES, 0]
        assert torch.equal(gradient(sum(results, torch.zeros(())), x), wanted)

    def test_a_group_that_is_gone_wants_nothing(self, store: ActivationStore) -> None:
        x = make_input()
        between = x * 3
        results = []
        for key in "ab":
            store.open_group(key)
            results.append(between.square())
            store.close_group()
        results.pop()
        store.send("a")
        assert store.release("a") == TENSOR_BYTES
        assert results[0].requires_grad

    def test_modified_between_two_groups(self, store: ActivationStore) -> None:
        x = make_input()
        buffer = torch.zeros(SIDE, SIDE)
        products = []
        for key, value in (("a", 1.0), ("b", 2.0)):
            buffer.fill_(value)
            store.open_group(key)
            products.append(x * buffer)
            store.close_group()
            store.send(key)
        store.release("b")
        assert torch.equal(gradient(products[1], x), torch.full_like(x, 2))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradient(products[0], x)


class TestWhatStays:
    def sent(self, store: ActivationStore, tensor: torch.Tensor, other: torch.Tensor) -> int:
        """Bytes that leave when a product saves a tensor."""
        store.open_group("a")
        product = other.requires_grad_() * tensor
        store.close_group()
        sent = store.send("a")
        assert product.requires_grad
        return sent

    def test_small_tensors(self, store: ActivationStore) -> None:
        assert self.sent(store, torch.ones(KIB // 4 - 1), torch.ones(())) == 0
        assert self.sent(store, torch.ones(KIB // 4), torch.ones(())) == KIB

    def test_a_small_view_of_a_large_storage_leaves(self, store: ActivationStore) -> None:
        assert self.sent(store, torch.ones(SIDE, SIDE)[3:4], torch.ones(())) == TENSOR_BYTES

    def test_parameters_and_their_views(self, store: ActivationStore) -> None:
        weight = nn.Parameter(torch.ones(SIDE, SIDE), requires_grad=False)
        for stays in (weight, weight.t(), weight[1:]):
            assert self.sent(store, stays, torch.ones(())) == 0

    def test_leaves_with_gradients(self, store: ActivationStore) -> None:
        x = make_input()
        for stays in (x, x.t()):
            assert self.sent(store, stays, torch.ones(())) == 0

    def test_what_is_named(self, store: ActivationStore) -> None:
        table, other = torch.ones(SIDE, SIDE), torch.ones(SIDE, SIDE)
        store.keep([table, torch.ones(3).to_sparse()])
        assert self.sent(store, table.t(), torch.ones(())) == 0
        assert self.sent(store, other, torch.ones(())) == TENSOR_BYTES
        store.keep([])
        assert self.sent(store, table, torch.ones(())) == TENSOR_BYTES

    def test_what_is_more_than_numbers(self, store: ActivationStore) -> None:
        class Mine(torch.Tensor):
            pass

        mine = torch.ones(SIDE, SIDE).as_subclass(Mine)
        conjugate = torch.ones(SIDE, SIDE, dtype=torch.complex64).conj()
        nested = torch.nested.nested_tensor([torch.ones(SIDE, SIDE)])
        for stays in (mine, conjugate):
            assert self.sent(store, stays, torch.ones(())) == 0
        store.open_group("a")
        product = nested.detach().requires_grad_() * nested
        sparse = torch.sparse.mm(torch.eye(SIDE).to_sparse(), make_input())
        store.close_group()
        assert store.send("a") == 0
        assert product.requires_grad
        assert sparse.requires_grad

    def test_other_devices(self, store: ActivationStore) -> None:
        meta = torch.ones(SIDE, SIDE, device="meta")
        assert self.sent(store, meta, torch.ones(SIDE, SIDE, device="meta")) == 0

    def test_a_storage_that_was_resized(self, store: ActivationStore) -> None:
        gathered = torch.ones(SIDE, SIDE)
        factor = torch.ones((), requires_grad=True)
        store.open_group("a")
        product = factor * gathered
        store.close_group()
        gathered.untyped_storage().resize_(0)
        assert store.send("a") == store.release("a") == 0
        gathered.untyped_storage().resize_(TENSOR_BYTES)
        gathered.data.fill_(2)
        assert gradient(product, factor).item() == 2 * SIDE * SIDE


class TestAutograd:
    @pytest.mark.parametrize("verbs", ["", "send", "send release", "send release fetch"])
    def test_in_place_modification_raises(self, store: ActivationStore, verbs: str) -> None:
        x = make_input()
        store.open_group("a")
        y = (x * 2).exp()
        z = y.sin()
        store.close_group()
        for verb in verbs.split():
            getattr(store, verb)("a")
        y.add_(1)
        with pytest.raises(
            RuntimeError, match=r"inplace.*FloatTensor \[64, 64\]\] is at version 1"
        ):
            gradient(z, x)

    def test_in_place_modification_of_what_stays_raises(self, store: ActivationStore) -> None:
        x = torch.ones(3, requires_grad=True)
        store.open_group("a")
        y = x.exp()
        store.close_group()
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
        told = store.statistics
        assert (told.tensors_out, told.tensors_in, told.late_fetches) == (3, 9, 0)

    def test_double_backward(self, store: ActivationStore) -> None:
        def second(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            first = torch.autograd.grad(y.sum(), x, create_graph=True)[0]
            return gradient(first.square(), x)

        x = make_input()
        wanted = second(chain(x), x)
        y = saved(store, "a", x)
        store.send("a")
        store.release("a")
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
        store.open_group("a")
        cube: Any = Cube.apply
        y = cube(x)
        store.close_group()
        assert store.send("a") == TENSOR_BYTES
        store.release("a")
        assert torch.equal(gradient(y, x), 3 * (x * x))

    def test_backward_in_another_thread(
        self, store: ActivationStore, expected: torch.Tensor
    ) -> None:
        x = make_input()
        y = saved(store, "a", x)
        store.send("a")
        store.release("a")
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


class TestEnds:
    """Graphs that end without a backward pass give everything back."""

    @pytest.mark.parametrize(
        "verbs", ["", "send", "send release", "send release fetch", "send release fetch release"]
    )
    def test_a_graph_that_is_never_run(self, store: ActivationStore, verbs: str) -> None:
        x = make_input()
        held = []
        for _ in range(5):
            store.open_group("a")
            inner = (x * 2).exp()
            y = inner.sin()
            store.close_group()
            held.append(weakref.ref(inner.untyped_storage()))
            for verb in verbs.split():
                getattr(store, verb)("a")
            del inner, y
        store.send("nothing")  # memory that a copy was at work on goes with the next verb
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
        store.open_group("a")
        y = make_input().exp()
        store.close_group()
        storage = weakref.ref(y.untyped_storage())
        z = y.view(-1)[0]
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
            store.open_group("a")
            # Both save their own output: the first leaves, the second stays.
            outputs = [make_input().exp(), torch.ones(3, requires_grad=True).exp()]
            store.close_group()
            storages = [weakref.ref(output.untyped_storage()) for output in outputs]
            del outputs
            assert [storage() for storage in storages] == [None, None]
        finally:
            gc.enable()

    def test_memory_goes_as_the_backward_pass_goes(self, store: ActivationStore) -> None:
        x = make_input()
        y = saved(store, "a", x)
        store.send("a")
        store.release("a")
        store.fetch("a")
        gradient(y, x)
        # The graph is there, and has nothing any more.
        assert store.release("a") == store.fetch("a") == 0

    def test_an_exception_in_the_middle(
        self, store: ActivationStore, expected: torch.Tensor
    ) -> None:
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
            y = saved(store, step, x)
            store.send(step)
            store.release(step)
            gradient(y, x)
        assert store.statistics.pinned_bytes == 3 * 2 * MIB

    def test_the_graph_outlives_the_store(self, expected: torch.Tensor) -> None:
        store = ActivationStore("cpu", LazyMover(), min_bytes=KIB)
        x = make_input()
        y = saved(store, "a", x)
        store.send("a")
        store.release("a")
        store.close()
        del store
        assert torch.equal(gradient(y, x), expected)


class TestOthersHooks:
    def test_stays_out_under_others(self, store: ActivationStore) -> None:
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

    def test_others_inside(self, store: ActivationStore, expected: torch.Tensor) -> None:
        x = make_input()
        store.open_group("a")
        y = checkpoint(lambda x: (x * 2).exp(), x, use_reentrant=False)
        z = (y.sin() * y).tanh()
        store.close_group()
        assert store.send("a") == 3 * TENSOR_BYTES
        store.release("a")
        assert torch.equal(gradient(z, x), expected)

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_inside_a_checkpoint(
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
        store.open_group("outer")
        y = (x * 2).exp()
        assert store.open_group("inner")
        y = y.sin() * y
        store.close_group()
        z = y.tanh()
        store.close_group()
        assert store.send("inner") == 2 * TENSOR_BYTES
        assert store.send("outer") == TENSOR_BYTES
        for key in ("inner", "outer"):
            store.release(key)
        assert torch.equal(gradient(z, x), expected)

    def test_hooks_left_on_top(self, store: ActivationStore, expected: torch.Tensor) -> None:
        others = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
        store.open_group("a")
        others.__enter__()
        store.close_group()
        others.__exit__()
        x = make_input()
        assert store.open_group("b"), "those of the first group are gone"
        y = chain(x)
        store.close_group()
        assert store.send("b") == 3 * TENSOR_BYTES
        assert torch.equal(gradient(y, x), expected)
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None

    def test_without_gradients(self, store: ActivationStore) -> None:
        with torch.no_grad():
            assert not store.open_group("a")
            store.close_group()
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            assert not store.open_group("a")
            store.close_group()
        assert store.open_group("a")
        store.close_group()


class TestHostMemory:
    def test_limit(self, expected: torch.Tensor) -> None:
        store = ActivationStore("cpu", min_bytes=KIB, host_limit_bytes=4 * MIB)
        for step in range(2):
            x = make_input()
            y = saved(store, step, x)
            if step == 0:
                with pytest.warns(RuntimeWarning, match="host_limit_bytes is 4 MiB"):
                    assert store.send(step) == 2 * TENSOR_BYTES
            else:
                store.send(step)  # said once
            store.send(step)
            assert store.release(step) == 2 * TENSOR_BYTES
            assert torch.equal(gradient(y, x), expected)
        told = store.statistics
        assert told.kept_for_lack_of_host_tensors == 2
        assert told.kept_for_lack_of_host_bytes == 2 * TENSOR_BYTES
        assert told.peak_pinned_bytes == 4 * MIB

    def test_reserve(self) -> None:
        available = [10 << 30]
        pool = HostPool(HostMover(), None, lambda: (64 << 30, available[0]))
        buffer = pool.take(MIB)
        assert buffer is not None
        assert buffer.size_bytes == 2 * MIB
        available[0] = (4 << 30) + 2 * MIB - 1  # a sixteenth and a little less than is asked for
        with pytest.warns(RuntimeWarning, match="4 GiB are available, of which 4 GiB stay"):
            assert pool.take(MIB) is None
        available[0] += 1
        assert pool.take(MIB) is not None

    def test_unused_buffers_make_room(self) -> None:
        pool = HostPool(HostMover(), 8 * MIB)
        small = [pool.take(MIB) for _ in range(4)]
        assert pool.held_bytes == 8 * MIB
        for buffer in small:
            assert buffer is not None
            pool.give_back(buffer)
        del small, buffer
        large = pool.take(8 * MIB)
        assert large is not None
        assert (pool.held_bytes, pool.peak_bytes) == (8 * MIB, 8 * MIB)

    def test_somewhat_larger_buffers_serve(self) -> None:
        pool = HostPool(HostMover())
        first = pool.take(6 * MIB)
        assert first is not None
        pool.give_back(first)
        assert pool.take(MIB) is not first, "more than twice the size"
        assert pool.take(4 * MIB) is first

    def test_no_memory(self) -> None:
        pool = HostPool(HostMover(), None, lambda: None)
        with pytest.warns(RuntimeWarning, match="no host memory for"):
            assert pool.take(1 << 60) is None


class TestErrors:
    def test_close_without_open(self, store: ActivationStore) -> None:
        with pytest.raises(OffloadError, match="close_group without an open_group"):
            store.close_group()

    def test_settings(self) -> None:
        with pytest.raises(OffloadError, match="min_bytes is -1: give bytes, 0 or more"):
            ActivationStore("cpu", min_bytes=-1)
        with pytest.raises(OffloadError, match="host_limit_bytes is -5"):
            ActivationStore("cpu", host_limit_bytes=-5)
        with pytest.raises(OffloadError, match="device of type 'meta': umem knows cuda and cpu"):
            ActivationStore("meta")


def test_waits_once_for_copies_of_one_send() -> None:
    mover = LazyMover()
    store = ActivationStore("cpu", mover, min_bytes=KIB)
    x = make_input()
    y = saved(store, "a", x)
    store.send("a")
    store.release("a")
    assert mover.waits == 1
    assert y.requires_grad


def test_cost_of_what_stays(capsys: pytest.CaptureFixture[str]) -> None:
    store = ActivationStore("cpu")
    x = torch.ones(1, requires_grad=True)

    def seconds(calls: int = 2000) -> float:
        begin = time.perf_counter()
        for _ in range(calls):
            x.exp()
        return (time.perf_counter() - begin) / calls

    bare = min(seconds() for _ in range(5))
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        empty = min(seconds() for _ in range(5))
    store.open_group("a")
    hooked = min(seconds() for _ in range(5))
    store.close_group()
    with capsys.disabled():
        print(
            f"\na saved tensor that stays costs {(hooked - bare) * 1e6:.2f} us; with hooks that do "
            f"nothing {(empty - bare) * 1e6:.2f} us"
        )
    assert hooked - bare < 100e-6
