"""numba's and CuPy's arrays under a policy that shares memory: ``sharing.py MODE POLICY``."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from typing import Any

import cupy
import numba.cuda
import numpy as np
import torch

import umem

cuda: Any = numba.cuda  # of two packages, the one typed and the other not

COUNT = 1 << 20
"""float32 numbers in an array: 4 MiB."""


def address_of(array: Any) -> int:
    return array.__cuda_array_interface__["data"][0]


def look_at(
    make: Callable[[], Any], to_host: Callable[[Any], Any], wrap: Callable[[torch.Tensor], Any]
) -> dict[str, Any]:
    """One library's array from birth to death, and both ways between it and torch."""
    before = [torch.cuda.memory_allocated(), len(umem.tensors())]
    array = make()
    address = address_of(array)
    blocks = {block.address: block for block in umem.tensors()}
    facts: dict[str, Any] = {
        "known": address in blocks,
        "block": [blocks[address].bytes, blocks[address].memory_kind] if address in blocks else [],
        "allocated_bytes": torch.cuda.memory_allocated() - before[0],
    }
    tensor = torch.as_tensor(array, device="cuda")
    facts["into torch"] = tensor.data_ptr() == address
    tensor.fill_(3)
    torch.cuda.synchronize()
    facts["torch's values"] = bool((to_host(array) == 3).all())
    del tensor, array
    gc.collect()
    facts["left"] = [torch.cuda.memory_allocated() - before[0], len(umem.tensors()) - before[1]]

    tensor = torch.arange(COUNT, dtype=torch.float32, device="cuda")
    torch.cuda.synchronize()
    array = wrap(tensor)
    facts["out of torch"] = address_of(array) == tensor.data_ptr()
    facts["its values"] = bool((to_host(array) == np.arange(COUNT, dtype=np.float32)).all())
    return facts


def memory() -> dict[str, Any]:
    torch.cuda.init()
    facts = {
        "numba": look_at(
            lambda: cuda.device_array(COUNT, dtype=np.float32),
            lambda array: array.copy_to_host(),
            cuda.as_cuda_array,
        ),
        "cupy": look_at(
            lambda: cupy.empty(COUNT, dtype=cupy.float32), cupy.asnumpy, cupy.from_dlpack
        ),
    }
    # They keep to the same cap, and work on after an error.
    makers: dict[str, Callable[[int], Any]] = {
        "numba": lambda count: cuda.device_array(count, dtype=np.float32),
        "cupy": lambda count: cupy.empty(count, dtype=cupy.float32),
    }
    for name, make in makers.items():
        try:
            make(1 << 30)  # 4 GiB
        except MemoryError:
            facts[name]["beyond the cap"] = "MemoryError"
        facts[name]["after it"] = address_of(make(COUNT)) != 0
    return facts


def kernels() -> dict[str, Any]:
    """Each library's own kernels, on its own arrays and on torch's."""
    from numba.cuda.cudadrv.error import NvvmSupportError

    torch.cuda.init()
    numbers = cupy.arange(COUNT, dtype=cupy.float32)
    cupy.multiply(numbers, 2, out=numbers)
    facts: dict[str, Any] = {
        "cupy": bool(
            (
                torch.as_tensor(numbers, device="cuda").cpu().numpy()
                == 2 * np.arange(COUNT, dtype=np.float32)
            ).all()
        )
    }

    @cuda.jit  # type: ignore[untyped-decorator, unused-ignore]
    def double(values: Any) -> None:
        index = cuda.grid(1)
        if index < values.size:
            values[index] *= 2

    tensor = torch.ones(COUNT, device="cuda")
    array = cuda.to_device(np.full(COUNT, 5, dtype=np.float32))
    torch.cuda.synchronize()
    try:
        for values in (cuda.as_cuda_array(tensor), array):
            double[COUNT // 256, 256](values)
    except (NvvmSupportError, AttributeError) as error:  # or one of an older NumPy's time
        facts["numba has no compiler"] = str(error)
        return facts
    cuda.synchronize()
    facts["numba"] = [tensor.unique().tolist(), np.unique(array.copy_to_host()).tolist()]
    return facts


MODES = {"memory": memory, "kernels": kernels}

if __name__ == "__main__":
    mode, policy = sys.argv[1:]
    umem.enable(policy)
    print(json.dumps(MODES[mode]()))
