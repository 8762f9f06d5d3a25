"""The variants: one model, batch and loss; what differs is where the memory is."""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from umem import UnsupportedError
from umem_bench.allocators import select
from umem_bench.card import Card
from umem_bench.llama import SEED, ChunkedLoss, build_llama
from umem_bench.results import (
    BUDGETED,
    METHODS,
    VARIANTS,
    LlamaShape,
    Method,
    Record,
    Variant,
    Workload,
    WorkloadName,
)
from umem_bench.shapes import LLAMA_1_7B, LLAMA_2_7B
from umem_bench.training.trainer import SteppedTrainer

__all__ = [
    "DEEPSPEED_BUCKET_ELEMENTS",
    "LEARNING_RATE",
    "OPTIMIZER_ON_HOST",
    "PUBLISHED_ROOM",
    "USUAL_WORKLOADS",
    "WORKLOADS",
    "Training",
    "TrainingJob",
    "deepspeed_engine",
    "deepspeed_inference",
    "make_deterministic",
    "make_optimizer",
    "make_training",
    "not_installed",
    "place_allocator",
    "plans_pages",
    "trained_weights",
    "why_not",
]

_SMALL = LlamaShape(
    hidden=1024, intermediate=3968, layers=18, heads=16, weights="float32", batch=4, tokens=1024
)
"""0.36 billion parameters."""

PUBLISHED_ROOM = 91_321_742_131 / 120_491_452_052
"""Device memory over what full fine-tuning of Llama-2-7B needs on the GH200 whose shares of
migrations are published (``benchmarks/results/planning.jsonl``)."""

_PAIR = {"tokens": 2048, "loss_chunk_tokens": 1024}

WORKLOADS: dict[WorkloadName, Workload] = {
    # One long sequence, where computing dominates.
    "long": Workload(
        name="long",
        model=LlamaShape(),
        methods=METHODS,
        variants=VARIANTS,
        budgets_percent=(60.0, 30.0, 100.0),
    ),
    # A shorter one, where what is kept for the backward pass dominates.
    "activations": Workload(
        name="activations",
        model=LlamaShape(tokens=4096, checkpoint=False),
        methods=METHODS,
        variants=("stock", "umem", "umem-planned", "umem-fault", "save-on-cpu", "stock-again"),
        budgets_percent=(60.0, 30.0),
    ),
    # Little computing to hide transfers behind.
    "short": Workload(
        name="short",
        model=_SMALL,
        methods=("sft",),
        variants=("stock", "umem"),
        budgets_percent=(60.0,),
    ),
    # A loop that clips and accumulates, as transformers has it.
    "trainer": Workload(
        name="trainer",
        model=_SMALL,
        methods=("sft",),
        variants=("stock", "umem"),
        budgets_percent=(60.0,),
        trainer_batches=2,
    ),
    # LoRA of Llama-2-7B, all of it in managed memory of 16 GiB.
    "pair-lora": Workload(
        name="pair-lora",
        model=LLAMA_2_7B.model_copy(update=_PAIR),
        methods=("lora",),
        variants=("stock", "umem-fault"),
        budgets_percent=(100.0,),
    ),
    # The largest full fine-tuning there: 12.5 GiB, and what the allocator keeps.
    "pair-sft": Workload(
        name="pair-sft",
        model=LLAMA_1_7B.model_copy(update=_PAIR),
        methods=("sft",),
        variants=("stock", "umem-planned", "umem-fault"),
        budgets_percent=(round(100 * PUBLISHED_ROOM),),
    ),
}

USUAL_WORKLOADS: tuple[WorkloadName, ...] = ("long", "activations", "short", "trainer")
"""Those of a run that names none. The pair is NVIDIA's: migrations of LoRA and full fine-tuning."""

LEARNING_RATE = 1e-4

DEEPSPEED_BUCKET_ELEMENTS = 50_000_000
"""Of DeepSpeed's buckets for gradients. Its default of 500 million would hold 0.93 GiB of device
memory in bfloat16, and one rank exchanges nothing."""

_PACKAGES: dict[Variant, str] = {
    "bnb-paged-adamw": "bitsandbytes",
    "torchao-offload": "torchao.optim",
    "deepspeed-offload": "deepspeed",
    "rmm-pool": "rmm",
}

_WITH_TRAINER: tuple[Variant, ...] = (
    "stock",
    "umem",
    "umem-planned",
    "umem-lookahead",
    "umem-fault",
    "rmm-pool",
    "stock-again",
)
"""Variants that differ in memory only, not in the loop: umem manages them by itself."""

_Forward = Callable[[], torch.Tensor]
"""Runs a forward pass, and returns its loss."""

OPTIMIZER_ON_HOST = {
    "name": "sft-optimizer-host",
    "extends": "managed",
    "device_budget": None,
    "classes": {"optimizer_state": {"placement": "host", "mechanism": "map"}},
}


