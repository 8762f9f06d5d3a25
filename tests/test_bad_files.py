"""Files that a reader refuses: each error names the file, the place in it and the remedy."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from archives import rewrite
from small_files import (
    exchange,
    small_run,
    small_trace,
)

from umem.core.errors import HardwareError, PolicyError, TraceError, UmemError
from umem.hardware import load_hardware
from umem.policy import load_policy
from umem.telemetry import load_run
from umem.trace.check import DTYPES
from umem.trace.file import TraceHeader, load_trace, save_trace

GONE = object()
INF, NAN = float("inf"), float("nan")


class Reader(NamedTuple):
    """A reader, and how a file for it is written with something wrong."""

    file: str
    write: Callable[[Path, Any], object]
    read: Callable[[Path], object]
    error: type[UmemError]


def put(where: tuple[Any, ...], value: Any) -> Callable[[Any], None]:
    """Change the value at a path of keys; GONE removes it."""

    def change(content: Any) -> None:
        *outer, last = where
        for step in outer:
            content = content[step]
        if value is GONE:
            del content[last]
        else:
            content[last] = value

    return change


def apply(change: Any, content: Any) -> Any:
    """Call a change; keys that are given instead are put over the content's."""
    if callable(change):
        change(content)
    else:
        content.update(change)
    return content


def archive(save: Callable[[Path], None]) -> Callable[[Path, Any], None]:
    def write(path: Path, change: Any) -> None:
        save(path)
        rewrite(path, lambda content: apply(change, content))

    return write


def document(make: Callable[[], dict[str, Any]]) -> Callable[[Path, Any], None]:
    """Write JSON, with numbers beyond the finite ones in place of NaN, which JSON lacks."""

    def write(path: Path, change: Any) -> None:
        path.write_text(json.dumps(apply(change, make())).replace("NaN", "1e999"))

    return write


def text(path: Path, content: str) -> None:
    path.write_text(content, encoding="utf-8")


READERS = {
    "policy": Reader("mine.yaml", text, load_policy, PolicyError),
    "hardware": Reader("mine.yaml", text, load_hardware, HardwareError),
    "trace": Reader(
        "t.npz", archive(lambda path: save_trace(small_trace(), path)), load_trace, TraceError
    ),
    "document": Reader("doc.json", document(exchange), load_trace, TraceError),
    "profile": Reader("run.json", document(small_run), load_run, UmemError),
}

