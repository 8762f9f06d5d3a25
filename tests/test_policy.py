"""Policies: presets, inheritance, errors with their place, resolution, and the CLI."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from command_line import Run
from pydantic import BaseModel, ValidationError
from typer.testing import CliRunner

from umem.cli.policy import app
from umem.core.classes import TensorClass
from umem.core.errors import PolicyError
from umem.core.units import format_bytes
from umem.hardware import Hardware, hardware_names, load_hardware
from umem.io import yaml_files
from umem.io.problems import Problem as PolicyProblem
from umem.policy import (
    RESERVE_BYTES,
    ClassRule,
    ClassRules,
    Eviction,
    Limits,
    Mechanism,
    MemoryKind,
    Placement,
    Policy,
    PolicyPlanner,
    Refusable,
    ResolvedPolicy,
    ShareLibrary,
    check_environment,
    class_rule,
    find_problems,
    load_policy,
    poisons,
    policy_schema,
    preset_names,
    resolve,
    without,
)
from umem.runtime.native_library import native
from umem.runtime.state import native_config

GIB = 2**30
CHECKOUT = Path(__file__).resolve().parents[1]
FOLDER = CHECKOUT / "policies"
PRESETS = ("inference", "lora", "managed", "managed-all", "rmm-managed", "sft")
BY_MACHINE = ("inference", "lora", "sft")
PCIE, GRACE = load_hardware("h200"), load_hardware("gh200-96")
CARD = dataclasses.replace(PCIE, device_bytes=80 * GIB)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MANAGED_LIMIT", "DEVICE_BUDGET", "PLANNER", "WITHOUT", "POISON"):
        monkeypatch.delenv(f"UMEM_{name}", raising=False)


def write(folder: Path, text: str, name: str = "mine.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def problem_of(path: Path) -> PolicyProblem:
    (problem,) = find_problems(path)
    return problem


# ---------------------------------------------------------------------------------- presets


def test_preset_names() -> None:
    assert preset_names() == PRESETS
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(PRESETS)


def test_presets_come_from_the_package_before_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(yaml_files, "__file__", str(tmp_path / "umem" / "io" / "yaml_files.py"))
    with pytest.raises(PolicyError, match=r"no policy in .*: reinstall umem"):
        load_policy("sft")
    for place in ("policies", "umem/policies"):
        (tmp_path / place).mkdir(parents=True)
        write(tmp_path / place, f"description: {place}\n", "sft.yaml")
        assert load_policy("sft").description == place


@pytest.mark.parametrize("name", PRESETS)
def test_preset_is_named_after_its_file(name: str) -> None:
    policy = load_policy(name)
    assert policy.name == name
    assert policy.description
    assert load_policy(FOLDER / f"{name}.yaml") == policy


def test_classes_of_managed_share_memory() -> None:
    policy = load_policy("managed")
    advice = {
        (rule.kind, rule.placement, rule.accessed_by_device, rule.read_mostly)
        for member in TensorClass
        if member is not TensorClass.FROZEN_WEIGHTS
        for rule in [class_rule(policy, member)]
    }
    assert advice == {("managed", "device", False, False)}
    assert {class_rule(policy, member).min_bytes for member in TensorClass} == {2**20}
    frozen = policy.classes.frozen_weights
    assert (frozen.read_mostly, frozen.mechanism) == (True, "duplicate")
    resolved = resolve(policy, CARD, {}, free_bytes=GIB)
    assert (resolved.device_budget_bytes, resolved.planner) == (72 * GIB, "planned")


def test_a_policy_turns_host_updates_on_and_losses_in_slices_off(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("name: mine\nextends: sft\nhost_update: auto\nslice_losses: never\n")
    for name, is_mine in (("sft", False), (str(mine), True)):
        resolved = resolve(load_policy(name), load_hardware("h200"), {})
        assert (resolved.updates_on_host, resolved.slices_losses) == (is_mine, not is_mine)


ONE_POOL = tuple(name for name in hardware_names() if load_hardware(name).one_pool)


@pytest.mark.parametrize("hardware", ONE_POOL)
@pytest.mark.parametrize("name", preset_names())
def test_nothing_is_copied_onto_itself_in_one_pool(name: str, hardware: str) -> None:
    resolved = resolve(load_policy(name), load_hardware(hardware), {})
    assert {(rule.kind, rule.mechanism) for rule in resolved.rules} == {("device", "keep")}
    assert not resolved.streams_state
    assert not resolved.streams_weights
    assert not resolved.copies_activations
    assert not any((resolved.recomputes, resolved.updates_on_host, resolved.slices_losses))
    assert (resolved.planner, resolved.homes) == ("none", [])
    assert all("one memory" in reason for reason in resolved.reasons)


@pytest.mark.parametrize(
    ("budget", "size_bytes"),
    [(None, 85 * GIB), ("100%", 85 * GIB), (f"{90 * GIB} B", 85 * GIB), ("40GiB", 40 * GIB)],
)
def test_a_budget_of_one_pool_leaves_the_system_some(budget: str | None, size_bytes: int) -> None:
    environment = {} if budget is None else {"UMEM_DEVICE_BUDGET": budget}
    pool = load_hardware("gb10")
    resolved = resolve(load_policy("sft"), pool, environment, free_bytes=100 * GIB)
    assert resolved.device_budget_bytes == size_bytes
    assert ("100 GiB free in the one memory" in resolved.budget_reason) is (budget != "40GiB")
    managed = resolve(load_policy("managed"), pool, {}, free_bytes=100 * GIB)
    assert managed.device_budget_bytes == int(0.85 * 100 * GIB)


@pytest.mark.parametrize("hardware", [it for it in hardware_names() if it not in ONE_POOL])
@pytest.mark.parametrize("name", BY_MACHINE)
def test_presets_by_machine_take_memory_the_card_shows_as_free(name: str, hardware: str) -> None:
    resolved = resolve(load_policy(name), load_hardware(hardware), {})
    found = {
        member: (rule.kind, rule.mechanism)
        for member, rule in zip(TensorClass, resolved.rules, strict=True)
    }
    assert found.pop(TensorClass.OPTIMIZER_STATE) == ("pinned", "stream")
    for member in (TensorClass.ACTIVATIONS, TensorClass.GRADIENTS):
        assert found.pop(member) == ("device", "copy")
    for member in (TensorClass.WEIGHTS, TensorClass.FROZEN_WEIGHTS):
        assert found.pop(member) == ("device", "stream")
    assert resolved.streams_weights
    assert set(found.values()) == {("device", "keep")}
    assert {rule.min_bytes for rule in resolved.rules} == {2**20}
    assert resolved.planner == "none"


@pytest.mark.parametrize(
    ("machine", "figures"),
    [(PCIE, ("4.36 TB/s", "54 GB/s", "25.6 ms", "3 ms")), (GRACE, ("3.4 TB/s", "375 GB/s"))],
)
def test_reasons_have_the_machines_figures(machine: Hardware, figures: tuple[str, ...]) -> None:
    resolved = resolve(load_policy("sft"), machine, {})
    assert all(reason.count(".") and reason.endswith(".") for reason in resolved.reasons)
    assert all(figure in " ".join(resolved.reasons) for figure in figures)
    assert set(resolve(load_policy("managed"), machine, {}).reasons) == {""}


def test_state_is_used_in_place_where_that_is_faster_than_copies() -> None:
    slow_copies = dataclasses.replace(GRACE, copy_slowdown_s_per_byte=1 / 200e9)
    resolved = resolve(load_policy("sft"), slow_copies, {})
    state = resolved.rules[TensorClass.OPTIMIZER_STATE.number]
    assert (state.kind, state.placement, state.mechanism) == ("pinned", "host", "map")
    assert "in place" in resolved.reasons[TensorClass.OPTIMIZER_STATE.number]


def test_a_class_that_states_its_kind_is_not_decided_by_the_machine() -> None:
    own = {"extends": "sft", "classes": {"weights": {"kind": "managed", "placement": "host"}}}
    resolved = resolve(load_policy(own), PCIE, {})
    weights = resolved.rules[TensorClass.WEIGHTS.number]
    assert (weights.kind, weights.placement) == ("managed", "host")
    assert resolved.reasons[TensorClass.WEIGHTS.number] == ""
    assert resolved.rules[TensorClass.GRADIENTS.number].kind == "device"


def test_rmm_managed_gives_no_advice() -> None:
    policy = load_policy("rmm-managed")
    for member in TensorClass:
        rule = class_rule(policy, member)
        assert (rule.kind, rule.placement, rule.min_bytes) == ("managed", "any", 0)
        assert (rule.accessed_by_device, rule.read_mostly) == (False, False)
        assert rule.mechanism == "fault"
    resolved = resolve(policy, CARD, {})
    assert (resolved.device_budget_bytes, resolved.managed_limit_bytes) == (None, None)


def test_unknown_preset_names_the_nearest_and_all() -> None:
    with pytest.raises(PolicyError, match="no policy is called 'rmm_manged', did you mean") as e:
        load_policy("rmm_manged")
    assert "'rmm-managed'?" in str(e.value)
    assert f"Known: {', '.join(PRESETS)}" in str(e.value)


def test_the_error_for_an_unknown_preset_points_to_a_file_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "device_budget: 1GiB", "special")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PolicyError, match=r"write './special'"):
        load_policy("special")
    assert load_policy("./special").device_budget == GIB


# ---------------------------------------------------------------------------------- sources


def test_load_policy_returns_a_policy_as_it_is_and_refuses_other_types() -> None:
    policy = load_policy("sft")
    assert load_policy(policy) is policy
    with pytest.raises(TypeError, match="not int"):
        load_policy(5)  # type: ignore[arg-type]


def test_a_policy_survives_json() -> None:
    policy = load_policy({"extends": "managed", "classes": {"weights": {"placement": "host"}}})
    assert load_policy(json.loads(policy.model_dump_json())) == policy


def test_a_mapping_may_hold_models_and_tensor_classes() -> None:
    policy = load_policy(
        {
            "extends": "managed",
            "limits": Limits(managed_bytes=GIB),
            "classes": {TensorClass.OPTIMIZER_STATE: ClassRule(placement="host")},
        }
    )
    assert policy.limits.managed_bytes == GIB
    rule = policy.classes.optimizer_state
    assert (rule.placement, rule.accessed_by_device, rule.min_bytes) == ("host", True, 2**20)


def test_a_mapping_reports_keys_without_lines() -> None:
    (problem,) = find_problems({"classes": {"weigths": {}}})
    assert str(problem).startswith("policy mapping: classes.weigths: unknown key, did you mean")
    (problem,) = find_problems({"classes": {5: {}}})
    assert "the key 5 is not text" in problem.message


def test_models_are_frozen_and_hashable() -> None:
    policy = load_policy("sft")
    with pytest.raises(ValidationError, match="frozen"):
        policy.name = "other"  # type: ignore[misc]
    assert hash(policy) == hash(load_policy("sft"))


def test_extends_works_only_through_load_policy() -> None:
    with pytest.raises(ValidationError, match="only load_policy follows `extends`"):
        Policy(extends="sft")


# ---------------------------------------------------------------------------------- merging


def test_defaults_reach_every_class_and_class_keys_win(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        defaults: {kind: managed, placement: host, min_bytes: 2MiB}
        classes:
          weights: {placement: device}
        """,
    )
    policy = load_policy(path)
    assert policy.name == "mine"
    for member in TensorClass:
        rule = class_rule(policy, member)
        on_host = member is not TensorClass.WEIGHTS
        assert rule.placement == ("host" if on_host else "device")
        assert rule.accessed_by_device is on_host
        assert rule.min_bytes == 2 * 2**20


