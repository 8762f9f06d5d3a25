"""`umem fit`: shapes of models, the estimate of a step, and the answer for a machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from command_line import Run

from umem.capture.offline import LORA_TARGETS, model_config, model_names
from umem.core.errors import UmemError
from umem.fit import (
    Fit,
    ModelShape,
    Workload,
    fit_inference,
    fit_training,
    generic_shape,
    load_shape,
    training_step,
)
from umem.fit.answer import PROCESS_BYTES
from umem.fit.estimate import class_bytes
from umem.fit.families import FAMILIES
from umem.hardware import Hardware, hardware_names, load_hardware
from umem.policy import ResolvedPolicy, load_policy, resolve

GIB = 1 << 30

LLAMA_7B = 6_738_415_616
"""Parameters of Llama-2-7B."""

CONFIGS = [
    json.loads(line)
    for line in Path(__file__).with_name("support").joinpath("model_configs.jsonl").open()
]
"""What counts of published ``config.json`` files, and a few of umem's own, by ``name``."""


@pytest.fixture
def run(run: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.delenv("UMEM_DEVICE_BUDGET", raising=False)
    return run


def machine(mode: str, name: str = "h100-sxm") -> tuple[Hardware, ResolvedPolicy]:
    hardware = load_hardware(name)
    return hardware, resolve(load_policy(mode), hardware)


def trained(
    model: str,
    *,
    mode: str = "sft",
    batch: int = 4,
    seq: int = 2048,
    precision: str = "bf16",
    checkpoint: bool = True,
    gpu: str = "h100-sxm",
    host_bytes: int | None = None,
) -> Fit:
    workload = Workload(load_shape(model), mode, batch, seq, precision, checkpoint)
    return fit_training(workload, *machine(mode, gpu), host_bytes=host_bytes)


# Shapes.


def built(config: Mapping[str, Any]) -> Any:
    """The modules that transformers makes of a configuration, without memory."""
    transformers = pytest.importorskip("transformers")
    text = {"model_type": "gemma3_text"} | config.get("text_config", config)
    text = {key: value for key, value in text.items() if key not in NOT_OF_THE_MODEL}
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**text)
        )


NOT_OF_THE_MODEL = ("name", "refused", "quantization_config")


