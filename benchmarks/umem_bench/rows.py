"""Rows of a benchmark: which are asked for, and each measured by a process of its own.

A row is a case and a variant. It is left out, with the reason, where time or memory do not suffice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Container, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol, TypeVar

from umem import UmemError, UnsupportedError
from umem.core.units import format_bytes
from umem_bench.card import Card, MemorySampler
from umem_bench.results import Header, ProcessResult, Record
from umem_bench.workers import Answers, Worker, WorkerError

__all__ = [
    "HOST_LEFT_BYTES",
    "PRELOADED",
    "ask_worker",
    "continued",
    "find_card",
    "memory_ran_out",
    "require_gpu",
    "rows_named",
    "run_missing",
    "why_no_host_room",
    "why_no_time",
]

_PROCESS_LIMIT_S = 240.0
"""For one variant with one budget: DeepSpeed compiles its optimizer when it is first used."""

_LEAST_LIMIT_S = 20.0
"""For a process that was started, however little is left of the run's time."""

PRELOADED = ("umem_bench.training.shared_imports",)

HOST_LEFT_BYTES = 16 << 30
"""Of the host's available memory, never used."""

_Case = TypeVar("_Case", bound=str)
_Variant = TypeVar("_Variant", bound=str)
_Key = TypeVar("_Key", bound=Hashable)
_Result = TypeVar("_Result", bound=ProcessResult)


