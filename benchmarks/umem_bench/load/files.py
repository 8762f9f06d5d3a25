"""Files with a model's weights: written once, and read in the fastest plain way."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from umem_bench.llama import WEIGHTS_STD, llama_config
from umem_bench.results import LlamaShape

__all__ = ["drop_from_page_cache", "read_all", "weight_files", "write_model"]

_SHARD = "5GB"
"""Of files: as the published ones of Llama-2 are."""

_POOL_NUMBERS = 1 << 26
"""Random numbers, of which each matrix has a part: to draw billions on a CPU takes a minute."""

_STRIDE = 15_485_863
"""Between the parts of two matrices: a prime number, so that no two are equal."""

_CHUNK_BYTES = 16 << 20

_MOST_THREADS = 16


def write_model(shape: LlamaShape, folder: Path) -> None:
    """Write a Llama with random weights by `save_pretrained`; it exists in memory first."""
    from transformers import LlamaForCausalLM

    kind = getattr(torch, shape.weights)
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(llama_config(shape)).to(kind)
    model.to_empty(device="cpu")
    count = min(_POOL_NUMBERS, max(shape.matrix_sizes))
    pool = torch.empty(count, dtype=torch.float32)
    pool = pool.normal_(0, WEIGHTS_STD, generator=torch.Generator().manual_seed(0)).to(kind)
    with torch.no_grad():
        for number, weight in enumerate(model.parameters()):
            if weight.ndim < 2:
                weight.fill_(1)
                continue
            flat, done = weight.view(-1), 0
            begin = number * _STRIDE % count
            while done < flat.numel():
                part = pool[begin : begin + flat.numel() - done]
                flat[done : done + part.numel()] = part
                done += part.numel()
                begin = 0
    model.save_pretrained(folder, max_shard_size=_SHARD)


def weight_files(folder: Path) -> list[Path]:
    """The files with weights."""
    return sorted(folder.glob("*.safetensors"))


def read_all(files: Sequence[Path]) -> float:
    """Read all files in parallel into memory that exists already; returns the seconds."""
    sizes = [it.stat().st_size for it in files]
    with mmap.mmap(-1, sum(sizes)) as memory, memoryview(memory) as view:
        memory.madvise(mmap.MADV_HUGEPAGE)
        torch.frombuffer(memory, dtype=torch.uint8).zero_()  # the kernel finds all pages now
        descriptors = [os.open(it, os.O_RDONLY) for it in files]
        threads = min(_MOST_THREADS, os.cpu_count() or 1)
        try:
            jobs, base = [], 0
            for descriptor, size in zip(descriptors, sizes, strict=True):
                for offset in range(0, size, _CHUNK_BYTES):
                    end = min(offset + _CHUNK_BYTES, size)
                    jobs.append((descriptor, offset, view[base + offset : base + end]))
                base += size
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(len, [()] * threads))  # the threads are there
                began_s = time.perf_counter()
                list(pool.map(_read, jobs))
                return time.perf_counter() - began_s
        finally:
            for *_, part in jobs:
                part.release()
            for descriptor in descriptors:
                os.close(descriptor)


def _read(job: tuple[int, int, memoryview]) -> None:
    descriptor, offset, into = job
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done:]], offset + done)
        if count == 0:
            raise OSError("a file of weights has become shorter")
        done += count


def drop_from_page_cache(files: Sequence[Path]) -> None:
    """Have the next read come from the disk, as far as the kernel does what it is asked."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
