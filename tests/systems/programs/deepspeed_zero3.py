"""Full fine-tuning with DeepSpeed's ZeRO, third stage: parameters come and go, too."""

from __future__ import annotations

import deepspeed
from deepspeed_zero2 import configuration, train
from shared import Program
from transformers import LlamaForCausalLM

program = Program("transformers", "deepspeed")
deepspeed.init_distributed()
with deepspeed.zero.Init(config_dict_or_path=configuration(program, stage=3)):
    model = LlamaForCausalLM(program.config(use_cache=False))
train(program, program.trainable(model), stage=3)
