"""The activation store: tensors that leave and stay, and their values after they come back."""

from __future__ import annotations

import ctypes
import warnings
import weakref
from typing import Any

import pytest
import torch
from activation_chain import (
    KIB,
    SIDE,
    TENSOR_BYTES,
    LazyMover,
    chain,
    gradient,
    group,
    make_input,
    released,
    saved,
)
from torch import nn

import umem
from umem.core.errors import OffloadError
from umem.offloading import ActivationStore, Mover
from umem.runtime.torch_hooks import saved_tensors


@pytest.fixture(params=[Mover, LazyMover])
def store(request: pytest.FixtureRequest) -> ActivationStore:
    return ActivationStore("cpu", request.param(), min_bytes=KIB)


@pytest.fixture
def expected() -> torch.Tensor:
    x = make_input()
    return gradient(chain(x), x)


class TestSendReleaseFetch:
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
        self, store: ActivationStore, expected: torch.Tensor, verbs: str, in_tensors: int, late: int
    ) -> None:
        x = make_input()
        y = saved(store, "a", x)
        for verb in verbs.split():
            getattr(store, verb)("a")
        assert torch.equal(gradient(y, x), expected)
        counts = store.statistics
        assert counts.tensors_out == (3 if "send" in verbs else 0)
        assert counts.bytes_out == counts.tensors_out * TENSOR_BYTES
        assert (counts.tensors_in, counts.bytes_in) == (in_tensors, in_tensors * TENSOR_BYTES)
        assert counts.late_fetches == late

    def test_calls_return_moved_bytes(self, store: ActivationStore) -> None:
        x = make_input()
        y = saved(store, "a", x)
        verbs = (store.send, store.send, store.release, store.release, store.fetch, store.fetch)
        moved = [verb("a") for verb in verbs]
        all_bytes = 3 * TENSOR_BYTES
        assert moved == [all_bytes, 0, all_bytes, 0, all_bytes, 0]
        assert y.requires_grad
        assert [verb("unknown") for verb in verbs] == [0] * 6

    def test_release_frees_the_memory(self, store: ActivationStore) -> None:
        x = make_input()
        held: list[weakref.ref[torch.UntypedStorage]] = []
        with group(store, "a"):
            inner = (x * 2).exp()
            held.append(weakref.ref(inner.untyped_storage()))
            y = inner.sin()
        del inner
        assert held[0]() is not None
        store.send("a")
        assert held[0]() is not None
        store.release("a")
        assert held[0]() is None
        assert torch.equal(gradient(y, x), gradient((x * 2).exp().sin(), x))

    @pytest.mark.parametrize("comes_late", [False, True])
    def test_what_a_program_holds_stays(self, store: ActivationStore, comes_late: bool) -> None:
        x = make_input()
        with group(store, "a"):
            inner = (x * 2).exp()
            y = inner.sin()
        if comes_late:
            store.send("a")
        kept, address = umem.hold(inner), inner.data_ptr()
        del inner  # the graph has it still
        assert store.send("a") == 0
        assert store.release("a") == 0
        ctypes.memset(address, 0, TENSOR_BYTES)
        assert torch.equal(gradient(y, x), torch.zeros_like(x))
        kept.release()

    def test_ordinals(self, store: ActivationStore, expected: torch.Tensor) -> None:
        x = make_input()
        y = saved(store, "a", x)
        sizes = [store.send("a", [ordinal]) // TENSOR_BYTES for ordinal in range(6)]
        # Saved: exp's output twice, by exp and sin; both factors of the product; tanh's output.
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
        with group(store, "a", chosen={1}):
            first = small.exp()
            second = x.exp()
        assert store.send("a") == TENSOR_BYTES
        assert store.send("a", [0]) == 0
        assert first.requires_grad
        assert second.requires_grad

    def test_a_new_group_replaces_one_of_the_same_name(
        self, store: ActivationStore, expected: torch.Tensor
    ) -> None:
        x = make_input()
        first = released(store, "a", x)
        second = saved(store, "a", x)
        assert store.fetch("a") == 0
        assert torch.equal(gradient(first, x), expected)
        assert store.statistics.late_fetches == 3
        assert torch.equal(gradient(second, x), expected)
        assert store.statistics.late_fetches == 3


class TestSharedStorage:
    def test_views_are_copied_once(self, store: ActivationStore) -> None:
        x = make_input()

        def compute() -> torch.Tensor:
            y = x * 3
            halves = y[: SIDE // 2], y[SIDE // 2 :]
            return (halves[0] * halves[1]).sum() + (y.t()[1:, ::2] ** 2).sum()

        with group(store, "a"):
            z = compute()
        assert store.send("a") == TENSOR_BYTES
        assert store.release("a") == TENSOR_BYTES
        assert torch.equal(gradient(z, x), gradient(compute(), x))
        assert store.statistics.tensors_in == 1

    def test_two_groups_share_one_copy(self, store: ActivationStore) -> None:
        x = make_input()
        between = x * 3
        results = []
        for key in "ab":
            with group(store, key):
                results.append(between.square())
        wanted = gradient(sum(results, torch.zeros(())), x, retain_graph=True)
        del between
        assert [store.send(key) for key in "ab"] == [TENSOR_BYTES, 0]
        # The second group has not released it.
        assert [store.release(key) for key in "ab"] == [0, TENSOR_BYTES]
        assert [store.fetch(key) for key in "ba"] == [TENSOR_BYTES, 0]
        assert torch.equal(gradient(sum(results, torch.zeros(())), x), wanted)

    def test_a_graph_that_is_gone_keeps_no_memory(self, store: ActivationStore) -> None:
        between = make_input() * 3
        results = []
        for key in "ab":
            with group(store, key):
                results.append(between.square())
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
            with group(store, key):
                products.append(x * buffer)
            store.send(key)
        store.release("b")
        assert torch.equal(gradient(products[1], x), torch.full_like(x, 2))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradient(products[0], x)


class TestTensorsThatStay:
    def sent(self, store: ActivationStore, tensor: torch.Tensor, other: torch.Tensor) -> int:
        """Bytes that leave when a product saves a tensor."""
        with group(store, "a"):
            product = other.requires_grad_() * tensor
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

    def test_kept_tensors(self, store: ActivationStore) -> None:
        table, other = torch.ones(SIDE, SIDE), torch.ones(SIDE, SIDE)
        store.keep([table, torch.ones(3).to_sparse()])
        assert self.sent(store, table.t(), torch.ones(())) == 0
        assert self.sent(store, other, torch.ones(())) == TENSOR_BYTES
        store.keep([])
        assert self.sent(store, table, torch.ones(())) == TENSOR_BYTES

    def test_permanently_kept_tensors(self, store: ActivationStore) -> None:
        table = torch.ones(SIDE, SIDE)
        store.keep([table], permanent=True)
        store.keep([])
        assert self.sent(store, table, torch.ones(())) == 0
        store.keep([], permanent=True)
        assert self.sent(store, table, torch.ones(())) == TENSOR_BYTES

    def test_empty_tensors(self) -> None:
        class Pinning(Mover):
            def allocate_host(self, size_bytes: int) -> torch.Tensor:
                if not size_bytes:
                    raise MemoryError("0 bytes: Invalid argument")  # as the kernel says
                return super().allocate_host(size_bytes)

        store = ActivationStore("cpu", Pinning(), min_bytes=0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert self.sent(store, torch.ones(0, SIDE), torch.ones(())) == 0
        assert store.statistics.kept_for_lack_of_host_tensors == 0

    def test_subclasses_and_other_layouts(self, store: ActivationStore) -> None:
        class Mine(torch.Tensor):
            pass

        mine = torch.ones(SIDE, SIDE).as_subclass(Mine)
        conjugate = torch.ones(SIDE, SIDE, dtype=torch.complex64).conj()
        nested = torch.nested.nested_tensor([torch.ones(SIDE, SIDE)])
        for stays in (mine, conjugate):
            assert self.sent(store, stays, torch.ones(())) == 0
        with group(store, "a"):
            product = nested.detach().requires_grad_() * nested
            sparse = torch.sparse.mm(torch.eye(SIDE).to_sparse(), make_input())
        assert store.send("a") == 0
        assert product.requires_grad
        assert sparse.requires_grad

    def test_other_devices(self, store: ActivationStore) -> None:
        meta = torch.ones(SIDE, SIDE, device="meta")
        assert self.sent(store, meta, torch.ones(SIDE, SIDE, device="meta")) == 0

    def test_a_storage_that_was_resized(self, store: ActivationStore) -> None:
        gathered = torch.ones(SIDE, SIDE)
        factor = torch.ones((), requires_grad=True)
        with group(store, "a"):
            product = factor * gathered
        gathered.untyped_storage().resize_(0)
        assert store.send("a") == store.release("a") == 0
        gathered.untyped_storage().resize_(TENSOR_BYTES)
        gathered.data.fill_(2)
        assert gradient(product, factor).item() == 2 * SIDE * SIDE


class TestMemoryHeldElsewhere:
    """Memory that other code holds never leaves the device."""

    def test_is_not_copied_back(self, store: ActivationStore, expected: torch.Tensor) -> None:
        x = make_input()
        y = (x * 2).exp()
        with group(store, "a"):
            z = (y.sin() * y).tanh() + 1  # of y, and of two tensors that no other code holds
        assert store.send("a") == store.release("a") == 3 * TENSOR_BYTES
        assert store.fetch("a", [0]) == 0
        assert store.release("a", [0]) == TENSOR_BYTES
        assert store.fetch("a") == 2 * TENSOR_BYTES
        assert torch.equal(gradient(z, x), expected)
        assert store.statistics.tensors_in == 2
        assert store.statistics.late_fetches == 0

    def test_is_found_by_the_backward_pass(self, store: ActivationStore) -> None:
        x = make_input()
        factor = torch.full_like(x, 3)
        with group(store, "a"):
            product = x * factor
        assert store.send("a") == store.release("a") == TENSOR_BYTES
        assert torch.equal(gradient(product, x), factor)
        assert (store.statistics.late_fetches, store.statistics.tensors_in) == (0, 0)

    def test_comes_back_if_it_was_resized(self, store: ActivationStore) -> None:
        x = make_input()
        factor = torch.full_like(x, 3)
        with group(store, "a"):
            product = x * factor
        store.send("a")
        store.release("a")
        factor.untyped_storage().resize_(0)
        assert store.fetch("a") == TENSOR_BYTES
        assert torch.equal(gradient(product, x), torch.full_like(x, 3))


class TestErrors:
    def test_a_copy_that_fails_keeps_no_buffers(self) -> None:
        class Broken(Mover):
            is_broken = True

            def copy_out(self, pairs: Any, stream: Any) -> Any:
                if self.is_broken:
                    raise RuntimeError("refused")
                return super().copy_out(pairs, stream)

        mover = Broken()
        store = ActivationStore("cpu", mover, min_bytes=KIB)
        x = make_input()
        y = saved(store, "a", x)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="refused"):
                store.send("a")
        assert store.statistics.pinned_bytes == 3 * (2 << 20)
        mover.is_broken = False
        assert store.send("a") == 3 * TENSOR_BYTES
        assert store.statistics.peak_pinned_bytes == 3 * (2 << 20)
        assert torch.equal(gradient(y, x), gradient(chain(x), x))

    def test_close_group_without_open_group(self, store: ActivationStore) -> None:
        with pytest.raises(OffloadError, match="open_group"):
            store.close_group()

    def test_close_groups_ends_what_an_interrupt_has_left(self, store: ActivationStore) -> None:
        for key in ("a", "b", "c"):
            assert store.open_group(key)
        store.close_groups(left_open=1)
        assert store.open_groups == 1
        assert saved_tensors.innermost() is not None
        store.close_groups()
        assert store.open_groups == 0
        assert saved_tensors.innermost() is None
        store.close_groups()

    def test_wrong_settings(self) -> None:
        with pytest.raises(OffloadError, match="min_bytes is -1"):
            ActivationStore("cpu", min_bytes=-1)
        with pytest.raises(OffloadError, match="host_limit_bytes is -5"):
            ActivationStore("cpu", host_limit_bytes=-5)
        with pytest.raises(OffloadError, match=r"'meta'.*cuda and cpu"):
            ActivationStore("meta")


def test_waits_once_for_copies_of_one_send() -> None:
    mover = LazyMover()
    store = ActivationStore("cpu", mover, min_bytes=KIB)
    x = make_input()
    y = released(store, "a", x)
    assert mover.waits == 1
    assert y.requires_grad
