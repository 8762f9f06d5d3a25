"""Full fine-tuning of models whose training does not fit one card."""
