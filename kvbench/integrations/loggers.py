"""Choose where runs are logged beside the store: a file of conf/logger/ and the class that its `_target_` names.

A logger's class has `of(settings, results)`, which checks the settings and returns a `Logger`. A class is imported only
when its file is chosen.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from omegaconf import DictConfig

from kvbench.config.catalogue import load_class


class Logger(Protocol):
    """Logs runs that are in the store."""

    def finished(self, runs: Sequence[Any]) -> None:
        """Log finished runs, objects with a `value`."""

    def failed(self, runs: Sequence[Any], error: BaseException) -> None:
        """Log that the first unfinished one of the runs stopped with `error`."""


class NoLogger:
    """Log nowhere."""

    @classmethod
    def of(cls, settings: Mapping[str, Any], results: Path) -> None:
        """There is no logger."""


def make_logger(config: DictConfig) -> Logger | None:
    """Return the logger that a configuration chooses, None for `logger=none`.

    Raises:
        SettingError: The logger cannot use its settings.
    """
    kind = load_class(f"logger={config.logger.name}", config.logger._target_)
    logger: Logger | None = kind.of(config.logger, Path(config.results))
    return logger
