"""umem.cuda without a GPU: the checks before any call into CUDA, and its errors."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from umem.core.errors import UnsupportedError
from umem.cuda import (
    Advice,
    Location,
    Range,
    advise,
    bindings,
    discard,
    managed_buffer,
    prefetch,
    unadvise,
)
from umem.cuda.targets import as_range, as_stream, whole_pages

PAGE = mmap.PAGESIZE
SOME_RANGE = Range(1 << 21, 1 << 21)


@dataclass(frozen=True)
class Array:
    """An array as CuPy and numba describe theirs, without memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    typestr: str = "<f4"
    address: int = 1 << 21

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "strides": self.strides,
            "typestr": self.typestr,
            "data": (self.address, False),
            "version": 3,
        }


class ProtocolStream:
    """A stream with CUDA's stream protocol, like those of cuda.core."""

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 0x5678


class TorchLikeStream:
    """A stream with torch's attribute."""

    cuda_stream = 0x1234


def run_python(code: str) -> str:
    """Run code in a fresh interpreter that sees no GPU; its standard output."""
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


class TestLocation:
    def test_equality_is_by_kind_and_number(self) -> None:
        assert Location.device(0) == Location.device(0)
        assert len({Location.device(0), Location.host_numa(0), Location.host()}) == 3

    @pytest.mark.parametrize(
        ("location", "text"),
        [
            (Location.device(1), "device 1"),
            (Location.host(), "host"),
            (Location.host_numa(2), "host NUMA node 2"),
        ],
    )
    def test_text(self, location: Location, text: str) -> None:
        assert str(location) == text


def on_a_gpu(*shape: int) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(*shape, device="cuda")


def test_targets() -> None:
    assert as_range((4096, 100)) == Range(4096, 100)
    assert as_range(Array((3, 4))) == Range(1 << 21, 48)
    assert as_range(Array((3, 4), strides=(16, 4))) == Range(1 << 21, 48)
    assert as_range(Array((), typestr="|u1")) == Range(1 << 21, 1)
    assert as_range(Array((1, 4), strides=(999, 4))) == Range(1 << 21, 16)


def test_streams() -> None:
    assert as_stream(7) == 7
    assert as_stream(ProtocolStream()) == 0x5678
    assert as_stream(TorchLikeStream()) == 0x1234


def test_whole_pages_shrinks_inwards() -> None:
    assert whole_pages(Range(PAGE, 2 * PAGE)) == Range(PAGE, 2 * PAGE)
    assert whole_pages(Range(PAGE + 1, 3 * PAGE)) == Range(2 * PAGE, 2 * PAGE)


HOST, NODE = Location.host(), Location.host_numa(0)


@pytest.mark.parametrize(
    ("error", "says", "call", "arguments"),
    [
        (ValueError, r"the host is Location\.host\(\)", Location.device, (-1,)),
        (ValueError, "host_numa", Location, ("host", 1)),
        (ValueError, "one of device, host", Location, ("gpu",)),
        *(
            (TypeError, "two integers", as_range, (pair,))
            for pair in [(4096,), (4096, 1.5), (True, 4096), ("a", 1)]
        ),
        *(
            (ValueError, r"cannot start|is empty", Range, pair)
            for pair in [(0, 10), (4096, 0), (4096, -1)]
        ),
        (ValueError, "not C-contiguous", as_range, (Array((3, 4), strides=(4, 12)),)),
        (ValueError, "empty", as_range, (Array((0, 4), address=0),)),
        (TypeError, r"on cpu.*tensor\.to\('cuda'\)", as_range, (torch.zeros(4),)),
        (TypeError, r"sparse_coo.*tensor\.values\(\)", as_range, (torch.eye(3).to_sparse(),)),
        (ValueError, "not contiguous", as_range, (on_a_gpu(4, 8).t(),)),
        (ValueError, "empty", as_range, (on_a_gpu(0, 8),)),
        (TypeError, "list names no device memory", as_range, ([4096, 100],)),
        *((TypeError, "stream must be", as_stream, (it,)) for it in [None, True, "0"]),
        (TypeError, "stream", prefetch, (SOME_RANGE, HOST)),
        *(
            (ValueError, "default stream", partial(discard, stream=it), (SOME_RANGE,))
            for it in (0, 1)
        ),
        (ValueError, "no whole page", partial(discard, stream=7), ((PAGE + 8, PAGE),)),
        (TypeError, r"Location\.device\(0\)", partial(prefetch, stream=7), (SOME_RANGE, -1)),
        (ValueError, "takes no location", advise, (SOME_RANGE, Advice.READ_MOSTLY, HOST)),
        (ValueError, "needs a location", advise, (SOME_RANGE, Advice.PREFERRED_LOCATION)),
        (ValueError, "takes no location", unadvise, (SOME_RANGE, Advice.PREFERRED_LOCATION, HOST)),
        (ValueError, "needs a location", unadvise, (SOME_RANGE, Advice.ACCESSED_BY)),
        (ValueError, "host as a whole", advise, (SOME_RANGE, Advice.ACCESSED_BY, NODE)),
        (TypeError, r"Advice\.READ_MOSTLY", advise, (SOME_RANGE, "ReadMostly")),
    ],
)
def test_a_bad_call_says_what_to_give(
    error: type[Exception], says: str, call: Callable[..., object], arguments: tuple[Any, ...]
) -> None:
    with pytest.raises(error, match=says):
        call(*arguments)


