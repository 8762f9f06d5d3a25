"""AdamW for low-precision weights, with a float32 copy of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.adamw import adamw
from torch.optim.optimizer import Optimizer

__all__ = ["MasterAdamW"]


class MasterAdamW(Optimizer):
    """AdamW whose state is float32: both moments, and the weights that are updated.

    The model's own weights are rounded from these after each update, so that updates smaller than
    the weights' precision add up (mixed-precision training, Micikevicius et al. 2018,
    arXiv:1710.03740). That is 12 bytes of state per parameter. Parameters are updated one at a
    time, so that float32 gradients exist for one of them only.

    The parameters are those of :class:`torch.optim.AdamW`; only dense ones are trained.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; returns what `closure` does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            master = parameter.detach().to(torch.float32, copy=True)
            state["master"] = master
            state["exp_avg"] = torch.zeros_like(master)
            state["exp_avg_sq"] = torch.zeros_like(master)
            state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
        assert parameter.grad is not None
        adamw(
            [state["master"]],
            [parameter.grad.to(torch.float32)],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],
            [state["step"]],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        parameter.copy_(state["master"])
