"""A callback for the Trainer of `transformers` that logs what umem copies and holds."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from umem.core.classes import TensorClass
from umem.core.report import Direction
from umem.runtime.copies import copy_counts
from umem.runtime.state import is_enabled, runtime
from umem.streaming.training import streamed_trainings

__all__ = ["UmemCallback"]

_MIB = 1 << 20

_Sums = dict[tuple[Direction, TensorClass], int]


class UmemCallback(TrainerCallback):
    """Adds figures of umem to each of a Trainer's logs.

    :meth:`add_to` puts it before the Trainer's reporters, such as those of TensorBoard and of
    Weights & Biases, which then show them. In ``Trainer(callbacks=[UmemCallback()])`` it comes
    behind them: only ``state.log_history``, the progress bar and later callbacks have the figures.

    ==============================  ================================================================
    ``umem/to_device_mib``          copied to the device in a step, on average since the last log
    ``umem/to_host_mib``            the same to the host
    ``umem/CLASS_to_device_mib``    the same by tensor class, such as ``optimizer_state``; also
                                    ``_to_host_mib``
    ``umem/device_mib``             device memory that umem holds now
    ``umem/page_locked_mib``        page-locked host memory that it holds now
    ``umem/predicted_step_s``       of the plan that runs, if there is one
    ==============================  ================================================================
    """

    def __init__(self) -> None:
        self._copied: _Sums = {}
        self._step = 0

    @classmethod
    def add_to(cls, trainer: Any) -> UmemCallback:
        """Add a callback to a Trainer, before all others.

        Parameters
        ----------
        trainer
            A `transformers.Trainer`, or one of a class derived from it, such as TRL's.
        """
        callback = cls()
        trainer.callback_handler.callbacks.insert(0, callback)
        return callback

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count from here on."""
        self._copied, self._step = copy_counts.copied_bytes(), state.global_step

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Add the figures of the steps since the last log; not to one behind no step."""
        steps = state.global_step - self._step
        if logs is None or steps <= 0:
            return
        copied = copy_counts.copied_bytes()
        more = {key: size - self._copied.get(key, 0) for key, size in copied.items()}
        self._copied, self._step = copied, state.global_step
        found = _moved_mib(more, steps) | _held_mib() | _predicted()
        logs.update(found)
        if state.log_history:
            state.log_history[-1].update(found)


def _moved_mib(copied: _Sums, steps: int) -> dict[str, float]:
    found = {"umem/to_device_mib": 0.0, "umem/to_host_mib": 0.0}
    for (direction, tensor_class), size_bytes in copied.items():
        mib = size_bytes / steps / _MIB
        found[f"umem/{direction}_mib"] += mib
        found[f"umem/{tensor_class.value}_{direction}_mib"] = mib
    return {name: round(mib, 3) for name, mib in found.items()}


def _held_mib() -> dict[str, float]:
    if not is_enabled():
        return {}
    kinds = runtime().allocator.kind_stats(0)
    return {
        "umem/device_mib": round(kinds["device"]["reserved_bytes"] / _MIB, 3),
        "umem/page_locked_mib": round(kinds["pinned"]["reserved_bytes"] / _MIB, 3),
    }


def _predicted() -> dict[str, float]:
    plans = (it.status().tuning for it in streamed_trainings())
    seconds = [it.predicted_s for it in plans if it is not None and it.predicted_s is not None]
    return {"umem/predicted_step_s": round(sum(seconds), 6)} if seconds else {}
