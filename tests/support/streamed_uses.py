"""What programs do between an optimizer's step and the next one."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from streamed_programs import Program
from torch import nn


def ema(program: Program) -> None:
    program.seen.append(
        [torch.zeros(it.shape).lerp_(it.detach(), 0.1) for it in program.model.parameters()]
    )


def foreach_ema(program: Program) -> None:
    averages = [torch.zeros(it.shape) for it in program.model.parameters()]
    with torch.no_grad():
        torch._foreach_lerp_(averages, list(program.model.parameters()), 0.1)
    program.seen.append(averages)


def _average(program: Program, kind: str, make: Callable[[], Any]) -> Any:
    """An average, a model or tensors, whose values of the step before are looked at."""
    if kind not in program.averages:
        program.averages[kind] = make()
    program.seen.append(program.values_of(kind))
    return program.averages[kind]


def _copies(program: Program, kind: str) -> list[torch.Tensor]:
    weights = program.model.parameters()
    return _average(program, kind, lambda: [it.detach().clone() for it in weights])


@torch.no_grad()
def ema_by_hand(program: Program) -> None:
    averages = _copies(program, "by hand")
    for average, weight in zip(averages, program.model.parameters(), strict=True):
        average.mul_(0.9).add_(weight, alpha=0.1)


@torch.no_grad()
def ema_of_diffusers(program: Program) -> None:
    """As ``diffusers.training_utils.EMAModel.step``."""
    averages = _copies(program, "diffusers")
    for average, weight in zip(averages, program.model.parameters(), strict=True):
        if weight.requires_grad:
            average.sub_(0.1 * (average - weight))
        else:
            average.copy_(weight)


@torch.no_grad()
def foreach_ema_of_diffusers(program: Program) -> None:
    averages, weights = _copies(program, "diffusers"), list(program.model.parameters())
    torch._foreach_sub_(averages, torch._foreach_sub(averages, weights), alpha=0.1)


@torch.no_grad()
def ema_of_timm(program: Program) -> None:
    """As ``timm.utils.ModelEmaV3``."""
    averaged = _average(program, "timm", lambda: copy.deepcopy(program.model))
    averages, weights = (
        [it for it in model.state_dict().values() if torch.is_tensor(it) and it.is_floating_point()]
        for model in (averaged, program.model)
    )
    torch._foreach_lerp_(averages, weights, weight=0.1)


def ema_of_torch(program: Program) -> None:
    update = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    averaged_model = torch.optim.swa_utils.AveragedModel
    averaged = _average(
        program, "torch", lambda: averaged_model(program.model, multi_avg_fn=update)
    )
    averaged.update_parameters(program.model)


def logged_norms(program: Program) -> None:
    gradients = [it.grad for it in program.model.parameters() if it.grad is not None]
    program.seen.append(nn.utils.get_total_norm(gradients))
    program.seen.append(program.model.head.weight.norm().item())


def save(program: Program) -> None:
    file = io.BytesIO()
    torch.save((program.model.state_dict(), program.optimizer.state_dict()), file)
    file.seek(0)
    program.seen.append(torch.load(file, weights_only=True))


def save_and_load(program: Program) -> None:
    state = copy.deepcopy((program.model.state_dict(), program.optimizer.state_dict()))
    program.step()
    program.model.load_state_dict(state[0])
    program.optimizer.load_state_dict(state[1])


def copy_model(program: Program) -> None:
    other = copy.deepcopy(program.model)
    assert {type(it) for it in other.parameters()} == {nn.Parameter}
    program.seen.append(list(other.parameters()))


def evaluate(program: Program) -> None:
    with torch.no_grad():
        program.seen.append(program.model(torch.ones(2, 16)))


def evaluate_in_inference_mode(program: Program) -> None:
    """What umem makes meanwhile, it uses in later steps."""
    with torch.inference_mode():
        program.seen.append(program.model(torch.ones(2, 16)).clone())


def call_one_layer(program: Program) -> None:
    program.seen.append(program.model.layers[2](torch.ones(2, 16)))


def use_a_weight_elsewhere(program: Program) -> None:
    weight = program.model.layers[3].weight
    program.seen.append(nn.functional.linear(torch.ones(2, 16), weight))


def zero_in_place(program: Program) -> None:
    program.optimizer.zero_grad(set_to_none=False)


def step_again(program: Program) -> None:
    program.optimizer.step()


def change_hyperparameters(program: Program) -> None:
    group = program.optimizer.param_groups[0]
    group["lr"] *= 0.5
    group["weight_decay"] += 0.1


def change_weights_in_place(program: Program) -> None:
    with torch.no_grad():
        for parameter in program.model.parameters():
            parameter.mul_(0.99)


def replace_data(program: Program) -> None:
    for parameter in program.model.parameters():
        parameter.data = parameter.data * 0.99


def turn_weights(program: Program) -> None:
    """The same memory in another order of elements, which optimizer state does not have."""
    for layer in program.model.layers:
        layer.weight.data = layer.weight.data.mT


def restore_weights_from_state(program: Program) -> None:
    """As optimizers that look at sharpness do: a weight has the memory of a state from then on."""
    state = program.optimizer.state
    program.optimizer.zero_grad()
    program.backward()
    with torch.no_grad():
        for it in program.model.parameters():
            if it.grad is not None and it in state:
                state[it]["old"] = it.data.clone()
                it.add_(it.grad, alpha=0.05)
    program.optimizer.zero_grad()
    program.backward()
    for it in program.model.parameters():
        if "old" in state.get(it, ()):
            it.data = state[it]["old"]
    program.optimizer.step()


def change_state_in_place(program: Program) -> None:
    for values in program.optimizer.state.values():
        values["exp_avg"].mul_(0.5)


def clear_state(program: Program) -> None:
    program.optimizer.state.clear()


def convert(program: Program) -> None:
    program.model.to(torch.float64).to(torch.float32)


def convert_by_swapping(program: Program) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        program.model.to(torch.float64).to(torch.float32)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def swap_weights(program: Program) -> None:
    for parameter in program.model.parameters():
        torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach() * 0.99))


def swap_state(program: Program) -> None:
    for values in program.optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            torch.utils.swap_tensors(values[name], values[name] * 0.75)


def freeze(program: Program) -> None:
    program.model.layers[1].requires_grad_(False)


def freeze_by_turns(program: Program) -> None:
    for number, layer in enumerate(program.model.layers):
        layer.requires_grad_((number + program.steps) % 2 == 0)


def read_in_a_thread(program: Program) -> None:
    found: list[Any] = []

    def read() -> None:
        found.append([it.detach().clone() for it in program.model.parameters()])

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    program.seen.append(found)


def accumulate_into_old_gradients(program: Program) -> None:
    program.backward()  # no zero_grad: adds to the gradients of the step before
    program.optimizer.step()


def exception_in_forward(program: Program) -> None:
    handle = program.model.norm.register_forward_pre_hook(_fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        program.model(program.batch())
    handle.remove()


def _fail(*_: object) -> None:
    raise RuntimeError("on purpose")


def skip_a_step(program: Program) -> None:
    program.optimizer.zero_grad()
    program.backward()
    program.optimizer.zero_grad()


def step_with_a_closure(program: Program) -> None:
    def closure() -> torch.Tensor:
        program.optimizer.zero_grad()
        loss: torch.Tensor = program.model(torch.ones(2, 16)).square().mean()
        loss.backward()
        return loss

    program.seen.append(program.optimizer.step(closure).detach())


def view_of_weights(program: Program) -> None:
    if program.extra is None:
        program.extra = [it.data.view(-1) for it in program.model.parameters()]
    program.seen.append([it.clone() for it in program.extra])


def view_of_gradients(program: Program) -> None:
    views = [it.grad.view(-1) for it in program.model.parameters() if it.grad is not None]
    program.optimizer.step()
    for view in views:
        view.zero_()


def view_of_state(program: Program) -> None:
    views = [values["exp_avg"].view(-1) for values in program.optimizer.state.values()]
    program.step()
    for view in views:
        view.mul_(0.5)
    program.step()
    program.seen.append([view.clone() for view in views])


def hook_on_step(program: Program) -> None:
    if program.is_first(hook_on_step):
        program.optimizer.register_step_post_hook(
            lambda optimizer, *_: program.seen.append(
                [it.detach().clone() for group in optimizer.param_groups for it in group["params"]]
            )
        )


def hook_before_step(program: Program) -> None:
    def halve(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)

    program.optimizer.zero_grad()
    program.backward()
    handle = program.optimizer.register_step_pre_hook(halve)
    program.optimizer.step()
    handle.remove()


def new_group(program: Program) -> None:
    extra = nn.Parameter(torch.ones(16))
    program.model.register_parameter(f"extra{program.steps}", extra)
    program.optimizer.add_param_group({"params": [extra], "lr": 1e-3})
    (extra.sum() * program.model.scale.sum()).backward()


def old_graph(program: Program) -> None:
    program.optimizer.zero_grad()
    loss = program.model.head.bias.square().sum() + program.model.scale.exp().sum()
    bias = program.model.head.bias.sum()
    loss.backward()
    program.optimizer.step()
    bias.backward()  # adds to a gradient that the step reads; saved no weight
    program.seen.append(program.model.head.bias.grad.clone())


def own_gradient(program: Program) -> None:
    for parameter in program.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    program.optimizer.step()
    for parameter in program.model.parameters():
        parameter.grad = None


def keep_state_dict(program: Program) -> None:
    if isinstance(program.kept, dict):  # of the step before: it shares memory
        program.seen.append(copy.deepcopy(program.kept))
    program.kept = program.model.state_dict()


def copy_optimizer(program: Program) -> None:
    program.seen.append(copy.deepcopy(program.optimizer).state_dict()["state"])


def load_one_step_count(program: Program) -> None:
    """As Megatron-core's distributed optimizer does: each update counts for all parameters."""
    state = program.optimizer.state_dict()
    count = torch.tensor(float(program.steps))
    for values in state["state"].values():
        values["step"] = count
    program.optimizer.load_state_dict(state)


