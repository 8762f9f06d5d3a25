"""Prints the rates of torch's kernels that a hardware profile needs: memory and attention.

``python benchmarks/kernel_rates.py`` measures on GPU 0. Each kernel works on several sets of
tensors in turn, so that little of what it reads is in the cache from the time before.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from umem.hardware.capabilities import detect

SHAPES = ((4096, 4096), (8192, 4096), (4096, 11_008))
SETS = 8
RANK = 16
ATTENTION = ((1, 32, 4096, 128), (4, 32, 2048, 128), (1, 40, 4096, 128), (8, 24, 2048, 64))
"""Sequences, heads, tokens, width of a head."""

Kernels = Mapping[str, tuple[int, Callable[[int], Any]]]
"""By name: bytes per element that are read and written, and a call for a set of tensors."""


def seconds(call: Callable[[int], Any], repeats: int = 60) -> float:
    """Time of a call on the device: mean of `repeats` calls behind one another."""
    for number in range(5):
        call(number % SETS)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for number in range(repeats):
        call(number % SETS)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats / 1e3


def kernels(rows: int, width: int) -> dict[str, Kernels]:
    """Kernels over matrices of one shape: those that torch vectorises, and others."""
    narrow = [torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) for _ in range(SETS)]
    wide = [it.float() for it in narrow]
    thin = [torch.randn(rows, RANK, device="cuda") for _ in range(SETS)]
    column, row = torch.randn(rows, 1, device="cuda"), torch.randn(width, device="cuda")
    row_16 = row.bfloat16()
    down, up = torch.randn(RANK, width, device="cuda"), torch.randn(width, RANK, device="cuda")
    halves = [(it[:, width // 2 :], it[:, : width // 2]) for it in narrow]
    return {
        "vectorised": {
            "a sum in float32": (12, lambda i: wide[i] + wide[i - 1]),
            "a sum in bfloat16": (6, lambda i: narrow[i] + narrow[i - 1]),
            "a cast to bfloat16": (6, lambda i: wide[i].bfloat16()),
            "a product with a number": (8, lambda i: wide[i] * 2.0),
            "SiLU in bfloat16": (4, lambda i: functional.silu(narrow[i])),
        },
        "unvectorised": {
            "a cast to float32": (6, lambda i: narrow[i].float()),
            "a product with a column": (8, lambda i: wide[i] * column),
            "a product with a row": (8, lambda i: wide[i] * row),
            "the same in bfloat16": (4, lambda i: narrow[i] * row_16),
            "a sum of two types": (10, lambda i: narrow[i] + wide[i]),
            "a concatenation": (4, lambda i: torch.cat(halves[i], 1)),
            "float32 @ thin": (4, lambda i: wide[i] @ up),
            "thin @ float32": (4, lambda i: thin[i] @ down),
            "float32.T @ thin": (4, lambda i: wide[i].T @ thin[i]),
        },
    }  # fmt: skip


def attention_rates(shape: Sequence[int], backend: SDPBackend | None) -> tuple[float, float]:
    """Operations per second of causal attention in bfloat16, forward and backward."""
    batch, heads, tokens, head_width = shape
    query, key, value = (
        torch.randn(batch, tokens, heads, head_width, device="cuda", dtype=torch.bfloat16)
        .transpose(1, 2)
        .requires_grad_()
        for _ in range(3)
    )
    chosen = list(SDPBackend.__members__.values()) if backend is None else [backend]

    def attend(_: int) -> torch.Tensor:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    with sdpa_kernel(chosen):
        output = attend(0)
        gradient = torch.randn_like(output)
        forward_s = seconds(attend, 20)
        backward_s = seconds(
            lambda _: torch.autograd.grad(output, (query, key, value), gradient, retain_graph=True),
            20,
        )
    flops = 2 * batch * heads * tokens * tokens * head_width
    return flops / forward_s, 2.5 * flops / backward_s


def describe_machine() -> str:
    """GPU, versions and date, in one line."""
    driver = detect().driver_release
    return (
        f"One {torch.cuda.get_device_name()}, driver {driver}, CUDA {torch.version.cuda}, "
        f"torch {torch.__version__}, Python {platform.python_version()}, {date.today()}"
    )


def main() -> None:
    """Measure and print."""
    torch.manual_seed(0)
    print(describe_machine())
    rates: dict[str, list[float]] = {}
    for rows, width in SHAPES:
        print(f"\n{rows} x {width}")
        for kind, group in kernels(rows, width).items():
            for name, (size, call) in group.items():
                rate = size * rows * width / seconds(call)
                rates.setdefault(kind, []).append(rate)
                print(f"  {kind:14}{name:28}{rate / 1e12:6.2f} TB/s")
    print()
    for kind, found in rates.items():
        print(f"{kind}: median {statistics.median(found) / 1e12:.2f} TB/s")
    print("\ncausal attention in bfloat16, TFLOP/s forward and backward")
    for shape in ATTENTION:
        batch, heads, tokens, head_width = shape
        print(f"  {batch} x {tokens} tokens, {heads} heads of {head_width}")
        for label, backend in (
            ("torch's choice", None),
            ("flash", SDPBackend.FLASH_ATTENTION),
        ):
            forward, backward = attention_rates(shape, backend)
            print(f"    {label:16}{forward / 1e12:6.0f}{backward / 1e12:6.0f}")


if __name__ == "__main__":
    main()
