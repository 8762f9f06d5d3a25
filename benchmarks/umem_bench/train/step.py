"""The training step of each variant: the same model, batch and loss; what differs is the memory."""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from umem.core.errors import UmemError, UnsupportedError
from umem_bench._allocators import select
from umem_bench.train.jobs import TrainingJob
from umem_bench.train.model import SEED, CausalLoss, build_llama
from umem_bench.train.results import PLANNERS, Variant

__all__ = [
    "NotInstalledError",
    "Training",
    "incomparable",
    "make_training",
    "place_allocator",
    "require_package",
]

LEARNING_RATE = 1e-4

BUCKET_ELEMENTS = 50_000_000
"""Of DeepSpeed's buckets for gradients. Its own 500 million would hold 0.93 GiB of device memory in
bfloat16, and one rank has nobody to exchange them with."""

_PACKAGES: dict[Variant, str] = {
    "bnb-paged-adamw": "bitsandbytes",
    "torchao-offload": "torchao.optim",
    "deepspeed-offload": "deepspeed",
    "rmm-pool": "rmm",
}

_IN_BACKWARD: tuple[Variant, ...] = ("umem-backward-step", "umem-optimizer-host")

_OPTIMIZER_ON_HOST = {
    "name": "sft-optimizer-host",
    "extends": "sft",
    "device_budget": None,
    "classes": {"optimizer_state": {"placement": "host", "mechanism": "map"}},
}


class NotInstalledError(UmemError, ImportError):
    """What a variant needs is not installed."""


@dataclass
class Training:
    """A model in training."""

    model: CausalLoss
    optimizers: tuple[torch.optim.Optimizer, ...]
    step: Callable[[], torch.Tensor]
    """Trains one step; its loss, without a graph."""
    manager: Any = None
    """umem's, where it moves tensors by a plan."""
    around: ExitStack = field(default_factory=ExitStack)
    """What holds while steps run."""


def incomparable(job: TrainingJob) -> str | None:
    """Why a variant would do other work than the others; None where it does the same."""
    if (job.variant, job.method) == ("deepspeed-offload", "lora"):
        return (
            "DeepSpeed's engine in bfloat16 makes the model's parameters bfloat16, and so the "
            "adapters, which every other variant trains in float32"
        )
    return None


def require_package(variant: Variant) -> None:
    """Import what a variant needs beside torch.

    Raises
    ------
    NotInstalledError
        If it cannot be imported; the message says why.
    """
    package = _PACKAGES.get(variant)
    if package is None:
        return
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise NotInstalledError(f"{package} cannot be imported: {error}") from error


def place_allocator(job: TrainingJob) -> None:
    """Put a variant's allocator in place, before CUDA starts.

    Raises
    ------
    UnsupportedError
        Where the variant does not work on this machine.
    """
    for name in ("UMEM_POLICY", "UMEM_DEVICE_BUDGET", "UMEM_PLANNER"):
        os.environ.pop(name, None)
    os.environ["UMEM_MANAGED_LIMIT"] = str(job.managed_limit_bytes)
    if job.device == "cpu":
        if job.variant != "stock":
            raise UnsupportedError(f"{job.variant} needs a GPU: on the CPU there is only stock")
    elif job.variant == "umem-optimizer-host":
        import umem

        umem.enable(umem.load_policy(_OPTIMIZER_ON_HOST))
    elif job.variant in PLANNERS:
        os.environ["UMEM_PLANNER"] = PLANNERS[job.variant]
        os.environ["UMEM_DEVICE_BUDGET"] = str(job.budget_bytes)
        select("umem", job.method, job.managed_limit_bytes)
    else:
        pooled = job.variant == "rmm-pool"
        select("rmm-pool" if pooled else "torch", job.method, job.managed_limit_bytes)