POLICIES = [
    # unknown keys, with the nearest one
    ("nam: x\n", 1, 1, "nam", "unknown key, did you mean 'name'? Valid keys: name, "),
    ("classes:\n  weigths: {}\n", 2, 3, "classes.weigths", "did you mean 'weights'?"),
    ("limits:\n  managed: 1GiB\n", 2, 3, "limits.managed", "'managed_bytes'?"),
    ("managed_bytes: 1GiB\n", 1, 1, "managed_bytes", "did you mean 'limits.managed_bytes'?"),
    ("min_bytes: 1MiB\n", 1, 1, "min_bytes", "did you mean 'defaults.min_bytes'?"),
    ("activations: {}\n", 1, 1, "activations", "did you mean 'classes.activations'?"),
    ("classes:\n  share: [numba]\n", 2, 3, "classes.share", "did you mean 'share'?"),
    ("zzz: 1\n", 1, 1, "zzz", "unknown key. Valid keys: name, description, extends"),
    ("<<: {name: x}\n", 1, 1, "<<", "unknown key."),
    ("caching: false\n", 1, 1, "caching", "unknown key"),
    # bad values
    ("defaults:\n  kind: manged\n", 2, 3, "defaults.kind", "did you mean 'managed'?"),
    ("defaults: {kind: 5}\n", 1, 12, "defaults.kind", "should be 'auto', 'managed', 'device'"),
    ("defaults: {placement: gpu}", 1, 12, "defaults.placement", "'device', 'host' or 'any'"),
    ("classes: {other: {eviction: LRU}}", 1, 19, "classes.other.eviction", "mean 'lru'?"),
    ("share: [cuppy]\n", 1, 1, "share[0]", "'numba' or 'cupy', did you mean 'cupy'?"),
    ("share: cupy\n", 1, 1, "share", "not a list: write one in brackets, such as ['cupy']"),
    ("share: [cupy, cupy]\n", 1, 1, "share", "named twice"),
    (
        "defaults: {read_mostly: yes}\n",
        1,
        12,
        "defaults.read_mostly",
        "'yes': Input should be a valid boolean",
    ),
    ("name: 5\n", 1, 1, "name", "5: Input should be a valid string"),
    ("extends: [sft]\n", 1, 1, "extends", "['sft']: Input should be a valid string"),
    ("extends: sfft\n", 1, 1, "extends", "did you mean 'sft'? Known: inference, lora"),
    ("extends: no.yaml\n", 1, 1, "extends", "there is no file"),
    ("limits: 5\n", 1, 1, "limits", "Valid keys: managed_bytes, system_headroom_bytes"),
    ("defaults:\nname: x\n", 1, 1, "defaults", "null is not a mapping"),
    ("classes:\n  other:\n", 2, 3, "classes.other", "Valid keys: kind, placement"),
    # sizes
    ("defaults: {min_bytes: 16G}\n", 1, 12, "defaults.min_bytes", "16GiB or 16GB"),
    ("defaults: {min_bytes: 1:30}\n", 1, 12, "defaults.min_bytes", "'1:30' is not a size"),
    ("defaults: {min_bytes: 1.5}\n", 1, 12, "defaults.min_bytes", "1.5 is not a size"),
    ("device_budget: 120%\n", 1, 1, "device_budget", "at most 100"),
    ("device_budget: 20\n", 1, 1, "device_budget", "20 has no unit: give one, such as '20GiB'"),
    ("limits: {managed_bytes: 16}\n", 1, 10, "limits.managed_bytes", "such as '16GiB'"),
    ("device_budget: 0\n", 1, 1, "device_budget", "for no budget, give null"),
    ("device_budget: true\n", 1, 1, "device_budget", "is not a size"),
    (f"device_budget: {'1' * 6000}\n", 1, 1, "device_budget", "is not a size"),
    # YAML
    ("a: 1\nb: 2\na: 3\n", 3, 1, "a", "duplicate key: it is also on line 1"),
    ("limits:\n\tx: 1\n", 2, 1, "", "indent with spaces"),
    ("- sft\n", 1, 1, "", "not a mapping: write keys and values"),
    ("", 1, 1, "", "the file is empty"),
    ("# nothing but a comment\n", 1, 1, "", "the file is empty"),
    ("name: a: b\n", 1, 8, "", "not valid YAML"),
    ("name: 'x\n", 2, 1, "", "unexpected end of stream"),
    ("a: &x [1]\nb: *x\n", 2, 4, "", "neither aliases nor tags are supported"),
    ("a: &x [*x]\n", 1, 8, "", "neither aliases nor tags are supported"),
    ("a: 1\n---\nb: 1\n", 2, 1, "", "found another document"),
    ("!!python/object:os.system {}\n", 1, 1, "", "neither aliases nor tags are supported"),
    ("1: x\n", 1, 1, "1", "the key 1 is not text"),
    ("? [a]\n: b\n", 1, 3, "['a']", "the key ['a'] is not text"),
    ("name: x\ndescription: \x01\n", 2, 14, "", "a control character"),
    ("? " * 40, 1, 80, "None", "the key null is not text"),
]
"""Text, line and column of the problem, its key, and what is said of it."""

