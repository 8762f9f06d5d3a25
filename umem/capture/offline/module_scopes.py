"""Where in the program an operator runs, and which parameters and optimizers take part.

torch's global hooks tell both, so that the program itself need not.
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
from umem.torch_compat import (
    current_autograd_node,
    current_graph_task_id,
    next_sequence_number,
    sequence_number,
)
from umem.trace import OPTIMIZER

__all__ = ["Places"]


class Places:
    """Follows modules and optimizers while it is entered."""

    def __init__(self) -> None:
        self._parents: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._module_names: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._root_names: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._optimizers: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._loose: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.parameter_names: Mapping[torch.Tensor, str] = {}
        self._modules: list[str] = []
        # Module in whose forward an autograd node was made, by the node's sequence number.
        self._module_of_node: dict[int, str] = {}
        # The optimizers whose step runs, each with the backward pass that it runs in.
        self._stepping: list[int] = []
        self._hooks = ExitStack()

    def __enter__(self) -> Places:
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

    # ------------------------------------------------------------------ what takes part

    def add_parameter(self, tensor: torch.Tensor) -> None:
        """Take a tensor as a parameter, whether a module holds it or not."""
        self._loose[tensor] = True

    def find_parameters(self) -> None:
        """Look for the parameters that there are now, and name them.

        Not earlier: a tensor with a weak reference to it cannot be swapped, which is how
        ``Module.to`` works on tensors without data.
        """
        named = (
            entry
            for root, prefix in self._root_names.items()
            for entry in root.named_parameters(prefix=prefix)
        )
        unnamed = (*optimizer_parameters(*self._optimizers), *self._loose)
        self.parameter_names = parameter_names(named, unnamed)

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Buffers of the modules by qualified name."""
        for root, prefix in self._root_names.items():
            yield from root.named_buffers(prefix=prefix)

    def optimizers(self) -> Iterator[Optimizer]:
        """Optimizers that have stepped."""
        return iter(list(self._optimizers))

    # ------------------------------------------------------------------ where it is

    @property
    def is_optimizer(self) -> bool:
        """An optimizer's own step runs, not a closure in it."""
        return (
            bool(self._stepping)
            and not self._modules
            and self._stepping[-1] == current_graph_task_id()
        )

    def note_node(self) -> None:
        """Remember the module of the autograd node that an operator of the forward pass made."""
        if self._modules and torch.is_grad_enabled():
            self._module_of_node.setdefault(next_sequence_number() - 1, self._modules[-1])

    def where(self) -> str:
        """The pass and the module: ``backward layers.3.mlp``, or what is known of it."""
        if self.is_optimizer:
            return OPTIMIZER
        in_backward = current_graph_task_id() != -1
        if self._modules:
            # Only a checkpoint calls modules in the backward pass.
            return f"{'recompute' if in_backward else 'forward'} {self._modules[-1]}".rstrip()
        if not in_backward:
            return ""
        return f"backward {self._module_of(current_autograd_node())}".rstrip()

    def _module_of(self, node: Any) -> str:
        if node is None:
            return ""
        if (variable := getattr(node, "variable", None)) is not None:
            return self.parameter_names.get(variable, "")
        return self._module_of_node.get(sequence_number(node), "")

    # ------------------------------------------------------------------ hooks

    def _on_child(self, parent: nn.Module, _name: str, child: nn.Module | None) -> None:
        if child is not None:
            self._parents[child] = weakref.ref(parent)

    def _before_forward(self, module: nn.Module, _inputs: object) -> None:
        if module not in self._module_names:
            self._name_all(module)
        self._modules.append(self._module_names[module])

    def _after_forward(self, _module: nn.Module, _inputs: object, _outputs: object) -> None:
        self._modules.pop()

    def _name_all(self, module: nn.Module) -> None:
        """Name a module and all that belongs to the same outermost one."""
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
        self._module_names.setdefault(module, prefix)  # where its parent has let go of it

    def _parent(self, module: nn.Module) -> nn.Module | None:
        reference = self._parents.get(module)
        return None if reference is None else reference()

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        self._optimizers[optimizer] = True
        self._stepping.append(current_graph_task_id())

    def _after_step(self, *_: object) -> None:
        self._stepping.pop()
