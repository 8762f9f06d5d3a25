"""Scripts that know nothing of umem give the same bits with streamed state and copied activations.

Each runs twice: as it is, and with its trainings found at their optimizers' first steps, as
``umem.enable`` finds them on a GPU.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import json
import tempfile
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from activation_chain import LazyMover
from found_trainings import Room, Streams, streaming
from lazy_lanes import LazyLanes
from streamed_programs import Net, Program, bits, compare
from torch import nn
from torch.nn.functional import softplus
from torch.optim.optimizer import Optimizer

import umem
from umem.core.errors import PlanError
from umem.hardware import load_hardware
from umem.offloading import ActivationStore
from umem.runtime.model_parts import optimizer_parameters
from umem.runtime.torch_hooks.hidden import hidden_in
from umem.streaming.tune import StreamTuner, TuningState, planning

transformers: Any = pytest.importorskip("transformers")
accelerate: Any = pytest.importorskip("accelerate")
peft: Any = pytest.importorskip("peft")
Trainer: Any = transformers.Trainer

pytestmark = pytest.mark.slow

TOKENS, VOCABULARY = 16, 64


# ------------------------------------------------------------------ transformers


def tokens(count: int, seed: int) -> Any:
    """A list is a data set."""
    generators = (torch.Generator().manual_seed(seed + index) for index in range(count))
    made = [torch.randint(0, VOCABULARY, (TOKENS,), generator=it) for it in generators]
    return [{"input_ids": it, "labels": it.clone()} for it in made]


def llama() -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = {"vocab_size": VOCABULARY, "max_position_embeddings": TOKENS, **shape, **heads}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))


def bf16_llama() -> Any:
    return llama().to(torch.bfloat16)


def lora() -> Any:
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "up_proj"], lora_dropout=0.1, init_lora_weights=False
    )
    return peft.get_peft_model(llama(), config)


def mapped_llama() -> Any:
    """Loaded from a file, each weight to where a device map says."""
    with tempfile.TemporaryDirectory() as folder:
        llama().save_pretrained(folder)
        return transformers.LlamaForCausalLM.from_pretrained(folder, device_map={"": "cpu"})


def hooked_llama() -> Any:
    """With accelerate's hooks around every module; the Trainer leaves it where it is."""
    model = accelerate.dispatch_model(
        mapped_llama(), {"": "cpu"}, main_device="cpu", force_hooks=True
    )
    assert model.hf_device_map == {"": "cpu"}
    assert all(
        hasattr(it, "_hf_hook") for it in model.modules() if list(it.parameters(recurse=False))
    )
    return model


class WithoutNorms(Trainer):  # type: ignore[misc]
    """Logs no norm of the gradients, which the Trainer computes also if it does not clip."""

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return grad_norm


def train(
    folder: Path,
    make_model: Callable[[], Any] = llama,
    resume: int | None = None,
    trainer_class: Any = Trainer,
    **arguments: Any,
) -> dict[str, Any]:
    """A script with a Trainer, and all that it leaves; `resume` begins anew from a checkpoint."""
    given: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 7,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
        **arguments,
    }

    def make() -> Any:
        trainer = trainer_class(
            model=make_model(),
            args=transformers.TrainingArguments(**given),
            train_dataset=tokens(20, 100),
            eval_dataset=tokens(4, 200),
        )
        trainer.remove_callback(transformers.PrinterCallback)
        return trainer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = make()
        trainer.train()
        logs = list(trainer.state.log_history)
        if resume is not None:
            given["max_steps"] += 4
            trainer = make()
            trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{resume}"))
            logs += trainer.state.log_history
    saved = {it: it.read_bytes() for it in sorted(folder.rglob("*.safetensors"))}
    states = {it: torch.load(it) for it in sorted(folder.rglob("optimizer.pt"))}
    timed = ("runtime", "per_second")
    return {
        "logs": [{k: v for k, v in it.items() if not k.endswith(timed)} for it in logs],
        "saved": {str(it.relative_to(folder)): content for it, content in saved.items()},
        "states": {str(it.relative_to(folder)): state for it, state in states.items()},
        "weights": dict(trainer.model.state_dict()),
    }


