"""numba's and CuPy's arrays come from umem, are counted there, and go to torch without a copy."""

from __future__ import annotations

import importlib.util

import pytest
from gpu_jobs import Job, Start

MIB = 1 << 20
SHARED = """
extends: managed
name: shared
share: [numba, cupy]
"""


@pytest.fixture(scope="module")
def jobs(start: Start, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    for module, package in (("numba", "numba"), ("numba_cuda", "numba-cuda"), ("cupy", "cupy")):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{package} is not installed")
    policy = tmp_path_factory.mktemp("policy") / "shared.yaml"
    policy.write_text(SHARED)
    return {
        mode: start("sharing.py", mode, str(policy), UMEM_MANAGED_LIMIT="1GiB")
        for mode in ("memory", "kernels")
    }


@pytest.mark.parametrize("library", ["numba", "cupy"])
def test_arrays_come_from_umem(library: str, jobs: dict[str, Job]) -> None:
    facts = jobs["memory"].facts()[library]
    assert facts["known"], facts
    assert facts["block"] == [4 * MIB, "managed"]
    assert facts["allocated_bytes"] == 4 * MIB
    assert facts["left"] == [0, 0], "bytes and blocks after the array is gone"


@pytest.mark.parametrize("library", ["numba", "cupy"])
def test_nothing_is_copied(library: str, jobs: dict[str, Job]) -> None:
    facts = jobs["memory"].facts()[library]
    ways = [way for way in facts if way.startswith(("into", "out of"))]
    assert len(ways) >= 2
    assert {way: facts[way] for way in ways} == dict.fromkeys(ways, True)
    assert facts["torch's values"]
    assert facts["its values"]


@pytest.mark.parametrize("library", ["numba", "cupy"])
def test_the_cap_includes_them(library: str, jobs: dict[str, Job]) -> None:
    facts = jobs["memory"].facts()[library]
    assert facts.get("beyond the cap") == "MemoryError", facts
    assert facts["after it"]


def test_cupy_kernels(jobs: dict[str, Job]) -> None:
    assert jobs["kernels"].facts()["cupy"]


def test_numba_kernels(jobs: dict[str, Job]) -> None:
    facts = jobs["kernels"].facts()
    if reason := facts.get("numba has no compiler"):
        pytest.skip(f"numba compiles no kernels here: {reason}")
    assert facts["numba"] == [[2.0], [10.0]]
