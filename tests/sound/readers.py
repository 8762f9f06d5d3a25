"""The table of readers: ways to use a tensor that an update may still be writing.

A reader is a function of a model, its optimizer and a tensor of theirs, and returns what is
compared with stock's. Where stock raises, the same error is the value.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import hashlib
import io
import pickle
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import get_total_norm, parameters_to_vector, vector_to_parameters
from torch.overrides import TorchFunctionMode, has_torch_function
from torch.utils import dlpack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

Use = Callable[[Any, Any, Any], Any]
Held = Generator[None, None, Any]


@dataclass(frozen=True)
class Reader:
    """A way to use a tensor.

    Parameters
    ----------
    name
        Of its function.
    use
        Takes model, optimizer and tensor. One that holds is a generator function: the first part
        runs before the optimizer's step, the second one at the moment of the use.
    writes
        Whether it changes the tensor: then it is used between passes, by one thread.
    passes
        Whether it calls the model, or goes backward: then it is used between passes.
    holds
        Whether it begins before the step.
    """

    name: str
    use: Use
    writes: bool = False
    passes: bool = False
    holds: bool = False


READERS: dict[str, Reader] = {}

_OfTensor = Callable[[Any], Any]

_DLPACK: Any = dlpack


_Function = TypeVar("_Function", bound=Callable[..., Any])


def _add(name: str, use: Use, **kind: bool) -> None:
    assert name not in READERS, name
    READERS[name] = Reader(name, use, **kind)


def _add_of_tensor(function: Callable[..., Any], **kind: bool) -> None:
    _add(function.__name__, lambda _model, _optimizer, tensor: function(tensor), **kind)


def _reads(function: _Function) -> _Function:
    """Of a tensor alone."""
    _add_of_tensor(function)
    return function


def _goes_backward(function: _Function) -> _Function:
    _add_of_tensor(function, passes=True)
    return function


def _reads_a_training(function: _Function) -> _Function:
    _add(function.__name__, function)
    return function


def _calls_the_model(function: _Function) -> _Function:
    _add(function.__name__, function, passes=True)
    return function


def _holds(function: _Function) -> _Function:
    _add_of_tensor(function, holds=True)
    return function


def _writes(function: _Function) -> _Function:
    _add_of_tensor(torch.no_grad()(function), writes=True)
    return function


def _changes(function: _OfTensor) -> None:
    """Whose result is not compared."""

    def change(tensor: Any) -> None:
        function(tensor)

    change.__name__ = function.__name__
    _writes(change)


def _add_all(kind: Callable[[Any], object], **functions: Callable[..., Any]) -> None:
    """One line each."""
    for name, function in functions.items():
        function.__name__ = name
        kind(function)


def _add_held(**parts: tuple[_OfTensor, _OfTensor]) -> None:
    """What is made of the tensor before the step, and used at the moment of the use."""

    def add(name: str, begin: _OfTensor, use: _OfTensor) -> None:
        def holds(tensor: Any) -> Held:
            kept = begin(tensor)
            yield
            return use(kept)

        holds.__name__ = name
        _holds(holds)

    for name, its in parts.items():
        add(name, *its)


# ---- operators of torch ----

_add_all(
    _reads,
    multiplied=lambda t: t * 2,
    cloned=lambda t: t.clone(),
    detached=lambda t: t.detach(),
    by_data=lambda t: t.data,
    by_data_of_data=lambda t: t.data.data * 1,
    viewed=lambda t: t.view(-1)[:9].clone(),
    transposed=lambda t: t.mT if t.ndim > 1 else t.flip(-1),
    first_row=lambda t: t[0],
    rows=lambda t: [row.sum() for row in t[:2]],
    unbound=lambda t: t.unbind()[-1],
    chosen_by_numbers=lambda t: t[torch.tensor([0, -1], device=t.device)],
    chosen_by_a_mask=lambda t: t[t > 0],
    flattened=lambda t: parameters_to_vector([t]),
    stacked=lambda t: torch.stack([t, t]),
    in_a_list=lambda t: torch._foreach_norm([t, t]),
    in_a_list_of_products=lambda t: torch._foreach_mul([t.detach()], 2.0),
    norm=lambda t: t.norm(),
    norm_of_many=lambda t: get_total_norm([t]),
    is_finite=lambda t: t.isfinite().all(),
    compared=lambda t: torch.equal(t, t.detach() + 0),
    largest=lambda t: t.flatten().topk(1).values,
    einsum=lambda t: torch.einsum("...i->...", t),
    linear=lambda t: nn.functional.linear(t.new_ones(2, t.shape[-1]), t),
    product_with_itself=lambda t: t.mT @ t,
    copied_from=lambda t: torch.empty_like(t).copy_(t),
    added_to_another=lambda t: torch.add(t.detach(), 1, out=torch.empty_like(t)),
    averaged=lambda t: torch.zeros_like(t).lerp_(t.detach(), 0.1),
    as_complex=lambda t: torch.view_as_complex(t.detach().reshape(-1, 2)).conj() * 1,
    as_float64=lambda t: t.to(torch.float64),
    as_float16=lambda t: t.half(),
    on_the_host=lambda t: t.cpu(),
    on_the_host_without_a_wait=lambda t: t.to("cpu", copy=True),
    without_data=lambda t: list(t.to("meta").shape),
    item=lambda t: t.sum().item(),
    as_list=lambda t: t.flatten()[:5].tolist(),
    as_float=lambda t: float(t.flatten()[0]),
    as_condition=lambda t: bool(t.flatten()[0] > 0),
    printed=lambda t: repr(t),
    formatted=lambda t: f"{t.detach().flatten()[0]:.6f}",
    as_dense_sparse=lambda t: t.detach().to_sparse().to_dense(),
    unscaled=lambda t: _unscaled(t.detach()),
)


def _unscaled(tensor: torch.Tensor) -> list[torch.Tensor]:
    """As a GradScaler does it, on a copy."""
    copied, found = tensor.clone(), torch.zeros(1, device=tensor.device)
    half = torch.full((1,), 0.5, device=tensor.device)
    torch._amp_foreach_non_finite_check_and_unscale_([copied], found, half)
    return [copied, found]


# ---- functions that do not ask __torch_function__ ----

_add_all(
    _reads,
    as_tensor=lambda t: torch.as_tensor(t).detach() * 1,
    as_tensor_of_another_type=lambda t: torch.as_tensor(t, dtype=torch.float64).detach(),
    as_tensor_on_the_host=lambda t: torch.as_tensor(t, device="cpu").detach() * 1,
    new_tensor=lambda t: torch.tensor(t),
    new_tensor_of=lambda t: torch.zeros(1).new_tensor(t.detach().flatten()[:3]),
    as_array=lambda t: torch.asarray(t).detach() * 1,
    as_subclass=lambda t: t.as_subclass(torch.Tensor).detach() * 1,
    as_parameter=lambda t: nn.Parameter(t).detach() * 1,
    as_buffer=lambda t: nn.Buffer(t).detach() * 1,
    nested=lambda t: torch.nested.nested_tensor([t.detach(), t.detach()]).to_padded_tensor(0.0),
    sparse_of_values=lambda t: torch.sparse_coo_tensor(
        torch.zeros(2, 1, dtype=torch.int64, device=t.device), t.detach().flatten()[:1], (2, 2)
    ).to_dense(),
    tensors_of_a_list=lambda t: torch.tensor([t.detach().flatten()[0], 1.0]),
)


@torch.jit.script
def _scripted(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x * y).sum() + x.max()


@torch.jit.script
def _scripted_dictionary(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return tensors["a"] * 2


@torch.jit.script
def _scripted_fork(x: torch.Tensor) -> torch.Tensor:
    sine = torch.jit.fork(torch.sin, x)
    cosine = torch.jit.fork(torch.cos, x)
    return torch.jit.wait(sine) + torch.jit.wait(cosine)


@torch.jit.script
def _scripted_shrink(x: torch.Tensor) -> None:
    x.mul_(0.995)


_traced: Any = torch.jit.trace(lambda x: (x * x).sum(), (torch.ones(8, 8),), check_trace=False)


_add_all(
    _reads,
    scripted=lambda t: _scripted(t, t),
    scripted_with_a_dictionary=lambda t: _scripted_dictionary({"a": t}),
    scripted_in_other_threads=lambda t: _scripted_fork(t.detach()),
    traced=lambda t: _traced(t),
    mapped=lambda t: torch.vmap(lambda row: (row * row).sum())(t),
)


@_reads
def captured_by_a_map(tensor: Any) -> Any:
    ones = torch.ones(3, device=tensor.device)
    return torch.vmap(lambda number: (number * tensor).sum())(ones)


_add_all(
    _reads,
    gradient_by_func=lambda t: torch.func.grad(lambda x: (x**3).sum())(t),
    captured_by_a_gradient=lambda t: torch.func.grad(lambda x: (x * t.detach()).sum())(
        torch.ones_like(t)
    ),
    product_by_func=lambda t: torch.func.vjp(lambda x: x.sin(), t)[0],
    tangent_by_func=lambda t: torch.func.jvp(lambda x: x**2, (t,), (torch.ones_like(t),)),
    jacobian_by_func=lambda t: torch.func.jacrev(lambda x: x.sin().sum())(t),
    functionalized=lambda t: torch.func.functionalize(lambda x: x.clone().add_(1))(t.detach()),
)


@_reads
def dual_number(tensor: Any) -> Any:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(tensor, torch.ones_like(tensor))
        return forward_ad.unpack_dual(dual**2).tangent


@_reads
def traced_by_fx(tensor: Any) -> Any:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(lambda x: (x * 2).sum())(tensor)(tensor)


# ---- modes, classes and functions of the program ----


class _Tagged(torch.Tensor):
    """A class of tensors, as libraries have them."""


class _PassesOn(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Counts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(str(func))
        return func(*args, **(kwargs or {}))


class Wrapper(torch.Tensor):
    """A tensor that has another one, and uses it in each operator."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.held = inner

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        inner = [each.held if isinstance(each, Wrapper) else each for each in args]
        return func(*inner, **(kwargs or {}))