def test_defaults_that_depend_on_a_key_are_not_inherited() -> None:
    policy = Policy(defaults=ClassRule(min_bytes=1), classes={"other": {"placement": "host"}})
    assert policy.classes.other.accessed_by_device is True
    assert policy.classes.other.min_bytes == 1
    assert ClassRule(kind="pinned").placement == "host"


def test_extends_merges_key_by_key_through_a_chain(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path, "extends: managed\ndescription: base\nshare: [numba, cupy]\n", "base.yaml")
    middle = "extends: ../base.yaml\nclasses: {frozen_weights: {min_bytes: 4MiB}}\n"
    write(tmp_path, middle, "sub/middle.yaml")
    path = write(tmp_path, "extends: ./sub/middle.yaml\ndevice_budget: null\nshare: [cupy]\n")
    policy = load_policy(path)
    assert (policy.name, policy.description) == ("mine", "")
    assert policy.extends == "./sub/middle.yaml"
    assert policy.device_budget is None
    assert policy.share == ("cupy",)
    frozen = policy.classes.frozen_weights
    assert (frozen.mechanism, frozen.min_bytes) == ("duplicate", 4 * 2**20)
    assert policy.classes.weights.min_bytes == 2**20


def test_a_conflict_of_a_class_with_the_defaults_names_the_class(tmp_path: Path) -> None:
    text = """\
defaults:
  placement: host
  mechanism: map
classes:
  other: {accessed_by_device: false}
"""
    problem = problem_of(write(tmp_path, text))
    assert (problem.line, problem.key) == (3, "classes.other.mechanism")
    assert "accessed_by_device false" in problem.message