class TrainingJob(Record):
    """One variant with one budget, for a worker; sizes in bytes."""

    model: LlamaShape
    method: Method
    variant: Variant
    budget_bytes: int | None
    steps: int
    deterministic: bool
    managed_limit_bytes: int
    device: Literal["cuda", "cpu"] = "cuda"
    """The CPU has only the stock variant, without peaks and without a profile."""
    card: Card | None = None
    """Whose memory in use is read; None for no such figures."""
    trainer_batches: int | None = None
    """As in :class:`Workload`."""


@dataclass
class Training:
    """A model in training."""

    model: Any
    """A :class:`ChunkedLoss`, or a Llama of `transformers`."""
    optimizers: tuple[torch.optim.Optimizer, ...]
    """Empty where the `Trainer` makes its own."""
    step: Callable[[], torch.Tensor]
    """Trains one step and returns its loss, without a graph."""
    manager: Any = None
    """umem's, where it moves tensors by a plan."""
    around: ExitStack = field(default_factory=ExitStack)
    """Contexts in which steps run."""


def why_not(job: TrainingJob) -> dict[str, str]:
    """State and reason of a variant that cannot be compared here; empty where it can."""
    reason = ""
    if job.trainer_batches is None:
        in_float32 = job.method == "lora" or job.model.weights == "float32"
        if job.variant == "deepspeed-offload" and in_float32:
            reason = (
                "DeepSpeed's engine in bfloat16 makes the model's parameters bfloat16, and so what "
                "every other variant trains in float32"
            )
    elif job.variant not in _WITH_TRAINER:
        reason = "the Trainer makes its own optimizer and steps, and clips gradients"
    elif torch.cuda.device_count() > 1:
        reason = "the Trainer would train on several GPUs: set CUDA_VISIBLE_DEVICES to one"
    if reason:
        return {"state": "not comparable", "reason": reason}
    return not_installed("accelerate" if job.trainer_batches else _PACKAGES.get(job.variant))


def not_installed(package: str | None) -> dict[str, str]:
    """State and reason of a variant whose package cannot be imported; empty where it can."""
    try:
        if package is not None:
            importlib.import_module(package)
    except ImportError as error:
        reason = f"{package} cannot be imported: {error}"
        return {"state": "not installed", "reason": reason}
    return {}


def plans_pages(variant: Variant) -> bool:
    """Whether umem's planner of pages runs in a variant; that of streamed state is another."""
    return variant == "umem-optimizer-host" or BUDGETED.get(variant) is not None


def place_allocator(job: TrainingJob) -> None:
    """Put a variant's allocator in place, before CUDA starts."""
    for name in ("UMEM_POLICY", "UMEM_DEVICE_BUDGET", "UMEM_PLANNER"):
        os.environ.pop(name, None)
    os.environ["UMEM_MANAGED_LIMIT"] = str(job.managed_limit_bytes)
    if job.device == "cpu":
        if job.variant != "stock":
            raise UnsupportedError(f"{job.variant} needs a GPU: on the CPU there is only stock")
    elif job.variant == "umem-optimizer-host":
        import umem

        umem.enable(umem.load_policy(OPTIMIZER_ON_HOST))
    elif job.variant in BUDGETED:
        planner = BUDGETED[job.variant]
        if planner is not None:
            os.environ["UMEM_PLANNER"] = planner
        os.environ["UMEM_DEVICE_BUDGET"] = str(job.budget_bytes)
        policy = job.method if planner is None else "managed"
        select("umem", policy, job.managed_limit_bytes)
    else:
        pooled = job.variant == "rmm-pool"
        select("rmm-pool" if pooled else "torch", job.method, job.managed_limit_bytes)


def make_training(job: TrainingJob) -> Training:
    """The model, its optimizer and its step, as a variant has them."""
    device = torch.device(job.device)
    if job.deterministic:
        make_deterministic()
    network = build_llama(job.model, job.method, device)
    if job.trainer_batches is None:
        training = _with_own_loop(job, ChunkedLoss(network, job.model.loss_chunk_tokens).train())
    else:
        trainer = SteppedTrainer(network, job.model, job.trainer_batches, job.steps)
        training = Training(network, (), trainer.step)
        training.around.callback(trainer.close)
    if device.type == "cuda":
        # The fastest everywhere, with a backward pass that can be deterministic.
        training.around.enter_context(sdpa_kernel(SDPBackend.FLASH_ATTENTION))
    return training


def _with_own_loop(job: TrainingJob, model: ChunkedLoss) -> Training:
    device = torch.device(job.device)
    torch.manual_seed(SEED)
    shape = (job.model.batch, job.model.tokens)
    batch = torch.randint(0, job.model.vocabulary, shape, device=device)

    def forward() -> torch.Tensor:
        casts = job.model.weights == "float32"
        with torch.autocast(device.type, torch.bfloat16, enabled=casts):
            loss: torch.Tensor = model(input_ids=batch, labels=batch)
        return loss

    if job.variant == "deepspeed-offload":
        return _with_deepspeed(model, batch)
    if job.variant == "backward-step":
        return _with_steps_in_backward(model, forward)
    training = _with_one_optimizer(job.variant, model, forward)
    if job.variant == "umem-optimizer-host" or job.variant in BUDGETED:
        import umem

        training.manager = umem.manage(
            model, *training.optimizers, step_in_backward=job.variant == "umem-backward-step"
        )
    return training