class _Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return gradients[0] * weight, None


@torch.library.custom_op("umem_sound::doubled", mutates_args=())
def _doubled(x: torch.Tensor) -> torch.Tensor:
    return x.detach() * 2


_add_all(
    _reads,
    tagged=lambda t: (t.as_subclass(_Tagged) * 2).as_subclass(torch.Tensor),
    wrapped_by_a_class=lambda t: Wrapper(t.detach()) * 2,
)


@_reads
def under_a_function_mode(tensor: Any) -> Any:
    with _PassesOn():
        return (tensor * 2).sum()


@_reads
def under_a_dispatch_mode(tensor: Any) -> Any:
    with _Counts() as mode:
        total = (tensor * 2).sum()
    return total, [name in mode.calls for name in ("aten.mul.Tensor", "aten.sum.default")]


@_reads
def under_fake_tensors(tensor: Any) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        shape = list((mode.from_tensor(tensor) * 2).shape)
    return shape, tensor.detach() * 1


@_reads
def under_a_device(tensor: Any) -> Any:
    with torch.device(tensor.device):
        return tensor * torch.ones(1)


@_reads
def under_inference_mode(tensor: Any) -> Any:
    with torch.inference_mode():
        return (tensor * 2).clone()


@_reads
def under_autocast(tensor: Any) -> Any:
    with torch.autocast(tensor.device.type, torch.bfloat16):
        return tensor.mT @ tensor if tensor.ndim > 1 else tensor * 2


