"""Every private name of torch that umem uses: purpose, torch versions, and a check for all of them.

The rest of umem takes these names from here. A name that this torch lacks raises
:class:`~umem.core.errors.UnsupportedError` when it is imported from this module;
:func:`require` checks all that ``umem.enable`` needs before it changes anything. torch is imported
when the first name is looked up, not with this module.

The versions were checked against torch 2.8.0 to 2.15.0, builds with CUDA 12 and 13.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from umem.core.errors import UnsupportedError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch._C import DisableTorchFunctionSubclass
    from torch._C import _InferenceMode as InferenceMode
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
        UnsupportedOperatorException,
    )
    from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "DTENSOR_PART",
    "NEWEST",
    "OLDEST",
    "PRIVATE_NAMES",
    "DataDependentOutputException",
    "DisableTorchFunctionSubclass",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "InferenceMode",
    "Need",
    "PrivateName",
    "TorchDispatchMode",
    "UnsupportedOperatorException",
    "accumulation_hooks",
    "every_call_is_seen",
    "fsdp_flats",
    "fsdp_groups",
    "fsdp_modules",
    "fsdp_streams",
    "fx_is_tracing",
    "is_distributed",
    "is_own",
    "let_pass_higher_order_operators",
    "missing",
    "require",
    "runs_compiled",
    "set_accumulation_hooks",
    "set_allocator_functions",
]

OLDEST, NEWEST = (2, 8), (2, 15)
"""The torch versions that umem supports, both included."""


class Need(StrEnum):
    """The call that fails in a torch without a name."""

    ENABLE = "umem.enable"
    MANAGE = "umem.manage"
    TRACE = "umem trace"
    PROFILE = "umem.profile"
    HISTORY = "torch.cuda.memory._record_memory_history"
    SLICE_LOSSES = "losses in slices"


@dataclass(frozen=True)
class PrivateName:
    """A private name of torch."""

    path: str
    """``module:attribute``, as in an entry point."""
    purpose: str
    without: str
    """What umem loses in a torch that lacks it."""
    need: Need = Need.ENABLE
    """The call that fails without it."""
    since: tuple[int, int] = OLDEST
    """The first torch version that has it; it is in all later ones up to :data:`NEWEST`."""
    is_cuda: bool = False
    """Whether only torch builds with CUDA have it."""

    @property
    def name(self) -> str:
        """The dotted name: ``torch._C._cuda_memoryStats``."""
        return self.path.replace(":", ".")

    def owner(self) -> tuple[Any, str]:
        """The object that has the name, and the name there."""
        module, _, attributes = self.path.partition(":")
        *parents, attribute = attributes.split(".")
        return pkgutil.resolve_name(f"{module}:{'.'.join(parents)}"), attribute

    def find(self) -> Any:
        """Look it up in torch; ``UnsupportedError`` if this torch lacks it."""
        try:
            return pkgutil.resolve_name(self.path)
        except (AttributeError, ModuleNotFoundError):
            raise _lacks([self]) from None


_SETTERS = {
    # torch takes `malloc` and `free` by name, the other entry points by a setter each.
    "record_stream": "set_record_stream_fn",
    "empty_cache": "set_reset_fn",
    "memory_fraction": "set_memory_fraction_fn",
    "base_allocation": "set_base_alloc_fn",
    "begin_pool": "set_begin_allocate_to_pool",
    "end_pool": "set_end_allocate_to_pool_fn",
    "release_pool": "set_release_pool",
}


def _names(
    purpose: str,
    without: str,
    names: Mapping[str, str],
    need: Need = Need.ENABLE,
    since: tuple[int, int] = OLDEST,
    *,
    is_cuda: bool = False,
) -> dict[str, PrivateName]:
    return {
        key: PrivateName(path, purpose, without, need, since, is_cuda)
        for key, path in names.items()
    }


_HOOKS_OF_ALL_MODULES = (
    *("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks"),
)

PRIVATE_NAMES: Mapping[str, PrivateName] = {
    **_names(
        "torch.cuda.memory.change_current_allocator calls it",
        "the allocator cannot be swapped",
        {"change_allocator": "torch._C:_cuda_changeCurrentAllocator"},
        is_cuda=True,
    ),
    **_names(
        "gives torch umem's functions beside malloc and free",
        "record_stream and empty_cache would do nothing, and CUDA graphs had no memory pools",
        {f"set_{e}": f"torch._C:_CUDAPluggableAllocator.{name}" for e, name in _SETTERS.items()},
        is_cuda=True,
    ),
    **_names(
        "replaced, so that umem lets go of buffers for what the program has moved off the GPU",
        "`torch.cuda.empty_cache` would leave these buffers on the card",
        {"cuda_empty_cache": "torch._C:_cuda_emptyCache"},
        is_cuda=True,
    ),
    **_names(
        "replaced: torch's own raises for a pluggable allocator",
        "torch.cuda.memory_* would raise",
        {
            "cuda_memory_stats": "torch._C:_cuda_memoryStats",
            "cuda_memory_snapshot": "torch._C:_cuda_memorySnapshot",
            "cuda_reset_peak_stats": "torch._C:_cuda_resetPeakMemoryStats",
            "cuda_reset_accumulated_stats": "torch._C:_cuda_resetAccumulatedMemoryStats",
            "cuda_memory_fraction": "torch._C:_cuda_getMemoryFraction",
        },
        is_cuda=True,
    ),
    **_names(
        "replaced: torch's own raises for a pluggable allocator",
        "torch.cuda.memory._record_memory_history raises",
        {
            "cuda_memory_history": "torch._C:_cuda_record_memory_history",
            "cuda_memory_history_legacy": "torch._C:_cuda_record_memory_history_legacy",
        },
        need=Need.HISTORY,
        is_cuda=True,
    ),
    **_names(
        "replaced: torch's own asks the allocator that was swapped",
        "torch.accelerator.memory.* would answer for torch's own allocator",
        {
            "accelerator_is_initialized": "torch._C:_accelerator_isAllocatorInitialized",
            "accelerator_empty_cache": "torch._C:_accelerator_emptyCache",
            "accelerator_stats": "torch._C:_accelerator_getDeviceStats",
            "accelerator_reset_peak_stats": "torch._C:_accelerator_resetPeakStats",
            "accelerator_reset_accumulated_stats": "torch._C:_accelerator_resetAccumulatedStats",
        },
        since=(2, 9),
    ),
    **_names(
        "replaced: a search for algorithms asks for what torch's own allocator alone answers",
        "a program that sets torch.backends.cudnn.benchmark would end at its first convolution",
        {"set_cudnn_benchmark": "torch._C:_set_cudnn_benchmark"},
    ),
    **_names(
        "wrapped, so that what Module.to, .cuda and .half allocate is counted as weights",
        "moved weights would be counted as activations",
        {"module_apply": "torch.nn:Module._apply"},
    ),
    **_names(
        "hooks around a call that Module.compile has compiled",
        "the phases of compiled modules would not be seen",
        {"compiled_call": "torch.nn:Module._compiled_call_impl"},
    ),
    **_names(
        "hooks are not called while torch.fx traces a module",
        "hooks would be called with what is no tensor",
        {"fx_tracing": "torch.fx._symbolic_trace:is_fx_tracing"},
    ),
    **_names(
        "leaves umem's own work out of what torch.jit.trace records",
        "updates would be a part of traced models",
        {
            "tracing_state": "torch._C:_get_tracing_state",
            "set_tracing_state": "torch._C:_set_tracing_state",
        },
    ),
    **_names(
        "finds the tensors inside DTensors, quantised weights and nested arguments",
        "sharded and quantised weights would have no class",
        {
            "is_traceable_wrapper_subclass": (
                "torch.utils._python_dispatch:is_traceable_wrapper_subclass"
            ),
            "tree_leaves": "torch.utils._pytree:tree_leaves",
        },
    ),
    **_names(
        "detects in-place changes, views, and tensors that share a storage",
        "a tensor could be restored from an old copy, or counted twice",
        {
            "version_counter": "torch:Tensor._version",
            "view_base": "torch:Tensor._base",
            "storage_key": "torch:UntypedStorage._cdata",
        },
    ),
    **_names(
        "tells zeros of forward mode, which have no memory",
        "a pass in forward mode would raise where umem sees what it saves",
        {"is_zero_tensor": "torch:_is_zerotensor"},
    ),
    **_names(
        "finds the function of a node that keeps a quantised weight past the saved tensors",
        "the functions of each block would have to be looked for in its graph",
        {"forward_class": "torch.autograd:Function._backward_cls._forward_cls"},
    ),
    **_names(
        "keeps grad mode and inference mode for a block that changes them: an interrupt in the "
        "begin or end of torch.no_grad, which is Python, leaves the program without gradients",
        "weights and optimizer state could not be streamed",
        {"InferenceMode": "torch._C:_InferenceMode"},
    ),
    **_names(
        "orders uses of a tensor behind its update, and finds tensors that share memory",
        "the optimizer's step could not be deferred",
        {
            "DisableTorchFunctionSubclass": "torch._C:DisableTorchFunctionSubclass",
            "storage_address": "torch._C:_storage_address",
            "storage_use_count": "torch._C:_storage_Use_Count",
        },
    ),
    **_names(
        "lets cond, map and the like pass the key of guarded tensors",
        "they would raise for a weight whose update is under way",
        {
            "passed_keys": "torch._ops:_HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS",
            "higher_order_operators": "torch._ops:_higher_order_ops",
        },
    ),
    **_names(
        "tells whether compiled code calls the optimizer's step",
        "updates would be deferred there, and the code compiled again in each step",
        {"eval_frame_callback": "torch._C:_dynamo.eval_frame.get_eval_frame_callback"},
    ),
    **_names(
        "waits for updates before code is compiled, and before it runs if it reads them",
        "compiled code could read weights while they are updated",
        {
            "compiler_callbacks": "torch._dynamo.callback:callback_handler",
            "compiled_context": "torch._dynamo.eval_frame:_callback_from_stance",
            "skips_checks": "torch._dynamo.eval_frame:_is_skip_guard_eval_unsafe_stance",
        },
        Need.MANAGE,
    ),
    **_names(
        "clip_grad_norm_ calls them: answered for gradients on the host without reading these",
        "gradients on the host could not be clipped at their update",
        {"foreach_multiply": "torch:_foreach_mul_", "foreach_norm": "torch:_foreach_norm"},
    ),
    **_names(
        "copies all buffers of a block in one call",
        "blocks with averages, such as BatchNorm's, would be copied, and never computed again",
        {
            "flatten_tensors": "torch._C:_nn.flatten_dense_tensors",
            "unflatten_tensors": "torch._C:_nn.unflatten_dense_tensors",
        },
    ),
    **_names(
        "the class of what runs a process group's collectives on one kind of device",
        "a collective may read weights whose update is under way",
        {"ProcessGroupBackend": "torch.distributed:_Backend"},
    ),
    **_names(
        "tells whether this thread runs a backward pass",
        "a checkpoint's second forward pass would be taken for a new step",
        {"current_graph_task_id": "torch._C:_current_graph_task_id"},
    ),
    **_names(
        "a checkpoint around a call whose two ends are hooks, as torch.distributed's own has it",
        "what blocks save would be copied, and never computed again",
        {"checkpoint_ends": "torch.utils.checkpoint:_checkpoint_without_reentrant_generator"},
    ),
    **_names(
        "tells whether a transform of torch.func runs, whose tensors have no memory of their own",
        "a model that is called through torch.func would end its measurement",
        {"function_transform_level": "torch._C:_functorch.maybe_current_level"},
    ),
    **_names(
        "tells what autocast casts, for the type in which a loss in slices is computed",
        "losses could not be computed in slices",
        {"has_kernel": "torch._C:_dispatch_has_kernel_for_dispatch_key"},
        Need.SLICE_LOSSES,
    ),
    **_names(
        "the operator that torch.nn.functional.cross_entropy calls",
        "losses could not be computed in slices",
        {"cross_entropy_loss": "torch._C:_nn.cross_entropy_loss"},
        Need.SLICE_LOSSES,
    ),
    **_names(
        "the operator of a loss, which is called for slices of its rows",
        "losses could not be computed in slices",
        {"log_softmax_backward": "torch:ops.aten._log_softmax_backward_data"},
        Need.SLICE_LOSSES,
    ),
    **_names(
        "tells TorchScript which operator umem's replacement of a function stands for",
        "a function with a loss could not be scripted",
        {"register_scripted": "torch.jit._builtins:_register_builtin"},
        Need.SLICE_LOSSES,
    ),
    **_names(
        "makes a tensor whose memory comes later",
        "logits that the program casts to float32 would be there whole",
        {"reinterpret_tensor": "torch:ops.inductor._reinterpret_tensor"},
        Need.SLICE_LOSSES,
    ),
    **_names(
        "tells which module made an autograd node, and hooks its gradient in a fraction of "
        "Tensor.register_hook's time",
        "the backward pass could not be divided into modules",
        {
            "next_sequence_number": "torch._C:_autograd._get_sequence_nr",
            "sequence_number": "torch._C:_FunctionBase._sequence_nr",
            "register_hook_dict": "torch._C:_FunctionBase._register_hook_dict",
            "backward_hooks": "torch:Tensor._backward_hooks",
        },
    ),
    **_names(
        "hooks that torch.utils.swap_tensors would leave with what is swapped out",
        "gradients of parameters that are swapped would not be seen any more",
        {"accumulation_hooks": "torch:Tensor._post_accumulate_grad_hooks"},
    ),
    **_names(
        "saved_tensors_hooks without a `with` block: left in any order, and only if innermost",
        "activations could not be followed or offloaded",
        {
            "saved_tensor_hooks_enabled": "torch._C:_autograd._saved_tensors_hooks_is_enabled",
            "top_saved_tensor_hooks": "torch._C:_autograd._top_saved_tensors_default_hooks",
            "push_saved_tensor_hooks": "torch._C:_autograd._push_saved_tensors_default_hooks",
            "pop_saved_tensor_hooks": "torch._C:_autograd._pop_saved_tensors_default_hooks",
        },
    ),
    **_names(
        "counts the steps of parameters that the host updates",
        "the host could not update units",
        {"foreach_add": "torch:_foreach_add_", "foreach_subtract": "torch:_foreach_sub_"},
    ),
    **_names(
        "wrapped: a CUDA graph is no operator, and reads and writes memory by address",
        "a replayed or captured graph may read weights whose update is under way",
        {
            "graph_capture_begin": "torch._C:_CUDAGraph.capture_begin",
            "graph_replay": "torch._C:_CUDAGraph.replay",
        },
        is_cuda=True,
    ),
    **_names(
        "wrapped: torch.utils.swap_tensors calls it, which refuses a tensor with weak references",
        "tensors with a guard could not be swapped",
        {"swap_contents": "torch._C:_swap_tensor_impl"},
    ),
    **_names(
        "wrapped: what torch.autograd.backward and grad call",
        "a backward pass may read saved weights whose update is under way",
        {
            "run_backward": "torch.autograd:_engine_run_backward",
            "run_backward_of_graph": "torch.autograd.graph:_engine_run_backward",
        },
    ),
    **_names(
        "what sees each call of a module or an operator",
        "blocks would run twice, and losses in slices, beside a program that counts such calls",
        {
            **{
                f"all_modules_{name}": f"torch.nn.modules.module:_global_{name}"
                for name in _HOOKS_OF_ALL_MODULES
            },
            "dispatch_modes": "torch._C:_len_torch_dispatch_stack",
            "function_modes": "torch.overrides:_get_current_function_mode_stack",
        },
    ),
    **_names(
        "the current stream's handle, without an object for it",
        "hints could not be ordered behind the computation",
        {"current_raw_stream": "torch._C:_cuda_getCurrentRawStream"},
        is_cuda=True,
    ),
    **_names(
        "torch.cuda.set_stream calls it; an interrupt does not keep it from being set back",
        "work could not be launched on another stream than the program's",
        {"set_stream": "torch._C:_cuda_setStream"},
        is_cuda=True,
    ),
    **_names(
        "runs a model without its memory, and sees every operator and its module",
        "traces could not be recorded",
        {
            **{
                name: f"torch._subclasses.fake_tensor:{name}"
                for name in (
                    "DataDependentOutputException",
                    "DynamicOutputShapeException",
                    "FakeTensor",
                    "FakeTensorMode",
                    "UnsupportedOperatorException",
                )
            },
            "TorchDispatchMode": "torch.utils._python_dispatch:TorchDispatchMode",
            "tree_map_only": "torch.utils._pytree:tree_map_only",
            "current_autograd_node": "torch._C:_current_autograd_node",
            "operator_schema": "torch:ops.aten.add.Tensor._schema",
        },
        Need.TRACE,
    ),
    **_names(
        "counts the operations of attention on the CPU",
        "attention on the CPU would count as no work",
        {
            key: f"torch:ops.aten._scaled_dot_product_flash_attention{end}"
            for key, end in (
                ("flash_attention", ""),
                ("flash_attention_backward", "_backward"),
                ("flash_attention_cpu", "_for_cpu"),
                ("flash_attention_cpu_backward", "_for_cpu_backward"),
            )
        },
        Need.TRACE,
    ),
    **_names(
        "counts the operations of mixture-of-experts layers",
        "their matrix products would count as no work",
        {"grouped_matmul": "torch:ops.aten._grouped_mm"},
        Need.TRACE,
    ),
    **_names(
        "calls a scripted module, whose fused kernels take the addresses of its weights",
        "a scripted model may read weights that are being updated",
        {"scripted_method": "torch._C:ScriptMethod"},
    ),
    **_names(
        "refuses to measure beside torch.profiler, which takes the same records",
        "one of two profilers would miss records without an error",
        {"torch_profiler_runs": "torch.autograd.profiler:_is_profiler_enabled"},
        Need.PROFILE,
    ),
}
"""By the name under which this module offers it."""


def missing(need: Need | None = None) -> list[PrivateName]:
    """Look up every name that this torch should have, and return those that it lacks.

    Names for CUDA, and of ``torch.distributed``, are left out in a torch without it, and those
    newer than this torch; with `need`, also those for another call.
    """
    torch = importlib.import_module("torch")
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    absent = []
    for entry in PRIVATE_NAMES.values():
        if version < entry.since or (entry.is_cuda and torch.version.cuda is None):
            continue
        if need not in (None, entry.need):
            continue
        if entry.path.startswith("torch.distributed:") and not torch.distributed.is_available():
            continue
        try:
            entry.find()
        except UnsupportedError:
            absent.append(entry)
    return absent


def require(need: Need = Need.ENABLE) -> None:
    """Check the names that a call needs.

    If this torch lacks one, the ``UnsupportedError`` names it, and the torch versions that umem
    supports.
    """
    absent = missing(need)
    if absent:
        raise _lacks(absent)


def _lacks(absent: list[PrivateName]) -> UnsupportedError:
    version = importlib.import_module("torch").__version__
    names = ", ".join(entry.name for entry in absent)
    remedy = ""
    if any(entry.need is Need.ENABLE for entry in absent):
        remedy = ", or run without umem: umem.enable(..., fallback=True)"
    return UnsupportedError(
        f"torch {version} lacks {names}, without which {absent[0].without}. Install a torch from "
        f"{'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}{remedy}"
    )


# Looked up when they are first used.
ProcessGroupBackend: Any
current_graph_task_id: Callable[[], int]
current_autograd_node: Callable[[], Any]
current_raw_stream: Callable[[int], int]
dispatch_modes: Callable[[], int]
"""How many modes see this thread's operators."""
flash_attention: Any
flash_attention_backward: Any
flash_attention_cpu: Any
flash_attention_cpu_backward: Any
flatten_tensors: Callable[[Sequence[torch.Tensor]], torch.Tensor]
foreach_add: Callable[..., None]
foreach_subtract: Callable[..., None]
function_modes: Callable[[], list[Any]]
function_transform_level: Callable[[], int | None]
"""None outside of all transforms of ``torch.func``."""
grouped_matmul: Any
has_kernel: Callable[[str, str], bool]
"""Whether an operator has a kernel of its own for a dispatch key, by name."""
is_traceable_wrapper_subclass: Callable[[Any], bool]
is_zero_tensor: Callable[[torch.Tensor], bool]
log_softmax_backward: Callable[..., torch.Tensor]
next_sequence_number: Callable[[], int]
pop_saved_tensor_hooks: Callable[[], None]
push_saved_tensor_hooks: Callable[..., None]
register_scripted: Callable[[Callable[..., Any], str], None]
reinterpret_tensor: Callable[..., torch.Tensor]
"""A tensor of another tensor's storage, whose size is not looked at."""
saved_tensor_hooks_enabled: Callable[[], bool]
set_stream: Callable[[int, int, int], None]
"""Makes a stream the current one, and its device: its id, the device's index and type."""
set_tracing_state: Callable[[Any], None]
storage_address: Callable[[torch.Tensor], int]
"""The address of a tensor's C++ storage, as :func:`storage_key` without an object for it."""
storage_use_count: Callable[[int], int]
"""Number of references to the C++ storage at an address."""
top_saved_tensor_hooks: Callable[[bool], Any]
tracing_state: Callable[[], Any]
"""Of what records a function for ``torch.jit``; None where nothing does."""
tree_leaves: Callable[[Any], list[Any]]
tree_map_only: Callable[..., Any]


