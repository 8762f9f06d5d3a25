"""One variant in a worker: a user's training script, with its steps, losses and memory."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_

from umem_bench.allocators import AllocatorName, select
from umem_bench.card import Card
from umem_bench.llama import SEED, build_llama
from umem_bench.results import LlamaShape, Method, Record, ScaleVariant
from umem_bench.training.measure import card_figures, outside_figures, time_steps, warm_up
from umem_bench.training.status import NO_MANAGER, find_manager, status_notes
from umem_bench.training.variants import (
    Training,
    deepspeed_engine,
    make_deterministic,
    make_optimizer,
    not_installed,
    trained_weights,
)

__all__ = ["MANAGED_LIMIT_BYTES", "ScaleJob", "host_figures", "measure"]

MANAGED_LIMIT_BYTES = 1 << 30
"""Managed memory of a process at most. umem's variants need none."""

_MAX_NORM = 1.0
_PACKAGES: dict[ScaleVariant, str] = {
    "torchao": "torchao.optim",
    "deepspeed": "deepspeed",
    "deepspeed-3": "deepspeed",
    "fsdp-offload": "torch.distributed.fsdp",
}

_BUILT_WHOLE = (
    "the model is made on the card before its weights leave for the host: the card's peak may be "
    "from then"
)

_Batches = Callable[[], Iterator[torch.Tensor]]
"""The batches of a step, int64[sequences, tokens]."""


class ScaleJob(Record):
    """One variant of one case, for a worker."""

    model: LlamaShape
    method: Method
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
    elif job.variant != "fsdp-offload":  # whose model is made on the card before its weights leave
        _limit_torch(job)


def _limit_torch(job: ScaleJob) -> None:
    if job.limit_bytes is not None:
        torch.cuda.empty_cache()
        total_bytes = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, job.limit_bytes / total_bytes))


def _measure(job: ScaleJob) -> dict[str, Any]:
    found: dict[str, Any] = card_figures(job.card, "base_bytes")
    device = torch.device("cpu" if job.card is None else "cuda")
    network = build_llama(job.model, job.method, device).train()
    found["parameters"] = sum(weight.numel() for weight in network.parameters())
    _synchronize(job)
    began_s = time.perf_counter()
    training = _training(job, network)
    with training.around:
        return found | _train(job, training, began_s)


def _train(job: ScaleJob, training: Training, began_s: float) -> dict[str, Any]:
    """Train and measure; the optimizer was made from `began_s` on."""
    found: dict[str, Any] = {}
    losses = [training.step()]
    _synchronize(job)
    found["first_step_s"] = time.perf_counter() - began_s
    losses.append(training.step())
    _synchronize(job)
    began_s = time.perf_counter()
    losses.append(training.step())  # the first plan is made of two steps
    _synchronize(job)
    found["third_step_s"] = time.perf_counter() - began_s
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
    found |= outside_figures(job.card, job.variant)
    return (
        found
        | host_figures()
        | {
            "state": "measured",
            "steps_s": timed.steps_s,
            "wall_s": timed.wall_s,
            "losses_hex": tuple(float(loss).hex() for loss in losses),
            "plan_running": timed.plan_running,
            "notes": tuple(notes),
        }
    )


def _training(job: ScaleJob, network: Any) -> Training:
    """The training loop's step: as in a user's script, whatever the variant."""
    shape, device = job.model, network.device
    generator = torch.Generator(device).manual_seed(SEED)

    def batches() -> Iterator[torch.Tensor]:
        for _ in range(job.accumulate):
            size = (shape.batch, shape.tokens)
            yield torch.randint(shape.vocabulary, size, generator=generator, device=device)

    if job.variant in ("deepspeed", "deepspeed-3"):
        return _with_deepspeed(job, network, batches)
    around = ExitStack()
    if job.variant == "fsdp-offload":
        around.enter_context(_sharded(network))
        _limit_torch(job)
    weights = trained_weights(network)
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
            saving: Any = nullcontext()
            if job.variant == "save-on-cpu":
                saving = torch.autograd.graph.save_on_cpu(pin_memory=True)
            casts = shape.weights == "float32"
            with saving, torch.autocast(device.type, torch.bfloat16, enabled=casts):
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

    return Training(network, optimizers, step, around=around)


def _with_deepspeed(job: ScaleJob, network: Any, batches: _Batches) -> Training:
    clip = {"gradient_clipping": _MAX_NORM} if job.clip else {}
    engine, optimizer = deepspeed_engine(
        network,
        job.model.batch,
        stage=3 if job.variant == "deepspeed-3" else 2,
        gradient_accumulation_steps=job.accumulate,
        **clip,
    )

    def step() -> torch.Tensor:
        losses = []
        for tokens in batches():
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    return Training(network, (optimizer,), step)


@contextmanager
def _sharded(network: Any) -> Iterator[None]:
    """Let FSDP keep weights, gradients and state on the host, in a world of one rank."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    kind = network.device.type
    with tempfile.TemporaryDirectory() as folder:
        distributed.init_process_group(
            # The norm of gradients is summed on the host.
            "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo",
            init_method=f"file://{folder}/ranks",
            rank=0,
            world_size=1,
        )
        try:
            mesh = init_device_mesh(kind, (1,))
            policy = CPUOffloadPolicy(pin_memory=kind == "cuda")
            for module in (*network.model.layers, network):
                fully_shard(module, mesh=mesh, offload_policy=policy)
            yield
        finally:
            distributed.destroy_process_group()


def _notes(job: ScaleJob) -> list[str]:
    """What makes a variant's work another one."""
    if job.variant == "torchao" and job.clip:
        return [
            "its gradients are copied to the host within the backward pass: clipping comes too "
            "late to change its step"
        ]
    if job.variant == "deepspeed":
        return ["bfloat16 weights and gradients, float32 weights and state on the host"]
    if job.variant == "deepspeed-3":
        return [
            "bfloat16 weights, float32 weights, gradients and state, all on the host",
            _BUILT_WHOLE,
        ]
    if job.variant == "fsdp-offload":
        return ["its optimizer steps on the host", _BUILT_WHOLE]
    return []


def _synchronize(job: ScaleJob) -> None:
    if job.card is not None:
        torch.cuda.synchronize()


def host_figures() -> dict[str, int]:
    """Memory of this process on the host, as the kernel counts it."""
    text = Path("/proc/self/status").read_text()
    kib = {name: int(size) for name, size in re.findall(r"^(Vm\w+):\s+(\d+) kB$", text, re.M)}
    return {"host_process_bytes": kib.get("VmHWM", 0) << 10}
