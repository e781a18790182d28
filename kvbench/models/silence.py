"""Keep transformers from printing."""

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

from transformers.utils import logging


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Let transformers print no progress bar and no warning inside the `with` block."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):  # its bar over a GGUF file's tensors cannot be switched off
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
