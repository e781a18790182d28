"""Where runs are logged beside the store: conf/logger/. Nothing is imported where nothing is."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig


def logger_of(config: DictConfig) -> Any:
    """The logger that a configuration chooses, checked, or None; SettingError for settings it cannot use."""
    if config.logger.name == "none":
        return None
    from kvbench.integrations.wandb_logger import Log

    return Log.of(config.logger, Path(config.results))
