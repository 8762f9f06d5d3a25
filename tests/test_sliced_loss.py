"""Losses in slices of rows: torch's bits, whatever else a program does with its logits."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from denied_pointers import can_deny_pointers
from torch import nn
from torch.autograd.graph import get_gradient_edge, save_on_cpu
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from umem.runtime.unguarded import PastGuards
from umem.streaming.activations import SlicedLosses
from umem.torch_compat import storage_address, storage_use_count

ROWS, WIDTH, VOCABULARY = 27, 16, 1003
SLICE = 4 * VOCABULARY * 8
"""Bytes of eight rows in float32."""

Logits = torch.Tensor
Program = Callable[[Logits, torch.Tensor], list[torch.Tensor]]
cross_entropy = functional.cross_entropy


@pytest.fixture
def losses() -> Iterator[SlicedLosses]:
    found = SlicedLosses("cpu", least_bytes=1, slice_bytes=SLICE)
    yield found
    found.end()


def run(
    program: Program,
    dtype: torch.dtype = torch.bfloat16,
    *,
    vocabulary: int = VOCABULARY,
    autocast: bool = False,
) -> list[torch.Tensor]:
    """What a program returns of logits, and the gradients of their layers."""
    torch.manual_seed(0)
    layer, head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, vocabulary, bias=False)
    if not autocast:
        layer, head = layer.to(dtype), head.to(dtype)
    x = torch.randn(3, ROWS // 3, WIDTH, dtype=torch.float32 if autocast else dtype)
    target = torch.randint(0, vocabulary, (3, ROWS // 3))
    target[0, 3:9] = -100
    with torch.autocast("cpu", dtype, enabled=autocast):
        logits = head(torch.tanh(layer(x)))
        found = program(logits, target.view(-1))
    gradients = [it.grad for it in (*layer.parameters(), *head.parameters()) if it.grad is not None]
    return [*found, *gradients]


def check(losses: SlicedLosses, program: Program, *args: Any, **options: Any) -> None:
    """Compare the bits of a program with stock's."""
    stock = run(program, *args, **options)
    losses.slice()
    found = run(program, *args, **options)
    assert len(found) == len(stock)
    for one, other in zip(found, stock, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.view(torch.uint8), other.contiguous().view(torch.uint8))
    assert losses.is_on


def ending(loss: torch.Tensor) -> list[torch.Tensor]:
    loss.backward()
    return [loss.detach().view(1)]


def flat(logits: Logits) -> Logits:
    return logits.view(-1, logits.size(-1))


