"""Choose where runs are logged beside the store: a file of conf/logger/ and the class that its `_target_` names.

A logger's class has `of(settings, results)`, which checks the settings and returns the logger; `finished(runs)` and
`failed(runs, error)` log runs that are in the store. A class is imported only when its file is chosen.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from kvbench.config.catalogue import load_class


class NoLogger:
    """Log nowhere."""

    @classmethod
    def of(cls, settings: Mapping[str, Any], results: Path) -> None:
        """There is no logger."""


def make_logger(config: DictConfig) -> Any:
    """Return the logger that a configuration chooses, None for `logger=none`.

    Raises:
        SettingError: The logger cannot use its settings.
    """
    kind = load_class(f"logger={config.logger.name}", config.logger._target_)
    return kind.of(config.logger, Path(config.results))