def written(folder: Path, config: Mapping[str, Any]) -> str:
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    return str(file)


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=[config["name"] for config in CONFIGS])
def test_counts_are_those_of_the_modules_or_the_family_is_refused(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    file = written(tmp_path, config)
    if config.get("refused"):
        with pytest.raises(UmemError, match=r"--params") as error:
            load_shape(file)
        assert str(file) in str(error.value)
        return
    shape, model = load_shape(file), built(config)
    assert shape.parameters == sum(it.numel() for it in model.parameters())
    kinds = getattr(model.config, "layer_types", None)
    if kinds and model.config.sliding_window:
        has_window = [kind == "sliding_attention" for kind in kinds]
        assert [bool(layer.window) for layer in shape.layers] == has_window


def test_every_family_is_compared_and_has_the_defaults_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    compared = {
        config.get("text_config", config).get("model_type", "gemma3_text")
        for config in CONFIGS
        if not config.get("refused")
    }
    assert set(FAMILIES) == compared
    for name, family in FAMILIES.items():
        theirs = transformers.CONFIG_MAPPING[name]
        found = {key: getattr(theirs, key) for key in family.defaults}
        assert found == family.defaults, name
        others = {
            key: value
            for key in KEYS_WITH_DEFAULTS
            if key not in family.defaults and (value := getattr(theirs, key, None))
        }
        assert not others, name


KEYS_WITH_DEFAULTS = [
    *("vocab_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("tie_word_embeddings", "attention_bias", "attention_out_bias", "mlp_bias", "qkv_bias"),
    *("use_qkv_bias", "use_qk_norm", "first_k_dense_replace", "n_shared_experts"),
    *("shared_expert_intermediate_size", "shared_intermediate_size", "kv_lora_rank", "q_lora_rank"),
    *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
]


@pytest.mark.parametrize("name", model_names())
def test_known_models_have_as_many_parameters_as_their_modules(name: str) -> None:
    model = built(model_config(name))
    assert load_shape(name).parameters == sum(it.numel() for it in model.parameters())


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("meta-llama/Llama-2-7b-hf", "llama-2-7b"),
        ("meta-llama/Llama-2-13b-chat-hf", "llama-2-13b"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("meta-llama/Llama-3.2-1B-Instruct", "llama-3.2-1b"),
        ("google/gemma-3-12b-it", "gemma-3-12b"),
        ("openai/gpt-oss-20b", "gpt-oss-20b"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("Qwen/Qwen3-4B-Base", "qwen3-4b"),
        ("google/gemma-3-27b-it", "gemma-3-27b"),
        ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "tinyllama-1.1b"),
        ("microsoft/Phi-3-mini-4k-instruct", "phi-3-mini"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "deepseek-r1-distill-llama-8b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", "qwen2.5-32b"),
    ],
)
def test_names_of_the_hub_are_known(name: str, known: str) -> None:
    assert load_shape(name).name == known


CONFIG = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def config_file(folder: Path, **changes: Any) -> Path:
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
    return Path(written(folder, config))


def test_a_file_or_its_folder_gives_a_shape(tmp_path: Path) -> None:
    file = config_file(tmp_path)
    layer = 256 * (256 + 2 * 128 + 256) + 3 * 256 * 512 + 2 * 256
    assert load_shape(str(file)).parameters == 2 * 1000 * 256 + 256 + 3 * layer
    assert load_shape(str(tmp_path)) == load_shape(str(file))
    inner = {"model_type": "mistral3", "text_config": {**CONFIG, "model_type": "mistral"}}
    whole = load_shape(written(tmp_path, inner)).parameters
    tied_inside = written(tmp_path, {**inner, "tie_word_embeddings": True})
    assert load_shape(tied_inside).parameters == whole - 1000 * 256
    tied = config_file(tmp_path, tie_word_embeddings=True)
    assert load_shape(str(tied)).parameters == 1000 * 256 + 256 + 3 * layer


def test_layers_have_the_windows_of_their_family() -> None:
    windows = [layer.window for layer in load_shape("gemma-3-12b").layers[:7]]
    assert windows == [1024] * 5 + [0, 1024]
    assert [layer.window for layer in load_shape("gpt-oss-20b").layers[:3]] == [128, 0, 128]
    assert {layer.window for layer in load_shape("mistral-7b").layers} == {4096}
    assert {layer.window for layer in load_shape("qwen2.5-7b").layers} == {0}


@pytest.mark.parametrize(("size", "billions"), [("500m", 0.5), ("7b", 7), ("13B", 13), ("70b", 70)])
def test_generic_models_have_about_the_size(size: str, billions: float) -> None:
    assert generic_shape(size).parameters == pytest.approx(billions * 1e9, rel=0.05)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers"),
        ({"model_type": "gpt2"}, "gpt2"),
        ({"model_type": None}, "model_type"),
        ({"model_type": "mixtral"}, "num_local_experts"),
        ({"model_type": "qwen3_moe", "num_experts": 4}, "moe_intermediate_size"),
        # An estimate of an endless model would take endless time.
        ({"hidden_size": {"x" * 5000: 1}}, "hidden_size"),
        ({"vocab_size": int("9" * 400)}, "vocab_size"),
        ({"hidden_size": 2**31, "intermediate_size": 2**31}, "parameters"),
    ],
)
def test_a_configuration_that_cannot_be_used_names_file_and_key(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    file = config_file(tmp_path, **changes)
    with pytest.raises(UmemError, match=named) as error:
        load_shape(str(file))
    assert str(file) in str(error.value)
    assert len(str(error.value)) < len(str(file)) + 1000


# The estimate, beside `umem simulate`, whose figures are in its documentation.


def test_a_step_is_near_that_of_a_trace() -> None:
    found = trained("llama-2-7b", precision="fp32-autocast").umem
    assert found.time_s == pytest.approx(1.38, rel=0.15)
    assert found.device_bytes == pytest.approx(75.7 * GIB, rel=0.15)
    assert found.host_bytes == pytest.approx(28.1 * GIB, rel=0.15)


@pytest.mark.parametrize(
    ("model", "gpu", "step_s"),
    [
        ("llama-2-7b", "h100-sxm", 0.77),
        ("llama-2-13b", "h100-sxm", 1.68),
        ("qwen3-14b", "h100-sxm", 2.18),
        ("gpt-oss-20b", "h100-sxm", 2.37),
        ("llama-2-13b", "gh200-96", 1.35),
        ("gpt-oss-20b", "gh200-96", 0.88),
        ("gemma-3-4b", "h100-sxm", 0.715),
        ("deepseek-v2-lite", "h100-sxm", 1.36),
        ("phi-3-mini", "h100-sxm", 0.483),
    ],
)
def test_steps_are_near_those_of_traces(model: str, gpu: str, step_s: float) -> None:
    hardware, policy = machine("sft", gpu)
    workload = Workload(load_shape(model), "sft", 4, 2048, "bf16", checkpoint=True)
    # Traces have the loss whole.
    found = fit_training(workload, hardware, replace(policy, slices_losses=False))
    assert found.umem.time_s == pytest.approx(step_s, rel=0.15)


SMALL = Workload(load_shape("llama-3.2-1b"), "sft", 1, 256, "fp32-autocast", checkpoint=True)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_small_step_waits_for_the_processor(accumulate: int) -> None:
    workload = replace(SMALL, accumulate=accumulate)
    hardware, policy = machine("sft")
    found = fit_training(workload, hardware, policy)
    assert found.waits_for_processor
    at_once, step, slow = (
        training_step(workload, replace(hardware, launch_s=factor * hardware.launch_s), 256 << 20)
        for factor in (0, 1, 3)
    )
    assert step.launch_s == found.launch_s
    assert found.launch_s <= step.passes_s < found.launch_s + at_once.passes_s
    # Waits grow with the launches, and computation is not counted on top of them.
    assert slow.passes_s > 2.8 * step.passes_s
    for unit, ahead in zip(step.units, at_once.units, strict=True):
        assert unit.forward_s >= ahead.forward_s
        assert unit.backward_s >= ahead.backward_s
        assert unit.update_s >= ahead.update_s


def test_a_forward_pass_waits_for_its_launches_before_a_long_backward_pass() -> None:
    """Though the step's launches together take less than its computation."""
    workload = replace(SMALL, batch=2, seq=1024, checkpoint=False)
    hardware, _ = machine("sft")
    step = training_step(workload, hardware, 256 << 20)
    at_once = training_step(workload, replace(hardware, launch_s=0.0), 256 << 20)
    assert step.launch_s < at_once.passes_s
    layers, their = (
        [unit for unit in it.units if ".layers." in unit.name] for it in (step, at_once)
    )
    assert sum(it.forward_s for it in layers) > 1.5 * sum(it.forward_s for it in their)
    assert sum(it.backward_s for it in layers) == pytest.approx(
        sum(it.backward_s for it in their), rel=0.03
    )


def test_launches_run_ahead_of_a_large_step() -> None:
    """A long head makes up for layers whose launches take longer than their computation."""
    hardware, policy = machine("sft")
    large = replace(SMALL, batch=32, seq=1024)
    found = fit_training(large, hardware, policy)
    assert not found.waits_for_processor
    step = training_step(large, hardware, 256 << 20)
    ahead = replace(hardware, launch_s=hardware.launch_s / 2)
    other = training_step(large, ahead, 256 << 20)
    # But for kernels that are shorter than a launch.
    assert step.passes_s == pytest.approx(other.passes_s, rel=0.02)


def test_all_resident_takes_the_time_of_stock_but_for_checkpoints() -> None:
    found = trained("llama-2-7b", mode="lora", gpu="h200")
    umem, stock, offload = found.ways
    assert umem.host_bytes == PROCESS_BYTES
    assert stock.time_s is not None
    assert umem.time_s is not None
    assert 0.6 * stock.time_s < umem.time_s < 0.8 * stock.time_s
    assert found.largest_stock_batch >= 4
    # Adapters' state is small, and the host has it all the same.
    assert offload.time_s is not None
    assert offload.time_s > stock.time_s
    assert stock.device_bytes is not None
    state_bytes = found.classes["optimizer_state"].size_bytes
    assert offload.device_bytes == stock.device_bytes - state_bytes


# The answer.


def test_classes_are_all_of_the_bytes_once() -> None:
    classes = trained("llama-2-7b", precision="fp32-autocast").classes
    weights = 4 * LLAMA_7B
    sizes = {name: place.size_bytes for name, place in classes.items()}
    assert sizes["weights"] == sizes["gradients"] == weights
    assert sizes["optimizer_state"] == 2 * weights
    assert sizes["logits"] == 4 * 2048 * 32_000 * 10
    assert classes["optimizer_state"].host_bytes > 0
    assert classes["weights"].host_bytes == 0


@pytest.mark.parametrize(
    ("mode", "precision", "bytes_each", "update_bytes"),
    [
        ("sft", "bf16", 2, 10),
        ("sft", "fp32-autocast", 4, 20),
        ("sft", "bf16-master", 8, 32),
        ("lora", "bf16-master", 4, 20),
    ],
)
def test_sgd_has_one_moment(mode: str, precision: str, bytes_each: int, update_bytes: int) -> None:
    """Read and written: weight and moment; read: the gradient; beside a master copy two casts."""
    workload = Workload(load_shape("llama-2-7b"), mode, 1, 64, precision, True, "sgd")
    assert workload.state_bytes(1) == bytes_each
    assert sum(map(sum, workload.update_bytes)) == update_bytes
    adamw = replace(workload, optimizer="adamw")
    machine = load_hardware("h100-sxm")
    state = [class_bytes(it, machine)["optimizer_state"] for it in (workload, adamw)]
    assert state[0] * adamw.state_bytes(1) == state[1] * bytes_each


@pytest.mark.parametrize(
    ("model", "targets", "rank"),
    [
        ("llama-2-7b", LORA_TARGETS, 16),
        ("llama-2-7b", ("all-linear",), 64),
        ("phi-3-mini", LORA_TARGETS, 16),
        ("gemma-3-4b", ("down_proj", "q_proj"), 8),
        ("mixtral-8x7b", LORA_TARGETS, 8),
        ("deepseek-v2-lite", ("q_proj", "kv_b_proj"), 8),
    ],
)
def test_adapters_are_those_of_peft(model: str, targets: tuple[str, ...], rank: int) -> None:
    peft = pytest.importorskip("peft")
    modules = targets[0] if targets == ("all-linear",) else list(targets)
    adapters = peft.LoraConfig(r=rank, target_modules=modules, task_type="CAUSAL_LM")
    network = peft.get_peft_model(
        built({**model_config(model), "num_hidden_layers": 2}), adapters, low_cpu_mem_usage=True
    )
    trained_parameters = sum(it.numel() for it in network.parameters() if it.requires_grad)
    shape = replace(load_shape(model), layers=load_shape(model).layers[:2])
    workload = Workload(shape, "lora", 1, 64, "bf16", True, rank=rank, targets=targets)
    found = class_bytes(workload, load_hardware("h100-sxm"))
    assert found["gradients"] == 4 * trained_parameters
    assert found["optimizer_state"] == 8 * trained_parameters


def test_quantised_weights_take_their_bits_and_scales() -> None:
    """bitsandbytes quantises the matrices of layers, in blocks of 64; PEFT makes others float32."""
    hardware = load_hardware("h100-sxm")
    others = 2 * 32_000 * 4096 + 65 * 4096
    matrices = LLAMA_7B - others
    workload = Workload(load_shape("llama-2-7b"), "lora", 1, 64, "bf16", True, rank=1)
    whole = class_bytes(workload, hardware)["weights"]
    for name, width in (("nf4", 0.5 + 4 / 64), ("nf4-double", 0.5 + 1 / 64), ("int8", 1.0)):
        found = class_bytes(replace(workload, quantised=name), hardware)["weights"]
        assert whole - found == pytest.approx((2 - width) * matrices - 2 * others, rel=1e-3)


def test_8_bit_state_has_a_byte_and_a_scale_for_each_256_and_stays() -> None:
    shape, hardware = load_shape("llama-2-7b"), load_hardware("h100-sxm")
    workload = Workload(shape, "sft", 1, 64, "bf16", True, "adamw8bit")
    found = class_bytes(workload, hardware)["optimizer_state"]
    assert found == pytest.approx(LLAMA_7B * 2 * (1 + 4 / 256), rel=1e-4)
    step = training_step(workload, hardware, 256 << 20)
    assert not any(unit.state_bytes for unit in step.units)


def test_an_accumulated_step_moves_state_and_gradients_once() -> None:
    once, four = (
        fit_training(workload, *machine("sft")).ways
        for workload in (ACCUMULATED, replace(ACCUMULATED, accumulate=4))
    )
    assert once[0].time_s is not None
    assert four[0].time_s is not None
    # As `umem simulate` says, whose figure is in docs/fit.md.
    assert four[0].time_s == pytest.approx(SIMULATED_S, rel=0.15)
    assert four[0].time_s < 4 * once[0].time_s
    assert four[0].tokens_per_s == pytest.approx(4 * 4 * 2048 / four[0].time_s)
    # Gradients of the batches before are there while activations are.
    assert (four[1].device_bytes or 0) > (once[1].device_bytes or 0)


SIMULATED_S = 5.07

ACCUMULATED = Workload(load_shape("llama-2-7b"), "sft", 4, 2048, "fp32-autocast", checkpoint=True)


def test_gpus_divide_weights_gradients_and_state() -> None:
    hardware = load_hardware("h100-sxm")
    one, four = (class_bytes(replace(ACCUMULATED, gpus=gpus), hardware) for gpus in (1, 4))
    for name in ("weights", "gradients", "optimizer_state"):
        assert four[name] == pytest.approx(one[name] / 4, rel=1e-4)
    layer_bytes = 4 * load_shape("llama-2-7b").layers[0].parameters
    # A layer's weights are whole while it computes, as its gradients, and so are the next one's.
    assert four["activations"] - one["activations"] == 3 * layer_bytes
    found = fit_training(replace(ACCUMULATED, gpus=4), *machine("sft"))
    assert found.umem.tokens_per_s == pytest.approx(4 * 4 * 2048 / (found.umem.time_s or 1))


def test_each_layer_is_kept_copied_or_computed_twice_with_the_reason() -> None:
    workload = replace(ACCUMULATED, checkpoint=False)
    hardware, policy = machine("sft")
    found = {it.unit: it for it in fit_training(workload, hardware, policy).choices}
    layers = [it for name, it in found.items() if name.startswith("model.layers.")]
    assert {it.choice for it in layers} == {"computed twice", "kept"}
    assert all(it.copy_s > it.compute_s for it in layers)
    without = fit_training(workload, hardware, replace(policy, recomputes=False))
    assert "computed twice" not in {it.choice for it in without.choices}


def test_stock_says_what_it_lacks() -> None:
    stock = trained("llama-2-7b", precision="fp32-autocast").ways[1]
    assert stock.time_s is None
    assert stock.device_bytes == pytest.approx(102 * GIB, rel=0.02)
    assert "device" in stock.why_not


@pytest.mark.slow
def test_a_loss_without_room_is_sliced_or_named() -> None:
    """What the device has no room for beside the logits fits in slices, and not with many more.

    Under a policy without slices the answer names the logits.
    """
    hardware, policy = machine("sft")
    policy = replace(policy, slices_losses=False)
    whole = [
        fit_training(
            Workload(load_shape("llama-3.1-8b"), "sft", batch, 2048, "bf16", checkpoint=True),
            hardware,
            policy,
        )
        for batch in (4, 32)
    ]
    assert not any(it.slices_loss for it in whole)
    assert ["Liger" in it.umem.why_not for it in whole] == [False, True]
    small, large, huge = (trained("llama-3.1-8b", batch=it) for it in (4, 32, 400))
    assert whole[1].largest_batch < large.largest_batch
    assert [it.slices_loss for it in (small, large, huge)] == [False, True, False]
    logits = 32 * 2048 * 128_256
    assert large.classes["logits"].size_bytes == pytest.approx(4 * logits, rel=0.1)
    assert huge.classes["logits"].size_bytes > 10 * 12 * logits
    assert large.umem.time_s is not None
    for word in ("819,200 tokens x 128,256", "Liger", "Fewer tokens"):
        assert word in huge.umem.why_not
    assert "Liger" not in trained("llama-2-70b").umem.why_not


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "mode", "precision"),
    [
        ("llama-2-7b", "sft", "fp32-autocast"),
        ("gpt-oss-20b", "sft", "bf16"),
        ("llama-2-70b", "lora", "bf16"),
    ],
)
def test_the_largest_batch_fits_and_no_larger_one(model: str, mode: str, precision: str) -> None:
    largest = trained(model, mode=mode, precision=precision).largest_batch
    assert largest >= 4
    at_most = trained(model, mode=mode, precision=precision, batch=largest)
    beyond = trained(model, mode=mode, precision=precision, batch=2 * largest)
    assert at_most.umem.time_s is not None
    assert beyond.umem.time_s is None
    assert beyond.largest_batch == largest


