"""What umem copies reaches the loggers of Lightning's Trainer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lazy_lanes import HostStateMemory

from umem.streaming import StreamedTraining
from umem.streaming.stage import HostLanes

lightning: Any = pytest.importorskip("lightning")

pytestmark = pytest.mark.slow

STEPS = 6


class Module(lightning.LightningModule):  # type: ignore[misc, unused-ignore]
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.optimizer = torch.optim.AdamW(self.parameters())
        return self.optimizer

    def on_train_start(self) -> None:
        memory = HostStateMemory(min_bytes=1024)
        self.training_of_umem = StreamedTraining(self, self.optimizer, HostLanes(), memory)


class Logger(lightning.pytorch.loggers.CSVLogger):  # type: ignore[misc, unused-ignore]
    """What TensorBoard or Weights & Biases would show."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.logs: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if "umem/to_device_mib" in metrics:
            assert step is not None
            self.logs.append((step, metrics))


def fit(tmp_path: Path, every: int, callback: Any, accumulate: int = 1) -> Logger:
    module, logger = Module(), Logger(tmp_path)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        logger=logger,
        callbacks=[callback],
        log_every_n_steps=every,
        accumulate_grad_batches=accumulate,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows: Any = torch.rand(64, 64)
    trainer.fit(module, torch.utils.data.DataLoader(rows, 4))
    module.training_of_umem.close()
    return logger


@pytest.mark.parametrize(("every", "accumulate"), [(1, 1), (2, 1), (1, 2)])
def test_loggers_get_what_each_step_copies(tmp_path: Path, every: int, accumulate: int) -> None:
    from umem.integrations.lightning import LightningCallback

    logs = fit(tmp_path, every, LightningCallback(), accumulate).logs
    assert [step for step, _ in logs] == list(range(every - 1, STEPS, every))
    moments_mib = round(2 * 64 * 64 * 4 / 2**20, 3)
    for _, log in logs[2:]:  # the first steps make the state, and lay it out
        assert log["umem/optimizer_state_to_device_mib"] == moments_mib
        assert log["umem/to_host_mib"] >= moments_mib


def test_the_callback_is_of_the_package_that_the_program_has() -> None:
    from umem.integrations.lightning import LightningCallback

    assert issubclass(LightningCallback, lightning.pytorch.Callback)
    assert "pytorch_lightning" not in sys.modules
