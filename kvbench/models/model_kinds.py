"""The kinds of models that a file of conf/model/ can name with `_target_`.

A kind takes the settings of the group `model`. `check` refuses wrong ones before torch is imported; `checkpoint` gives
the model, whose weights are not loaded yet. A kind of one's own is a class with these two methods.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.config.catalogue import list_shapes
from kvbench.models.local_models import check_fetched
from kvbench.models.low_rank import FactorsFile, read_factors_file
from kvbench.models.tuned_models import TUNED_MODELS, find_factors, find_tuned
from kvbench.validation import SettingError, check_model_path, is_gguf, require_choice, require_int


@dataclass(frozen=True)
class ModelKind:
    """A model as conf/model/<name>.yaml and its overrides describe it."""

    settings: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The file's name, which tables show."""
        return self.settings["name"]

    @property
    def weights(self) -> str | None:
        """The format of the linear layers' weights, "int4" or None. Older records have no such setting."""
        return self.settings.get("weights")

    def check(self) -> None:
        """Check the settings without torch.

        Raises:
            SettingError: One of them cannot be used.
        """
        raise NotImplementedError

    def checkpoint(self, seed: int) -> Any:
        """The `kvbench.models.checkpoint.Checkpoint`. `seed`: of random weights."""
        raise NotImplementedError

    def _refuse_overrides(self) -> None:
        """Refuse the settings that are for checkpoints of others."""
        if self.settings["device_map"] is not None:
            given = self.settings["device_map"]
            raise SettingError(f"model.device_map={given}: model={self.name} fits one GPU; null")
        if (given := self.settings.get("longest")) is not None:
            raise SettingError(f"model.longest={given}: the length of model={self.name} is known; null")


@dataclass(frozen=True)
class EmbeddedModel(ModelKind):
    """A version of the embedded model, whose weights are part of kvbench."""

    def check(self) -> None:
        self._refuse_overrides()
        for setting in ("path", "revision"):
            if (given := self.settings[setting]) is not None:
                raise SettingError(f"model.{setting}={given}: model={self.name} has its own; add model=hf")

    def checkpoint(self, seed: int) -> Any:
        from kvbench.models.checkpoint import Checkpoint, find_model

        return Checkpoint(self.name, find_model(self.name))


@dataclass(frozen=True)
class FetchedModel(EmbeddedModel):
    """A model that `kvbench model` downloads and converts once."""

    def check(self) -> None:
        super().check()
        check_fetched(self.name)

    def checkpoint(self, seed: int) -> Any:
        from kvbench.models.checkpoint import Checkpoint, add_format, find_model

        return Checkpoint(add_format(self.name, self.weights), find_model(self.name), weights_format=self.weights)


@dataclass(frozen=True)
class TunedModel(EmbeddedModel):
    """A downloaded model with low-rank factors, which are merged once (`kvbench.models.tuned_models`)."""

    def check(self) -> None:
        super().check()
        self._factors_file.check_base(TUNED_MODELS[self.name])

    def checkpoint(self, seed: int) -> Any:
        from kvbench.models.checkpoint import Checkpoint, add_format

        folder = find_tuned(TUNED_MODELS[self.name], self._factors_file.path)
        return Checkpoint(add_format(self.name, self.weights), str(folder), weights_format=self.weights)

    @property
    def _factors_file(self) -> FactorsFile:
        """The file of `model.factors`, or the one that kvbench holds."""
        given = self.settings.get("factors")
        path = find_factors(self.name) if given is None else Path(str(given)).expanduser()
        return read_factors_file(path, "model.factors")


@dataclass(frozen=True)
class HuggingFaceModel(ModelKind):
    """A local folder, a GGUF file or an id of Hugging Face's hub."""

    def check(self) -> None:
        path, revision = self.settings["path"], self.settings["revision"]
        if path is None:
            raise SettingError(f"model.path=null: model={self.name} needs a local folder or a hub id")
        check_model_path(str(path))
        if (longest := self.settings.get("longest")) is not None:  # older records have no such setting
            require_int("model.longest", longest, 1)
        if is_gguf(str(path)) and revision is not None:
            raise SettingError(f"model.revision={revision}: is of the hub, a GGUF file has none; null")

    def checkpoint(self, seed: int) -> Any:
        from kvbench.models.checkpoint import Checkpoint, add_format, find_model

        path, settings = str(self.settings["path"]), self.settings
        return Checkpoint(
            add_format(self.name if self.name != "hf" else name_checkpoint(path), self.weights),
            find_model(path),
            settings["revision"],
            settings["device_map"],
            settings.get("longest"),
            self.weights,
        )


@dataclass(frozen=True)
class RandomModel(ModelKind):
    """Random weights in the shape of a model."""

    def check(self) -> None:
        self._refuse_overrides()
        require_choice("model.like", self.settings["like"], list_shapes())
        require_choice("model.tokenizer", self.settings["tokenizer"], (None, "reference"))

    def checkpoint(self, seed: int) -> Any:
        from kvbench.models.random_weights import RandomCheckpoint

        return RandomCheckpoint.like(self.settings["like"], seed, self.settings["tokenizer"], self.weights)


def name_checkpoint(path: str) -> str:
    """Name a checkpoint by its folder or GGUF file, or by the last part of its hub id. A folder of the hub's cache,
    which is named by a commit (models--<owner>--<name>/snapshots/<commit>), gets its repository's name.
    """
    folder = Path(path).expanduser()
    if not folder.exists():
        return path.rstrip("/").split("/")[-1]
    *_, repository, parent, last = ("", "", *Path(os.path.abspath(folder)).parts)
    cached = parent == "snapshots" and repository.startswith("models--")
    return repository.split("--")[-1] if cached else last.removesuffix(".gguf")
