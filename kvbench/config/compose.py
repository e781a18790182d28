"""Compose the settings of a run from the files of conf/ and the overrides of a command line.

Everything that reads conf/ composes here, so that a file, a default and an override mean the same to all of it. Hydra
composes once for each choice of groups, such as `method=snapkv task=ruler`. Settings inside the groups, such as
`budget=0.1 method.window=16`, are merged into a copy of that, which takes a twentieth of the time.

`folders()` lists the folders of configuration files: conf/ itself, those that installed packages name by the entry
point `kvbench.conf`, and the one that `--config-dir` names.
"""

import copy
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import hydra
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from kvbench.config.paths import CONF, GROUPS
from kvbench.validation import SettingError

ENTRY_POINTS = "kvbench.conf"  # a package's entry point: the name of a package that holds method/, task/ …
_added: list[Path] = []  # by --config-dir


@dataclass(frozen=True)
class Composition:
    """What Hydra made of the overrides."""

    config: DictConfig
    """The settings of a run: conf/config.yaml with its groups."""
    choices: Mapping[str, str | None]
    """Group -> the file that was chosen of it."""
    hydra: DictConfig
    """Hydra's own settings: `launcher`, `sweep.dir`."""

    @property
    def launcher(self) -> str:
        """How cells are launched: basic, local or slurm."""
        return str(self.choices["hydra/launcher"])


def compose(overrides: Sequence[str] = ()) -> Composition:
    """Compose the settings that `overrides` ask for.

    Args:
        overrides: What stands on a command line, such as ``["method=snapkv", "budget=0.1"]``, one value each.

    Raises:
        SettingError: A group's file cannot be used.
        HydraException, OmegaConfBaseException: As Hydra raises them; `kvbench.config.catalogue.error_message` says them
            in one line.
    """
    parsed = [parse_override(text) for text in overrides]
    values = [own for own in parsed if _is_value(own)]
    base = _compose_groups(tuple(own.input_line for own in parsed if not _is_value(own)), tuple(map(str, folders())))
    config = copy.deepcopy(base.config)
    try:
        for own in values:
            OmegaConf.update(config, own.key_or_group, own.value(), merge=True)
    except OmegaConfBaseException:
        _compose_groups(tuple(overrides), tuple(map(str, folders())))  # raises as Hydra does
        raise
    check_choices(config, base.choices)
    hydra_settings = copy.deepcopy(base.hydra)
    hydra_settings._set_parent(config)  # its folders are named by settings of the run
    return Composition(config, base.choices, hydra_settings)


def compose_config(overrides: Sequence[str] = ()) -> DictConfig:
    """The settings alone."""
    return compose(overrides).config


def check_choices(config: DictConfig, choices: Mapping[str, str | None]) -> None:
    """Raise a SettingError unless the group files that Hydra composed `config` of (group -> name) can be used."""
    for group in GROUPS:
        if (name := choices.get(group)) is not None:  # Hydra refuses null
            check_choice(group, name, config[group])


def check_choice(group: str, name: str, config: object) -> None:
    """Raise a SettingError unless conf/<group>/<name>.yaml, read as `config`, has a class and the name of its file."""
    file = show_path(find_file(group, name))
    if not isinstance(config, DictConfig) or not config or "name" not in config:
        raise SettingError(f"{group}={name}: {file} has no settings; name: {name} is one that it needs")
    if not isinstance(config.get("_target_"), str):
        raise SettingError(f"{group}={name}: {file} has no _target_, a class such as kvbench.methods.sink.Sink")
    if config.name != name:  # tables and records would show another one's results under this name
        raise SettingError(f"{group}.name={config.name}: must be {name}, as its file {file}")


@cache
def parse_override(text: str) -> Override:
    """What one argument of a command line says."""
    [own] = OverridesParser.create().parse_overrides([text])
    return own


