"""Gives each tensor its class at allocation, from what torch is doing at that moment.

The phase of the program sets the class: weights before the first forward pass, activations in
forward and backward, optimizer state in the first step of an optimizer. Parameters, gradients and
state that were allocated in another phase are retagged one by one.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules import module as global_hooks
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from umem import patches
from umem.core.classes import TensorClass
from umem.runtime.known_tensors import KnownTensors, hook_accumulation
from umem.runtime.model_parts import (
    buffers_of,
    optimizer_parameters,
    optimizer_state,
    storage_addresses,
    weight_classes,
)
from umem.runtime.native_library import native
from umem.runtime.torch_hooks.hidden import hide
from umem.runtime.torch_hooks.modules import enter_running_forward, hook_running_forward

if TYPE_CHECKING:
    from umem.runtime._native import Allocator
    from umem.streaming.stage.state_room import StateRoom

__all__ = ["Classifier", "gradient_hook"]

_LOG = logging.getLogger("umem")


def gradient_hook(allocator: Allocator) -> Callable[[torch.Tensor], object]:
    """Make a hook that tags the gradient of each parameter that it is called with."""

    def tag_parts(gradient: torch.Tensor) -> None:
        try:
            for address in storage_addresses(gradient):
                allocator.retag(address, TensorClass.GRADIENTS.number)
        except Exception as error:
            _warn_once(f"{type(error).__name__}: {error}")

    hook: Callable[[torch.Tensor], object] = native().gradient_hook(allocator, tag_parts)
    return hook


@functools.cache
def _warn_once(error: str) -> None:
    """Log an error. It must not end the program: tensors have the class of the phase then."""
    _LOG.warning("umem: some tensors may be counted, and placed, as of another class: %s", error)


class Classifier:
    """Sets the allocator's phase and tags tensors from torch's global hooks.

    A steady training step runs two optimizer hooks and one gradient hook per parameter, which
    :func:`gradient_hook` makes. The hook on every module call is installed only while there may be
    unknown modules: at start, and after parameters were registered or moved.
    """

    def __init__(
        self,
        allocator: Allocator,
        on_gradient: Callable[[torch.Tensor], object],
        state_room: StateRoom | None = None,
        adapt_loading: Callable[[], bool] = lambda: True,
    ) -> None:
        self._allocator = allocator
        self._state_room = state_room
        self._on_gradient = on_gradient
        self.on_root: Callable[[nn.Module], None] = lambda _: None
        """Called before the first call of a module that the program calls itself."""
        self._adapt_loading = adapt_loading
        self._has_adapted_loaders = False
        self._forward_hook: Any = None
        self._seen_roots: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._seen_modules: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._first_inside: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """What roots call first whose ``forward`` the program calls itself: no hook sees them."""
        self._hooked_parameters: KnownTensors[bool] = KnownTensors()
        self._known_states: dict[int, tuple[int, int] | None] = {}
        """By ``id`` of the optimizer, until its end."""
        self._moving = threading.local()

    def install(self) -> None:
        """Register the hooks, for the rest of the process."""
        self._watch_calls()
        global_hooks.register_module_parameter_registration_hook(self._on_parameter)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        patches.wrap("module_apply", self._classing)

    def roots(self) -> list[nn.Module]:
        """The modules that the program called itself, not through another module."""
        return list(self._seen_roots)

    def _watch_calls(self) -> None:
        """Look at the modules that are called next."""
        self._seen_roots.clear()
        self._seen_modules.clear()
        self._first_inside.clear()
        if self._forward_hook is None:
            self._forward_hook = nn.modules.module.register_module_forward_pre_hook(
                self._before_forward
            )

    def _before_forward(self, module: nn.Module, _inputs: object) -> None:
        if torch.compiler.is_compiling():  # keeps the hook out of the compiled graph
            return
        try:
            self._see_call(module)
        except Exception as error:
            _warn_once(f"{type(error).__name__}: {error}")

    def _see_call(self, module: nn.Module) -> None:
        if module in self._seen_roots or module in self._first_inside:
            # Its second call: the whole iteration in between has shown every module.
            if self._forward_hook is not None:
                self._forward_hook.remove()
                self._forward_hook = None
            return
        if module in self._seen_modules:
            return
        outer = hook_running_forward(module)
        if outer is not None:
            self._first_inside[module] = True
            module = outer
        self._seen_roots[module] = True
        for part in module.modules():
            self._seen_modules[part] = True
        self._allocator.set_phase(TensorClass.ACTIVATIONS.number)
        self._tag_parameters(module.parameters())
        self._tag(buffers_of(module), TensorClass.OTHER)
        self.on_root(module)
        if outer is not None:
            enter_running_forward(outer)
        if self._state_room is not None:
            self._state_room.expect(module)

    def _on_parameter(self, _module: nn.Module, _name: str, parameter: nn.Parameter | None) -> None:
        if parameter is None:
            return
        try:
            self._see_parameter(parameter)
        except Exception as error:
            _warn_once(f"{type(error).__name__}: {error}")

    def _see_parameter(self, parameter: nn.Parameter) -> None:
        # A loader registers parameters before it allocates their memory.
        self._has_adapted_loaders = self._has_adapted_loaders or self._adapt_loading()
        if self._forward_hook is None:
            self._watch_calls()
        self._tag([parameter], TensorClass.WEIGHTS)

    def _classing(self, apply: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        """Class what `Module.to`, `.cuda`, `.half` and others allocate as weights.

        They all call `Module._apply`, which has no hook.
        """
        classifier = self

        def _apply(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
            if getattr(classifier._moving, "inside", False):  # a child of the module being moved
                return apply(module, *args, **kwargs)
            classifier._watch_calls()
            classifier._moving.inside = True
            try:
                with classifier._allocator.class_override(TensorClass.WEIGHTS.number):
                    return apply(module, *args, **kwargs)
            finally:
                classifier._moving.inside = False

        return _apply

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        try:
            phase = self._begin_step(optimizer)
        except Exception as error:
            _warn_once(f"{type(error).__name__}: {error}")
            return None
        return self._wrap_closure(args, kwargs, phase)

    def _begin_step(self, optimizer: Optimizer) -> TensorClass:
        if id(optimizer) not in self._known_states:
            self._forget_state(optimizer)
            hide(optimizer.register_load_state_dict_post_hook(self._forget_state))
            forget = self._known_states.pop
            weakref.finalize(optimizer, forget, id(optimizer), None).atexit = False
        phase = TensorClass.OTHER  # a step frees its temporary tensors before it ends
        if self._known_states[id(optimizer)] != _state_sizes(optimizer):
            phase = TensorClass.OPTIMIZER_STATE
            parameters = list(optimizer_parameters(optimizer))
            self._tag_parameters(parameters)
            self._tag((p.grad for p in parameters if p.grad is not None), TensorClass.GRADIENTS)
            if self._state_room is not None:
                self._state_room.open(optimizer)
        self._allocator.set_phase(phase.number)
        return phase

    def _wrap_closure(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], phase: TensorClass
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Set the phase of activations while a step's closure runs forward and backward.

        Returns the step's new arguments, the optimizer first, or None if there is no closure.
        """
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            return None

        def in_phase() -> Any:
            self._allocator.set_phase(TensorClass.ACTIVATIONS.number)
            loss = closure()  # if it raises, the step is over, and so is its phase
            self._allocator.set_phase(phase.number)
            return loss

        if len(args) > 1:
            return (args[0], in_phase, *args[2:]), kwargs
        return args, {**kwargs, "closure": in_phase}

    def _after_step(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        try:
            self._end_step(optimizer)
        except Exception as error:
            _warn_once(f"{type(error).__name__}: {error}")

    def _end_step(self, optimizer: Optimizer) -> None:
        sizes = _state_sizes(optimizer)
        if self._known_states.get(id(optimizer)) != sizes:
            self._known_states[id(optimizer)] = sizes
            if self._state_room is not None:
                self._state_room.close(optimizer)
            state = (tensor for _, tensor in optimizer_state(optimizer, {}))
            self._tag(state, TensorClass.OPTIMIZER_STATE)
        self._allocator.set_phase(TensorClass.ACTIVATIONS.number)

    def _forget_state(self, optimizer: Optimizer) -> None:
        """Tag an optimizer's state after its next step: it is new, or was loaded."""
        self._known_states[id(optimizer)] = None

    def _tag_parameters(self, parameters: Iterable[torch.Tensor]) -> None:
        classes: dict[int, TensorClass] = {}
        for parameter, tensor_class in weight_classes(parameters):
            classes.update(dict.fromkeys(_cuda_addresses(parameter), tensor_class))
            is_hooked = parameter in self._hooked_parameters
            if parameter.requires_grad and parameter.is_leaf and not is_hooked:
                hook_accumulation(parameter, self._on_gradient)
                self._hooked_parameters[parameter] = True
        for address, tensor_class in classes.items():
            self._allocator.retag(address, tensor_class.number)

    def _tag(self, tensors: Iterable[torch.Tensor], tensor_class: TensorClass) -> None:
        for tensor in tensors:
            for address in _cuda_addresses(tensor):
                self._allocator.retag(address, tensor_class.number)


def _state_sizes(optimizer: Optimizer) -> tuple[int, int]:
    """Numbers of parameters with state, and of parameters, which change when the state grows."""
    parameters = 0
    for group in optimizer.param_groups:
        parameters += len(group["params"])
    return len(optimizer.state), parameters


def _cuda_addresses(tensor: torch.Tensor) -> list[int]:
    """Addresses of a tensor's CUDA storages."""
    return storage_addresses(tensor) if tensor.is_cuda else []