def test_an_inherited_class_key_wins_over_new_defaults(tmp_path: Path) -> None:
    policy = load_policy(write(tmp_path, "extends: managed\ndefaults: {mechanism: keep}\n"))
    assert policy.classes.frozen_weights.mechanism == "duplicate"
    assert policy.classes.weights.mechanism == "keep"


def test_a_file_may_have_the_name_of_the_preset_it_extends(tmp_path: Path) -> None:
    path = write(tmp_path, "extends: sft\ndevice_budget: 1GiB\n", "sft.yaml")
    assert load_policy(path).device_budget == GIB


def test_the_error_for_a_cycle_names_its_files(tmp_path: Path) -> None:
    write(tmp_path, "name: b\nextends: mine.yaml\n", "b.yaml")
    problem = problem_of(write(tmp_path, "extends: b.yaml\n"))
    assert problem.file.endswith("b.yaml")
    assert (problem.line, problem.column, problem.key) == (2, 1, "extends")
    assert re.search(r"mine\.yaml -> .*b\.yaml -> .*mine\.yaml; remove", problem.message)
    itself = problem_of(write(tmp_path, "extends: self.yaml\n", "self.yaml"))
    assert "a cycle" in itself.message


def test_an_error_in_a_parent_names_the_parent(tmp_path: Path) -> None:
    write(tmp_path, "name: base\ndefaults:\n  evction: lru\n", "base.yaml")
    problem = problem_of(write(tmp_path, "extends: base.yaml\n"))
    assert problem.file == str(tmp_path / "base.yaml")
    assert (problem.line, problem.column, problem.key) == (3, 3, "defaults.evction")
    assert "did you mean 'eviction'?" in problem.message


def test_a_conflict_with_a_parent_names_the_key_that_was_written(tmp_path: Path) -> None:
    path = write(tmp_path, "extends: managed\nclasses:\n  frozen_weights:\n    mechanism: map\n")
    problems = find_problems(path)
    assert {p.key for p in problems} == {"classes.frozen_weights.mechanism"}
    assert {(p.file, p.line, p.column) for p in problems} == {(str(path), 4, 5)}
    assert any("placement device" in p.message for p in problems)


# ---------------------------------------------------------------------------------- errors


def test_an_alias_bomb_is_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    assert "aliases" in problem_of(write(tmp_path, "\n".join(lines))).message


