"""umem.cuda on a real GPU: prefetches, advice and discards."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from managed_memory import ManagedBytes

from umem import cuda as ucuda
from umem.core.errors import CudaError
from umem.cuda import Advice, Location, Range, bindings
from umem.hardware.capabilities import detect
from umem.runtime.native_library import native

MIB = 1 << 20
MANAGED_BYTES = 64 * MIB
DEVICE = Location.device(0)
HOST = Location.host()


def runtime() -> Any:
    """cuda-python's runtime, which other machines may lack."""
    return pytest.importorskip("cuda.bindings.runtime")


@pytest.fixture
def managed() -> Iterator[Range]:
    """64 MiB of managed memory, which starts on a 2 MiB boundary."""
    rt = runtime()
    torch.cuda.synchronize()
    error, pointer = rt.cudaMallocManaged(MANAGED_BYTES, rt.cudaMemAttachGlobal)
    assert int(error) == 0, error
    yield Range(int(pointer), MANAGED_BYTES)
    torch.cuda.synchronize()
    assert int(rt.cudaFree(pointer)[0]) == 0


@pytest.fixture
def stream() -> torch.cuda.Stream:
    """An idle stream of its own."""
    return torch.cuda.Stream(device=0)


@pytest.fixture
def needs_discard() -> None:
    """Skip where the driver or cuda-python cannot discard."""
    capabilities = detect(0)
    if not capabilities.discard or capabilities.bindings_version[0] < 13:
        pytest.skip("discard needs a driver and a cuda-python of CUDA 13")


def as_tensor(range_: Range) -> torch.Tensor:
    """A tensor over managed memory."""
    tensor = torch.as_tensor(ManagedBytes(range_), device="cuda")
    assert tensor.data_ptr() == range_.address
    return tensor


def host_bytes(range_: Range) -> bytes:
    """The bytes as the CPU reads them."""
    torch.cuda.synchronize()
    return ctypes.string_at(range_.address, range_.size_bytes)


def part(range_: Range, start: int, size_bytes: int) -> Range:
    """A piece of a range."""
    return Range(range_.address + start, size_bytes)


class TestPrefetch:
    """Prefetches, and the locations that the driver records."""

    def test_never_prefetched(self, managed: Range) -> None:
        """New memory has no prefetch location."""
        assert ucuda.last_prefetch_location(managed) is None

    @pytest.mark.parametrize("location", [DEVICE, HOST], ids=str)
    def test_tensor(self, managed: Range, stream: torch.cuda.Stream, location: Location) -> None:
        """The location is recorded, and values are the same wherever the pages are."""
        tensor = as_tensor(managed)
        tensor.fill_(7)
        torch.cuda.synchronize()
        ucuda.prefetch(tensor, location, stream=stream)
        assert ucuda.last_prefetch_location(tensor) == location
        assert host_bytes(managed) == b"\x07" * MANAGED_BYTES

    def test_default_stream_pair_and_array(self, managed: Range) -> None:
        """Every form of target; prefetch takes the default stream."""
        ucuda.prefetch((managed.address, managed.size_bytes), DEVICE, stream=0)
        assert ucuda.last_prefetch_location(ManagedBytes(managed)) == DEVICE
        ucuda.prefetch(ManagedBytes(managed), HOST, stream=torch.cuda.current_stream())
        assert ucuda.last_prefetch_location(managed) == HOST

    def test_parts_that_differ(self, managed: Range, stream: torch.cuda.Stream) -> None:
        """Halves in two locations share no location."""
        half = MANAGED_BYTES // 2
        ucuda.prefetch(part(managed, 0, half), DEVICE, stream=stream)
        ucuda.prefetch(part(managed, half, half), HOST, stream=stream)
        assert ucuda.last_prefetch_location(managed) is None
        assert ucuda.last_prefetch_location(part(managed, 0, half)) == DEVICE
        assert ucuda.last_prefetch_location(part(managed, half, half)) == HOST

    def test_host_numa_node(self, managed: Range, stream: torch.cuda.Stream) -> None:
        """A node is recorded as a node."""
        capabilities = detect(0)
        if capabilities.driver_version < (12, 2):
            pytest.skip("host NUMA locations need a driver of CUDA 12.2")
        node = next(node.number for node in capabilities.numa_nodes if node.has_cpus)
        ucuda.prefetch(managed, Location.host_numa(node), stream=stream)
        assert ucuda.last_prefetch_location(managed) == Location.host_numa(node)

    def test_from_a_fresh_thread(self, managed: Range, stream: torch.cuda.Stream) -> None:
        """A thread that never touched CUDA needs no preparation."""
        found = []

        def work() -> None:
            ucuda.prefetch(managed, DEVICE, stream=stream)
            found.append(ucuda.last_prefetch_location(managed))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert found == [DEVICE]


