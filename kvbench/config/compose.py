"""Compose the settings of a run from the files of conf/ and the overrides of a command line.

All code that reads conf/ composes here, so a file, a default and an override have the same meaning everywhere. Hydra
composes once for each choice, such as `method=snapkv` or `task=ruler`. Several choices are put together from these, and
other settings, such as `budget=0.1 method.window=16`, are merged into a copy, which is much faster.

`folders()` lists the folders of configuration files: conf/ itself, the folders of installed packages that have the
entry point `kvbench.conf`, and the folder that `--config-dir` names.
"""

import pickle
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, cast

import hydra
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from kvbench.config.paths import CONF, GROUPS
from kvbench.validation import SettingError, describe_choices, require_choice, summarize

LISTED_BY = "kvbench run --help"  # lists the names of every group
ENTRY_POINTS = "kvbench.conf"  # group of entry points; each names a package that contains method/, task/ …
_added: list[Path] = []  # folders that --config-dir names


@dataclass(frozen=True)
class Composition:
    """The result of composing conf/ with overrides."""

    config: DictConfig
    """The settings of a run: conf/config.yaml with its groups."""
    choices: Mapping[str, str | None]
    """Group -> name of the chosen file."""
    hydra: DictConfig
    """Settings of Hydra itself: `launcher`, `sweep.dir`."""

    @property
    def launcher(self) -> str:
        """How cells are launched: basic, local or slurm."""
        return str(self.choices["hydra/launcher"])

    @property
    def workers(self) -> int | str:
        """How many processes share the samples; "auto": one for each GPU."""
        default = "auto" if self.launcher == "local" else 1
        return default if self.config.workers is None else self.config.workers


def compose(overrides: Sequence[str] = ()) -> Composition:
    """Compose the settings that `overrides` describe.

    Args:
        overrides: Arguments of a command line, such as ``["method=snapkv", "budget=0.1"]``, each with one value.

    Raises:
        SettingError: The file of a group cannot be used.
        HydraException, OmegaConfBaseException: Hydra refuses an override. `kvbench.config.catalogue.error_message`
            turns the error into one line.
    """
    parsed = [parse_override(text) for text in overrides]
    for override in parsed:
        if is_group(override.key_or_group) and not isinstance(override.value(), str):  # a list, null or a number
            group = override.key_or_group
            require_choice(group, override.value(), list_choices(group), LISTED_BY)
    groups = tuple(text for text, override in zip(overrides, parsed, strict=True) if not _is_value(override))
    made: Composition = pickle.loads(_compose_groups(groups, tuple(map(str, folders()))))
    config = made.config
    try:
        for override in filter(_is_value, parsed):
            OmegaConf.update(config, override.key_or_group, override.value(), merge=True)
    except OmegaConfBaseException:
        _compose_groups(tuple(overrides), tuple(map(str, folders())))  # raises Hydra's error, which says more
        raise
    check_choices(config, made.choices)
    made.hydra._set_parent(config)  # the names of its folders refer to settings of the run
    return made


def compose_config(overrides: Sequence[str] = ()) -> DictConfig:
    """Compose the settings that `overrides` describe, and return them without the choices and Hydra's settings."""
    return compose(overrides).config


def to_dict(config: DictConfig, resolve: bool = False) -> dict[str, Any]:
    """Convert settings to a dictionary.

    Args:
        config: Settings whose keys are strings.
        resolve: Whether to replace interpolations, such as `${budget}`, with their values.
    """
    return cast(dict[str, Any], OmegaConf.to_container(config, resolve=resolve))


def open_base_args(config: DictConfig) -> None:
    """Let `method.base_args` and `codec.base_args` take any setting, such as `codec.base_args.bits=4`.

    A file lists none of them, because they are the base's, which `base` chooses. `kvbench.config.catalogue.complete`
    refuses those that it does not have. Where `base_args` refers to a preset, only the whole of it can be replaced.
    """
    for group in GROUPS:
        part = config[group]
        if (
            isinstance(part, DictConfig)
            and "base_args" in part
            and not OmegaConf.is_interpolation(part, "base_args")
            and isinstance(part.base_args, DictConfig)
        ):
            OmegaConf.set_struct(part.base_args, False)


