"""Quantised weights larger than the budget, in a process of its own: ``quantised.py MODE``.

With ``UMEM_POLICY`` umem is enabled. The last line is JSON: what the program saw, as checksums, and
where weights are.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from begin import begin, crcs
from torch import nn
from torch.utils.checkpoint import checkpoint
from weights import facts_of_weights

HIDDEN = 2048
MATRIX_NUMBERS = 4 * HIDDEN * HIDDEN
WEIGHT_BYTES = 24 * 2 * MATRIX_NUMBERS
"""Of all quantised matrices: so many layers of 8 bits, or twice as many of 4."""

STEPS = 10

MakeLinear = Callable[[nn.Linear], nn.Module]
"""Returns a quantised layer for one of bfloat16."""


class Adapted(nn.Module):
    """A quantised layer, and a trained product of two small ones beside it."""

    def __init__(self, layer: nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.adapter = nn.Sequential(
            nn.Linear(inputs, 16, bias=False), nn.Linear(16, outputs, bias=False)
        ).to("cuda", torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.adapter(x)


class Layer(nn.Module):
    def __init__(self, quantise: MakeLinear, *, is_adapted: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN, device="cuda", dtype=torch.bfloat16)
        made = []
        for inputs, outputs in ((HIDDEN, 4 * HIDDEN), (4 * HIDDEN, HIDDEN)):
            plain = nn.Linear(inputs, outputs, bias=False, device="cuda", dtype=torch.bfloat16)
            layer = quantise(plain)
            made.append(Adapted(layer, inputs, outputs) if is_adapted else layer)
        self.up, self.down = made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(
        self,
        quantise: MakeLinear,
        layers: int,
        *,
        is_adapted: bool = False,
        is_checkpointed: bool = False,
    ) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(Layer(quantise, is_adapted=is_adapted) for _ in range(layers))
        self.is_checkpointed = is_checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.is_checkpointed and torch.is_grad_enabled():
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        return x


def batch(seed: int, rows: int = 256) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(rows, HIDDEN, device="cuda", dtype=torch.bfloat16, generator=generator)


def module(name: str) -> Any:
    """A module of a library that may have types or not."""
    return importlib.import_module(name)


def nf4(plain: nn.Linear) -> Any:
    library = module("bitsandbytes.nn")
    made = library.LinearNF4(plain.in_features, plain.out_features, bias=False, device="meta")
    made.weight = library.Params4bit(plain.weight.data, quant_type="nf4", module=made).to("cuda")
    return made


def llm_int8(plain: nn.Linear) -> Any:
    library = module("bitsandbytes.nn")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # one warning for each call
    made = library.Linear8bitLt(
        plain.in_features, plain.out_features, bias=False, has_fp16_weights=False, device="meta"
    )
    # It is quantised on its way from the host.
    made.weight = library.Int8Params(plain.weight.data.cpu(), requires_grad=False).to("cuda")
    return made


def ao_int8(plain: nn.Linear) -> nn.Module:
    library = module("torchao.quantization")
    library.quantize_(plain, library.Int8WeightOnlyConfig(set_inductor_config=False))
    return plain


def ao_int4(plain: nn.Linear) -> nn.Module:
    library = module("torchao.quantization")
    config = library.Int4WeightOnlyConfig(
        int4_packing_format="tile_packed_to_4d", set_inductor_config=False
    )
    library.quantize_(plain, config)
    return plain


def infer(model: nn.Module) -> list[torch.Tensor]:
    """Batches of one row, for which libraries have kernels of their own, and of many."""
    seen = []
    for step in range(STEPS):
        with torch.inference_mode() if step % 2 else torch.no_grad():
            seen.append(model(batch(step, (1, 16, 256)[step % 3])))
    return seen


def train(model: nn.Module) -> list[torch.Tensor]:
    trained = [it for name, it in model.named_parameters() if "adapter" in name]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)
    losses = []
    for step in range(2 * STEPS):
        loss = model(batch(step)).float().square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if step == STEPS:
            with torch.no_grad():
                losses.append(model(batch(1000)))
    return [*losses, *(it.detach() for it in trained)]


def load() -> tuple[Any, list[torch.Tensor]]:
    """A model of `transformers` that is quantised while it is loaded; saved, and loaded again."""
    from safetensors.torch import load_file
    from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=12,
        num_attention_heads=8,
        vocab_size=8192,
    )
    make_config: Any = BitsAndBytesConfig
    from_files: Any = LlamaForCausalLM.from_pretrained
    tokens = torch.arange(32, device="cuda")[None]
    seen: list[torch.Tensor] = []

    def talk(model: Any) -> None:
        answer = model.generate(tokens, max_new_tokens=12, do_sample=False, pad_token_id=0)
        with torch.no_grad():
            seen.extend((answer, model(answer).logits))

    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        full: Any = LlamaForCausalLM(config)
        full.to(torch.bfloat16).save_pretrained(folder)
        nested = make_config(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
        model = from_files(
            folder, device_map="cuda", dtype=torch.bfloat16, quantization_config=nested
        )
        model.eval()
        talk(model)
        with tempfile.TemporaryDirectory() as other:
            model.save_pretrained(other)
            seen += load_file(f"{other}/model.safetensors").values()
            del model
            again = from_files(other, device_map="cuda", dtype=torch.bfloat16)
        talk(again.eval())
    assert torch.equal(seen[0], seen[-2])
    assert torch.equal(seen[1], seen[-1])
    return again, seen


MODES: dict[str, Callable[[], tuple[nn.Module, list[torch.Tensor]]]] = {
    "nf4": lambda: with_model(infer, nf4, 48),
    "qlora": lambda: with_model(train, nf4, 48, is_adapted=True, is_checkpointed=True),
    "qlora_without_checkpoints": lambda: with_model(train, nf4, 48, is_adapted=True),
    "llm_int8": lambda: with_model(infer, llm_int8, 24),
    "ao_int8": lambda: with_model(infer, ao_int8, 24),
    "ao_int8_adapters": lambda: with_model(
        train, ao_int8, 24, is_adapted=True, is_checkpointed=True
    ),
    "ao_int4": lambda: with_model(infer, ao_int4, 48),
    "loaded": load,
}


def with_model(
    use: Callable[[nn.Module], list[torch.Tensor]], quantise: MakeLinear, layers: int, **how: bool
) -> tuple[nn.Module, list[torch.Tensor]]:
    model = Model(quantise, layers, **how)
    return model, use(model)


def main(mode: str) -> None:
    begin()
    model, seen = MODES[mode]()
    torch.cuda.synchronize()
    # NumPy has no bfloat16, and float32 has all of its numbers.
    plain = [it.float() if it.dtype == torch.bfloat16 else it for it in seen]
    print(json.dumps({"seen": crcs(plain), **facts_of_weights(model)}))


if __name__ == "__main__":
    main(sys.argv[1])