@pytest.mark.slow
def test_host_memory_limits_the_answer() -> None:
    assert trained("llama-2-7b", precision="fp32-autocast").umem.host_bytes is not None
    found = trained("llama-2-7b", precision="fp32-autocast", host_bytes=20 * GIB)
    assert found.umem.time_s is None
    assert "host" in found.umem.why_not


def generated(shape: ModelShape, batch: int = 1, seq: int = 1) -> Workload:
    return Workload(shape, "inference", batch, seq, "bf16", checkpoint=False)


def test_a_token_takes_the_longest_of_memory_link_and_launches() -> None:
    hardware, policy = machine("inference")
    shape = load_shape("llama-2-70b")
    found = fit_inference(generated(shape, 1, 4096), hardware, policy)
    streamed = found.classes["weights"].host_bytes - 2 * 32_000 * 8192  # the embedding is gathered
    assert found.umem.time_s == pytest.approx(streamed / hardware.copy_to_device_bytes_per_s)
    assert found.classes["cache"].size_bytes == 2 * 2 * 80 * 8 * 128 * 4096
    slow = replace(hardware, memory_bytes_per_s=1e11)
    small = fit_inference(generated(load_shape("llama-2-7b")), slow, policy)
    read_bytes = 2 * (LLAMA_7B - 32_000 * 4096)
    assert small.umem.time_s == pytest.approx(read_bytes / slow.memory_bytes_per_s, rel=0.01)
    assert small.umem.time_s == small.ways[1].time_s


