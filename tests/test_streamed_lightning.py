"""Lightning itself, on the CPU: it steps with a closure, in which forward and backward pass run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from found_trainings import Streams, streaming
from streamed_programs import WIDTH, Net, bits
from torch import nn

lightning: Any = pytest.importorskip("lightning")

pytestmark = pytest.mark.slow

STEPS, ROWS = 8, 4


class Decoder(lightning.LightningModule):  # type: ignore[misc, unused-ignore]
    """Trained with automatic optimization.

    Parameters
    ----------
    adapts
        Train adapters of PEFT alone, beside frozen layers.
    """

    def __init__(self, *, adapts: bool = False) -> None:
        super().__init__()
        self.net: nn.Module = Net()
        if adapts:
            peft: Any = pytest.importorskip("peft")
            config = peft.LoraConfig(r=4, target_modules=r"layers\.\d", init_lora_weights=False)
            self.net.requires_grad_(False)
            peft.inject_adapter_in_model(config, self.net)
        self.seen: list[torch.Tensor] = []

    def training_step(self, batch: torch.Tensor, _number: int) -> torch.Tensor:
        loss = self.net(batch).square().mean()
        self.seen.append(loss.detach().clone())
        return loss

    def validation_step(self, batch: torch.Tensor, _number: int) -> None:
        self.seen.append(self.net(batch).square().mean())

    def configure_optimizers(self) -> Any:
        trained = [it for it in self.parameters() if it.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-2)


class Manual(Decoder):
    """Steps by itself, behind every second batch."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        optimizer = self.optimizers()
        loss = super().training_step(batch, number)
        self.manual_backward(loss / 2)
        if number % 2:
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            optimizer.zero_grad()
        return loss


def batches(count: int) -> Any:
    rows = torch.randn(ROWS * count, WIDTH, generator=torch.Generator().manual_seed(count))
    return torch.utils.data.DataLoader(rows, ROWS)  # type: ignore[arg-type]


def train(
    folder: Path, make_decoder: type[Decoder] = Decoder, *, adapts: bool = False, **options: Any
) -> Any:
    """Train, then begin anew from the checkpoint in the middle. Returns what can be compared."""
    found: list[Any] = []
    for checkpoint in (None, folder / f"step={STEPS // 2}.ckpt"):
        torch.manual_seed(0)
        decoder = make_decoder(adapts=adapts)
        saves = lightning.pytorch.callbacks.ModelCheckpoint(
            folder, "{step}", every_n_train_steps=STEPS // 2, save_top_k=-1
        )
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=STEPS,
            val_check_interval=3,
            limit_val_batches=1,
            num_sanity_val_steps=0,
            logger=False,
            callbacks=[saves] if checkpoint is None else [],
            enable_checkpointing=checkpoint is None,
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )
        path = None if checkpoint is None else str(checkpoint)
        trainer.fit(decoder, batches(20), batches(2), ckpt_path=path)
        state = trainer.optimizers[0].state_dict()
        found.append([decoder.seen, dict(decoder.state_dict()), state])
    return bits(found)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"gradient_clip_val": 0.5}, id="clipped"),
        pytest.param({"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}, id="accumulated"),
        pytest.param({"make_decoder": Manual}, id="manual"),
    ],
)
def test_a_lightning_training_is_exact(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train(tmp_path / "stock", **options)
    for more_bytes in (-1, 10_000):
        streams = Streams(more_bytes)
        with streaming(streams, monkeypatch):
            assert train(tmp_path / str(more_bytes), **options) == expected
        assert len(streams.trainings) == 2
        for training in streams.trainings:
            assert training.counts.streamed > 1
            assert training.counts.in_line == 0


@pytest.mark.parametrize("adapts", [False, True], ids=["sft", "lora"])
def test_the_keys_of_nemo(adapts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its `peft_scheme` and `precision=bf16-mixed`, by Lightning."""
    options: dict[str, Any] = {"precision": "bf16-mixed", "gradient_clip_val": 0.5}
    expected = train(tmp_path / "stock", adapts=adapts, **options)
    for more_bytes in (-1, 10_000):
        streams = Streams(more_bytes)
        folder = tmp_path / str(more_bytes)
        with streaming(streams, monkeypatch):
            found = train(folder, adapts=adapts, **options)
        assert found == expected
        assert all(it.counts.streamed > 1 for it in streams.trainings)
