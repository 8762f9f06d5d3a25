"""A process in which umem changes all that it can change without a GPU, and what has changed then.

As a program it prints a report: `python changed_torch.py`. A test reads it with :func:`report`.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from other_process import run_python
from torch import nn

import umem
from umem import patches
from umem.patches import PATCHES, Patch

PACKAGE = str(Path(umem.__file__).parent)
LIBRARIES = ("torch", "transformers")
FSDP = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
MODELS, LOADER = "transformers.modeling_utils", "transformers.core_model_loading"

C: Any = torch._C
any_torch: Any = torch


class Wrapper(torch.Tensor):
    """A tensor of a program that has operators of its own."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    """A function of TorchScript."""
    return x + 1


def is_torchs_own(function: object) -> None:
    assert function is torch.cuda.is_initialized


def tensor() -> Any:
    return torch.zeros(4)


def cpu_stream() -> Any:
    return torch.Stream(device="cpu")


USES: dict[str, Callable[[], object]] = {
    "cuda_empty_cache": lambda: C._cuda_emptyCache(),
    "cuda_memory_stats": lambda: C._cuda_memoryStats(0),
    "cuda_memory_snapshot": lambda: C._cuda_memorySnapshot(None),
    "cuda_reset_peak_stats": lambda: C._cuda_resetPeakMemoryStats(0),
    "cuda_memory_history": lambda: torch.cuda.memory._record_memory_history(None),
    "cuda_memory_history_legacy": lambda: C._cuda_record_memory_history_legacy(False),
    "cuda_reset_accumulated_stats": lambda: C._cuda_resetAccumulatedMemoryStats(0),
    "cuda_memory_fraction": lambda: C._cuda_getMemoryFraction(0),
    "accelerator_is_initialized": lambda: is_torchs_own(C._accelerator_isAllocatorInitialized),
    "accelerator_empty_cache": lambda: C._accelerator_emptyCache(),
    "accelerator_stats": lambda: C._accelerator_getDeviceStats(0),
    "accelerator_reset_peak_stats": lambda: C._accelerator_resetPeakStats(0),
    "accelerator_reset_accumulated_stats": lambda: C._accelerator_resetAccumulatedStats(0),
    "set_cudnn_benchmark": lambda: C._set_cudnn_benchmark(False),
    "cudnn_benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", False),
    "module_apply": lambda: nn.Linear(2, 2).double(),
    "transformers_warmup": lambda: sys.modules[MODELS].caching_allocator_warmup(),
    "transformers_copy": lambda: sys.modules[LOADER]._materialize_copy(tensor()),
    "cuda_graphed_callables": lambda: torch.cuda.make_graphed_callables(nn.Linear(2, 2), ()),
    "graphed_callables": lambda: torch.cuda.graphs.make_graphed_callables(nn.Linear(2, 2), ()),
    "graph_replay": lambda: C._CUDAGraph.replay(None),
    "graph_capture_begin": lambda: C._CUDAGraph.capture_begin(None),
    "accelerator_graph_replay": lambda: any_torch.accelerator.Graph.replay(None),
    "accelerator_graph_capture_begin": lambda: any_torch.accelerator.Graph.capture_begin(None),
    "scripted_method": lambda: torch.jit.script(nn.Linear(4, 4)).forward(tensor()),
    "disabled_saved_tensors": lambda: torch.func.grad(torch.sum)(torch.ones(2)),
    "program_checkpoints": lambda: any_torch.utils.checkpoint.checkpoint(
        nn.Linear(4, 4), tensor(), use_reentrant=False
    ),
    "cross_entropy_loss": lambda: nn.functional.cross_entropy(
        torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)
    ),
    "upcast": lambda: tensor().float(),
    "run_backward": lambda: torch.ones(2, requires_grad=True).sum().backward(),
    "run_backward_of_graph": lambda: any_torch.autograd.graph._engine_run_backward(
        (torch.ones(2, requires_grad=True).sum(),)
    ),
    "backward": lambda: torch.autograd.backward(torch.ones(2, requires_grad=True).sum()),
    "data_ptr": lambda: tensor().data_ptr(),
    "const_data_ptr": lambda: tensor().const_data_ptr(),
    "untyped_storage": lambda: tensor().untyped_storage(),
    "data": lambda: tensor().data,
    "swap_contents": lambda: torch.utils.swap_tensors(tensor(), tensor()),
    "swap_tensors": lambda: torch.utils.swap_tensors(tensor(), tensor()),
    "scripted_function": lambda: scripted(tensor()),
    "subclass_operators": lambda: Wrapper.__torch_dispatch__(torch.neg, (), (tensor(),)),
    "new_subclasses": lambda: type("Another", (torch.Tensor,), {}),
    "tensor_dlpack": lambda: tensor().__dlpack__(),
    "utils_to_dlpack": lambda: any_torch.utils.dlpack.to_dlpack(tensor()),
    "to_dlpack": lambda: any_torch.to_dlpack(tensor()),
    "cuda_array_interface": lambda: tensor().__cuda_array_interface__,
    "backend_methods": lambda: any_torch.distributed._Backend.allreduce(None, [tensor()]),
    "cuda_event_record": lambda: any_torch.cuda.Event.record(None),
    "cuda_event_wait": lambda: any_torch.cuda.Event.wait(None),
    "cuda_event_synchronize": lambda: any_torch.cuda.Event.synchronize(None),
    "cuda_event_query": lambda: any_torch.cuda.Event.query(None),
    "event_record": lambda: torch.Event(device="cpu").record(),
    "event_wait": lambda: torch.Event(device="cpu").wait(),
    "cuda_stream_synchronize": lambda: any_torch.cuda.Stream.synchronize(cpu_stream()),
    "cuda_stream_query": lambda: any_torch.cuda.Stream.query(cpu_stream()),
    "stream_record_event": lambda: cpu_stream().record_event(),
    "stream_wait_event": lambda: cpu_stream().wait_event(torch.Event(device="cpu")),
    "stream_wait_stream": lambda: cpu_stream().wait_stream(cpu_stream()),
    "stream_synchronize": lambda: cpu_stream().synchronize(),
    "stream_query": lambda: cpu_stream().query(),
    "compiled_context": lambda: sys.modules["torch._dynamo.eval_frame"]._callback_from_stance(None),
    "compiler_reset": lambda: sys.modules["torch._dynamo.callback"].callback_handler.clear(),
    "fsdp_gathering": lambda: sys.modules[FSDP].FSDPParamGroup.unshard(None),
    "autocast": lambda: torch.autocast("cpu"),
}
"""A use of each attribute that umem replaces. It may fail: it need only come to umem."""


@dataclass
class Report:
    """What :func:`report` returns."""

    unlisted: list[str] = field(default_factory=list)
    """Attributes that had another value while umem worked, and that no entry of PATCHES has."""
    wrong: list[str] = field(default_factory=list)
    """Attributes that umem has replaced under an entry that does not name them."""
    unseen: list[str] = field(default_factory=list)
    """Entries whose attribute umem has replaced, and which was not seen to have another value."""
    lacking: list[str] = field(default_factory=list)
    """Entries whose attribute this torch lacks."""
    in_force: list[str] = field(default_factory=list)
    reached: list[str] = field(default_factory=list)
    """Entries whose use has run what is in the attribute's place. Where that is no function of
    Python, the use succeeds, and did not before."""
    left: list[str] = field(default_factory=list)
    """Attributes that are not what they were after all has been undone."""
    backend_methods: list[str] = field(default_factory=list)


def report() -> Report:
    """Run the program, in a process that sees no GPU."""
    said = run_python(__file__, CUDA_VISIBLE_DEVICES="")
    return Report(**json.loads(said.splitlines()[-1]))


def owners() -> Iterator[tuple[str, Any]]:
    """Torch's modules, the classes in them, and the objects in them that have attributes."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in LIBRARIES:
            continue
        yield name, module
        kinds = [*vars(module).values(), type(module)]
        for value in kinds:
            its = value if isinstance(value, type) else type(value)
            if its.__module__.partition(".")[0] not in LIBRARIES:
                continue
            yield f"{its.__module__}.{its.__qualname__}", its
            if hasattr(value, "__dict__") and not isinstance(value, type | ModuleType):
                yield f"an object of {its.__qualname__}", value
        if type(module) is not ModuleType:
            for attribute, flag in vars(type(module)).items():
                if hasattr(flag, "__dict__") and not callable(flag):
                    yield f"{name}.{attribute}", flag