def results(name: str) -> list[dict[str, Any]]:
    """Rows of a file of results."""
    file = Path(__file__).parents[1] / "benchmarks" / "results" / name
    return [json.loads(line) for line in file.open()][1:]


@pytest.mark.parametrize(
    ("file", "model"),
    [
        ("h100-generate.jsonl", "llama-2-7b"),
        ("h100-generate.jsonl", "llama-2-13b"),
        ("h100-generate-experts.jsonl", "qwen3-30b-a3b"),
    ],
)
def test_a_token_of_stock_takes_as_long_as_measured(file: str, model: str) -> None:
    """The processor launches kernels more slowly than the device reads weights."""
    rows = [it for it in results(file) if (it["variant"], it["case"]) == ("stock", model)]
    measured = median(time_s for row in rows for time_s in row["token_s"])
    found = fit_inference(generated(load_shape(model), 1, 96), *machine("inference"))
    assert found.ways[1].time_s == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(
    ("file", "model", "precision", "budget_gib"),
    [
        ("h100-scale-7b.jsonl", "llama-2-7b", "fp32-autocast", 76.18),
        ("h200-scale-7b.jsonl", "llama-2-7b", "fp32-autocast", 76.18),
        ("h100-scale-13b.jsonl", "llama-2-13b", "bf16", 76.18),
        ("h200-scale-40gib.jsonl", "llama-2-7b", "fp32-autocast", 40),
        ("h100-scale-lora.jsonl", "llama-2-7b", "lora", 8),
        ("h100-scale-lora.jsonl", "llama-2-13b", "lora", 16),
    ],
)
def test_host_memory_is_what_the_process_was_measured_to_take(
    file: str, model: str, precision: str, budget_gib: float
) -> None:
    (row,) = (
        it for it in results(file) if it["variant"] == "umem" and it["case"].startswith(model)
    )
    mode, sizes = (
        ("lora", (1, 4096, "bf16")) if precision == "lora" else ("sft", (4, 2048, precision))
    )
    hardware, policy = machine(mode)
    # Measured with all checkpoints.
    policy = replace(policy, device_budget_bytes=int(budget_gib * GIB), recomputes=False)
    workload = Workload(load_shape(model), mode, *sizes, checkpoint=True)
    found = fit_training(workload, hardware, policy).umem
    assert found.host_bytes == pytest.approx(row["host_process_bytes"], rel=0.08)
    # The card's peak has the process's context in it.
    assert found.device_bytes == pytest.approx(row["card_peak_bytes"], rel=0.05)


