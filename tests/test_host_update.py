"""Updates on the host have the bits of a form, and the proof finds a device's form."""

from __future__ import annotations

import dataclasses
import itertools
import operator
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from host_updates import CASES, NumpyDevice, all_cases, case_of, update
from torch import nn

from umem.runtime.native_library import native
from umem.streaming.host_share import (
    BFLOAT16_ROUNDS,
    ROUNDS,
    Ahead,
    Decay,
    DeviceOptimizer,
    Elements,
    First,
    Form,
    HostSpan,
    HostUpdate,
    Hyperparameters,
    Powers,
    Second,
    StepKind,
    Weight,
    constants,
    forms_of,
    kind_of,
    near_cpus,
    prove,
    random_elements,
    telling,
)

FEW = ((4096, 1), (4093, 2), (4096, 1000))
NUMBERS: dict[str, Any] = {
    "b1": 0.9,
    "o1": 0.1,
    "b2": 0.95,
    "o2": 0.05,
    "rate": 0.01,
    "root": 0.3,
    "eps": 1e-8,
    "decay": 1e-3,
}
ADAM = Form(Decay.NONE, First.NESTED, Second.NESTED, Ahead.NONE, Weight.QUOTIENT)
SGD = Form(Decay.NONE, First.LEFT, Second.NONE, Ahead.NONE, Weight.ADDCMUL)
KINDS = [pytest.param(*it[1:], id=name) for name, it in all_cases()]
LIKELIEST = {next(forms_of(it[2])) for _, it in all_cases() if it[2] is not None}
EACH_PART = [
    *sorted(LIKELIEST, key=str),
    *(dataclasses.replace(ADAM, decay=it) for it in Decay),
    *(dataclasses.replace(ADAM, first=it) for it in First),
    *(dataclasses.replace(ADAM, second=it) for it in Second if it),
    *(dataclasses.replace(ADAM, weight=it) for it in Weight),
    *(dataclasses.replace(SGD, ahead=it) for it in Ahead),
]


def run(workers: Any, form: Form, numbers: dict[str, Any], before: Elements) -> Elements:
    made = before.copy()
    is_bfloat16 = before.weight.itemsize == 2
    constant = native().HostConstants(**numbers)
    workers.update(form.native(), constant, is_bfloat16, [made.addresses])
    return made


@pytest.fixture(scope="module")
def workers() -> Any:
    """tests/native/host_update.cpp compares the forms of all instructions with each other."""
    return native().HostWorkers(2)


# ---------------------------------------------------------------------- the native library


