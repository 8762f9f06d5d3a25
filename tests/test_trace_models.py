"""Traces of known models: totals that can be worked out from their shapes, and bad arguments."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from traced_memory import class_bytes, live_bytes

from umem.capture.offline import (
    MODES,
    llama_of_size,
    model_config,
    model_names,
    model_trace,
    record_step,
)
from umem.core.classes import TensorClass
from umem.core.errors import TraceError
from umem.trace import Precision, Trace, check_trace

pytest.importorskip("transformers")
pytest.importorskip("peft")

BATCH, SEQ = 2, 64

# llama-tiny: 4 layers, width 256, 8 heads of which 4 for keys and values, 688 wide inside.
LAYER_LINEAR = 2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 688
HEAD = EMBEDDING = 512 * 256
NORMS = 9 * 256
PARAMETERS = EMBEDDING + 4 * LAYER_LINEAR + HEAD + NORMS
ADAPTERS = 4 * 16 * (2 * (256 + 256) + 2 * (256 + 128))


def tiny(mode: str, **options: object) -> Trace:
    trace = model_trace("llama-tiny", mode, batch=BATCH, seq=SEQ, **options)  # type: ignore[arg-type]
    check_trace(trace, "test")
    return trace


@pytest.fixture(scope="module")
def sft() -> Trace:
    return tiny("sft")


@pytest.fixture(scope="module")
def lora() -> Trace:
    return tiny("lora")


@pytest.mark.slow
def test_sft_has_sixteen_bytes_per_parameter(sft: Trace) -> None:
    assert sft.metadata["parameters"] == sft.metadata["trainable_parameters"] == PARAMETERS
    assert class_bytes(sft, TensorClass.WEIGHTS, persistent=True) == 2 * PARAMETERS
    assert class_bytes(sft, TensorClass.GRADIENTS, persistent=False) == 2 * PARAMETERS
    assert class_bytes(sft, TensorClass.GRADIENTS, persistent=True) == 0
    tensors = 4 * 9 + 3
    assert class_bytes(sft, TensorClass.OPTIMIZER_STATE, persistent=True) == (
        12 * PARAMETERS + 4 * tensors
    )
    assert class_bytes(sft, TensorClass.FROZEN_WEIGHTS, persistent=True) == 0


@pytest.mark.slow
def test_sft_updates_one_parameter_at_a_time(sft: Trace) -> None:
    in_step = [p for p, name in enumerate(sft.phase_names) if name.startswith("optimizer ")]
    largest = 4 * max(EMBEDDING, 256 * 688)  # a gradient in float32
    others = live_bytes(sft, TensorClass.OTHER)
    kept = class_bytes(sft, TensorClass.OTHER, persistent=True)
    assert max(others[phase] for phase in in_step) == kept + largest


@pytest.mark.slow
def test_sft_arithmetic_is_six_per_parameter_and_token(sft: Trace) -> None:
    tokens = BATCH * SEQ
    # All but the embedding, which is a lookup: 2 forward and 4 backward. Causal attention: half of
    # 2 products of tokens x seq x width forward and 5 backward.
    linear = 6 * (4 * LAYER_LINEAR + HEAD) * tokens
    attention = 4 * (2 + 5) * 2 * tokens * SEQ * 256 / 2
    assert sft.flops.sum() == linear + attention
    matmuls = sft.flops > 1e6
    assert set(sft.phase_precision[matmuls].tolist()) == {Precision.BF16}


@pytest.mark.slow
def test_lora_trains_adapters_only(lora: Trace) -> None:
    assert lora.metadata["parameters"] == PARAMETERS
    assert lora.metadata["trainable_parameters"] == ADAPTERS
    assert class_bytes(lora, TensorClass.FROZEN_WEIGHTS, persistent=True) == 2 * PARAMETERS
    assert class_bytes(lora, TensorClass.WEIGHTS, persistent=True) == 4 * ADAPTERS
    assert class_bytes(lora, TensorClass.GRADIENTS, persistent=False) == 4 * ADAPTERS
    assert class_bytes(lora, TensorClass.OPTIMIZER_STATE, persistent=True) == (
        8 * ADAPTERS + 4 * 4 * 4 * 2
    )


@pytest.mark.slow
def test_lora_never_writes_frozen_weights(lora: Trace) -> None:
    frozen = lora.tensor_class == TensorClass.FROZEN_WEIGHTS.number
    assert set(lora.access_mode[frozen[lora.access_tensor]].tolist()) == {1}
    assert frozen[np.unique(lora.access_tensor)].sum() == frozen.sum()  # and each is read


@pytest.mark.slow
def test_every_activation_is_written_before_it_is_read(sft: Trace, lora: Trace) -> None:
    for trace in (sft, lora):
        first_mode: dict[int, int] = {}
        for tensor, mode in zip(trace.access_tensor, trace.access_mode, strict=True):
            first_mode.setdefault(int(tensor), int(mode))
        born = np.flatnonzero(~trace.persistent)
        assert len(born) > 100
        assert all(first_mode.get(int(tensor), 2) == 2 for tensor in born)


@pytest.mark.slow
def test_checkpointing_trades_memory_for_arithmetic(sft: Trace) -> None:
    checkpointed = tiny("sft", checkpoint=True)
    activations = [max(live_bytes(t, TensorClass.ACTIVATIONS)) for t in (sft, checkpointed)]
    assert activations[1] < 0.6 * activations[0]
    assert 1.15 * sft.flops.sum() < checkpointed.flops.sum() < 4 / 3 * sft.flops.sum()
    assert checkpointed.metadata["checkpoint"] == 1


@pytest.mark.slow
def test_accumulation_repeats_all_but_the_update(sft: Trace) -> None:
    twice = tiny("sft", accumulate=2)
    assert twice.flops.sum() == pytest.approx(2 * sft.flops.sum())
    updates = [sum(name.endswith("_fused_adamw_") for name in t.phase_names) for t in (sft, twice)]
    assert updates[0] == updates[1] == 4 * 9 + 3
    assert class_bytes(twice, TensorClass.GRADIENTS, persistent=False) == 2 * PARAMETERS
    assert max(live_bytes(twice, TensorClass.ACTIVATIONS)) < 1.5 * max(
        live_bytes(sft, TensorClass.ACTIVATIONS)
    )


def test_the_fused_kernel_runs_as_causal_without_a_mask(sft: Trace) -> None:
    kernels = [p for p, name in enumerate(sft.phase_names) if name.endswith("attention_for_cpu")]
    for phase in kernels:
        span = slice(sft.access_start[phase], sft.access_start[phase + 1])
        assert sum(mode == 1 for mode in sft.access_mode[span]) == 3  # query, key, value


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "weight_bytes", "state_bytes"), [("bf16", 2, 4), ("fp32-autocast", 4, 8)]
)
def test_types_of_weights_and_state(precision: str, weight_bytes: int, state_bytes: int) -> None:
    trace = model_trace("llama-tiny", "sft", batch=BATCH, seq=SEQ, precision=precision)

    def bytes_of(tensor_class: TensorClass) -> int:
        return int(trace.tensor_bytes[trace.tensor_class == tensor_class.number].sum())

    assert bytes_of(TensorClass.WEIGHTS) == weight_bytes * PARAMETERS
    assert bytes_of(TensorClass.GRADIENTS) == weight_bytes * PARAMETERS
    # Besides, a step count of 4 bytes for each parameter tensor.
    assert 0 <= bytes_of(TensorClass.OPTIMIZER_STATE) - state_bytes * PARAMETERS < 4 * 100
    matmuls = [name.endswith("aten.mm") for name in trace.phase_names]
    assert set(trace.phase_precision[matmuls].tolist()) == {Precision.BF16}


def test_names_and_metadata(lora: Trace) -> None:
    assert lora.name == "llama-tiny-lora"
    assert "transformers" in lora.source
    assert dict(lora.metadata) == {
        "model": "llama-tiny",
        "mode": "lora",
        "batch": BATCH,
        "seq": SEQ,
        "accumulate": 1,
        "checkpoint": 0,
        "precision": "bf16-master",
        "parameters": PARAMETERS,
        "trainable_parameters": ADAPTERS,
    }
    assert set(MODES) == {"lora", "sft"}
    assert {"llama-2-7b", "llama-2-13b", "llama-2-70b"} <= set(model_names())


@pytest.mark.parametrize(
    ("model", "mode", "options", "message"),
    [
        ("llama2-7b", "sft", {}, r"unknown model 'llama2-7b', did you mean 'llama-2-7b'\?"),
        ("bert", "sft", {}, r"unknown model 'bert'\. Known: deepseek"),
        ("llama-2-7b", "lorra", {}, r"unknown mode 'lorra', did you mean 'lora'\?"),
        ("llama-tiny", "sft", {"precision": "fp16"}, r"unknown precision 'fp16', did you mean"),
        ("llama-tiny", "sft", {"batch": 0}, r"batch is 0: give a whole number from 1 to 4096"),
        ("llama-tiny", "sft", {"seq": 10**9}, r"seq is 1000000000: give .* to 131072"),
        ("llama-tiny", "sft", {"accumulate": -1}, r"accumulate is -1: give .* to 1024"),
        ("llama-tiny", "sft", {"batch": 1.5}, r"batch is 1\.5: give a whole number"),
        ("llama-tiny", "sft", {"batch": True}, r"batch is True: give a whole number"),
    ],
)
def test_bad_arguments_are_explained(
    model: str, mode: str, options: dict[str, int], message: str
) -> None:
    with pytest.raises(TraceError, match=message):
        model_trace(model, mode, **options)  # type: ignore[arg-type]


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(TraceError, match=r"needs peft, .* pip install .*\[examples\]'"):
        model_trace("llama-tiny", "lora")


@pytest.mark.slow
def test_naming_models_imports_no_torch() -> None:
    program = "import sys, umem.capture.offline.models; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.slow
def test_a_llama_of_a_size_is_recorded() -> None:
    name, _ = llama_of_size("100M")
    made = model_trace(name, "sft", seq=16)
    assert (name, made.name) == ("llama-100m", "llama-100m-sft")
    assert made.metadata["parameters"] == pytest.approx(1e8, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["deepseek-v2-lite", "gemma-3-4b", "phi-3-mini"])
def test_families_beside_llama_are_recorded(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """Values of DeepSeek's attention are narrower than its queries."""
    small = {**model_config(model), "num_hidden_layers": 2}
    monkeypatch.setattr("umem.capture.offline.models.model_config", lambda _: small)
    trace = model_trace(model, "sft", batch=1, seq=32)
    check_trace(trace, model)
    recorded = class_bytes(trace, TensorClass.WEIGHTS, persistent=True)
    assert recorded == 2 * int(trace.metadata["parameters"])