class _HasHeader(Protocol):
    """A :class:`Run`, or what else has a header and results."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def header(self) -> Header: ...


_Run = TypeVar("_Run", bound=_HasHeader)


def rows_named(
    text: str, variants: Mapping[_Case, Sequence[_Variant]], usual: Container[_Variant]
) -> list[tuple[_Case, _Variant]]:
    """Rows of a list such as ``llama-2-7b:umem,tiny:stock``, in its order.

    A case alone stands for its `usual` variants; an empty text for all cases but ``tiny``.

    Raises ``ValueError`` for a case or a variant that there is not.
    """
    rows: list[tuple[_Case, _Variant]] = []
    for word in text.split(",") if text else [it for it in variants if it != "tiny"]:
        name, _, wanted = word.strip().partition(":")
        case = next((it for it in variants if it == name), None)
        if case is None:
            raise ValueError(f"{name!r} is none of {', '.join(variants)}")
        known = variants[case]
        chosen = [it for it in known if it == wanted or (not wanted and it in usual)]
        if not chosen:
            raise ValueError(f"{wanted!r} is none of {', '.join(known)}")
        rows += [(case, variant) for variant in chosen]
    return list(dict.fromkeys(rows))


def continued(earlier: _Run | None, begun: _Run, *, same_commit: bool = True) -> _Run:
    """The run that goes on: the earlier one, if there is any.

    Raises `UmemError` where that is not of the same settings, machine or versions.
    """
    if earlier is None:
        return begun
    groups = ("umem", *(("commit",) if same_commit else ()), "machine", "packages", "settings")
    pairs = [(name, getattr(earlier.header, name), getattr(begun.header, name)) for name in groups]
    words = [f"{name} {was}, and now {it}" for name, was, it in pairs if was != it]
    if words:
        raise UmemError(
            f"the earlier results cannot be continued: they have {'; '.join(words)}: give the same "
            "options on the same machine, or begin a new file"
        )
    return earlier


def run_missing(
    begun: _Run,
    wanted: Sequence[_Key],
    earlier: dict[_Key, _Result],
    measure_one: Callable[[_Key, list[_Result], _Result | None], _Result],
    on_results: Callable[[_Run], None],
    *,
    again: bool = False,
) -> _Run:
    """Measure one by one what earlier results lack, have left out or gave no answer to.

    `measure_one` gets the results so far and the earlier one, too; `on_results` gets the run with
    all results after each one. With `again` everything wanted is measured; an earlier result stays
    until there is another one.
    """
    known = dict(earlier)
    missing = [
        it
        for it in wanted
        if again or it not in known or known[it].state == "left out" or known[it].timed_out
    ]
    # A variant that gave no answer is tried once more in a later call, and not again in this one.
    spent = {it: known.pop(it) for it in missing if it in known}
    for key in missing:
        result = measure_one(key, list(known.values()), spent.get(key))
        known[key] = spent.get(key, result) if result.state == "left out" else result
        on_results(replace(begun, results=tuple((spent | known).values())))
    return replace(begun, results=tuple(known.values()))


def ask_worker(
    answers: Answers,
    job: Record,
    card: Card | None,
    left_s: float,
    *,
    parts: int = 1,
    process_limit_s: float = _PROCESS_LIMIT_S,
) -> dict[str, Any]:
    """What a job's process answers within its time limit, or why it does not.

    Its duration and the peaks of memory are added: those until its first answer. A measured result
    can have further `parts`, such as a profile, which takes memory of its own.
    """
    card = card and card.between_processes()
    worker = Worker(answers, job.model_copy(update={"card": card}), PRELOADED)
    began_s = time.monotonic()  # the server process has imported what its workers share
    limit_s = min(process_limit_s, max(_LEAST_LIMIT_S, left_s))
    told: dict[str, Any] = {}
    with MemorySampler(card) as sampler:
        try:
            with worker:
                told = worker.ask(limit_s)
                told |= sampler.figures()
                if told["state"] == "measured":
                    for _ in range(parts - 1):
                        told |= worker.ask(limit_s)
        except WorkerError as error:
            told |= {"state": "failed", "reason": str(error), "timed_out": error.timed_out}
    return sampler.figures() | told | {"process_s": time.monotonic() - began_s}


def why_no_time(
    variant: str, known: Sequence[ProcessResult], tried: ProcessResult | None, left_s: float
) -> str:
    """Why a process is not started; empty where it is.

    It needs the time that its variant's longest one took, or an earlier one of its own, with or
    without an answer; for a new variant that of any other.
    """
    if Worker.stuck:
        return Worker.stuck
    silent = next((it for it in known if it.timed_out and it.variant == variant), None)
    if silent is not None:
        return f"this variant gave no answer before: {silent.reason}"
    own = [it.process_s for it in known if it.variant == variant]
    own = [it for it in (*own, tried.process_s if tried else 0.0) if it]
    needed_s = max(own or (it.process_s for it in known), default=0.0)
    if left_s >= needed_s or not needed_s:
        return ""
    return (
        f"{max(0.0, left_s):.0f} s were left, and such a process takes {needed_s:.0f} s or more: "
        "give a longer limit, or go on with --continue"
    )


def why_no_host_room(needed_bytes: int, limit_bytes: int | None) -> str:
    """Why the host is too small for a process; empty where it is not.

    Without a limit it may take what is available less :data:`HOST_LEFT_BYTES`.
    """
    from umem.hardware.host_memory import host_memory_bytes

    _, available_bytes = host_memory_bytes() or (0, 0)
    if limit_bytes is None:
        limit_bytes = available_bytes - HOST_LEFT_BYTES
    if needed_bytes <= max(0, limit_bytes):
        return ""
    return (
        f"it needs {format_bytes(needed_bytes)} of host memory, and may take "
        f"{format_bytes(max(0, limit_bytes))}: {format_bytes(available_bytes)} are available, "
        f"and {format_bytes(HOST_LEFT_BYTES)} stay free. Where the host has more than its "
        "kernel reports, give --host"
    )


def memory_ran_out(told: dict[str, Any]) -> dict[str, Any]:
    """The fields of a process's answer that change, as too little memory is a result of its own."""
    if told["state"] != "failed":
        return {}
    reason = str(told["reason"]).splitlines()[0]
    # The kernel ends a process that takes too much of the host by signal 9.
    is_memory = any(it in reason for it in ("out of memory", "status -9"))
    is_out = is_memory and not told.get("timed_out")
    return {"reason": reason, "state": "out of memory" if is_out else "failed"}


def require_gpu(what: str = "training") -> None:
    """Raise `UnsupportedError` where torch sees no GPU to measure something on."""
    import torch

    if torch.version.cuda is None or torch.cuda.device_count() == 0:
        raise UnsupportedError(
            f"{what} is measured on an NVIDIA GPU, and torch sees none: `umem doctor` says what "
            "is missing, and `umem simulate` predicts steps without one"
        )


def find_card(cases: Collection[str], what: str) -> Card | None:
    """The GPU to measure on; None without one, where the only case is ``tiny``.

    Raises `UnsupportedError` where torch sees no GPU and a case needs one.
    """
    import torch

    if torch.cuda.device_count() > 0:
        return Card.find()
    if set(cases) != {"tiny"}:
        require_gpu(what)
    return None