def test_host_memory_is_enough_if_85_percent_hold_the_homes() -> None:
    needed = trained("llama-2-7b", precision="fp32-autocast").umem.host_bytes
    assert needed is not None
    enough = PROCESS_BYTES + (needed - PROCESS_BYTES) / 0.85
    for share, fits in ((1.01, True), (0.99, False)):
        host_bytes = int(share * enough)
        found = trained("llama-2-7b", precision="fp32-autocast", host_bytes=host_bytes).umem
        assert (found.time_s is not None) == fits


def test_a_token_reads_the_experts_that_it_uses() -> None:
    hardware, policy = machine("inference")
    slow = replace(hardware, memory_bytes_per_s=2e10)
    shape = load_shape("qwen3-30b-a3b")
    one, many = (fit_inference(generated(shape, it), slow, policy) for it in (1, 64))
    assert one.umem.time_s == pytest.approx(2 * 3.0e9 / slow.memory_bytes_per_s, rel=0.15)
    assert many.umem.time_s == pytest.approx(2 * 30.2e9 / slow.memory_bytes_per_s, rel=0.15)


def test_of_streamed_experts_the_chosen_ones_cross_the_link() -> None:
    hardware, policy = machine("inference")
    policy = replace(policy, device_budget_bytes=40 << 30)
    shape = load_shape("mixtral-8x7b")
    one, many = (fit_inference(generated(shape, it), hardware, policy) for it in (1, 4))
    # A token chooses 2 of 8, and four choose all at most. More than half has no room.
    assert one.umem.time_s is not None
    assert many.umem.time_s is not None
    assert many.umem.time_s == pytest.approx(4 * one.umem.time_s, rel=0.05)
    assert many.umem.time_s > 46e9 / hardware.copy_to_device_bytes_per_s


