"""What programs do between two steps, under every way to stream them: all bits are stock's.

The matrix is uses x engines x eagerness of the late lanes, and models of other shapes x engines.
The tests of an engine's own behaviour have files of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lazy_lanes import LazyLanes
from pairs import pairs
from streamed_models import Cached, Packed, QLoRA, adamw_of_trained, one_in_a_group
from streamed_programs import (
    BACK,
    EAGERNESS,
    TEMPORARY,
    UNITS,
    WATCHED,
    Adapters,
    Branches,
    Checkpointed,
    CheckpointedGates,
    Net,
    NetWithFlat,
    Program,
    Reentrant,
    Tied,
    WeightProgram,
    compare,
    nothing,
    stock_bits,
)
from streamed_uses import USES, swap_state, view_of_state
from torch import nn

from umem.core.errors import PlanError
from umem.streaming import StreamedTraining
from umem.streaming.stage import Ring
from umem.streaming.step import TemporaryPlan

NEEDS_GRADIENTS = frozenset(
    (
        *("logged_norms", "zero_in_place", "step_again", "convert", "skip_a_step"),
        *("accumulate_into_old_gradients", "step_with_a_closure", "view_of_gradients"),
        *("hook_before_step", "new_group", "share_state", "clip_late", "scale_one_gradient"),
        *("restore_weights_from_state", "convert_by_swapping"),
    )
)
"""Uses that need gradients behind a step, or another number of steps than of backward passes."""

OF_FLOATS = frozenset(
    (
        *("change_weights_in_place", "copy_model", "ema", "foreach_ema", "freeze_by_turns"),
        *("from_one_vector", "hooks_on_gradients", "new_parameter", "old_graph", "replace_data"),
        *("share_state", "use_a_weight_elsewhere", "ema_by_hand", "ema_of_diffusers"),
        *("foreach_ema_of_diffusers", "ema_of_timm", "ema_of_torch", "turn_weights"),
        *("restore_weights_from_state", "convert_by_swapping", "swap_weights"),
    )
)
"""Uses of weights that are plain parameters of floating point numbers, and trained."""

OF_ADAMW = frozenset(("share_state", "replace_state", "read_counts", "view_of_counts"))
"""Uses that take a step count for a tensor, or an optimizer of one group."""


# ---- the engines ----


def weights_are_fetched(run: Any) -> None:
    assert run.weights.streamed.counts.fetched


def steps_are_streamed(run: Any) -> None:
    assert run.training.counts.streamed
    if run.weights is not None:
        weights_are_fetched(run)


def blocks_run_again(run: Any) -> None:
    assert len(run.activations.proofs) > 2


def checkpoints_are_left_out(run: Any) -> None:
    assert sum(it.checkpointed_bytes > 0 for it in run.activations.proofs.values()) > 2


def adapters_are_trained(run: Any) -> None:
    weights_are_fetched(run)
    assert {type(it) for it in run.model.parameters()} == {Packed, nn.Parameter}


def units_are_updated_in_the_backward_pass(run: Any) -> None:
    assert run.training.counts.ahead >= 8 * (run.plain - 2)


def the_host_updates(run: Any) -> None:
    assert run.training.counts.by_host


def state_is_in_four_pieces(run: Any) -> None:
    assert [len(it) for it in run.training.step.units.sizes().values() if len(it) > 2] == [4]


@dataclass(frozen=True)
class Engine:
    """A way to stream programs.

    Parameters
    ----------
    options
        Of `compare`.
    eagerness
        Of the lanes.
    check
        Looks at a streamed run.
    leaves_out
        Uses that go with another model only.
    refuses
        Uses that it refuses by an error.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    eagerness: tuple[float, ...] = EAGERNESS
    check: Callable[[Any], None] = nothing
    leaves_out: frozenset[str] = frozenset()
    refuses: frozenset[str] = frozenset()


def in_backward(plain: int, **options: Any) -> dict[str, Any]:
    return {"in_backward": True, "clips": False, "plain": plain, "seed": 7, **options}


HOSTS = frozenset(("stem", "layers.1", "layers.2"))
"""Units that the host updates."""