CHECKPOINTS = {"save_strategy": "steps", "save_steps": 3, "resume": 3}
EVALUATIONS = {"eval_strategy": "steps", "eval_steps": 2}
BLOCKS_AGAIN = {"gradient_checkpointing": True}
REENTRANT = {**BLOCKS_AGAIN, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
PROGRAMS: dict[str, dict[str, Any]] = {
    "saved and resumed": {**CHECKPOINTS, **EVALUATIONS},
    "bf16 weights": {"make_model": bf16_llama, "optim": "adamw_torch"},
    "autocast, checkpointed": {"bf16": True, **BLOCKS_AGAIN},
    "autocast, reentrant checkpoints": {
        "bf16": True,
        "optim": "adamw_torch_fused",
        **REENTRANT,
        **EVALUATIONS,
    },
    "adafactor": {"optim": "adafactor"},
    "with hooks of accelerate": {"make_model": hooked_llama, **CHECKPOINTS},
    "the best is loaded": {
        **EVALUATIONS,
        "save_strategy": "steps",
        "save_steps": 2,
        "load_best_model_at_end": True,
        "save_total_limit": 1,
    },
    "lora": {"make_model": lora, **CHECKPOINTS},
    "lora, checkpointed": {"make_model": lora, "gradient_accumulation_steps": 2, **REENTRANT},
}


WITH_ROOM = ("saved and resumed", "autocast, reentrant checkpoints", "adafactor", "lora")
"""Trained with room for a part of the state, too."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_trainer_with_streamed_state_is_exact(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = bits(train(tmp_path / "stock", **PROGRAMS[name]))
    for more_bytes in (-(10**6), 30_000)[: 2 if name in WITH_ROOM else 1]:
        streams = Streams(more_bytes)
        with streaming(streams, monkeypatch):
            found = bits(train(tmp_path / str(more_bytes), **PROGRAMS[name]))
        assert found == expected
        assert json.dumps(found["logs"]).count('"loss"') >= 6
        for training in streams.trainings:
            counts, status = training.counts, training.status().tuning
            assert counts.in_line == 0
            assert status is not None
            if name != "adafactor":
                assert counts.streamed > 1
            if more_bytes < 0:
                assert status.activations.tensors_out > 0


def test_a_trainer_that_looks_at_no_gradient_steps_in_its_backward_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {**EVALUATIONS, **CHECKPOINTS, "max_grad_norm": 0.0}
    options["trainer_class"] = WithoutNorms
    expected = bits(train(tmp_path / "stock", **options))
    streams = Streams(in_backward=True)
    with streaming(streams, monkeypatch):
        assert bits(train(tmp_path / "streamed", **options)) == expected
    assert all(it.counts.ahead > 0 for it in streams.trainings)


@pytest.mark.parametrize(
    ("reason", "options"),
    [
        ("a gradient is used", {}),
        ("a gradient is used", {"max_grad_norm": 0.0}),
        (
            "without step",
            {"trainer_class": WithoutNorms, "max_grad_norm": 0.0, "gradient_accumulation_steps": 2},
        ),
    ],
)
def test_other_trainers_are_refused_in_the_backward_pass(
    reason: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with streaming(Streams(in_backward=True), monkeypatch), pytest.raises(PlanError, match=reason):
        train(tmp_path, **options)


# ------------------------------------------------------------------ compilers and transforms


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    torch.compiler.reset()
    return torch.compile(function, backend="eager", **options)


def compile_what_calls_the_model(program: Program) -> None:
    if program.kept is None:
        program.kept = compiled(lambda x: program.model(x).square().mean())
    program.optimizer.zero_grad()
    loss = program.kept(program.batch())
    program.seen.append(loss.detach())
    loss.backward()
    program.optimizer.step()


def gradient_of_a_function(program: Program) -> None:
    def loss(weights: Any, x: torch.Tensor) -> Any:
        called: Any = torch.func.functional_call(program.model, weights, (x,))
        return called.square().mean()

    weights = {name: it.detach() for name, it in program.model.named_parameters()}
    program.seen.append(torch.func.grad(loss)(weights, torch.ones(2, 16)))


@pytest.mark.parametrize(
    "change", [compile_what_calls_the_model, gradient_of_a_function], ids=lambda it: it.__name__
)
def test_compilers_and_transforms_see_updated_weights(change: Callable[[Program], None]) -> None:
    # More steps than torch compiles the same code again.
    assert compare(change, steps=10).training.counts.in_line == 0


def test_transforms_do_not_end_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "_SLACK_SHARES", (1.0,))
    room = Room(-1)
    store = ActivationStore("cpu", LazyMover(), min_bytes=64)
    streamed = Program(lambda model: LazyLanes(model, 0.5))
    tuner = StreamTuner(streamed.model, load_hardware("h200"), room, room, store)
    streamed.tuner = tuner
    found = streamed.run(gradient_of_a_function, steps=5)
    assert bits(found) == bits(Program(None).run(gradient_of_a_function, steps=5))
    assert tuner.status().state == TuningState.NO_PLAN_FITS
    assert tuner.status().activations.tensors_out > 0


def compiled_norm(program: Program) -> None:
    if program.kept is None:
        program.kept = compiled(lambda weight: weight.square().sum())
    program.optimizer.zero_grad()
    program.backward()
    program.seen.append(program.kept(program.model.head.weight).detach())
    program.optimizer.step()


@pytest.mark.parametrize("plain", [0, 4])
def test_code_that_is_compiled_before_the_step_is_refused_in_the_backward_pass(plain: int) -> None:
    with pytest.raises(Exception, match="code is compiled between backward"):
        compare(compiled_norm, in_backward=True, clips=False, plain=plain)


# ------------------------------------------------------------------ other loops


def _adamw(*modules: nn.Module) -> Optimizer:
    return torch.optim.AdamW([it for m in modules for it in m.parameters()], lr=1e-2)


def _batch(number: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(number))


def _step(model: nn.Module, optimizer: Optimizer, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()


def _wide(layers: int) -> Net:
    net = Net(layers)
    net.head = nn.Linear(16, 16)
    return net


def two_networks(seen: list[Any]) -> None:
    maker, judge = _wide(2), Net(2)
    of_maker, of_judge = _adamw(maker), _adamw(judge)
    for number in range(8):
        of_judge.zero_grad()
        made = maker(_batch(number))
        right = softplus(-judge(_batch(100 + number))) + softplus(judge(made.detach()))
        right.mean().backward()
        of_judge.step()
        of_maker.zero_grad()
        softplus(-judge(made)).mean().backward()
        of_maker.step()
        seen.append(right.detach())
    seen += [*maker.parameters(), *judge.parameters()]


def one_optimizer_of_two_networks(seen: list[Any]) -> None:
    first, second = _wide(3), Net(2)
    optimizer = _adamw(first, second)
    for number in range(8):
        optimizer.zero_grad()
        loss = second(first(first(_batch(number)))).square().mean() + second(_batch(-number)).sum()
        loss.backward()
        nn.utils.clip_grad_norm_(optimizer_parameters(optimizer), 0.5)
        optimizer.step()
        seen.append(loss.detach())
    seen += [*first.parameters(), *second.parameters()]


def two_optimizers_of_one_network(seen: list[Any]) -> None:
    model = Net()
    optimizers = [
        torch.optim.AdamW([it for it in model.parameters() if it.ndim > 1], lr=1e-2),
        torch.optim.SGD([it for it in model.parameters() if it.ndim == 1], lr=1e-2, momentum=0.9),
    ]
    for number in range(8):
        model.zero_grad()
        model(_batch(number)).square().mean().backward()
        seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        for optimizer in optimizers[: 1 + number % 2]:
            optimizer.step()
    seen += model.parameters()


def interrupted(seen: list[Any]) -> None:
    model = Net()
    optimizer, fails = _adamw(model), [False]

    def interrupt(*_: object) -> None:
        if fails[0]:
            raise KeyboardInterrupt

    model.layers[1].get_parameter("weight").register_hook(interrupt)
    for number in range(12):
        fails[0] = number % 4 == 3
        optimizer.zero_grad()
        loss = model(_batch(number)).square().mean()
        seen.append(loss.detach())
        try:
            loss.backward()
        except KeyboardInterrupt:
            seen.append([it.grad is None for it in model.parameters()])
        optimizer.step()  # with the gradients that there are
    seen += model.parameters()


class FromModel(torch.utils.data.Dataset[Any]):
    """Calls a model where its data are made."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __len__(self) -> int:
        return 4

    @torch.no_grad()
    def __getitem__(self, index: int) -> Any:
        return self._model(_batch(index))


def forked_workers(seen: list[Any]) -> None:
    model = Net()
    optimizer = _adamw(model)
    rows: Any = [*_batch(1)]
    for _ in range(3):
        for batch in torch.utils.data.DataLoader(rows, 4, num_workers=1):
            _step(model, optimizer, batch)
        loader = torch.utils.data.DataLoader(
            FromModel(model), 2, num_workers=1, multiprocessing_context="fork"
        )
        seen += loader
    seen += model.parameters()


def copied_and_continued(seen: list[Any]) -> None:
    model = Net()
    optimizer = _adamw(model)
    for number in range(10):
        _step(model, optimizer, _batch(number))
        seen.append(copy.deepcopy(model)(_batch(0)))
        if number == 5:
            model, optimizer = copy.deepcopy((model, optimizer))
    seen += model.parameters()


def a_recipe_of_torchtune(seen: list[Any]) -> None:
    """Its loop for one device: the batches of a step count by their tokens, gradients are scaled
    in place, and a pass without gradients comes between steps."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    running, tokens = torch.zeros(()), 0
    for number in range(24):
        batch = _batch(number)[: 3 + number % 5]
        loss = model(batch).square().sum()
        tokens += len(batch)
        running += loss.detach()
        loss.backward()
        if number % 3 < 2:
            continue
        for it in model.parameters():
            assert it.grad is not None
            it.grad *= 1 / tokens
        seen.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        seen += [running / tokens, *schedule.get_last_lr()]
        running, tokens = torch.zeros(()), 0
        with torch.no_grad():
            seen.append(model.eval()(_batch(-number)).clone())
        model.train()
    seen += model.parameters()


def a_loop_of_accelerate(seen: list[Any]) -> None:
    """Batches are accumulated: `step` and `zero_grad` of its optimizer mostly do nothing."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=3)
    rows: Any = [*_batch(0), *_batch(1)]
    net = _wide(2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer := _adamw(net), lambda it: 1 / (1 + it))
    model, optimizer, batches, schedule = accelerator.prepare(
        net, optimizer, torch.utils.data.DataLoader(rows, 2), schedule
    )
    for _ in range(3):
        for batch in batches:
            with accelerator.accumulate(model):
                loss = model(batch).square().mean()
                accelerator.backward(loss)
                seen.append(loss.detach())
                if accelerator.sync_gradients:
                    seen.append(accelerator.clip_grad_norm_(model.parameters(), 0.5))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        seen.append(copy.deepcopy(accelerator.get_state_dict(model)))
    seen += [*net.parameters(), *schedule.get_last_lr()]


class Replayed(torch.autograd.Function):
    """Two functions that find all memory by its address, as the replay of a CUDA graph does."""

    @staticmethod
    def forward(ctx: Any, part: GraphedPart, x: torch.Tensor, *_weights: torch.Tensor) -> Any:
        ctx.part = part
        part.x.copy_(x)
        torch.addmm(part.bias, part.x, part.weight.T, out=part.y)
        return part.y.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        part = ctx.part
        part.of_y.copy_(gradients[0])
        torch.mm(part.of_y, part.weight, out=part.of_x)
        torch.mm(part.of_y.T, part.x, out=part.of_weight)
        torch.sum(part.of_y, 0, out=part.of_bias)
        return (None, *(it.detach() for it in (part.of_x, part.of_weight, part.of_bias)))


class GraphedPart:
    """A stand-in for what `torch.cuda.make_graphed_callables` makes of a linear layer.

    Its tensors keep their memory. It knows the layer's by their addresses, so that nothing else
    sees it use them.
    """

    def __init__(self, layer: nn.Linear, rows: int) -> None:
        self.weight, self.bias = (_at_its_address(it) for it in (layer.weight, layer.bias))
        self.x, self.of_x = (torch.empty(rows, layer.in_features) for _ in range(2))
        self.y, self.of_y = (torch.empty(rows, layer.out_features) for _ in range(2))
        self.of_weight, self.of_bias = map(torch.empty_like, (self.weight, self.bias))
        weights = tuple(layer.parameters())
        eager = layer.forward

        def forward(x: torch.Tensor) -> Any:
            if not layer.training:
                return eager(x)
            return Replayed.apply(self, x, *weights)  # type: ignore[no-untyped-call]

        layer.forward = forward  # type: ignore[method-assign, assignment]


def _at_its_address(weight: torch.Tensor) -> torch.Tensor:
    memory = (ctypes.c_char * weight.nbytes).from_address(weight.data_ptr())
    return torch.frombuffer(memory, dtype=weight.dtype).view(weight.shape)


def parts_that_are_replayed(seen: list[Any]) -> None:
    model = _wide(4)
    optimizer = _adamw(model)
    parts = [GraphedPart(model.layers[number], 8) for number in (0, 2, 3)]  # type: ignore[arg-type]
    for number in range(10):
        for batch in range(1 + number % 2):
            loss = model(_batch(2 * number + batch)).square().mean()
            loss.backward()
            seen.append(loss.detach())
        if number % 3:
            seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad(set_to_none=number % 4 > 0)
        if number % 5 == 4:
            seen.append(model.eval()(_batch(-number)).detach())
            model.train()
    seen += [*model.parameters(), *(it.weight for it in parts)]


def an_optimizer_for_each_parameter(seen: list[Any]) -> None:
    """As torchtune's `optimizer_in_bwd`: each steps in the backward pass and frees its gradient."""
    model = _wide(2)  # whose state is large enough to be streamed
    optimizers: dict[Any, Optimizer] = {
        it: torch.optim.AdamW([it], lr=1e-2) for it in model.parameters()
    }

    def step(it: torch.Tensor) -> None:
        optimizers[it].step()
        optimizers[it].zero_grad()

    for it in model.parameters():
        it.register_post_accumulate_grad_hook(step)
    for number in range(8):
        loss = model(_batch(number)).square().mean()
        loss.backward()
        seen.append(loss.detach())
    seen += model.parameters()


def test_a_model_that_is_trained_again_keeps_nothing_of_its_first_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(streams: Streams | None) -> Any:
        torch.manual_seed(0)
        model = Net()
        with streaming(streams, monkeypatch):
            for _ in range(2):
                optimizer = _adamw(model)
                for number in range(6):
                    _step(model, optimizer, _batch(number))
                umem.join()
                state = weakref.ref(next(iter(optimizer.state.values()))["exp_avg"])
                hooks = hidden_in(model._forward_pre_hooks)
                del optimizer
                gc.collect()
                if streams is not None:
                    assert streams.trainings[-1].is_closed
                    assert hidden_in(model._forward_pre_hooks) < hooks
                assert state() is None
            return bits(list(model.parameters()))

    streams = Streams(10_000)
    assert run(streams) == run(None)
    assert [it.counts.streamed for it in streams.trainings] == [5, 5]


LOOPS: list[Callable[[list[Any]], None]] = [
    *(two_networks, one_optimizer_of_two_networks, two_optimizers_of_one_network),
    *(interrupted, forked_workers, copied_and_continued, a_recipe_of_torchtune),
    *(an_optimizer_for_each_parameter, a_loop_of_accelerate, parts_that_are_replayed),
]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda it: it.__name__)
def test_loops_are_exact(
    loop: Callable[[list[Any]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(streams: Streams | None) -> Any:
        torch.manual_seed(0)
        seen: list[Any] = []
        with streaming(streams, monkeypatch):
            loop(seen)
            return bits(seen)

    expected = run(None)
    for more_bytes in (-1, 10_000):
        streams = Streams(more_bytes)
        assert run(streams) == expected
        assert all(it.counts.streamed > 1 for it in streams.trainings)
        # All optimizers of a model have one plan, and one set of slots.
        shared = [(it.model, it.tuner, it.step.units.ring) for it in streams.trainings]
        assert len(set(shared)) == len({model for model, _, _ in shared})