def test_all_problems_are_reported_in_order(tmp_path: Path) -> None:
    path = write(tmp_path, "nme: x\ndefaults:\n  kind: devcie\n  min_bytes: 16G\nshare: [nmba]\n")
    problems = find_problems(path)
    assert [(p.line, p.key) for p in problems] == [
        (1, "nme"),
        (3, "defaults.kind"),
        (4, "defaults.min_bytes"),
        (5, "share[0]"),
    ]
    with pytest.raises(PolicyError) as caught:
        load_policy(path)
    assert str(caught.value).splitlines() == [str(p) for p in problems]


@pytest.mark.slow
def test_unreadable_files(tmp_path: Path) -> None:
    assert "no such file" in problem_of(tmp_path / "no.yaml").message
    assert "is a directory" in problem_of(tmp_path).message
    for deep in ("[" * 200_000, "? " * 9_000):
        assert "nested too deeply" in problem_of(write(tmp_path, deep)).message
    assert "null" in problem_of(Path("a\0.yaml")).message
    assert "name too long" in problem_of(tmp_path / ("x" * 300)).message
    big = write(tmp_path, "#" * 2**20 + "\n")
    assert "larger than 1 MiB" in problem_of(big).message
    exact = write(tmp_path, "name: x\n" + "#" * (2**20 - 8))
    assert find_problems(exact) == ()
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"name: x\ndescription: \xe9\n")
    problem = problem_of(latin)
    assert (problem.line, problem.column) == (2, 14)
    assert "save the file as UTF-8" in problem.message
    # Columns are characters, and the byte order mark is none.
    latin.write_bytes("\ufeffname: é".encode() + b"\xe9\n")
    problem = problem_of(latin)
    assert (problem.line, problem.column) == (1, 8)


def test_a_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "bom.yaml"
    path.write_bytes(b"\xef\xbb\xbfdevice_budget: 1GiB\n")
    assert load_policy(path).device_budget == GIB


# ---------------------------------------------------------------------------------- conflicts


@pytest.mark.parametrize(
    ("rule", "key", "remedy"),
    [
        ({"kind": "device", "placement": "host"}, "placement", "placement: device"),
        ({"kind": "device", "placement": "any"}, "placement", "or kind: managed"),
        ({"kind": "device", "accessed_by_device": True}, "accessed_by_device", ": false"),
        ({"kind": "pinned", "placement": "device"}, "placement", "set placement: host"),
        ({"kind": "pinned", "accessed_by_device": False}, "accessed_by_device", ": true"),
        ({"kind": "device", "read_mostly": True}, "read_mostly", "read_mostly: false"),
        ({"kind": "pinned", "read_mostly": True}, "read_mostly", "or kind: managed"),
        ({"kind": "device", "mechanism": "migrate"}, "mechanism", "set mechanism: keep, or"),
        ({"kind": "device", "mechanism": "map"}, "mechanism", "or kind: managed"),
        ({"kind": "pinned", "mechanism": "migrate"}, "mechanism", "mechanism: keep or map"),
        ({"kind": "device", "eviction": "first"}, "eviction", "eviction: never"),
        ({"kind": "auto", "placement": "host"}, "placement", "placement: device, or kind: managed"),
        ({"kind": "auto", "mechanism": "map"}, "mechanism", "mechanism: auto, or kind: managed"),
        ({"kind": "auto", "mechanism": "stream"}, "mechanism", "set kind: pinned"),
        ({"kind": "auto", "read_mostly": True}, "read_mostly", "read_mostly: false"),
        ({"kind": "auto", "accessed_by_device": True}, "accessed_by_device", ": false"),
        ({"kind": "auto", "eviction": "first"}, "eviction", "eviction: auto"),
        ({"kind": "pinned", "mechanism": "copy"}, "mechanism", "mechanism: keep or map"),
        ({"mechanism": "map"}, "mechanism", "set placement: host, or mechanism: migrate"),
        (
            {"mechanism": "map", "placement": "host", "accessed_by_device": False},
            "mechanism",
            "accessed_by_device: true",
        ),
        ({"mechanism": "duplicate"}, "mechanism", "set read_mostly: true"),
        ({"mechanism": "migrate", "read_mostly": True}, "mechanism", "mechanism: duplicate"),
        ({"mechanism": "copy", "read_mostly": True}, "mechanism", "read_mostly: false"),
        ({"mechanism": "copy", "placement": "host"}, "mechanism", "placement: device"),
        ({"mechanism": "fault", "placement": "host"}, "mechanism", "accessed_by_device: false"),
        ({"mechanism": "keep", "eviction": "lru"}, "eviction", "set eviction: auto"),
        ({"mechanism": "stream"}, "mechanism", "set kind: pinned for optimizer_state"),
        ({"kind": "system", "mechanism": "stream"}, "mechanism", "set kind: pinned"),
        (
            {"kind": "pinned", "mechanism": "stream", "eviction": "first"},
            "eviction",
            "set eviction: never",
        ),
    ],
)
def test_conflict_names_key_and_remedy(rule: dict[str, Any], key: str, remedy: str) -> None:
    (problem,) = find_problems({"defaults": rule})
    assert problem.key == f"defaults.{key}"
    assert remedy in problem.message
    (problem,) = find_problems({"classes": {"activations": rule}})
    assert problem.key == f"classes.activations.{key}"
    assert remedy in problem.message
    with pytest.raises(ValidationError, match=re.escape(remedy)):
        ClassRule(**rule)


