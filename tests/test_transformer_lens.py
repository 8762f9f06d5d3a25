"""TransformerLens itself with streamed weights: logits, cached activations and tokens are stock's.

Both of its models: `HookedTransformer`, and `TransformerBridge`, which wraps one of transformers.
Copies run late or at random moments, and buffers begin as NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lazy_lanes import HostStateMemory, LazyLanes, NoRoom
from streamed_programs import bits

from umem.offloading import ActivationStore
from umem.streaming.weights import ModelWeights

lens: Any = pytest.importorskip("transformer_lens")
transformers: Any = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
]

LAYERS, HIDDEN, VOCABULARY, TOKENS = 3, 32, 97, 32


def hooked_transformer() -> Any:
    if not hasattr(lens, "HookedTransformer"):
        pytest.skip("TransformerLens has no HookedTransformer from its version 4 on")
    return lens.HookedTransformer(
        lens.HookedTransformerConfig(
            n_layers=LAYERS,
            d_model=HIDDEN,
            d_mlp=2 * HIDDEN,
            d_head=HIDDEN // 4,
            n_heads=4,
            d_vocab=VOCABULARY,
            n_ctx=TOKENS,
            act_fn="silu",
            gated_mlp=True,
            normalization_type="RMS",
            positional_embedding_type="rotary",
            device="cpu",
            seed=0,
        )
    )


def bridge() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformer_lens.model_bridge import TransformerBridge

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=TOKENS,
        attn_implementation="eager",
        architectures=["LlamaForCausalLM"],
    )
    words = {"<s>": 1, "</s>": 2, "<unk>": 0} | {f"w{it}": it for it in range(3, VOCABULARY)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")),
        eos_token="</s>",
        pad_token="</s>",
    )
    model = transformers.LlamaForCausalLM(config).eval()
    return TransformerBridge.boot_transformers(
        "a-llama", hf_model=model, tokenizer=tokenizer, device="cpu"
    )


def half(value: Any, hook: Any) -> Any:
    """Edit an activation."""
    del hook
    return value * 0.5


def look(make: Callable[[], Any], *, streams: bool) -> tuple[Any, ModelWeights | None]:
    model = make()
    weights: ModelWeights | None = None
    if streams:
        lanes = LazyLanes(model, 0.5)
        store = ActivationStore("cpu")
        weights = ModelWeights(model, lanes, HostStateMemory(), NoRoom(), store, min_bytes=512)
        weights.begin_call()
    seen: list[Any] = []
    for number in range(3):
        tokens = (torch.arange(14).view(2, 7) + number) % VOCABULARY
        with torch.no_grad():
            logits, cache = model.run_with_cache(tokens)
            seen += [logits, dict(cache.items())]
            seen.append(model.run_with_hooks(tokens, fwd_hooks=[(EDITED[make], half)]))
            seen.append(
                model.generate(
                    tokens,
                    max_new_tokens=4,
                    do_sample=False,
                    stop_at_eos=False,
                    return_type="tokens",
                    verbose=False,
                )
            )
        assert not torch.equal(seen[-2], logits)
    return bits(seen), weights


EDITED = {hooked_transformer: "blocks.1.hook_resid_post", bridge: "blocks.1.hook_out"}
"""What a hook edits, by the name that each kind of model has for it."""


@pytest.mark.parametrize("make", EDITED, ids=lambda it: it.__name__)
def test_no_bit_changes(make: Callable[[], Any]) -> None:
    (stock, _), (streamed, weights) = look(make, streams=False), look(make, streams=True)
    assert streamed == stock
    assert len(stock[1]) > 10 * LAYERS  # activations
    assert weights is not None
    assert weights.streamed.counts.fetched > 40
    assert weights.streamed.counts.in_place == 0