def __getattr__(name: str) -> Any:
    if name not in PRIVATE_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = PRIVATE_NAMES[name].find()
    return value


# Attributes of objects.
DTENSOR_PART = "_local_tensor"
"""The attribute of a DTensor that is the plain tensor in it. Its other attributes and methods take
it from there, and a guard lets it pass alone: nothing is lost where a torch has another name."""
version_counter: Callable[[torch.Tensor], int] = attrgetter("_version")
view_base: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("_base")
storage_key: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""The address of the C++ storage: nothing else has it until the storage's weak references died."""
forward_class: Callable[[Any], type[torch.autograd.Function]] = attrgetter("_forward_cls")
"""The function whose backward pass a node is."""
compiled_call: Callable[[nn.Module], Callable[..., Any] | None] = attrgetter("_compiled_call_impl")


def set_compiled_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Replace what `Module.compile` has made of a module's call."""
    module._compiled_call_impl = call


def operator_schema(operator: Any) -> Any:
    """The schema of an operator; None for a higher-order operator."""
    return getattr(operator, "_schema", None)


def sequence_number(node: Any) -> int:
    """The place of an autograd node in the order in which this thread has made them."""
    number: int = node._sequence_nr()
    return number


def hook_gradient(tensor: torch.Tensor, node: Any, hook: Callable[[Any], None]) -> None:
    """Call a function with the gradient of a tensor, before the node that made it runs.

    As ``Tensor.register_hook`` does, which takes several times as long: it makes an ordered
    dictionary, and a handle to remove the hook. The tensor keeps the hooks that it has.
    """
    others = tensor._backward_hooks
    tensor._backward_hooks = {0: hook}
    try:
        node._register_hook_dict(tensor)  # the node holds the dictionary from now on
    finally:
        tensor._backward_hooks = others