class TestAdvice:
    """Advice, read back and removed."""

    def test_read_mostly(self, managed: Range) -> None:
        """Advice on a part is not advice on the whole."""
        half = part(managed, 0, MANAGED_BYTES // 2)
        ucuda.advise(half, Advice.READ_MOSTLY)
        assert ucuda.is_read_mostly(half)
        assert not ucuda.is_read_mostly(managed)
        ucuda.unadvise(half, Advice.READ_MOSTLY)
        assert not ucuda.is_read_mostly(half)

    @pytest.mark.parametrize("location", [DEVICE, HOST], ids=str)
    def test_preferred_location(self, managed: Range, location: Location) -> None:
        """Set on a tensor, then removed."""
        tensor = as_tensor(managed)
        assert ucuda.preferred_location(tensor) is None
        ucuda.advise(tensor, Advice.PREFERRED_LOCATION, location)
        assert ucuda.preferred_location(tensor) == location
        ucuda.unadvise(tensor, Advice.PREFERRED_LOCATION)
        assert ucuda.preferred_location(tensor) is None

    def test_accessed_by(self, managed: Range) -> None:
        """Device and host, each on its own."""
        assert ucuda.accessed_by(managed) == ()
        ucuda.advise(managed, Advice.ACCESSED_BY, DEVICE)
        assert ucuda.accessed_by(managed) == (DEVICE,)
        ucuda.advise(managed, Advice.ACCESSED_BY, HOST)
        assert set(ucuda.accessed_by(managed)) == {DEVICE, HOST}
        ucuda.unadvise(managed, Advice.ACCESSED_BY, DEVICE)
        assert ucuda.accessed_by(managed) == (HOST,)


@pytest.mark.usefixtures("needs_discard")
class TestDiscard:
    """Discarded contents, and neighbours that keep theirs."""

    def test_memory_is_usable_afterwards(self, managed: Range, stream: torch.cuda.Stream) -> None:
        """Data written after a discard stays."""
        tensor = as_tensor(managed)
        tensor.fill_(1)
        torch.cuda.synchronize()
        ucuda.discard(tensor, stream=stream)
        stream.synchronize()
        tensor.fill_(2)
        assert host_bytes(managed) == b"\x02" * MANAGED_BYTES

    def test_neighbours_keep_their_data(self, managed: Range, stream: torch.cuda.Stream) -> None:
        """A target that starts and ends inside a page leaves the rest of that page alone."""
        tensor = as_tensor(managed)
        tensor.fill_(3)
        torch.cuda.synchronize()
        edge = mmap.PAGESIZE // 2
        ucuda.discard(part(managed, edge, MANAGED_BYTES - 2 * edge), stream=stream)
        stream.synchronize()
        assert host_bytes(part(managed, 0, mmap.PAGESIZE)) == b"\x03" * mmap.PAGESIZE
        last = part(managed, MANAGED_BYTES - mmap.PAGESIZE, mmap.PAGESIZE)
        assert host_bytes(last) == b"\x03" * mmap.PAGESIZE


class TestManagedBuffer:
    """What cuda.core does with a buffer over a range."""

    def test_a_batch_is_prefetched(self, managed: Range, stream: torch.cuda.Stream) -> None:
        core = pytest.importorskip("cuda.core", minversion="1.1")
        utils = pytest.importorskip("cuda.core.utils")
        half = MANAGED_BYTES // 2
        halves = [Range(managed.address + at, half) for at in (0, half)]
        buffers = [ucuda.managed_buffer(it) for it in halves]
        utils.prefetch_batch(core.Stream.from_handle(stream.cuda_stream), buffers, core.Device(0))
        stream.synchronize()
        assert ucuda.last_prefetch_location(managed) == DEVICE


class TestRefusals:
    """Memory that is not managed, and CUDA's errors."""

    def test_device_memory(self, stream: torch.cuda.Stream) -> None:
        """The message names the attribute."""
        rt = runtime()
        error, pointer = rt.cudaMalloc(MIB)
        assert int(error) == 0
        target = Range(int(pointer), MIB)
        with pytest.raises(ValueError, match="cudaPointerGetAttributes says cudaMemoryTypeDevice"):
            ucuda.prefetch(target, HOST, stream=stream)
        with pytest.raises(ValueError, match="cudaMemoryTypeDevice"):
            ucuda.last_prefetch_location(target)
        assert int(rt.cudaFree(pointer)[0]) == 0

    def test_pinned_memory(self, stream: torch.cuda.Stream) -> None:
        """Pinned memory cannot migrate either."""
        pinned = torch.empty(MIB, dtype=torch.uint8).pin_memory()
        with pytest.raises(ValueError, match="cudaMemoryTypeHost"):
            ucuda.prefetch((pinned.data_ptr(), MIB), DEVICE, stream=stream)

    def test_strided_view(self, managed: Range, stream: torch.cuda.Stream) -> None:
        """A view with gaps is an error, a contiguous one is not."""
        tensor = as_tensor(managed).view(1024, -1)
        with pytest.raises(ValueError, match="not contiguous"):
            ucuda.prefetch(tensor[:, ::2], HOST, stream=stream)
        ucuda.prefetch(tensor[512:], HOST, stream=stream)
        assert ucuda.last_prefetch_location(tensor[512:]) == HOST

    def test_no_such_device(self, managed: Range, stream: torch.cuda.Stream) -> None:
        """CUDA's error comes with the call, its name and the range; CUDA works on."""
        absent = Location.device(torch.cuda.device_count())
        with pytest.raises(CudaError, match=r"cudaMemPrefetchAsync.*cudaError\w+ \(\d+\)"):
            ucuda.prefetch(managed, absent, stream=stream)
        ucuda.prefetch(managed, DEVICE, stream=stream)
        assert ucuda.last_prefetch_location(managed) == DEVICE


class TestCapabilities:
    """The driver's answers."""

    def test_agrees_with_torch(self) -> None:
        """Name, memory and capability are those that torch reads."""
        found = detect(0)
        properties = torch.cuda.get_device_properties(0)
        assert found.device_name == properties.name
        assert found.total_bytes == properties.total_memory
        assert found.compute_capability == (properties.major, properties.minor)
        assert found.is_grace_hopper == ("GH200" in properties.name)
        assert found.free_bytes is None or 0 < found.free_bytes <= found.total_bytes

    def test_creates_no_context(self) -> None:
        """Neither torch's CUDA nor a primary context is started."""
        code = (
            "import torch\n"
            "from cuda.bindings import driver\n"
            "from umem.hardware.capabilities import detect_all\n"
            "devices = detect_all()\n"
            "assert len(devices) > 0\n"
            "assert not torch.cuda.is_initialized()\n"
            "for device in devices:\n"
            "    handle = driver.cuDeviceGet(device.device_index)[1]\n"
            "    error, _, active = driver.cuDevicePrimaryCtxGetState(handle)\n"
            "    assert int(error) == 0 and active == 0, (error, active)\n"
        )
        result = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stderr


def test_the_native_library_knows_the_same_types_of_memory(managed: Range) -> None:
    tensors = [torch.ones(MIB).pin_memory(), torch.ones(MIB), torch.ones(MIB, device="cuda")]
    addresses = [managed.address, *(it.data_ptr() for it in tensors)]
    kinds = [native().memory_type(it) for it in addresses]
    assert kinds[:3] == ["managed", "host", "unregistered"]
    assert kinds[3] in ("device", "managed")  # by the allocator that torch has here
    named = [bindings.memory_type(it) for it in addresses]
    assert named == [f"cudaMemoryType{it.capitalize()}" for it in kinds]
