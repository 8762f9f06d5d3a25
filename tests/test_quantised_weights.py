"""Weights that bitsandbytes and torchao have quantised are streamed: no bit changes.

Copies run late or at random moments, and buffers begin as NaN.
"""

from __future__ import annotations

import copy
import io
import logging
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lazy_lanes import HostStateMemory, LazyLanes, NoRoom
from streamed_models import adamw_of_trained
from streamed_programs import WIDTH, Net, Program, bits, compare
from streamed_uses import USES
from torch import nn

from umem.offloading import ActivationStore
from umem.streaming.plan import staged_bytes
from umem.streaming.weights import ModelWeights

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
]

LAYERS = 3
MATRICES = 7
"""Of each layer of a Llama."""

MIN_BYTES = 512
"""The larger matrices' scales in float32 are streamed."""


def bitsandbytes() -> Any:
    return pytest.importorskip("bitsandbytes")


def torchao() -> Any:
    return pytest.importorskip("torchao.quantization")


@pytest.fixture(scope="module")
def checkpoint() -> Iterator[str]:
    """A folder with a Llama of random weights."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 97}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**shape, **heads, num_hidden_layers=LAYERS)
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
        yield folder


def load(folder: str, quantised: Any = None) -> Any:
    return transformers.LlamaForCausalLM.from_pretrained(
        folder, quantization_config=quantised, device_map="cpu", dtype=torch.bfloat16
    )


def load_4bit(folder: str, *, nested: bool, kind: str = "nf4") -> Any:
    bitsandbytes()
    return load(
        folder,
        transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=kind,
            bnb_4bit_use_double_quant=nested,
            bnb_4bit_compute_dtype=torch.bfloat16,
        ),
    )


def without_cpu_layout(model: Any) -> Any:
    """Have 4-bit layers keep the layout that a GPU has, on processors for which there is another.

    That other one has no backward pass.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


def nf4(folder: str, *, nested: bool = False, kind: str = "nf4") -> Any:
    return without_cpu_layout(load_4bit(folder, nested=nested, kind=kind))


def nested_nf4(folder: str) -> Any:
    return nf4(folder, nested=True)


def nested_fp4(folder: str) -> Any:
    return nf4(folder, nested=True, kind="fp4")


def repacked_nf4(folder: str) -> Any:
    """Layers give their weights another memory in their first call, where the processor can it."""
    return load_4bit(folder, nested=True)


def ao_int8(folder: str) -> Any:
    model, library = load(folder), torchao()
    library.quantize_(model, library.Int8WeightOnlyConfig())
    return model


def loaded_ao_int8(folder: str) -> Any:
    """Quantised while it is loaded."""
    return load(folder, transformers.TorchAoConfig(torchao().Int8WeightOnlyConfig()))


def ao_nf4(folder: str) -> Any:
    """As torchtune has it."""
    model, library = load(folder), torchao()
    for module in model.model.layers.modules():
        if isinstance(module, nn.Linear):
            packed = library.to_nf4(module.weight.detach(), block_size=64, scaler_block_size=16)
            module.weight = nn.Parameter(packed, requires_grad=False)
    return model


def ao_int4(folder: str) -> Any:
    """Of torchao's kinds of int4 the one that the CPU has kernels for."""
    model, library = load(folder), torchao()
    granularity = pytest.importorskip("torchao.quantization.granularity")
    kind: Any = torch.int4  # type: ignore[attr-defined]
    library.quantize_(model, library.IntxWeightOnlyConfig(kind, granularity.PerGroup(32)))
    return model


def bnb_int8(folder: str) -> Any:
    bitsandbytes()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # one warning for each call
    return load(folder, transformers.BitsAndBytesConfig(load_in_8bit=True))


def stream(model: Any, lanes: Any) -> ModelWeights:
    weights = ModelWeights(
        model, lanes, HostStateMemory(), NoRoom(), ActivationStore("cpu"), min_bytes=MIN_BYTES
    )
    weights.begin_call()  # `generate` may call a model within this one
    return weights


def generate(model: Any) -> list[torch.Tensor]:
    """Tokens and logits of batches of several sizes."""
    seen: list[torch.Tensor] = []
    for prompts, length in ((1, 7), (3, 5), (1, 1), (2, 40)):
        tokens = torch.arange(prompts * length).view(prompts, length) + 3
        made = model.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=6,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        seen += [made.sequences, *made.logits]
        with torch.inference_mode():
            seen.append(model(input_ids=made.sequences).logits)
    return seen


