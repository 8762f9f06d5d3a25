"""What `umem demo` shows: a fine-tuning run on a GPU, or its memory traffic without one.

The model and the training step are those of ``examples/finetune_llama.py``, so the demo
needs a checkout of the project beside the package.
"""

from __future__ import annotations

import importlib.util
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from umem.core.classes import TensorClass
from umem.core.errors import UnsupportedError
from umem.core.units import format_bytes
from umem.policy import ClassRule, Policy, class_rule
from umem.runtime.native_library import native

if TYPE_CHECKING:
    from umem.runtime._native import Allocator, Config
    from umem.runtime.allocation_stream import AllocationStream

__all__ = [
    "ClassTraffic",
    "Replay",
    "example_path",
    "explain",
    "load_example",
    "record_example",
    "replay",
    "run_example",
]


@dataclass(frozen=True)
class ClassTraffic:
    """What one tensor class asked of the allocator; bytes are those of blocks handed out."""

    allocations: int
    allocated_bytes: int
    peak_bytes: int
    live_bytes: int


@dataclass(frozen=True)
class Replay:
    """An allocator's account of one stream.

    Peaks are of bytes asked for, of the blocks that hold them, and of the segments that hold
    those. `pair_ns` is the median time of one allocation and its free, called from Python.
    """

    by_class: dict[TensorClass, ClassTraffic]
    peak_requested_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    pair_ns: float


def explain(policy: Policy) -> list[tuple[list[str], str]]:
    """Say in words what a policy does: names of classes that share a rule, and a sentence."""
    sentences: dict[str, list[str]] = {}
    for member in TensorClass:
        sentences.setdefault(_in_words(class_rule(policy, member)), []).append(member.value)
    return [(names, sentence) for sentence, names in sentences.items()]


_KIND_WORDS = {
    "managed": "managed memory, whose pages can move between device and host",
    "device": "plain device memory, which never moves",
    "system": "the host's own memory, which the device reads through its page tables",
    "pinned": "page-locked host memory, used in place over the link",
}
_PLACEMENT_WORDS = {
    "device": "kept on the device while there is room",
    "host": "kept on the host",
    "any": "left wherever it was last used",
}
_MECHANISM_WORDS = {
    "auto": "moved as the planner decides",
    "migrate": "moved page by page, ahead of need",
    "map": "used in place over the link",
    "duplicate": "copied to the device on demand, so that leaving it again costs nothing",
    "copy": "copied to a host block and back",
    "discard": "dropped once dead instead of written back",
    "fault": "moved when a page fault asks for it",
    "keep": "left where it is",
}


def _in_words(rule: ClassRule) -> str:
    words = [_KIND_WORDS[rule.kind]]
    if rule.kind in ("managed", "system"):
        words += [_PLACEMENT_WORDS[rule.placement], _MECHANISM_WORDS[rule.mechanism]]
    sentence = ", ".join(words)
    if rule.min_bytes:
        sentence += f"; below {format_bytes(rule.min_bytes)}, plain device memory"
    return sentence


def example_path() -> Path:
    """Where the checkout's fine-tuning example is.

    Raises
    ------
    UnsupportedError
        umem runs from an installed wheel, which has no examples, or a package that the example
        needs is missing.
    """
    path = Path(__file__).resolve().parents[2] / "examples" / "finetune_llama.py"
    if not path.is_file():
        raise UnsupportedError(
            f"the demo's example is not at {path}: the wheel carries no examples. "
            "Run `make demo` in a checkout of the project"
        )
    missing = [name for name in ("transformers", "peft") if importlib.util.find_spec(name) is None]
    if missing:
        raise UnsupportedError(
            f"{path.name} needs {' and '.join(missing)}: pip install 'umem[examples]'"
        )
    return path


