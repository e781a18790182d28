"""kvbench measures the cost and the loss of KV-cache methods, on the same prompts and at the same measured memory.

    prefill(model, input_ids, method="snapkv", budget=0.1)   read a prompt and compress its KV cache
    load_cache("held.safetensors", model)                    the cache that `held.save("held.safetensors")` wrote
    load("results", method="snapkv")                         runs and records as pandas data frames
    methods_available()                                      names that prefill and `kvbench run` take
    KVBenchLM(model, method="snapkv", budget=0.1)            a model for lm-eval with a compressed cache

    Method, Allocator, Codec, Task                           interfaces, for a method, … of one's own
    SettingError                                             a setting cannot be used; the message says which
    ContractError                                            a method, … broke its interface
    __version__                                              the version of kvbench

A name is imported when it is first asked for. `kvbench --help` lists the commands.
"""

from importlib import import_module

from kvbench.config.paths import IS_CHECKOUT, ROOT

if IS_CHECKOUT:  # kernels/, methods/ and tasks/ stand beside this package there, and are imported as kvbench.kernels, …
    __path__.append(str(ROOT))

ORIGINS = {  # public name -> the module that defines it
    "prefill": "kvbench.engine.compressed_cache",
    "load_cache": "kvbench.engine.compressed_cache",
    "load": "kvbench.store.dataframes",
    "methods_available": "kvbench.config.catalogue",
    "KVBenchLM": "kvbench.integrations.lm_eval_model",
    "SettingError": "kvbench.validation",
    "ContractError": "kvbench.validation",
    "Method": "kvbench.interfaces.method",
    "Allocator": "kvbench.interfaces.allocator",
    "Codec": "kvbench.interfaces.codec",
    "Task": "kvbench.interfaces.task",
}
__all__ = ["__version__", *ORIGINS]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for."""
    if name == "__version__":
        from kvbench.config.provenance import find_version

        return find_version()
    if name in ORIGINS:
        return getattr(import_module(ORIGINS[name]), name)
    raise AttributeError(f"module 'kvbench' has no attribute {name!r}")
