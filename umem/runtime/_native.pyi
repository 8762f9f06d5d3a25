"""The native library: the allocator's core, its CUDA side and torch's entry points.

Class numbers are `umem.TensorClass.number`; streams are `cudaStream_t` addresses
(0 is the default stream); sizes are bytes.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

HAS_CUDA: bool
"""Built against RMM and CUDA's runtime; otherwise the host core only."""

RMM_VERSION: str
"""RMM's version at build time, "" without it."""

CUDA_VERSION: str
"""CUDA runtime's version at build time ("13.0"), "" without it."""

class ClassSetting:
    """Where the blocks of one tensor class come from, and their advice."""

    def __init__(
        self,
        kind: str = "managed",  # managed | device | system | pinned
        placement: str = "device",  # device | host | any
        accessed_by_device: bool = False,
        read_mostly: bool = False,
        min_bytes: int = 0,  # smaller blocks come from plain device memory
    ) -> None: ...

class Config:
    """What an allocator is built from; `classes` in the order of `TensorClass`."""

    def __init__(
        self,
        classes: list[ClassSetting],
        managed_limit_bytes: int = 0,  # 0: no cap
        device_budget_bytes: int = 0,  # 0: no budget
        system_headroom_bytes: int = 0,
        pinned_limit_bytes: int = 0,  # most page-locked host memory, of all GPUs; 0: no limit
        managed_bytes_of_device: list[int] = [],  # added to the cap by each GPU in use
        advises: bool = True,  # False: as with a driver that takes no advice
        prefetches: bool = True,  # False: as with one that moves no pages when asked
        poisons: bool = False,  # overwrite what is freed, and what is handed out
    ) -> None: ...

class ClassOverride:
    """What `Allocator.class_override` returns."""

    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...

