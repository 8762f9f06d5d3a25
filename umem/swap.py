"""`umem.enable`: swaps torch's CUDA allocator for umem's, and manages the trainings that follow."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from umem.core.arguments import check_argument
from umem.core.classes import TensorClass
from umem.core.errors import CudaError, EnableError, NativeLibraryError, UmemError, UnsupportedError
from umem.core.log import show_log
from umem.hardware.capabilities import Capabilities, detect_all
from umem.hardware.host_memory import PINNED_SHARE, host_memory
from umem.hardware.host_share import HostShare, host_share
from umem.hardware.load import describe_machine
from umem.policy import Policy, ResolvedPolicy, check_environment, load_policy, resolve
from umem.runtime.array_libraries import import_libraries, share_with
from umem.runtime.convolution_search import leave_search_off
from umem.runtime.host_room import divide_host
from umem.runtime.live_figures import live_figures
from umem.runtime.live_socket import serve
from umem.runtime.memory_stats import install_memory_stats
from umem.runtime.native_guard import guard_problem, guard_remedy, native_guard
from umem.runtime.native_library import native
from umem.runtime.state import (
    Runtime,
    is_enabled,
    native_config,
    record_fallback,
    runtime,
    set_runtime,
)
from umem.torch_compat import require, runs_compiled, set_allocator_functions

__all__ = [
    "HostCaps",
    "check_devices",
    "enable",
    "host_caps",
    "manage_automatically",
    "managed_bytes_of_device",
    "resolve_for",
]

_LOG = logging.getLogger("umem")

MANAGED_SHARE_OF_CARD = 0.9
"""Cap on a process's managed memory, as a share of the memory of the cards that it uses, if the
policy sets neither a cap nor a budget: a card that is oversubscribed far beyond its memory can
hang."""

MANAGED_SHARE_OF_HOST = 0.5
"""With a budget, tensors beyond it live on the host: the cap is the budget plus this share of the
process's share of host memory, which page-locked memory cannot have then. The rest is for data
loaders and other programs."""

_NOTHING_BYTES = 1
"""A cap that lets nothing through: 0 stands for no cap."""

_LOADING_SHARE = 1 - 1 / 64
"""Of the budget, while a model is loaded whose weights may be streamed: page tables of the weights
that find no room take device memory too, 1/512 of their size. Enough for eight times the budget."""

_STEPS_WITHOUT_MODEL = 8
"""Steps of an optimizer after which umem stops looking for its model."""

_STEPS_WITHOUT_OWNER = 2
"""Steps after which parameters that no called module holds count as those of a model besides."""

_COST = "What the device budget has no room for is used in host memory, which is slow"
"""Of what is not managed."""

_NO_MODEL = (
    "umem: %s is not managed: no module with trained parameters on its device was called in %d "
    "steps. Its state is used in host memory, which is slow. Call umem.manage(model, optimizer) "
    "with a module that the training calls in each step, before the first one"
)
"""Warning where state could be streamed beside any model."""

_NO_OWNER = (
    "umem: %s is not managed: no module that was called in %d steps holds its parameters, and only "
    "those of a model are planned. What the device budget has no room for is moved by page faults, "
    "which is slow. If a module holds them, call umem.manage(model, optimizer) before the first "
    "step. If a library made them, as DeepSpeed does, use a policy with `optimizer_state: "
    "{mechanism: stream}`, such as sft"
)
"""Warning where only a model with its own parameters can be planned."""


def enable(policy: str | os.PathLike[str] | Policy = "sft", *, fallback: bool = False) -> bool:
    """Swap torch's CUDA allocator for umem's, for the rest of the process.

    Call it in the first lines of a script, before torch uses the GPU.

    Parameters
    ----------
    policy
        A preset's name (``umem policy list``), the path of a YAML file, or a
        :class:`umem.Policy`.
    fallback
        If umem cannot take over, warn and keep torch's own allocator instead of raising. An
        invalid policy, or environment variable that changes it, is an error all the same.

    Returns
    -------
    bool
        True when umem's allocator is in place, False after a fallback.

    Raises
    ------
    TypeError
        If `policy` or `fallback` is of another type.
    PolicyError
        If the policy, or an environment variable that changes it, is invalid.
    EnableError
        If it is too late (CUDA has started), or umem is enabled already.
    UnsupportedError
        If there is no usable GPU, it cannot do what the policy asks, or torch lacks a name that
        umem needs (:mod:`umem.torch_compat`).
    NativeLibraryError
        If the native library, RMM or CUDA's runtime is missing.
    CudaError
        If the driver does not start.

    Examples
    --------
    >>> import umem
    >>> umem.enable("sft")  # doctest: +SKIP
    True
    """
    check_argument("fallback", fallback, bool, "give True or False")
    loaded = load_policy(policy)
    check_environment()
    show_log()
    if is_enabled():
        raise EnableError(
            f"umem is enabled already, with policy {runtime().policy.name!r}: a process swaps its "
            "allocator once. Remove this call, or leave out `umem run` around the script."
        )
    try:
        set_runtime(_enable(loaded))
    except (EnableError, UnsupportedError, NativeLibraryError, CudaError) as error:
        if not fallback:
            raise
        record_fallback(str(error))
        serve(live_figures)
        warnings.warn(
            f"umem is not in use, torch's own allocator stays: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    state = runtime()
    serve(live_figures, partial(divide_host, state.allocator, state.pinned_share))
    return True


def _enable(policy: Policy) -> Runtime:
    # Everything that can fail comes before `install`, which is the first change to the process.
    # CUDA reads this when it starts: as many launches in a queue as it offers. With CUDA's own
    # number `step()` blocked for 1.2 s of a 7B's 2.6, in which the forward pass was not launched
    # (150 ms with it; one H100, driver 580.159, 2026-11-25).
    os.environ.setdefault("CUDA_SCALE_LAUNCH_QUEUES", "4x")
    library = native()
    _check_torch(library)
    require()
    # They use private names of torch, which `require` has checked.
    from umem.adapters import adapt_loading
    from umem.runtime.classification import Classifier, gradient_hook
    from umem.runtime.held_memory import note_export
    from umem.runtime.model_loading import CudaLoadingMemory
    from umem.runtime.torch_hooks.graphed import watch_graphing
    from umem.runtime.torch_hooks.memory_access import on_export
    from umem.streaming.stage.state_room import StateRoom

    capabilities = detect_all()
    if not capabilities:
        raise UnsupportedError(
            "no GPU is visible to this process. See `nvidia-smi` and CUDA_VISIBLE_DEVICES; "
            "`umem doctor` says more; umem.enable(..., fallback=True) runs the script without umem."
        )
    by_device = resolve_for(policy, capabilities)
    resolved = by_device[0]
    check_devices(resolved, capabilities)
    import_libraries(resolved.share)
    of_device = managed_bytes_of_device(by_device, capabilities)
    share = host_share()
    has_one_pool = any(it.integrated for it in capabilities)
    caps = host_caps(resolved, share, has_managed_cap=any(of_device), has_one_pool=has_one_pool)
    config = native_config(
        replace(resolved, managed_limit_bytes=caps.managed_bytes), caps.pinned_bytes, of_device
    )
    pluggable = _pluggable_allocator(library)
    try:
        allocator = library.install(config)
    except RuntimeError as error:
        raise UnsupportedError(
            f"CUDA's runtime or RMM refuses this machine ({error}): see `umem doctor`."
        ) from error
    try:
        torch.cuda.memory.change_current_allocator(pluggable)
    except RuntimeError as error:
        raise EnableError(
            f"torch refuses the swap ({error}): something used the GPU before umem.enable(). Move "
            "`import umem; umem.enable(...)` to the top of the script."
        ) from error
    for device, its in enumerate(by_device):
        part = _LOADING_SHARE if its.streams_weights else 1
        allocator.set_device_budget(device, int(part * (its.device_budget_bytes or 0)))
    install_memory_stats(allocator)
    leave_search_off()
    budgets = tuple(its.device_budget_bytes for its in by_device)
    # Room is given as memory of class `other`.
    has_room = resolved.streams_state and resolved.rules[TensorClass.OTHER.number].kind == "device"
    state_room = StateRoom(allocator, budgets) if has_room else None
    loading_memory = CudaLoadingMemory() if resolved.streams_weights else None
    classifier = Classifier(
        allocator, gradient_hook(allocator), state_room, partial(adapt_loading, loading_memory)
    )
    classifier.install()
    share_with(resolved.share, allocator)
    if resolved.streams_weights:
        classifier.on_root = _stream_weights
    watch_graphing(_graphing_begins)
    on_export(note_export)
    if problem := guard_problem():
        _LOG.warning(
            "umem: optimizer steps wait for their updates, and weights are not fetched ahead: %s. "
            "To add the guard of tensors: %s",
            problem,
            guard_remedy(),
        )
    streams_state = resolved.streams_state or resolved.copies_activations
    if resolved.planner != "none" or streams_state:
        manage_automatically(
            classifier.roots,
            is_planned=resolved.planner != "none",
            streams_state=streams_state,
        )
    return Runtime(
        policy, resolved, budgets, capabilities, allocator, classifier, caps.pinned_share
    )


def _pluggable_allocator(library: Any) -> Any:
    """The allocator as torch takes it; through the guard, out of memory is torch's own error."""
    entry_points = library.torch_entry_points()
    names = str(library.__file__), "umem_malloc", "umem_free"
    guard = native_guard()
    if guard is not None:
        guard.set_allocator(entry_points["malloc"], entry_points["free"])
        names = str(guard.__file__), "umem_guard_malloc", "umem_guard_free"
    pluggable = torch.cuda.memory.CUDAPluggableAllocator(*names)
    set_allocator_functions(pluggable.allocator(), entry_points)
    return pluggable


