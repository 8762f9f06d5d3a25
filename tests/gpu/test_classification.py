"""The class of every tensor of real models, in the usual kinds of training."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import umem
from umem.core.classes import TensorClass

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("settled")

MIB = 1 << 20
VOCABULARY = 4096
Named = Iterable[tuple[str, torch.Tensor]]
Find = Callable[[torch.Tensor], TensorClass | None]


def llama_on_cpu(**settings: Any) -> Any:
    """Two layers whose parameters range from 1 KiB to 4 MiB."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=2048,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        **{"tie_word_embeddings": False, **settings},
    )
    return transformers.LlamaForCausalLM(config)


def llama(**settings: Any) -> Any:
    return llama_on_cpu(**settings).cuda()


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, 64), device="cuda")


def loss_of(model: Any, ids: torch.Tensor | None = None) -> torch.Tensor:
    ids = tokens() if ids is None else ids
    return model(input_ids=ids, labels=ids).loss


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def wrong(named: Named, expected: TensorClass) -> dict[str, str]:
    """The CUDA tensors of another class than `expected`, with the class that they have."""
    known = {block.address: block.tensor_class for block in umem.tensors()}
    found = {name: known.get(address(t)) for name, t in named if t.is_cuda}
    assert found, "no tensors to look at"
    return {name: str(other) for name, other in found.items() if other is not expected}


