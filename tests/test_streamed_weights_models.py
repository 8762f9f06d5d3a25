"""Models of `transformers` whose weights are streamed: tokens, logits and weights keep their bits.

Copies run late or at random moments, and buffers begin as NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lazy_lanes import HostStateMemory, LazyLanes
from streamed_programs import NoRoom

from umem.executor.weights.model_weights import ModelWeights
from umem.offload import ActivationStore

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
}


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))


def tied() -> Any:
    config = transformers.Qwen2Config(**SMALL, tie_word_embeddings=True)
    return transformers.Qwen2ForCausalLM(config)


def mixture() -> Any:
    config = transformers.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(config)


def gpt2() -> Any:
    config = transformers.GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=97)
    return transformers.GPT2LMHeadModel(config)


def gemma() -> Any:
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SMALL, head_dim=8))


def encoder_decoder() -> Any:
    config = transformers.T5Config(
        vocab_size=97,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=3,
        num_heads=4,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def checkpointed() -> Any:
    model = llama()
    model.gradient_checkpointing_enable()
    return model


def adapted() -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(llama(), config)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def run(make: Callable[[], Any], *, streams: bool) -> tuple[list[torch.Tensor], Any]:
    torch.manual_seed(0)
    model = make().eval()
    weights = None
    if streams:
        weights = ModelWeights(
            model,
            LazyLanes(model, 0.5),
            HostStateMemory(),
            NoRoom(),
            ActivationStore("cpu"),
            min_bytes=512,
        )
        weights.begin_call()  # `generate` may call a model within this one
    tokens = torch.arange(14).view(2, 7) + 3
    seen: list[torch.Tensor] = [
        model.generate(input_ids=tokens, max_new_tokens=6, do_sample=False) for _ in range(2)
    ]
    model.train()
    trained = [it for it in model.parameters() if it.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for step in range(3):
        torch.manual_seed(step)  # of dropout
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        seen.append(loss.detach())
        if weights is not None:
            weights.streamed.step_begins()  # as the hook on all optimizers does
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.inference_mode():
        more = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
        seen.append(model(input_ids=tokens, **more).logits)
    return [*seen, *(it.detach() for it in trained)], weights


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    "make", [llama, tied, mixture, gpt2, gemma, encoder_decoder, checkpointed, adapted]
)
def test_no_bit_changes(make: Callable[[], Any]) -> None:
    (stock, _), (streamed, weights) = run(make, streams=False), run(make, streams=True)
    assert len(stock) == len(streamed)
    assert all(map(torch.equal, stock, streamed))
    counts = weights.streamed.counts
    assert counts.fetched > 40
    assert counts.in_place == 0
    assert counts.late <= counts.fetched // 3
