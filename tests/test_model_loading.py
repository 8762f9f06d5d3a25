"""Loaders of other libraries under a budget."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
from umem.runtime.model_loading import skip_warmup
assert not skip_warmup()
import transformers.modeling_utils as its
before = its.caching_allocator_warmup
assert skip_warmup()
assert its.caching_allocator_warmup is not before
from transformers import LlamaConfig, LlamaForCausalLM
import tempfile
config = LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=2,
                     num_attention_heads=2, vocab_size=64)
with tempfile.TemporaryDirectory() as folder:
    LlamaForCausalLM(config).save_pretrained(folder)
    LlamaForCausalLM.from_pretrained(folder, device_map="cpu")
print("loaded")
"""


@pytest.mark.slow
def test_transformers_loads_without_its_warmup() -> None:
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "loaded"