def _check_torch(library: Any) -> None:
    if torch.version.cuda is None:
        raise UnsupportedError(
            f"torch {torch.__version__} is built without CUDA, so there is no allocator to swap: "
            "install a CUDA build of torch, or try `umem demo`, which needs no GPU."
        )
    if not library.HAS_CUDA:
        raise NativeLibraryError(
            "umem was built without CUDA and RMM: build it again from its sources with "
            "`UMEM_CUDA=13 pip install --force-reinstall --no-deps .` (or 12)."
        )
    if torch.cuda.is_initialized() or library.installed() is not None:
        raise EnableError(
            "too late: CUDA has started in this process, and torch's allocator with it. Move "
            "`import umem; umem.enable(...)` above the first line that uses the GPU, or start the "
            "script with `umem run`."
        )


def resolve_for(policy: Policy, capabilities: Sequence[Capabilities]) -> tuple[ResolvedPolicy, ...]:
    """Resolve a policy for each GPU, which differ in free memory; raises ``PolicyError``."""
    host = host_memory()
    host_bytes = None if host is None else host.total_bytes
    return tuple(
        resolve(policy, describe_machine(it, host_bytes), free_bytes=it.free_bytes)
        for it in capabilities
    )


def check_devices(resolved: ResolvedPolicy, capabilities: Sequence[Capabilities]) -> None:
    """Check that every GPU has what a policy asks for; else ``UnsupportedError`` names the GPU."""
    kinds = {rule.kind for rule in resolved.rules}
    for device in capabilities:
        place = f"GPU {device.device_index} ({device.device_name})"
        if "managed" in kinds and not device.concurrent_managed_access:
            raise UnsupportedError(
                f"{place} has no concurrent managed access, without which the CPU may not touch "
                "managed memory while the GPU works (Windows, WSL 2, vGPU and some containers "
                "lack it): use a policy whose classes are all kind: device, or "
                "umem.enable(..., fallback=True)."
            )
        if "system" in kinds and not device.pageable_memory_access:
            raise UnsupportedError(
                f"{place} cannot reach memory from the system's allocator (no ATS, no HMM): use "
                "kind: managed in the policy."
            )