PROFILES = [
    ("nam: x\n", "2:1: nam", "unknown key, did you mean 'name'? Valid keys: name, "),
    ("value: 5\n", "2:1: value", "unknown key. Valid keys: name, "),
    ("bf16: {}\n", "2:1: bf16", "did you mean 'flops_per_s.bf16'?"),
    ("to_device: {}\n", "2:1: to_device", "did you mean 'to_device_bytes_per_s'?"),
    ("call_s: {vlue: 1 us, source: x}\n", "2:10: call_s.vlue", "did you mean 'value'?"),
    ("call_s: {vlue: 1 us, source: x}\n", "2:1: call_s.value", "missing: add the key"),
    ("flops_per_s: {bf61: {}}\n", "2:15: flops_per_s.bf61", "did you mean 'bf16'?"),
    (
        "flops_per_s: {fp8: 5}\n",
        "2:15: flops_per_s.fp8",
        "5 is not a figure with its source: write",
    ),
    (
        "flops_per_s: 5\n",
        "2:1: flops_per_s",
        "5 is not a mapping: write keys below it. Valid keys: fp32, tf32, fp16",
    ),
    (
        "call_s: 45 us\n",
        "2:1: call_s",
        "is not a figure with its source: write {value: 45 us, source",
    ),
    ("call_s:\n", "2:1: call_s", "null is not a figure with its source"),
    ("call_s: {value: 45 us}\n", "2:1: call_s.source", "neither source nor assumption"),
    (
        "call_s: {value: 45 us, source: a, assumption: b}\n",
        "2:24: call_s.source",
        "both source and assumption: keep the one that holds",
    ),
    ("call_s: {value: 1 us, source: ''}\n", "2:23: call_s.source", "empty: say where"),
    (
        "call_s: {value: 1 us, source: 5}\n",
        "2:23: call_s.source",
        "5: Input should be a valid string",
    ),
    (f"description: {'x' * 3000}\n", "2:1: description", "longer than 2000 characters"),
    (
        "flops_per_s: {fp8: {value: 5 TFLOPS, source: x}}\n",
        "2:21: flops_per_s.fp8.value",
        "did you mean 'TFLOP/s'?",
    ),
]
"""Text below an ``extends``, the place of the problem with its key, and what is said of it."""

FIGURES = [
    ("call_s", "45", "45 is not a number and a unit: give one such as '45 us'"),
    ("call_s", "-45 us", "not a number and a unit"),
    ("call_s", "45 μs", "an unknown unit"),
    ("call_s", "45 US", "did you mean 'us'?"),
    ("call_s", "2 s", "give 0 s to 1 s"),
    ("call_s", ".inf", "not a number and a unit"),
    ("call_s", "nan s", "not a number and a unit"),
    ("call_s", "1e3 us", "not a number and a unit"),
    ("call_s", f"{'9' * 500} us", "not a number and a unit"),
    ("link_bytes_per_s", "51 GB", "unknown unit 'GB', did you mean 'GB/s'?"),
    ("link_bytes_per_s", "0 GB/s", "give 1 MB/s to 1000 TB/s"),
    ("copy_slowdown_s_per_byte", "5 ms", "unknown unit 'ms': give one such as '5 ms/GiB'"),
    ("device_bytes", "40G", "'40G' could mean 40GiB or 40GB"),
    ("device_bytes", "0", "give 1 MiB to"),
    ("block_bytes", "3 MiB", "not a power of two"),
    ("ats", "yes", "'yes': Input should be a valid boolean"),
    ("faults_per_batch", "1.5", "1.5 is not a whole number from 1 to 65535"),
    ("faults_per_batch", "true", "true is not a whole number"),
    ("speculation_threshold", "0.51", "not a percentage"),
    ("fault_eviction", "seriel", "'serial' or 'overlapped', did you mean 'serial'?"),
    ("block_bytes", "32 KiB", "less than page_bytes: give at least 64 KiB"),
    ("link_bytes_per_s", "40 GB/s", "less than to_device_bytes_per_s: give at least 51 GB/s"),
]
"""Figure, its value in a profile, and what is said of it."""

