"""kvbench: what a KV-cache method costs and what it loses, on the same prompts, at the same measured memory."""

from pathlib import Path

# kernels/, methods/ and tasks/ stand beside this package and are imported as kvbench.kernels…: a root package
# called `kernels` would shadow the distribution of that name which transformers imports.
__path__.append(str(Path(__file__).resolve().parent.parent))


def __getattr__(name: str) -> object:
    """`prefill`, `methods_available` and `load`; nothing is imported before it is asked for."""
    if name == "prefill":
        from kvbench.engine.compressed_cache import prefill

        return prefill
    if name == "methods_available":
        from kvbench.config.catalogue import methods_available

        return methods_available
    if name == "load":
        from kvbench.store.dataframes import load

        return load
    raise AttributeError(f"module 'kvbench' has no attribute {name!r}")
