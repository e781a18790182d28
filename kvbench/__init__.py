"""kvbench: what a KV-cache method costs and what it loses, on the same prompts, at the same measured memory."""

from kvbench.config.paths import IS_CHECKOUT, ROOT

if IS_CHECKOUT:  # kernels/, methods/ and tasks/ stand beside this package there, and are imported as kvbench.kernels, …
    __path__.append(str(ROOT))


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
