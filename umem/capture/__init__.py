"""From a training step to a trace: offline under fake tensors, or live from a running training."""