# The command.

SFT = ("fit", "llama-2-7b", "--precision", "fp32-autocast", "--batch", 4, "--checkpoint")


def test_one_machine_fits_into_80_columns(run: Run) -> None:
    status, text, errors = run(*SFT, "--gpu", "h100-sxm")
    assert (status, errors) == (0, "")
    assert all(len(line) <= 80 for line in text.splitlines())
    for word in ("h100-sxm", "optimizer state", "logits", "stock", "CPU offload", "largest batch"):
        assert word in text
    assert "umem run --policy sft" in text
    assert "roofline of h100-sxm" in text
    assert "not measured" in text


def test_the_processor_is_named_where_it_is_the_limit(run: Run) -> None:
    words = ("fit", "llama-3.2-1b", "--batch", 1, "--gpu", "h100-sxm")
    assert "processor is the limit" in run(*words, "--seq", 256)[1]
    assert "processor is the limit" not in run(*words, "--seq", 8192)[1]


@pytest.mark.slow
def test_a_loss_in_slices_has_a_line(run: Run) -> None:
    words = ("fit", "llama-3.1-8b", "--precision", "bf16", "--checkpoint", "--gpu", "h100-sxm")
    _, text, _ = run(*words, "--batch", 32)
    assert "loss in slices" in text
    _, text, _ = run(*words, "--batch", 4)
    assert "slices" not in text


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sft", "lora", "inference"])
def test_every_machine_gets_a_row(run: Run, mode: str) -> None:
    status, text, errors = run("fit", "--params", "500m", "--mode", mode)
    assert (status, errors) == (0, "")
    lines = text.splitlines()
    assert all(len(line) <= 80 for line in lines)
    firsts = [line.split()[0] for line in lines if line]
    assert [name for name in firsts if name in hardware_names()] == list(hardware_names())


