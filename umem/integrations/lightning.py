"""A callback for Lightning's Trainer that logs what umem copies and holds."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from umem.integrations.figures import LoggedFigures

__all__ = ["LightningCallback"]

if TYPE_CHECKING:
    _Callback = object
else:
    # Of the program's package: the classes of the two are different ones.
    _NAMES = ("lightning.pytorch", "pytorch_lightning")
    _Callback = import_module(next(filter(sys.modules.get, _NAMES), _NAMES[0])).Callback


class LightningCallback(_Callback):
    """Gives :class:`~umem.integrations.figures.LoggedFigures` to the loggers of a Trainer.

    Such as ``TensorBoardLogger`` and ``WandbLogger``, as often as ``log_every_n_steps`` says::

        Trainer(logger=WandbLogger(), callbacks=[LightningCallback()])
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Count from here on."""
        self._logged = trainer.global_step
        self._figures = LoggedFigures(self._logged)

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Log the figures of the steps since the last time."""
        step = trainer.global_step
        if step - self._logged >= trainer.log_every_n_steps > 0:
            self._logged = step
            found = self._figures.at(step)
            for logger in trainer.loggers:
                logger.log_metrics(found, step=step - 1)  # Lightning counts from 0