def accumulation_hooks(tensor: torch.Tensor) -> dict[int, Any] | None:
    """The hooks of ``Tensor.register_post_accumulate_grad_hook``; None for a tensor without."""
    hooks: Any = tensor._post_accumulate_grad_hooks
    found: dict[int, Any] | None = hooks
    return found


def set_accumulation_hooks(tensor: torch.Tensor, hooks: dict[int, Any] | None) -> None:
    """Have a tensor's gradient heard by these hooks, which handles may refer to."""
    its: Any = tensor
    its._post_accumulate_grad_hooks = hooks


def fx_is_tracing() -> bool:
    """Whether ``torch.fx`` traces a call, in this thread or, up to torch 2.13, in any."""
    module: Any = sys.modules.get("torch.fx._symbolic_trace")
    if module is None:
        return False
    # Where there is a second name, the first one warns.
    return bool(getattr(module, "is_fx_symbolic_tracing", module.is_fx_tracing)())


def runs_compiled() -> bool:
    """Whether this thread is in code that is being compiled, or that graph breaks have left."""
    if "torch._dynamo.eval_frame" not in sys.modules:
        return False
    return bool(PRIVATE_NAMES["eval_frame_callback"].find()() is not None)


def fsdp_modules(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of a model that ``fully_shard`` has wrapped.

    Nothing of umem fails without the private names: in a torch that has others, groups have less,
    or are not found. Then the steps of FSDP2's parameters are not deferred.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")  # a program that has such a module imports it
    wrapped: Any = getattr(fsdp, "FSDPModule", None)
    if wrapped is not None:
        modules = (it for it in model.modules() if isinstance(it, wrapped))
        yield from (it for it in modules if hasattr(it, "_get_fsdp_state"))


def fsdp_groups(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """What FSDP2 gathers together, of some modules that :func:`fsdp_modules` gives."""
    for module in modules:
        wrapped: Any = module
        state = wrapped._get_fsdp_state()
        if hasattr(state, "_fsdp_param_groups"):  # a newer torch may have several
            yield from state._fsdp_param_groups
        else:
            yield getattr(state, "_fsdp_param_group", None)


def fsdp_flats(group: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The parameters of a group, each with the flat view of this rank's part that is gathered."""
    every = (
        (it, getattr(it, "_sharded_param_data", None)) for it in getattr(group, "fsdp_params", ())
    )
    return [(it.sharded_param, flat) for it, flat in every if flat is not None]


def fsdp_streams(group: Any) -> list[Any]:
    """On which a group is gathered, once the first forward pass has made them."""
    context = getattr(group, "comm_ctx", None)
    names = ("all_gather_copy_in_stream", "all_gather_stream")
    return [getattr(context, it) for it in names if hasattr(context, it)]


def let_pass_higher_order_operators(key: int) -> None:
    """Have ``cond``, ``map`` and the like pass a dispatch key, which operators in them meet."""
    ops: Any = importlib.import_module("torch._ops")
    dispatch_key = ops.DispatchKey(key)
    # umem is imported before it refuses a torch without these names.
    getattr(ops, "_HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS", []).append(dispatch_key)
    for operator in getattr(ops, "_higher_order_ops", {}).values():
        operator.fallthrough(dispatch_key)


def is_distributed() -> bool:
    """Whether ``torch.distributed`` is initialised."""
    distributed: Any = importlib.import_module("torch.distributed")
    return distributed.is_available() and distributed.is_initialized()


def every_call_is_seen() -> bool:
    """Whether the program sees each call of a module or an operator: it may count them.

    By hooks of all modules, or by a mode; that of a default device sees nothing for the program.
    """
    hooks, dispatch_modes, function_modes = _observers()
    if dispatch_modes() or not all(is_own(it) for some in hooks for it in some.values()):
        return True
    return any(type(it).__name__ != "DeviceContext" for it in function_modes())


@functools.cache
def _observers() -> tuple[list[Any], Callable[[], int], Callable[[], list[Any]]]:
    hooks = [PRIVATE_NAMES[f"all_modules_{it}"].find() for it in _HOOKS_OF_ALL_MODULES]
    return hooks, PRIVATE_NAMES["dispatch_modes"].find(), PRIVATE_NAMES["function_modes"].find()


def is_own(hook: Any) -> bool:
    """Whether what torch calls is umem's."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith("umem.")


def torch_profiler_runs() -> bool:
    """Whether torch.profiler is at work in this process."""
    if "torch.autograd.profiler" not in sys.modules:
        return False
    return bool(PRIVATE_NAMES["torch_profiler_runs"].find())


def set_allocator_functions(allocator: Any, entry_points: Mapping[str, int]) -> None:
    """Give torch's pluggable allocator the entry points that it does not take by name.

    They are the native library's ``torch_entry_points()``: addresses by name.
    """
    for entry, setter in _SETTERS.items():
        getattr(allocator, setter)(entry_points[entry])
