"""Fine-tune a Llama under umem: LoRA or every weight (SFT), on bytes of real text.

The model is the real Llama architecture of `transformers`, built from a config with random
weights; the text is the source of Python's own standard library. Nothing is downloaded.

    python examples/finetune_llama.py --mode lora --policy lora
    python examples/finetune_llama.py --mode sft --policy sft --size small --budget 2GiB
    python examples/finetune_llama.py --mode sft --policy stock     # torch's own allocator

What umem needs is in `enable_umem`, and in `main` where the step goes in the backward pass; the
rest is a plain training script.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import sysconfig
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

__all__ = [
    "batches",
    "build_model",
    "build_optimizer",
    "main",
    "parse_arguments",
    "standard_library_text",
    "train_step",
]

BYTE_VALUES = 256
TEXT_LIMIT_BYTES = 8 << 20
NO_GPU_STATUS = 2


@dataclass(frozen=True)
class Size:
    """The dimensions of one Llama; `1b` is the shape of Llama-3.2-1B without its vocabulary."""

    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    intermediate: int
    batch: int
    seq: int


SIZES = {
    "tiny": Size(256, 4, 8, 4, 688, batch=8, seq=256),
    "small": Size(768, 12, 12, 4, 2048, batch=8, seq=512),
    "0.5b": Size(1536, 16, 24, 8, 5504, batch=4, seq=1024),
    "1b": Size(2048, 16, 32, 8, 8192, batch=4, seq=1024),
}

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; sizes left out come from `--size`."""
    parser = argparse.ArgumentParser(
        description="Fine-tune a Llama under umem, on the source of Python's standard library.",
        epilog="Without a GPU, see `umem demo`.",
    )
    parser.add_argument(
        "--mode", choices=("lora", "sft"), default="lora", help="what is trained (default: lora)"
    )
    parser.add_argument(
        "--policy",
        help="a preset's name, a policy file, or 'stock' for torch's own allocator "
        "(default: the preset of the mode's name)",
    )
    parser.add_argument(
        "--budget",
        help="device memory that umem may use, as '2GiB' or '50%%' "
        "(default: the policy's; for lora and sft what is free on the card, less a reserve)",
    )
    parser.add_argument(
        "--step-in-backward",
        action="store_true",
        help="update each layer's weights during the backward pass; the policy has to stream "
        "the optimizer's state, as lora and sft do",
    )
    model = parser.add_argument_group("model")
    model.add_argument("--size", choices=tuple(SIZES), default="tiny", help="default: tiny")
    model.add_argument("--hidden", type=int, metavar="N", help="hidden size, a multiple of --heads")
    model.add_argument("--layers", type=int, metavar="N")
    model.add_argument("--heads", type=int, metavar="N", help="attention heads")
    model.add_argument("--key-value-heads", type=int, metavar="N", help="a divisor of --heads")
    model.add_argument("--intermediate", type=int, metavar="N", help="width of the MLP")
    model.add_argument("--lora-rank", type=int, default=16, metavar="N")
    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=int, default=30, metavar="N", help="default: 30")
    training.add_argument("--batch", type=int, metavar="N", help="sequences per micro-batch")
    training.add_argument("--seq", type=int, metavar="N", help="bytes per sequence")
    training.add_argument("--learning-rate", type=float, help="default: 3e-3 (lora), 1e-3 (sft)")
    training.add_argument("--grad-accumulation", type=int, default=1, metavar="N")
    training.add_argument("--checkpointing", action="store_true", help="recompute activations")
    training.add_argument("--seed", type=int, default=0)
    training.add_argument(
        "--deterministic",
        action="store_true",
        help="torch's deterministic algorithms: the same seed gives the same bits",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    arguments = parser.parse_args(argv)

    for name, value in vars(SIZES[arguments.size]).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    if arguments.policy is None:
        arguments.policy = arguments.mode
    if arguments.learning_rate is None:
        arguments.learning_rate = 3e-3 if arguments.mode == "lora" else 1e-3
    if arguments.hidden % arguments.heads or arguments.heads % arguments.key_value_heads:
        parser.error("--hidden must be a multiple of --heads, and that of --key-value-heads")
    if arguments.policy == "stock" and arguments.budget:
        parser.error("--budget needs umem: leave out --policy stock")
    if arguments.policy == "stock" and arguments.step_in_backward:
        parser.error("--step-in-backward needs umem: leave out --policy stock")
    if arguments.grad_accumulation > 1 and arguments.step_in_backward:
        parser.error("--step-in-backward updates weights in each backward pass: do not accumulate")
    for name in ("steps", "batch", "grad_accumulation", "layers", "lora_rank"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more")
    if not 2 <= arguments.seq < TEXT_LIMIT_BYTES:
        parser.error(f"--seq must be 2 or more and below {TEXT_LIMIT_BYTES}")
    return arguments


def enable_umem(policy: str, budget: str | None) -> None:
    """Swap torch's allocator for umem; before anything touches CUDA."""
    import umem

    if budget is not None:
        os.environ["UMEM_DEVICE_BUDGET"] = budget  # overrides what the policy says
    umem.enable(policy)


def build_model(arguments: argparse.Namespace) -> nn.Module:
    """Build a Llama with random bfloat16 weights on the CPU; with adapters for `--mode lora`."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    # transformers renames what peft, and releases of its own since 4.56, still call.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    torch.manual_seed(arguments.seed)
    config = LlamaConfig(
        vocab_size=BYTE_VALUES,
        hidden_size=arguments.hidden,
        intermediate_size=arguments.intermediate,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.heads,
        num_key_value_heads=arguments.key_value_heads,
        max_position_embeddings=arguments.seq,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config,
        dtype=torch.bfloat16,
        # The fused kernels add up their backward pass in an order that varies.
        attn_implementation="eager" if arguments.deterministic else "sdpa",
    )
    if arguments.mode == "lora":
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(
            r=arguments.lora_rank,
            lora_alpha=2 * arguments.lora_rank,
            target_modules=list(LORA_TARGETS),
            task_type="CAUSAL_LM",
        )
        model = get_peft_model(model, adapters)
    if arguments.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trained: nn.Module = model.train()
    return trained


def build_optimizer(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """AdamW over what is trained."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=learning_rate, fused=True)


def standard_library_text(limit_bytes: int = TEXT_LIMIT_BYTES) -> torch.Tensor:
    """Read the first `limit_bytes` of the standard library's modules, in order of name; uint8."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit_bytes:
            break
    return torch.frombuffer(text[:limit_bytes], dtype=torch.uint8)


def batches(text: torch.Tensor, batch: int, seq: int, seed: int) -> Iterator[torch.Tensor]:
    """Endless (batch, seq) int64 windows of the text, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(seq)
    while True:
        starts = torch.randint(len(text) - seq, (batch, 1), generator=generator)
        yield text[starts + offsets].long()


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: Sequence[torch.Tensor]
) -> float:
    """One optimizer step over the micro-batches; their mean loss, in nats per byte."""
    total = 0.0
    for tokens in micro_batches:
        loss = model(input_ids=tokens, labels=tokens).loss / len(micro_batches)
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total


def parameter_bytes(model: nn.Module) -> dict[str, int]:
    """Count the bytes of the parameters that are trained, and of the frozen ones."""
    totals = {"trained": 0, "frozen": 0}
    for parameter in model.parameters():
        totals["trained" if parameter.requires_grad else "frozen"] += parameter.nbytes
    return totals


def parameters_sha256(model: nn.Module) -> str:
    """Digest every parameter's bits, to compare two runs by."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def memory_results(with_umem: bool) -> dict[str, object]:
    """Peaks of the run in bytes; under umem also what each class holds now and held at most."""
    results: dict[str, object] = {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
    }
    if with_umem:
        import umem

        results["by_class"] = {
            str(tensor_class): {
                "requested_bytes": memory.requested_bytes,
                "allocated_bytes": memory.allocated_bytes,
                "peak_allocated_bytes": memory.peak_allocated_bytes,
            }
            for tensor_class, memory in umem.memory_by_class().items()
        }
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the command line says; the exit status."""
    arguments = parse_arguments(argv)
    with_umem = arguments.policy != "stock"
    if not torch.cuda.is_available():
        print(
            "This example trains on an NVIDIA GPU, and torch finds none here.\n"
            "`umem demo` (or `make demo` in a checkout) shows umem without one; "
            "`umem doctor` says what is missing.",
            file=sys.stderr,
        )
        return NO_GPU_STATUS
    if with_umem:
        enable_umem(arguments.policy, arguments.budget)
    if arguments.deterministic:
        # cuBLAS reads this when its handle is made; without it torch refuses to be deterministic.
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)

    model = build_model(arguments).to("cuda")
    optimizer = build_optimizer(model, arguments.learning_rate)
    if arguments.step_in_backward:
        import umem

        umem.manage(model, optimizer, step_in_backward=True)
    source = batches(standard_library_text(), arguments.batch, arguments.seq, arguments.seed)
    sizes = parameter_bytes(model)
    print(
        f"Llama {arguments.size}, {arguments.mode} under {arguments.policy}: "
        f"{sizes['trained'] / 1e6:,.1f} MB trained, {sizes['frozen'] / 1e6:,.1f} MB frozen"
    )

    losses: list[float] = []
    seconds: list[float] = []
    step_tokens = arguments.grad_accumulation * arguments.batch * arguments.seq
    for step in range(1, arguments.steps + 1):
        micro_batches = [next(source).to("cuda") for _ in range(arguments.grad_accumulation)]
        start = time.perf_counter()
        losses.append(train_step(model, optimizer, micro_batches))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        print(
            f"step {step:>3}/{arguments.steps}  loss {losses[-1]:.4f}  "
            f"{step_tokens / seconds[-1]:>10,.0f} tokens/s",
            flush=True,
        )

    # The first steps load kernels and fill the allocator's cache.
    timed = sorted(seconds[3:] or seconds)
    step_s = timed[len(timed) // 2]
    memory = memory_results(with_umem)
    print(
        f"\nloss {losses[0]:.4f} -> {losses[-1]:.4f}, median {step_tokens / step_s:,.0f} tokens/s, "
        f"peak {torch.cuda.max_memory_reserved() / 1e6:,.1f} MB reserved"
    )
    if with_umem:
        import umem

        print(umem.memory_summary())
    if arguments.json:
        results = {
            "mode": arguments.mode,
            "policy": arguments.policy,
            "budget": arguments.budget,
            "seed": arguments.seed,
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            # Python writes a float's shortest exact form, so equal text means equal bits.
            "losses": losses,
            "parameters_sha256": parameters_sha256(model),
            "step_s": step_s,
            "tokens_per_s": step_tokens / step_s,
            "parameter_bytes": sizes,
            "trained_count": sum(parameter.requires_grad for parameter in model.parameters()),
            "memory": memory,
        }
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