def check_choices(config: DictConfig, choices: Mapping[str, str | None]) -> None:
    """Check the files that were chosen for the groups.

    Args:
        config: The settings that Hydra composed from the files.
        choices: Group -> name of the chosen file.

    Raises:
        SettingError: A file cannot be used.
    """
    for group in GROUPS:
        if (name := choices.get(group)) is not None:  # Hydra refuses null
            check_choice(group, name, config[group])


def check_choice(group: str, name: str, config: object) -> None:
    """Check that conf/<group>/<name>.yaml, read as `config`, names its class and has the name of its file.

    Raises:
        SettingError: The file cannot be used.
    """
    file = show_path(find_file(group, name))
    if not isinstance(config, DictConfig) or not config or "name" not in config:
        raise SettingError(f"{group}={name}: {file} has no settings; it needs at least name: {name}")
    if not isinstance(config.get("_target_"), str):
        raise SettingError(f"{group}={name}: {file} has no _target_, a class such as kvbench.methods.sink.Sink")
    if config.name != name:  # otherwise tables and records would show the results under another method's name
        raise SettingError(f"{group}.name={config.name}: must be {name}, as its file {file}")


@cache
def parse_override(text: str) -> Override:
    """Parse one argument of a command line."""
    [override] = OverridesParser.create().parse_overrides([text])
    return override


def expand_override(override: Override) -> list[str]:
    """Return one argument for each value of an override such as `budget=0.1,0.2` or `method=glob(*)`.

    Args:
        override: An override that `parse_override` returned. If it has a single value, the result is its own text.
    """
    text = override.input_line
    assert text is not None  # Hydra's parser sets it
    if not override.is_sweep_override():
        return [text]
    with _initialized():
        loader = GlobalHydra.instance().config_loader()
        [sweep] = OverridesParser.create(loader).parse_overrides([text])
        values = list(sweep.sweep_string_iterator())
    if is_group(override.key_or_group):
        values = [value for value in values if not value.startswith("_")]  # parts of other files
    return [f"{sweep.get_key_element()}={value}" for value in values]


def expand_cells(overrides: Sequence[str]) -> list[list[str]]:
    """Return the overrides of every cell of a sweep, in Hydra's order: the last override varies fastest."""
    return [list(cell) for cell in product(*(expand_override(parse_override(text)) for text in overrides))]


def is_group(name: str) -> bool:
    """Return whether `name=` chooses a file from a folder, as `method=` does."""
    return any((folder / name).is_dir() for folder in folders())


def folders() -> list[Path]:
    """Return the folders of configuration files: conf/, those of installed packages, those of `--config-dir`."""
    return [CONF, *_installed_folders(), *_added]


def add_folder(path: Path) -> None:
    """Add a folder of configuration files.

    From now on, Python can also import modules from the current folder, because classes that such files name usually
    are there.

    Raises:
        SettingError: The folder contains no files of a group.
    """
    path = path.expanduser().resolve()
    if not any(any(path.glob(f"{group.name}/*.yaml")) for group in CONF.iterdir() if group.is_dir()):
        raise SettingError(f"--config-dir={path}: a folder with method/<name>.yaml, task/<name>.yaml … in it")
    if path not in _added:
        _added.append(path)
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))


@cache
def _installed_folders() -> tuple[Path, ...]:
    paths: list[Path] = []
    for point in entry_points(group=ENTRY_POINTS):
        where = f"entry point {ENTRY_POINTS} {point.name}={point.value}"
        try:
            spec = find_spec(point.value)  # imports the packages that contain it
        except Exception as error:
            raise SettingError(f"{where}: cannot be imported ({type(error).__name__}: {summarize(error)})") from None
        if spec is None or not spec.submodule_search_locations:
            raise SettingError(f"{where}: no package of that name")
        paths += map(Path, spec.submodule_search_locations)
    return tuple(paths)


