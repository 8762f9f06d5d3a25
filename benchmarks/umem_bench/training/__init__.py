"""Training a Llama under a device budget: umem's planners beside other ways to save memory."""