ENGINES = {
    "state": Engine({"seed": 7}),
    "state-in-pieces": Engine(
        {"make_model": NetWithFlat, "seed": 3}, (0.5,), state_is_in_four_pieces
    ),
    "state-with-a-number-in-pieces": Engine(
        {"make_model": NetWithFlat, "make_optimizer": lambda ps: one_in_a_group(ps, 1e-2)},
        (1.0,),  # numbers are there when a step returns, as with lanes of a GPU
        leaves_out=OF_ADAMW,
    ),
    "temporary-slots": Engine({"temporary": TEMPORARY}),
    # Two of them are made when the step begins.
    "temporary-slots-at-the-step": Engine(
        {"temporary": TemporaryPlan(("layers.3", None, None), TEMPORARY.freed_before)}
    ),
    "gradients": Engine({"copied_gradients": UNITS}, (0.0,)),
    "returning-gradients": Engine({"copied_gradients": UNITS, "returning": BACK}),
    "host": Engine({"hosts": HOSTS, "copied_gradients": UNITS}, check=the_host_updates),
    "host-in-pieces": Engine(
        {"hosts": HOSTS, "copied_gradients": HOSTS, "make_model": NetWithFlat},
        (0.5,),
        the_host_updates,
    ),
    "weights": Engine({"kind": WeightProgram}),
    "weights-and-state": Engine({"streams_weights": True}, check=weights_are_fetched),
    "recomputed": Engine({"recomputes": True}, (0.5,), blocks_run_again),
    "recomputed-with-weights-and-state": Engine(
        {"recomputes": True, "streams_weights": True}, check=blocks_run_again
    ),
    "checkpoints-left-out": Engine(
        {"make_model": CheckpointedGates, "recomputes": True}, (0.5,), checkpoints_are_left_out
    ),
    "checkpoints-left-out-with-weights-and-state": Engine(
        {"make_model": CheckpointedGates, "recomputes": True, "streams_weights": True},
        check=checkpoints_are_left_out,
    ),
    "weights-of-four-bits": Engine(
        {"make_model": QLoRA, "make_optimizer": adamw_of_trained, "streams_weights": True},
        (0.5,),
        adapters_are_trained,
        leaves_out=OF_FLOATS,
    ),
    "caches-of-eight-bits": Engine(
        {"make_model": Cached, "batches": 2}, (0.5,), steps_are_streamed
    ),
    "weights-and-caches-of-eight-bits": Engine(
        {"make_model": Cached, "batches": 2, "streams_weights": True}, (0.5,), steps_are_streamed
    ),
    "in-backward-watched": Engine(
        in_backward(0), check=units_are_updated_in_the_backward_pass, refuses=NEEDS_GRADIENTS
    ),
    "in-backward": Engine(
        in_backward(WATCHED), check=units_are_updated_in_the_backward_pass, refuses=NEEDS_GRADIENTS
    ),
    "recomputed-in-backward": Engine(
        in_backward(WATCHED, recomputes=True), (0.5,), blocks_run_again, leaves_out=NEEDS_GRADIENTS
    ),
    "in-backward-in-pieces": Engine(
        in_backward(WATCHED, make_model=NetWithFlat),
        (0.5,),
        units_are_updated_in_the_backward_pass,
        leaves_out=NEEDS_GRADIENTS,
    ),
}


OFTEN = ("state", "weights", "in-backward")
"""Engines of the fast tests, each with one eagerness. The others use the same parts."""

BY_TURNS = (
    ("weights-and-state",),
    ("state-in-pieces", "state-with-a-number-in-pieces", "host-in-pieces"),
    ("temporary-slots", "temporary-slots-at-the-step"),
    ("gradients", "returning-gradients", "host"),
    (
        *("recomputed", "recomputed-with-weights-and-state"),
        *("checkpoints-left-out", "checkpoints-left-out-with-weights-and-state"),
    ),
    ("weights-of-four-bits", "caches-of-eight-bits", "weights-and-caches-of-eight-bits"),
    ("in-backward-watched", "recomputed-in-backward", "in-backward-in-pieces"),
)
"""Engines of the same parts: every use meets one of each line, the next use the next one."""


def cases() -> Iterator[Any]:
    """Use, engine and eagerness; by use first, whose stock runs are kept for all its engines.

    Each engine has its eagernesses by turns, but for the first two, where each use meets both.
    """
    for number, use in enumerate(USES):
        for names in (*((it,) for it in OFTEN), *BY_TURNS):
            able = [it for it in names if use.__name__ not in ENGINES[it].leaves_out]
            if not able:
                continue
            turn, place = divmod(number, len(able))
            name, engine = able[place], ENGINES[able[place]]
            chosen = engine.eagerness[turn % len(engine.eagerness)]
            for eagerness in engine.eagerness if name in OFTEN[:2] else (chosen,):
                case_id = f"{use.__name__}-{name}-{eagerness}"
                is_often = name in OFTEN and eagerness == chosen
                marks = () if is_often else (pytest.mark.slow,)
                yield pytest.param(use, engine, eagerness, id=case_id, marks=marks)