class Allocator:
    """A class-aware caching allocator. Thread-safe; every method may be called
    from any thread. Raises MemoryError past a limit when called from Python."""

    @staticmethod
    def on_host(
        config: Config, device_total_bytes: int = 0, devices: int = 1, expandable: bool = False
    ) -> Allocator:
        """An allocator over host memory: the same core with no GPU, for tests and the demo.

        Streams are plain numbers; their work counts as done at once. With `expandable`, plain
        device memory is mapped into expandable segments.
        """

    def malloc(self, bytes: int, device: int = 0, stream: int = 0) -> int: ...
    def free(self, address: int, device: int = 0) -> None: ...
    def hand_over(self, address: int, bytes: int) -> None:
        """The calling thread's next request of so many bytes gets this live block. An address of 0
        takes that back."""
    def record_stream(self, address: int, stream: int, device: int = 0) -> None: ...
    def empty_cache(self) -> None: ...
    def pause(self, device: int, host_available_bytes: int) -> tuple[int, int, int, int]:
        """Give plain device memory back; see `umem.pause`. Bytes that were returned, are kept on
        the device, and were evicted, and bytes of the copy on the host. RuntimeError where the
        device cannot be paused; `malloc` raises one while it is."""
    def resume(self, device: int) -> None:
        """Take it again; RuntimeError where it is not paused or the device lacks memory."""
    def is_paused(self, device: int) -> bool: ...
    def set_memory_fraction(self, fraction: float, device: int) -> None: ...
    def memory_fraction(self, device: int) -> float: ...
    def base_allocation(self, address: int) -> tuple[int, int]:
        """(base, bytes) of the segment that holds `address`; KeyError when none does."""
    def begin_pool(self, device: int, pool: tuple[int, int]) -> None:
        """Send allocations on every stream to `pool` until `end_pool`."""
    def end_pool(self, device: int, pool: tuple[int, int]) -> None: ...
    def release_pool(self, device: int, pool: tuple[int, int]) -> None: ...
    def retag(self, address: int, tensor_class: int) -> bool:
        """Move the live block that starts at `address` to a class; False when there is none."""
    def set_phase(self, tensor_class: int) -> None:
        """The class of blocks born from now on, in any thread without an override."""
    def phase(self) -> int: ...
    def class_override(self, tensor_class: int) -> ClassOverride:
        """Override the phase: for this thread, and for threads without an override of their own.
        For one ``with`` block, which must end in the thread that began it."""
    def stats(self, device: int) -> dict[str, Any]:
        """What `torch._C._cuda_memoryStats` returns: stat -> pool type -> current/peak/...

        Beside it `budget_bytes` (current/peak/...): what counts against the device budget, that is
        segments on the device, cached ones too, and the page tables there of page-locked memory.
        And `highest_bytes`: the most bytes of live blocks ever, which nothing resets. And `served`:
        how many requests each rung of the allocator's ladder has served, by its name. And
        `locked_ahead_bytes`: what `lock_ahead` has locked."""
    def class_stats(self, device: int) -> list[dict[str, dict[str, int]]]:
        """Per class: stat (allocation, allocated_bytes, requested_bytes) -> current/peak/..."""
    def pool_stats(self, device: int) -> list[dict[str, Any]]:
        """Per private pool: id (tuple), allocated_bytes, reserved_bytes, in_use (bool)."""
    def kind_stats(self, device: int) -> dict[str, dict[str, int]]:
        """Per memory kind: reserved_bytes, spilled_bytes (on the host because of the budget:
        managed memory mapped there, or page-locked memory instead of other kinds)."""
    def reset_peak_stats(self, device: int) -> None: ...
    def reset_accumulated_stats(self, device: int) -> None: ...
    def segments(self, device: int) -> list[dict[str, Any]]:
        """Snapshot in torch's form, with `memory_kind` and each block's `tensor_class` beside. Each
        run of mapped handles of an expandable segment is a segment with `is_expandable`."""
    def live_blocks(self) -> list[tuple[int, int, int, int, int, str]]:
        """Of every live block: address, requested bytes, block bytes, class, device, kind."""
    def set_device_budget(self, device: int, bytes: int) -> None:
        """From now on; 0 for no budget. Gives cached segments back if they exceed it; live blocks
        stay where they are until freed."""
    def set_device_room(self, device: int, tensor_class: int, bytes: int) -> int:
        """Serve the next requests of a class as those of class `other`, up to `bytes` in all.

        The first one that does not fit, and those behind it, are served as the class's own.
        Returns the bytes that were left before."""
    def lock_ahead(self, device: int, bytes: int, stream: int) -> None:
        """Page-lock memory for later requests of optimizer state, beside the program."""
    def end_locking_ahead(self, device: int) -> None: ...
    def count_page_locked(self, device: int, bytes: int) -> None:
        """Count page-locked memory of others on this device, by `bytes` more or less.

        Its page tables are in device memory, which the budget counts."""
    def add_own_stream(self, device: int, stream: int) -> None:
        """Do not wait for a stream where memory of others serves another one.

        What its work uses of their memory is freed only once a stream of the program waits for it.
        """
    def unspill(self, device: int) -> list[tuple[int, int, int, int, int, str]]:
        """Advise what was spilled as its class is, and tell of it as `live_blocks` does.

        Of what has pages of its own, and of classes that are placed on the device.
        """
    def take_peak_bytes(self, device: int) -> int:
        """Most bytes of live blocks since the last call, whatever `reset_peak_stats` does."""
    def set_release_listener(self, engine: HintEngine | None) -> None:
        """Forget, in this engine, what is given back to RMM, before it is."""
    def set_block_listener(self, listener: Callable[..., None] | None) -> None:
        """Call a function for each block that is handed out, and for each one before it is freed.

        It gets whether the block is born, its address, bytes, requested bytes, class, device, kind
        and the stream.
        """
    def pinned_room_bytes(self) -> int:
        """What the cap on page-locked memory leaves; 0 without one."""
    def set_pinned_room(self, bytes: int) -> None:
        """Move the cap on page-locked memory to so many bytes above what is held."""
    def managed_bytes(self) -> int:
        """Managed bytes held now, cached ones too: what the hard cap counts."""
    def uncached_ns(self) -> int:
        """Nanoseconds in which requests waited that the caches had no memory for."""
    def device_count(self) -> int: ...

def install(config: Config) -> Allocator:
    """Make the process's CUDA allocator, which torch's entry points serve. Once per process."""

def installed() -> Allocator | None: ...
def torch_entry_points() -> dict[str, int]:
    """Addresses of torch's pluggable-allocator functions: malloc, free, record_stream,
    empty_cache, memory_fraction, base_allocation, begin_pool, end_pool, release_pool."""

def gradient_hook(allocator: Allocator, wrapped: Callable[[Any], object]) -> Any:
    """A callable for `register_post_accumulate_grad_hook`: tags `param.grad` as gradients. One that
    has no memory of its own is given to `wrapped`."""

# ---- the hint engine ----

class HintSettings:
    """How a hint engine is set up; a value that makes no sense is a ValueError of the engine."""

    def __init__(
        self,
        chunk_bytes: int = 134217728,  # of one driver call
        in_flight_bytes: int = 268435456,  # in driver calls, in each direction
        capacity: int = 8192,  # requests that are open at once
        prefetch_workers: int = 2,
        poll_s: float = 100e-6,  # between two looks at an event
        without: Sequence[str] = (),  # calls to do without
    ) -> None: ...

class HintBatch:
    """Requests that are made together, checked once. Thread-safe."""

    def set_address(self, index: int, address: int) -> None:
        """0 skips the entry until it has an address again."""
    def tickets(self) -> tuple[int, int]:
        """Of the last submission: the first ticket, and the one after the last."""

