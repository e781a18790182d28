"""The engine: read prompts into caches and generate from them, by modules, in CUDA graphs, or for many runs at once."""