_add_all(
    _reads,
    by_an_operator_of_the_program=lambda t: _doubled(t),
    classes=lambda t: (
        *(type(t).__name__, type(t) in (torch.Tensor, nn.Parameter)),
        *(isinstance(t, nn.Parameter), t.__class__ is type(t)),
        has_torch_function((t,)),
    ),
    # What needs no value.
    facts=lambda t: (
        *(list(t.shape), t.dtype, t.stride(), t.is_leaf),
        *(t.requires_grad, t.is_contiguous(), t.nbytes, t.dim()),
    ),
    key_of_a_dictionary=lambda t: ({t: 1}[t], t.detach() * 1),
)


# ---- memory, copies and files ----


@_reads
def by_storage(tensor: Any) -> Any:
    empty = torch.empty(0, device=tensor.device, dtype=tensor.dtype)
    storage = tensor.untyped_storage()
    return empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride()) * 1


_add_all(
    _reads,
    storage_copied=lambda t: torch.tensor(t.untyped_storage().cpu().clone()[:64].tolist()),
    by_set=lambda t: torch.empty(0, device=t.device, dtype=t.dtype).set_(t.detach()) * 1,
    by_numpy=lambda t: torch.from_numpy(np.array(t.detach().cpu().numpy())),
    by_protocol_of_arrays=lambda t: torch.from_numpy(np.array(np.asarray(t.detach()))),
    by_dlpack=lambda t: _DLPACK.from_dlpack(t.detach()) * 1,
    by_old_dlpack=lambda t: _DLPACK.from_dlpack(_DLPACK.to_dlpack(t.detach())) * 1,
)