def run(make: Callable[[str], Any], folder: str, eagerness: float | None) -> tuple[Any, Any]:
    """What a program sees; with its weights streamed unless there is no eagerness."""
    model = make(folder).eval()
    weights = None if eagerness is None else stream(model, LazyLanes(model, eagerness))
    return generate(model), weights


@pytest.mark.parametrize("eagerness", [0.0, 0.5])
@pytest.mark.parametrize(
    "make", [nf4, nested_nf4, nested_fp4, repacked_nf4, ao_int8, ao_int4, loaded_ao_int8, ao_nf4]
)
def test_generation_is_exact(make: Callable[[str], Any], eagerness: float, checkpoint: str) -> None:
    stock, again = (run(make, checkpoint, None)[0] for _ in range(2))
    assert bits(stock) == bits(again)
    streamed, weights = run(make, checkpoint, eagerness)
    assert bits(streamed) == bits(stock)
    status = weights.status()
    assert status.counts.fetched > 60
    assert status.counts.in_place == 0
    assert status.counts.late <= status.counts.fetched // 5


def sizes_of_4bit(model: Any) -> tuple[list[int], list[int]]:
    """Bytes of the weights in 4 bits, and of their scales."""
    every = [it.weight for it in model.modules() if isinstance(it, bitsandbytes().nn.Linear4bit)]
    assert len(every) == LAYERS * MATRICES
    return [it.nbytes for it in every], [it.quant_state.absmax.nbytes for it in every]


@pytest.mark.parametrize(("make", "scales_are_streamed"), [(nf4, True), (nested_nf4, False)])
def test_4bit_weights_keep_their_class_and_their_scales(
    make: Callable[[str], Any], scales_are_streamed: bool, checkpoint: str
) -> None:
    model = make(checkpoint).eval()
    layer = model.model.layers[1].mlp.down_proj
    weight, state = layer.weight, layer.weight.quant_state
    weights = stream(model, LazyLanes(model, 0.5))
    scales, home = state.absmax, state.absmax.data_ptr()
    seen: list[tuple[bool, bool]] = []
    layer.register_forward_hook(
        lambda *_: seen.append((weights.streamed.is_in_use, scales.data_ptr() != home))
    )
    for _ in range(3):
        generate(model)
        assert layer.weight is weight
        # Between calls a guard sees the program's uses. PEFT tells weights by their class's name.
        assert type(weight) == bitsandbytes().nn.Params4bit  # noqa: E721
        assert type(weight).__name__ == "Params4bit"
        assert isinstance(weight, bitsandbytes().nn.Params4bit)
        assert weight.quant_state is state
        assert weight.bnb_quantized
        assert weight.absmax is state.absmax is scales
        assert scales.data_ptr() == home
    assert set(seen) == {(True, scales_are_streamed)}
    # The head is not quantised, and the embedding is read in place.
    packed, of_scales = sizes_of_4bit(model)
    streamed = [*packed, *of_scales, model.lm_head.weight.nbytes]
    assert weights.streamed.streamed_bytes == sum(
        staged_bytes([it]) for it in streamed if it >= MIN_BYTES
    )
    other = copy.deepcopy(weight)
    assert type(other) is type(weight)
    assert torch.equal(other, weight)
    assert other.quant_state is not state
    halves: Any = torch.chunk(weight, 2)
    first, second = halves
    assert type(first) is type(second) is type(weight)
    assert first.quant_state is state


def adapters(rank: int = 4) -> Any:
    peft = pytest.importorskip("peft")
    return peft.LoraConfig(r=rank, target_modules=["up", "down"], init_lora_weights=False)


class Quantised(nn.Module):
    """Two matrices in 4 bits, as large as what is streamed."""

    def __init__(self, *, nested: bool) -> None:
        super().__init__()
        make = bitsandbytes().nn.LinearNF4
        self.up = make(WIDTH, 4 * WIDTH, compress_statistics=nested)
        self.down = make(4 * WIDTH, WIDTH, compress_statistics=nested)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


class QLoRA(Net):
    """Trains PEFT's adapters beside weights of 4 bits."""

    nested = False

    def __init__(self) -> None:
        super().__init__()
        peft = pytest.importorskip("peft")
        self.requires_grad_(False)
        self.layers = nn.ModuleList(Quantised(nested=self.nested) for _ in range(4))
        without_cpu_layout(self).to("cpu")  # which quantises
        self.is_loaded_in_4bit = True  # for PEFT, which else takes them for plain ones
        peft.inject_adapter_in_model(adapters(), self)