@pytest.mark.parametrize("is_bfloat16", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("form", EACH_PART, ids=str)
def test_bits_of_the_formulas(workers: Any, form: Form, is_bfloat16: bool) -> None:
    before = random_elements(20_003, 1, is_bfloat16=is_bfloat16)
    expected = update(form, NUMBERS, before, is_bfloat16=is_bfloat16)
    assert not any(run(workers, form, NUMBERS, before).differing(expected))


@pytest.mark.parametrize("is_bfloat16", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("instructions", native().host_instructions())
def test_what_is_done_to_gradients_first(instructions: str, is_bfloat16: bool) -> None:
    workers = native().HostWorkers(2, [], instructions)
    before = random_elements(4099, 2, is_bfloat16=is_bfloat16)
    for factors, scale, negates in itertools.product(
        ((), (0.3,), (3.0, 0.7)), (None, 3.0, 65536.0), (False, True)
    ):
        numbers = {**NUMBERS, "factors": list(factors), "scale": scale, "negates": negates}
        expected = update(ADAM, numbers, before, is_bfloat16=is_bfloat16)
        found = run(workers, ADAM, numbers, before)
        assert not any(found.differing(expected)), numbers
        assert (scale is None) == (not any(found.differing(before)[1:2]))


def test_small_numbers_count_where_the_program_flushes_them() -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush")
    try:
        workers = native().HostWorkers(2)
    finally:
        torch.set_flush_denormal(False)
    before = random_elements(4096, 3)
    before.second[:] = 1e-40
    before.gradient[:] = 0
    found = run(workers, ADAM, NUMBERS, before)
    assert not any(found.differing(update(ADAM, NUMBERS, before, is_bfloat16=False)))
    assert (found.second > 0).all()


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="threads"):
        native().HostWorkers(0)
    with pytest.raises(ValueError, match="sse9"):
        native().HostWorkers(1, [], "sse9")
    with pytest.raises(ValueError, match="first: 99"):
        native().HostForm(0, 99, 0, 0, 0)


# ---------------------------------------------------------------------- the proof


@pytest.mark.slow
@pytest.mark.parametrize(("given", "kind"), KINDS)
def test_the_proof_finds_each_form(given: Hyperparameters, kind: StepKind) -> None:
    forms, pool = list(forms_of(kind)), native().HostWorkers(1)
    for form in forms:
        proof = prove(NumpyDevice(form), pool, kind, given, FEW)
        assert form in proof.standing
        assert len(proof.standing) == 1 or kind.is_bfloat16  # which needs more elements


@pytest.mark.slow
@pytest.mark.parametrize(("given", "kind"), KINDS)
def test_elements_tell_forms_apart(given: Hyperparameters, kind: StepKind) -> None:
    numbers = constants(kind, telling(kind, given), Powers(NumpyDevice(ADAM).powers))
    count = BFLOAT16_ROUNDS[-1][0] if kind.is_bfloat16 else ROUNDS[0][0]
    before = random_elements(count, 1, is_bfloat16=kind.is_bfloat16)
    pool = native().HostWorkers(1)
    # Those with one part unlike the first: two of them differ in this part, or in two.
    first = next(forms_of(kind))
    found = {
        it: run(pool, it, numbers, before)
        for it in forms_of(kind)
        if sum(map(operator.ne, dataclasses.astuple(it), dataclasses.astuple(first))) <= 1
    }
    assert len(found) > 1
    for one, two in itertools.combinations(found.values(), 2):
        assert sum(one.differing(two)) > (4 if kind.is_bfloat16 else 200)


def test_a_device_of_another_arithmetic_has_no_form() -> None:
    given, kind = case_of("fused AdamW")[1:]
    assert kind is not None

    class Reciprocal(NumpyDevice):
        """Multiplies by a reciprocal where torch divides."""

        def step(self, elements: Elements, settings: Hyperparameters, kind: StepKind) -> Elements:
            after = super().step(elements, settings, kind)
            numbers = constants(kind, settings, Powers(self.powers))
            with np.errstate(all="ignore"):
                below = np.sqrt(after.second) * np.float32(1 / numbers["root"])
                below = np.float32(1) / (below + np.float32(numbers["eps"]))
                weight = elements.weight - np.float32(numbers["decay"]) * elements.weight
                weight -= np.float32(numbers["rate"]) * after.first * below
            return after._replace(weight=weight)

    proof = prove(Reciprocal(ADAM), native().HostWorkers(1), kind, given)
    assert proof.form is None
    lines = proof.table().splitlines()[2:]
    assert len(lines) == len(list(forms_of(kind)))
    assert not any(it.endswith("(stands)") for it in lines)


def test_one_element_of_a_late_round_is_enough() -> None:
    given, kind = case_of("fused SGD")[1:]
    assert kind is not None

    class Late(NumpyDevice):
        def step(self, elements: Elements, settings: Hyperparameters, kind: StepKind) -> Elements:
            after = super().step(elements, settings, kind)
            if settings.step == 1000:
                after.first.view(np.uint32)[17] ^= 1
            return after

    form = next(forms_of(kind))
    proof = prove(Late(form), native().HostWorkers(1), kind, given, FEW)
    assert proof.form is None
    assert [it[2] for it in proof.tried[form]] == [0, 0, 1]


# ---------------------------------------------------------------------- an optimizer of torch


@pytest.mark.parametrize("name", CASES)
def test_a_device_runs_the_optimizers_own_step(name: str) -> None:
    optimizer, given, kind = case_of(name)
    assert kind is not None
    before = random_elements(1003, 5)
    after = DeviceOptimizer(optimizer, "cpu").step(before, given, kind)

    make, arguments = CASES[name]
    parameter = nn.Parameter(torch.from_numpy(before.weight.copy()))
    parameter.grad = torch.from_numpy(before.gradient.copy())
    own = make([parameter], lr=1e-2, **arguments)
    first, second = (torch.from_numpy(it.copy()) for it in before[2:])
    own.state[parameter] = {
        "step": torch.tensor(0.0),
        "exp_avg": first,
        "exp_avg_sq": second,
        "momentum_buffer": first,
    }
    own.step()
    found = Elements(parameter.detach().numpy(), before.gradient, first.numpy(), second.numpy())
    assert not any(found.differing(after))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("step", [1, 1000])
def test_the_first_forms_values_are_torchs_but_for_rounding(name: str, step: int) -> None:
    optimizer, given, kind = case_of(name)
    assert kind is not None
    given = dataclasses.replace(given, step=step)
    device = DeviceOptimizer(optimizer, "cpu")
    before = random_elements(10_000, 6)
    # Of one size, so that no difference of large numbers shows roundings.
    before = before._replace(
        weight=np.full(10_000, 2, np.float32), gradient=np.full(10_000, 1, np.float32),
        first=np.linspace(1, 2, 10_000, dtype=np.float32),
        second=np.linspace(1, 2, 10_000, dtype=np.float32),
    )  # fmt: skip
    numbers = constants(kind, given, Powers(device.powers))
    found = run(native().HostWorkers(1), next(forms_of(kind)), numbers, before)
    for one, two, old in zip(found, device.step(before, given, kind), before, strict=True):
        np.testing.assert_allclose(one, two, rtol=3e-7)
        assert (one is found.gradient) or (kind.is_adam is False) or (two != old).any()


def test_powers_are_asked_for_once() -> None:
    calls: list[tuple[float, int, int]] = []

    def powers(base: float, first: int, count: int) -> np.ndarray:
        calls.append((base, first, count))
        return NumpyDevice(ADAM).powers(base, first, count)

    power = Powers(powers)
    steps = [1, 2, 16_383, 16_384, 40_000]
    assert [power(0.999, it) for it in steps] == [
        np.float32(np.power(np.float32(0.999), np.float32(it))) for it in steps
    ]
    assert [first for _, first, _ in calls] == [0, 16_384, 32_768]


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (torch.optim.AdamW, {"fused": True, "amsgrad": True}),
        (torch.optim.AdamW, {"foreach": False}),
        (torch.optim.AdamW, {"capturable": True, "foreach": True}),
        (torch.optim.AdamW, {"foreach": True, "capturable": True, "lr": torch.tensor(1e-3)}),
        (torch.optim.SGD, {"fused": True}),
        (torch.optim.NAdam, {}),
    ],
    ids=["amsgrad", "loop", "capturable", "lr", "no momentum", "NAdam"],
)
def test_other_steps_have_no_table(make: Any, arguments: dict[str, Any]) -> None:
    optimizer = make([nn.Parameter(torch.zeros(3))], **arguments)
    given = Hyperparameters(optimizer.param_groups[0], 1)
    assert kind_of(optimizer, given, torch.float32) is None
    assert HostUpdate.for_optimizer(optimizer, NumpyDevice(ADAM)) is None