COUNTERS = {"next_id", "call_order", "manual_seed_all_cb"}
"""Attributes that torch itself changes when hooks are registered, or seeds are set."""

Attributes = dict[tuple[int, str], tuple[str, Any, Any]]
"""By the owner's ``id`` and the name: the whole name, the owner and the value."""


def attributes() -> Attributes:
    once = {id(owner): (label, owner) for label, owner in owners()}  # most have many names
    return {
        (id(owner), name): (f"{label}.{name}", owner, value)
        for label, owner in once.values()
        for name, value in list(vars(owner).items())
        if name not in COUNTERS and not isinstance(value, ModuleType)
    }


def code_of(value: Any) -> CodeType | None:
    """The code of a function, method or property of Python."""
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, classmethod | staticmethod | MethodType):
        value = value.__func__
    return value.__code__ if isinstance(value, FunctionType) else None


def is_umems(value: Any) -> bool:
    code = code_of(value)
    return code is not None and code.co_filename.startswith(PACKAGE)


class Looks:
    """Looks at torch's attributes at several moments."""

    def __init__(self) -> None:
        self.report = Report()
        gc.freeze()  # what is looked at below is collected often
        self._before = attributes()
        self._known = {owner for owner, _ in self._before}
        self._seen: set[str] = set()
        self._unlisted = {label for label, _, value in self._before.values() if is_umems(value)}

    def changes(self) -> dict[tuple[int, str], str]:
        """Attributes that have another value now, are new, or are gone.

        Of what was imported since, those that are umem's.
        """
        now, found = attributes(), {}
        for place, (label, _, value) in now.items():
            known = self._before.get(place)
            if known is None:
                is_changed = place[0] in self._known or is_umems(value)
            else:
                is_changed = known[2] is not value
            if is_changed:
                found[place] = label
        return found | {place: it[0] for place, it in self._before.items() if place not in now}

    def look(self, *_: object) -> None:
        gc.collect()  # what is collected meanwhile could undo a change
        changed, listed = self.changes(), set()
        for key, patch in PATCHES.items():
            for owner, attribute in patches.in_force(key):
                place = id(owner), attribute
                listed.add(place)
                self.report.in_force.append(key)
                if not names(patch, owner, attribute):
                    self.report.wrong.append(f"{key}: {attribute}")
                # The program's own classes are not torch's.
                if place in changed or owner is Wrapper:
                    self._seen.add(key)
                if key == "backend_methods":
                    self.report.backend_methods.append(attribute)
        self._unlisted |= {label for place, label in changed.items() if place not in listed}

    def end(self) -> Report:
        report = self.report
        report.unlisted = sorted(self._unlisted)
        report.in_force = sorted(set(report.in_force))
        report.backend_methods = sorted(set(report.backend_methods))
        report.unseen = sorted(set(report.in_force) - self._seen)
        report.left = sorted(self.changes().values())
        return report