@pytest.mark.parametrize("name", ["weights", "frozen_weights", "optimizer_state"])
def test_discard_is_refused_for_classes_that_live_through_the_run(name: str) -> None:
    (problem,) = find_problems({"classes": {name: {"mechanism": "discard"}}})
    assert problem.key == f"classes.{name}.mechanism"
    assert f"give {name} mechanism: auto" in problem.message
    allowed = {"classes": {"activations": {"mechanism": "discard"}}}
    assert load_policy(allowed).classes.activations.mechanism == "discard"


def test_state_streams_from_page_locked_memory_and_weights_beside_the_device() -> None:
    pinned: dict[str, Any] = {"kind": "pinned", "mechanism": "stream"}
    device: dict[str, Any] = {"kind": "device", "mechanism": "stream"}
    state = load_policy({"classes": {"optimizer_state": pinned}}).classes.optimizer_state
    assert (state.placement, state.accessed_by_device) == ("host", True)
    for name in ("weights", "frozen_weights"):
        rule = getattr(load_policy({"classes": {name: device}}).classes, name)
        assert (rule.placement, rule.accessed_by_device) == ("device", False)
        (problem,) = find_problems({"classes": {name: pinned}})
        assert "set kind: device" in problem.message
    (problem,) = find_problems({"classes": {"optimizer_state": device}})
    assert "set kind: pinned" in problem.message
    for name in ("gradients", "activations", "other"):
        (problem,) = find_problems({"classes": {name: device}})
        assert problem.key == f"classes.{name}.mechanism"
        assert "set mechanism: auto" in problem.message


def test_only_what_the_passes_make_is_copied_off_plain_device_memory() -> None:
    copied = {"kind": "device", "mechanism": "copy"}
    made = {"activations", "gradients"}
    policy = load_policy({"classes": dict.fromkeys(made, copied)})
    assert policy.classes.activations.mechanism == "copy"
    assert policy.classes.gradients.mechanism == "copy"
    for name in set(ClassRules.model_fields) - made:
        (problem,) = find_problems({"classes": {name: copied}})
        assert problem.key == f"classes.{name}.mechanism"
        assert "set mechanism: keep" in problem.message


def test_a_fraction_is_of_what_is_streamed() -> None:
    stream: dict[str, Any] = {"mechanism": "stream", "fraction": 0.5}
    auto = {"kind": "auto", "fraction": 0.5}
    both = ("weights", "frozen_weights")
    for state in ({"kind": "pinned", **stream}, auto):
        rules = load_policy({"classes": {"optimizer_state": state}}).classes
        assert (rules.optimizer_state.fraction, rules.weights.fraction) == (0.5, 1.0)
    for rule in ({"kind": "device", **stream}, auto):
        rules = load_policy({"classes": dict.fromkeys(both, rule)}).classes
        assert (rules.weights.fraction, rules.frozen_weights.fraction) == (0.5, 0.5)
        (problem,) = find_problems({"classes": {"weights": rule}})
        assert problem.key == "classes.weights.fraction"
        assert "give both the same fraction" in problem.message


@pytest.mark.parametrize("name", ClassRules.model_fields)
@pytest.mark.parametrize("kind", ["auto", "managed", "device", "pinned", "system"])
def test_a_fraction_of_anything_else_is_refused(name: str, kind: str) -> None:
    can_stream = name in ("weights", "frozen_weights", "optimizer_state")
    rule = {"kind": kind, "fraction": 0.5}
    if can_stream and kind == "auto":
        return
    (problem,) = find_problems({"classes": {name: rule}})
    assert problem.key == f"classes.{name}.fraction"
    assert ("set mechanism: stream" if can_stream else f"not for {name}") in problem.message
    assert not find_problems({"classes": {name: {"kind": kind, "fraction": 1}}})


@pytest.mark.parametrize("value", [-0.1, 1.1, "0.5", True, None, float("nan"), float("inf")])
def test_a_fraction_is_a_number_from_0_to_1(value: Any) -> None:
    (problem,) = find_problems(
        {"classes": {"optimizer_state": {"kind": "auto", "fraction": value}}}
    )
    assert problem.key == "classes.optimizer_state.fraction"


@pytest.mark.slow
def test_every_remedy_of_a_conflict_is_a_valid_rule() -> None:
    """Applying the remedies one after the other ends at a valid rule."""
    values = itertools.product(
        get_args(MemoryKind),
        get_args(Placement),
        (False, True),
        (False, True),
        get_args(Mechanism),
        get_args(Eviction),
    )
    refused = 0
    for kind, placement, access, read_mostly, mechanism, eviction in values:
        rule: dict[str, Any] = {
            "kind": kind,
            "placement": placement,
            "accessed_by_device": access,
            "read_mostly": read_mostly,
            "mechanism": mechanism,
            "eviction": eviction,
        }
        for _ in range(len(rule) + 1):
            problems = find_problems({"classes": {"activations": rule}})
            if not problems:
                break
            refused += 1
            match = re.search(r"; set (\w+): (\w+)", problems[0].message)
            assert match is not None
            key, value = match.groups()
            rule[key] = {"true": True, "false": False}.get(value, value)
        else:
            pytest.fail(f"the remedies lead nowhere: {rule}")
    assert refused > 0


# ---------------------------------------------------------------------------------- resolve


