"""Full fine-tuning, and LoRA, of models whose training does not fit one card."""