@pytest.mark.parametrize(("use", "engine", "eagerness"), list(cases()))
def test_whatever_the_program_does(
    use: Callable[[Program], None], engine: Engine, eagerness: float
) -> None:
    if use.__name__ in engine.refuses:
        with pytest.raises(PlanError, match="without step_in_backward"):
            compare(use, eagerness, **engine.options)
    else:
        engine.check(compare(use, eagerness, **engine.options))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["state", "in-backward"])
@settings(deadline=None, max_examples=25)
@given(
    data=st.data(),
    eagerness=st.floats(0, 0.99),
    seed=st.integers(0, 100),
    slots=st.integers(0, 6),
    most_buffers=st.sampled_from([None, None, 0, 1]),
    resident=st.sets(st.sampled_from(["stem", "layers.0", "layers.2", "head", ""])),
)
def test_uses_in_any_order(
    name: str,
    data: st.DataObject,
    eagerness: float,
    seed: int,
    slots: int,
    most_buffers: int | None,
    resident: set[str],
) -> None:
    engine = ENGINES[name]
    allowed = [use for use in USES if use.__name__ not in engine.refuses]
    uses = data.draw(st.lists(st.sampled_from(allowed), max_size=4))

    def change(program: Program) -> None:
        for use in uses:
            use(program)

    options = {**engine.options, "slots": slots, "resident": frozenset(resident)}
    options |= {"most_buffers": most_buffers}
    del options["seed"]
    try:
        expected = stock_bits(change, **options)
    except (RuntimeError, ValueError) as error:  # some do not go together
        with pytest.raises((type(error), PlanError) if engine.refuses else type(error)):
            Program(lambda it: LazyLanes(it, eagerness, seed), **options).run(change)
        return
    try:
        compare(change, eagerness, seed, expected=expected, **options)
    except PlanError:
        assert engine.refuses  # one after another, such as a step behind a step


@pytest.mark.parametrize("name", ["state", "in-backward"])
def test_views_of_state_are_let_go_of(name: str) -> None:
    """torch swaps no tensor that has a view."""

    def change(program: Program) -> None:
        view_of_state(program)
        swap_state(program)

    options = {**ENGINES[name].options}
    del options["seed"]
    compare(change, 0.0, 0, slots=0, resident=frozenset(), **options)


# ---- several optimizers of one model ----


def adamw_and_sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
    every = list(model.parameters())
    return [
        torch.optim.AdamW([it for it in every if it.ndim > 1], lr=1e-2),
        torch.optim.SGD([it for it in every if it.ndim == 1], lr=1e-2, momentum=0.9),
    ]


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("no Muon in this torch")
    blocks = [it for name, it in model.named_parameters() if "layers" in name]
    hidden = [it for it in blocks if it.ndim == 2]
    known = set(map(id, hidden))
    return [
        torch.optim.Muon(hidden, lr=1e-2),
        torch.optim.AdamW([it for it in model.parameters() if id(it) not in known], lr=1e-2),
    ]


def one_for_each_block(model: nn.Module) -> list[torch.optim.Optimizer]:
    made = [torch.optim.AdamW(it.parameters(), lr=1e-2) for it in model.children()]
    return [*made, torch.optim.SGD([model.get_parameter("scale")], lr=1e-2, momentum=0.9)]


@dataclass(eq=False)
class SeveralOptimizers(Program):
    """From the second step on, the second optimizer steps in every second one only."""

    make_optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]] = adamw_and_sgd
    trainings: list[StreamedTraining] = field(default_factory=list)
    is_skipped: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.optimizers = self.make_optimizers(self.model)
        states = lambda: [it.state_dict() for it in self.optimizers]  # noqa: E731
        self.optimizer = SimpleNamespace(state_dict=states)

    def stream(self) -> None:
        if self.lanes is not None:
            self.begin_lanes(self.lanes)
            ring = Ring(self.memory, self.lazy)
            self.trainings = [
                StreamedTraining(
                    self.model, it, self.lazy, self.memory, weights=self.weights, ring=ring
                )
                for it in self.optimizers
            ]

    def step(self) -> None:
        self.model.zero_grad()
        for _ in range(self.batches):
            self.backward()
        self.seen.append(nn.utils.clip_grad_norm_(self.model.parameters(), 0.5))
        for number, optimizer in enumerate(self.optimizers):
            if number != 1 or not self.is_skipped:
                optimizer.step()
        self.is_skipped = not self.is_skipped