def test_resolve_turns_a_percentage_into_bytes() -> None:
    policy = load_policy({"extends": "managed", "device_budget": "25%", "share": ["cupy"]})
    resolved = resolve(policy, CARD, {})
    assert resolved.device_budget_bytes == 20 * GIB
    assert resolved.rules == tuple(class_rule(policy, member) for member in TensorClass)
    assert resolved.rules[TensorClass.FROZEN_WEIGHTS.number].read_mostly
    assert resolved.share == ("cupy",)
    assert hash(resolved)


def test_a_budget_is_at_most_the_device() -> None:
    assert resolve(load_policy({"device_budget": "1TiB"}), CARD, {}).device_budget_bytes == 80 * GIB


@pytest.mark.parametrize(
    ("free_bytes", "budget_bytes"),
    [
        (None, 80 * GIB - RESERVE_BYTES),
        (60 * GIB, 60 * GIB - RESERVE_BYTES),
        (RESERVE_BYTES, RESERVE_BYTES // 2),  # a card that is nearly full
        (0, 1),
    ],
)
def test_without_a_budget_plain_device_memory_has_what_is_free_less_a_reserve(
    free_bytes: int | None, budget_bytes: int
) -> None:
    resolved = resolve(load_policy("sft"), CARD, {}, free_bytes=free_bytes)
    assert resolved.device_budget_bytes == budget_bytes
    assert "in reserve" in resolved.budget_reason
    mixed = load_policy({"classes": {"activations": {"kind": "device"}}})
    assert resolve(mixed, CARD, {}, free_bytes=free_bytes).device_budget_bytes == budget_bytes


def test_a_budget_of_its_own_or_of_the_environment_holds_whatever_is_free() -> None:
    policy = load_policy({"extends": "sft", "device_budget": "50%"})
    resolved = resolve(policy, CARD, {}, free_bytes=GIB)
    assert (resolved.device_budget_bytes, resolved.budget_reason) == (40 * GIB, "device_budget")
    resolved = resolve(policy, CARD, {"UMEM_DEVICE_BUDGET": "8GiB"}, free_bytes=GIB)
    assert (resolved.device_budget_bytes, resolved.budget_reason) == (8 * GIB, "UMEM_DEVICE_BUDGET")


def test_managed_memory_without_a_budget_has_no_limit() -> None:
    for kind in ("managed", "system"):
        policy = load_policy({"defaults": {"kind": kind}})
        assert resolve(policy, CARD, {}, free_bytes=GIB).device_budget_bytes is None


@pytest.mark.parametrize(
    ("own", "environment", "limit_bytes"),
    [
        (None, None, None),
        ("4GiB", None, 4 * GIB),
        (None, "8GiB", 8 * GIB),
        ("4GiB", "8GiB", 4 * GIB),
        ("8GiB", "4GiB", 4 * GIB),
    ],
)
def test_the_smaller_of_two_limits_holds(
    own: str | None, environment: str | None, limit_bytes: int | None
) -> None:
    policy = load_policy({"limits": {"managed_bytes": own}})
    environ = {} if environment is None else {"UMEM_MANAGED_LIMIT": environment}
    assert resolve(policy, CARD, environ).managed_limit_bytes == limit_bytes


@pytest.mark.parametrize("name", ["UMEM_MANAGED_LIMIT", "UMEM_DEVICE_BUDGET"])
@pytest.mark.parametrize("value", ["", "lots", "0", "-1GiB", "8G", "0%"])
def test_a_bad_variable_is_named(name: str, value: str) -> None:
    with pytest.raises(PolicyError, match=f"environment variable {name}: .*; or unset it"):
        resolve(load_policy("sft"), CARD, {name: value})


@pytest.mark.parametrize("planner", get_args(PolicyPlanner))
def test_every_planner_can_be_chosen(planner: str) -> None:
    assert resolve(load_policy({"planner": planner}), CARD, {}).planner == planner
    assert resolve(load_policy("managed"), CARD, {"UMEM_PLANNER": planner}).planner == planner
    # Without managed memory there are no pages to plan.
    assert resolve(load_policy("sft"), CARD, {"UMEM_PLANNER": planner}).planner == "none"


def test_unknown_planners_are_refused() -> None:
    (problem,) = find_problems({"planner": "lokahead"})
    assert problem.key == "planner"
    assert "lookahead" in problem.message
    for value, says in (
        (
            "plannd",
            r"'plannd' is no planner, did you mean 'planned'\? Planners: planned, lookahead",
        ),
        ("", r"'' is no planner\. Planners: planned, lookahead, fault, none"),
    ):
        pattern = f"environment variable UMEM_PLANNER: {says}.*; or unset it"
        with pytest.raises(PolicyError, match=pattern):
            resolve(load_policy("sft"), CARD, {"UMEM_PLANNER": value})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, ()),
        ("", ()),
        ("prefetch", ("prefetch",)),
        ("prefetch, advice,prefetch", ("prefetch", "advice")),
        ("second_context,prefetch,advice", get_args(Refusable)),
    ],
)
def test_calls_to_do_without(
    text: str | None, expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {} if text is None else {"UMEM_WITHOUT": text}
    assert without(environ) == expected
    check_environment(environ)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    config = native_config(resolve(load_policy("managed"), CARD))
    allocator = native().Allocator.on_host(config)
    allocator.malloc(4 << 20)
    refused = allocator.stats(0)["num_failed_hints"]
    assert (refused > 0) == bool({"advice", "prefetch"} & set(expected))


def test_an_unknown_call_to_do_without_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"UMEM_WITHOUT: 'prefech'.*'prefetch'.*or unset it"):
        check_environment({"UMEM_WITHOUT": "advice,prefech"})