class HintEngine:
    """Native threads that ask the driver to move managed memory. Thread-safe.

    Operations are the numbers of `HintOp.PREFETCH` and `EVICT`, outcomes are names of
    `umem.runtime.hints.HintOutcome` (`wait`: their places in it); times are those of
    `time.monotonic_ns`. A ticket of 0: the queue is full or the engine has stopped.
    """

    @staticmethod
    def on_host(
        settings: HintSettings,
        devices: int = 1,
        bytes_per_s: float = 0.0,
        fail: dict[str, int] = ...,  # by call: which one fails, from 1 on
    ) -> HintEngine: ...
    @staticmethod
    def on_cuda(settings: HintSettings) -> HintEngine:
        """RuntimeError without a driver or a GPU, or in a build without CUDA."""
    def start(self, device: int = 0) -> None: ...
    def submit(
        self,
        op: int,
        address: int,
        size_bytes: int,
        device: int = 0,
        tensor_class: int = 5,
    ) -> int: ...
    def advise(
        self,
        address: int,
        size_bytes: int,
        placement: str,  # device | host | any
        accessed_by_device: bool = False,
        read_mostly: bool = False,
        device: int = 0,
        tensor_class: int = 5,
    ) -> int: ...
    @staticmethod
    def batch(
        ops: Sequence[int],
        addresses: Sequence[int],
        sizes: Sequence[int],
        classes: Sequence[int],
        device: int,
    ) -> HintBatch: ...
    def fire(self, batch: HintBatch, stream: int, after: Sequence[int] = ()) -> int:
        """The last ticket of consecutive ones; 0 when nothing was taken."""
    def mark_needed(self, tickets: tuple[int, ...]) -> None: ...
    def forget(self, address: int, size_bytes: int, timeout_s: float) -> bool: ...
    def wait(self, ticket: int, timeout_s: float) -> int | None:
        """The outcome, 0 (open) when the time ran out; None for a ticket not on record."""
    def statistics(self) -> dict[str, Any]:
        """counts by (op, class), failures as (call, error, text, count), and the rest by name.

        Calls under way together in one direction share the time in its `driver_s`."""
    def shutdown(self, timeout_s: float) -> bool:
        """False when a call did not end in time. The destructor then waits for it no more."""

def queue_copies(
    copies: Sequence[tuple[int, int, int]], stream: int, to_host: bool, word: int
) -> None:
    """Queue copies, each of (to, source, bytes), in chunks; those to the host let mapping pass.

    Not in a build without CUDA. Unless `word` is 0, a write of 32 bits to that address of device
    memory follows each chunk. Raises RuntimeError where CUDA refuses one.
    """

# ---- updates on the host ----

def host_instructions() -> list[str]:
    """Names of the instructions for updates that this processor has, slowest first."""

class HostForm:
    """Which operations of an update are fused, as `umem.streaming.host_share.Form` has it."""

    def __init__(self, decay: int, first: int, second: int, ahead: int, weight: int) -> None: ...

class HostConstants:
    """The numbers of an update, as float32. `factors` multiply the gradient, `scale` divides it."""

    def __init__(
        self,
        *,
        decay: float = 0.0,
        b1: float = 0.0,
        o1: float = 0.0,
        b2: float = 0.0,
        o2: float = 0.0,
        rate: float = 0.0,
        root: float = 1.0,
        eps: float = 0.0,
        negates: bool = False,
        factors: list[float] = [],
        scale: float | None = None,
    ) -> None: ...

class HostWorkers:
    """Threads that share updates. Thread-safe; not for a forked child.

    ValueError for fewer than one thread, or unknown instructions; "" takes the fastest.
    """

    def __init__(self, threads: int, cpus: list[int] = [], instructions: str = "") -> None: ...
    def update(
        self,
        form: HostForm,
        constants: HostConstants,
        is_bfloat16: bool,
        spans: Sequence[tuple[int, int, int, int, int]],
    ) -> None:
        """Update spans: addresses of weights, gradients and both averages, and a length."""
    @property
    def instructions(self) -> str: ...
    @property
    def threads(self) -> int: ...

def memory_type(address: int) -> Literal["host", "device", "managed", "unregistered"]:
    """Whose memory CUDA takes an address for; ``host`` is page-locked, ``unregistered`` is not.

    Not in a build without CUDA. Raises RuntimeError where CUDA refuses.
    """

class StagedCopy:
    """Copies between managed memory of a device and pinned host memory, in one direction.

    Not in a build without CUDA. Of one thread at a time, with the device current. Raises
    RuntimeError where the driver refuses: then nothing, or the first part, is copied.
    """

    def __init__(self, device: int, leaves: bool) -> None: ...
    def fits(self, to: int, source: int) -> bool:
        """Whether it can copy between these addresses."""

    def copy(self, to: int, source: int, size_bytes: int, pages: int, link: int) -> None:
        """Ask for a copy; nobody waits.

        The kernel that copies between managed memory and the device's own runs on the stream
        `pages`, the copies over the link on `link`. A copy to the host begins behind what `pages`
        holds and ends on `link`; one to the device the other way round.
        """