def expand_override(override: Override) -> list[str]:
    """An argument for every value of `budget=0.1,0.2`, `method=glob(*)` …; the argument itself where it has one."""
    if not override.is_sweep_override():
        return [override.input_line]
    with _initialized():
        loader = GlobalHydra.instance().config_loader()
        [own] = OverridesParser.create(loader).parse_overrides([override.input_line])
        values = list(own.sweep_string_iterator())
    if is_group(override.key_or_group):
        values = [value for value in values if not value.startswith("_")]  # parts of other files
    return [f"{own.get_key_element()}={value}" for value in values]


def expand_cells(overrides: Sequence[str]) -> list[list[str]]:
    """The overrides of every cell of a sweep, in the order in which Hydra counts them: the last axis turns fastest."""
    return [list(own) for own in product(*(expand_override(parse_override(text)) for text in overrides))]


def is_group(name: str) -> bool:
    """Whether `name=` chooses a file of a folder, such as `method`."""
    return any((folder / name).is_dir() for folder in folders())


def folders() -> list[Path]:
    """The folders that files are chosen from: conf/, those of installed packages, that of `--config-dir`."""
    return [CONF, *_installed_folders(), *_added]


def add_folder(path: Path) -> None:
    """Take files from one more folder too. Modules of the current folder can be imported from now on, because the
    classes that its files name lie there as a rule.

    Raises:
        SettingError: It is no folder with files of a group in it.
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
    found = []
    for point in entry_points(group=ENTRY_POINTS):
        spec = find_spec(point.value)
        if spec is None or not spec.submodule_search_locations:
            raise SettingError(f"entry point {ENTRY_POINTS} {point.name}={point.value}: no package of that name")
        found += [Path(own) for own in spec.submodule_search_locations]
    return tuple(found)


def find_file(group: str, name: str) -> Path:
    """The file that `group=name` chooses.

    Raises:
        SettingError: Two folders have one of that name, or none has.
    """
    found = [path for folder in folders() if (path := folder / group / f"{name}.yaml").is_file()]
    if len(found) > 1:
        raise SettingError(f"{group}={name}: {' and '.join(map(str, found))} have the same name; rename one")
    if not found:
        raise SettingError(f"{group}={name}: choose one of {', '.join(list_choices(group))}")
    return found[0]


def show_path(path: Path) -> str:
    """A file as messages name it: below conf/, or with its whole path where it lies in another folder."""
    return f"conf/{path.relative_to(CONF)}" if path.is_relative_to(CONF) else str(path)


def list_choices(group: str) -> list[str]:
    """The names that `group=` takes: every file of the folders `<folder>/<group>`. Files that begin with `_` are parts
    of others.
    """
    names = {path.stem for folder in folders() for path in (folder / group).glob("*.yaml")}
    return sorted(name for name in names if not name.startswith("_"))


def _is_value(override: Override) -> bool:
    """Whether an argument changes a setting inside what the groups make."""
    key = override.key_or_group
    plain = override.type is OverrideType.CHANGE and override.package is None and not override.is_sweep_override()
    return plain and key.split(".")[0].split("/")[0] != "hydra" and not is_group(key)


@cache
def _compose_groups(overrides: tuple[str, ...], searched: tuple[str, ...]) -> Composition:
    """`searched`: the folders, of which a change is another composition."""
    more = [f"hydra.searchpath=[{','.join(f'file://{path}' for path in searched[1:])}]"] if searched[1:] else []
    with _initialized():
        config = hydra.compose("config", [*more, *overrides], return_hydra_config=True)
    choices = OmegaConf.to_container(config.hydra.runtime.choices)
    own = OmegaConf.to_container(config.hydra)
    kept = OmegaConf.create({"launcher": own["launcher"], "sweep": {"dir": own["sweep"]["dir"]}})
    with open_dict(config):
        del config["hydra"]
    return Composition(config, choices, kept)


def _initialized() -> Any:
    return (
        nullcontext()
        if GlobalHydra.instance().is_initialized()
        else initialize_config_dir(str(CONF), version_base="1.3")
    )
