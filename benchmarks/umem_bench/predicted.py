"""Predictions held to account: each measured row of results files beside what umem predicts.

A running training's own plan predicts its steps, and says so in the results. Other rows are
predicted as `umem fit` does, by the profile of the card that they were measured on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from umem import PlanError, load_hardware, load_policy
from umem.fit import (
    ALL_LINEAR,
    Workload,
    config_shape,
    fit_inference,
    fit_training,
    training_step,
)
from umem.hardware import Hardware
from umem.hardware.cards import CARDS
from umem.policy import resolve
from umem.streaming.plan import StreamProblem, largest_slot_bytes, least_slack_bytes, plan_stream
from umem_bench.results import (
    LORA_CASES,
    GenerateSettings,
    Header,
    LlamaShape,
    Measurement,
    Run,
    ScaleSettings,
    TrainingSettings,
    median,
)
from umem_bench.shapes import SYSTEMS
from umem_bench.tables import Check, Table, provenance, seconds

__all__ = [
    "USUAL_PERCENT",
    "NotPredictedError",
    "checks",
    "heading",
    "predict_generation",
    "predict_training",
    "run_predicted",
    "system_workload",
    "tables",
    "training_workload",
]

USUAL_PERCENT = 10.0
"""A row that is off by more is named, with its reason, in :data:`EXCEPTIONS`."""

EXCEPTIONS = Path(__file__).with_name("predicted_exceptions.yaml")

_KINDS = ("training", "scale", "generate", "load", "systems")
_OTHERS = "another system's, or a variant to compare with"
_PLAIN = ("stock", "stock-again", "floor")


@dataclass(frozen=True)
class _Program:
    """How a program of ``tests/systems`` trains a Llama of known shape."""

    precision: str = "fp32-autocast"
    targets: tuple[str, ...] = ()
    """Matrices with adapters; none for full fine-tuning."""
    quantised: str = ""
    divides: bool = False
    """Whether its GPUs divide weights, gradients and state."""


_LORA = _Program("bf16", (ALL_LINEAR,))
_PROGRAMS: Mapping[str, _Program | str] = {
    **dict.fromkeys(("hf_trainer_sft", "hf_trainer_device_map", "trl_sft", "ddp"), _Program()),
    "hf_trainer_lora": _LORA,
    "hf_trainer_qlora": replace(_LORA, quantised="nf4-double"),
    "deepspeed_zero2": _Program("bf16-master"),
    "fsdp2": _Program(divides=True),
    "deepspeed_zero3": "ZeRO-3's gathering of each weight, which umem fit does not count",
    "torch_compile": "compiled layers, which have fewer kernels than umem fit counts",
    **dict.fromkeys(
        ("megatron_core", "megatron_core_pipeline", "megatron_core_tensor"),
        "attention whose scores are whole tensors, in Megatron's own layers",
    ),
    **dict.fromkeys(
        ("transformer_lens_cache", "transformer_lens_forward", "transformer_lens_two_devices"),
        "a forward pass alone, whose activations a library takes out or edits",
    ),
}
"""Or why umem fit predicts nothing of it."""

_OTHER_FIELD = "a program of another field, whose model has no configuration"

_FLASH = {64: (256e12, 214e12), 128: (284e12, 257e12)}
"""By width of a head, FLOP/s of flash attention, forward and backward, on one H100
(``h100-kernel-rates.txt``). A profile has those of cuDNN, which is not deterministic."""


_LEFT_OUT = datetime(2026, 11, 29, 20, 51, tzinfo=UTC)
"""From then on umem's plans leave a program's checkpoints out."""

_SLICED = datetime(2026, 11, 30, 2, 50, tzinfo=UTC)
"""From then on umem computes large losses in slices by default."""


class NotPredictedError(Exception):
    """Why umem predicts nothing for a row."""


def run_predicted(folder: Path, on_progress: Callable[[str], None]) -> list[Measurement]:
    """Predict every measured row of a folder's results files that times a step or a token."""
    found = []
    for path in sorted(folder.glob("*.jsonl")):
        header, rows = _rows(path)
        if header.benchmark not in _KINDS:
            continue
        on_progress(path.name)
        found += [_measurement(path.stem, header, it) for it in rows if it["state"] == "measured"]
    return found


def _rows(path: Path) -> tuple[Header, list[dict[str, Any]]]:
    first, *lines = path.read_text(encoding="utf-8").splitlines()
    return Header.model_validate_json(first), [json.loads(line) for line in lines]


def _measurement(file: str, header: Header, row: Mapping[str, Any]) -> Measurement:
    names = (row.get(it) for it in ("workload", "case", "system", "method", "variant"))
    percent = row.get("budget_percent")
    words = [file, *filter(None, names), *([f"{percent:g} %"] if percent else [])]
    times_s = row.get("steps_s") or row.get("token_s") or ()
    figures = {"measured_s": median(_settled(header, times_s)) or 0.0}
    told: dict[str, Any] = {"benchmark": "fit", "case": ", ".join(words), "subject": "predicted"}
    try:
        planned_s = row.get("predicted_step_s")
        if planned_s is None:
            planned_s = _fit_s(header, row)
        else:
            told["benchmark"] = "its plan"
        if row.get("plan_running") is False:
            raise NotPredictedError("its plan was not running")
        return Measurement(**told, figures=figures | {"predicted_s": planned_s})
    except NotPredictedError as error:
        return Measurement(**told, figures=figures, error=str(error))