def make_deterministic() -> None:
    """Use torch's deterministic algorithms; call it before CUDA starts."""
    # cuBLAS reads it when it starts.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    # Not needed for results to repeat, and as slow as the memory is large.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _with_one_optimizer(variant: Variant, model: ChunkedLoss, forward: _Forward) -> Training:
    optimizer = make_optimizer(variant, trained_weights(model))

    def step() -> torch.Tensor:
        saving: Any = nullcontext()
        if variant == "save-on-cpu":
            saving = torch.autograd.graph.save_on_cpu(pin_memory=True)
        with saving:
            loss = forward()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Training(model, (optimizer,), step)


def _with_steps_in_backward(model: ChunkedLoss, forward: _Forward) -> Training:
    """An optimizer for each parameter, which steps as soon as its gradient exists."""
    optimizers: dict[torch.Tensor, torch.optim.Optimizer] = {
        it: make_optimizer("stock", [it]) for it in trained_weights(model)
    }

    def step_one(weight: torch.Tensor) -> None:
        optimizers[weight].step()
        optimizers[weight].zero_grad(set_to_none=True)

    for trained in optimizers:
        trained.register_post_accumulate_grad_hook(step_one)

    def step() -> torch.Tensor:
        loss = forward()
        loss.backward()
        return loss.detach()

    return Training(model, tuple(optimizers.values()), step)


def trained_weights(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that an optimizer steps: with LoRA those of adapters."""
    return [it for it in model.parameters() if it.requires_grad]


def make_optimizer(
    variant: Variant, weights: list[nn.Parameter], *, keep_gradients: bool = False
) -> torch.optim.Optimizer:
    """A variant's AdamW; with `keep_gradients` torchao's leaves gradients on the device, too."""
    made: Any
    if variant == "bnb-paged-adamw":
        made = importlib.import_module("bitsandbytes").optim.PagedAdamW(weights, lr=LEARNING_RATE)
    elif variant == "torchao-offload":
        made = importlib.import_module("torchao.optim").CPUOffloadOptimizer(
            weights,
            torch.optim.AdamW,
            offload_gradients=not keep_gradients,
            lr=LEARNING_RATE,
            fused=True,
        )
    else:
        made = torch.optim.AdamW(weights, lr=LEARNING_RATE, fused=True)
    return made


def _with_deepspeed(model: ChunkedLoss, batch: torch.Tensor) -> Training:
    engine, optimizer = deepspeed_engine(model, len(batch))

    def step() -> torch.Tensor:
        loss: torch.Tensor = engine(input_ids=batch, labels=batch)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return Training(model, (optimizer,), step)


def deepspeed_engine(
    model: nn.Module, batch: int, *, stage: int = 2, **config: Any
) -> tuple[Any, Any]:
    """ZeRO with the optimizer on the host, and in its third stage the weights; one rank.

    `batch` is the number of sequences of a call, `config` what DeepSpeed's own is to have besides.
    Returns the engine and its optimizer.
    """
    on_host = {"device": "cpu", "pin_memory": True}
    _be_the_only_rank()
    engine, optimizer, _, _ = importlib.import_module("deepspeed").initialize(
        model=model,
        model_parameters=trained_weights(model),
        config={
            "train_micro_batch_size_per_gpu": batch,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
            "zero_optimization": {
                "stage": stage,
                "reduce_bucket_size": DEEPSPEED_BUCKET_ELEMENTS,
                "allgather_bucket_size": DEEPSPEED_BUCKET_ELEMENTS,
                "offload_optimizer": on_host,
                **({"offload_param": on_host} if stage == 3 else {}),
            },
            **config,
        },
    )
    return engine, optimizer


def deepspeed_inference(model: nn.Module, batch: int, hidden: int, kept_bytes: int) -> Any:
    """ZeRO-Inference: a model in bfloat16 whose weights are on the host; one rank.

    `batch` is the number of sequences of a call, and `hidden` the model's width, by which DeepSpeed
    sizes what it fetches ahead. Up to `kept_bytes` of weights stay on the device.
    """
    _be_the_only_rank()
    engine, *_ = importlib.import_module("deepspeed").initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": batch,
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "cpu", "pin_memory": True},
                # As DeepSpeed's examples of ZeRO-Inference have it.
                "stage3_prefetch_bucket_size": 2 * hidden * hidden,
                "stage3_param_persistence_threshold": hidden,
                "stage3_max_live_parameters": kept_bytes // 2,
                "stage3_max_reuse_distance": kept_bytes // 2,
            },
        },
    )
    return engine.module.eval()


def _be_the_only_rank() -> None:
    """Without these variables DeepSpeed asks MPI for the ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", LOCAL_RANK="0", WORLD_SIZE="1"
    )
