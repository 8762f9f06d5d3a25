"""Units of activations that are stretches of the pass: where they are cut, and how they move."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from activation_chain import LazyMover
from faults import let_out
from measured_memory import HostBesideMover, MemoryMeter, train_within
from torch import nn
from torch.utils.checkpoint import checkpoint

from umem.capture.live import find_blocks
from umem.offloading import ActivationStore
from umem.streaming.activations import CopiedActivations
from umem.streaming.plan import TemporarySlot
from umem.streaming.plan.stretches import Save, block_of, find_cuts
from umem.streaming.tune import planning
from umem.streaming.tune.named_plan import NamedPlan

WIDTH, ROWS, WORDS = 32, 16, 24
"""What a plan leaves free at the least."""


# ------------------------------------------------------------------ where a pass is cut


def saves(*units: tuple[str, int]) -> list[Save]:
    """Tensors of 10 bytes, so many in turn in calls of each block."""
    found: list[Save] = []
    for block, count in units:
        before = sum(it.block == block for it in found)
        found += [Save(block, block, before + number, 10) for number in range(count)]
    return found


def test_blocks_do_as_units_where_none_saves_more_than_all_others() -> None:
    # As the inputs that checkpoints of blocks keep, which the model itself saves.
    inputs = [Save(block, "", number, 10) for number, block in enumerate("abc")]
    assert find_cuts(inputs) == {}
    assert find_cuts(saves(("a", 8), ("b", 8))) == {}
    assert find_cuts(saves(*((name, 8) for name in "abc"))) == {}
    assert find_cuts([]) == {}


def test_a_block_that_saves_most_is_cut_by_bytes() -> None:
    cuts = find_cuts(saves(("a", 8), ("b", 24)))
    assert cuts == {"b": {2 * it: f"b..{it + 1}" for it in range(1, 12)}}
    assert {block_of(name) for its in cuts.values() for name in its.values()} == {"b"}
    assert block_of("a.b") == "a.b"


def test_a_late_block_that_saves_much_is_cut_as_the_last_one_of_a_u_net() -> None:
    sides = [("down.0", 11), ("down.1", 4), ("down.2", 2), ("middle", 1), ("up.2", 2), ("up.1", 4)]
    every = saves(*sides, ("up.0", 16), ("head", 1))
    # "down.0" saves as large a part, but runs twice, which makes room for nearly all of the step.
    assert find_cuts(every) == {"up.0": {2 * it: f"up.0..{it + 1}" for it in range(1, 8)}}
    assert find_cuts(saves(*sides, ("up.0", 8), ("head", 1))) == {}
    # Nor a head, whose logits the loss uses at once.
    assert find_cuts(saves(*sides, ("head", 16)), last="head") == {}


def test_later_calls_and_the_model_itself_count_for_the_stretch_that_began_last() -> None:
    every = saves(*(8 * (("cell", 1), ("", 1), ("attention", 2))))
    cuts = find_cuts(every)
    # Of 32 tensors, two make a stretch: those of the first call of "cell", the others by turns.
    assert sum(map(len, cuts.values())) == 14
    assert cuts["cell"] == {it: f"cell..{it + 1}" for it in range(1, 8)}
    assert cuts["attention"] == {2 * it: f"attention..{it + 1}" for it in range(1, 8)}


def test_one_tensor_that_is_larger_than_a_stretch_is_a_stretch() -> None:
    every = [Save("a", "a", number, size) for number, size in enumerate((1, 1, 1, 100, 1, 1))]
    assert find_cuts(every) == {"a": {3: "a..2", 4: "a..3"}}


def test_a_block_that_saves_few_tensors_is_a_unit() -> None:
    assert find_cuts([Save("a", "a", number, 1) for number in range(4)]) == {}
    assert find_cuts([Save("a", "a", number, 1) for number in range(5)])


# ------------------------------------------------------------------ programs without a chain


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Linear(2 * WIDTH, 4 * WIDTH)

    def forward(
        self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        i, f, o, g = self.gates(torch.cat([x, h], 1)).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


class Recurrent(nn.Module):
    """A cell that is called for each word."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTH, WIDTH)
        self.cell = Cell()
        self.decoder = nn.Linear(WIDTH, 4)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        words = self.encoder(words)
        h = c = torch.zeros(ROWS, WIDTH)
        for word in words:
            h, c = self.cell(word, h, c)
        return self.decoder(h)