TRACES = [
    (
        {"durations_s": np.zeros(3)},
        "'durations_s': unknown column, did .* 'duration_s'.* Valid columns: tensor_b",
    ),
    ({"name": 5}, "name: 5: Input should be a valid string"),
    ({"tensor_names": "abc"}, "tensor_names: 'abc': .* valid array"),
    ({"tensor_names": ["a", "b", 3]}, r"tensor_names\[2\]: 3: Input should be a valid string"),
    ({"tensor_bytes": [1, 1]}, "tensor_bytes: 2 entries; it takes 3"),
    ({"tensor_bytes": np.ones(3)}, "tensor_bytes: of float64; make it int64"),
    ({"tensor_class": [0, 1, 9]}, r"tensor_class\[2\]: 9 is not from 0 to 5"),
    ({"persistent": np.array([2, 0, 0], np.uint8).view(np.bool_)}, "persistent: .* 0 and 1"),
    ({"first_phase": np.zeros(3, ">i4")}, "first_phase: of >i4; make it int32"),
    ({"flops": [1.0, 0.0, INF]}, r"flops\[2\]: inf is not from 0"),
    ({"access_start": [0, 2, 4, 6]}, r"access_start\[3\]: 6; it is 5"),
    ({"access_start": [0, 2, 5]}, "access_start: 3 entries; it takes 4"),
    ({"access_tensor": [0, 1, 1, 99, 0]}, r"access_tensor\[3\]: 99 is not from 0 to 2"),
    ({"access_mode": [1, 2, 1, 2]}, "access_mode: 4 entries; it takes 5"),
    ({"metadata": []}, r"metadata: \[\]: .* object"),
    ({"metadata": {"a": [1]}}, "metadata.a: a list; give text or a number"),
    ({"metadata": {"\u202e": None}}, r"metadata.\\u202e: a NoneType"),
    *(
        (put((key,), GONE), f"{key}: missing")
        for key in sorted({*TraceHeader.model_fields, *DTYPES} - {"duration_s"})
    ),
]

DOCUMENTS: list[tuple[tuple[Any, ...], Any, str]] = [
    (("tensors", 2, "id"), 7, r"tensors\[2\]\.id: 7 is also the id of tensors\[0\]"),
    (("tensors", 2, "id"), True, r"tensors\[2\]\.id: true: .* integer"),
    (("tensors", 2, "id"), 2**63, r"tensors\[2\]\.id: 9223372036854775808: .* less than"),
    (("tensors", 2, "bytes"), 0, r"tensors\[2\]\.bytes: 0: .* greater than or equal to 1"),
    (("tensors", 2, "bytes"), 2**50 + 1, r"tensors\[2\]\.bytes: \d+: .* equal to 1125899906842624"),
    (("tensors", 2, "bytes"), True, r"tensors\[2\]\.bytes: true: .* integer"),
    (("tensors", 2, "class"), "weight", r"tensors\[2\]\.class: 'weight': .* 'frozen_weights'"),
    (
        ("tensors", 2, "persistent"),
        1,
        r"tensors\[2\]\.persistent: 1: Input should be a valid boolean",
    ),
    (("tensors", 2, "size"), 1, r"tensors\[2\]\.size: unknown key.* id, bytes, class, persis"),
    (("tensors", 2), 5, r"tensors\[2\]: 5 is not .* id, bytes, class, persistent"),
    (("tensors",), [], r"phases\[1\]\.reads\[0\]: tensor 7 is not among the tensors"),
    (("phases",), [], "phase_names: 0 entries; a trace has from 1"),
    (("phases", 3), [], r"phases\[3\]: \[\] is not .* name, duration_us, reads, writes"),
    (("phases", 3, "name"), "\x1b", r"phase_names\[3\]: holds the control character"),
    (
        ("phases", 3, "duration_us"),
        -1,
        r"phases\[3\]\.duration_us: -1: .* greater than or equal to 0",
    ),
    (
        ("phases", 3, "duration_us"),
        2e12,
        r"phases\[3\]\.duration_us: 2\S+: .* equal to 1000000000000",
    ),
    (("phases", 3, "duration_us"), 10**400, r"phases\[3\]\.duration_us: 1\S+: .* number"),
    (("phases", 3, "reads", 0), 99, r"phases\[3\]\.reads\[0\]: tensor 99 is not among the"),
    (("phases", 2, "reads", 1), 7.0, r"phases\[2\]\.reads\[1\]: 7.0: .* integer"),
    (("published",), [], r"published: \[\]: .* object"),
    (("published", "ideal"), True, "metadata.published_ideal: a bool; give text"),
    (("phases", 1, "duration_us"), NAN, r"phases\[1\]\.duration_us: inf: .* finite"),
    (("published", "ideal"), NAN, "metadata.published_ideal: inf; give a finite number"),
    (
        (),
        {
            "tensors": [{"id": 1, "bytes": 1, "class": "other", "persistent": False}],
            "phases": [{"name": "p", "duration_us": 1, "reads": [], "writes": []}],
        },
        "tensor_names: 0 entries; a trace has from 1",
    ),
]
"""Place in a document, what is put there, and what is said of it."""

