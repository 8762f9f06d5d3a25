"""Models of `transformers` whose weights are streamed: tokens, logits and weights keep their bits.

Copies run late or at random moments, and buffers begin as NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from lazy_lanes import HostStateMemory, LazyLanes, NoRoom
from pairs import pairs

from umem.core.classes import TensorClass
from umem.offloading import ActivationStore
from umem.streaming.stage import Copy, Lane
from umem.streaming.weights import ModelWeights, find_experts

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


def stream(model: Any, lanes: Any, min_bytes: int = 512) -> ModelWeights:
    weights = ModelWeights(
        model, lanes, HostStateMemory(), NoRoom(), ActivationStore("cpu"), min_bytes=min_bytes
    )
    weights.begin_call()  # `generate` may call a model within this one
    return weights


def run(make: Callable[[], Any], *, streams: bool) -> tuple[list[torch.Tensor], Any]:
    torch.manual_seed(0)
    model = make().eval()
    weights = stream(model, LazyLanes(model, 0.5)) if streams else None
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


def generate(model: Any, tokens: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    """Tokens, and the logits of each of them; the likeliest ones by default."""
    asked = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True, **options}
    made = model.generate(input_ids=tokens, **asked)
    return [made.sequences, *made.logits]


def generate_in_many_ways(*, streams: bool) -> tuple[list[torch.Tensor], ModelWeights | None]:
    """Batches of one, many and one again; a cache of fixed size; beams; a draft by lookup."""
    torch.manual_seed(0)
    model = llama().eval()
    weights = stream(model, LazyLanes(model, 0.5)) if streams else None
    seen: list[torch.Tensor] = []
    for batch, options in (
        (1, {}),
        (5, {}),
        (1, {}),
        (2, {"cache_implementation": "static"}),
        (3, {"cache_implementation": "static"}),
        (1, {"prompt_lookup_num_tokens": 3}),
        (2, {"num_beams": 3}),
        (2, {"do_sample": True}),
        (1, {"use_cache": False}),
    ):
        torch.manual_seed(1)
        tokens = torch.arange(7).repeat(batch, 1) + 3 + torch.arange(batch)[:, None]
        asked: dict[str, Any] = {"max_new_tokens": 9, "pad_token_id": 0, **options}
        seen += generate(model, tokens, attention_mask=torch.ones_like(tokens), **asked)
    return seen, weights


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_no_bit_changes_however_text_is_generated() -> None:
    stock, _ = generate_in_many_ways(streams=False)
    streamed, weights = generate_in_many_ways(streams=True)
    assert len(stock) == len(streamed) > 70
    assert all(map(torch.equal, stock, streamed))
    assert weights is not None
    counts = weights.streamed.counts
    assert counts.fetched > 200
    assert counts.in_place == 0
    assert counts.late <= counts.fetched // 10, "a pass begins with weights that are there"


LAYERS, EXPERTS = 3, 8
"""Of each mixture. A token chooses two experts, so that three tokens are few."""


def mixtral() -> Any:
    config = transformers.MixtralConfig(**SMALL, num_local_experts=EXPERTS, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(config)


def qwen3_moe() -> Any:
    """With a first layer that has no experts."""
    config = transformers.Qwen3MoeConfig(
        **SMALL | {"num_hidden_layers": LAYERS + 1},
        moe_intermediate_size=16,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        head_dim=8,
        mlp_only_layers=[0],
    )
    return transformers.Qwen3MoeForCausalLM(config)


def gpt_oss() -> Any:
    config = transformers.GptOssConfig(
        **SMALL, num_local_experts=EXPERTS, num_experts_per_tok=2, head_dim=8
    )
    return transformers.GptOssForCausalLM(config)


def deepseek() -> Any:
    config = transformers.DeepseekV3Config(
        **SMALL | {"num_hidden_layers": LAYERS + 1, "num_key_value_heads": 4},
        moe_intermediate_size=16,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    )
    return transformers.DeepseekV3ForCausalLM(config)


def llama4() -> Any:
    config = transformers.Llama4TextConfig(
        **SMALL, intermediate_size_mlp=64, num_local_experts=EXPERTS, num_experts_per_tok=2
    )
    return transformers.Llama4ForCausalLM(config)


MIXTURES = [mixtral, qwen3_moe, gpt_oss, deepseek]


@pytest.mark.parametrize("make", [*MIXTURES, llama4])
def test_tables_of_experts_are_found(make: Callable[[], Any]) -> None:
    found = [it for layer in make().model.layers if (it := find_experts(layer)).ids]
    if make is llama4:  # computes all experts in each call
        assert not found
    else:
        assert [(len(it.ids), it.few_rows) for it in found] == [(2, 3)] * LAYERS


def talk(
    make: Callable[[], Any], kernels: str, min_bytes: int | None = None
) -> tuple[list[torch.Tensor], Any]:
    """Prompts of several sizes in turn, a change of experts, and a training.

    Weights of so many bytes are streamed; None for a stock run.
    """
    torch.manual_seed(0)
    model = make().eval()
    model.set_experts_implementation(kernels)
    weights = None if min_bytes is None else stream(model, LazyLanes(model, 0.5), min_bytes)
    seen: list[torch.Tensor] = []

    def answer() -> None:
        for prompts, length in ((2, 5), (1, 1), (3, 4), (4, 3), (1, 9)):
            tokens = torch.arange(prompts * length).view(prompts, length) + 3
            seen.extend(generate(model, tokens, max_new_tokens=5))

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        answer()
        with torch.no_grad():
            model.model.layers[1].mlp.experts.down_proj.mul_(1.5)
        answer()
        tokens = torch.arange(14).view(2, 7) + 3
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        seen.append(loss.detach())
        if weights is not None:
            weights.streamed.step_begins()
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(it.detach() for it in model.parameters())], weights


@pytest.mark.parametrize(
    ("make", "kernels", "min_bytes"),
    pairs(MIXTURES, ["grouped_mm", "batched_mm"], [512, 8 * 16 * 32 * 4]),
)
def test_no_bit_changes_where_few_experts_are_used(
    make: Callable[[], Any], kernels: str, min_bytes: int
) -> None:
    """All weights are streamed, or not much more than the experts."""
    stock, _ = talk(make, kernels)
    streamed, weights = talk(make, kernels, min_bytes)
    assert len(stock) == len(streamed)
    assert all(map(torch.equal, stock, streamed))
    counts = weights.streamed.counts
    # Of three layers, two may still be in the buffers as a prompt has left them.
    assert counts.experts_in_place > 60
    assert counts.in_place == 0


class RecordingLanes(LazyLanes):
    """Copies at once, and keeps where from."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, eagerness=1.0)
        self.sources: list[int] = []

    def copy(self, lane: Lane, copies: Sequence[Copy], tensor_class: TensorClass) -> None:
        self.sources += [it.source for it in copies]
        super().copy(lane, copies, tensor_class)


