"""Schedules as files, and plans found again by what they depend on."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
from archives import contents, rewrite
from hypothesis import given, settings
from hypothesis import strategies as st
from small_files import KEY, small_schedule, small_trace

from umem.core.errors import PlanError
from umem.core.schedule import Schedule
from umem.hardware import Hardware, Source, load_hardware
from umem.pages.plan.plan_files import (
    PLAN_COLUMNS,
    PLAN_FORMAT,
    PlanHeader,
    load_schedule,
    plan_key,
    save_schedule,
    store_plan,
    stored_plan,
)
from umem.policy import ResolvedPolicy, load_policy, resolve
from umem.trace import Trace

DOCS = Path(__file__).resolve().parents[1] / "docs" / "trace-format.md"


def assert_same(one: Schedule, other: Schedule) -> None:
    for field in dataclasses.fields(Schedule):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, np.ndarray):
            assert (a.dtype, a.tobytes()) == (b.dtype, b.tobytes()), field.name
            assert not b.flags.writeable
        else:
            assert a == b, field.name


# ---------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"waits": False},
        {
            "hint_phase": np.zeros(0, np.int32),
            "hint_op": np.zeros(0, np.uint8),
            "hint_tensor": np.zeros(0, np.int32),
        },
    ],
)
def test_a_schedule_comes_back_unchanged(tmp_path: Path, changes: dict[str, Any]) -> None:
    schedule = small_schedule(**changes)
    save_schedule(schedule, tmp_path / "plan.npz", key=KEY)
    assert_same(schedule, load_schedule(tmp_path / "plan.npz", small_trace(), key=KEY))


@pytest.mark.slow
@given(
    hints=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4), st.integers(0, 2)), max_size=30),
    residencies=st.lists(st.integers(0, 4), min_size=3, max_size=3),
    waits=st.booleans(),
)
@settings(max_examples=50, deadline=None)
def test_any_schedule_comes_back_unchanged(
    hints: list[tuple[int, int, int]],
    residencies: list[int],
    waits: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.getbasetemp() / "any-plan.npz"
    columns = np.array(sorted(hints), np.int64).reshape(-1, 3)
    schedule = Schedule(
        planner="p",
        residency=np.array(residencies, np.uint8),
        hint_phase=columns[:, 0].astype(np.int32),
        hint_op=columns[:, 1].astype(np.uint8),
        hint_tensor=columns[:, 2].astype(np.int32),
        waits=waits,
    )
    save_schedule(schedule, path, key=KEY)
    assert_same(schedule, load_schedule(path, small_trace(), key=KEY))


def test_the_same_schedule_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_schedule(small_schedule(), tmp_path / "a", key=KEY)
    monkeypatch.setattr(time, "time", lambda: 2e9)
    save_schedule(small_schedule(), tmp_path / "b", key=KEY)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"planner": ""}, r"planner: '': .*\{1,64\}"),
        ({"planner": "a\n"}, r"planner: 'a\\n': .*\{1,64\}"),
        ({"planner": None}, "planner: null: Input should be a valid string"),
        ({"waits": 1}, "waits: 1: Input should be a valid boolean"),
        ({"residency": np.array([0, 5, 0], np.uint8)}, r"residency\[1\]: 5 is not from 0 to 4"),
        ({"residency": np.zeros(3, np.int64)}, "residency: of int64; make it uint8"),
        ({"hint_phase": [0, 1, 2, 3]}, "hint_phase: not a column"),
        ({"hint_op": np.zeros(3, np.uint8)}, "hint_op: 3 entries; it takes 4"),
        ({"hint_phase": np.array([0, 2, 1, 3], np.int32)}, r"hint_phase\[2\]: 1 follows 2"),
        ({"hint_phase": np.array([-1, 0, 1, 2], np.int32)}, r"hint_phase\[0\]: -1 is not from 0"),
        ({"hint_op": np.array([0, 1, 2, 7], np.uint8)}, r"hint_op\[3\]: 7 is not from 0 to 6"),
        ({"hint_tensor": np.array([0, 1, 2, 3], np.int32)}, r"hint_tensor\[3\]: 3 is not from 0 "),
        ({"hint_tensor": np.array([0, -1, 2, 0], np.int32)}, r"hint_tensor\[1\]: -1 is not from"),
    ],
)
def test_an_invalid_schedule_is_not_saved(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = tmp_path / "plan.npz"
    save_schedule(small_schedule(), path, key=KEY)
    before = path.read_bytes()
    with pytest.raises(PlanError, match=rf"plan\.npz: not written: {message}"):
        save_schedule(small_schedule(**changes), path, key=KEY)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.npz"]


def saved(folder: Path, **changes: Any) -> Path:
    """A saved plan, changed; lists become columns."""
    path = folder / "plan.npz"
    save_schedule(small_schedule(), path, key=KEY)
    assert tuple(contents(path)) == (*PlanHeader.model_fields, *PLAN_COLUMNS)
    assert contents(path)["format"] == PLAN_FORMAT
    rewrite(path, lambda content: content.update(changes))
    return path


def test_a_plan_for_something_else_is_refused(tmp_path: Path) -> None:
    save_schedule(small_schedule(), tmp_path / "plan", key=KEY)
    with pytest.raises(
        PlanError, match=r"plan: key: planned for another trace, .* wanted ffffffffffff"
    ):
        load_schedule(tmp_path / "plan", small_trace(), key="f" * 64)


def test_damaged_and_missing_files_are_plan_errors(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="none: cannot be read"):
        load_schedule(tmp_path / "none", small_trace(), key=KEY)
    save_schedule(small_schedule(), tmp_path / "plan", key=KEY)
    (tmp_path / "plan").write_bytes((tmp_path / "plan").read_bytes()[:-4])
    with pytest.raises(PlanError, match="plan: damaged"):
        load_schedule(tmp_path / "plan", small_trace(), key=KEY)


# ----------------------------------------------------------------------------------- keys


def small_hardware(**changes: Any) -> Hardware:
    numbers = {
        name: {int: 10 + at, float: 1.5 + at, bool: True}[hint]
        for at, (name, hint) in enumerate(get_type_hints(Hardware).items())
        if hint in (int, float, bool)
    }
    words: dict[str, Any] = {
        "name": "machine",
        "description": "made up",
        "flops_per_s": {"fp32": 1e12, "bf16": 2e12},
        "fault_eviction": "serial",
        "eviction_order": "access",
        "sources": {"device_bytes": Source("nowhere", True)},
    }
    return Hardware(**(numbers | words | changes))


def small_policy(**changes: Any) -> ResolvedPolicy:
    policy = resolve(load_policy("managed"), load_hardware("h200-pcie"), {})
    return dataclasses.replace(policy, **changes)


def key_of(
    trace: Trace | None = None,
    hardware: Hardware | None = None,
    policy: ResolvedPolicy | None = None,
    planner: str = "planned",
    window: int = 8,
) -> str:
    return plan_key(
        trace or small_trace(),
        hardware or small_hardware(),
        policy or small_policy(),
        planner,
        window=window,
    )


def other(value: Any) -> Any:
    """A different value of the same type."""
    if isinstance(value, np.ndarray):
        changed = value.copy()
        changed[-1] = not changed[-1] if value.dtype == bool else changed[-1] + 1
        return changed
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return value + "'"
    if isinstance(value, tuple):
        return tuple(map(other, value)) or ("numba",)
    if value is None:
        return 1
    raise AssertionError(f"give {value!r} another value")


def test_a_key_is_sha256_in_hexadecimal() -> None:
    assert len(key_of()) == 64
    assert int(key_of(), 16) > 0
    assert key_of() == key_of()


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Trace)])
def test_the_key_depends_on_numbers_of_the_trace_and_not_on_names(field: str) -> None:
    value = getattr(small_trace(), field)
    changed = {"batch": 9} if field == "metadata" else other(value)
    differs = key_of(small_trace(**{field: changed})) != key_of()
    assert differs == isinstance(value, np.ndarray)


def test_the_key_tells_columns_apart() -> None:
    timed, swapped = small_trace(), small_trace()
    swapped = dataclasses.replace(
        swapped, first_phase=swapped.last_phase, last_phase=swapped.first_phase
    )
    assert key_of(timed) != key_of(swapped)
    assert key_of(timed) != key_of(small_trace(duration_s=None))


def test_the_key_does_not_depend_on_byte_order() -> None:
    columns = {
        field.name: column.astype(column.dtype.newbyteorder(">"))
        for field in dataclasses.fields(Trace)
        if isinstance(column := getattr(small_trace(), field.name), np.ndarray)
    }
    assert key_of(small_trace(**columns)) == key_of()


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Hardware)])
def test_the_key_depends_on_numbers_of_the_machine_and_not_on_names(field: str) -> None:
    value = getattr(small_hardware(), field)
    changed = {
        "flops_per_s": {"fp32": 1e12, "bf16": 3e12},
        "fault_eviction": "overlapped",
        "eviction_order": "migration",
        "sources": {},
    }
    changed_value = changed[field] if field in changed else other(value)
    differs = key_of(hardware=small_hardware(**{field: changed_value})) != key_of()
    assert differs == (field not in ("name", "description", "sources"))


def test_the_key_does_not_depend_on_notation() -> None:
    whole = small_hardware(memory_bytes_per_s=2e12)
    assert key_of(hardware=whole) == key_of(hardware=small_hardware(memory_bytes_per_s=2 * 10**12))
    reordered = small_hardware(flops_per_s={"bf16": 2e12, "fp32": 1e12})
    assert key_of(hardware=reordered) == key_of()


@pytest.mark.parametrize(
    "field", [field.name for field in dataclasses.fields(ResolvedPolicy) if field.name != "rules"]
)
def test_the_key_depends_on_a_policy_but_for_its_words(field: str) -> None:
    changed = other(getattr(small_policy(), field))
    assert (key_of(policy=small_policy(**{field: changed})) != key_of()) == (
        field not in ("name", "budget_reason", "reasons")
    )


@pytest.mark.slow
@pytest.mark.parametrize("tensor_class", range(6))
def test_the_key_depends_on_every_rule(tensor_class: int) -> None:
    rules = small_policy().rules
    for name in type(rules[tensor_class]).model_fields:
        value = getattr(rules[tensor_class], name)
        rule = rules[tensor_class].model_copy(update={name: other(value)})
        changed = (*rules[:tensor_class], rule, *rules[tensor_class + 1 :])
        assert key_of(policy=small_policy(rules=changed)) != key_of(), name


def test_the_key_depends_on_planner_and_window() -> None:
    assert len({key_of(), key_of(planner="oracle"), key_of(window=4)}) == 3


def test_the_key_depends_on_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key_of()
    monkeypatch.setattr("umem.pages.plan.plan_files.__version__", "0.0.1")
    assert key_of() != before


PREPARED = f"""
import runpy, sys
sys.path.append({str(Path(__file__).with_name("support"))!r})
case = runpy.run_path({str(Path(__file__))!r}, run_name="case")
"""


@pytest.mark.slow
def test_keys_agree_across_processes() -> None:
    code = PREPARED + "print(case['key_of']())"
    for seed in ("1", "2"):
        found = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert found.stdout.strip() == key_of()


# ---------------------------------------------------------------------------------- store


def test_a_stored_plan_is_found_by_its_key(tmp_path: Path) -> None:
    folder, trace, key = tmp_path / "plans", small_trace(), key_of()
    assert stored_plan(folder, key, trace) is None
    path = store_plan(folder, key, small_schedule())
    assert path == folder / f"{key}.npz"
    found = stored_plan(folder, key, trace)
    assert found is not None
    assert_same(small_schedule(), found)
    assert stored_plan(folder, key_of(planner="oracle"), trace) is None


def test_a_plan_under_the_key_of_another_is_refused(tmp_path: Path) -> None:
    path = store_plan(tmp_path, KEY, small_schedule())
    path.rename(tmp_path / f"{'f' * 64}.npz")
    with pytest.raises(PlanError, match=r"planned for another trace.*; delete the file to plan"):
        stored_plan(tmp_path, "f" * 64, small_trace())


@pytest.mark.parametrize("key", ["", "../" * 22, "A" * 64, "a" * 63, "a" * 64 + "\n"])
def test_a_key_cannot_leave_the_folder(tmp_path: Path, key: str) -> None:
    with pytest.raises(PlanError, match="give the 64 hexadecimal digits"):
        store_plan(tmp_path, key, small_schedule())
    with pytest.raises(PlanError, match="give the 64 hexadecimal digits"):
        stored_plan(tmp_path, key, small_trace())
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PlanError, match=r"file/0123.*: cannot be written"):
        store_plan(tmp_path / "file", KEY, small_schedule())


# Each process stores a plan of its own kind under one key, over and over, and reads it between.
WRITER = (
    PREPARED
    + """