def load_example() -> ModuleType:
    """Import the checkout's fine-tuning example by its path.

    Raises
    ------
    UnsupportedError
        The example, or a package that it needs, is missing.
    """
    path = example_path()
    spec = importlib.util.spec_from_file_location("finetune_llama", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its dataclass looks its own module up by name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run_example(arguments: Sequence[str]) -> int:
    """Run the example in a process of its own, its output passed on; the exit status.

    Raises
    ------
    UnsupportedError
        The example, or a package that it needs, is missing.
    """
    return subprocess.run([sys.executable, str(example_path()), *arguments], check=False).returncode


def record_example(arguments: Sequence[str], *, steps: int = 2) -> AllocationStream:
    """Train the example's model on the CPU for `steps` steps and record its allocations.

    Parameters
    ----------
    arguments : sequence of str
        The example's command line, for instance ``["--mode", "lora", "--size", "small"]``.
    steps : int
        Training steps to record.

    Raises
    ------
    UnsupportedError
        The example, or a package that it needs, is missing.
    """
    example = load_example()
    from umem.runtime.allocation_stream import record_training

    options = example.parse_arguments(arguments)
    source = example.batches(
        example.standard_library_text(), options.batch, options.seq, options.seed
    )

    def build() -> tuple[Any, Any]:
        model = example.build_model(options)
        return model, example.build_optimizer(model, options.learning_rate)

    def step(model: Any, optimizer: Any) -> None:
        micro_batches = [next(source) for _ in range(options.grad_accumulation)]
        example.train_step(model, optimizer, micro_batches)

    return record_training(build, step, steps=steps)


def replay(stream: AllocationStream, config: Config, *, passes: int = 25) -> Replay:
    """Send a recorded stream through the native allocator over host memory.

    Parameters
    ----------
    stream : AllocationStream
        From :func:`record_example` or :func:`umem.runtime.allocation_stream.record_training`.
    config : umem.runtime._native.Config
        The allocator's settings, as a policy gives them.
    passes : int
        Times the stream is sent. The first gives the account by class; `pair_ns` is the
        median of the others, which find the allocator's cache filled as a later step does.

    Raises
    ------
    ValueError
        `passes` is less than 2.
    MemoryError
        The stream needs more than the policy's limit.
    NativeLibraryError
        The native library cannot be loaded.
    """
    if passes < 2:
        raise ValueError(f"passes must be 2 or more to time a filled cache, not {passes}")
    allocator = native().Allocator.on_host(config)
    events = stream.events.tolist()
    # Index 0 is unused: an event is a block's number plus one.
    sizes = [0, *stream.block_bytes.tolist()]
    classes = [0, *stream.block_class.tolist()]

    leftover, _ = _send(allocator, events, sizes, classes)
    stats = allocator.stats(0)
    accounts = allocator.class_stats(0)
    _free_all(allocator, leftover)
    seconds = []
    for _ in range(passes - 1):
        leftover, pass_s = _send(allocator, events, sizes, classes)
        seconds.append(pass_s + _free_all(allocator, leftover))

    return Replay(
        by_class={
            member: ClassTraffic(
                allocations=accounts[member.number]["allocation"]["allocated"],
                allocated_bytes=accounts[member.number]["allocated_bytes"]["allocated"],
                peak_bytes=accounts[member.number]["allocated_bytes"]["peak"],
                live_bytes=accounts[member.number]["allocated_bytes"]["current"],
            )
            for member in TensorClass
        },
        peak_requested_bytes=stats["requested_bytes"]["all"]["peak"],
        peak_allocated_bytes=stats["allocated_bytes"]["all"]["peak"],
        peak_reserved_bytes=stats["reserved_bytes"]["all"]["peak"],
        pair_ns=statistics.median(seconds) / len(stream.block_bytes) * 1e9,
    )


def _send(
    allocator: Allocator, events: list[int], sizes: list[int], classes: list[int]
) -> tuple[list[int], float]:
    """Replay the events once: the addresses still live at the end, and the seconds taken."""
    malloc, free, set_phase = allocator.malloc, allocator.free, allocator.set_phase
    addresses = [0] * len(sizes)
    phase = -1
    start = time.perf_counter()
    for event in events:
        if event > 0:
            if classes[event] != phase:
                phase = classes[event]
                set_phase(phase)
            addresses[event] = malloc(sizes[event])
        else:
            free(addresses[-event])
            addresses[-event] = 0
    elapsed_s = time.perf_counter() - start
    return [address for address in addresses if address], elapsed_s


def _free_all(allocator: Allocator, addresses: list[int]) -> float:
    start = time.perf_counter()
    for address in addresses:
        allocator.free(address)
    return time.perf_counter() - start