@pytest.mark.parametrize("make", MIXTURES)
def test_in_decode_no_experts_are_copied(make: Callable[[], Any]) -> None:
    model = make().eval()
    lanes = RecordingLanes(model)
    weights = stream(model, lanes)
    tables = {
        it.data_ptr()
        for layer in model.model.layers
        for it in model.parameters()
        if id(it) in find_experts(layer).ids
    }
    assert len(tables) == 2 * LAYERS

    def call(rows: int, length: int, cache: Any = None) -> Any:
        tokens = torch.full((rows, length), 5)
        with torch.inference_mode():
            return model(input_ids=tokens, past_key_values=cache, use_cache=True).past_key_values

    for rows in (3, 1):
        cache = call(rows, 5)
        assert tables <= set(lanes.sources)
        lanes.sources.clear()
        for _ in range(4):
            call(rows, 1, cache)
        assert lanes.sources  # the other weights
        assert tables.isdisjoint(lanes.sources)
    # A call that follows a prompt's finds up to two of its layers in the buffers.
    assert weights.streamed.counts.experts_in_place >= 2 * 4 * LAYERS - 2 * 2
    lanes.sources.clear()
    call(4, 1)
    assert tables <= set(lanes.sources)


class SomeRoom(NoRoom):
    """A device with weights, and as much memory beside as makes a plan leave 256 MiB."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.placed: Callable[[], int] = int

    def take_peak_bytes(self) -> int:
        return self.placed() + (192 << 20)


def chat(make: Callable[[], Any], room: SomeRoom | None) -> tuple[list[torch.Tensor], Any]:
    """Long answers, and then many prompts without any."""
    torch.manual_seed(0)
    model = make().eval()
    model.set_experts_implementation("batched_mm")
    weights = None
    if room is not None:
        memory, store = HostStateMemory(), ActivationStore("cpu")
        lanes = LazyLanes(model, 0.5)
        weights = ModelWeights(model, lanes, memory, room, store, min_bytes=EXPERT_BYTES)
        room.placed = lambda: weights.placed_bytes
    seen: list[torch.Tensor] = []
    statuses = []
    for batch in (1, 3):
        tokens = torch.arange(batch * 5).view(batch, 5) + 3
        seen += generate(model, tokens, min_new_tokens=40, max_new_tokens=40)
    if weights is not None:
        statuses.append(weights.status())
    for prompt in range(50):
        tokens = torch.full((5, 5), prompt)
        with torch.inference_mode():
            seen.append(model(input_ids=tokens).logits)
    if weights is not None:
        statuses.append(weights.status())
    return seen, statuses


EXPERT_BYTES = 8 * 16 * 32 * 4
"""Of the smallest table."""

BESIDE_BYTES = (256 + 256) << 20
"""What plans leave for what calls make, and as slack."""


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("make", MIXTURES)
def test_experts_stay_on_the_device_where_calls_are_of_few_tokens(make: Callable[[], Any]) -> None:
    model = make()
    weight_bytes = sum(it.nbytes for it in model.parameters())
    tables = [it.nbytes for it in model.parameters() if it.ndim == 3]
    # Beside two buffers of a layer, a quarter of the tables have room.
    room_bytes = weight_bytes - sum(tables) + 2 * sum(tables[:2]) + sum(tables) // 4
    stock, _ = chat(make, None)
    streamed, (talked, read) = chat(make, SomeRoom(BESIDE_BYTES + room_bytes))
    assert all(map(torch.equal, stock, streamed))
    assert talked.plans == 2
    assert 0 < talked.cache_bytes <= sum(tables) // 4
    assert talked.streamed_bytes == sum(tables)
    assert talked.resident_bytes + talked.buffer_bytes + talked.cache_bytes <= room_bytes
    hits, misses = talked.cached_experts
    assert hits > 0
    # The second prompt has left two layers in the buffers. Two tables of the last one are asked
    # for three times two experts at each of 39 tokens.
    assert hits + misses >= 2 * 39 * 3 * 2
    # Prompts need all experts, and whole tables on the device are better for them.
    assert (read.plans, read.cache_bytes) == (3, 0)
    assert read.streamed_bytes < sum(tables)
