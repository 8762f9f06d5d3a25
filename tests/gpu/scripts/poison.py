"""New and freed memory with ``UMEM_POISON``, in a process of its own: ``poison.py POLICY``.

The last line is JSON: how many of the elements are NaN.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

import umem

ELEMENTS = 1000


class Memory:
    """Elements at an address, which nobody has to own."""

    def __init__(self, address: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (ELEMENTS,),
            "typestr": "<f4",
            "data": (address, False),
            "version": 3,
        }


def nans(memory: Any) -> int:
    """How many there are, without a request for memory of the device."""
    return int(torch.as_tensor(memory, device="cuda").cpu().isnan().sum())


def main() -> None:
    assert umem.enable(sys.argv[1])
    new = torch.empty(ELEMENTS, device="cuda")
    facts = {"new": nans(new)}
    with umem.tensor_class("optimizer_state"):  # page-locked, under a policy that streams it
        large = torch.empty(4 << 20, device="cuda")
    facts["at_home"] = nans(large[:ELEMENTS])
    freed = Memory(new.fill_(1).data_ptr())
    side = torch.cuda.Stream()
    del new
    facts["freed"] = nans(freed)
    with torch.cuda.stream(side):
        kept = [torch.zeros(ELEMENTS, device="cuda")]
    facts["another_stream_asks"] = nans(freed)
    kept.append(torch.zeros(1 << 20, device="cuda"))
    facts["its_stream_asks"] = nans(freed)
    facts["kept"] = sum(map(nans, (it[:ELEMENTS] for it in kept)))
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
