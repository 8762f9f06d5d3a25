"""From the start of a process to a model's first token, its weights read from files."""
