"""TRL itself, on the CPU: its trainer for supervised fine-tuning, of all weights or of adapters."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from found_trainings import Streams, streaming
from streamed_programs import bits

transformers: Any = pytest.importorskip("transformers")
datasets: Any = pytest.importorskip("datasets")
peft: Any = pytest.importorskip("peft")
trl: Any = pytest.importorskip("trl")

pytestmark = pytest.mark.slow

STEPS, TOKENS, VOCABULARY = 6, 16, 64


def tokenizer() -> Any:
    """Of words that are numbers."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {f"w{number}": number for number in range(VOCABULARY)}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), eos_token="w0", pad_token="w0"
    )


def rows(count: int, seed: int) -> Any:
    tokens = torch.randint(1, VOCABULARY, (count, TOKENS), generator=torch.manual_seed(seed))
    return datasets.Dataset.from_list([{"input_ids": row} for row in tokens.tolist()])


def train(folder: Path, *, adapts: bool, **options: Any) -> Any:
    """Train, then go on from the checkpoint in the middle. Returns what can be compared."""
    found: list[Any] = []
    for checkpoint in (None, str(folder / f"checkpoint-{STEPS // 2}")):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=3,
            num_attention_heads=2,
            max_position_embeddings=TOKENS,
        )
        adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = trl.SFTTrainer(
                transformers.LlamaForCausalLM(config),
                trl.SFTConfig(
                    output_dir=str(folder),
                    max_steps=STEPS,
                    max_length=TOKENS,
                    per_device_train_batch_size=2,
                    learning_rate=1e-2,
                    logging_steps=1,
                    eval_strategy="steps",
                    eval_steps=2,
                    save_steps=STEPS // 2,
                    report_to="none",
                    use_cpu=True,
                    disable_tqdm=True,
                    **{"bf16": False, **options},
                ),
                train_dataset=rows(20, 1),
                eval_dataset=rows(4, 2),
                processing_class=tokenizer(),
                peft_config=adapters if adapts else None,
            )
            trainer.remove_callback(transformers.PrinterCallback)
            trainer.train(resume_from_checkpoint=checkpoint)
        timed = ("runtime", "per_second")
        logs = [
            {name: it for name, it in log.items() if not name.endswith(timed)}
            for log in trainer.state.log_history
        ]
        assert sum("loss" in it for it in logs) == STEPS
        state = trainer.optimizer.state_dict()["state"]
        found.append([logs, dict(trainer.model.state_dict()), state])
    return bits(found)


@pytest.mark.parametrize("adapts", [False, True], ids=["sft", "lora"])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"gradient_accumulation_steps": 2, "packing": True}, id="packed"),
        pytest.param({"bf16": True, "gradient_checkpointing": False}, id="autocast"),
    ],
)
def test_sft_is_exact(
    adapts: bool, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train(tmp_path / "stock", adapts=adapts, **options)
    for more_bytes in (-1, 10_000):
        streams = Streams(more_bytes)
        with streaming(streams, monkeypatch):
            assert train(tmp_path / str(more_bytes), adapts=adapts, **options) == expected
        assert len(streams.trainings) == 2
        assert all(it.counts.streamed > 1 for it in streams.trainings)
