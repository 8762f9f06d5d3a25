"""What umem copies is in the Trainer's logs, and its reporters see it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lazy_lanes import HostStateMemory

from umem.streaming import StreamedTraining
from umem.streaming.stage import HostLanes

transformers: Any = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

STEPS = 5


class Reporter(transformers.TrainerCallback):  # type: ignore[misc, unused-ignore]
    """What TensorBoard or Weights & Biases would show."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs.append(dict(logs))


@pytest.fixture
def trainer(tmp_path: Path) -> Any:
    """A Trainer of a small model, with a reporter."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.randint(64, (16, 8))
    return transformers.Trainer(
        model,
        transformers.TrainingArguments(
            str(tmp_path),
            max_steps=STEPS,
            per_device_train_batch_size=2,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": it, "labels": it} for it in tokens],
        optimizers=(torch.optim.AdamW(model.parameters()), None),
        callbacks=[Reporter()],
    )


def reported(trainer: Any) -> list[dict[str, Any]]:
    """The logs of the steps that its reporter has seen."""
    every = trainer.callback_handler.callbacks
    (reporter,) = (it for it in every if isinstance(it, Reporter))
    return [it for it in reporter.logs if "loss" in it]


def test_reporters_see_what_each_step_copies(trainer: Any) -> None:
    from umem import UmemCallback

    UmemCallback.add_to(trainer)
    memory = HostStateMemory(min_bytes=1024)
    training = StreamedTraining(trainer.model, trainer.optimizer, HostLanes(), memory)
    trainer.train()
    large = [it.nbytes for it in trainer.model.parameters() if it.nbytes >= 1024]
    logs = reported(trainer)
    assert len(logs) == STEPS
    for log in logs[2:]:  # the first steps make the state, and lay it out
        assert log["umem/optimizer_state_to_device_mib"] == round(2 * sum(large) / 2**20, 3)
        assert log["umem/optimizer_state_to_host_mib"] == log["umem/optimizer_state_to_device_mib"]
        assert log["umem/to_device_mib"] >= log["umem/optimizer_state_to_device_mib"]
        assert "umem/device_mib" not in log  # the allocator is torch's
    kept = [it for it in trainer.state.log_history if "loss" in it]
    assert [it["umem/to_device_mib"] for it in kept] == [it["umem/to_device_mib"] for it in logs]
    training.close()


def test_without_umem_nothing_is_copied(trainer: Any) -> None:
    from umem import UmemCallback

    trainer.add_callback(UmemCallback())
    trainer.train()
    assert all("umem/to_device_mib" not in it for it in reported(trainer))
    kept = [it for it in trainer.state.log_history if "loss" in it]
    assert [it["umem/to_device_mib"] for it in kept] == [0.0] * STEPS