@pytest.mark.parametrize(
    ("make_optimizers", "streams_weights", "batches", "eagerness"),
    pairs(
        [adamw_and_sgd, muon_and_adamw, one_for_each_block], [False, True], [1, 2], [0.0, 0.5, 0.9]
    ),
)
def test_optimizers_of_one_model(
    make_optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]],
    streams_weights: bool,
    batches: int,
    eagerness: float,
) -> None:
    run = compare(
        eagerness=eagerness,
        seed=1,
        steps=5,
        kind=SeveralOptimizers,
        make_optimizers=make_optimizers,
        streams_weights=streams_weights,
        batches=batches,
    )
    assert run.trainings[0].counts.streamed > 0


# ---- models of other shapes ----


class Stopped(Net):
    """Uses weights that no gradient goes to: the graph has them without a version counter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x @ self.head.weight.detach().t() @ self.head.weight.data)


class PartlyFrozen(Net):
    """Some weights get no gradient, and a block lacks one of two."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].requires_grad_(False)
        self.layers[1].weight.requires_grad_(False)


LAST = frozenset(["layers.3", "norm", "head"])


def shapes(name: str, *models: type[Net], **axes: tuple[Any, ...]) -> Iterator[Any]:
    """A model, a way to stream it, and values of further options."""
    for make_model, *values in pairs(models, *axes.values()):
        options = {**ENGINES[name].options, **dict(zip(axes, values, strict=True))}
        words = [make_model.__name__, name]
        words += [f"{axis}={_short(value)}" for axis, value in zip(axes, values, strict=True)]
        yield pytest.param(name, {**options, "make_model": make_model}, id="-".join(words))


def _short(value: Any) -> str:
    named = {UNITS: "all", LAST: "last", frozenset[str](): "none"}
    return named.get(value, "") if isinstance(value, frozenset) else str(value)


ODD = (NetWithFlat, Tied, Branches)
AGAIN = (Checkpointed, Reentrant)
SHAPES = [
    *shapes("state", *ODD[1:], seed=(5,), eagerness=EAGERNESS),
    *shapes("state", *AGAIN, seed=(0,), eagerness=EAGERNESS),
    *shapes("temporary-slots", Net, *ODD, *AGAIN, eagerness=EAGERNESS, batches=(1, 2), steps=(4,)),
    *shapes("gradients", *ODD, eagerness=(0.5,), copied_gradients=(UNITS, LAST), batches=(1, 2)),
    *shapes(
        "returning-gradients",
        *ODD,
        eagerness=(0.5,),
        copied_gradients=(UNITS, LAST),
        batches=(1, 2),
    ),
    *shapes("returning-gradients", *AGAIN),
    *shapes("weights", *ODD, slots=(1, 2, 3, 8), eagerness=(0.0, 0.5)),
    *shapes("weights", *AGAIN, Adapters, slots=(1, 2, 3), batches=(1, 2), eagerness=(0.5,)),
    *shapes(
        "weights-and-state",
        *ODD,
        batches=(1, 2),
        copied_gradients=(UNITS, frozenset()),
        eagerness=(0.5,),
    ),
    *shapes("in-backward", Stopped, *ODD[1:], PartlyFrozen, *AGAIN, eagerness=EAGERNESS),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), SHAPES)
def test_models_of_other_shapes(name: str, options: dict[str, Any]) -> None:
    batches = options.get("batches", 1)
    if "temporary" in options:
        plan = TemporaryPlan(TEMPORARY.made_in, TEMPORARY.freed_before, batches=batches)
        options = {**options, "temporary": plan}
    run = compare(**options)
    make_model = options["make_model"]
    if name == "state" and make_model in AGAIN:
        assert run.training.counts.waited == 0
    if name == "temporary-slots":
        assert run.training.counts.in_line == 0
        if make_model is not Branches:
            assert len(run.training.step.units.ring.temporary) == 3
    if name == "in-backward":
        assert run.training.counts.ahead > 0


@pytest.mark.slow
def test_updates_stay_deferred_and_weights_are_fetched_ahead() -> None:
    # On a GPU, too, updates are launched when they are queued.
    program = compare(steps=8, eagerness=1.0, streams_weights=True)
    counts, weights = program.training.counts, program.weights.streamed.counts
    # At the end the program looks at all weights itself.
    assert (counts.waited, counts.early, counts.in_line) == (0, 8, 0)
    # In each step the first block comes late: its update is what the step began with.
    assert weights.late <= 8 + 2


@pytest.mark.slow
def test_updates_in_the_backward_pass_use_weights_in_place() -> None:
    program = compare(steps=6, clips=False, in_backward=True, streams_weights=True)
    assert program.weights.status().streamed_bytes == 0