class Whole(nn.Module):
    """A module that has all parameters, and calls no other."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 6)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        h = torch.zeros(ROWS, WIDTH)
        for word in words:
            h = torch.tanh(h @ self.weight + word)
        return h


class Wrapped(nn.Module):
    """A module in a module, with all that is saved in one call."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTH, WIDTH)
        self.net = Whole()

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.net(self.encoder(words))


MODELS: dict[str, type[nn.Module]] = {
    "a cell for each word": Recurrent,
    "no blocks": Whole,
    "one call": Wrapped,
}


def make(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def batch(number: int = 0, words: int = WORDS) -> torch.Tensor:
    return torch.randn(words, ROWS, WIDTH, generator=torch.Generator().manual_seed(number))


def gradients(model: nn.Module) -> list[bytes]:
    return [it.grad.numpy().tobytes() for it in model.parameters() if it.grad is not None]


def train(model: nn.Module, *batches: torch.Tensor) -> list[bytes]:
    for words in batches:
        model(words).square().mean().backward()
    return gradients(model)


class Cut:
    """A model whose pass is cut, and all of whose activations are copied."""

    def __init__(
        self,
        model: nn.Module,
        fetch_ahead: int = 1,
        mover: LazyMover | None = None,
        on_error: Callable[[Exception], None] = let_out,
    ) -> None:
        self.store = ActivationStore("cpu", mover or LazyMover(), min_bytes=64)
        self.activations = CopiedActivations(model, find_blocks(model), self.store, on_error)
        assert self.measure(model), "cuts were found"
        assert not self.measure(model)
        self.saved_bytes: dict[str, int] = dict(self.activations.saved_bytes)
        # In their order, but for the last one, each leaves before the second one behind it.
        names = list(self.saved_bytes)
        self.leaving = dict(zip(names[:-1], [*names[2:], None], strict=True))
        self.activations.set_plan(self.leaving, fetch_ahead, is_measuring=False)

    def measure(self, model: nn.Module, words: int = WORDS) -> bool:
        """Measure a pass; whether it does not count, as cuts were found."""
        self.activations.begin_step()
        self.activations.set_plan({}, 1, is_measuring=True)
        model(batch(9, words))
        assert self.activations.is_unusual == self.activations.has_cut
        return self.activations.has_cut


@pytest.mark.parametrize("fetch_ahead", [0, 1, 3])
@pytest.mark.parametrize("kind", MODELS.values(), ids=MODELS)
def test_no_bit_changes(kind: type[nn.Module], fetch_ahead: int) -> None:
    model = make(kind)
    cut = Cut(model, fetch_ahead)
    batches = [batch(0), batch(1)]
    assert train(model, *batches) == train(make(kind), *batches)
    counts = cut.store.statistics
    assert counts.bytes_out > 0.8 * len(batches) * sum(cut.saved_bytes.values())
    assert counts.tensors_in == counts.tensors_out
    assert counts.late_fetches == 0


@pytest.mark.parametrize("kind", MODELS.values(), ids=MODELS)
def test_stretches_are_about_as_large(kind: type[nn.Module]) -> None:
    sizes = [it for it in Cut(make(kind)).saved_bytes.values() if it]
    assert len(sizes) >= 12
    assert max(sizes) <= 2 * sum(sizes) / len(sizes)


class Keeping(Whole):
    """Keeps what each word has made."""

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        h = torch.zeros(ROWS, WIDTH)
        self.made: list[torch.Tensor] = []
        for word in words:
            h = torch.tanh(h @ self.weight + word)
            self.made.append(h if len(self.made) % 2 else h.exp())
        return h


def test_what_the_program_keeps_does_not_count() -> None:
    every, kept = (Cut(make(kind)).saved_bytes for kind in (Whole, Keeping))
    tensor_bytes = 4 * ROWS * WIDTH
    assert sum(every.values()) == WORDS * tensor_bytes
    # The first one, and each second word's; exp saves its result, which is kept, too.
    assert sum(kept.values()) == (1 + WORDS // 2) * tensor_bytes


@pytest.mark.parametrize("kind", MODELS.values(), ids=MODELS)
def test_a_measured_pass_may_have_copies(kind: type[nn.Module]) -> None:
    model = make(kind)
    cut = Cut(model)
    cut.activations.set_plan(cut.leaving, 1, is_measuring=True)
    assert train(model, batch()) == train(make(kind), batch())
    assert cut.store.statistics.bytes_out > 0
    assert cut.activations.saved_bytes == cut.saved_bytes


@pytest.mark.parametrize("kind", MODELS.values(), ids=MODELS)
def test_a_pass_that_has_become_much_longer_is_cut_anew(kind: type[nn.Module]) -> None:
    model = make(kind)
    cut = Cut(model)
    assert not cut.measure(model, WORDS + 1)
    assert cut.measure(model, 3 * WORDS)
    assert not cut.measure(model, 3 * WORDS)
    sizes = [it for it in cut.activations.saved_bytes.values() if it]
    assert max(sizes) <= 2 * sum(sizes) / len(sizes)
    assert sum(sizes) > 2 * sum(cut.saved_bytes.values())


@pytest.mark.parametrize("words", [1, WORDS // 2, 2 * WORDS])
@pytest.mark.parametrize("kind", MODELS.values(), ids=MODELS)
def test_batches_may_have_other_lengths(kind: type[nn.Module], words: int) -> None:
    model = make(kind)
    Cut(model)
    batches = [batch(0, words), batch(1), batch(2, words)]
    assert train(model, *batches) == train(make(kind), *batches)


def test_a_graph_that_is_kept_runs_backward_twice() -> None:
    def twice(model: nn.Module) -> list[bytes]:
        y = model(batch()).square().mean()
        y.backward(retain_graph=True)
        y.backward()
        return gradients(model)

    model = make(Recurrent)
    cut = Cut(model)
    assert twice(model) == twice(make(Recurrent))
    assert cut.store.statistics.late_fetches == 0


def test_memory_goes_before_the_pass_ends_and_comes_back_stretch_by_stretch() -> None:
    with MemoryMeter() as meter:
        peaks = []
        for is_cut in (False, True):
            model = make(Recurrent)
            if is_cut:
                Cut(model, mover=HostBesideMover(meter))
            gc.collect()
            base_bytes = meter.live_bytes
            meter.take_peak_bytes()
            loss = model(batch()).square().mean()
            forward_bytes = meter.take_peak_bytes() - base_bytes
            loss.backward()
            peaks.append((forward_bytes, meter.take_peak_bytes() - base_bytes))
            del loss, model
    (all_forward, all_backward), (forward, backward) = peaks
    assert forward < all_forward / 2
    assert backward < 0.55 * all_backward


class LargeEnd(nn.Module):
    """Blocks in a chain, perhaps within checkpoints; what comes behind them saves most."""

    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__()
        layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.use_reentrant = use_reentrant

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.stem(words[0])
        for layer in self.layers:
            if self.use_reentrant is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x + 1, use_reentrant=self.use_reentrant)
        for word in words:
            x = torch.tanh(x * word.exp())
        return x


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_blocks_run_twice_in_a_pass_that_is_cut(use_reentrant: bool | None) -> None:
    def made() -> LargeEnd:
        torch.manual_seed(0)
        return LargeEnd(use_reentrant)

    model, store = made(), ActivationStore("cpu", LazyMover(), min_bytes=64)
    activations = CopiedActivations(model, find_blocks(model), store, let_out, may_recompute=True)
    found = []
    for number in range(3):
        activations.begin_step()
        activations.set_plan({}, 1, is_measuring=True)
        train(model, batch(number))
        found.append((activations.is_unusual, activations.has_cut))
    assert found == [(True, False), (True, True), (False, False)], "proofs, cuts, figures"
    if use_reentrant is None:  # umem runs none twice that a checkpoint does
        assert len(activations.proofs) == 1 + len(model.layers)
    names = list(activations.saved_bytes)
    proved = [name for name in names if name in activations.proofs]
    for again in (proved, proved[:2], []):
        kept = dict.fromkeys(name for name in names[:-1] if name not in again)
        activations.set_plan(kept, 1, is_measuring=False, recomputed=dict.fromkeys(again))
        model.zero_grad()
        assert train(model, batch(5)) == train(made(), batch(5))
    assert store.statistics.bytes_out > 0


def test_an_error_at_a_cut_does_not_reach_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[Exception] = []
    model = make(Recurrent)
    cut = Cut(model, on_error=errors.append)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no more groups")

    monkeypatch.setattr(cut.store, "split_group", fail)
    assert train(model, batch()) == train(make(Recurrent), batch())
    assert {str(error) for error in errors} == {"no more groups"}


def test_nothing_lives_longer_than_the_graph() -> None:
    model, words = make(Recurrent), batch()
    with MemoryMeter() as meter:
        meter.leave_out(words)
        cut = Cut(model, mover=HostBesideMover(meter))
        gc.collect()
        gc.disable()
        try:
            before_bytes = meter.live_bytes
            model(words).square().mean()
            cut.store.keep([])  # finds what has ended
            cut.store.stored(None)
            left_bytes = meter.live_bytes - before_bytes
        finally:
            gc.enable()
    assert left_bytes == 0


# ------------------------------------------------------------------ a plan


@pytest.mark.parametrize(
    ("made_in", "freed_before", "names"),
    [
        (5, 1, ("c", "a")),
        (4, 2, ("a", "b")),  # where "b" is reached, its last stretch begins
        (2, 3, ("a", "b")),
        (1, 4, ("a", "b")),
        (None, 6, (None, None)),
    ],
)
def test_slots_are_made_and_freed_where_blocks_begin(
    made_in: int | None, freed_before: int, names: tuple[str | None, str | None]
) -> None:
    order = ["", "a", "b", "b..2", "b..3", "c"]
    plan = SimpleNamespace(
        temporary=[TemporarySlot(made_in, freed_before)],
        left_before={},
        returning_gradients={},
        **dict.fromkeys(("resident", "copied_gradients", "final_gradients", "hosts"), ()),
        **dict.fromkeys(("fetch_ahead", "slots"), 2),
        **dict.fromkeys(("stages_operands", "adds_at_home"), False),
    )
    units = [SimpleNamespace(name=name) for name in order]
    whole: Any = SimpleNamespace(stream=plan, units=units, recomputed=(), left_out=frozenset())
    temporary = NamedPlan.of(whole, 1).temporary
    assert (temporary.made_in, temporary.freed_before) == ((names[0],), (names[1],))


@pytest.mark.parametrize(
    "lengths", [7 * [WORDS], 6 * [WORDS // 3] + 20 * [WORDS]], ids=["equal", "longer later"]
)
@pytest.mark.slow
def test_a_recurrent_net_within_60_percent_of_its_peak(
    lengths: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "_SLACK_SHARES", (1.0,))

    def x(step: int) -> torch.Tensor:
        return batch(step, lengths[step])

    stock_bytes, expected, _ = train_within(make(Recurrent), None, x, len(lengths))
    limit_bytes = int(0.6 * stock_bytes)
    most_bytes, weights, status = train_within(make(Recurrent), limit_bytes, x, len(lengths))
    assert weights == expected
    assert status is not None
    assert status.overflow_bytes == 0
    assert status.copied_blocks > 0
    assert status.activations.late_fetches == 0
    assert most_bytes <= 0.6 * stock_bytes
