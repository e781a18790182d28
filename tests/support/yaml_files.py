"""Read each text of conf/ and of Hydra's own files once in a process: every composition reads most of them anew."""

import pickle
from functools import cache
from io import StringIO
from typing import Any

from omegaconf import OmegaConf
from yaml import YAMLError


@cache  # once in a process
def parse_texts_once() -> None:
    """Let `OmegaConf.load` give a copy of what it made of the same text before."""
    load = OmegaConf.load

    @cache
    def pack(text: str) -> bytes:
        return pickle.dumps(load(StringIO(text)))

    def load_once(file: Any) -> Any:
        if not hasattr(file, "read"):
            return load(file)
        text = file.read()
        try:
            return pickle.loads(pack(text))
        except YAMLError:
            file.seek(0)
            return load(file)  # whose error names the file

    OmegaConf.load = staticmethod(load_once)