def test_json_has_the_figures(run: Run) -> None:
    status, text, _ = run(*SFT, "--gpu", "h100-sxm", "--budget", "70GiB", "--json")
    assert status == 0
    (row,) = json.loads(text)["results"]
    assert row["device_budget_bytes"] == 70 * GIB
    assert row["parameters"] == LLAMA_7B
    umem, stock = row["ways"]["umem"], row["ways"]["stock"]
    assert umem["fits"]
    assert not stock["fits"]
    assert umem["tokens_per_s"] == pytest.approx(4 * 2048 / umem["step_s"])
    assert umem["device_bytes"] <= 70 * GIB
    assert row["classes"]["weights"]["device_bytes"] == 4 * LLAMA_7B


def test_quantisation_of_the_file_counts_or_is_named(run: Run, tmp_path: Path) -> None:
    bits = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    file = config_file(tmp_path, quantization_config=bits)
    words = (str(file), "--gpu", "h100-sxm")
    text = run("fit", *words, "--mode", "lora")[1]
    assert "nf4" in text
    assert "Not counted" not in text
    assert "Not counted: quantization_config (nf4)" in run("fit", *words)[1]
    file = config_file(tmp_path, quantization_config={"quant_method": "fp8"})
    text = run("fit", *words, "--mode", "inference")[1]
    assert "Not counted: quantization_config (fp8)" in text


def test_a_plan_without_checkpoints_says_what_is_computed_twice(run: Run) -> None:
    words = ("fit", "llama-2-7b", "--precision", "fp32-autocast", "--batch", 4, "--gpu", "h100-sxm")
    text = run(*words)[1]
    assert "computed twice" in text
    assert all(len(line) <= 80 for line in text.splitlines())
    (row,) = json.loads(run(*words, "--json")[1])["results"]
    assert {it["choice"] for it in row["activations"]} == {"computed twice", "kept"}


