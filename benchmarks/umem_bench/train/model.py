"""The Llama that is trained, and its loss in chunks, as long sequences are trained."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from umem_bench.train.results import Method, TrainingModel

__all__ = ["LORA_TARGETS", "SEED", "CausalLoss", "build_llama"]

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
SEED = 0

_IGNORED = -100
"""Label of a token that nothing is to be predicted for."""


class CausalLoss(nn.Module):
    """A causal language model whose output is its mean loss, computed chunk after chunk.

    The logits of a whole sequence in float32 would be the largest tensor of a step: there are those
    of one chunk, and they are computed again in the backward pass.

    Parameters
    ----------
    network
        A model of `transformers` for causal language modelling, or PEFT's around one.
    chunk_tokens
        Tokens of each sequence whose logits are there at once.
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
        """Mean cross entropy of predicting each token from those before it.

        Parameters
        ----------
        input_ids, labels
            int64[sequences, tokens]. Tokens without a label have -100.

        Returns
        -------
        Tensor
            float32, without dimensions.
        """
        base = self._base()
        hidden = base.model(input_ids=input_ids).last_hidden_state
        targets = functional.pad(labels[:, 1:], (0, 1), value=_IGNORED)
        total = hidden.new_zeros((), dtype=torch.float32)
        for part, wanted in zip(
            hidden.split(self.chunk_tokens, 1), targets.split(self.chunk_tokens, 1), strict=True
        ):
            # Nothing in it is random.
            total = total + checkpoint(
                _summed_loss,
                base.lm_head,
                part,
                wanted,
                use_reentrant=False,
                preserve_rng_state=False,
            )
        return total / (targets != _IGNORED).sum()

    def _base(self) -> Any:
        """The model of `transformers`, which PEFT has put its adapters into."""
        find = getattr(self.network, "get_base_model", None)
        return self.network if find is None else find()


def _summed_loss(head: nn.Module, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    # As rows: of a batch, torch may multiply a frozen weight in another way when the checkpoint
    # computes it again, and the checkpoint refuses that.
    logits = head(hidden.flatten(0, 1)).float()
    return functional.cross_entropy(
        logits, targets.flatten(), ignore_index=_IGNORED, reduction="sum"
    )


def build_llama(model: TrainingModel, method: Method, device: torch.device) -> CausalLoss:
    """A Llama of `transformers` with random bfloat16 weights, born on the device, and its loss.

    For ``lora`` it has PEFT's adapters, in float32 as PEFT makes them.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    # transformers renames what peft still calls.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    config = LlamaConfig(
        hidden_size=model.hidden,
        intermediate_size=model.intermediate,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.heads,
        vocab_size=model.vocabulary,
        max_position_embeddings=model.tokens,
        tie_word_embeddings=model.tied,
        use_cache=False,
    )
    torch.manual_seed(SEED)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            network: Any = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(usual)
    if method == "lora":
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(
            r=model.lora_rank,
            lora_alpha=2 * model.lora_rank,
            target_modules=list(LORA_TARGETS),
            task_type="CAUSAL_LM",
        )
        network = get_peft_model(network, adapters)
    if model.checkpoint:
        network.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False, "preserve_rng_state": False}
        )
    return CausalLoss(network, model.loss_chunk_tokens).train()
