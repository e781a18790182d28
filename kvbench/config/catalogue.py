"""Look up methods, allocators, codecs, tasks, models and loggers by the name of their file in conf/, and build them.

A file in conf/<group>/ is all that it takes to add one. A name, a file or a class that cannot be used is a SettingError
of one line.
"""

import io
import re
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from copy import deepcopy
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvbench.config.compose import compose, folders, list_choices, show_path
from kvbench.config.paths import CONF
from kvbench.config.provenance import content_hash
from kvbench.validation import ContractError, SettingError, require_choice

IMPORT_SECONDS = 60  # that the file of a method, an allocator, a codec or a task may take to import
SHAPES = CONF / "model" / "shapes"


def list_shapes() -> list[str]:
    """Names that `model.like=` takes."""
    return sorted(path.stem for path in SHAPES.glob("*.json"))


def methods_available() -> list[str]:
    """Names that `method=` takes."""
    return list_choices("method")


@cache
def _compose_choice(group: str, name: str) -> Mapping[str, Any]:
    """The settings of a group's file, with its defaults, not resolved."""
    require_choice(group, name, list_choices(group))
    try:
        config = compose([f"{group}={name}"]).config[group]
    except (yaml.YAMLError, HydraException, OmegaConfBaseException) as error:
        raise SettingError(error_message(error) or " ".join(str(error).split())) from None
    return OmegaConf.to_container(config)


@cache
def _resolve_choice(group: str, name: str) -> Mapping[str, Any]:
    """The resolved settings of a group's file as they are without overrides."""
    return resolve(group, OmegaConf.create(_compose_choice(group, name)))