import numpy as np
folder, kind = sys.argv[1], int(sys.argv[2])
schedule = case["small_schedule"](
    planner=f"planner{kind}",
    hint_phase=np.zeros(3000 * (kind + 1), np.int32),
    hint_op=np.full(3000 * (kind + 1), kind, np.uint8),
    hint_tensor=np.zeros(3000 * (kind + 1), np.int32),
)
for _ in range(30):
    case["store_plan"](folder, case["KEY"], schedule)
    found = case["stored_plan"](folder, case["KEY"], case["small_trace"]())
    seen = int(found.planner.removeprefix("planner"))
    assert found.hint_count == 3000 * (seen + 1)
    assert (found.hint_op == seen).all()
"""
)


@pytest.mark.slow
def test_processes_may_store_the_same_plan_at_once(tmp_path: Path) -> None:
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(kind)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for kind in range(3)
    ]
    failures = [writer.communicate()[1] for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0, 0], failures
    assert [path.name for path in tmp_path.iterdir()] == [f"{KEY}.npz"]


# ----------------------------------------------------------------------------------- docs


def test_the_documentation_names_every_key() -> None:
    text = DOCS.read_text(encoding="utf-8")
    keys = (*PlanHeader.model_fields, *PLAN_COLUMNS)
    assert [key for key in keys if f"| `{key}` |" not in text] == []