def plain(logits: Logits, target: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    return ending(cross_entropy(flat(logits), target, **options))


def upcast(logits: Logits, target: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    return ending(cross_entropy(flat(logits.float()), target, **options))


# ------------------------------------------------------------------ bits


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("program", [plain, upcast])
def test_loss_and_gradients_have_torchs_bits(
    losses: SlicedLosses, program: Any, reduction: str, dtype: torch.dtype, autocast: bool
) -> None:
    if autocast and dtype is torch.float32:
        pytest.skip("no autocast")
    slices = []

    def noted(logits: Logits, target: torch.Tensor) -> list[torch.Tensor]:
        copy = logits.float() if program is upcast else logits
        loss = cross_entropy(flat(copy), target, reduction=reduction)
        del copy
        slices.append(loss.grad_fn.name() == "_SlicedCrossEntropyBackward")  # type: ignore[union-attr]
        return ending(3.0 * loss)

    check(losses, noted, dtype, autocast=autocast)
    assert slices == [False, True]


@pytest.mark.parametrize("vocabulary", [2, 7, 1000, 1024, 4097, 32_000])
def test_any_number_of_classes(losses: SlicedLosses, vocabulary: int) -> None:
    check(losses, upcast, vocabulary=vocabulary)


def ignoring(index: int) -> Program:
    return lambda logits, target: upcast(
        logits, target.masked_fill(target == -100, index), ignore_index=index
    )


def all_ignored(logits: Logits, target: torch.Tensor) -> list[torch.Tensor]:
    return upcast(logits, torch.full_like(target, -100))


def of_a_module(logits: Logits, target: torch.Tensor) -> list[torch.Tensor]:
    return ending(nn.CrossEntropyLoss()(flat(logits.float()), target))


def shifted(logits: Logits, target: torch.Tensor) -> list[torch.Tensor]:
    rows = logits.float()[..., :-1, :].contiguous()
    return ending(cross_entropy(flat(rows), target.view(3, -1)[:, 1:].reshape(-1)))


def a_view_of_some_rows(logits: Logits, target: torch.Tensor) -> list[torch.Tensor]:
    return ending(cross_entropy(flat(logits.float())[1:], target[1:]))


def tempered_in_place(logits: Logits, target: torch.Tensor) -> list[torch.Tensor]:
    return ending(cross_entropy(flat(logits.float().div_(0.7)), target))


def changed_after_the_loss(logits: Logits, target: torch.Tensor) -> list[torch.Tensor]:
    loss = cross_entropy(flat(logits.float()), target)
    with torch.no_grad():
        logits.zero_()
    return ending(loss)


def changed_through_a_view(logits: Logits, target: torch.Tensor) -> list[torch.Tensor]:
    loss = cross_entropy(flat(logits), target)
    logits.detach().zero_()
    return ending(loss)


def changed_through_an_earlier_view(logits: Logits, target: torch.Tensor) -> list[torch.Tensor]:
    alias = logits.detach()
    loss = cross_entropy(flat(logits.float()), target)
    alias.zero_()
    return ending(loss)


def changed_between(logits: Logits, target: torch.Tensor) -> list[torch.Tensor]:
    copy = logits.float()
    with torch.no_grad():
        logits.zero_()
    return ending(cross_entropy(flat(copy), target))


def changed_as_data(logits: Logits, target: torch.Tensor) -> list[torch.Tensor]:
    copy = logits.float()
    copy.data[..., 5] = -7.0
    return ending(cross_entropy(flat(copy), target))


def read_after_the_loss(logits: Logits, target: torch.Tensor) -> list[torch.Tensor]:
    copy = logits.float()
    loss = cross_entropy(flat(copy), target)
    read = [copy.detach().clone(), logits.argmax(-1), copy.view(-1)[3:5].detach()]
    return [*read, *ending(loss)]


def as_integers(logits: Logits, target: torch.Tensor) -> list[torch.Tensor]:
    copy = logits.float()
    with torch.no_grad():
        numbers = copy.view(torch.int32)
    return [numbers, *ending(cross_entropy(flat(copy), target))]


def cast_again(logits: Logits, target: torch.Tensor) -> list[torch.Tensor]:
    loss = cross_entropy(flat(logits.float()), target)
    again = logits.float()
    return [*ending(loss), again.detach()]


def with_others_before(logits: Logits, target: torch.Tensor) -> list[torch.Tensor]:
    copy = logits.float()
    other = copy.logsumexp(-1).square().mean() + copy.softmax(-1).square().sum()
    return ending(cross_entropy(flat(copy), target) + 0.1 * other)


def with_others_behind(logits: Logits, target: torch.Tensor) -> list[torch.Tensor]:
    copy = logits.float()
    rows = flat(copy)
    loss = cross_entropy(rows, target)
    loss = loss + rows.logsumexp(-1).square().mean() + copy.softmax(-1).square().sum()
    del copy, rows
    return ending(loss)


def two_losses(logits: Logits, target: torch.Tensor) -> list[torch.Tensor]:
    rows = flat(logits.float())
    loss = cross_entropy(rows, target) + 0.3 * cross_entropy(rows, target.flip(0))
    del rows
    return ending(loss)


def two_losses_without_a_cast(logits: Logits, target: torch.Tensor) -> list[torch.Tensor]:
    rows = flat(logits)
    return ending(cross_entropy(rows, target) + 0.3 * cross_entropy(rows, target.flip(0)))


def retaining(logits: Logits, target: torch.Tensor) -> list[torch.Tensor]:
    copy = logits.float()
    loss = cross_entropy(flat(copy), target)
    copy.retain_grad()
    found = ending(loss)
    assert copy.grad is not None
    return [*found, copy.grad]


def gradient_of_the_copy(logits: Logits, target: torch.Tensor) -> list[torch.Tensor]:
    copy = logits.float()
    loss = cross_entropy(flat(copy), target)
    return [loss.detach().view(1), *torch.autograd.grad(loss, [copy, logits])]


def hooked(logits: Logits, target: torch.Tensor) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []
    copy = logits.float()
    copy.register_hook(lambda it: seen.append(it.clone()))
    return [*ending(cross_entropy(flat(copy), target)), *seen]


def hooked_and_dropped(logits: Logits, target: torch.Tensor) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []
    copy = flat(logits.float())
    copy.register_hook(lambda it: seen.append(it.clone()))
    copy.register_hook(lambda it: 0.5 * it)
    loss = cross_entropy(copy, target)
    del copy
    return [*ending(loss), *seen]


def hooked_at_the_cast(logits: Logits, target: torch.Tensor) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []
    copy = logits.float()
    copy.grad_fn.register_prehook(lambda it: seen.append(it[0]))  # type: ignore[union-attr]
    loss = cross_entropy(flat(copy), target)
    del copy
    return [*ending(loss), *seen]


def at_an_edge(logits: Logits, target: torch.Tensor) -> list[torch.Tensor]:
    copy = logits.float()
    edge, loss = get_gradient_edge(copy), cross_entropy(flat(copy), target)
    del copy
    return [loss.detach().view(1), *torch.autograd.grad(loss, [edge])]


def in_inference_mode(logits: Logits, target: torch.Tensor) -> list[torch.Tensor]:
    loss = cross_entropy(flat(logits.float()), target)
    with torch.inference_mode():
        loss.backward()
    return [loss.detach().view(1)]


def twice_backward(logits: Logits, target: torch.Tensor) -> list[torch.Tensor]:
    loss = cross_entropy(flat(logits.float()), target)
    loss.backward(retain_graph=True)
    return ending(loss)


def twice_differentiated(logits: Logits, target: torch.Tensor) -> list[torch.Tensor]:
    loss = cross_entropy(flat(logits.float()), target)
    (gradient,) = torch.autograd.grad(loss, logits, create_graph=True)
    return ending(loss + gradient.float().square().sum())


def scaled_later(logits: Logits, target: torch.Tensor) -> list[torch.Tensor]:
    return ending(cross_entropy(flat(logits.float()), target, reduction="sum") / 17)


def saved_elsewhere(logits: Logits, target: torch.Tensor) -> list[torch.Tensor]:
    with save_on_cpu():
        loss = cross_entropy(flat(logits.float()), target)
    return ending(loss)


def checkpointed(logits: Logits, target: torch.Tensor) -> list[torch.Tensor]:
    def of(some: torch.Tensor) -> torch.Tensor:
        return cross_entropy(flat(some.float()), target)

    first: Any = checkpoint(of, logits, use_reentrant=False)
    second: Any = checkpoint(of, logits, use_reentrant=True)
    return ending(first + second)


def chunked(logits: Logits, target: torch.Tensor) -> list[torch.Tensor]:
    parts = zip(flat(logits).split(10), target.split(10), strict=True)
    return ending(torch.stack([cross_entropy(p.float(), t) for p, t in parts]).sum())


@pytest.mark.parametrize(
    "program",
    [
        *(ignoring(0), ignoring(-1), all_ignored, of_a_module, shifted, a_view_of_some_rows),
        *(tempered_in_place, changed_after_the_loss, changed_through_a_view),
        *(changed_through_an_earlier_view, changed_between, changed_as_data, read_after_the_loss),
        *(as_integers, cast_again, with_others_before, with_others_behind, two_losses),
        *(two_losses_without_a_cast, retaining, gradient_of_the_copy, hooked, hooked_and_dropped),
        *(hooked_at_the_cast, at_an_edge, in_inference_mode, twice_backward, twice_differentiated),
        *(scaled_later, saved_elsewhere, checkpointed, chunked),
    ],
)
def test_whatever_a_program_does_with_its_logits(losses: SlicedLosses, program: Program) -> None:
    check(losses, program)


def test_a_gradient_that_is_differentiated_for_the_first_time(
    losses: SlicedLosses, caplog: pytest.LogCaptureFixture
) -> None:
    run(upcast)
    losses.slice()
    found = run(twice_differentiated)
    assert "differentiated again" in caplog.text
    assert not losses.is_on
    for one, other in zip(found, run(twice_differentiated), strict=True):
        torch.testing.assert_close(one, other)


def test_several_gradients_at_once(losses: SlicedLosses) -> None:
    def batched(logits: Logits, target: torch.Tensor) -> list[torch.Tensor]:
        loss = cross_entropy(flat(logits.float()), target)
        factors = torch.tensor([1.0, 2.0, 0.5])
        return [*torch.autograd.grad(loss, logits, factors, is_grads_batched=True)]

    stock = run(batched)
    losses.slice()
    assert all(map(torch.equal, run(batched), stock))
    assert not losses.is_on


def test_a_model_of_transformers(losses: SlicedLosses) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
    )

    def train(*, keeps_output: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        words = torch.randint(VOCABULARY, (2, 9))
        output = model(input_ids=words, labels=words)
        loss, seen = output.loss, []
        if keeps_output:
            seen = [output.logits.argmax(-1), output.logits.float()]
        else:
            del output
        node = loss.grad_fn
        names.append(node.name())
        if names[0] != names[-1]:  # through a view to the cast
            cast = node.next_functions[0][0].next_functions[0][0]
            assert cast.name() == "_UpcastBackward"
            cast.register_prehook(lambda given: gradients.append(given[0]))
        loss.backward()
        return [loss.detach(), *seen, *(it.grad for it in model.parameters())]

    for keeps_output in (False, True):
        names: list[str] = []
        gradients: list[Any] = []
        losses.is_on = False
        stock = train(keeps_output=keeps_output)
        losses.slice()
        found = train(keeps_output=keeps_output)
        assert names[-1] == "_SlicedCrossEntropyBackward" != names[0]
        assert all(map(torch.equal, found, stock))
        assert [it.numel() for it in gradients] == [2 * 9 * VOCABULARY]
        with PastGuards():
            assert storage_bytes(gradients[0]) == 0


# ------------------------------------------------------------------ what is left to torch


def one_by_one(logits: Logits, target: torch.Tensor) -> list[torch.Tensor]:
    return ending(cross_entropy(flat(logits.float()), target, reduction="none").sum())


def of_probabilities(logits: Logits, target: torch.Tensor) -> list[torch.Tensor]:
    wanted = functional.one_hot(target.clamp(min=0), logits.size(-1)).float()
    return ending(cross_entropy(flat(logits.float()), wanted))


def of_images(logits: Logits, target: torch.Tensor) -> list[torch.Tensor]:
    return ending(cross_entropy(logits.float().transpose(1, 2), target.view(3, -1)))


def of_bytes(logits: Logits, target: torch.Tensor) -> list[torch.Tensor]:
    return ending(cross_entropy(flat(logits.float()), target.clamp(0, 200).to(torch.uint8)))


def transformed(logits: Logits, target: torch.Tensor) -> list[torch.Tensor]:
    return [torch.func.grad(lambda it: cross_entropy(flat(it), target))(logits.detach().float())]


def compiled(logits: Logits, target: torch.Tensor) -> list[torch.Tensor]:
    function = torch.compile(
        lambda it: cross_entropy(flat(it.float()), target), backend="eager", fullgraph=True
    )
    return ending(function(logits))


def scripted(logits: Logits, target: torch.Tensor) -> list[torch.Tensor]:
    return ending(torch.jit.script(_scripted)(flat(logits), target))


def _scripted(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.float(), target)


@pytest.mark.parametrize(
    "program",
    [
        lambda logits, target: upcast(logits, target, label_smoothing=0.1),
        lambda logits, target: upcast(logits, target, weight=torch.rand(logits.size(-1))),
        one_by_one,
        of_probabilities,
        of_images,
        of_bytes,
        transformed,
        compiled,
        scripted,
    ],
)
def test_other_losses_are_torchs(losses: SlicedLosses, program: Program) -> None:
    check(losses, program)


def test_small_logits_and_other_devices_are_left_alone() -> None:
    for found in (SlicedLosses("cpu"), SlicedLosses("cuda", least_bytes=1)):
        run(upcast)
        assert found.largest is None


@pytest.mark.parametrize(("percent", "expected"), [(24, False), (26, True)])
def test_a_loss_of_a_quarter_of_the_budget_is_sliced_at_once(percent: int, expected: bool) -> None:
    budget_bytes = 12 * ROWS * VOCABULARY * 100 // percent
    seen = []

    def program(logits: Logits, target: torch.Tensor) -> list[torch.Tensor]:
        copy = logits.float()
        seen.append(node_of_the_cast(copy).name() == "_UpcastBackward")
        return ending(cross_entropy(flat(copy), target))

    def evaluate(logits: Logits, target: torch.Tensor) -> list[torch.Tensor]:
        with torch.no_grad():
            return [cross_entropy(flat(logits.float()), target)]

    stock = run(program)
    losses = SlicedLosses("cpu", budget_bytes=budget_bytes, vocabulary=VOCABULARY, least_bytes=1)
    run(evaluate)
    assert not losses.is_on
    found = run(program)
    assert seen == [False, expected]
    assert losses.is_on == expected
    assert all(map(torch.equal, found, stock))
    losses.end()
    run(program)
    assert not losses.is_on


def test_why_a_loss_is_torchs() -> None:
    losses = SlicedLosses("cpu", least_bytes=1)
    assert losses.remedy == ""
    run(upcast)
    assert "torch computes" not in losses.remedy
    run(lambda logits, target: upcast(logits, target, label_smoothing=0.1))
    assert not losses.could_slice
    for word in ("27 tokens x 1,003", "smooths labels", "Liger", "Fewer tokens"):
        assert word in losses.remedy


def test_kernels_whose_bits_depend_on_the_number_of_rows(
    losses: SlicedLosses, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = torch.log_softmax

    def other(logits: torch.Tensor, *args: Any) -> torch.Tensor:
        return original(logits, *args) + (1e-3 if len(logits) < 100 else 0.0)

    monkeypatch.setattr(torch, "log_softmax", other)
    check_left(losses, vocabulary=VOCABULARY + 2)  # nothing is known of it yet
    assert "number of rows" in losses.remedy


def check_left(losses: SlicedLosses, **options: Any) -> None:
    """Check that torch computes a loss even so."""
    stock = run(upcast, **options)
    losses.slice()
    assert all(map(torch.equal, run(upcast, **options), stock))
    assert not losses.is_on


# ------------------------------------------------------------------ memory


def storage_bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def users_of(tensor: torch.Tensor) -> int:
    """References to its memory. No guard sees that."""
    return storage_use_count(storage_address(tensor))


def node_of_the_cast(copy: torch.Tensor) -> Any:
    return copy.grad_fn


def test_a_copy_in_float32_has_no_memory_until_it_is_used(losses: SlicedLosses) -> None:
    seen: list[torch.Tensor] = []

    def program(logits: Logits, target: torch.Tensor) -> list[torch.Tensor]:
        copy = logits.float()
        node = node_of_the_cast(copy)
        # What reaches the cast is the gradient in float32, or has no memory: it is made there.
        node.register_prehook(lambda given: seen.append(given[0]))
        loss = cross_entropy(flat(copy), target)
        del copy
        return ending(loss)

    check(losses, program)
    stock, sliced = seen
    with PastGuards():
        assert storage_bytes(stock) == 4 * stock.numel()
        assert storage_bytes(sliced) == 0
    assert torch.equal(sliced, stock)


def test_a_use_fills_the_copy(losses: SlicedLosses) -> None:
    run(upcast)
    losses.slice()

    def program(logits: Logits, target: torch.Tensor) -> list[torch.Tensor]:
        copy = logits.float()
        view = flat(copy).reshape(3, -1, VOCABULARY).flatten(0, 1)
        assert copy.grad_fn is not None
        assert copy.grad_fn.name() == "_UpcastBackward"
        if can_deny_pointers():
            with PastGuards(), pytest.raises(RuntimeError, match="past torch's operators"):
                view.exp()  # as C++ that takes the memory and asks nobody
        assert torch.equal(view, flat(logits).to(torch.float32))
        assert storage_bytes(copy) == 4 * copy.numel()
        assert copy._version == 0
        return []

    run(program)


def test_a_loss_frees_what_it_has_saved(losses: SlicedLosses) -> None:
    run(upcast)
    losses.slice()

    def program(logits: Logits, target: torch.Tensor) -> list[torch.Tensor]:
        alone = users_of(logits)
        loss = cross_entropy(flat(logits.float()), target)
        before = users_of(logits)
        loss.backward()
        assert users_of(logits) < before
        assert users_of(logits) == alone
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        return []

    gc.disable()  # no cycle holds it
    try:
        run(program)
    finally:
        gc.enable()


# ------------------------------------------------------------------ errors are torch's


def test_a_target_out_of_range_raises_torchs_error(losses: SlicedLosses) -> None:
    run(upcast)
    losses.slice()
    with pytest.raises(IndexError, match="1003"):
        run(lambda logits, target: upcast(logits, target.masked_fill(target == -100, 1003)))


def test_a_target_that_is_changed_raises_torchs_error(losses: SlicedLosses) -> None:
    def program(logits: Logits, target: torch.Tensor) -> list[torch.Tensor]:
        loss = cross_entropy(flat(logits.float()), target)
        target.zero_()
        return ending(loss)

    for _ in range(2):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run(program)
        losses.slice()
