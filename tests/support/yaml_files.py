"""Read each text of conf/ and of Hydra's own files once in a process: every composition reads most of them anew."""

import pickle
from functools import cache
from io import StringIO
from typing import Any

from omegaconf import OmegaConf


@cache  # once in a process
def parse_texts_once() -> None:
    """Let `OmegaConf.load` give a copy of what it made of the same text before."""
    load = OmegaConf.load

    @cache
    def pack(text: str) -> bytes:
        return pickle.dumps(load(StringIO(text)))

    def load_once(file: Any) -> Any:
        return pickle.loads(pack(file.read())) if hasattr(file, "read") else load(file)

    OmegaConf.load = staticmethod(load_once)