def find_file(group: str, name: str) -> Path:
    """Return the file that `group=name` chooses.

    Raises:
        SettingError: No folder contains such a file, or two do.
    """
    files = [path for folder in folders() if (path := folder / group / f"{name}.yaml").is_file()]
    if len(files) > 1:
        raise SettingError(f"{group}={name}: {' and '.join(map(str, files))} have the same name; rename one")
    if not files:
        raise SettingError(describe_unknown(group, name))
    return files[0]


def describe_unknown(group: str, name: str) -> str:
    """Return the message about a name that `group=` does not accept."""
    return f"{group}={name}: {describe_choices(name, list_choices(group), LISTED_BY)}"


def show_path(path: Path) -> str:
    """Return a file's path for messages: "conf/…" for a file of conf/, the full path for any other file."""
    return f"conf/{path.relative_to(CONF)}" if path.is_relative_to(CONF) else str(path)


def list_choices(group: str) -> list[str]:
    """Return the names that `group=` accepts: the YAML files of the group in all folders.

    Files whose names begin with `_` are left out, because they are parts of other files.
    """
    names = {path.stem for folder in folders() for path in (folder / group).glob("*.yaml")}
    return sorted(name for name in names if not name.startswith("_"))


def _is_value(override: Override) -> bool:
    """Return whether an override changes a single setting, rather than the choice of a file or Hydra's settings."""
    key = override.key_or_group
    plain = override.type is OverrideType.CHANGE and override.package is None and not override.is_sweep_override()
    return plain and key.split(".")[0].split("/")[0] != "hydra" and not is_group(key)


def _can_join(overrides: Sequence[str], searched: Sequence[str]) -> bool:
    """Return whether the composition of each override by itself gives that of all.

    It does for files of different groups of conf/. A file of another folder may choose files of several groups.
    """
    parsed = [parse_override(text) for text in overrides]
    chosen = {
        override.key_or_group
        for override in parsed
        if override.type is OverrideType.CHANGE and override.package is None
    }
    return len(searched) == 1 and 1 < len(parsed) == len(chosen & set(GROUPS))


@cache
def _compose_groups(overrides: tuple[str, ...], searched: tuple[str, ...]) -> bytes:
    """Compose the choices of files.

    Args:
        overrides: Arguments of a command line.
        searched: The folders of configuration files. They are an argument so that the cache distinguishes them.

    Returns:
        The pickled `Composition`. Unpickling copies it in less time than OmegaConf's deepcopy.
    """
    if _can_join(overrides, searched):
        made: Composition = pickle.loads(_compose_groups((), searched))
        for text in overrides:
            part, group = pickle.loads(_compose_groups((text,), searched)), parse_override(text).key_or_group
            made.config[group] = part.config[group]
            made = replace(made, choices={**made.choices, group: part.choices[group]})
        return pickle.dumps(made)
    more = [f"hydra.searchpath=[{','.join(f'file://{path}' for path in searched[1:])}]"] if searched[1:] else []
    with _initialized():
        config = hydra.compose("config", [*more, *overrides], return_hydra_config=True)
    choices = to_dict(config.hydra.runtime.choices)
    settings = to_dict(config.hydra)
    kept = OmegaConf.create({"launcher": settings["launcher"], "sweep": {"dir": settings["sweep"]["dir"]}})
    with open_dict(config):
        del config["hydra"]
    open_base_args(config)
    return pickle.dumps(Composition(config, choices, kept))


def _initialized() -> AbstractContextManager[object]:
    """Return a context in which Hydra reads conf/: the one of a running Hydra application, or a new one."""
    return (
        nullcontext()
        if GlobalHydra.instance().is_initialized()
        else initialize_config_dir(str(CONF), version_base="1.3")
    )