def gradients(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return ((n, p.grad) for n, p in model.named_parameters() if p.grad is not None)


def state(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for number, values in enumerate(optimizer.state.values()):
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                yield f"{number}.{key}", value


def requested() -> dict[TensorClass, int]:
    return {name: memory.requested_bytes for name, memory in umem.memory_by_class().items()}


def size_bytes(named: Named) -> int:
    """Bytes of the CUDA storages, each counted once."""
    return sum({address(t): t.untyped_storage().nbytes() for _, t in named if t.is_cuda}.values())


def steps(model: Any, optimizer: torch.optim.Optimizer, count: int = 1) -> None:
    for _ in range(count):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw-foreach": partial(torch.optim.AdamW, lr=1e-4, foreach=True),
    "adamw-fused": partial(torch.optim.AdamW, lr=1e-4, fused=True),
    "adamw-loop": partial(torch.optim.AdamW, lr=1e-4, foreach=False),
    "sgd-momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_full_fine_tuning(name: str) -> None:
    before = requested()
    model = llama()
    optimizer = OPTIMIZERS[name](model.parameters())
    for step in range(3):
        loss_of(model).backward()
        assert wrong(gradients(model), TensorClass.GRADIENTS) == {}, f"step {step}"
        optimizer.step()
        assert wrong(state(optimizer), TensorClass.OPTIMIZER_STATE) == {}, f"step {step}"
        assert wrong(model.named_parameters(), TensorClass.WEIGHTS) == {}, f"step {step}"
        optimizer.zero_grad(set_to_none=True)
    grown = {name: size - before[name] for name, size in requested().items()}
    assert grown[TensorClass.WEIGHTS] == size_bytes(model.named_parameters())
    assert grown[TensorClass.OPTIMIZER_STATE] == size_bytes(state(optimizer))
    assert grown[TensorClass.GRADIENTS] == 0
    assert grown[TensorClass.FROZEN_WEIGHTS] == 0


def test_gradient_accumulation() -> None:
    model = llama()
    loss_of(model).backward()
    first = {name: address(gradient) for name, gradient in gradients(model)}
    for _ in range(2):
        loss_of(model).backward()
        assert {name: address(gradient) for name, gradient in gradients(model)} == first
        assert wrong(gradients(model), TensorClass.GRADIENTS) == {}


def test_saved_tensors_are_activations() -> None:
    model, ids = llama(), tokens()
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(model, ids)
    known = {address(t) for t in (*model.parameters(), *model.buffers(), ids)}
    saved = [
        (f"{number} {list(t.shape)} {t.dtype}", t)
        for number, t in enumerate(kept)
        if t.is_cuda and t.numel() and address(t) not in known
    ]
    assert len(saved) > 20
    assert any(t.untyped_storage().nbytes() >= 2 * MIB for _, t in saved)
    assert wrong(saved, TensorClass.ACTIVATIONS) == {}
    loss.backward()


def test_activation_checkpointing(class_of: Find) -> None:
    model = llama()
    model.gradient_checkpointing_enable()
    model.train()
    seen: list[tuple[int, TensorClass | None]] = []
    main = threading.get_ident()
    for layer in model.model.layers:
        layer.input_layernorm.register_forward_hook(
            lambda _module, _inputs, output: seen.append((threading.get_ident(), class_of(output)))
        )
    loss_of(model).backward()
    assert len(seen) == 4, "each of two layers runs forward, and again in backward"
    assert {found for _, found in seen} == {TensorClass.ACTIVATIONS}
    assert any(thread != main for thread, _ in seen), "autograd has threads of its own"
    assert wrong(gradients(model), TensorClass.GRADIENTS) == {}
    assert wrong(model.named_parameters(), TensorClass.WEIGHTS) == {}


def test_autocast_and_grad_scaler() -> None:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
    for _ in range(2):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = loss_of(model)
        scaler.scale(loss).backward()
        assert wrong(gradients(model), TensorClass.GRADIENTS) == {}
        scaler.step(optimizer)
        scaler.update()
        assert wrong(state(optimizer), TensorClass.OPTIMIZER_STATE) == {}
        optimizer.zero_grad(set_to_none=True)
    assert wrong(model.named_parameters(), TensorClass.WEIGHTS) == {}


def test_lora() -> None:
    peft = pytest.importorskip("peft")
    before = requested()
    settings = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(llama(), settings)
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    frozen = [(n, p) for n, p in model.named_parameters() if not p.requires_grad]
    assert len(trained) == 8
    optimizer = torch.optim.AdamW([p for _, p in trained], lr=1e-3)
    for _ in range(2):
        loss_of(model).backward()
        assert wrong(gradients(model), TensorClass.GRADIENTS) == {}
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    assert wrong(trained, TensorClass.WEIGHTS) == {}
    assert wrong(frozen, TensorClass.FROZEN_WEIGHTS) == {}
    assert wrong(state(optimizer), TensorClass.OPTIMIZER_STATE) == {}
    grown = {name: size - before[name] for name, size in requested().items()}
    assert grown[TensorClass.WEIGHTS] == size_bytes(trained)
    assert grown[TensorClass.FROZEN_WEIGHTS] == size_bytes(frozen)
    assert grown[TensorClass.OPTIMIZER_STATE] == size_bytes(state(optimizer))


def test_tied_weights_are_one_block() -> None:
    before = requested()
    model = llama(tie_word_embeddings=True)
    assert address(model.lm_head.weight) == address(model.model.embed_tokens.weight)
    steps(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    assert wrong(model.named_parameters(), TensorClass.WEIGHTS) == {}
    grown = requested()[TensorClass.WEIGHTS] - before[TensorClass.WEIGHTS]
    assert grown == size_bytes(model.named_parameters())


def test_from_pretrained_onto_the_device(tmp_path: Path) -> None:
    """A second model, loaded while the first one trains."""
    pytest.importorskip("accelerate")
    first = llama()
    first_optimizer = torch.optim.AdamW(first.parameters(), lr=1e-4)
    steps(first, first_optimizer)

    llama_on_cpu().save_pretrained(tmp_path)
    second = transformers.LlamaForCausalLM.from_pretrained(tmp_path, device_map="cuda")
    assert all(parameter.is_cuda for parameter in second.parameters())
    assert wrong(second.named_parameters(), TensorClass.WEIGHTS) == {}, "before its first forward"
    second_optimizer = torch.optim.AdamW(second.parameters(), lr=1e-4)
    loss_of(second).backward()
    assert wrong(gradients(second), TensorClass.GRADIENTS) == {}
    second_optimizer.step()
    for model, optimizer in ((first, first_optimizer), (second, second_optimizer)):
        assert wrong(model.named_parameters(), TensorClass.WEIGHTS) == {}
        assert wrong(state(optimizer), TensorClass.OPTIMIZER_STATE) == {}


@pytest.mark.parametrize("how", ["moved", "built on the device"])
def test_a_model_made_while_another_trains(how: str) -> None:
    first = llama()
    steps(first, torch.optim.SGD(first.parameters(), lr=1e-3))
    if how == "moved":
        second = llama()
    else:
        with torch.device("cuda"):
            second = llama_on_cpu()
    assert wrong(second.named_parameters(), TensorClass.WEIGHTS) == {}, "before its first forward"
    steps(second, torch.optim.SGD(second.parameters(), lr=1e-3))
    assert wrong(second.named_parameters(), TensorClass.WEIGHTS) == {}


@pytest.mark.parametrize("optimizer_is", ["the same", "a new one"])
def test_loaded_optimizer_state(optimizer_is: str) -> None:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    steps(model, optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    if optimizer_is == "a new one":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    optimizer.load_state_dict(saved)
    steps(model, optimizer)
    assert wrong(state(optimizer), TensorClass.OPTIMIZER_STATE) == {}


def test_kinds_of_memory() -> None:
    """Under the policy managed, small tensors are in device memory, others in managed memory."""
    model = llama()
    kinds = {block.address: block.memory_kind for block in umem.tensors()}
    for name, parameter in model.named_parameters():
        expected = "device" if parameter.nbytes < MIB else "managed"
        assert kinds[address(parameter)] == expected, (name, parameter.nbytes)


class TestOverride:
    def test_nests_and_ends(self, class_of: Find) -> None:
        nn.Linear(1, 1)(torch.ones(1))  # whatever came before: activations from here on
        sizes = (1000, MIB, 3 * MIB)
        for size in sizes:
            with umem.tensor_class("other"):
                outer = torch.empty(size, device="cuda")
                with umem.tensor_class(TensorClass.FROZEN_WEIGHTS):
                    inner = torch.empty(size, device="cuda")
                again = torch.empty(size, device="cuda")
            after = torch.empty(size, device="cuda")
            found = [class_of(tensor) for tensor in (outer, inner, again, after)]
            assert found == ["other", "frozen_weights", "other", "activations"], size

    def test_ends_with_an_exception(self, class_of: Find) -> None:
        def fail() -> None:
            with umem.tensor_class("gradients"):
                raise LookupError("on purpose")

        nn.Linear(1, 1)(torch.ones(1))
        with pytest.raises(LookupError):
            fail()
        assert class_of(torch.empty(MIB, device="cuda")) is TensorClass.ACTIVATIONS

    def test_holds_in_threads_without_an_override(self, class_of: Find) -> None:
        found: dict[str, TensorClass | None] = {}
        inside, leave = threading.Event(), threading.Event()

        def follow() -> None:
            found["follower"] = class_of(torch.empty(MIB, device="cuda"))

        def have_its_own() -> None:
            with umem.tensor_class("frozen_weights"):
                found["other thread"] = class_of(torch.empty(MIB, device="cuda"))
                inside.set()
                leave.wait(timeout=30)

        with umem.tensor_class("other"):
            follower = threading.Thread(target=follow)
            follower.start()
            follower.join()
            own = threading.Thread(target=have_its_own)
            own.start()
            assert inside.wait(timeout=30)
            found["this thread"] = class_of(torch.empty(MIB, device="cuda"))
            leave.set()
            own.join()
        assert found == {
            "follower": "other",
            "other thread": "frozen_weights",
            "this thread": "other",
        }

    @pytest.mark.parametrize("overridden", [False, True])
    def test_holds_in_backward(self, overridden: bool, class_of: Find) -> None:
        """Backward runs in autograd's thread; tensors in `.grad` are gradients all the same."""
        layer = nn.Linear(1024, 1024, device="cuda")
        seen: list[tuple[int, TensorClass | None]] = []
        layer(torch.ones(1024, device="cuda"))  # activations from here on
        inputs = torch.randn(1024, 1024, device="cuda")

        def step() -> None:
            output = layer(inputs)
            output.register_hook(lambda g: seen.append((threading.get_ident(), class_of(g))))
            output.relu().square().sum().backward()

        if overridden:
            with umem.tensor_class("other"):
                step()
        else:
            step()
        [(thread, found)] = seen
        assert thread != threading.get_ident()
        assert found == ("other" if overridden else "activations")
        assert wrong(gradients(layer), TensorClass.GRADIENTS) == {}
        assert wrong(layer.named_parameters(), TensorClass.WEIGHTS) == {}

    def test_unknown_class(self) -> None:
        with (
            pytest.raises(ValueError, match=r"'weight'.*weights, frozen_weights"),
            umem.tensor_class("weight"),
        ):
            pass


def test_summary_lists_the_classes() -> None:
    kept = [llama()]
    steps(kept[0], torch.optim.SGD(kept[0].parameters(), lr=1e-3))
    text = umem.memory_summary()
    assert "policy managed" in text
    for name in (*TensorClass, "all", "reserved"):
        assert f"\n{name} " in text, text
