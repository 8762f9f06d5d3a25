"""Train with umem and generate with another engine, in turns on one card, as RL loops do.

    UMEM_DEVICE_BUDGET=2GiB python examples/train_and_generate.py            # umem.pause()
    UMEM_DEVICE_BUDGET=2GiB python examples/train_and_generate.py --way move # moves by hand
    python examples/train_and_generate.py --way stock                        # torch's own allocator

The engine is a process of its own, as vLLM is with `enable_sleep_mode=True`: it wakes up with the
weights that it is given, answers prompts and goes to sleep. Meanwhile the training has nothing on
the card. A short answer's reward is its share of small letters. Weights have the same bits each
way. Without a GPU the same loop runs on the CPU, where nothing is to be handed over.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import umem

__all__ = ["build_model", "digest_of", "main"]

BYTE_VALUES = 256
PROMPTS, PROMPT_LENGTH, ANSWER_LENGTH = 8, 8, 24


def build_model(hidden: int, layers: int) -> Any:
    """Build a Llama with random weights on the CPU."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=BYTE_VALUES,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        bos_token_id=None,
        eos_token_id=None,
    )
    # The fused kernels add up their backward pass in an order that varies.
    return AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, attn_implementation="eager"
    )


def serve(requests: Any, size: tuple[int, int], device: str) -> None:
    """Generate for whoever has the other end of the pipe: on the card only while it is asked."""
    model = build_model(*size).eval()
    while (request := requests.recv()) is not None:
        weights, prompts, seed = request
        model.load_state_dict({name: torch.from_numpy(it) for name, it in weights.items()})
        model.to(device)
        torch.manual_seed(seed)
        answers = model.generate(
            torch.from_numpy(prompts).to(device),
            do_sample=True,
            min_new_tokens=ANSWER_LENGTH,
            max_new_tokens=ANSWER_LENGTH,
            pad_token_id=0,
        ).cpu()
        model.to("cpu")
        if device == "cuda":
            torch.cuda.empty_cache()
        requests.send(answers.numpy())


def move(model: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> None:
    """Move all of a training, but for its counts of steps."""
    model.to(device)
    for values in optimizer.state.values():
        for name, value in values.items():
            if value.numel() > 1:
                values[name] = value.to(device)


@contextmanager
def card_given_away(
    way: str, model: nn.Module, optimizer: torch.optim.Optimizer, device: str
) -> Iterator[int]:
    """Have nothing of the training on the card for a ``with`` block; the bytes that stay there."""
    if way == "pause" and device == "cuda":
        with umem.paused() as memory:
            yield memory.kept_bytes
        return
    move(model, optimizer, "cpu")
    if device == "cuda":
        torch.cuda.empty_cache()  # umem's buffers go with it
    yield torch.cuda.memory_reserved() if device == "cuda" else 0
    move(model, optimizer, device)


def train_step(model: Any, optimizer: torch.optim.Optimizer, answers: torch.Tensor) -> float:
    """Make answers of more than the mean reward likelier, and others less; the mean reward."""
    made = answers[:, PROMPT_LENGTH:]
    rewards = ((made >= ord("a")) & (made <= ord("z"))).float().mean(1)
    logits = model(answers[:, :-1]).logits[:, PROMPT_LENGTH - 1 :]
    chosen = logits.log_softmax(-1).gather(-1, made[..., None]).squeeze(-1).mean(1)
    optimizer.zero_grad()
    (-(rewards - rewards.mean()) * chosen).mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(rewards.mean())


def digest_of(model: nn.Module) -> str:
    """Digest the bits of all weights."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def main(argv: Sequence[str] | None = None) -> str:
    """Run the loop; returns a digest of the weights at its end."""
    parser = argparse.ArgumentParser(description="Train and generate in turns on one card.")
    parser.add_argument("--way", choices=("pause", "move", "stock"), default="pause")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=1024, help="a multiple of 64")
    parser.add_argument("--layers", type=int, default=12)
    arguments = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        if arguments.way != "stock":
            umem.enable("sft")
    size = arguments.hidden, arguments.layers
    requests, other_end = multiprocessing.Pipe()
    spawned = multiprocessing.get_context("spawn")
    engine = spawned.Process(target=serve, args=(other_end, size, device), daemon=True)
    engine.start()
    model = build_model(*size).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for step in range(arguments.steps):
        prompts = torch.randint(BYTE_VALUES, (PROMPTS, PROMPT_LENGTH)).numpy()
        # Before they go. As arrays they take no shared memory, of which a container has little.
        weights = {name: it.cpu().numpy() for name, it in model.state_dict().items()}
        with card_given_away(arguments.way, model, optimizer, device) as held_bytes:
            requests.send((weights, prompts, step))
            answers = torch.from_numpy(requests.recv())
        reward = train_step(model, optimizer, answers.to(device))
        held = f"{held_bytes >> 20} MiB held while the engine had the card"
        print(f"step {step}: mean reward {reward:.3f}, {held}")
    requests.send(None)
    engine.join()
    digest = digest_of(model)
    print(f"weights {digest[:16]}")
    return digest


if __name__ == "__main__":
    main()
