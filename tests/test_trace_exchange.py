"""The exchange format: small documents, and the published traces where they are available."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from umem.core.classes import TensorClass
from umem.core.errors import TraceError
from umem.trace import Access, PhaseKind, Trace
from umem.trace.file import load_trace, save_trace

READ, WRITE = int(Access.READ), int(Access.WRITE)


def exchange(**changes: Any) -> dict[str, Any]:
    """A document: weights 7, activations 3, gradients -1, and a tensor 100 that nothing uses."""
    document: dict[str, Any] = {
        "format": "umem-trace/1",
        "name": "tiny",
        "source": "by hand",
        "published": {"unit": "ms per iteration", "ideal": 3.5, "runs": 2},
        "tensors": [
            {"id": 7, "bytes": 1000, "class": "weights", "persistent": True},
            {"id": 100, "bytes": 5, "class": "other", "persistent": False},
            {"id": 3, "bytes": 200, "class": "activations", "persistent": False},
            {"id": -1, "bytes": 30, "class": "gradients", "persistent": False},
            {"id": 8, "bytes": 4, "class": "optimizer_state", "persistent": True},
        ],
        "phases": [
            {"name": "start", "duration_us": 0, "reads": [], "writes": []},
            {"name": "forward", "duration_us": 1500.5, "reads": [7], "writes": [3]},
            {"name": "backward", "duration_us": 2000, "reads": [3, 7], "writes": [-1]},
            {"name": "step", "duration_us": 1, "reads": [-1, 7], "writes": [7]},
        ],
    }
    return document | changes


def loaded(folder: Path, document: dict[str, Any]) -> Trace:
    path = folder / "doc.json"
    path.write_text(json.dumps(document))
    return load_trace(path)


def accesses(trace: Trace, phase: int) -> dict[str, int]:
    uses = slice(trace.access_start[phase], trace.access_start[phase + 1])
    names = [trace.tensor_names[tensor] for tensor in trace.access_tensor[uses]]
    return dict(zip(names, trace.access_mode[uses].tolist(), strict=True))


def test_a_document_becomes_a_trace(tmp_path: Path) -> None:
    trace = loaded(tmp_path, exchange())

    assert (trace.name, trace.source) == ("tiny", "by hand")
    assert trace.tensor_names == ("tensor 7", "tensor 3", "tensor -1", "tensor 8")
    assert trace.tensor_bytes.tolist() == [1000, 200, 30, 4]
    assert trace.tensor_class.tolist() == [
        TensorClass.WEIGHTS.number,
        TensorClass.ACTIVATIONS.number,
        TensorClass.GRADIENTS.number,
        TensorClass.OPTIMIZER_STATE.number,
    ]
    assert trace.persistent.tolist() == [True, False, False, True]
    assert trace.first_phase.tolist() == [0, 1, 2, 0]
    assert trace.last_phase.tolist() == [3, 2, 3, 3]
    assert trace.phase_names == ("start", "forward", "backward", "step")
    assert set(trace.phase_kind.tolist()) == {int(PhaseKind.KERNEL)}
    assert trace.flops.tolist() == [0, 0, 0, 0]
    assert trace.memory_bytes.tolist() == [0, 1200, 1230, 1030]
    assert trace.duration_s is not None
    assert trace.duration_s.tolist() == [0, 0.0015005, 0.002, 1e-6]
    assert [accesses(trace, phase) for phase in range(4)] == [
        {},
        {"tensor 7": READ, "tensor 3": WRITE},
        {"tensor 3": READ, "tensor 7": READ, "tensor -1": WRITE},
        {"tensor -1": READ, "tensor 7": READ | WRITE},
    ]
    assert dict(trace.metadata) == {
        "published_unit": "ms per iteration",
        "published_ideal": 3.5,
        "published_runs": 2,
        "dropped_tensors": 1,
    }


def test_optional_keys_may_be_missing(tmp_path: Path) -> None:
    document = exchange()
    for key in ("name", "source", "published"):
        del document[key]
    del document["tensors"][1]
    trace = loaded(tmp_path, document)
    assert (trace.name, trace.source, dict(trace.metadata)) == ("doc", "umem-trace/1", {})


def test_an_imported_trace_can_be_saved(tmp_path: Path) -> None:
    trace = loaded(tmp_path, exchange())
    save_trace(trace, tmp_path / "own.npz")
    back = load_trace(tmp_path / "own.npz")
    assert back.tensor_names == trace.tensor_names
    assert back.metadata == trace.metadata
    assert np.array_equal(back.access_tensor, trace.access_tensor)


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (("tensors", 2, "id"), 7, r"tensors\[2\]\.id: 7 is also the id of tensors\[0\]"),
        (("tensors", 2, "id"), True, r"tensors\[2\]\.id: true: .* integer"),
        (("tensors", 2, "id"), 2**63, r"tensors\[2\]\.id: 9223372036854775808: .* less than"),
        (("tensors", 2, "bytes"), 0, r"tensors\[2\]\.bytes: 0: .* greater than or equal to 1"),
        (
            ("tensors", 2, "bytes"),
            2**50 + 1,
            r"tensors\[2\]\.bytes: \d+: .* equal to 1125899906842624",
        ),
        (("tensors", 2, "bytes"), 1.5, r"tensors\[2\]\.bytes: 1.5: .* integer"),
        (("tensors", 2, "bytes"), True, r"tensors\[2\]\.bytes: true: .* integer"),
        (("tensors", 2, "class"), "weight", r"tensors\[2\]\.class: 'weight': .* 'frozen_weights'"),
        (
            ("tensors", 2, "class"),
            ["weights"],
            r"tensors\[2\]\.class: \['weights'\]: .* 'frozen_weights'",
        ),
        (
            ("tensors", 2, "persistent"),
            1,
            r"tensors\[2\]\.persistent: 1: Input should be a valid boolean",
        ),
        (("tensors", 2, "size"), 1, r"tensors\[2\]\.size: unknown key.* id, bytes, class, persis"),
        (("tensors", 2), 5, r"tensors\[2\]: 5 is not .* id, bytes, class, persistent"),
        (("tensors",), {}, "tensors: {}: .* array"),
        (("tensors",), [], r"phases\[1\]\.reads\[0\]: tensor 7 is not among the tensors"),
        (("phases",), [], "phase_names: 0 entries; a trace has from 1"),
        (("phases", 3), [], r"phases\[3\]: \[\] is not .* name, duration_us, reads, writes"),
        (("phases", 3, "name"), 5, r"phases\[3\]\.name: 5: Input should be a valid string"),
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
        (("phases", 3, "duration_us"), None, r"phases\[3\]\.duration_us: null: .* number"),
        (("phases", 3, "duration_us"), True, r"phases\[3\]\.duration_us: true: .* number"),
        (("phases", 3, "reads", 0), 99, r"phases\[3\]\.reads\[0\]: tensor 99 is not among the"),
        (("phases", 2, "reads", 1), 7.0, r"phases\[2\]\.reads\[1\]: 7.0: .* integer"),
        (("phases", 2, "writes"), 7, r"phases\[2\]\.writes: 7: .* array"),
        (("phases", 2, "write"), [], r"phases\[2\]\.write: unknown key"),
        (("published",), [], r"published: \[\]: .* object"),
        (("published", "ideal"), None, "metadata.published_ideal: a NoneType; give text"),
        (("published", "ideal"), True, "metadata.published_ideal: a bool; give text"),
        (("name",), 5, "name: 5: Input should be a valid string"),
    ],
)
def test_a_bad_document_names_file_and_place(
    tmp_path: Path, where: tuple[Any, ...], value: Any, message: str
) -> None:
    document = exchange()
    inner: Any = document
    for step in where[:-1]:
        inner = inner[step]
    inner[where[-1]] = value
    with pytest.raises(TraceError, match=rf"/doc\.json: {message}") as info:
        loaded(tmp_path, document)
    assert len(str(info.value)) < 500


def test_arguments_named_twice_and_keys_of_other_tools_are_read(tmp_path: Path) -> None:
    document = exchange(title="x")
    document["phases"][2] |= {"reads": [3, 7, 3], "writes": [-1, -1]}
    assert accesses(loaded(tmp_path, document), 2) == {
        "tensor 3": READ,
        "tensor 7": READ,
        "tensor -1": WRITE,
    }


def test_infinite_durations_and_figures_are_refused(tmp_path: Path) -> None:
    for old, message in (
        ("1500.5", r"phases\[1\]\.duration_us: inf: .* finite"),
        ("3.5", "metadata.published_ideal: inf; give a finite number"),
    ):
        path = tmp_path / "doc.json"
        path.write_text(json.dumps(exchange()).replace(old, "1e999"))
        with pytest.raises(TraceError, match=message):
            load_trace(path)


def test_a_document_without_used_tensors_is_refused(tmp_path: Path) -> None:
    document = exchange(
        tensors=[{"id": 1, "bytes": 1, "class": "other", "persistent": False}],
        phases=[{"name": "p", "duration_us": 1, "reads": [], "writes": []}],
    )
    with pytest.raises(TraceError, match="tensor_names: 0 entries; a trace has from 1"):
        loaded(tmp_path, document)


# ------------------------------------------------------------------------ published traces


def published(name: str) -> Path:
    usual = Path(__file__).resolve().parents[2] / "shared" / "traces"
    path = Path(os.environ.get("UMEM_SHARED_TRACES", usual)) / f"{name}.json.gz"
    if not path.is_file():
        pytest.skip(f"there is no {path}; UMEM_SHARED_TRACES can name the folder")
    return path


@pytest.mark.parametrize(
    ("name", "tensors", "phases"), [("bert-base-b256", 1463, 1369), ("vit-b768", 1563, 1489)]
)
def test_a_published_trace_loads_and_its_phases_take_the_published_time(
    tmp_path: Path, name: str, tensors: int, phases: int
) -> None:
    trace = load_trace(published(name))

    assert trace.name == name
    assert (trace.tensor_count, trace.phase_count) == (tensors, phases)
    assert trace.metadata["published_unit"] == "ms per iteration"
    assert trace.duration_s is not None
    assert trace.duration_s.sum() * 1e3 == pytest.approx(
        float(trace.metadata["published_ideal"]), rel=1e-5
    )
    save_trace(trace, tmp_path / "own.npz")
    assert np.array_equal(load_trace(tmp_path / "own.npz").access_mode, trace.access_mode)
