"""Reading prompts into caches and generating from them, step by step, in graphs, and for many runs at once."""