@pytest.fixture
def two_layers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Models are built with two layers; the list has how many they would have."""
    from transformers import AutoModelForCausalLM

    build: Any = AutoModelForCausalLM.from_config
    layers: list[int] = []

    def build_two_layers(config: Any, **options: Any) -> Any:
        layers.append(config.num_hidden_layers)
        config.num_hidden_layers = 2
        return build(config, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", build_two_layers)
    return layers


@pytest.mark.slow
def test_70b_has_its_parameters(two_layers: list[int]) -> None:
    """test_lora_against_sft.py records a smaller model whole."""
    trace = model_trace("llama-2-70b", "sft", batch=1, seq=2048)
    check_trace(trace, "llama-2-70b")
    (layer_count,) = two_layers
    recorded = int(trace.metadata["parameters"])
    hidden, key_value, intermediate = 8192, 1024, 28_672
    layer = 2 * hidden * hidden + 2 * hidden * key_value + 3 * hidden * intermediate + 2 * hidden
    assert recorded + (layer_count - 2) * layer == 68_976_648_192
    assert class_bytes(trace, TensorClass.WEIGHTS, persistent=True) == 2 * recorded
    state = class_bytes(trace, TensorClass.OPTIMIZER_STATE, persistent=True)
    assert state == pytest.approx(12 * recorded, rel=1e-6)


# ---------------------------------------------------------------------------------- experts


def test_operations_of_grouped_products_do_not_depend_on_the_groups() -> None:
    groups, rows, inner, columns = 4, 24, 16, 8

    def step() -> None:
        offsets = torch.full((groups,), rows // groups, dtype=torch.int32).cumsum(0).int()
        tokens = torch.empty(rows, inner, dtype=torch.bfloat16, requires_grad=True)
        weights = torch.empty(groups, inner, columns, dtype=torch.bfloat16, requires_grad=True)
        torch.nn.functional.grouped_mm(tokens, weights, offs=offsets).square().sum().backward()
        shared = torch.empty(inner, rows, dtype=torch.bfloat16)
        torch.nn.functional.grouped_mm(weights.detach().mT, shared, offs=offsets)

    trace = record_step(lambda: step, name="experts", source="test")
    products = [name.endswith("_grouped_mm") for name in trace.phase_names]
    # Forward; the gradients of the tokens and the weights; and with groups of columns.
    assert trace.flops[products].tolist() == [2 * rows * inner * columns] * 4


@pytest.mark.slow
def test_experts_have_their_parameters_and_arithmetic() -> None:
    """The model card of gpt-oss: 20.9 B and 3.61 B, as the embedding does no arithmetic."""
    model, parameters, active, seq = "gpt-oss-20b", 20_914_757_184, 3.61e9, 1000
    trace = model_trace(model, "sft", batch=1, seq=seq, precision="bf16")
    check_trace(trace, model)
    assert trace.metadata["parameters"] == parameters
    for tensor_class in (TensorClass.WEIGHTS, TensorClass.GRADIENTS):
        of_class = trace.tensor_class == tensor_class.number
        assert trace.tensor_bytes[of_class].sum() == 2 * parameters
    assert trace.flops.sum() == pytest.approx(6 * active * seq, rel=0.03)


@pytest.mark.slow
@pytest.mark.usefixtures("two_layers")
def test_sliding_windows_bound_the_arithmetic() -> None:
    """Every second layer has one."""

    def attention(seq: int) -> list[float]:
        trace = model_trace("gpt-oss-20b", "sft", batch=1, seq=seq, precision="bf16")
        forward = [
            name.startswith("forward") and "attention" in name.rpartition(".")[2]
            for name in trace.phase_names
        ]
        return trace.flops[forward].tolist()

    width = 64 * 64
    even, prime = (attention(seq) for seq in (1000, 1009))
    assert even == [4 * width * 1000 * 200, 4 * width * 1000 * 1000 / 2]
    assert prime == [4 * width * 1009 * 1009 / 2] * 2


def test_experts_have_no_autocast() -> None:
    with pytest.raises(TraceError, match=r"gpt-oss-20b .*fp32-autocast"):
        model_trace("gpt-oss-20b", "sft", precision="fp32-autocast")


@pytest.mark.parametrize("library", ["transformers", "torch"])
def test_old_libraries_have_no_experts(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    monkeypatch.setattr(sys.modules[library], "__version__", "2.10.0+cpu")
    with pytest.raises(TraceError, match=rf"gpt-oss-20b needs {library} \d+\.\d+, and 2\.10\.0"):
        model_trace("gpt-oss-20b", "sft")
