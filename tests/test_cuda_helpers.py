"""umem.cuda without a GPU: the checks before any call into CUDA, and its errors."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from dataclasses import dataclass
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

    def test_minus_one_is_not_the_host(self) -> None:
        with pytest.raises(ValueError, match=r"the host is Location\.host\(\)"):
            Location.device(-1)

    def test_host_has_no_number(self) -> None:
        with pytest.raises(ValueError, match="host_numa"):
            Location("host", 1)

    def test_unknown_kind(self) -> None:
        with pytest.raises(ValueError, match="one of device, host"):
            Location("gpu")  # type: ignore[arg-type]


class TestTargets:
    def test_pair(self) -> None:
        assert as_range((4096, 100)) == Range(4096, 100)

    @pytest.mark.parametrize("pair", [(4096,), (4096, 1.5), (True, 4096), ("a", 1)])
    def test_other_tuples(self, pair: tuple[Any, ...]) -> None:
        with pytest.raises(TypeError, match="two integers"):
            as_range(pair)

    @pytest.mark.parametrize(("address", "size_bytes"), [(0, 10), (4096, 0), (4096, -1)])
    def test_null_and_empty_ranges(self, address: int, size_bytes: int) -> None:
        with pytest.raises(ValueError, match=r"cannot start|is empty"):
            Range(address, size_bytes)

    def test_array(self) -> None:
        assert as_range(Array((3, 4))) == Range(1 << 21, 48)
        assert as_range(Array((3, 4), strides=(16, 4))) == Range(1 << 21, 48)
        assert as_range(Array((), typestr="|u1")) == Range(1 << 21, 1)
        assert as_range(Array((1, 4), strides=(999, 4))) == Range(1 << 21, 16)

    def test_array_not_contiguous(self) -> None:
        with pytest.raises(ValueError, match="not C-contiguous"):
            as_range(Array((3, 4), strides=(4, 12)))

    def test_empty_array(self) -> None:
        with pytest.raises(ValueError, match="empty"):
            as_range(Array((0, 4), address=0))

    def test_cpu_tensor(self) -> None:
        with pytest.raises(TypeError, match=r"on cpu.*tensor\.to\('cuda'\)"):
            as_range(torch.zeros(4))

    def test_sparse_tensor(self) -> None:
        with pytest.raises(TypeError, match=r"sparse_coo.*tensor\.values\(\)"):
            as_range(torch.eye(3).to_sparse())

    def test_cuda_tensor_that_is_a_strided_view(self) -> None:
        with FakeTensorMode():
            view = torch.empty(4, 8, device="cuda").t()
        with pytest.raises(ValueError, match="not contiguous"):
            as_range(view)

    def test_empty_cuda_tensor(self) -> None:
        with FakeTensorMode():
            tensor = torch.empty(0, 8, device="cuda")
        with pytest.raises(ValueError, match="empty"):
            as_range(tensor)

    def test_anything_else(self) -> None:
        with pytest.raises(TypeError, match="list names no device memory"):
            as_range([4096, 100])


class TestStreams:
    def test_accepted(self) -> None:
        assert as_stream(7) == 7
        assert as_stream(ProtocolStream()) == 0x5678
        assert as_stream(TorchLikeStream()) == 0x1234

    @pytest.mark.parametrize("stream", [None, True, "0"])
    def test_rejected(self, stream: object) -> None:
        with pytest.raises(TypeError, match="stream must be"):
            as_stream(stream)

    def test_required(self) -> None:
        with pytest.raises(TypeError, match="stream"):
            prefetch(SOME_RANGE, Location.host())  # type: ignore[call-arg]

    @pytest.mark.parametrize("stream", [0, 1])
    def test_discard_refuses_the_default_stream(self, stream: int) -> None:
        with pytest.raises(ValueError, match="default stream"):
            discard(SOME_RANGE, stream=stream)


class TestChecks:
    def test_whole_pages_shrinks_inwards(self) -> None:
        assert whole_pages(Range(PAGE, 2 * PAGE)) == Range(PAGE, 2 * PAGE)
        assert whole_pages(Range(PAGE + 1, 3 * PAGE)) == Range(2 * PAGE, 2 * PAGE)

    def test_discard_of_less_than_a_page(self) -> None:
        with pytest.raises(ValueError, match="no whole page"):
            discard((PAGE + 8, PAGE), stream=7)

    def test_location_must_be_one(self) -> None:
        with pytest.raises(TypeError, match=r"Location\.device\(0\)"):
            prefetch(SOME_RANGE, -1, stream=7)  # type: ignore[arg-type]

    def test_advice_and_its_location(self) -> None:
        with pytest.raises(ValueError, match="takes no location"):
            advise(SOME_RANGE, Advice.READ_MOSTLY, Location.host())
        with pytest.raises(ValueError, match="needs a location"):
            advise(SOME_RANGE, Advice.PREFERRED_LOCATION)
        with pytest.raises(ValueError, match="takes no location"):
            unadvise(SOME_RANGE, Advice.PREFERRED_LOCATION, Location.host())
        with pytest.raises(ValueError, match="needs a location"):
            unadvise(SOME_RANGE, Advice.ACCESSED_BY)
        with pytest.raises(ValueError, match="host as a whole"):
            advise(SOME_RANGE, Advice.ACCESSED_BY, Location.host_numa(0))
        with pytest.raises(TypeError, match=r"Advice\.READ_MOSTLY"):
            advise(SOME_RANGE, "ReadMostly")  # type: ignore[arg-type]


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