@pytest.mark.slow
def test_the_policy_is_one_that_runs(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    status, text, _ = run(*SFT, "--gpu", "h100-sxm", "--budget", "70GiB", "--output", file)
    assert status == 0
    assert f"umem run --policy {file} train.py" in text
    assert "UMEM_DEVICE_BUDGET" not in text
    assert resolve(load_policy(file), load_hardware("h100-sxm")).device_budget_bytes == 70 * GIB
    found = json.loads(run(*SFT, "--gpu", "h100-sxm", "--budget", "70GiB", "--json")[1])
    assert found["results"][0]["policy"] == file.read_text()


def test_the_host_updates_blocks_where_it_may(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    words = (*SFT, "--gpu", "h100-sxm", "--json")
    (without,) = json.loads(run(*words)[1])["results"]
    (row,) = json.loads(run(*words, "--host-update", "--output", file)[1])["results"]
    assert without["host_updates"] == 0 < row["host_updates"]
    step_s, without_s = (it["ways"]["umem"]["step_s"] for it in (row, without))
    assert step_s < 0.97 * without_s
    # Also the weights that the host updates have a home.
    assert row["ways"]["umem"]["host_bytes"] > without["ways"]["umem"]["host_bytes"]
    assert row["policy"] == file.read_text()
    assert resolve(load_policy(file), load_hardware("h100-sxm")).updates_on_host
    text = run(*words[:-1], "--host-update")[1]
    assert f"the host's cores update {row['host_updates']} blocks" in text
    assert "--output FILE" in text


@pytest.mark.parametrize("words", [("--precision", "bf16-master"), ("--gpus", 2)])
def test_the_host_updates_no_copies_of_weights_and_no_parts(run: Run, words: Any) -> None:
    given = ("fit", "llama-2-7b", "--batch", 4, "--checkpoint", "--gpu", "h100-sxm", "--json")
    (row,) = json.loads(run(*given, "--host-update", *words)[1])["results"]
    assert row["host_updates"] == 0
    assert row["ways"]["umem"]["fits"]


@pytest.mark.slow
def test_what_does_not_fit_gets_advice(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    status, text, _ = run("fit", "llama-2-70b", "--gpu", "h100-sxm", "--output", file)
    assert status == 0
    assert "--mode lora" in text
    assert not file.exists()
    status, text, _ = run("fit", "llama-2-7b", "--gpu", "h100-sxm", "--batch", 4000)
    assert status == 0
    assert "try: --batch " in text


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["llama-2-7c"], "llama-2-7b"),
        (["nowhere/config.json"], "nowhere/config.json"),
        ([], "MODEL"),
        (["llama-2-7b", "--params", "7b"], "--params"),
        (["--params", "huge"], "--params"),
        (["llama-2-7b", "--gpu", "h1000"], "h1000"),
        (["llama-2-7b", "--mode", "train"], "--mode"),
        (["llama-2-7b", "--precision", "fp8"], "--precision"),
        (["gpt-oss-20b", "--precision", "fp32-autocast"], "--precision"),
        (["llama-2-7b", "--mode", "inference", "--checkpoint"], "--checkpoint"),
        (["llama-2-7b", "--optimizer", "adam"], "--optimizer"),
        (["llama-2-7b", "--mode", "inference", "--optimizer", "sgd"], "--optimizer"),
        (["llama-2-7b", "--mode", "inference", "--gpus", 2], "--gpus"),
        (["llama-2-7b", "--mode", "inference", "--host-update"], "--host-update"),
        (["llama-2-7b", "--rank", 8], "--rank"),
        (["llama-2-7b", "--mode", "lora", "--targets", "q_porj"], "q_proj"),
        (["mixtral-8x7b", "--mode", "lora", "--targets", "all-linear"], "Known: q_proj"),
        (["llama-2-7b", "--mode", "lora", "--quantised", "nf5"], "nf4"),
        (["llama-2-7b", "--quantised", "nf4"], "--mode lora"),
        (["llama-2-7b", "--optimizer", "adamw8bit", "--precision", "bf16-master"], "--precision"),
        (["llama-2-7b", "--output", "mine.yaml"], "--output"),
        (["llama-2-7b", "--gpu", "h100-sxm", "--output", "mine"], "--output"),
        (["llama-2-7b", "--host-ram", "much"], "--host-ram"),
        (["llama-2-7b", "--gpu", "h100-sxm", "--budget", "200GiB"], "--budget"),
        (["llama-2-70b", "--batch", 4096, "--seq", 2**24, "--gpu", "h100-sxm"], "--batch"),
    ],
)
def test_bad_input_names_the_place(run: Run, arguments: list[str], named: str) -> None:
    status, text, errors = run("fit", *arguments, *([] if arguments else ["--mode", "sft"]))
    assert (status, text) == (2, "")
    assert errors.startswith("umem: ")
    assert named in errors
    assert "Traceback" not in errors