def names(patch: Patch, owner: Any, attribute: str) -> bool:
    """Whether an entry names an attribute."""
    its = patch.owner()
    if patch.attribute == "*":
        return owner is its or patch.path.startswith("torch.distributed:_Backend.")
    if patch.attribute == "setter":  # an access of the flag gives its value
        *_, flag, _ = patch.name.split(".")
        return attribute == "setter" and owner is vars(type(torch.backends.cudnn))[flag]
    is_its = owner is its or (attribute == "__torch_dispatch__" and issubclass(owner, its))
    return is_its and attribute == patch.attribute


def runs_replacement(key: str) -> tuple[bool, bool]:
    """Whether a use runs what is in the attribute's place, and whether it succeeds."""
    its = {code_of(vars(owner)[attribute]) for owner, attribute in patches.in_force(key)}
    called, succeeds = set(), True

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            called.add(frame.f_code)

    sys.setprofile(note)
    try:
        USES[key]()
    except Exception:
        succeeds = False
    finally:
        sys.setprofile(None)
    return bool(its & called), succeeds


def stand_in_transformers() -> None:
    """Its modules, with the functions that umem replaces."""
    for name, attribute in ((MODELS, "caching_allocator_warmup"), (LOADER, "_materialize_copy")):
        module = ModuleType(name)
        setattr(module, attribute, lambda *_: None)
        sys.modules[name] = module


def main() -> None:
    """Change all that can be changed, look, undo it, and print the report."""
    from lazy_lanes import LazyLanes
    from loading_memory import HostLoadingMemory
    from stand_in_swap import stand_in
    from streamed_programs import Program

    gc.disable()
    stand_in()
    stand_in_transformers()
    importlib.import_module("torch._dynamo.eval_frame")
    if torch.distributed.is_available():
        importlib.import_module(FSDP)
    torch.cuda.is_available()  # keeps what it finds
    isinstance(None, torch.Generator)  # likewise
    Program(None).run(lambda _: None)
    before = {key: runs_replacement(key) for key in USES}
    looks = Looks()
    looks.report.lacking = [
        key
        for key in USES
        if (patch := PATCHES[key]).attribute != "setter"
        and not hasattr(patch.owner(), patch.attribute.replace("*", "__init__"))
    ]

    umem.enable("sft")
    looks.look()
    streamed: list[dict[str, Any]] = [
        {},
        {"streams_weights": True},
        {"in_backward": True, "clips": False},
        {"recomputes": True},
    ]
    for options in streamed:
        Program(LazyLanes, **options).run(looks.look)
    recorded = Program(None)
    with umem.record(recorded.model, recorded.optimizer, steps=2, warmup=1):
        recorded.run(looks.look)
    looks.look()

    from umem.adapters import adapt_loading
    from umem.adapters.fsdp import order_gathering
    from umem.capture.offline.record import _one_device
    from umem.runtime.guard import Guard
    from umem.runtime.torch_hooks.backward import hook_backward
    from umem.runtime.torch_hooks.stream_order import cuda_stream_order
    from umem.runtime.torch_hooks.work_starts import before_work
    from umem.streaming.activations import SlicedLosses

    SlicedLosses("cpu")
    guard = Guard(lambda: None)
    guard.hold([torch.zeros(1)])
    ends = [before_work(lambda: None), hook_backward(lambda _: None, lambda _: None)]
    cuda_stream_order().install()
    order_gathering()
    adapt_loading(HostLoadingMemory())
    with _one_device():
        looks.look()
        after = {key: runs_replacement(key) for key in USES}
    looks.report.reached = [
        key
        for key, (reached, succeeds) in after.items()
        if reached or (succeeds and not before[key][1])
    ]
    for end in (guard.release, *ends):
        end()
    patches.undo(*PATCHES)
    print(json.dumps(asdict(looks.end())))


if __name__ == "__main__":
    main()
