"""The module in which each operator runs, and the parameters and optimizers of the program.

torch's global hooks report them, so that the program needs no changes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from umem.runtime.model_parts import optimizer_parameters, parameter_names
from umem.runtime.torch_hooks.passes import running_pass
from umem.torch_compat import (
    current_autograd_node,
    current_graph_task_id,
    next_sequence_number,
    sequence_number,
)
from umem.trace import OPTIMIZER

__all__ = ["ModuleScopeTracker"]


class ModuleScopeTracker:
    """Tracks the modules and optimizers of a program while it is entered."""

    def __init__(self) -> None:
        self.parameter_names: Mapping[torch.Tensor, str] = {}
        self._parents: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._module_names: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._root_names: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._optimizers: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._other_parameters: WeakIdKeyDictionary = WeakIdKeyDictionary()
        # Names of the modules whose forward pass runs, innermost last.
        self._scopes: list[str] = []
        # Module in whose forward pass an autograd node was made, by the node's sequence number.
        self._module_of_node: dict[int, str] = {}
        # For each optimizer step that runs, the backward pass inside which it runs.
        self._stepping: list[int] = []
        self._hooks = ExitStack()

    def __enter__(self) -> ModuleScopeTracker:
        handles = (
            module_hooks.register_module_module_registration_hook(self._on_child),
            module_hooks.register_module_forward_pre_hook(self._before_forward),
            module_hooks.register_module_forward_hook(self._after_forward, always_call=True),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        )
        for handle in handles:
            self._hooks.callback(handle.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def add_parameter(self, tensor: torch.Tensor) -> None:
        """Count a tensor as a parameter even if no module holds it."""
        self._other_parameters[tensor] = True

    def find_parameters(self) -> None:
        """Find and name the parameters that there are now.

        Not while the model is made: a tensor with a weak reference to it cannot be swapped, which
        is how ``Module.to`` works on tensors without data.
        """
        named = (
            entry
            for root, prefix in self._root_names.items()
            for entry in root.named_parameters(prefix=prefix)
        )
        others = (*optimizer_parameters(*self._optimizers), *self._other_parameters)
        self.parameter_names = parameter_names(named, others)

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Buffers of the modules by qualified name."""
        for root, prefix in self._root_names.items():
            yield from root.named_buffers(prefix=prefix)

    def optimizers(self) -> list[Optimizer]:
        """Optimizers that have stepped."""
        return list(self._optimizers)

    @property
    def is_optimizer(self) -> bool:
        """Whether an optimizer's step runs, outside of its closure."""
        return (
            bool(self._stepping)
            and not self._scopes
            and self._stepping[-1] == current_graph_task_id()
        )

    def note_node(self) -> None:
        """Note the module of the autograd node that the operator of a forward pass has made."""
        if self._scopes and torch.is_grad_enabled():
            number = next_sequence_number() - 1
            self._module_of_node.setdefault(number, self._scopes[-1])

    def scope(self) -> str:
        """The pass and the module, as far as they are known: ``backward layers.3.mlp``."""
        if self.is_optimizer:
            return OPTIMIZER
        in_backward = running_pass().is_second
        if self._scopes:
            # In the backward pass, only a checkpoint calls modules.
            return f"{'recompute' if in_backward else 'forward'} {self._scopes[-1]}".rstrip()
        if not in_backward:
            return ""
        return f"backward {self._module_of(current_autograd_node())}".rstrip()

    def _module_of(self, node: Any) -> str:
        if node is None:
            return ""
        if (variable := getattr(node, "variable", None)) is not None:
            return self.parameter_names.get(variable, "")
        return self._module_of_node.get(sequence_number(node), "")

    def _on_child(self, parent: nn.Module, _name: str, child: nn.Module | None) -> None:
        if child is not None:
            self._parents[child] = weakref.ref(parent)

    def _before_forward(self, module: nn.Module, _inputs: object) -> None:
        if module not in self._module_names:
            self._name_tree(module)
        self._scopes.append(self._module_names[module])

    def _after_forward(self, _module: nn.Module, _inputs: object, _outputs: object) -> None:
        self._scopes.pop()

    def _name_tree(self, module: nn.Module) -> None:
        """Name a module and all others below the same outermost module."""
        root = module
        seen = {root}
        while (parent := self._parent(root)) is not None and parent not in seen:
            root = parent
            seen.add(root)
        if root not in self._root_names:
            others = len(self._root_names)
            self._root_names[root] = f"{type(root).__name__}{others}" if others else ""
        prefix = self._root_names[root]
        for name, part in root.named_modules(prefix=prefix):
            self._module_names.setdefault(part, name)
        self._module_names.setdefault(module, prefix)  # where its parent no longer has it

    def _parent(self, module: nn.Module) -> nn.Module | None:
        reference = self._parents.get(module)
        return None if reference is None else reference()

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        self._optimizers[optimizer] = True
        self._stepping.append(current_graph_task_id())

    def _after_step(self, *_: object) -> None:
        self._stepping.pop()