def managed_bytes_of_device(
    by_device: Sequence[ResolvedPolicy], capabilities: Sequence[Capabilities]
) -> tuple[int, ...]:
    """By GPU, what it adds to the cap on managed memory when the process first uses it.

    Its budget, or :data:`MANAGED_SHARE_OF_CARD`. Nothing where the policy names a cap, and on cards
    that share the host's page tables (Grace Hopper): they oversubscribe in hardware.
    """
    coherent = all(device.pageable_uses_host_page_tables for device in capabilities)
    if coherent or by_device[0].managed_limit_bytes is not None:
        return ()
    return tuple(
        its.device_budget_bytes or int(MANAGED_SHARE_OF_CARD * device.total_bytes)
        for its, device in zip(by_device, capabilities, strict=True)
    )


@dataclass(frozen=True)
class HostCaps:
    """Caps on what a process takes of the host; together they are less than its share."""

    managed_bytes: int | None
    """Cap on managed memory, beside what :func:`managed_bytes_of_device` adds. None for none."""
    pinned_bytes: int
    """Cap on page-locked memory; 0 where host memory is unknown."""
    pinned_share: float
    """What page-locked memory may take of the process's share."""


def host_caps(
    resolved: ResolvedPolicy,
    share: HostShare | None,
    *,
    has_managed_cap: bool,
    has_one_pool: bool = False,
) -> HostCaps:
    """Divide a process's share of host memory between managed and page-locked memory.

    With `has_managed_cap` managed memory gets :data:`MANAGED_SHARE_OF_HOST` beside the devices'
    budgets, where there are budgets and managed memory; page-locked memory gets the rest of
    :data:`PINNED_SHARE`. A cap that the policy names stays as it is. With `has_one_pool` nothing of
    the host is left beside the device's budget: what exceeds that is out of memory.
    """
    if has_one_pool:
        return HostCaps(resolved.managed_limit_bytes, _NOTHING_BYTES, 0.0)
    share_bytes = 0 if share is None else share.share_bytes
    managed_share = 0.0
    has_managed = any(rule.kind == "managed" for rule in resolved.rules)
    if has_managed_cap and has_managed and resolved.device_budget_bytes is not None:
        managed_share = MANAGED_SHARE_OF_HOST
    pinned_share = PINNED_SHARE - managed_share
    return HostCaps(
        managed_bytes=resolved.managed_limit_bytes
        if not has_managed_cap
        else int(managed_share * share_bytes),
        pinned_bytes=0 if share is None else max(int(pinned_share * share_bytes), _NOTHING_BYTES),
        pinned_share=pinned_share,
    )


