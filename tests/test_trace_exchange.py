"""The exchange format: small documents, and the published traces where they are available."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_files import exchange
from traced_memory import accesses

from umem.core.classes import TensorClass
from umem.trace import Access, PhaseKind, Trace, load_trace, save_trace

READ, WRITE = int(Access.READ), int(Access.WRITE)


def loaded(folder: Path, document: dict[str, Any]) -> Trace:
    path = folder / "doc.json"
    path.write_text(json.dumps(document))
    return load_trace(path)


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


def test_arguments_named_twice_and_keys_of_other_tools_are_read(tmp_path: Path) -> None:
    document = exchange(title="x")
    document["phases"][2] |= {"reads": [3, 7, 3], "writes": [-1, -1]}
    assert accesses(loaded(tmp_path, document), 2) == {
        "tensor 3": READ,
        "tensor 7": READ,
        "tensor -1": WRITE,
    }


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