def share_state(program: Program) -> None:
    other = torch.optim.AdamW(program.model.parameters(), lr=1e-3)
    other.load_state_dict(program.optimizer.state_dict())  # takes the very tensors
    other.step()
    program.seen.append(copy.deepcopy(other.state_dict()["state"]))


def from_one_vector(program: Program) -> None:
    vector = nn.utils.parameters_to_vector(program.model.parameters())
    nn.utils.vector_to_parameters(vector.detach() * 0.99, program.model.parameters())


def new_parameter(program: Program) -> None:
    layer = program.model.layers[0]
    layer.weight = nn.Parameter(layer.weight.detach().clone())


def functional(program: Program) -> None:
    values = {name: it.detach() * 2 for name, it in program.model.named_parameters()}
    program.seen.append(torch.func.functional_call(program.model, values, (torch.ones(2, 16),)))


def averaged_model(program: Program) -> None:
    if program.kept is None:
        program.kept = torch.optim.swa_utils.AveragedModel(program.model)
    elif isinstance(program.kept, torch.optim.swa_utils.AveragedModel):
        program.kept.update_parameters(program.model)
        program.seen.append([it.detach().clone() for it in program.kept.parameters()])


def clip_late(program: Program) -> None:
    nn.utils.clip_grad_value_(program.model.parameters(), 1e-3)
    program.optimizer.step()