def _settled(header: Header, times_s: Any) -> list[float]:
    """The steps that count: the matrix of systems keeps those in which umem measures and plans."""
    times = list(times_s)
    return times[-(len(times) // 3) :] if header.benchmark == "systems" else times


def _fit_s(header: Header, row: Mapping[str, Any]) -> float:
    """Seconds of a row by its shape; raises `NotPredictedError` without one."""
    hardware, settings, variant = _profile(header.machine.gpu), header.settings, row["variant"]
    date = datetime.fromisoformat(str(header.date))
    options = {"recomputes": date >= _LEFT_OUT, "slices_losses": date >= _SLICED}
    budget_bytes = row.get("budget_bytes")
    if header.benchmark == "load":
        raise NotPredictedError("umem predicts no loading of files")
    if isinstance(settings, GenerateSettings):
        if variant not in ("stock", "umem"):
            raise NotPredictedError(_OTHERS)
        shape = settings.cases[row["case"]]
        return predict_generation(shape, settings.tokens, hardware, budget_bytes)
    if isinstance(settings, TrainingSettings):
        workload = settings.workload(row["workload"])
        if budget_bytes and row["budget_percent"] == 100 and variant.startswith("umem"):
            variant = "stock"  # a plan that moves nothing, which predicts nothing
        method, accumulate = row["method"], workload.trainer_batches or 1
        hardware = _with_flash(hardware, workload.model)
        return predict_training(workload.model, method, variant, hardware, None, accumulate)
    if isinstance(settings, ScaleSettings):
        case = row["case"]
        method, shape = "lora" if case in LORA_CASES else "sft", settings.cases[case]
        accumulate = settings.batches(case)
        return predict_training(
            shape, method, variant, hardware, budget_bytes, accumulate, options=options
        )
    assert isinstance(settings, dict), header.benchmark
    asked, shape = system_workload(row["system"], settings)
    plain = "stock" if variant == "umem" else variant.removesuffix("-budget")
    return _step_s(asked, plain, _with_flash(hardware, shape), budget_bytes, options)


def system_workload(system: str, settings: Mapping[str, Any]) -> tuple[Workload, LlamaShape]:
    """What a program of ``tests/systems`` trains; settings are those of its results file.

    Raises `NotPredictedError` if `umem fit` predicts nothing of it.
    """
    program, shape = _PROGRAMS.get(system, _OTHER_FIELD), SYSTEMS.get(str(settings["size"]))
    if isinstance(program, str) or shape is None:
        raise NotPredictedError(program if isinstance(program, str) else "a small program")
    workload = Workload(
        _model_shape(shape),
        "lora" if program.targets else "sft",
        shape.batch,
        shape.tokens,
        program.precision,
        shape.checkpoint,
        gpus=int(settings["ranks"]) if program.divides else 1,
        targets=program.targets,
        quantised=program.quantised,
    )
    return workload, shape


def _with_flash(hardware: Hardware, shape: LlamaShape) -> Hardware:
    """A machine whose attention is flash, as the benchmark or deterministic algorithms have it."""
    forward, backward = _FLASH[shape.head_dim or shape.hidden // shape.heads]
    return replace(hardware, attention_flops_per_s=forward, attention_backward_flops_per_s=backward)


def _profile(gpu: str | None) -> Hardware:
    name = next(it for it, card in CARDS.items() if re.fullmatch(card.device_name, gpu or ""))
    return load_hardware(name)


def predict_training(
    shape: LlamaShape,
    method: str,
    variant: str,
    hardware: Hardware,
    budget_bytes: int | None,
    accumulate: int = 1,
    *,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> float:
    """Seconds of a training step, as `umem fit` has them.

    `options` are those of the resolved policy that the row was measured without, or with.

    Raises an error for a variant that umem predicts nothing of, and where nothing fits.
    """
    workload = training_workload(shape, method, accumulate)
    return _step_s(workload, variant, hardware, budget_bytes, options)


def training_workload(shape: LlamaShape, method: str, accumulate: int) -> Workload:
    """What the suites train, as `umem fit` is asked for it."""
    return Workload(
        _model_shape(shape),
        method,
        shape.batch,
        shape.tokens,
        "fp32-autocast" if shape.weights == "float32" else "bf16",
        shape.checkpoint,
        accumulate=accumulate,
        rank=shape.lora_rank,
        targets=shape.lora_targets,
    )


def _step_s(
    workload: Workload,
    variant: str,
    hardware: Hardware,
    budget_bytes: int | None,
    options: Mapping[str, Any],
) -> float:
    """Seconds of a step; errors as of :func:`predict_training`."""
    budget = budget_bytes or hardware.device_bytes
    if variant in _PLAIN or variant == "umem-backward":
        step = training_step(workload, hardware, largest_slot_bytes(budget))
        if variant in _PLAIN:
            updates_s = 0.0 if variant == "floor" else sum(it.update_s for it in step.units)
            return step.passes_s + updates_s
        problem = StreamProblem(
            step.units,
            budget - least_slack_bytes(budget) - step.weight_bytes,
            hardware,
            step_peak_bytes=step.step_peak_bytes,
            in_backward=True,
        )
        try:
            return plan_stream(problem).predicted.step_s
        except PlanError as error:
            raise NotPredictedError(str(error)) from None
    if variant != "umem":
        raise NotPredictedError(_OTHERS)
    policy = replace(resolve(load_policy(workload.mode), hardware, {}), device_budget_bytes=budget)
    way = fit_training(workload, hardware, replace(policy, **options)).umem
    if way.time_s is None:
        raise NotPredictedError(way.why_not)
    return way.time_s


def predict_generation(
    shape: LlamaShape, tokens: int, hardware: Hardware, budget_bytes: int | None
) -> float:
    """Seconds of a new token, as `umem fit` has them; `tokens` are the new ones."""
    workload = Workload(
        _model_shape(shape), "inference", shape.batch, shape.tokens + tokens, "bf16", False
    )
    policy = resolve(load_policy("inference"), hardware, {})
    policy = replace(policy, device_budget_bytes=budget_bytes or hardware.device_bytes)
    time_s = fit_inference(workload, hardware, policy).ways[0].time_s
    assert time_s is not None
    return time_s


def _model_shape(shape: LlamaShape) -> Any:
    config: dict[str, Any] = {
        "model_type": "qwen3_moe" if shape.experts else "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_value_heads or shape.heads,
        "head_dim": shape.head_dim or shape.hidden // shape.heads,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": False,
    }
    if shape.experts:
        config |= {
            "moe_intermediate_size": shape.intermediate,
            "num_experts": shape.experts,
            "num_experts_per_tok": shape.experts_per_token,
        }
    return config_shape("llama", config, "the benchmark's shape")


# ---- tables and limits ----


@dataclass(frozen=True)
class _Exception:
    """Rows that may be off by more than :data:`USUAL_PERCENT`."""

    rows: str
    """A pattern of the shell."""
    percent: float
    reason: str


@cache
def _exceptions() -> tuple[_Exception, ...]:
    return tuple(_Exception(**it) for it in yaml.safe_load(EXCEPTIONS.read_text("utf-8")))


def _bound(case: str) -> _Exception:
    usual = _Exception(case, USUAL_PERCENT, "")
    return next((it for it in _exceptions() if fnmatch(case, it.rows)), usual)


def _off_percent(it: Measurement) -> float:
    return 100 * (it.figures["predicted_s"] / it.figures["measured_s"] - 1)


def _held(run: Run) -> list[Measurement]:
    """Rows with a prediction, worst first."""
    known = [it for it in run.results if isinstance(it, Measurement) and it.error is None]
    return sorted(known, key=lambda it: -abs(_off_percent(it)))


def heading(run: Run) -> str:
    """One line that says by what the predictions were made, and how far off they are."""
    off = sorted(abs(_off_percent(it)) for it in _held(run))
    within = sum(it <= USUAL_PERCENT for it in off)
    return provenance(
        run.header,
        f"{len(off)} rows with a prediction, {within} of them within {USUAL_PERCENT:g} %",
        f"median {median(off) or 0:.2g} % off",
    )


def tables(run: Run) -> Iterator[Table]:
    """Rows by how far off they are; then how many have no prediction, and why."""
    rows = []
    for it in _held(run):
        bound, off = _bound(it.case), _off_percent(it)
        why = bound.reason if abs(off) > USUAL_PERCENT else ""
        times = (seconds(it.figures[name]) for name in ("predicted_s", "measured_s"))
        rows.append((it.case, it.benchmark, *times, f"{off:+.0f} %", why))
    columns = ("row", "predicted by", "predicted", "measured", "off", "why it is off")
    yield Table("Predicted and measured, worst first", columns, rows)
    reasons: dict[str, list[str]] = {}
    for result in run.results:
        if isinstance(result, Measurement) and result.error is not None:
            reasons.setdefault(result.error, []).append(result.case.partition(",")[0])
    without = [
        (why, f"{len(files)}", ", ".join(dict.fromkeys(files))) for why, files in reasons.items()
    ]
    yield Table("Measured, without a prediction", ("why", "rows", "files"), without)


def checks(run: Run) -> Iterator[Check]:
    """Hold each prediction against its bound, and each exception against its need."""
    needed = set()
    for it in _held(run):
        bound, off = _bound(it.case), _off_percent(it)
        if abs(off) > USUAL_PERCENT:
            needed.add(bound.rows)
        yield Check(it.case, abs(off) <= bound.percent, f"{off:+.1f} %, at most {bound.percent:g}")
    for exception in _exceptions():
        yield Check(f"{exception.rows}: an exception", exception.rows in needed, exception.reason)