def _graphing_begins(modules: Sequence[nn.Module]) -> None:
    """Keep what torch captures where it is."""
    from umem.streaming.training import graphing_begins  # not before there is a model

    graphing_begins(modules)


def _stream_weights(model: nn.Module) -> None:
    """Keep the weights of a model that the program calls within the budget."""
    parameters = list(model.parameters())
    # What the first call itself makes has no size yet.
    if not any(it.is_cuda for it in parameters) or any(map(is_lazy, parameters)):
        return
    # It imports the executor: not before there is a model.
    from umem.streaming.weights.managed_models import stream_weights

    stream_weights(model)


def manage_automatically(
    roots: Callable[[], Sequence[nn.Module]],
    *,
    is_planned: bool = True,
    streams_state: bool = False,
) -> None:
    """Manage every training of the process from its optimizer's first step on.

    With `is_planned` its steps are recorded and planned; with `streams_state` its optimizer state
    is streamed and its activations are copied, as the policy says.

    `roots` returns the modules that the program has called. The one that holds most of the
    optimizer's parameters is its model. An optimizer may step before its model is called: loading a
    distributed checkpoint does so, to make the state that is loaded. Then a later step finds the
    model. Where no module holds them at the second step, as the flat partitions and float32 copies
    of other libraries, their state is streamed beside the largest module that is trained on their
    device, or the one of most parameters where these have no memory between uses: updates are due
    when it is called. Nothing is raised into the training: an error of umem
    ends the search with a warning, and its traceback is logged at debug level.
    """
    # torch iterates over an optimizer's own hooks before it comes to the global ones, so that
    # `manage` may add to them there.
    register_optimizer_step_post_hook(_AutomaticManagement(roots, is_planned, streams_state))