class NestedQLoRA(QLoRA):
    """With scales that are quantised too."""

    nested = True


OF_FLOATS = frozenset(
    (
        *("change_weights_in_place", "copy_model", "ema", "foreach_ema", "freeze_by_turns"),
        *("from_one_vector", "hooks_on_gradients", "new_parameter", "old_graph", "replace_data"),
        *("save_and_load", "scale_one_gradient", "share_state", "use_a_weight_elsewhere"),
    )
)
"""Uses of a layer's own weight, which is trained, or of a model that loads what it has saved."""


@pytest.mark.parametrize("make_model", [QLoRA, NestedQLoRA])
@pytest.mark.parametrize("use", [it for it in USES if it.__name__ not in OF_FLOATS])
def test_no_use_of_a_training_sees_another_value(
    use: Callable[[Program], None], make_model: Callable[[], nn.Module]
) -> None:
    program = compare(
        use, 0.5, make_model=make_model, make_optimizer=adamw_of_trained, streams_weights=True
    )
    assert program.weights.streamed.counts.fetched


class Training(Program):
    """QLoRA on a decoder of `transformers` and PEFT."""

    def batch(self) -> torch.Tensor:
        self.steps += 1
        return torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(self.steps))

    def backward(self) -> None:
        tokens = self.batch()
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.seen.append(loss.detach().clone())
        loss.backward()


def adapted(make: Callable[[str], Any], folder: str, *, is_checkpointed: bool) -> Any:
    """A decoder with adapters, as the documentation of PEFT prepares one."""
    peft = pytest.importorskip("peft")
    model = peft.prepare_model_for_kbit_training(
        make(folder),
        use_gradient_checkpointing=is_checkpointed,
        gradient_checkpointing_kwargs={"use_reentrant": False},
    )
    config = peft.LoraConfig(
        r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model, config).train()


def train(
    make_model: Callable[[], Any],
    change: Callable[[Program], None] = lambda _: None,
    eagerness: float = 0.5,
) -> Program:
    """Two stock runs and a streamed one, whose bits are equal. Returns the streamed run."""
    found = []
    for streams in (False, False, True):
        program = Training(
            (lambda model: LazyLanes(model, eagerness)) if streams else None,
            make_model=make_model,
            make_optimizer=adamw_of_trained,
            streams_weights=True,
        )
        found.append(bits(program.run(change)))
    stock, again, streamed = found
    assert stock == again
    assert streamed == stock
    assert program.weights.streamed.counts.fetched > 20
    return program


@pytest.mark.parametrize("is_checkpointed", [True, False])
@pytest.mark.parametrize("make", [nf4, nested_nf4, ao_int8, bnb_int8])
def test_adapters_on_quantised_weights_keep_their_bits(
    make: Callable[[str], Any], is_checkpointed: bool, checkpoint: str
) -> None:
    program = train(lambda: adapted(make, checkpoint, is_checkpointed=is_checkpointed))
    assert program.training.counts.waited == 0, "updates of adapters are deferred"


@torch.no_grad()
def evaluate(program: Program) -> None:
    program.seen.append(program.model(program.batch()).logits)


@torch.no_grad()
def dequantise(program: Program) -> None:
    """Look at weights between steps, when copies of them may be under way."""
    kind = bitsandbytes().nn.Linear4bit
    weight = next(it.weight for it in program.model.modules() if isinstance(it, kind))
    whole = bitsandbytes().functional.dequantize_4bit(weight.data, weight.quant_state)
    program.seen.append(whole.clone())


def merge(program: Program) -> None:
    """Adapters are added to their weights, which are quantised anew, and taken off again."""
    program.model.merge_adapter()
    evaluate(program)
    program.model.unmerge_adapter()


def merge_a_layer(program: Program) -> None:
    """The other layers go on as they are."""
    layer = program.model.base_model.model.model.layers[1].mlp.up_proj
    (layer.unmerge if layer.merged else layer.merge)()


def disable(program: Program) -> None:
    with program.model.disable_adapter():
        evaluate(program)


def change_in_place(program: Program) -> None:
    """Codes are changed in place, which torch counts in one layer, and not in others."""
    for number, layer in enumerate(program.model.base_model.model.model.layers):
        weight = layer.mlp.down_proj.base_layer.weight
        codes = getattr(weight, "qdata", weight)
        if number:
            codes.data.bitwise_xor_(17)
        else:
            with torch.no_grad():
                codes.bitwise_xor_(34)