RUNS = [
    ({"format": "umem-profile/9"}, "is of a newer umem"),
    ({"format": "umem-profile/4"}, "is of an older umem"),
    ({"format": "umem-plan/1"}, "is not a profile of umem"),
    (put(("steps",), GONE), "steps: missing"),
    ({"extra": 1}, "extra: unknown key"),
    ({"steps": []}, "steps: []: "),
    ({"dropped": -1}, "dropped: not all numbers are from 0"),
    ({"duration_s": True}, "duration_s: true: "),
    ({"step_start_s": [0]}, "step_start_s: 1 for 2 steps"),
    (put(("steps", 0, "source"), "guess"), "steps[0].source: 'guess': Input should be 'driver', "),
    (put(("steps", 0, "notes"), ["x", 5]), "steps[0].notes[1]: 5: Input should be a valid string"),
    (put(("steps", 0, "workload"), "\ud800"), "not valid JSON"),
    (put(("steps", 0, "ideal_s"), "1"), "steps[0].ideal_s: '1': "),
    (put(("steps", 0, "step_s"), NAN), "steps[0].step_s: "),
    (put(("steps", 0, "step_s"), 1e300), "steps: not all numbers are from 0"),
    (put(("steps", 0, "traffic", 0, "bytes"), 2**60), "steps: not all numbers are from 0"),
    (put(("steps", 1, "hints", "uses"), GONE), "steps[1].hints.uses: missing"),
    (put(("steps", 1, "hints", "refused"), 1.5), "steps[1].hints.refused: 1.5: "),
    (put(("steps", 1, "hints", "uses", 0, "op"), "guess"), "steps[1].hints.uses[0].op: 'guess': "),
    (
        put(("steps", 1, "traffic", 0, "tensor_class"), "weight"),
        "steps[1].traffic[0].tensor_class: 'weight': ",
    ),
    (put(("tensors", 0, "count"), -1), "tensors: not all numbers are from 0"),
    (put(("residency", "time_ns"), []), "residency: not 6 sizes for each"),
    (put(("residency", "resident_bytes", 0), [1]), "residency: not 6 sizes for each"),
]


def cases() -> Iterator[tuple[str, Any, str]]:
    """Reader, what is wrong, and a pattern of the error behind the file's path."""
    for text, line, column, key, says in POLICIES:
        place = f":{line}:{column}: " + (f"{key}: " if key else "")
        yield "policy", text, re.escape(place) + ".*" + re.escape(says)
    for text, place, says in PROFILES:
        yield (
            "hardware",
            "extends: h200\n" + text,
            re.escape(f":{place}: ") + ".*" + re.escape(says),
        )
    for figure, value, says in FIGURES:
        text = f"extends: h200\n{figure}: {{value: {value}, source: x}}\n"
        place = f":2:{len(figure) + 4}: {figure}.value: "
        yield "hardware", text, place + ".*" + re.escape(says)
    for where, value, says in DOCUMENTS:
        yield "document", put(where, value) if where else value, f": {says}"
    for change, says in TRACES:
        yield "trace", change, f": .*{says}"
    for change, says in RUNS:
        yield "profile", change, ": .*" + re.escape(says)


@pytest.mark.parametrize(("reader", "change", "says"), list(cases()))
def test_a_bad_file_has_its_place_named(
    reader: str, change: Any, says: str, tmp_path: Path
) -> None:
    file, write, read, error = READERS[reader]
    path = tmp_path / file
    write(path, change)
    with pytest.raises(error) as caught:
        read(path)
    lines = str(caught.value).splitlines()
    found = [line for line in lines if re.match(re.escape(str(path)) + says, line)]
    assert len(found) == 1, lines
    assert all(line.startswith(f"{path}:") and line.isprintable() for line in lines)
    assert all(len(line) < len(str(path)) + 900 for line in lines)