def load_settings(group: str, name: str, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The resolved settings of conf/<group>/<name>.yaml with `overrides`; SettingError for an unknown one."""
    if not overrides:
        return deepcopy(dict(_resolve_choice(group, name)))
    config = OmegaConf.create(_compose_choice(group, name))
    own = [key for key in config if key not in ("_target_", "name", "presets")]
    for key, value in overrides.items():
        if not own:
            raise SettingError(f"{group} setting={key}: {name} has no settings")
        require_choice(f"{group} setting", key, own)
        try:
            config[key] = value
        except OmegaConfBaseException:
            raise SettingError(f"{group}.{key}={value}: not a value that a setting can have") from None
    return resolve(group, config)


def resolve(group: str, config: DictConfig) -> dict[str, Any]:
    """A group's config with its preset applied; SettingError for an unknown preset."""
    return complete(group, read_settings(group, config))


def read_settings(group: str, config: DictConfig) -> dict[str, Any]:
    """The resolved settings of a group or of another part of the configuration, in which the chosen preset is applied.

    Raises:
        SettingError: There is no such preset, or a setting refers to another one that is not there.
    """
    if "presets" in config:
        require_choice(f"{group}.preset", config.preset, list(config.presets))
    try:
        resolved: dict[str, Any] = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise SettingError(f"{group}: {str(error).splitlines()[0]}") from None
    resolved.pop("presets", None)
    return resolved


def complete(group: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """A group's resolved settings with those of a composite's own method, which is given by name.

    Raises:
        SettingError: There is no such method, or it has no such setting.
    """
    found = dict(settings)
    if "base" in found:
        args = found.pop("base_args", None)
        require_choice(f"{group}.base", found["base"], list_choices(group))
        if not isinstance(args, Mapping | None):
            raise SettingError(f"{group}.base_args={args}: settings of {found['base']}, such as {{preset: paper}}")
        found["base"] = load_settings(group, found["base"], args)
    return found


def identity_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A group's settings as they enter the hash: a file by what is in it, not by where it lies."""
    plain = {key: value for key, value in settings.items() if key not in ("_target_", "preset")}
    if plain.get("path") is not None:
        plain["path"] = content_hash(Path(plain["path"]).expanduser())
    if "base" in plain:
        plain["base"] = identity_settings(plain["base"])
    return plain


def task_identity(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A task's settings as they enter the hash: what a path holds is in the data's, the temperature in the sampling."""
    skipped = [key for key in settings if key in ("cache", "path") or key.endswith("_path")]
    skipped += ["_target_", "preset", "temperature"]
    return {key: value for key, value in settings.items() if key not in skipped}


def build(group: str, resolved: Mapping[str, Any]) -> Any:
    """The method, allocator or codec that resolved settings describe; SettingError for values it refuses."""
    own = {key: value for key, value in resolved.items() if key not in ("preset", "presets")}
    if "base" in own:
        own["base"] = build(group, own["base"])
    kind = load_class(f"{group}={resolved.get('name')}", own.pop("_target_"))
    try:
        return kind(**own)
    except SettingError:
        raise
    except Exception as error:
        raise SettingError(f"{group}={resolved.get('name')}: {error.__cause__ or error}".splitlines()[0]) from error


class ImportTimeout(BaseException):
    """An import did not end in time. No `except Exception` of the module that is imported holds it up."""


def load_class(owner: str, target: str) -> Any:
    """The class `target` (module.Name). A SettingError that begins with `owner` says that its module cannot be
    imported, lacks the class, or takes longer than IMPORT_SECONDS. Standard output is for tables: what the module
    prints while it is imported is said in one line on standard error.
    """
    module, _, name = target.rpartition(".")
    printed, reason = io.StringIO(), None
    try:
        with limit_seconds(IMPORT_SECONDS), redirect_stdout(printed):
            return getattr(import_module(module), name)
    except ImportTimeout:
        reason = f"takes longer than {IMPORT_SECONDS} s to import"
    except SystemExit:
        reason = "ends the program when it is imported"
    except Exception as error:
        reason = f"cannot be imported ({type(error).__name__}: {' '.join(str(error).split())})"
    finally:
        if first := printed.getvalue().strip().partition("\n")[0]:
            print(f"kvbench: {owner}: {module} prints when it is imported: {first}", file=sys.stderr)
    raise SettingError(f"{owner}: {module} {reason}")


@contextmanager
def limit_seconds(seconds: float) -> Iterator[None]:
    """Raise TooLong inside after so many seconds, where signals can be received: in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        raise ImportTimeout

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def translate_errors() -> Iterator[None]:
    """Raise what Hydra and OmegaConf say of wrong settings as a SettingError of one line."""
    try:
        yield
    except (SettingError, ContractError):
        raise
    except Exception as error:
        if (line := error_message(error)) is None:
            raise
        raise SettingError(line) from error


def error_message(error: BaseException | None) -> str | None:
    """What is wrong with the settings, or None if the error is about something else."""
    while error is not None:
        if isinstance(error, SettingError):
            return str(error)
        if isinstance(error, yaml.YAMLError) and (line := describe_damage(error)) is not None:
            return line
        if isinstance(error, OverrideParseException):
            return explain_quoting(str(error.override))
        if isinstance(error, MissingConfigException) and error.missing_cfg_file and "/" in error.missing_cfg_file:
            group, _, name = error.missing_cfg_file.rpartition("/")
            return f"{group}={name}: choose one of {', '.join(list_choices(group))}"
        if isinstance(error, OmegaConfBaseException) and error.full_key:
            return f"{error.full_key}: no such setting, or not of this kind; `python run.py --cfg job` lists them"
        if isinstance(error, ValueError) and "Config group override" in str(error):  # Hydra names no group
            return "a group (model, method, allocator, codec, task, logger) cannot be null: choose one of its names"
        if isinstance(error, HydraException) and not isinstance(
            error.__cause__, HydraException | OmegaConfBaseException
        ):
            return " ".join(str(error).split())
        error = error.__cause__
    return None


def describe_damage(error: yaml.YAMLError, path: Path | None = None) -> str | None:
    """Say which file of conf/ is no YAML, where and why; None if the error is about another file."""
    mark = getattr(error, "problem_mark", None)
    path = path or Path(mark.name if mark else getattr(error, "name", ""))
    folder = next((own for own in folders() if path.is_relative_to(own)), None)
    if folder is None:
        return None
    where = f" line {mark.line + 1}" if mark else ""
    reason = getattr(error, "problem", None) or getattr(error, "reason", None) or type(error).__name__
    return f"{path.parent.name}={path.stem}: {show_path(path)}{where} is no YAML ({reason})"


def explain_quoting(override: str) -> str:
    """Say how to write an override that Hydra cannot read: quoted for Hydra, and again for the shell."""
    name, _, value = override.partition("=")
    line = f"{override}: cannot be read; a value with = [ ] {{ }} ( ) ' \" , or letters beyond ASCII is quoted twice"
    if not value or value[0] in "'\"":  # there is nothing to quote, or the user did
        return f"{line}, for Hydra and for the shell: 'task.path=\"/data/a=b\"'"
    quoted = re.sub(r'(\\*)("|$)', lambda end: 2 * end[1] + ('\\"' if end[2] else ""), value)
    return line + ", for Hydra and for the shell: " + shlex.quote(f'{name}="{quoted}"')
