"""A callback for the Trainer of `transformers` that logs what umem copies and holds."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from umem.integrations.figures import LoggedFigures

__all__ = ["UmemCallback"]


class UmemCallback(TrainerCallback):
    """Adds :class:`~umem.integrations.figures.LoggedFigures` to each of a Trainer's logs.

    :meth:`add_to` puts it before the Trainer's reporters, such as those of TensorBoard and of
    Weights & Biases, which then show them. In ``Trainer(callbacks=[UmemCallback()])`` it comes
    behind them: only ``state.log_history``, the progress bar and later callbacks have the figures.
    """

    def __init__(self) -> None:
        self._figures = LoggedFigures()

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
        self._figures = LoggedFigures(state.global_step)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Add the figures of the steps since the last log; not to one behind no step."""
        if logs is None:
            return
        found = self._figures.at(state.global_step)
        logs.update(found)
        if found and state.log_history:
            state.log_history[-1].update(found)