def hooks_on_gradients(program: Program) -> None:
    if program.is_first(hooks_on_gradients):
        for parameter in program.model.parameters():
            parameter.register_hook(lambda gradient: gradient * 0.5)


def norms_of_state(program: Program) -> None:
    program.seen.append(
        [it["exp_avg"].norm() for it in program.optimizer.state.values() if "exp_avg" in it]
    )


def replace_values_of_state(program: Program) -> None:
    for number, values in enumerate(program.optimizer.state.values()):
        name = list(values)[number % 3]  # counts of steps as well as moments
        values[name] = values[name] * 0.5


def replace_state(program: Program) -> None:
    for parameter, values in program.optimizer.state.items():
        program.optimizer.state[parameter] = {
            name: value.clone() * 0.5 for name, value in values.items()
        }


def exchange_names_of_state(program: Program) -> None:
    for values in program.optimizer.state.values():
        values["exp_avg"], values["exp_avg_sq"] = values["exp_avg_sq"], values["exp_avg"].abs()


def read_counts(program: Program) -> None:
    program.seen.append([it["step"].clone() for it in program.optimizer.state.values()])


def view_of_counts(program: Program) -> None:
    views = [it["step"].view(1) for it in program.optimizer.state.values()]
    program.step()
    for view in views:
        program.seen.append(view.clone())
        view.add_(1)


def delete_gradients(program: Program) -> None:
    for parameter in program.model.parameters():
        if parameter.grad is not None:
            del parameter.grad
        program.seen.append(parameter.grad is None)


def backward_twice(program: Program) -> None:
    program.optimizer.zero_grad()
    loss = program.model(program.batch()).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def differentiate_twice(program: Program) -> None:
    program.optimizer.zero_grad()
    program.model(program.batch()).square().mean().backward(create_graph=True)
    trained = [it for it in program.model.parameters() if it.requires_grad]
    norm: Any = sum(it.grad.square().sum() for it in trained)
    norm.backward()
    for it in trained:
        it.grad = it.grad.detach()


def scale_one_gradient(program: Program) -> None:
    """It is another tensor now, behind the step that uses the first one."""
    weight = program.model.layers[1].weight
    if weight.grad is not None:
        weight.grad = weight.grad * 2
        program.optimizer.step()


USES: list[Callable[[Program], None]] = [
    *(ema, foreach_ema, ema_by_hand, ema_of_diffusers, foreach_ema_of_diffusers, ema_of_timm),
    *(ema_of_torch, logged_norms, save, save_and_load, copy_model, evaluate, call_one_layer),
    *(use_a_weight_elsewhere, zero_in_place, step_again, change_hyperparameters),
    *(change_weights_in_place, replace_data, change_state_in_place, clear_state, convert, freeze),
    *(freeze_by_turns, read_in_a_thread, accumulate_into_old_gradients, exception_in_forward),
    *(skip_a_step, step_with_a_closure, view_of_weights, view_of_gradients, view_of_state),
    *(hook_on_step, hook_before_step, new_group, old_graph, own_gradient, keep_state_dict),
    *(copy_optimizer, share_state, from_one_vector, new_parameter, functional, averaged_model),
    *(clip_late, hooks_on_gradients, norms_of_state, replace_values_of_state, replace_state),
    *(exchange_names_of_state, read_counts, view_of_counts, delete_gradients),
    *(scale_one_gradient, load_one_step_count, turn_weights, restore_weights_from_state),
    *(convert_by_swapping, swap_weights, swap_state, evaluate_in_inference_mode),
]
