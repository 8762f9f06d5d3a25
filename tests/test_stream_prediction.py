"""Predictions of streamed training from traces: units, plans, and the command."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import Run

from umem.core.classes import TensorClass
from umem.core.errors import HardwareError, PlanError, TraceError
from umem.hardware import Hardware
from umem.policy import ResolvedPolicy, load_policy, resolve
from umem.predict.stream_prediction import PredictedStep, predict_stream, stream_row, streamed_step
from umem.streaming.plan import (
    StreamProblem,
    WeightUnit,
    least_slack_bytes,
    plan_stream,
    plan_training,
)
from umem.trace import Trace, save_trace

PREDICTIONS = Path(__file__).parents[1] / "benchmarks" / "results" / "predicted-streamed.txt"
MIB = 1 << 20
LAYERS = 6
WEIGHT, STATE, SAVED = 8, 16, 4
"""MiB of each layer."""

SLACK = 256 * MIB
"""What plans leave free of a small budget."""

MakeTrace = Callable[..., Trace]
StepOf = MakeTrace


@pytest.fixture
def policy(machine: Hardware) -> ResolvedPolicy:
    return with_budget(resolve(load_policy("sft"), machine, {}), 200)


def replace_mechanism(
    policy: ResolvedPolicy, mechanism: str, *classes: TensorClass
) -> ResolvedPolicy:
    rules = list(policy.rules)
    for number in (it.number for it in classes):
        rules[number] = rules[number].model_copy(update={"mechanism": mechanism})
    return replace(policy, rules=tuple(rules))


def keeping(policy: ResolvedPolicy) -> ResolvedPolicy:
    """The policy, with all weights on the device."""
    return replace_mechanism(policy, "keep", TensorClass.WEIGHTS, TensorClass.FROZEN_WEIGHTS)


def with_budget(policy: ResolvedPolicy, budget_mib: int) -> ResolvedPolicy:
    """A budget of so much for a plan, and of what plans leave free beside it."""
    return replace(policy, device_budget_bytes=budget_mib * MIB + SLACK)


@pytest.fixture
def step_of(make_trace: MakeTrace) -> StepOf:
    """Builds a step of layers, forward 1 ms and backward 2 ms each, with clipping of 3 ms."""

    def build(batches: int = 1, inner_mib: int = 0, *, checkpoints: bool = False) -> Trace:
        tensors: dict[str, tuple[int, str, bool]] = {}
        phases: list[tuple[str, float, list[str], list[str]]] = []
        for layer in range(LAYERS):
            name = f"model.layers.{layer}.linear.weight"
            tensors[name] = (WEIGHT * MIB, "weights", True)
            tensors[f"{name}.grad"] = (WEIGHT * MIB, "gradients", False)
            tensors[f"{name}.exp_avg"] = (STATE * MIB, "optimizer_state", True)
            tensors[f"{name}.step"] = (4, "optimizer_state", True)
        for batch in range(batches):
            for layer in range(LAYERS):
                tensors[f"out {batch} {layer}"] = (SAVED * MIB, "activations", False)
                name = f"model.layers.{layer}.linear"
                reads = [f"{name}.weight", *([f"out {batch} {layer - 1}"] if layer else [])]
                made = [f"out {batch} {layer}"]
                inner = [f"inner {batch} {layer}"] if inner_mib else []
                tensors |= dict.fromkeys(inner, (inner_mib * MIB, "activations", False))
                made += [] if checkpoints else inner
                phases.append((f"forward {name}: mm", 1e-3, reads, made))
            for layer in reversed(range(LAYERS)):
                name = f"model.layers.{layer}.linear"
                reads = [f"{name}.weight", f"out {batch} {layer}"]
                inner = [f"inner {batch} {layer}"] if inner_mib else []
                if checkpoints:
                    phases.append((f"recompute {name}: mm", 1e-3, list(reads), inner))
                reads += inner
                phases.append((f"backward {name}: mm", 2e-3, reads, [f"{name}.weight.grad"]))
        gradients = [f"model.layers.{layer}.linear.weight.grad" for layer in range(LAYERS)]
        phases.append(("aten.norm", 3e-3, gradients, []))
        for layer in range(LAYERS):
            name = f"model.layers.{layer}.linear.weight"
            used = [f"{name}.exp_avg", name]
            phases.append((f"optimizer {name}: adamw", 0.5e-3, [*used, f"{name}.grad"], used))
        trace = make_trace(tensors, [phase[1:] for phase in phases])
        return replace(trace, name="layers", phase_names=tuple(phase[0] for phase in phases))

    return build


# ---------------------------------------------------------------------------------- units


def test_units_are_the_layers(step_of: StepOf, policy: ResolvedPolicy) -> None:
    step = streamed_step(step_of(), policy, STATE * MIB)
    assert [unit.name for unit in step.units] == [f"model.layers.{it}" for it in range(LAYERS)]
    for unit in step.units:
        # Tensors below the policy's min_bytes stay on the device.
        assert unit.state_bytes == STATE * MIB
        assert [unit.forward_s, unit.backward_s] == pytest.approx([1e-3, 2e-3])
        assert unit.update_s == pytest.approx(0.5e-3)
    assert step.other_s == pytest.approx(3e-3)
    assert step.batches == 1
    assert step.passes_s == pytest.approx(LAYERS * 3e-3)


def test_activations_count_for_the_last_layer_that_uses_them_forward(
    step_of: StepOf, policy: ResolvedPolicy
) -> None:
    saved = [unit.saved_bytes for unit in streamed_step(step_of(), policy, STATE * MIB).units]
    assert saved == [0, *[SAVED * MIB] * (LAYERS - 2), 2 * SAVED * MIB]
    policy = replace_mechanism(policy, "keep", TensorClass.ACTIVATIONS)
    kept = streamed_step(step_of(), policy, STATE * MIB)
    assert not any(unit.saved_bytes for unit in kept.units)


def test_a_layer_that_saves_most_is_cut_as_in_a_training(
    make_trace: MakeTrace, machine: Hardware, policy: ResolvedPolicy
) -> None:
    """A cell is called for each word, behind an embedding."""
    words = 8
    tensors: dict[str, tuple[int, str, bool]] = {
        "cell.weight": (WEIGHT * MIB, "weights", True),
        "cell.weight.exp_avg": (STATE * MIB, "optimizer_state", True),
        "cell.weight.grad": (WEIGHT * MIB, "gradients", False),
        **{f"h {it}": (SAVED * MIB, "activations", False) for it in range(words)},
    }
    forward: list[tuple[str, float, list[str], list[str]]] = [
        ("forward cell: mm", 1e-3, ["cell.weight", *([f"h {it - 1}"] if it else [])], [f"h {it}"])
        for it in range(words)
    ]
    backward: list[tuple[str, float, list[str], list[str]]] = [
        ("backward cell: mm", 2e-3, ["cell.weight", f"h {it}"], ["cell.weight.grad"])
        for it in reversed(range(words))
    ]
    phases = [*forward, *backward]
    phases.append(("optimizer cell.weight: adamw", 1e-3, ["cell.weight.exp_avg"], []))
    trace = make_trace(tensors, [phase[1:] for phase in phases])
    trace = replace(trace, phase_names=tuple(phase[0] for phase in phases))
    step = streamed_step(trace, policy, STATE * MIB)
    # What each word saves is used by the next one, too; the last one saves two tensors.
    assert [unit.name for unit in step.units] == ["cell", *(f"cell..{it}" for it in range(2, 8))]
    assert [unit.saved_bytes for unit in step.units] == [SAVED * MIB] * 6 + [2 * SAVED * MIB]
    assert [unit.state_bytes for unit in step.units] == [STATE * MIB] + [0] * 6
    assert sum(unit.forward_s for unit in step.units) == pytest.approx(words * 1e-3)
    assert [unit.backward_s for unit in step.units] == pytest.approx([2e-3] * 6 + [4e-3])
    assert not step.freed_bytes
    all_bytes = max(unit.backward_peak_bytes for unit in step.units)
    assert all_bytes > (words - 1) * SAVED * MIB
    # A plan for less than that moves some.
    assert predict_stream(trace, machine, with_budget(policy, 52)).plan.copied


@pytest.mark.parametrize("streams_weights", [False, True])
def test_peaks_have_gradients_for_as_long_as_the_program(
    step_of: StepOf, policy: ResolvedPolicy, streams_weights: bool
) -> None:
    policy = policy if streams_weights else keeping(policy)
    small = 4 * LAYERS  # the step counts
    weights = (0 if streams_weights else LAYERS * WEIGHT * MIB) + small
    deferred = streamed_step(step_of(), policy, STATE * MIB)
    forward = [unit.forward_peak_bytes for unit in deferred.units]
    # Gradients of the layers from each one on, and activations up to it.
    assert forward == [
        weights + (LAYERS - it) * WEIGHT * MIB + (it + 1) * SAVED * MIB for it in range(LAYERS)
    ]
    backward = [unit.backward_peak_bytes for unit in deferred.units]
    assert backward == [
        weights + (LAYERS - it) * WEIGHT * MIB + (it + 1) * SAVED * MIB for it in range(LAYERS)
    ]
    assert deferred.step_peak_bytes == weights + LAYERS * WEIGHT * MIB
    # Then the weights that an optimizer updates stay.
    weights = LAYERS * WEIGHT * MIB + small
    ahead = streamed_step(step_of(), policy, STATE * MIB, in_backward=True)
    backward = [unit.backward_peak_bytes for unit in ahead.units]
    assert backward == [
        weights + min(3, LAYERS - it) * WEIGHT * MIB + (it + 1) * SAVED * MIB
        for it in range(LAYERS)
    ]


def test_batches_share_the_passes(step_of: StepOf, policy: ResolvedPolicy) -> None:
    one, three = (streamed_step(step_of(batches), policy, STATE * MIB) for batches in (1, 3))
    assert three.batches == 3
    assert three.passes_s == pytest.approx(3 * one.passes_s)
    for few, many in zip(one.units, three.units, strict=True):
        assert (few.saved_bytes, few.state_bytes) == (many.saved_bytes, many.state_bytes)
        assert [few.forward_s, few.backward_s] == pytest.approx([many.forward_s, many.backward_s])
    # Later batches' forward passes run beside all gradients, the first one beside those that still
    # wait for their update.
    others = (LAYERS - 1) * WEIGHT * MIB
    for few, many, kept in (
        (one.units[0], three.units[0], 0),
        (one.units[-1], three.units[-1], others),
    ):
        assert many.forward_peak_bytes == few.forward_peak_bytes + kept


def test_modules_around_the_layers_are_units(step_of: StepOf, policy: ResolvedPolicy) -> None:
    trace = step_of()
    names = [it.replace("model.layers.0.linear", "model.embed") for it in trace.tensor_names]
    phases = [it.replace("model.layers.0.linear", "model.embed") for it in trace.phase_names]
    renamed = replace(trace, tensor_names=tuple(names), phase_names=tuple(phases))
    step = streamed_step(renamed, policy, STATE * MIB)
    assert step.units[0].name == "model.embed"
    original = streamed_step(trace, policy, STATE * MIB)
    assert replace(step.units[0], name="model.layers.0") == original.units[0]
    assert step.weights is not None
    # A product of matrices reads all of it, whatever its name.
    assert not any(unit.gathered for unit in step.weights.values())


def frozen(trace: Trace, *layers: int) -> Trace:
    """The trace with the weights of some layers frozen."""
    names = [f"model.layers.{layer}.linear.weight" for layer in layers]
    tensor_class = trace.tensor_class.copy()
    tensor_class[np.isin(trace.tensor_names, names)] = TensorClass.FROZEN_WEIGHTS.number
    return replace(trace, tensor_class=tensor_class)


def test_weights_are_those_of_units(step_of: StepOf, policy: ResolvedPolicy) -> None:
    step = streamed_step(frozen(step_of(), 2), policy, STATE * MIB)
    unit = WeightUnit((WEIGHT * MIB,), trained=frozenset([0]))
    assert step.weights == {
        f"model.layers.{it}": replace(unit, trained=frozenset()) if it == 2 else unit
        for it in range(LAYERS)
    }
    assert step.weight_bytes == LAYERS * WEIGHT * MIB
    assert streamed_step(step_of(), keeping(policy), STATE * MIB).weights is None
    # What is updated in the backward pass stays.
    step = streamed_step(frozen(step_of(), 2), policy, STATE * MIB, in_backward=True)
    assert step.weights is not None
    assert list(step.weights) == ["model.layers.2"]


@pytest.mark.parametrize("what", ["small", "shared", "in no unit"])
def test_some_weights_stay(step_of: StepOf, policy: ResolvedPolicy, what: str) -> None:
    trace = step_of()
    usual = streamed_step(trace, policy, STATE * MIB)
    first, second = (
        trace.tensor_names.index(f"model.layers.{layer}.linear.weight") for layer in (0, 1)
    )
    names, sizes = list(trace.tensor_names), trace.tensor_bytes.copy()
    used = trace.access_tensor.copy()
    if what == "small":
        sizes[second] = MIB - 1
    elif what == "shared":
        used[np.flatnonzero(used == first)[0]] = second  # by the first layer's forward pass
    else:
        names[second] = "elsewhere.weight"
    changed = replace(trace, tensor_names=tuple(names), tensor_bytes=sizes, access_tensor=used)
    step = streamed_step(changed, policy, STATE * MIB)
    assert step.weights is not None
    assert list(step.weights) == [f"model.layers.{it}" for it in range(LAYERS) if it != 1]
    staying_bytes = int(sizes[second])
    assert step.step_peak_bytes == usual.step_peak_bytes + staying_bytes
    for unit, other in zip(step.units, usual.units, strict=True):
        assert unit.forward_peak_bytes == other.forward_peak_bytes + staying_bytes
        assert unit.backward_peak_bytes == other.backward_peak_bytes + staying_bytes


@pytest.mark.parametrize(
    ("module", "operator", "is_table"),
    [
        ("embed_tokens", "", True),
        ("wte", "", True),
        ("word_embeddings", "", True),
        ("rotary_embedder", "", False),
        ("linear", "", False),
        ("linear", ": aten.embedding", True),
        ("embed_tokens", ": aten.mm", False),
    ],
)
def test_an_embedding_is_a_table_of_rows(
    step_of: StepOf, policy: ResolvedPolicy, module: str, operator: str, is_table: bool
) -> None:
    trace = step_of()
    tensors = (name.replace("linear", module) for name in trace.tensor_names)
    phases = (
        re.sub(": .*", operator, name.replace("linear", module)) for name in trace.phase_names
    )
    trace = replace(trace, tensor_names=tuple(tensors), phase_names=tuple(phases))
    step = streamed_step(trace, policy, STATE * MIB)
    assert step.weights is not None
    assert {bool(unit.gathered) for unit in step.weights.values()} == {is_table}


def test_a_trace_without_forward_is_an_error(make_trace: MakeTrace, policy: ResolvedPolicy) -> None:
    trace = make_trace({"a": (MIB, "weights", True)}, [(1e-3, ["a"], [])])
    with pytest.raises(TraceError, match="'forward'"):
        streamed_step(trace, policy, STATE * MIB)


# ---------------------------------------------------------------------------------- predictions


@pytest.mark.parametrize("in_backward", [False, True])
def test_the_prediction_is_the_plan_of_a_training(
    step_of: StepOf, machine: Hardware, policy: ResolvedPolicy, in_backward: bool
) -> None:
    prediction = predict_stream(step_of(), machine, policy, in_backward=in_backward)
    step: PredictedStep = prediction.step
    # All weights have room.
    weight_bytes = LAYERS * WEIGHT * MIB
    leaving_bytes = 0 if in_backward else weight_bytes
    assert prediction.plan == plan_stream(
        StreamProblem(
            step.units,
            budget_bytes=200 * MIB - leaving_bytes,
            hardware=machine,
            other_s=step.other_s,
            step_peak_bytes=step.step_peak_bytes,
            in_backward=in_backward,
        )
    )
    kept = predict_stream(step_of(), machine, keeping(policy), in_backward=in_backward)
    assert stream_row(kept) == stream_row(prediction)
    row = stream_row(prediction)
    assert json.loads(json.dumps(row)) == row
    assert row["step_s"] == pytest.approx(row["ideal_s"] + row["exposed_s"] + row["slowed_s"])
    assert row["ideal_s"] == pytest.approx(row["floor_s"] + 3e-3 + LAYERS * 0.5e-3)
    assert row["floor_share"] == pytest.approx(row["floor_s"] / row["step_s"])
    assert row["model_flops"] == row["model_flops_per_s"] == 0  # the trace has none
    assert row["device_bytes"] <= row["device_budget_bytes"] - SLACK == 200 * MIB
    assert least_slack_bytes(row["device_budget_bytes"]) == SLACK
    streamed = LAYERS - len(row["resident"])
    assert row["to_host_bytes"].get("optimizer_state", 0) == streamed * STATE * MIB
    saved = row["to_host_bytes"].get("activations", 0)
    assert row["host_bytes"] == streamed * STATE * MIB + saved
    assert (row["weights_resident_bytes"], row["weights_streamed_bytes"]) == (weight_bytes, 0)


@pytest.mark.parametrize("budget_mib", [140, 180])
def test_a_policy_may_have_the_host_update_layers(
    step_of: StepOf, machine: Hardware, policy: ResolvedPolicy, budget_mib: int
) -> None:
    """Within more, all state would stay, and weights would leave for it."""
    link: dict[str, Any] = dict.fromkeys(
        ("copy_to_device_bytes_per_s", "copy_to_host_bytes_per_s", "copy_link_bytes_per_s"), 5e9
    )
    slow, policy = replace(machine, **link), with_budget(policy, budget_mib)
    without = predict_stream(step_of(), slow, policy)
    found = predict_stream(step_of(), slow, replace(policy, updates_on_host=True))
    hosts = stream_row(found)["hosts"]
    assert (stream_row(without)["hosts"], hosts) == ([], sorted(found.plan.hosts))
    assert hosts
    assert found.plan.predicted.step_s < 0.97 * without.plan.predicted.step_s
    streamed = LAYERS - len(found.plan.resident)
    gradients = sum(found.step.units[it].gradient_bytes for it in found.plan.copied_gradients)
    saved = sum(found.step.units[it].saved_bytes for it in found.plan.copied)
    weights = len(hosts) * WEIGHT * MIB
    assert found.host_bytes == streamed * STATE * MIB + gradients + saved + weights


def test_a_policy_may_leave_shares_on_the_device(
    step_of: StepOf, machine: Hardware, policy: ResolvedPolicy
) -> None:
    def row(fraction: float) -> dict[str, Any]:
        rules = [it.model_copy(update={"fraction": fraction}) for it in policy.rules]
        return stream_row(predict_stream(step_of(), machine, replace(policy, rules=tuple(rules))))

    everything, half, none = row(1.0), row(0.5), row(0.0)
    assert everything == stream_row(predict_stream(step_of(), machine, policy))
    assert 0 < half["weights_resident_bytes"] <= LAYERS * WEIGHT * MIB / 2
    assert len(half["resident"]) <= LAYERS / 2 < len(everything["resident"])
    assert (none["weights_resident_bytes"], none["resident"]) == (0, [])


def test_weights_leave_where_they_have_no_room(
    step_of: StepOf, machine: Hardware, policy: ResolvedPolicy
) -> None:
    trace = frozen(step_of(), 1, 2, 3)
    small = with_budget(policy, 100)
    with pytest.raises(PlanError, match="raise device_budget"):
        predict_stream(trace, machine, keeping(small))
    prediction = predict_stream(trace, machine, small)
    row, weights = stream_row(prediction), prediction.training.weights
    assert weights is not None
    assert prediction.training == plan_training(
        prediction.step.units,
        prediction.step.weights,
        budget_bytes=100 * MIB,
        hardware=machine,
        other_s=prediction.step.other_s,
        step_peak_bytes=prediction.step.step_peak_bytes,
        holds_gradients=True,
    )
    assert row["device_bytes"] <= 100 * MIB
    homes_bytes = row["weights_streamed_bytes"]
    assert homes_bytes == weights.streamed_bytes > 0
    assert row["weights_resident_bytes"] + homes_bytes == LAYERS * WEIGHT * MIB
    assert (row["weight_slots"], row["weight_slot_bytes"]) == (2, WEIGHT * MIB)
    assert row["to_device_bytes"]["weights"] >= homes_bytes
    state_bytes = row["to_host_bytes"]["optimizer_state"]
    others = row["to_host_bytes"].get("activations", 0) + row["to_host_bytes"].get("gradients", 0)
    assert row["host_bytes"] == homes_bytes + state_bytes + others
    parts = (row[f"{name}_s"] for name in ("ideal", "exposed", "slowed", "in_place"))
    assert row["step_s"] == pytest.approx(sum(parts))
    assert json.loads(json.dumps(row)) == row


def test_embeddings_leave_first(step_of: StepOf, machine: Hardware, policy: ResolvedPolicy) -> None:
    """All else fits once a table is read in place: nothing of it is copied."""
    trace = step_of()
    layer = "model.layers.0.linear"
    names = (it.replace(layer, "model.wte") for it in trace.tensor_names)
    phases = (re.sub(": .*", "", it.replace(layer, "model.wte")) for it in trace.phase_names)
    trace = replace(trace, tensor_names=tuple(names), phase_names=tuple(phases))
    trace = replace(
        trace,
        tensor_bytes=np.where(
            np.array(trace.tensor_names) == "model.wte.weight", 200 * MIB, trace.tensor_bytes
        ),
    )
    row = stream_row(predict_stream(trace, machine, policy))
    assert row["weights_in_place_bytes"] == 200 * MIB
    assert (row["weights_streamed_bytes"], row["weight_slots"]) == (0, 0)
    assert "weights" not in row["to_device_bytes"]
    # The update reads and writes it there.
    assert row["in_place_s"] >= 2 * 200 * MIB / machine.mapped_bytes_per_s * (1 - 1e-6)


def test_a_step_in_the_backward_pass_has_one_batch(
    step_of: StepOf, machine: Hardware, policy: ResolvedPolicy
) -> None:
    assert predict_stream(step_of(2), machine, policy).step.batches == 2
    with pytest.raises(PlanError, match="2 batches"):
        predict_stream(step_of(2), machine, policy, in_backward=True)


def test_speed_without_recomputing(
    step_of: StepOf, machine: Hardware, policy: ResolvedPolicy
) -> None:
    trace = step_of()
    names = list(trace.phase_names)
    first = next(number for number, name in enumerate(names) if name.startswith("backward"))
    names[first] = names[first].replace("backward", "recompute")
    counted = replace(
        trace, phase_names=tuple(names), flops=np.full(trace.phase_count, 1e9), name="counted"
    )
    row = stream_row(predict_stream(counted, machine, policy))
    assert row["model_flops"] == (trace.phase_count - 1) * 1e9
    assert row["model_flops_per_s"] == pytest.approx(row["model_flops"] / row["step_s"])


def test_plans_leave_a_share_of_large_budgets(
    step_of: StepOf, machine: Hardware, policy: ResolvedPolicy
) -> None:
    # All state fits both budgets, and without the part that plans leave free the second one only.
    everything = predict_stream(step_of(), machine, with_budget(policy, 4096)).training
    assert len(everything.stream.resident) == LAYERS
    scale = 200  # tensors of GiB
    large = step_of()
    large = replace(large, tensor_bytes=large.tensor_bytes * scale)
    machine = replace(machine, host_bytes=machine.host_bytes * scale)
    short = replace(policy, device_budget_bytes=everything.device_bytes * scale)
    assert len(predict_stream(large, machine, short).plan.resident) < LAYERS
    enough = replace(policy, device_budget_bytes=int(everything.device_bytes * scale / 0.95))
    assert len(predict_stream(large, machine, enough).plan.resident) == LAYERS


def test_what_cannot_be_predicted_is_an_error(
    step_of: StepOf, machine: Hardware, policy: ResolvedPolicy
) -> None:
    with pytest.raises(PlanError, match="raise device_budget"):
        predict_stream(step_of(), machine, with_budget(keeping(policy), 100))
    with pytest.raises(PlanError, match=r"^weights, .* 16 MiB of device_budget.* raise"):
        predict_stream(step_of(), machine, with_budget(policy, 30))
    with pytest.raises(PlanError, match="page-locked"):
        predict_stream(step_of(), replace(machine, host_bytes=MIB), with_budget(policy, 160))
    managed = resolve(load_policy("managed"), machine, {})
    assert policy.streams_state
    assert not managed.streams_state
    with pytest.raises(PlanError, match="managed streams no optimizer state"):
        predict_stream(step_of(), machine, managed)
    untimed = replace(
        step_of(), duration_s=None, flops=np.ones(step_of().phase_count), name="untimed"
    )
    with pytest.raises(HardwareError, match="flops_per_s"):
        predict_stream(untimed, replace(machine, flops_per_s={}), policy)


# ---------------------------------------------------------------------------------- the command


@pytest.fixture
def saved_step(step_of: StepOf, tmp_path: Path) -> Path:
    path = tmp_path / "step.npz"
    save_trace(step_of(), path)
    return path


@pytest.mark.slow
def test_simulate_predicts_a_policy_that_streams(run: Run, saved_step: Path) -> None:
    arguments = ("simulate", "--trace", saved_step, "--policy", "sft", "--budget", "456MiB")
    status, output, errors = run(*arguments, "--hardware", "h100-sxm")
    assert (status, errors) == (0, "")
    assert "layers on h100-sxm, policy sft, 456 MiB of device memory" in output
    assert "passes alone 18 ms" in output
    assert "deferred" in output
    assert "…" not in output
    assert all(len(line) <= 80 for line in output.splitlines())
    for flags, in_backward in (((), False), (("--step-in-backward",), True)):
        _, output, _ = run(*arguments, "--hardware", "h100-sxm", *flags, "--json")
        (row,) = json.loads(output)["results"]
        assert (row["planner"], row["step_in_backward"]) == ("stream", in_backward)
        assert row["device_bytes"] <= 200 * MIB


@pytest.mark.slow
def test_simulate_says_where_weights_are(run: Run, saved_step: Path) -> None:
    arguments = ("simulate", "--trace", saved_step, "--policy", "sft", "--hardware", "h100-sxm")
    _, output, _ = run(*arguments, "--budget", "4GiB")
    assert "weights:" not in output
    status, output, errors = run(*arguments, "--budget", "356MiB")
    assert (status, errors) == (0, "")
    words = " ".join(output.split())
    assert re.search(r"weights: \S+ \S+ resident, \S+ MiB streamed \(\S+ MiB a step\)", words)
    assert "2 buffers of 8 MiB" in words
    assert "use host memory in place" in words
    assert all(len(line) <= 80 for line in output.splitlines())
    _, output, _ = run(*arguments, "--budget", "356MiB", "--json")
    (row,) = json.loads(output)["results"]
    assert row["weight_slots"] == 2
    assert row["weights_in_place_bytes"] == row["weight_slots_extra"] == 0


def test_pages_have_no_step_in_the_backward_pass(run: Run, saved_step: Path) -> None:
    status, output, errors = run("simulate", "--trace", saved_step, "--step-in-backward")
    assert (status, output) == (2, "")
    assert "--policy sft" in errors
    status, _, errors = run("simulate", "--trace", saved_step, "--policy", "sft", "--plot", "x")
    assert status == 2
    assert "--plot" in errors


@pytest.mark.slow
def test_the_committed_predictions_are_todays(run: Run) -> None:
    """The first of them. After a change, run the commands of the file again, and edit the pages."""
    first = PREDICTIONS.read_text(encoding="utf-8").split("\n\n")[1]
    command, *expected = first.splitlines()
    status, output, _ = run(*command.removeprefix("$ umem ").split())
    assert status == 0
    said, rates = output.strip().split("\n\n")
    assert [line.rstrip() for line in said.splitlines()] == expected
    assert rates == "Rates of h100-sxm: published."


def test_layers_run_again_where_what_they_save_takes_longer_to_copy(
    step_of: StepOf, machine: Hardware, policy: ResolvedPolicy
) -> None:
    trace = step_of(inner_mib=400)
    step = streamed_step(trace, policy, STATE * MIB)
    # What the next layer uses is its argument.
    assert step.freed_bytes == {unit.name: 400 * MIB for unit in step.units[:-1]} | {
        step.units[-1].name: (400 + SAVED) * MIB
    }
    small = with_budget(policy, 1500)
    again = predict_stream(trace, machine, small)
    copied = predict_stream(trace, machine, replace(small, recomputes=False))
    assert again.training.recomputed
    assert not copied.training.recomputed
    assert again.plan.predicted.step_s < 0.9 * copied.plan.predicted.step_s
    assert stream_row(again)["recomputed"] == sorted(again.training.recomputed)


def test_checkpoints_are_left_out_where_there_is_room(
    step_of: StepOf, machine: Hardware, policy: ResolvedPolicy
) -> None:
    trace = step_of(inner_mib=400, checkpoints=True)
    step = streamed_step(trace, policy, STATE * MIB)
    assert step.checkpointed_bytes == {unit.name: 400 * MIB for unit in step.units}
    large = with_budget(policy, 20_000)
    found = predict_stream(trace, machine, large)
    assert found.training.left_out == {unit.name for unit in step.units}
    assert stream_row(found)["left_out"] == sorted(found.training.left_out)
    never = predict_stream(trace, machine, replace(large, recomputes=False))
    assert not never.training.left_out
    # 1 ms of each layer.
    saved_s = never.plan.predicted.step_s - found.plan.predicted.step_s
    assert saved_s == pytest.approx(LAYERS * 1e-3, rel=0.05)