def test_a_fused_step_takes_the_number_of_a_tensor() -> None:
    arguments: dict[str, Any] = {"fused": True, "weight_decay": 0.1}
    optimizers = [
        torch.optim.AdamW([nn.Parameter(torch.zeros(3))], lr=lr, **arguments)
        for lr in (float(np.float32(1e-3)), torch.tensor(1e-3))
    ]
    given = [Hyperparameters(it.param_groups[0], 7) for it in optimizers]
    kinds = [kind_of(*it, torch.float32) for it in zip(optimizers, given, strict=True)]
    assert kinds[0] is not None
    assert kinds[0] == kinds[1]
    power = Powers(NumpyDevice(ADAM).powers)
    assert constants(kinds[0], given[0], power) == constants(kinds[0], given[1], power)


def test_functions_for_lists_round_bfloat16_in_between() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))])
    given = Hyperparameters(optimizer.param_groups[0], 1)
    assert kind_of(optimizer, given, torch.bfloat16) is None


# ---------------------------------------------------------------------- the face


def made(name: str = "fused AdamW", form: Form | None = None) -> tuple[HostUpdate, Any, StepKind]:
    optimizer, given, kind = case_of(name)
    assert kind is not None
    found = HostUpdate.for_optimizer(optimizer, NumpyDevice(form or next(forms_of(kind))), 2)
    assert found is not None
    return found, given, kind