class TestManagedBuffer:
    """Of cuda.core, which makes one without a GPU; CUDA's answer for the type is a stand-in."""

    @pytest.fixture(autouse=True)
    def _managed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bindings, "memory_type", lambda _: "cudaMemoryTypeManaged")

    def test_it_is_of_the_range_and_keeps_the_target(self) -> None:
        core = pytest.importorskip("cuda.core", minversion="1.1")
        target = Array((3, 4))
        kept = sys.getrefcount(target)
        buffer = managed_buffer(target)
        assert isinstance(buffer, core.ManagedBuffer)
        assert (int(buffer.handle), buffer.size) == (1 << 21, 48)
        assert sys.getrefcount(target) > kept

    def test_without_cuda_core(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "cuda.core", None)
        with pytest.raises(UnsupportedError, match=r"cuda\.core 1\.1 or newer.*\[cuda13\]'"):
            managed_buffer(SOME_RANGE)

    def test_memory_of_the_system_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bindings, "memory_type", lambda _: "cudaMemoryTypeUnregistered")
        with pytest.raises(ValueError, match="not managed memory"):
            managed_buffer(SOME_RANGE)


class TestWithoutGpu:
    @pytest.mark.slow
    def test_the_error_says_what_is_missing(self) -> None:
        out = run_python(
            "from umem.cuda import Location, prefetch\n"
            "from umem.core.errors import UnsupportedError\n"
            "try:\n"
            "    prefetch((1 << 21, 4096), Location.host(), stream=0)\n"
            "except UnsupportedError as error:\n"
            "    print(error)\n"
        )
        assert "no NVIDIA driver" in out or "sees no GPU" in out

    def test_import_needs_neither_cuda_python_nor_torch(self) -> None:
        out = run_python(
            "import sys\n"
            "sys.modules['cuda'] = None\n"
            "from umem.cuda import Location, prefetch\n"
            "from umem.core.errors import NativeLibraryError\n"
            "try:\n"
            "    prefetch((1 << 21, 4096), Location.host(), stream=0)\n"
            "except NativeLibraryError as error:\n"
            "    print(error)\n"
            "print('torch' in sys.modules)\n"
        )
        message, torch_loaded = out.strip().splitlines()
        assert "[cuda13]'" in message
        assert torch_loaded == "False"

    def test_calls_have_the_form_that_cuda_python_takes(self) -> None:
        """Every operation calls CUDA, and the error names call, cause and range.

        cuda-python converts the arguments before it finds that there is no GPU. Only the
        driver's version is a stand-in: without it umem would attempt no call.
        """
        out = run_python(
            "import json\n"
            "from umem.cuda import Location, Range, bindings\n"
            "from umem.core.errors import CudaError\n"
            "bindings.driver_version = lambda: 13000\n"
            "range_ = Range(1 << 21, 4096)\n"
            "calls = [\n"
            "    lambda: bindings.prefetch(range_, Location.host(), 7),\n"
            "    lambda: bindings.advise(range_, 'SetReadMostly', Location.host()),\n"
            "    lambda: bindings.advise(range_, 'UnsetAccessedBy', Location.device(0)),\n"
            "    lambda: bindings.discard(range_, 7),\n"
            "]\n"
            "messages = []\n"
            "for call in calls:\n"
            "    try:\n"
            "        call()\n"
            "    except CudaError as error:\n"
            "        messages.append(str(error))\n"
            "print(json.dumps(messages))\n"
        )
        messages = json.loads(out)
        names = [message.split(" failed")[0].removesuffix("_v2") for message in messages]
        assert names[:3] == ["cudaMemPrefetchAsync", "cudaMemAdvise", "cudaMemAdvise"]
        # cuda-python 12 cannot discard, and says so before CUDA is asked.
        assert names[3:] in ([], ["cudaMemDiscardBatchAsync"])
        for message in messages:
            assert "4096 bytes at 0x200000" in message
            assert "cudaError" in message.split(":")[1]