@pytest.mark.parametrize(("text", "expected"), [(None, False), ("0", False), ("1", True)])
def test_the_allocator_poisons_if_it_is_told_to(
    text: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {} if text is None else {"UMEM_POISON": text}
    assert poisons(environ) == expected
    check_environment(environ)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    allocator = native().Allocator.on_host(native_config(resolve(load_policy("managed"), CARD)))
    address = allocator.malloc(4096)
    ctypes.memset(address, 1, 4096)
    allocator.free(address)
    assert (allocator.malloc(4096), ctypes.string_at(address, 4096)) == (
        address,
        (b"\xff" if expected else b"\x01") * 4096,
    )


def test_any_other_word_for_poison_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"UMEM_POISON: 'yes'.*or unset it"):
        check_environment({"UMEM_POISON": "yes"})


def test_resolve_refuses_sizes_that_do_not_fit_the_device() -> None:
    tiny = dataclasses.replace(CARD, device_bytes=10)
    with pytest.raises(PolicyError, match="device_budget: 1% of 10 B is less than a byte"):
        resolve(load_policy({"device_budget": "1%"}), tiny, {})
    headroom = {"limits": {"system_headroom_bytes": "80GiB"}}
    assert resolve(load_policy(headroom), CARD, {}).system_headroom_bytes == 80 * GIB
    system = load_policy({**headroom, "classes": {"other": {"kind": "system"}}})
    with pytest.raises(PolicyError, match=r"limits\.system_headroom_bytes: 80 GiB leaves nothing"):
        resolve(system, CARD, {})


# ---------------------------------------------------------------------------------- schema, docs

MODELS: list[type[BaseModel]] = [Policy, Limits, ClassRules, ClassRule]


def test_schema_describes_every_key() -> None:
    schema = policy_schema()
    parts = [schema, *schema["$defs"].values()]
    described = {
        key: value["description"] for part in parts for key, value in part["properties"].items()
    }
    assert set(described) == {field for model in MODELS for field in model.model_fields}
    assert all("\n" not in text and text for text in described.values())
    assert all(part["additionalProperties"] is False for part in parts)
    assert schema["$defs"]["ClassRule"]["properties"]["kind"]["enum"] == list(get_args(MemoryKind))


@pytest.mark.parametrize(
    ("text", "valid"),
    [("16GiB", True), ("512 MB", True), ("1_000", True), ("16G", False), ("x", False)],
)
def test_schema_pattern_agrees_with_the_parser(text: str, valid: bool) -> None:
    sizes = policy_schema()["$defs"]["ClassRule"]["properties"]["min_bytes"]["anyOf"]
    (pattern,) = (kind["pattern"] for kind in sizes if kind["type"] == "string")
    assert bool(re.search(pattern, text)) is valid
    assert (not find_problems({"defaults": {"min_bytes": text}})) is valid


def test_classes_are_those_of_the_native_library_in_order() -> None:
    assert list(ClassRules.model_fields) == [member.value for member in TensorClass]


def test_docs_name_every_key_value_preset_and_variable() -> None:
    text = (CHECKOUT / "docs" / "policies.md").read_text(encoding="utf-8")
    first_cells = set(re.findall(r"^\| `([^`]+)` \|", text, flags=re.MULTILINE))
    fields = {field for model in MODELS for field in model.model_fields}
    values = {
        value
        for choices in (MemoryKind, Placement, Mechanism, Eviction)
        for value in get_args(choices)
    }
    variables = {
        *("UMEM_MANAGED_LIMIT", "UMEM_DEVICE_BUDGET", "UMEM_PLANNER", "UMEM_WITHOUT"),
        *("UMEM_POISON", "UMEM_LOG"),
    }
    assert first_cells == fields | values | set(PRESETS) | variables
    assert all(f"`{library}`" in text for library in get_args(ShareLibrary))


def test_the_example_in_the_docs_is_valid(tmp_path: Path) -> None:
    text = (CHECKOUT / "docs" / "policies.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```yaml\n(extends:.*?)```", text, flags=re.DOTALL)
    policy = load_policy(write(tmp_path, example))
    assert policy.classes.optimizer_state.accessed_by_device
    assert policy.classes.weights.min_bytes == 2 * 2**20


@pytest.mark.slow
def test_the_policies_for_users_of_other_systems(tmp_path: Path) -> None:
    text = (CHECKOUT / "docs" / "other-systems.md").read_text(encoding="utf-8")
    found: dict[str, tuple[float, float]] = {}
    for example in re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL):
        policy = load_policy(write(tmp_path, example))
        for hardware in set(hardware_names()) - set(ONE_POOL):
            resolved = resolve(policy, load_hardware(hardware), {})
            rules = dict(zip(TensorClass, resolved.rules, strict=True))
            assert resolved.streams_state
            assert resolved.streams_weights
            assert resolved.copies_activations
            weights = rules[TensorClass.WEIGHTS].fraction
            assert rules[TensorClass.FROZEN_WEIGHTS].fraction == weights
            found[policy.name] = (rules[TensorClass.OPTIMIZER_STATE].fraction, weights)
    assert found == {
        "gemini-static": (0.25, 0.5),
        "gemini-cpu": (0.0, 0.0),
        "megatron-half-of-the-state": (0.5, 1.0),
        "nemo-sft": (1.0, 1.0),
        "nemo-lora": (1.0, 0.5),
        "bmtrain-adam-offload": (0.0, 1.0),
    }


