"""Which class a tensor belongs to, told from what torch is doing when it is born.

The phase of the program decides: weights before the first forward, activations in forward and
backward, optimizer state while a new optimizer takes its first step. Parameters, gradients and
state are then tagged one by one, where the phase alone could not know them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
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

from umem.core.classes import TensorClass
from umem.runtime.model_parts import (
    optimizer_parameters,
    optimizer_state,
    storage_addresses,
    weight_classes,
)
from umem.runtime.native_library import native
from umem.torch_compat import PRIVATE_NAMES, replace

if TYPE_CHECKING:
    from umem.runtime._native import Allocator

__all__ = ["Classifier", "gradient_hook"]


def gradient_hook(allocator: Allocator) -> Callable[[torch.Tensor], object]:
    """What tags the gradient of each parameter that it is called with."""

    def tag_parts(gradient: torch.Tensor) -> None:
        for address in storage_addresses(gradient):
            allocator.retag(address, TensorClass.GRADIENTS.number)

    hook: Callable[[torch.Tensor], object] = native().gradient_hook(allocator, tag_parts)
    return hook


class Classifier:
    """torch's global hooks, and what they tell the allocator.

    A steady training step runs two optimizer hooks and one gradient hook per parameter. The hook
    that every module call would run is armed only while there are modules it has not seen: at
    start, and whenever parameters are registered or moved.

    Parameters
    ----------
    allocator
        Told of phases (`set_phase`), overrides (`enter_class`, `leave_class`) and tags (`retag`).
    on_gradient
        Called with each parameter whose gradient has been accumulated: :func:`gradient_hook`'s.
    """

    def __init__(self, allocator: Allocator, on_gradient: Callable[[torch.Tensor], object]) -> None:
        self._allocator = allocator
        self._on_gradient = on_gradient
        self._forward_hook: Any = None
        self._walked_roots: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._walked_modules: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._hooked_parameters: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._known_states: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._moving = threading.local()

    def install(self) -> None:
        """Register the hooks, for the rest of the process."""
        self._arm()
        global_hooks.register_module_parameter_registration_hook(self._on_parameter)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        self._wrap_apply()

    def roots(self) -> list[nn.Module]:
        """Modules that were called by the program itself, and not by another module."""
        return list(self._walked_roots)

    # ------------------------------------------------------------------ modules

    def _arm(self) -> None:
        """Look at the modules that run next."""
        self._walked_roots.clear()
        self._walked_modules.clear()
        if self._forward_hook is None:
            self._forward_hook = nn.modules.module.register_module_forward_pre_hook(
                self._before_forward
            )

    def _disarm(self) -> None:
        if self._forward_hook is not None:
            self._forward_hook.remove()
            self._forward_hook = None

    def _before_forward(self, module: nn.Module, _inputs: object) -> None:
        if torch.compiler.is_compiling():  # the hook is no part of what the compiler traces
            return
        if module in self._walked_roots:
            # It comes round again: a whole iteration has shown every module that takes part.
            self._disarm()
            return
        if module in self._walked_modules:
            return
        self._walked_roots[module] = True
        for part in module.modules():
            self._walked_modules[part] = True
        self._allocator.set_phase(TensorClass.ACTIVATIONS.number)
        self._tag_parameters(module.parameters())
        self._tag(module.buffers(), TensorClass.OTHER)

    def _on_parameter(self, _module: nn.Module, _name: str, parameter: nn.Parameter | None) -> None:
        if parameter is None:
            return
        if self._forward_hook is None:
            self._arm()
        self._tag([parameter], TensorClass.WEIGHTS)

    def _wrap_apply(self) -> None:
        """Give what `Module.to`, `.cuda`, `.half`, ... make the class of weights.

        They all go through `Module._apply`, which has no hook.
        """
        apply = PRIVATE_NAMES["module_apply"].find()
        classifier = self

        def _apply(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
            if getattr(classifier._moving, "inside", False):  # a child of the module being moved
                return apply(module, *args, **kwargs)
            classifier._arm()
            classifier._moving.inside = True
            try:
                with classifier.override(TensorClass.WEIGHTS):
                    return apply(module, *args, **kwargs)
            finally:
                classifier._moving.inside = False

        replace("module_apply", _apply)

    @contextmanager
    def override(self, tensor_class: TensorClass) -> Iterator[None]:
        """Give every tensor born in the block a class, whatever the phase."""
        token = self._allocator.enter_class(tensor_class.number)
        try:
            yield
        finally:
            self._allocator.leave_class(token)

    # ------------------------------------------------------------------ optimizers

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if optimizer not in self._known_states:
            self._forget_state(optimizer)
            optimizer.register_load_state_dict_post_hook(self._forget_state)
        phase = TensorClass.OTHER  # what a step allocates beside its state is gone when it ends
        if self._known_states[optimizer] != _state_sizes(optimizer):
            phase = TensorClass.OPTIMIZER_STATE
            parameters = list(optimizer_parameters(optimizer))
            self._tag_parameters(parameters)
            self._tag((p.grad for p in parameters if p.grad is not None), TensorClass.GRADIENTS)
        self._allocator.set_phase(phase.number)
        return self._with_forward_in_closure(args, kwargs, phase)

    def _with_forward_in_closure(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], phase: TensorClass
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Give a step's closure, which runs forward and backward inside the step, their phase.

        Returns the step's new arguments, or None to leave them. The first is the optimizer.
        """
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            return None

        def in_phase() -> Any:
            self._allocator.set_phase(TensorClass.ACTIVATIONS.number)
            loss = closure()  # where it raises, the step is over, and with it the step's phase
            self._allocator.set_phase(phase.number)
            return loss

        if len(args) > 1:
            return (args[0], in_phase, *args[2:]), kwargs
        return args, {**kwargs, "closure": in_phase}

    def _after_step(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        sizes = _state_sizes(optimizer)
        if self._known_states[optimizer] != sizes:
            self._known_states[optimizer] = sizes
            state = (tensor for _, tensor in optimizer_state(optimizer, {}))
            self._tag(state, TensorClass.OPTIMIZER_STATE)
        self._allocator.set_phase(TensorClass.ACTIVATIONS.number)

    def _forget_state(self, optimizer: Optimizer) -> None:
        """Look at an optimizer's state after its next step: it is new, or has been loaded."""
        self._known_states[optimizer] = None

    # ------------------------------------------------------------------ tags

    def _tag_parameters(self, parameters: Iterable[torch.Tensor]) -> None:
        classes: dict[int, TensorClass] = {}
        for parameter, tensor_class in weight_classes(parameters):
            classes.update(dict.fromkeys(_cuda_addresses(parameter), tensor_class))
            is_hooked = parameter in self._hooked_parameters
            if parameter.requires_grad and parameter.is_leaf and not is_hooked:
                parameter.register_post_accumulate_grad_hook(self._on_gradient)
                self._hooked_parameters[parameter] = True
        for address, tensor_class in classes.items():
            self._allocator.retag(address, tensor_class.number)

    def _tag(self, tensors: Iterable[torch.Tensor], tensor_class: TensorClass) -> None:
        for tensor in tensors:
            for address in _cuda_addresses(tensor):
                self._allocator.retag(address, tensor_class.number)


def _state_sizes(optimizer: Optimizer) -> tuple[int, int]:
    """Number of parameters with state, and of parameters: they change when the state grows."""
    parameters = sum(len(group["params"]) for group in optimizer.param_groups)
    return len(optimizer.state), parameters


def _cuda_addresses(tensor: torch.Tensor) -> list[int]:
    """Addresses of the CUDA memory that holds a tensor."""
    return storage_addresses(tensor) if tensor.is_cuda else []