def spans(elements: Elements, cuts: list[int]) -> list[HostSpan]:
    """Of one parameter each."""
    ends = [*cuts, len(elements.weight)]
    size = elements.weight.itemsize
    return [
        HostSpan._make([*(it.ctypes.data + begin * size for it in elements), end - begin])
        for begin, end in itertools.pairwise([0, *ends])
    ]


def test_steps_of_a_training() -> None:
    updates, given, kind = made()
    device = NumpyDevice(next(forms_of(kind)))
    stock = random_elements(200_001, 8)
    own = stock.copy()
    for step in range(1, 6):
        gradient = random_elements(200_001, 8 + step).gradient
        own.gradient[:] = gradient
        now = dataclasses.replace(given, step=step, factors=(0.5,) if step % 2 else ())
        stock = device.step(stock._replace(gradient=gradient), now, kind)
        updates.update(spans(own, [5, 70_000, 70_000, 140_007]), now, torch.float32).result()
        assert not any(own.differing(stock._replace(gradient=gradient)))
    updates.close()


def test_a_skipped_step_changes_nothing() -> None:
    updates, given, _ = made()
    own = random_elements(1000, 9)
    before = own.copy()
    skipped = dataclasses.replace(given, grad_scale=8.0, found_inf=True)
    updates.update(spans(own, []), skipped, torch.float32).result()
    assert not any(own.differing(before))
    scaled = dataclasses.replace(skipped, found_inf=False)
    updates.update(spans(own, []), scaled, torch.float32).result()
    assert all(own.differing(before)[:4])
    updates.close()


def test_late_numbers_are_asked_for_in_turn() -> None:
    updates, given, kind = made()
    own, order = random_elements(1000, 9), []
    before = own.copy()

    def late(name: str, factor: float) -> Hyperparameters:
        order.append(name)
        return dataclasses.replace(given, factors=(factor,))

    def fail() -> Hyperparameters:
        raise RuntimeError("copies failed")

    one = updates.update(spans(own, []), lambda: late("one", 0.5), torch.float32)
    two = updates.update(spans(own, []), fail, torch.float32)
    three = updates.update(spans(own, []), lambda: late("three", 0.25), torch.float32)
    three.result()
    assert (one.exception(), order) == (None, ["one", "three"])
    with pytest.raises(RuntimeError, match="copies failed"):
        two.result()
    device, expected = NumpyDevice(next(forms_of(kind))), before
    for factor in (0.5, 0.25):
        now = dataclasses.replace(given, factors=(factor,))
        expected = device.step(expected, now, kind)
    assert not any(own.differing(expected))
    updates.close()


def test_a_step_of_another_kind_is_proved_or_refused() -> None:
    updates, given, _ = made()
    assert updates.covers(given, torch.float32)
    # The device has decay as its form says, and a kind without decay has no such form.
    without = dataclasses.replace(given, group={**given.group, "weight_decay": 0.0})
    assert not updates.covers(without, torch.float32)
    own = random_elements(1000, 9)
    before = own.copy()
    with pytest.raises(ValueError, match="AdamW"):
        updates.update(spans(own, []), without, torch.float32).result()
    assert not any(own.differing(before))
    updates.close()


def test_torchs_kernels_for_cpus_have_no_form(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(3))], fused=True)
    with caplog.at_level("INFO", "umem"):
        assert HostUpdate.for_optimizer(optimizer, torch.device("cpu")) is None
    assert "weight_fused nested nested none quotient" in caplog.text  # how each form fared


def test_all_groups_need_a_form() -> None:
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    groups: list[dict[str, Any]] = [
        {"params": parameters[:1]},
        {"params": parameters[1:], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, fused=True)
    given = Hyperparameters(optimizer.param_groups[0], 1)
    kind = kind_of(optimizer, given, torch.float32)
    assert kind is not None
    assert HostUpdate.for_optimizer(optimizer, NumpyDevice(next(forms_of(kind)))) is None


def test_cpus_near_a_device(tmp_path: Path) -> None:
    own = sorted(os.sched_getaffinity(0))
    (tmp_path / "node1").mkdir()
    (tmp_path / "node1" / "cpulist").write_text(f"{own[0]},90000-90003\n")
    assert near_cpus(1, tmp_path) == own[:1]
    (tmp_path / "node1" / "cpulist").write_text("90000-90003\n")
    assert near_cpus(1, tmp_path) == own
    assert near_cpus(None, tmp_path) == own