def save_and_load(program: Program) -> None:
    """Saved from homes, and loaded into them."""
    saved = {name: it.clone() for name, it in program.model.state_dict().items()}
    program.seen.append(saved)
    change_in_place(program)
    program.step()
    program.model.load_state_dict(saved, strict=False)  # scales are no parameters


def save_adapters(program: Program) -> None:
    with tempfile.TemporaryDirectory() as folder:
        program.model.save_pretrained(folder)
        program.seen.append(Path(folder, "adapter_model.safetensors").read_bytes())


def pickle_weights(program: Program) -> None:
    file = io.BytesIO()
    torch.save(list(program.model.parameters()), file)
    file.seek(0)
    program.seen += [(type(it).__name__, it) for it in torch.load(file, weights_only=False)]


def copy_model(program: Program) -> None:
    with torch.no_grad():
        program.seen.append(copy.deepcopy(program.model)(program.batch()).logits)


OF_INT8 = (change_in_place, copy_model, disable, pickle_weights)
OF_4BIT = (*OF_INT8, dequantise, merge, merge_a_layer, save_adapters, save_and_load)


@pytest.mark.parametrize("eagerness", [0.0, 1.0])
@pytest.mark.parametrize(
    ("use", "make"),
    [
        *((use, make) for make in (nf4, nested_nf4) for use in OF_4BIT),
        *((use, ao_int8) for use in OF_INT8),
    ],
)
def test_no_use_of_quantised_weights_sees_another_value(
    use: Callable[[Program], None], make: Callable[[str], Any], eagerness: float, checkpoint: str
) -> None:
    def between_passes(program: Program) -> None:
        """Then weights of the next pass are fetched already."""
        evaluate(program)
        use(program)
        evaluate(program)

    train(lambda: adapted(make, checkpoint, is_checkpointed=True), between_passes, eagerness)


@pytest.mark.parametrize("make", [nf4, nested_nf4, repacked_nf4])
def test_a_quantised_checkpoint_is_saved_from_homes(
    make: Callable[[str], Any], checkpoint: str, tmp_path: Path
) -> None:
    stock = make(checkpoint).eval()
    generate(stock)
    model = make(checkpoint).eval()
    weights = stream(model, LazyLanes(model, 0.5))
    expected = generate(model)
    for name, it in (("stock", stock), ("streamed", model)):
        it.save_pretrained(tmp_path / name)
    files = [tmp_path / name / "model.safetensors" for name in ("stock", "streamed")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert weights.streamed.counts.fetched
    if make is not repacked_nf4:
        again = without_cpu_layout(load(str(tmp_path / "streamed"))).eval()
        assert bits(generate(again)) == bits(expected)


@pytest.mark.parametrize("is_called", [False, True])
def test_weights_of_llm_int8_stay_where_they_are(is_called: bool, checkpoint: str) -> None:
    """A layer has the same memory by another tensor, and uses that one from its first call on."""

    def make(folder: str) -> Any:
        model = bnb_int8(folder).eval()
        if is_called:
            generate(model)
        return model

    stock, _ = run(make, checkpoint, None)
    model = make(checkpoint)
    layers = [it for it in model.modules() if isinstance(it, bitsandbytes().nn.Linear8bitLt)]
    addresses = [it.weight.data_ptr() for it in layers]
    assert len(layers) == LAYERS * MATRICES
    weights = stream(model, LazyLanes(model, 0.5))
    assert bits(generate(model)) == bits(stock)
    assert [it.weight.data_ptr() for it in layers] == addresses
    assert [it.state.CB.data_ptr() for it in layers] == addresses
    status = weights.status()
    assert (status.plans, status.streamed_bytes) == (1, 0)


@pytest.mark.parametrize("make", [nf4, ao_int8])
def test_compiled_layers_keep_their_bits(make: Callable[[str], Any], checkpoint: str) -> None:
    def call(*, streams: bool) -> tuple[list[torch.Tensor], Any]:
        torch.compiler.reset()
        model = make(checkpoint).eval()
        for layer in model.model.layers:
            layer.compile(backend="aot_eager")
        weights = stream(model, LazyLanes(model, 1.0)) if streams else None
        with torch.no_grad():
            return [model(torch.arange(14).view(2, 7) + n).logits for n in range(5)], weights

    (stock, _), (streamed, weights) = call(streams=False), call(streams=True)
    assert bits(streamed) == bits(stock)
    assert weights.streamed.counts.fetched > 4 * LAYERS
