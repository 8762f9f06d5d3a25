"""Everything that umem changes in torch and in other libraries while a program runs.

:data:`PATCHES` has an entry for each change: what is changed, where in umem, when, until when, and
what is lost without it. An attribute of a library is replaced by :func:`replace` or :func:`wrap`
alone, and put back by :func:`undo` or with the process. ``python -m umem.patches`` prints the table
of ``docs/architecture.md``.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import Any, NamedTuple

from umem.torch_compat import PRIVATE_NAMES

__all__ = ["PATCHES", "Patch", "PatchWay", "in_force", "replace", "table", "undo", "wrap"]


class PatchWay(StrEnum):
    """How a library is changed."""

    REPLACED = "replaced"
    """An attribute has another value, by this module."""
    OF_PROGRAM = "in the program's own classes and objects"
    """The same in what belongs to the program, which no record here keeps alive."""
    CALLED = "called"
    """The function adds a hook, or makes a setting, for all users of the library."""
    NATIVE = "in C++"
    """By native code of umem."""


@dataclass(frozen=True)
class Patch:
    """A change of a library."""

    path: str
    """``module:attribute``, as in an entry point. A library may lack it, and is left as it is."""
    made_in: str
    """The file of umem that makes the change, from ``umem/`` on."""
    since: str
    """When it is made."""
    until: str
    """When it is undone."""
    without: str
    """What is lost without it."""
    way: PatchWay = PatchWay.REPLACED

    @property
    def name(self) -> str:
        """The dotted name."""
        return self.path.replace(":", ".")

    @functools.cached_property
    def _names(self) -> tuple[str, ...]:
        module, _, attributes = self.path.partition(":")
        return module, *attributes.split(".")

    @functools.cached_property
    def attribute(self) -> str:
        """The last part of the name."""
        return self._names[-1]

    def owner(self) -> Any:
        """The object that has the attribute; None while its module is not imported."""
        module, *names = self._names[:-1]
        owner: Any = sys.modules.get(module)
        for name in names:
            owner = getattr(owner, name, None)
        return owner


def _patches(
    made_in: str,
    since: str,
    until: str,
    without: str,
    paths: Mapping[str, str],
    way: PatchWay = PatchWay.REPLACED,
) -> dict[str, Patch]:
    return {key: Patch(path, made_in, since, until, without, way) for key, path in paths.items()}


def _private(made_in: str, since: str, until: str, *keys: str) -> dict[str, Patch]:
    """Entries for private names of torch, which say themselves what is lost without them."""
    private = {key: PRIVATE_NAMES[key] for key in keys}
    return {
        key: Patch(name.path, made_in, since, until, name.without) for key, name in private.items()
    }


_ENABLE, _NEVER = "`umem.enable`", "never"
_SLICED = "the first training whose activations may be copied, but under `slice_losses: never`"
_STREAMED, _TRAININGS_END = "state that is streamed", "the end of all such trainings"

PATCHES: Mapping[str, Patch] = {
    # ---- the allocator
    **_patches(
        "swap.py",
        _ENABLE,
        _NEVER,
        "memory would come from torch's own allocator",
        {"allocator": "torch.cuda.memory:change_current_allocator"},
        PatchWay.CALLED,
    ),
    **_private(
        "runtime/memory_stats.py",
        _ENABLE,
        _NEVER,
        *(key for key in PRIVATE_NAMES if key.startswith(("cuda_", "accelerator_"))),
    ),
    **_private("runtime/convolution_search.py", _ENABLE, _NEVER, "set_cudnn_benchmark"),
    **_patches(
        "runtime/convolution_search.py",
        _ENABLE,
        _NEVER,
        PRIVATE_NAMES["set_cudnn_benchmark"].without,
        {"cudnn_benchmark": "torch.backends.cudnn:benchmark.setter"},
    ),
    **_patches(
        "runtime/array_libraries.py",
        "`umem.enable` with the policy's `share`",
        _NEVER,
        "arrays of these libraries would have memory beside umem's budget",
        {
            "rmm_resource": "rmm.mr:set_per_device_resource",
            "numba_memory": "numba.cuda:set_memory_manager",
            "cupy_memory": "cupy.cuda:set_allocator",
        },
        PatchWay.CALLED,
    ),
    # ---- classes of tensors, and the search for trainings
    **_private("runtime/classification.py", _ENABLE, _NEVER, "module_apply"),
    **_patches(
        "runtime/classification.py",
        _ENABLE,
        _NEVER,
        "tensors would have no class",
        {
            "parameter_hook": "torch.nn.modules.module:register_module_parameter_registration_hook",
            "classifying_before": "torch.optim.optimizer:register_optimizer_step_pre_hook",
            "classifying_after": "torch.optim.optimizer:register_optimizer_step_post_hook",
        },
        PatchWay.CALLED,
    ),
    **_patches(
        "runtime/classification.py",
        "`umem.enable`, and each parameter that is registered or moved",
        "the second call of a module that the program calls itself",
        "activations would count as weights, and models would not be found",
        {"call_hook": "torch.nn.modules.module:register_module_forward_pre_hook"},
        PatchWay.CALLED,
    ),
    **_patches(
        "swap.py",
        "`umem.enable`",
        _NEVER,
        "trainings would not be managed without a call of `umem.manage`",
        {"finding_trainings": "torch.optim.optimizer:register_optimizer_step_post_hook"},
        PatchWay.CALLED,
    ),
    **_patches(
        "adapters/transformers.py",
        "the first parameter after transformers was imported",
        _NEVER,
        "a model larger than the budget would page-lock as much host memory as it has weights",
        {"transformers_warmup": "transformers.modeling_utils:caching_allocator_warmup"},
    ),
    **_patches(
        "adapters/transformers.py",
        "the same, under a policy that streams weights",
        _NEVER,
        "weights would be copied from their files by one thread",
        {"transformers_copy": "transformers.core_model_loading:_materialize_copy"},
    ),
    # ---- graphs
    **_patches(
        "runtime/torch_hooks/graphed.py",
        _ENABLE,
        _NEVER,
        "a graph would record moves of weights, or read weights that move later",
        {
            "cuda_graphed_callables": "torch.cuda:make_graphed_callables",
            "graphed_callables": "torch.cuda.graphs:make_graphed_callables",
        },
    ),
    **_private(
        "runtime/torch_hooks/work_starts.py",
        _STREAMED,
        _TRAININGS_END,
        "graph_replay",
        "graph_capture_begin",
    ),
    **_patches(
        "runtime/torch_hooks/work_starts.py",
        _STREAMED,
        _TRAININGS_END,
        PRIVATE_NAMES["graph_replay"].without,
        {
            "accelerator_graph_replay": "torch.accelerator:Graph.replay",
            "accelerator_graph_capture_begin": "torch.accelerator:Graph.capture_begin",
        },
    ),
    **_patches(
        "runtime/torch_hooks/work_starts.py",
        _STREAMED,
        _TRAININGS_END,
        PRIVATE_NAMES["scripted_method"].without,
        {"scripted_method": PRIVATE_NAMES["scripted_method"].path + ".__call__"},
    ),
    # ---- backward passes
    **_private(
        "runtime/torch_hooks/work_starts.py",
        "state or weights that are streamed",
        "the end of these",
        "run_backward",
        "run_backward_of_graph",
    ),
    **_patches(
        "runtime/torch_hooks/backward.py",
        "steps that are recorded or measured",
        "the end of these",
        "the begin and end of backward passes would not be seen",
        {"backward": "torch.autograd:backward"},
    ),
    # ---- memory that leaves by no operator
    **_patches(
        "runtime/torch_hooks/memory_access.py",
        "tensors that are guarded, or on lent memory",
        "the end of the last guard and the last such memory",
        "who takes an address or a storage would read weights that are updated",
        {
            "data_ptr": "torch:Tensor.data_ptr",
            "const_data_ptr": "torch:Tensor.const_data_ptr",
            "untyped_storage": "torch:Tensor.untyped_storage",
            "data": "torch:Tensor.data",
            "swap_contents": PRIVATE_NAMES["swap_contents"].path,
            "scripted_function": "torch.jit:ScriptFunction.__call__",
            "new_subclasses": "torch:Tensor.__init_subclass__",
        },
    ),
    **_patches(
        "runtime/known_tensors.py",
        "`umem.enable`, or the first state that is streamed",
        _NEVER,
        "`torch.utils.swap_tensors` would raise: umem has weak references to parameters",
        {"swap_tensors": "torch.utils:swap_tensors"},
    ),
    **_patches(
        "runtime/torch_hooks/memory_access.py",
        "the same, in each subclass of a program or of another library",
        "the end of the last guard and the last such memory",
        "tensors in such a tensor would be read while they are updated",
        {"subclass_operators": "torch:Tensor.__torch_dispatch__"},
    ),
    **_patches(
        "runtime/torch_hooks/memory_access.py",
        "`umem.enable`, or the first tensors that are guarded",
        _NEVER,
        "memory would move that another library reads",
        {
            "tensor_dlpack": "torch:Tensor.__dlpack__",
            "utils_to_dlpack": "torch.utils.dlpack:to_dlpack",
            "to_dlpack": "torch:to_dlpack",
            "cuda_array_interface": "torch:Tensor.__cuda_array_interface__",
        },
    ),
    **_patches(
        "runtime/torch_hooks/memory_access.py",
        "the first tensors that are guarded, for each method that takes tensors",
        _NEVER,
        PRIVATE_NAMES["ProcessGroupBackend"].without,
        {"backend_methods": f"{PRIVATE_NAMES['ProcessGroupBackend'].path}.*"},
    ),
    **_patches(
        "runtime/torch_hooks/function_attributes.py",
        "a function that keeps streamed weights as attributes of its nodes, as bitsandbytes' do",
        _NEVER,
        "weights of each block would stay on the device until the backward pass",
        {
            "function_forward": "torch.autograd:Function.forward",
            "node_attributes": "torch.autograd.function:BackwardCFunction.*",
        },
        PatchWay.OF_PROGRAM,
    ),
    **_patches(
        "offloading/store.py",
        "the forward pass of what has its activations copied, in its thread",
        "the end of that pass",
        "activations would stay on the device",
        {"copied_tensors": PRIVATE_NAMES["push_saved_tensor_hooks"].path},
        PatchWay.CALLED,
    ),
    **_patches(
        "capture/live/saved_tensors.py",
        "the forward pass of a step that is recorded or measured, in its thread",
        "the end of that pass",
        "what a block saves for the backward pass would not be known",
        {"measured_tensors": PRIVATE_NAMES["push_saved_tensor_hooks"].path},
        PatchWay.CALLED,
    ),
    **_patches(
        "streaming/activations/recomputed.py",
        "both calls of a block that runs twice, in the thread of each",
        "the end of that call",
        "what such a block saves would stay on the device",
        {"recomputed_tensors": PRIVATE_NAMES["push_saved_tensor_hooks"].path},
        PatchWay.CALLED,
    ),
    **_patches(
        "streaming/activations/random_states.py",
        "a block's second call, in the first measured step and in backward passes, in its thread",
        "the end of that call",
        "blocks with dropout could not run twice: what they save would be copied",
        {"random_state": "torch:set_rng_state"},
        PatchWay.CALLED,
    ),
    **_patches(
        "streaming/activations/call_states.py",
        "a second call in a backward pass, where the program has set others since the first",
        "the end of that call",
        "the second call could choose other types and kernels",
        {
            "default_type": "torch:set_default_dtype",
            "determinism": "torch:set_deterministic_debug_mode",
            "flash_attention": "torch.backends.cuda:enable_flash_sdp",
            "efficient_attention": "torch.backends.cuda:enable_mem_efficient_sdp",
            "plain_attention": "torch.backends.cuda:enable_math_sdp",
            "cudnn_attention": "torch.backends.cuda:enable_cudnn_sdp",
            "cudnn_flags": "torch.backends.cudnn:set_flags",
        },
        PatchWay.CALLED,
    ),
    **_patches(
        "runtime/torch_hooks/saved_tensors.py",
        "the first pass in which umem sees saved tensors",
        _NEVER,
        "transforms of `torch.func` in such a pass would raise",
        {"disabled_saved_tensors": "torch.autograd.graph:disable_saved_tensors_hooks"},
    ),
    **_patches(
        "runtime/torch_hooks/saved_tensors.py",
        "the end of such a transform",
        "the end of the pass",
        "what is saved behind it would stay on the device",
        {"returned_hooks": PRIVATE_NAMES["push_saved_tensor_hooks"].path},
        PatchWay.CALLED,
    ),
    **_patches(
        "streaming/activations/program_checkpoints.py",
        "the first training with a budget whose policy lets blocks run twice",
        _NEVER,
        "the program's checkpoints would run where there is room for what they free",
        {"program_checkpoints": PRIVATE_NAMES["checkpoint_ends"].path},
    ),
    **_private(
        "streaming/activations/sliced_loss.py",
        _SLICED,
        _NEVER,
        "cross_entropy_loss",
    ),
    **_patches(
        "streaming/activations/sliced_loss.py",
        _SLICED,
        _NEVER,
        "logits that the program casts to float32 would be there whole, and their gradient",
        {"upcast": "torch:Tensor.float"},
    ),
    # ---- deferred steps
    **_patches(
        "runtime/torch_hooks/stream_order.py",
        "the first deferred step, or the first copied activation",
        _NEVER,
        "a stream that waits for the program's would not wait for deferred updates",
        {
            **{
                f"cuda_event_{name}": f"torch.cuda:Event.{name}"
                for name in ("record", "wait", "synchronize", "query")
            },
            **{f"event_{name}": f"torch:Event.{name}" for name in ("record", "wait")},
            **{
                f"cuda_stream_{name}": f"torch.cuda:Stream.{name}"
                for name in ("synchronize", "query")
            },
            **{
                f"stream_{name}": f"torch:Stream.{name}"
                for name in ("record_event", "wait_event", "wait_stream", "synchronize", "query")
            },
        },
    ),
    **_patches(
        "runtime/torch_hooks/stream_order.py",
        "each record of an event",
        "the next record",
        "an event would not carry the updates that its stream has not waited for",
        {"event_updates": "torch.cuda:Event.umem_behind"},
        PatchWay.OF_PROGRAM,
    ),
    **_patches(
        "runtime/native_guard.py",
        "the import of the guard of tensors",
        _NEVER,
        "steps would wait for their updates",
        {"dispatch_key": "torch.library:Library.fallback"},
        PatchWay.NATIVE,
    ),
    **_patches(
        "torch_compat.py",
        "the import of the guard of tensors",
        _NEVER,
        "`cond`, `map` and the like would raise for a weight whose update is under way",
        {
            "passed_keys": PRIVATE_NAMES["passed_keys"].path + ".append",
            "higher_order_operators": "torch._ops:HigherOrderOperator.fallthrough",
        },
        PatchWay.CALLED,
    ),
    **_patches(
        "runtime/torch_hooks/compilation.py",
        f"the first training with {_STREAMED}",
        _NEVER,
        PRIVATE_NAMES["compiled_context"].without,
        {
            "compiled_context": PRIVATE_NAMES["compiled_context"].path,
            "compiler_reset": "torch._dynamo.callback:CompilationCallbackHandler.clear",
        },
    ),
    **_patches(
        "runtime/torch_hooks/compilation.py",
        f"the first training with {_STREAMED}",
        _NEVER,
        PRIVATE_NAMES["compiler_callbacks"].without,
        {
            "compiler_callback": (
                "torch._dynamo.callback:CompilationCallbackHandler.register_start_callback"
            )
        },
        PatchWay.CALLED,
    ),
    **_patches(
        "adapters/fsdp.py",
        "the first deferred step of parameters of FSDP2",
        _NEVER,
        "gathering would wait for the updates of a whole step",
        {
            "fsdp_gathering": (
                "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.unshard"
            )
        },
    ),
    # ---- calls of modules
    **_patches(
        "runtime/torch_hooks/hidden.py",
        "a hook of umem on a module or an optimizer",
        "the end of the last hook there",
        "hooks would be pickled, copied, compiled and graphed with the model",
        {"hook_dictionaries": "torch.utils.hooks:RemovableHandle.hooks_dict_ref.__class__"},
        PatchWay.OF_PROGRAM,
    ),
    **_patches(
        "runtime/torch_hooks/modules.py",
        "a hook of umem on a module that `Module.compile` has compiled",
        "the end of the last hook there",
        PRIVATE_NAMES["compiled_call"].without,
        {"compiled_call": PRIVATE_NAMES["compiled_call"].path},
        PatchWay.OF_PROGRAM,
    ),
    **_patches(
        "runtime/torch_hooks/modules.py",
        "a model whose `forward` the program calls itself",
        _NEVER,
        "hooks on the model would not be called",
        {"module_forward": "torch.nn:Module.forward"},
        PatchWay.OF_PROGRAM,
    ),
    **_patches(
        "streaming/weights/managed_models.py",
        "the first model whose weights are streamed",
        _NEVER,
        "weights that were fetched ahead of a step would be used after it",
        {"weights_before_steps": "torch.optim.optimizer:register_optimizer_step_pre_hook"},
        PatchWay.CALLED,
    ),
    # ---- what is recorded
    **_patches(
        "capture/offline/record.py",
        "`umem trace record` of a program",
        "the end of the recording",
        "autocast for a GPU would do nothing, as the program runs on the CPU",
        {"autocast": "torch:autocast.__init__"},
    ),
    **_patches(
        "capture/offline/module_scopes.py",
        "`umem trace record`",
        "the end of the recording",
        "operators would belong to no module, and steps would have no phases",
        {
            "recorded_children": (
                "torch.nn.modules.module:register_module_module_registration_hook"
            ),
            "recorded_call": "torch.nn.modules.module:register_module_forward_pre_hook",
            "recorded_return": "torch.nn.modules.module:register_module_forward_hook",
            "recorded_step": "torch.optim.optimizer:register_optimizer_step_pre_hook",
            "recorded_step_end": "torch.optim.optimizer:register_optimizer_step_post_hook",
        },
        PatchWay.CALLED,
    ),
    **_patches(
        "capture/offline/recorder.py",
        "`umem trace record`",
        "the end of the recorded step",
        "gradients that autograd has not accumulated would have no class",
        {"recorded_gradients": "torch.optim.optimizer:register_optimizer_step_pre_hook"},
        PatchWay.CALLED,
    ),
    **_patches(
        "capture/offline/models.py",
        "`umem trace` of a model of transformers with fused attention",
        _NEVER,
        "its attention would be recorded with a mask, which takes other kernels",
        {"fused_attention": "transformers:AttentionInterface.register"},
        PatchWay.CALLED,
    ),
    **_patches(
        "telemetry/profiler.py",
        "`umem.profile`",
        "the end of the profile",
        "moves of gradients would belong to no tensor",
        {"profiled_step": "torch.optim.optimizer:register_optimizer_step_pre_hook"},
        PatchWay.CALLED,
    ),
    **_patches(
        "telemetry/cupti.py",
        "`umem.profile`, where CUPTI is there",
        _NEVER,
        "nothing would be recorded",
        {"cupti_records": "cupti.cupti:activity_register_callbacks"},
        PatchWay.CALLED,
    ),
    **_patches(
        "hardware/measure.py",
        "`umem hardware measure`, for each of its measurements",
        "the end of that measurement",
        "a card would be measured in the program's own precision, or another card",
        {
            "measured_device": "torch.cuda:set_device",
            "measured_precision": "torch:set_float32_matmul_precision",
        },
        PatchWay.CALLED,
    ),
    **_patches(
        "core/compiled.py",
        "the import of a planner or a simulator",
        _NEVER,
        "nothing would say why the first plan takes a minute",
        {"numba_compiles": "numba.core.event:register"},
        PatchWay.CALLED,
    ),
}
"""By the name under which umem installs it."""


_ABSENT = object()


class _Installed(NamedTuple):
    """A value of umem's in the place of a library's."""

    owner: Any
    attribute: str
    before: Any
    """What the owner had itself, and gets back; `_ABSENT` where it has inherited the attribute."""
    ours: Any

    def is_in_force(self) -> bool:
        return vars(self.owner).get(self.attribute, _ABSENT) is self.ours


_installed: dict[str, dict[tuple[int, str], _Installed]] = {key: {} for key in PATCHES}
"""By the entry, and by the ``id`` of the owner and its attribute."""


def wrap(key: str, make: Callable[[Any], Any], *, owner: Any = None, attribute: str = "") -> bool:
    """Replace an attribute by what a function makes of it, unless it is umem's already.

    An interrupt at any moment leaves what another call, or :func:`undo`, completes.

    Parameters
    ----------
    key
        Of :data:`PATCHES`.
    make
        Gets the attribute as an access of the owner returns it.
    owner, attribute
        For entries that stand for several attributes, or for classes of the program.

    Returns
    -------
    bool
        Whether it is replaced: not in a library that lacks it, or is not imported.
    """
    patch = PATCHES[key]
    owner = patch.owner() if owner is None else owner
    attribute = attribute or patch.attribute
    original = _ABSENT if owner is None else getattr(owner, attribute, _ABSENT)
    if original is _ABSENT:
        return False
    place = id(owner), attribute
    known = _installed[key].get(place)
    if known is None or not known.is_in_force():
        before, ours = vars(owner).get(attribute, _ABSENT), make(original)
        if patch.way is PatchWay.REPLACED:
            _installed[key][place] = _Installed(owner, attribute, before, ours)
        _set(owner, attribute, ours)
    return True


def replace(key: str, by: Any, *, owner: Any = None, attribute: str = "") -> bool:
    """Replace an attribute by a value, as :func:`wrap` does."""
    return wrap(key, lambda _: by, owner=owner, attribute=attribute)


def undo(*keys: str) -> None:
    """Put back what the library had under some entries.

    Where something else has replaced umem's value since, both stay.
    """
    for key in keys:
        places = _installed[key]
        for place, installed in list(places.items()):
            # Something else around umem's value may be taken off again: then it is known.
            if not installed.is_in_force():
                continue
            owner, attribute, before, _ = installed
            if before is _ABSENT:
                delattr(owner, attribute)
            else:
                _set(owner, attribute, before)
            # Garbage that is collected meanwhile may have called this, too.
            if places.get(place) is installed:
                places.pop(place, None)


def in_force(key: str) -> list[tuple[Any, str]]:
    """The owners of attributes that are umem's now under an entry, each with the attribute."""
    installed = list(_installed[key].values())
    return [(some.owner, some.attribute) for some in installed if some.is_in_force()]


def _set(owner: Any, attribute: str, value: Any) -> None:
    """Set an attribute, which may be one of a class of a C extension."""
    try:
        setattr(owner, attribute, value)
    except TypeError:
        # The class has no subclass that could stand for it: instances are made in C too.
        (attributes,) = gc.get_referents(vars(owner))
        attributes[attribute] = value
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(owner))


def table() -> Iterator[str]:
    """The rows of :data:`PATCHES` in Markdown: names that are changed alike share one."""
    yield "| what | how | where | since | until | without it |"
    yield "|---|---|---|---|---|---|"

    def cells_of(patch: Patch) -> tuple[str, ...]:
        return patch.way, f"`{patch.made_in}`", patch.since, patch.until, patch.without

    for cells, group in groupby(PATCHES.values(), cells_of):
        names = ", ".join(f"`{patch.name}`" for patch in group)
        yield f"| {names} | {' | '.join(cells)} |"


if __name__ == "__main__":
    print(*table(), sep="\n")