def make_training(job: TrainingJob) -> Training:
    """The model, its optimizer and its step, as a variant has them."""
    device = torch.device(job.device)
    if job.deterministic:
        # cuBLAS reads it when it starts.
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
        # Not part of what makes results repeat, and as slow as the memory is large.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    model = build_llama(job.model, job.method, device)
    torch.manual_seed(SEED)
    shape = (job.model.batch, job.model.tokens)
    batch = torch.randint(0, job.model.vocabulary, shape, device=device)
    if job.variant == "deepspeed-offload":
        training = _with_deepspeed(model, batch)
    elif job.variant == "backward-step":
        training = _with_steps_in_backward(model, batch)
    else:
        training = _with_torch(job, model, batch)
    is_in_backward = job.variant in _IN_BACKWARD
    if is_in_backward or job.variant in PLANNERS:
        import umem

        (optimizer,) = training.optimizers
        training.manager = umem.manage(model, optimizer, step_in_backward=is_in_backward)
    if device.type == "cuda":
        # The fastest everywhere, and with a backward pass that can be deterministic.
        training.around.enter_context(sdpa_kernel(SDPBackend.FLASH_ATTENTION))
    return training


def _with_torch(job: TrainingJob, model: CausalLoss, batch: torch.Tensor) -> Training:
    optimizer = _optimizer(job.variant, [it for it in model.parameters() if it.requires_grad])

    def saving() -> AbstractContextManager[Any]:
        if job.variant == "save-on-cpu":
            return torch.autograd.graph.save_on_cpu(pin_memory=True)
        return nullcontext()

    def step() -> torch.Tensor:
        with saving():
            loss: torch.Tensor = model(input_ids=batch, labels=batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Training(model, (optimizer,), step)


def _with_steps_in_backward(model: CausalLoss, batch: torch.Tensor) -> Training:
    """An optimizer for each parameter, which steps as soon as its gradient is there."""
    optimizers: dict[torch.Tensor, torch.optim.AdamW] = {
        it: _adamw([it]) for it in model.parameters() if it.requires_grad
    }

    def step_one(weight: torch.Tensor) -> None:
        optimizers[weight].step()
        optimizers[weight].zero_grad(set_to_none=True)

    for trained in optimizers:
        trained.register_post_accumulate_grad_hook(step_one)

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=batch, labels=batch)
        loss.backward()
        return loss.detach()

    return Training(model, tuple(optimizers.values()), step)


def _optimizer(variant: Variant, weights: list[nn.Parameter]) -> torch.optim.Optimizer:
    made: Any
    if variant == "bnb-paged-adamw":
        made = importlib.import_module("bitsandbytes").optim.PagedAdamW(weights, lr=LEARNING_RATE)
    elif variant == "torchao-offload":
        made = importlib.import_module("torchao.optim").CPUOffloadOptimizer(
            weights, torch.optim.AdamW, offload_gradients=True, lr=LEARNING_RATE, fused=True
        )
    else:
        made = _adamw(weights)
    return made


def _adamw(weights: list[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(weights, lr=LEARNING_RATE, fused=True)


def _with_deepspeed(model: CausalLoss, batch: torch.Tensor) -> Training:
    """ZeRO's second stage with the optimizer on the host, in a world of one rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Without these DeepSpeed asks MPI who it is.
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", LOCAL_RANK="0", WORLD_SIZE="1"
    )
    engine, optimizer, _, _ = importlib.import_module("deepspeed").initialize(
        model=model,
        model_parameters=[it for it in model.parameters() if it.requires_grad],
        config={
            "train_micro_batch_size_per_gpu": len(batch),
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
            "zero_optimization": {
                "stage": 2,
                "reduce_bucket_size": BUCKET_ELEMENTS,
                "allgather_bucket_size": BUCKET_ELEMENTS,
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
            },
        },
    )

    def step() -> torch.Tensor:
        loss: torch.Tensor = engine(input_ids=batch, labels=batch)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return Training(model, (optimizer,), step)
