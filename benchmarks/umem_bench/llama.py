"""The Llama that is measured, and a loss whose logits exist in chunks only."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from umem_bench.results import LlamaShape, Method

__all__ = [
    "SEED",
    "WEIGHTS_STD",
    "ChunkedLoss",
    "build_for_inference",
    "build_llama",
    "llama_config",
]

SEED = 0

WEIGHTS_STD = 0.02
"""Of random weights for inference: `initializer_range` of published configurations."""

_IGNORED = -100
"""Label of a token that nothing is predicted for."""


def build_llama(shape: LlamaShape, method: Method, device: torch.device) -> Any:
    """A Llama of `transformers` with random weights, created on the device.

    For ``lora`` it has PEFT's adapters, in float32 as PEFT makes them.
    """
    from transformers import LlamaForCausalLM

    # transformers renames what PEFT still calls.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    config = llama_config(shape, max_position_embeddings=shape.tokens, use_cache=False)
    torch.manual_seed(SEED)
    with _default_type(shape.weights), device:
        network: Any = LlamaForCausalLM(config)
    if method == "lora":
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(
            r=shape.lora_rank,
            lora_alpha=2 * shape.lora_rank,
            target_modules=list(shape.lora_targets),
            task_type="CAUSAL_LM",
        )
        network = get_peft_model(network, adapters)
    if shape.checkpoint:
        network.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False, "preserve_rng_state": False}
        )
    return network


def build_for_inference(shape: LlamaShape, device: torch.device, home: torch.device) -> Any:
    """A model of `transformers` created at home; its weights are drawn on a device, then filled in.

    Wherever the home is, the weights and the rotary frequencies have the same bits.
    """
    config, kind = _config_and_class(shape)
    with _default_type(shape.weights), home, _no_initial_weights():
        network: Any = kind(config)
    generator = torch.Generator(device).manual_seed(SEED)
    with torch.no_grad():
        for weight in network.parameters():
            if weight.ndim < 2:
                weight.fill_(1)
            elif weight.device.type == device.type:
                weight.normal_(0, WEIGHTS_STD, generator=generator)
            else:
                drawn = torch.empty_like(weight, device=device)
                weight.copy_(drawn.normal_(0, WEIGHTS_STD, generator=generator))
    if home != device:
        with device:
            rotary = type(network.model.rotary_emb)(config)
        network.model.rotary_emb = rotary.to(home)
    return network.eval()


def _config_and_class(shape: LlamaShape) -> tuple[Any, Any]:
    if not shape.experts:
        from transformers import LlamaForCausalLM

        return llama_config(shape), LlamaForCausalLM
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        moe_intermediate_size=shape.intermediate,
        num_experts=shape.experts,
        num_experts_per_tok=shape.experts_per_token,
        **_sizes(shape),
    )
    return config, Qwen3MoeForCausalLM


def llama_config(shape: LlamaShape, **more: Any) -> Any:
    """The configuration of `transformers`."""
    from transformers import LlamaConfig

    return LlamaConfig(intermediate_size=shape.intermediate, **_sizes(shape), **more)


def _sizes(shape: LlamaShape) -> dict[str, Any]:
    return {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_value_heads or shape.heads,
        "vocab_size": shape.vocabulary,
        "head_dim": shape.head_dim or shape.hidden // shape.heads,
        "tie_word_embeddings": False,
    }


@contextmanager
def _default_type(name: str) -> Iterator[None]:
    """Create tensors of this type, without a conversion, which would be the peak."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, name))
    try:
        yield
    finally:
        torch.set_default_dtype(usual)


def _no_initial_weights() -> AbstractContextManager[None]:
    """Create weights as they are: on a CPU the usual initialization takes minutes."""
    try:
        module = importlib.import_module("transformers.initialization")
    except ImportError:  # before 5
        module = importlib.import_module("transformers.modeling_utils")
    found: AbstractContextManager[None] = module.no_init_weights()
    return found


class ChunkedLoss(nn.Module):
    """A causal language model whose output is its mean loss, computed chunk after chunk.

    The logits of a whole sequence in float32 would be the largest tensor of a step. Here those of
    `chunk_tokens` tokens exist at a time, and the backward pass computes them again.
    """

    def __init__(self, network: Any, chunk_tokens: int) -> None:
        super().__init__()
        self.network = network
        self.chunk_tokens = chunk_tokens

    @property
    def layers(self) -> list[nn.Module]:
        """The transformer's layers, in order."""
        return list(self._base().model.layers)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy of predicting each token from those before it, float32.

        Arguments are int64[sequences, tokens]; tokens without a label have -100.
        """
        base = self._base()
        hidden = base.model(input_ids=input_ids).last_hidden_state
        targets = functional.pad(labels[:, 1:], (0, 1), value=_IGNORED)
        total = hidden.new_zeros((), dtype=torch.float32)
        chunks = (it.split(self.chunk_tokens, 1) for it in (hidden, targets))
        for part, wanted in zip(*chunks, strict=True):
            loss = checkpoint(
                _summed_loss,
                base.lm_head,
                part,
                wanted,
                use_reentrant=False,
                preserve_rng_state=False,
            )
            total = total + loss
        return total / (targets != _IGNORED).sum()

    def _base(self) -> Any:
        """The model of `transformers` inside PEFT's."""
        find = getattr(self.network, "get_base_model", None)
        return self.network if find is None else find()


def _summed_loss(head: nn.Module, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    # As rows: torch may multiply a batch by a frozen weight in another way when the checkpoint
    # computes it again, and the checkpoint refuses that.
    logits = head(hidden.flatten(0, 1)).float()
    return functional.cross_entropy(
        logits, targets.flatten(), ignore_index=_IGNORED, reduction="sum"
    )