# ---------------------------------------------------------------------------------- CLI

runner = CliRunner()


def test_cli_list() -> None:
    result = runner.invoke(app, ["list"])
    assert result.exit_code == 0
    assert all(name in result.stdout for name in PRESETS)
    listed = json.loads(runner.invoke(app, ["list", "--json"]).stdout)
    assert [preset["name"] for preset in listed] == list(PRESETS)


def test_cli_show_prints_a_row_per_class() -> None:
    result = runner.invoke(app, ["show", "managed"], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    rows = {line.split()[0]: line.split() for line in result.stdout.splitlines() if line.strip()}
    assert all(member.value in rows for member in TensorClass)
    assert "duplicate" in rows["frozen_weights"]
    assert "…" not in result.stdout


def test_cli_show_without_a_gpu_is_the_policy_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    shown = json.loads(runner.invoke(app, ["show", "sft", "--json"]).stdout)
    assert load_policy(shown["policy"]) == load_policy("sft")
    assert (shown["hardware"], shown["resolved"]) == (None, None)
    assert "give --hardware" in runner.invoke(app, ["show", "sft"]).stdout


def test_cli_show_says_what_the_machine_decides_and_why() -> None:
    arguments = ["show", "sft", "--hardware", "h200"]
    text = runner.invoke(app, arguments, env={"COLUMNS": "80"}).stdout
    assert re.search(r"optimizer_state +pinned +host .* stream", text)
    assert re.search(r"device budget .*in reserve", text)
    assert "25.6 ms" in text
    assert "…" not in text
    shown = json.loads(runner.invoke(app, [*arguments, "--json"]).stdout)
    rules = shown["resolved"]["rules"]
    assert rules["activations"]["mechanism"] == "copy"
    assert rules["activations"]["reason"]


def test_cli_show_for_a_machine(tmp_path: Path) -> None:
    path = write(tmp_path, "extends: managed\ndevice_budget: 50%\n")
    arguments = ["show", str(path), "--hardware", "a100-40-pcie"]
    result = runner.invoke(app, arguments, env={"UMEM_MANAGED_LIMIT": "8GiB"})
    half_bytes = load_hardware("a100-40-pcie").device_bytes // 2
    assert re.search(rf"device budget +{re.escape(format_bytes(half_bytes))}", result.stdout)
    assert re.search(r"limit on managed memory +8 GiB", result.stdout)
    assert re.search(r"extends +managed", result.stdout)
    shown = json.loads(runner.invoke(app, [*arguments, "--json"]).stdout)
    assert shown["hardware"] == "a100-40-pcie"
    resolved = shown["resolved"]
    assert resolved["device_budget_bytes"] == half_bytes
    fields = {field.name for field in dataclasses.fields(ResolvedPolicy)}
    assert set(resolved) == fields - {"reasons"}
    assert list(resolved["rules"]) == [member.value for member in TensorClass]


@pytest.mark.parametrize(
    ("arguments", "environment", "says"),
    [
        (["show", "lorra"], {}, "did you mean 'lora'?"),
        (["show", "sft", "--hardware", "h20"], {}, "no hardware profile is called 'h20'"),
        (
            ["show", "sft", "--hardware", "h200"],
            {"UMEM_DEVICE_BUDGET": "x"},
            "environment variable UMEM_DEVICE_BUDGET",
        ),
    ],
)
def test_cli_errors_are_plain(
    arguments: list[str],
    environment: dict[str, str],
    says: str,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    status, output, errors = run("policy", *arguments)
    assert (status, output) == (2, "")
    assert says in errors
    assert len(errors.splitlines()) == 1


def test_cli_validate(tmp_path: Path) -> None:
    good = write(tmp_path, "extends: sft\n", "good.yaml")
    bad = write(tmp_path, "nme: x\nclases: {}\n", "bad.yaml")
    result = runner.invoke(app, ["validate", str(good)])
    assert (result.exit_code, result.stdout) == (0, f"{good}: valid\n")
    result = runner.invoke(app, ["validate", str(good), str(bad)])
    assert (result.exit_code, result.stdout) == (2, f"{good}: valid\n")
    lines = result.stderr.splitlines()
    assert [line.split(": ")[0] for line in lines] == [f"{bad}:1:1", f"{bad}:2:1"]
    result = runner.invoke(app, ["validate", "--json", str(good), str(bad)])
    assert result.exit_code == 2
    report = json.loads(result.stdout)
    assert [entry["valid"] for entry in report] == [True, False]
    assert report[1]["problems"][1]["key"] == "clases"


def test_cli_validate_takes_paths_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = runner.invoke(app, ["validate", "sft"])
    assert result.exit_code == 2
    assert result.stderr.startswith("sft: cannot be read (no such file or directory)")


def test_cli_schema_is_the_schema() -> None:
    assert json.loads(runner.invoke(app, ["schema"]).stdout) == policy_schema()
