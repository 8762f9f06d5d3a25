"""Extensions in C++ use guarded tensors: in threads of their own, and past torch's operators."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from denied_pointers import can_deny_pointers
from once import made_once
from torch.utils.cpp_extension import include_paths, library_paths

pytestmark = pytest.mark.slow

EXTENSION = """
#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>
#include <exception>
#include <thread>

static at::Tensor doubled_in_thread(const at::Tensor& tensor) {
  at::Tensor result;
  std::exception_ptr error;
  std::thread thread([&] {
    try {
      result = tensor.mul(2);
    } catch (...) {
      error = std::current_exception();
    }
  });
  thread.join();
  if (error) std::rethrow_exception(error);
  return result;
}

PYBIND11_MODULE(uses, module) {
  module.def("doubled_with_lock", &doubled_in_thread);
  module.def("doubled", &doubled_in_thread, pybind11::call_guard<pybind11::gil_scoped_release>());
  module.def("read", [](const at::Tensor& tensor) { return *tensor.const_data_ptr<float>(); });
  module.def("write", [](const at::Tensor& tensor) { *tensor.mutable_data_ptr<float>() = 7; });
}
"""

RUN = """
import json, sys, traceback
import torch
sys.path[:0] = sys.argv[1:]
import uses
from late_updates import LateUpdate
from umem.runtime.guard import Guard, guard_of
from umem.runtime.unguarded import addresses_of

for name, program in json.load(sys.stdin).items():
    try:
        exec(program, globals() | {"tensor": torch.ones(4)})
    except BaseException:
        print(json.dumps([name, traceback.format_exc()]), flush=True)
    else:
        print(json.dumps([name, ""]), flush=True)
"""
"""Each line of output is a program and its error."""

PROGRAMS = {
    "the lock is kept, and there is nothing to wait for": """
guard = Guard(lambda: None)
guard.hold([tensor], ())
assert not guard.was_used
assert uses.doubled_with_lock(tensor).tolist() == [2.0] * 4
assert guard.was_used
assert guard_of(tensor) is guard
guard.release()
assert guard_of(tensor) is None
guard.hold([tensor], ())
assert not guard.was_used
""",
    "Python waits where there are no events": """
late = LateUpdate([tensor])
assert uses.doubled(tensor).tolist() == [4.0] * 4
assert late.uses == 1
""",
    "a thread that keeps the lock uses what is guarded no more": """
guard = Guard(lambda: None)
guard.hold([tensor])
view = tensor.detach()
guard.release()
assert uses.doubled_with_lock(view).tolist() == [2.0] * 4
""",
    "a pointer is denied until the update is waited for": """
late = LateUpdate([])
late.hold([tensor], [(0, 4096)])  # an event that nothing here waits for
address = addresses_of([tensor])
for use in (uses.read, uses.write):
    try:
        use(tensor)
    except RuntimeError as error:
        assert "umem.join()" in str(error) and "umem.hold(" in str(error), error
    else:
        raise AssertionError("a pointer was not denied")
assert late.uses == 0
assert tensor.data_ptr() == address[0]
assert late.uses == 1
uses.write(tensor)
assert uses.read(tensor) == 7
assert tensor.tolist() == [7.0, 1.0, 1.0, 1.0]
""",
}


def build(folder: Path) -> None:
    """Build the module `uses`."""
    source = folder / "uses.cpp"
    source.write_text(EXTENSION)
    headers = [sysconfig.get_path("include"), *include_paths()]
    (libraries, *_) = library_paths()
    options = ["-std=c++20", "-shared", "-fPIC", *(f"-isystem{it}" for it in headers)]
    options += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    links = [f"-L{libraries}", "-lc10", "-ltorch_cpu", "-ltorch_python"]
    module = folder / f"uses{sysconfig.get_config_var('EXT_SUFFIX')}"
    compiler = os.environ.get("CXX", "c++")
    subprocess.run([compiler, *options, str(source), *links, "-o", str(module)], check=True)


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The error of each program, in one other process, which is ended if it hangs."""

    def run(folder: Path) -> None:
        build(folder)
        known = {k: v for k, v in PROGRAMS.items() if "denied" not in k or can_deny_pointers()}
        with (
            (folder / "output").open("w") as output,
            contextlib.suppress(subprocess.TimeoutExpired),
        ):
            subprocess.run(
                [sys.executable, "-c", RUN, str(folder), str(Path(__file__).parent / "support")],
                input=json.dumps(known),
                stdout=output,
                text=True,
                check=False,
                timeout=120,
            )

    folder = made_once(tmp_path_factory, "extension", run)
    return dict(map(json.loads, (folder / "output").read_text().splitlines()))


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_extension_waits_or_is_refused(program: str, errors: dict[str, str]) -> None:
    if "denied" in program and not can_deny_pointers():
        pytest.skip(f"torch {torch.__version__} denies no pointers")
    assert errors.get(program, "the process hung, or was killed") == ""