@_reads
def by_address(tensor: Any) -> Any:
    """On the host: an address that is used at once."""
    if tensor.is_cuda:
        return tensor.data_ptr() > 0
    return hashlib.sha256(ctypes.string_at(tensor.data_ptr(), tensor.nbytes)).hexdigest()


_add_all(
    _reads, deep_copied=lambda t: copy.deepcopy(t), pickled=lambda t: pickle.loads(pickle.dumps(t))
)


@_reads
def saved(tensor: Any) -> Any:
    file = io.BytesIO()
    torch.save({"tensor": tensor}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["tensor"]


@_reads
def flattened_with_others(tensor: Any) -> Any:
    from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

    flat = _flatten_dense_tensors([tensor.detach(), torch.ones_like(tensor)])
    return _unflatten_dense_tensors(flat, [tensor, tensor])[0]


# ---- the autograd engine ----


@_goes_backward
def saved_by_a_graph(tensor: Any) -> Any:
    x = torch.ones_like(tensor, requires_grad=True)
    return torch.autograd.grad((x * tensor.detach()).sum(), x)


@_goes_backward
def saved_by_a_function(tensor: Any) -> Any:
    x = torch.ones_like(tensor, requires_grad=True)
    output: Any = _Saves.apply(x, tensor.detach())  # type: ignore[no-untyped-call]
    return torch.autograd.grad(output.sum(), x)


@_goes_backward
def saved_by_hooks(tensor: Any) -> Any:
    packed: list[torch.Tensor] = []

    def pack(value: torch.Tensor) -> torch.Tensor:
        packed.append(value.detach().clone())
        return value

    x = torch.ones_like(tensor, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        output = (x * tensor.detach()).sum()
    return torch.autograd.grad(output, x), packed


@_goes_backward
def saved_on_the_host(tensor: Any) -> Any:
    x = torch.ones_like(tensor, requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        output = (x * tensor.detach()).sum()
    return torch.autograd.grad(output, x)


@_goes_backward
def checkpointed(tensor: Any) -> Any:
    x = torch.ones_like(tensor, requires_grad=True)
    output: Any = checkpoint(lambda a, b: a * b, x, tensor.detach(), use_reentrant=False)
    return torch.autograd.grad(output.sum(), x)


@_goes_backward
def checkpointed_in_the_old_way(tensor: Any) -> Any:
    x = torch.ones_like(tensor, requires_grad=True)
    output: Any = checkpoint(lambda a: a * tensor.detach(), x, use_reentrant=True)
    output.sum().backward()
    return x.grad


_add_all(
    _goes_backward,
    second_derivative=lambda t: torch.autograd.functional.hvp(
        lambda x: (x**3).sum(), t.detach(), torch.ones_like(t)
    )[1],
    # A gradient for the tensor itself, which a stock weight gets.
    penalty=lambda t: torch.autograd.grad((t**2).sum(), t),
)


@_goes_backward
def backward_in_a_thread(tensor: Any) -> Any:
    found: list[Any] = []

    def go() -> None:
        x = torch.ones_like(tensor, requires_grad=True)
        found.extend(torch.autograd.grad((x * tensor.detach()).square().sum(), x))

    thread = threading.Thread(target=go)
    thread.start()
    thread.join()
    return found


# ---- a training ----


def _sample(model: Any) -> torch.Tensor:
    weight = model.head.weight
    return torch.ones(2, weight.shape[1], device=weight.device)


_add_all(
    _reads_a_training,
    classes_of_weights=lambda model, *_: [type(it) is nn.Parameter for it in model.parameters()],
)


@_reads_a_training
def average_of_weights(model: Any, _optimizer: Any, _tensor: Any) -> Any:
    weights = [weight.detach() for weight in model.head.parameters()]
    means = [torch.zeros_like(weight) for weight in weights]
    torch._foreach_lerp_(means, weights, 0.1)
    return means


_add_all(
    _reads_a_training,
    norm_of_gradients=lambda model, *_: get_total_norm(
        [each.grad for each in model.parameters() if each.grad is not None]
    ),
    which_gradients=lambda model, *_: [weight.grad is None for weight in model.parameters()],
    dictionary_of_weights=lambda model, *_: model.blocks[-1].state_dict(),
)


@_reads_a_training
def dictionary_saved(model: Any, _optimizer: Any, _tensor: Any) -> Any:
    file = io.BytesIO()
    torch.save(model.blocks[0].state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


_add_all(
    _reads_a_training,
    block_copied=lambda model, *_: copy.deepcopy(model.head).state_dict(),
    state_copied=lambda model, optimizer, _: copy.deepcopy(
        dict(optimizer.state[model.head.weight])
    ),
    dictionary_of_the_optimizer=lambda _model, optimizer, _tensor: list(
        optimizer.state_dict()["state"].values()
    )[-2:],
)


@_reads_a_training
def modules_stacked(model: Any, _optimizer: Any, _tensor: Any) -> Any:
    weights, _ = torch.func.stack_module_state([each.norm for each in model.blocks])
    return weights


@_calls_the_model
def evaluation(model: Any, _optimizer: Any, _tensor: Any) -> Any:
    with torch.no_grad():
        return model(_sample(model))


@_calls_the_model
def evaluation_in_inference_mode(model: Any, _optimizer: Any, _tensor: Any) -> Any:
    with torch.inference_mode():
        return model(_sample(model)).clone()


_add_all(
    _calls_the_model,
    one_block=lambda model, *_: model.blocks[-1](_sample(model)),
    one_layer=lambda model, *_: model.blocks[-1].up(_sample(model)),
)


@_calls_the_model
def called_with_other_weights(model: Any, _optimizer: Any, _tensor: Any) -> Any:
    weights = {"weight": model.head.weight * 2, "bias": model.head.bias}
    return torch.func.functional_call(model.head, weights, (_sample(model),))


_add_all(
    _calls_the_model,
    gradient_of_a_further_pass=lambda model, *_: torch.autograd.grad(
        model(_sample(model)).sum(), [model.head.weight]
    ),
)


# ---- begun before the step ----


_add_held(
    view_held=(lambda t: t.view(-1), lambda kept: kept.detach() * 1),
    row_held=(lambda t: t[0], lambda kept: kept.detach() * 1),
    detached_held=(lambda t: t.detach(), lambda kept: kept * 1),
    data_held=(lambda t: t.data, lambda kept: kept * 1),
    parameter_held=(lambda t: nn.Parameter(t.detach(), requires_grad=False), lambda kept: kept * 1),
    subclass_held=(
        lambda t: t.detach().as_subclass(_Tagged),
        lambda kept: (kept * 1).as_subclass(torch.Tensor),
    ),
)


@_holds
def storage_held(tensor: Any) -> Held:
    storage, empty = tensor.untyped_storage(), torch.empty(0, device=tensor.device)
    yield
    return empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride()) * 1


_add_held(
    array_held=(lambda t: t.detach().numpy(), lambda kept: torch.from_numpy(kept.copy())),
    dlpack_held=(lambda t: _DLPACK.from_dlpack(t.detach()), lambda kept: kept * 1),
    wrapper_held=(lambda t: Wrapper(t.detach()), lambda kept: kept * 2),
    # The object itself, such as of a gradient that zero_grad() drops.
    itself_held=(lambda t: [t], lambda kept: kept[0].detach() * 1),
)


@_holds
def old_graph(tensor: Any) -> Held:
    """Of a product, whose gradient is the tensor that it has saved."""
    x = torch.ones_like(tensor, requires_grad=True)
    output = (x * tensor.detach()).sum()
    yield
    with torch.enable_grad():
        return torch.autograd.grad(output, x)


@_holds
def old_graph_of_the_tensor_itself(tensor: Any) -> Held:
    x = torch.ones_like(tensor, requires_grad=True)
    output = (x * tensor).sum()
    yield
    return torch.autograd.grad(output, x)


@_holds
def old_graph_of_a_layer(tensor: Any) -> Held:
    x = torch.ones(2, tensor.shape[-1], device=tensor.device, requires_grad=True)
    output = nn.functional.linear(x, tensor).sum()
    yield
    return torch.autograd.grad(output, x)


@_holds
def old_closure(tensor: Any) -> Held:
    def read() -> Any:
        return tensor.detach() * 1

    yield
    return read()


# ---- changes ----


_add_all(
    _changes,
    shrunk=lambda t: t.mul_(0.995),
    shrunk_by_data=lambda t: t.data.mul_(0.995),
    shrunk_by_detach=lambda t: t.detach().mul_(0.995),
    shrunk_by_script=lambda t: _scripted_shrink(t),
    shrunk_in_a_list=lambda t: torch._foreach_mul_([t], 0.995),
    shrunk_by_a_view=lambda t: t.view(-1)[:5].mul_(0.995),
)


@_writes
def shrunk_by_an_item(tensor: Any) -> None:
    tensor[0] = tensor[0] * 0.995


@_writes
def shrunk_by_numpy(tensor: Any) -> None:
    array = tensor.detach().numpy()
    array *= np.float32(0.995)


_add_all(_changes, shrunk_by_dlpack=lambda t: _DLPACK.from_dlpack(t.detach()).mul_(0.995))


@_writes
def shrunk_by_storage(tensor: Any) -> None:
    by_set_: Any = torch.empty(0, device=tensor.device, dtype=tensor.dtype)
    by_set_.set_(tensor.untyped_storage(), 0, tensor.shape, tensor.stride()).mul_(0.995)


_add_all(
    _changes,
    result_of_an_operator=lambda t: torch.mul(t.detach(), 0.995, out=t.detach()),
    copied_into=lambda t: t.copy_(t.clone() * 0.995),
    clamped=lambda t: t.clamp_(-1, 1),
    zeroed=lambda t: t.zero_(),
    # Without a look at the old values: an update that comes later must not undo it.
    filled=lambda t: t.fill_(0.01),
)


@_writes
def initialised(tensor: Any) -> None:
    torch.manual_seed(7)
    nn.init.uniform_(tensor, 0.01, 0.02)


_add_all(
    _changes,
    filled_by_a_vector=lambda t: vector_to_parameters(
        parameters_to_vector([t]).detach() * 0.995, [t]
    ),
)


@_writes
def data_replaced(tensor: Any) -> None:
    tensor.data = tensor.data * 0.995


@_writes
def data_put_back(tensor: Any) -> Any:
    """As offloaders do: the data is kept by another tensor, and comes back."""
    kept = tensor.data
    tensor.data = torch.zeros_like(kept)
    tensor.data = kept
    return tensor.detach() * 1


@_writes
def gradients_asked_for_anew(tensor: Any) -> Any:
    with contextlib.suppress(RuntimeError):  # of a step count of integers
        tensor.requires_grad_(tensor.requires_grad)
    return tensor.detach() * 1


@_writes
def swapped_and_back(tensor: Any) -> Any:
    other = copy.deepcopy(tensor)
    torch.utils.swap_tensors(tensor, other)
    torch.utils.swap_tensors(tensor, other)
    return tensor.detach() * 1
