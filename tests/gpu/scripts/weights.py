"""A model larger than the budget, in a process of its own: ``weights.py MODE``.

With ``UMEM_POLICY`` umem is enabled. The last line is JSON: what the program saw, as checksums,
where weights are, and the memory in use on the card beyond that of CUDA and its libraries.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import torch
from begin import IS_MANAGED, begin, crcs
from card import CardMemory
from streaming import HIDDEN, Layer
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint
from torch.utils.checkpoint import checkpoint

import umem
from umem.runtime.state import runtime
from umem.streaming.weights import weights_of

LAYERS = 24
LAYER_BYTES = 4 * 8 * HIDDEN * HIDDEN
STEPS = 10


class Model(nn.Module):
    """Layers, each a checkpoint in a training."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, HIDDEN)
        self.is_checkpointed = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.is_checkpointed and torch.is_grad_enabled():
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        return self.head(x)


def batch(seed: int, rows: int = 256) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(rows, HIDDEN, device="cuda", generator=generator)


def make() -> Model:
    torch.manual_seed(1)
    return Model().cuda()


def infer(model: Model) -> list[torch.Tensor]:
    """Batches of several sizes, in a thread and on another stream too."""
    seen = []
    side = torch.cuda.Stream()
    for step in range(STEPS):
        with torch.inference_mode() if step % 2 else torch.no_grad():
            seen.append(model(batch(step, 64 << step % 4)))
    with torch.no_grad(), torch.cuda.stream(side):
        seen.append(model(batch(100)))
    torch.cuda.synchronize()

    def work() -> None:
        with torch.no_grad():
            seen.append(model(batch(101)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return seen


def keep(model: Model) -> list[torch.Tensor]:
    """Keep every module's output of each call: more than the budget."""
    cache: list[torch.Tensor] = []
    for layer in model.layers:
        for module in layer.modules():
            module.register_forward_hook(lambda _module, _args, output: cache.append(output))
    seen = []
    with torch.no_grad():
        for seed in range(6):
            cache.clear()
            seen.append(model(batch(seed, 8192)))
            seen += [it.double().sum() for it in cache]
    return seen


def change_between(model: Model) -> list[torch.Tensor]:
    """The program changes weights whose next copies are on their way."""
    seen = []
    for step in range(STEPS):
        with torch.no_grad():
            seen.append(model(batch(step)))
            for layer in model.layers[: step % 3 + 1]:
                layer.up.weight.data.mul_(0.99)  # type: ignore[operator, union-attr]
            model.layers[-1].down.weight.mul_(1.01)  # type: ignore[operator, union-attr]
    return seen


def change_in_arrays(model: Model) -> list[torch.Tensor]:
    """CuPy arrays on some weights, made amid the calls, change them past torch."""
    import cupy

    seen: list[torch.Tensor] = []
    arrays: list[Any] = []
    for step in range(STEPS):
        with torch.no_grad():
            seen.append(model(batch(step)))
        if step == 3:
            layers = (*model.layers[:2], model.layers[-1])
            arrays = [cupy.asarray(it.detach()) for of in layers for it in of.parameters()]
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            for it in arrays:
                it *= cupy.float32(0.99)
    return [*seen, *(it.detach() for it in model.parameters())]


def train(model: Model, *, managed_at_once: bool = False) -> list[torch.Tensor]:
    trained = [it for it in model.parameters() if it.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)
    if managed_at_once and IS_MANAGED:
        umem.manage(model, optimizer)
    losses = []
    for step in range(2 * STEPS):
        loss = model(batch(step)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if step == STEPS:
            with torch.no_grad():
                losses.append(model(batch(1000)).mean())
    return [*losses, *(it.detach() for it in trained)]


def train_managed_at_once(model: Model) -> list[torch.Tensor]:
    """The program calls `umem.manage` itself, ahead of the model's first call."""
    return train(model, managed_at_once=True)


def train_adapters(model: Model) -> list[torch.Tensor]:
    model.requires_grad_(False)
    for layer in model.layers:
        layer.adapt("cuda")  # type: ignore[operator]
    return train(model)


def train_adapters_without_checkpoints(model: Model) -> list[torch.Tensor]:
    model.is_checkpointed = False
    return train_adapters(model)


def compile_layers(model: Model) -> list[torch.Tensor]:
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    return infer(model)


def capture(model: Model) -> list[torch.Tensor]:
    """A graph replays with the weights that the program has then."""
    seen = infer(model)
    x = batch(5)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        model(x)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            y = model(x)
        for step in range(3):
            x.copy_(batch(step))
            graph.replay()
            seen += [y.clone(), model(batch(step, 64))]
    return seen


MODES: dict[str, Callable[[Model], list[torch.Tensor]]] = {
    "kept": keep,
    "inference": infer,
    "changed": change_between,
    "changed_in_arrays": change_in_arrays,
    "trained": train,
    "managed_at_once": train_managed_at_once,
    "adapters": train_adapters,
    "adapters_without_checkpoints": train_adapters_without_checkpoints,
    "compiled": compile_layers,
    "captured": capture,
}


def load() -> tuple[Any, list[torch.Tensor]]:
    """A model of `transformers` from files, straight to the GPU; saved again, and compared."""
    from safetensors.torch import load_file
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=12,
        num_attention_heads=8,
        vocab_size=8192,
    )
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
        from_files: Any = LlamaForCausalLM.from_pretrained
        half = from_files(folder, device_map="cuda", dtype=torch.bfloat16)
        saved = load_file(f"{folder}/model.safetensors")
        for name, weight in half.state_dict().items():
            assert torch.equal(weight.cpu(), saved[name].bfloat16()), name
        del half, weight
        torch.cuda.empty_cache()
        model: Any = from_files(folder, device_map="cuda")
        model.eval()
        tokens = torch.arange(32, device="cuda")[None]
        answer = model.generate(tokens, max_new_tokens=12, do_sample=False, pad_token_id=0)
        with torch.no_grad():
            seen = [answer, model(answer).logits]
        with tempfile.TemporaryDirectory() as other:
            before = on_device(model)
            model.save_pretrained(other)
            save_checkpoint(model.state_dict(), checkpoint_id=f"{other}/parts", no_dist=True)
            for now, was in zip(on_device(model), before, strict=True):
                assert now <= was, "homes are read where they are"
            first, second = (load_file(f"{it}/model.safetensors") for it in (folder, other))
            assert first.keys() == second.keys()
            assert all(torch.equal(it, second[name]) for name, it in first.items())
            homes = [it.data_ptr() for it in model.parameters()]
            model.load_state_dict({name: it + 1 for name, it in saved.items()}, strict=False)
            with torch.no_grad():
                seen.append(model(answer).logits)
            load_checkpoint(model.state_dict(), checkpoint_id=f"{other}/parts", no_dist=True)
            assert [it.data_ptr() for it in model.parameters()] == homes
            with torch.no_grad():
                assert torch.equal(model(answer).logits, seen[1])
    return model, seen


def chat() -> tuple[Any, list[torch.Tensor]]:
    """A mixture of experts: long answers of few tokens at a time, and changes of its tables.

    `generate` selects experts for each token by itself.
    """
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_local_experts=16,
        num_experts_per_tok=2,
        vocab_size=2048,
    )
    torch.manual_seed(0)
    model: Any = MixtralForCausalLM(config)
    model.bfloat16().cuda().eval()
    seen = []
    for prompts in (1, 3, 2):
        made = model.generate(
            torch.arange(32 * prompts, device="cuda").view(prompts, 32),
            min_new_tokens=60,
            max_new_tokens=60,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        seen += [made.sequences, *made.logits]
        with torch.no_grad():
            for layer in model.model.layers[:3]:
                layer.mlp.experts.down_proj.data.mul_(1.5)
                layer.mlp.experts.gate_up_proj.mul_(0.5)
    return model, seen


def on_device(model: Any) -> tuple[int, ...]:
    """Copies of weights so far, and memory that umem has on the device; empty in a stock run."""
    its = weights_of(model)
    if its is None:
        return ()
    reserved: int = runtime().allocator.kind_stats(0)["device"]["reserved_bytes"]
    return its.status().counts.fetched, reserved


WHOLE = {"loaded": load, "experts": chat}
"""Modes with models of their own."""


def facts_of_weights(model: nn.Module) -> dict[str, Any]:
    """Where weights are, and what became of their uses; nothing in a stock run."""
    its = weights_of(model)
    if its is None:
        return {}
    status = its.status()
    weights = {
        "plans": status.plans,
        "streamed_bytes": status.streamed_bytes,
        "fetched": status.counts.fetched,
        "late": status.counts.late,
        "reused": status.counts.reused,
        "in_place": status.counts.in_place,
        "is_driven": its.is_driven,
        "cached_experts": status.cached_experts,
    }
    page_locked_bytes = runtime().allocator.kind_stats(0)["pinned"]["reserved_bytes"]
    return {"weights": weights, "page_locked_bytes": page_locked_bytes}


def main(mode: str) -> None:
    begin()
    card = CardMemory()
    if mode in WHOLE:
        model, seen = WHOLE[mode]()
    else:
        model = make()
        seen = MODES[mode](model)
    torch.cuda.synchronize()
    card.stop()
    facts: dict[str, Any] = {"seen": crcs(seen), "card_bytes": card.peak_bytes}
    facts["beside_bytes"] = card.beside_bytes
    facts |= facts_of_weights(model)
    print(json.dumps(facts))


if __name__ == "__main__":
    main(sys.argv[1])
