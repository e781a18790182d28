"""A run: its specification, its prompts, its answers, alone or with others that share a prefill."""
