"""The guard's loader, and what torch's errors become of the allocator's."""

from __future__ import annotations

import importlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from other_process import run_forked

from umem.runtime import native_guard
from umem.runtime.native_guard import guard_problem, guard_remedy

ROOT = Path(__file__).resolve().parent.parent

# An allocator as the native library has one: its types are hidden, its functions are not.
ALLOCATOR = """
#include "core/types.hpp"
#define VISIBLE extern "C" __attribute__((visibility("default")))
static void* freed = nullptr;
VISIBLE void* allocate(long bytes, int, void*) {
  if (bytes == 1) throw umem::OutOfMemory("CUDA out of memory. Tried to allocate %s");
  if (bytes == 2) throw umem::PauseError("paused");
  return reinterpret_cast<void*>(bytes);
}
VISIBLE void release(void* address, long, int, void*) { freed = address; }
VISIBLE void* last_freed() { return freed; }
"""


@pytest.fixture
def fresh_loader() -> Iterator[None]:
    """The loader as in a new process, before and after the test."""
    native_guard._load.cache_clear()
    yield
    native_guard._load.cache_clear()


def test_it_is_built_for_the_torch_that_runs() -> None:
    guard = native_guard.native_guard()
    assert guard is not None, guard_problem()
    major, minor = torch.__version__.split(".")[:2]
    assert guard.__name__ == f"umem.runtime._guard_torch{major}_{minor}"
    assert guard_problem() == ""


@pytest.mark.usefixtures("fresh_loader")
def test_another_torch_has_no_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0+cu130")
    assert native_guard.native_guard() is None
    assert "2.99" in guard_problem()


@pytest.mark.parametrize(
    ("fails", "words"),
    [
        (ImportError("undefined symbol: _ZN3c10"), "undefined symbol: _ZN3c10"),
        (RuntimeError("the key is taken"), "the key is taken"),
        (None, "does not call"),
    ],
)
@pytest.mark.usefixtures("fresh_loader")
def test_a_guard_that_does_not_work_is_refused(
    monkeypatch: pytest.MonkeyPatch, fails: Exception | None, words: str
) -> None:
    def load(name: str) -> SimpleNamespace:
        if fails is not None:
            raise fails
        return SimpleNamespace(probe=lambda: False)

    monkeypatch.setattr(importlib, "import_module", load)
    assert native_guard.native_guard() is None
    assert words in guard_problem()
    assert torch.__version__ in guard_problem()


@pytest.mark.parametrize(("cuda", "build"), [("12.6", "UMEM_CUDA=12 pip"), (None, "pip")])
def test_the_remedy_builds_for_torchs_cuda(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, build: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert guard_remedy().startswith(f"{build} install --force-reinstall --no-deps ")


# In another process: torch may allocate through the guard in this one.
ALLOCATE = """
import ctypes, sys
import torch
from umem.runtime.native_guard import guard_problem, native_guard

allocator, guard = ctypes.CDLL(sys.argv[1]), native_guard()
assert guard is not None, guard_problem()
functions = allocator.allocate, allocator.release
guard.set_allocator(*(ctypes.cast(it, ctypes.c_void_p).value for it in functions))
assert guard.allocate(4096) == 4096
for size_bytes in (1, 2):
    try:
        guard.allocate(size_bytes)
    except RuntimeError as error:
        print(f"{type(error).__module__}.{type(error).__name__}: {error}")
release = ctypes.CDLL(guard.__file__).umem_guard_free
release(ctypes.c_void_p(1 << 40), ctypes.c_ssize_t(8), 0, None)
allocator.last_freed.restype = ctypes.c_void_p
assert allocator.last_freed() == 1 << 40
"""


@pytest.mark.slow
def test_out_of_memory_is_torchs_own_error(tmp_path: Path) -> None:
    """Other errors are not: a program answers an out-of-memory with a smaller batch."""
    source, library = tmp_path / "allocator.cpp", tmp_path / "allocator.so"
    source.write_text(ALLOCATOR)
    options = ["-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", f"-I{ROOT / 'allocators'}"]
    compiler = os.environ.get("CXX", "c++")
    subprocess.run([compiler, *options, str(source), "-o", str(library)], check=True)
    assert run_forked(ALLOCATE, str(library)).splitlines() == [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate %s",
        "builtins.RuntimeError: paused",
    ]


# What another library may have done before.
OBSTACLES = {
    "multiple backend fallbacks": """
library = torch.library.Library("_", "IMPL")
library.fallback(lambda op, *args, **kwargs: op(*args, **kwargs), "DeferredInit")
""",
    "does not call": """
torch._C._dispatch_tls_set_dispatch_key_excluded("DeferredInit", True)
""",
}

LOAD = """
from umem.runtime.native_guard import guard_problem, native_guard
assert native_guard() is None
print(guard_problem())
from umem.runtime.guard import Guard, are_plain, guard_of, has_guard
weight = torch.ones(2)
print(has_guard(), are_plain([weight]), guard_of(weight), weight.sum().item())
"""


@pytest.mark.slow
@pytest.mark.parametrize("words", OBSTACLES)
def test_a_key_that_is_taken_or_not_asked_is_no_guard(words: str) -> None:
    code = f"import torch\n{OBSTACLES[words]}\n{LOAD}"
    problem, state = run_forked(code).splitlines()
    assert words in problem
    assert torch.__version__ in problem
    assert state == "False False None 2.0"