class _AutomaticManagement:
    def __init__(
        self, roots: Callable[[], Sequence[nn.Module]], is_planned: bool, streams_state: bool
    ) -> None:
        self._roots = roots
        self._is_planned = is_planned
        self._streams_state = streams_state
        # Optimizer -> its steps without a model so far; None when it needs no more looks.
        self._steps: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._has_failed = False

    def __call__(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        if self._has_failed:
            return
        try:
            # A compiler takes what a compiled step calls for a part of the program.
            look: Any = torch.compiler.disable(self._look) if runs_compiled() else self._look
            look(optimizer)
        except UmemError as error:
            name = type(optimizer).__name__
            if isinstance(error, EnableError) and _device_types(optimizer) != {"cpu"}:
                _LOG.warning("umem: %s is not managed. %s: %s", name, _COST, error)
            else:  # it trains on the CPU, or the program manages it in another way
                _LOG.info("umem: %s is not managed: %s", name, error)
        except Exception as error:  # the training goes on without umem
            self._has_failed = True
            _LOG.warning(
                "umem: trainings are not managed in this process, and go on without: %s: %s",
                type(error).__name__,
                error,
            )
            _LOG.debug("umem: the error was raised here", exc_info=True)

    def _look(self, optimizer: Optimizer) -> None:
        steps = self._steps.get(optimizer, 0)
        if steps is None:
            return
        self._steps[optimizer] = None
        model = _model_of(optimizer, self._roots())
        is_owner = model is not None
        if not is_owner and self._streams_state and steps + 1 >= _STEPS_WITHOUT_OWNER:
            model = _model_beside(optimizer, self._roots())
        if model is not None:
            # It imports planner and simulator: not before there is a training.
            from umem.managing import manage
            from umem.streaming import stream_state

            if self._streams_state:
                stream_state(model, optimizer)
            if self._is_planned and is_owner:
                manage(model, optimizer)
        elif steps + 1 < _STEPS_WITHOUT_MODEL:
            self._steps[optimizer] = steps + 1
        else:
            name = type(optimizer).__name__
            if _device_types(optimizer) == {"cpu"}:
                _LOG.info("umem: %s is not managed: it updates parameters on the CPU", name)
            else:
                warning = _NO_MODEL if self._streams_state else _NO_OWNER
                _LOG.warning(warning, name, _STEPS_WITHOUT_MODEL)


def _device_types(optimizer: Optimizer) -> set[str]:
    return {p.device.type for group in optimizer.param_groups for p in group["params"]}


def _model_of(optimizer: Optimizer, roots: Sequence[nn.Module]) -> nn.Module | None:
    """The outermost module with the most bytes of an optimizer's parameters."""
    from umem.runtime.model_parts import memory_bytes  # it uses private names of torch

    trained = {id(p): memory_bytes(p) for group in optimizer.param_groups for p in group["params"]}

    def held_bytes(module: nn.Module) -> int:
        return sum(trained.get(id(parameter), 0) for parameter in module.parameters())

    model = max(roots, key=held_bytes, default=None)
    return model if model is not None and held_bytes(model) else None


def _model_beside(optimizer: Optimizer, roots: Sequence[nn.Module]) -> nn.Module | None:
    """The outermost module with the most trained bytes on the device of an optimizer.

    Between uses, the parameters of ZeRO-3 have no memory: then the number of parameters decides.
    """
    from umem.runtime.model_parts import memory_bytes  # it uses private names of torch

    devices = {p.device for group in optimizer.param_groups for p in group["params"]}

    def trained(module: nn.Module) -> tuple[int, int]:
        its = (p for p in module.parameters() if p.requires_grad)
        sizes = [memory_bytes(p) for p in its if {p.device} == devices]
        return sum(sizes), len(sizes)

    model = max(roots, key=trained, default=None)
    return model if model is not None and any(trained(model)) else None
