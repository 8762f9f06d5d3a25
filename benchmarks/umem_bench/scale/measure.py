"""One variant in a worker: a user's training script, with its steps, losses and memory."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_

from umem_bench.allocators import AllocatorName, select
from umem_bench.card import Card
from umem_bench.llama import SEED, build_llama
from umem_bench.results import LlamaShape, Record, ScaleVariant
from umem_bench.training.measure import card_figures, outside_figures, time_steps, warm_up
from umem_bench.training.status import NO_MANAGER, find_manager, status_notes
from umem_bench.training.variants import (
    Training,
    deepspeed_engine,
    make_deterministic,
    make_optimizer,
    not_installed,
)

__all__ = ["MANAGED_LIMIT_BYTES", "ScaleJob", "host_figures", "measure"]

MANAGED_LIMIT_BYTES = 1 << 30
"""Managed memory of a process at most. umem's variants need none."""

_MAX_NORM = 1.0
_PACKAGES: dict[ScaleVariant, str] = {"torchao": "torchao.optim", "deepspeed": "deepspeed"}


class ScaleJob(Record):
    """One variant of one case, for a worker."""

    model: LlamaShape
    variant: ScaleVariant
    policy: str
    limit_bytes: int | None
    """Of the card's memory: umem's budget, and a limit of torch's own allocator."""
    steps: int
    accumulate: int
    clip: bool
    deterministic: bool
    card: Card | None
    """None to train on the CPU."""


def measure(job: ScaleJob) -> Iterator[dict[str, Any]]:
    """Train as a job says; yields the measured fields of one result."""
    reason = not_installed(_PACKAGES.get(job.variant))
    if reason:
        yield reason
        return
    _place_allocator(job)
    yield _measure(job)


def _place_allocator(job: ScaleJob) -> None:
    """Put a variant's allocator in place, within its limits."""
    for name in ("UMEM_POLICY", "UMEM_DEVICE_BUDGET", "UMEM_PLANNER"):
        os.environ.pop(name, None)
    os.environ["UMEM_MANAGED_LIMIT"] = str(MANAGED_LIMIT_BYTES)
    if job.deterministic:
        make_deterministic()
    if job.variant.startswith("umem"):
        if job.limit_bytes is not None:
            os.environ["UMEM_DEVICE_BUDGET"] = str(job.limit_bytes)
        select("umem", job.policy, MANAGED_LIMIT_BYTES)
    elif job.limit_bytes is not None:
        total_bytes = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, job.limit_bytes / total_bytes))


def _measure(job: ScaleJob) -> dict[str, Any]:
    found: dict[str, Any] = card_figures(job.card, "base_bytes")
    device = torch.device("cpu" if job.card is None else "cuda")
    network = build_llama(job.model, "sft", device).train()
    _synchronize(job)
    began_s = time.perf_counter()
    training = _training(job, network)
    losses = [training.step()]
    _synchronize(job)
    found["first_step_s"] = time.perf_counter() - began_s
    notes = _notes(job)
    counted: AllocatorName | None = None if job.card is None else "torch"
    if job.variant.startswith("umem"):
        counted = "umem"
        training.manager = find_manager()
        if training.manager is None:
            notes.append(NO_MANAGER)
    warm_up(training, losses)
    timed = time_steps(training, job.steps, losses, counted)
    if job.variant == "umem-backward" and not getattr(timed.after, "step_in_backward", False):
        notes.append("its step was not done in the backward pass")
    if timed.after is not None:
        notes += status_notes(timed.after)
    found |= outside_figures(job.card)
    return (
        found
        | host_figures()
        | {
            "state": "measured",
            "parameters": sum(weight.numel() for weight in network.parameters()),
            "steps_s": timed.steps_s,
            "wall_s": timed.wall_s,
            "losses_hex": tuple(float(loss).hex() for loss in losses),
            "plan_running": timed.plan_running,
            "notes": tuple(notes),
        }
    )


def _training(job: ScaleJob, network: Any) -> Training:
    """The training loop's step: as in a user's script, whatever the variant."""
    shape, weights = job.model, list(network.parameters())
    device = weights[0].device
    generator = torch.Generator(device).manual_seed(SEED)

    def batches() -> Iterator[torch.Tensor]:
        for _ in range(job.accumulate):
            size = (shape.batch, shape.tokens)
            yield torch.randint(shape.vocabulary, size, generator=generator, device=device)

    if job.variant == "deepspeed":
        clip = {"gradient_clipping": _MAX_NORM} if job.clip else {}
        engine, optimizer = deepspeed_engine(
            network, shape.batch, gradient_accumulation_steps=job.accumulate, **clip
        )

        def step_engine() -> torch.Tensor:
            losses = []
            for tokens in batches():
                loss = engine(input_ids=tokens, labels=tokens).loss
                engine.backward(loss)
                engine.step()
                losses.append(loss.detach())
            return torch.stack(losses).mean()

        return Training(network, (optimizer,), step_engine)

    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    if job.variant != "floor":
        kind: Any = "torchao-offload" if job.variant == "torchao" else "stock"
        optimizers = (make_optimizer(kind, weights, keep_gradients=True),)
    if job.variant == "umem-backward":
        import umem

        umem.manage(network, *optimizers, step_in_backward=True)

    def step() -> torch.Tensor:
        losses = []
        for tokens in batches():
            with torch.autocast(device.type, torch.bfloat16, enabled=shape.weights == "float32"):
                loss = network(input_ids=tokens, labels=tokens).loss / job.accumulate
            loss.backward()
            losses.append(loss.detach())
        for optimizer in optimizers:
            if job.clip:
                clip_grad_norm_(weights, _MAX_NORM)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if not optimizers:
            network.zero_grad(set_to_none=True)
        if job.variant == "umem-waiting":
            torch.cuda.synchronize()
        return torch.stack(losses).sum()

    return Training(network, optimizers, step)


def _notes(job: ScaleJob) -> list[str]:
    """What makes a variant's work another one."""
    if job.variant == "torchao" and job.clip:
        return [
            "its gradients are copied to the host within the backward pass: clipping comes too "
            "late to change its step"
        ]
    if job.variant == "deepspeed":
        return ["bfloat16 weights and gradients, float32 weights and state on the host"]
    return []


def _synchronize(job: ScaleJob) -> None:
    if job.card is not None:
        torch.cuda.synchronize()


def host_figures() -> dict[str, int]:
    """Memory of this process on the host, as the kernel counts it."""
    text = Path("/proc/self/status").read_text()
    kib = {name: int(size) for name, size in re.findall(r"^(Vm\w+):\s+(\d+) kB$", text, re.M)}
    return {
        "host_process_bytes": kib.get("VmHWM", 0) << 10,
        "host_locked_bytes": (kib.get("VmLck", 0) + kib.get("VmPin", 0)) << 10,
    }
