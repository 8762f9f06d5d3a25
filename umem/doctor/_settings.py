"""Checks of environment variables: umem's own, and those of CUDA and torch that bear on it."""

from __future__ import annotations

import difflib

from umem.doctor._facts import Environment
from umem.doctor._report import Check, Status
from umem.errors import PolicyError
from umem.policy import load_policy, resolve

__all__ = ["setting_checks"]

_UMEM_VARIABLES = (
    "UMEM_POLICY",
    "UMEM_MANAGED_LIMIT",
    "UMEM_DEVICE_BUDGET",
    "UMEM_PLANNER",
    "UMEM_NVTX",
    "UMEM_COMMIT",
)

_BUILD_VARIABLES = ("UMEM_CUDA",)
"""Read when umem is built."""

_ANY_DEVICE_BYTES = 1 << 40
"""Percentages are of a card; where there is none, any will do to tell whether they are usable."""

_WITHOUT_EFFECT = "torch's own allocator reads it; under the swap it has no effect"

_HARMFUL_VARIABLES = {
    "PYTORCH_ALLOC_CONF": _WITHOUT_EFFECT,
    "PYTORCH_CUDA_ALLOC_CONF": _WITHOUT_EFFECT,
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "torch's own allocator reads it; umem caches all the same",
    "CUDA_LAUNCH_BLOCKING": (
        "kernels run one by one, so that no migration hides behind computation"
    ),
    "CUDA_MANAGED_FORCE_DEVICE_ALLOC": (
        "managed memory is kept on the device, so that none can be evicted"
    ),
}
"""Name -> what is wrong with setting it."""


def setting_checks(environment: Environment) -> tuple[Check, ...]:
    """Check the environment variables that are set."""
    checks = tuple(
        _umem_variable(name, value, environment)
        if name.startswith("UMEM_")
        else _other_variable(name, value)
        for name, value in environment.variables.items()
        if name not in _BUILD_VARIABLES
    )
    return checks or (Check("environment variables", Status.INFO, "none set"),)


def _umem_variable(name: str, value: str, environment: Environment) -> Check:
    if name not in _UMEM_VARIABLES:
        near = difflib.get_close_matches(name, _UMEM_VARIABLES, n=1)
        remedy = f"use {near[0]}" if near else f"umem reads {', '.join(_UMEM_VARIABLES)}"
        return Check(name, Status.WARN, value, "umem reads no such variable", remedy)
    devices = environment.devices
    device_bytes = devices[0].total_bytes if devices else _ANY_DEVICE_BYTES
    try:
        if name == "UMEM_POLICY":
            load_policy(value)
        elif name == "UMEM_NVTX":
            if value not in ("0", "1"):
                return Check(name, Status.WARN, value, "ranges are off", "set it to 1, or unset it")
        else:
            resolve(load_policy("sft"), device_bytes, {name: value})
    except PolicyError as error:
        return Check(name, Status.FAIL, value, str(error), f"correct it, or unset {name}")
    return Check(name, Status.OK, value)


def _other_variable(name: str, value: str) -> Check:
    if name in _HARMFUL_VARIABLES and value not in ("", "0"):
        return Check(name, Status.WARN, value, _HARMFUL_VARIABLES[name], f"unset {name}")
    return Check(name, Status.INFO, value)
