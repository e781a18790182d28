"""Where runs are logged beside the store: conf/logger/. Nothing is imported where nothing is."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig


def make_logger(config: DictConfig) -> Any:
    """The logger that a configuration chooses, checked, or None; SettingError for settings it cannot use."""
    if config.logger.name == "none":
        return None
    from kvbench.integrations.wandb_logger import WandbLogger

    return WandbLogger.of(config.logger, Path(config.results))
