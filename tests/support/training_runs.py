"""Made-up runs of the training benchmark, for its tables and its picture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from umem_bench.results import (
    METHODS,
    Header,
    LlamaShape,
    Machine,
    Method,
    Migration,
    Run,
    TrainingResult,
    TrainingSettings,
    Variant,
    Workload,
)

from umem.cuda import bindings

GIB = 1 << 30
TINY = LlamaShape(
    hidden=64,
    intermediate=128,
    layers=2,
    heads=4,
    vocabulary=256,
    batch=2,
    tokens=32,
    checkpoint=False,
    loss_chunk_tokens=16,
)
MADE_UP_MACHINE = Machine(
    gpu="Made-up GPU", driver="1.2", cuda="13.0", cpu="Made-up CPU", cpu_count=4
)
MIGRATION = Migration(
    fault_batches=12,
    um_time_share=0.5,
    moved_bytes={"to_device": 2 * GIB, "to_host": GIB},
    predicted_bytes={"to_device": GIB, "to_host": GIB},
)


def settings(model: LlamaShape = TINY, **changes: Any) -> TrainingSettings:
    """Of one workload, ``long``; `changes` are of it or of the run."""
    workload: dict[str, Any] = {
        "name": "long",
        "model": model,
        "methods": METHODS,
        "variants": ("stock",),
        "budgets_percent": (100.0, 60.0, 30.0),
        "trainer_batches": None,
    }
    workload |= {name: changes.pop(name) for name in set(workload) & set(changes)}
    asked: dict[str, Any] = {
        "workloads": (Workload.model_validate(workload),),
        "steps": 3,
        "deterministic": False,
        "managed_limit_bytes": GIB,
    }
    return TrainingSettings.model_validate(asked | changes)


def result(
    variant: Variant,
    step_s: float = 0.1,
    peak_bytes: int | None = 10 * GIB,
    method: Method = "sft",
    percent: float | None = None,
    **more: Any,
) -> TrainingResult:
    """A median step of a process; a variant with a budget is just within it."""
    budget_bytes = None if percent is None else int(percent / 100 * 10 * GIB)
    made: dict[str, Any] = {
        "workload": "long",
        "method": method,
        "variant": variant,
        "budget_percent": percent,
        "budget_bytes": budget_bytes,
        "resident_bytes": budget_bytes,
        "state": "measured",
        "steps_s": (step_s * 0.9, step_s, step_s * 1.2),
        "losses_hex": ((10.5).hex(), (10.25).hex()),
        "peak_allocated_bytes": peak_bytes,
        "parameters": 558_000_000,
        "process_s": 7.0,
    }
    return TrainingResult.model_validate(made | more)


def have_a_card(
    monkeypatch: pytest.MonkeyPatch, gib: int, ask: Callable[..., dict[str, Any]]
) -> None:
    """Have rows at scale run on a card of so many GiB, one of them in use; `ask` is its worker."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(bindings, "device_pci_address", lambda _: "0000:01:00.0")
    monkeypatch.setattr(bindings, "nvml_memory_bytes", lambda _: (gib << 30, (gib - 1) << 30))
    monkeypatch.setattr("umem_bench.scale.run.header", made_up_header)
    monkeypatch.setattr("umem_bench.scale.run.ask_worker", ask)


def made_up_header(benchmark: Any, settings: Any) -> Header:
    """Provenance of a machine that does not exist."""
    return Header(
        benchmark=benchmark,
        date="2026-01-02T03:04:05+00:00",
        commit="0123456789ab",
        umem="0.1.0",
        machine=MADE_UP_MACHINE,
        packages={"torch": "2.13.0", "transformers": "5.0"},
        settings=settings,
    )


def made_up_run(*results: TrainingResult, **changes: Any) -> Run:
    """Of these results."""
    shape = LlamaShape(batch=1, tokens=1000)
    return Run(made_up_header("training", settings(shape, **changes)), results)
