"""Find methods, allocators, codecs, tasks, models and loggers by the name of their file in conf/, and build them.

To add one, add a file to conf/<group>/. A name, file or class that cannot be used raises a SettingError with a message
of one line.
"""

import io
import pickle
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
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from kvbench.config.compose import LISTED_BY, compose, describe_unknown, folders, list_choices, show_path, to_dict
from kvbench.config.paths import CONF
from kvbench.config.provenance import content_hash
from kvbench.validation import ContractError, SettingError, describe_choices, format_value, require_choice

IMPORT_SECONDS = 60  # limit for importing the module of a method, an allocator, a codec or a task
SHAPES = CONF / "model" / "shapes"
NO_SETTINGS = ("presets", "_style_")  # keys of a file that no run depends on: what it offers, and its look on charts
UNCOMPARED = {"name", "path", "preset", "_target_"}  # settings by which a part does not differ from its presets
SYSTEM = "system"  # a setting of every task, which the runner follows
OUTER_REFERENCE = re.compile(rb"\$\{(?!\.[^.])")  # `${seed}`, `${..seed}`; but not `${.preset}`
# Resolving parses every interpolation, which takes longer than all other checks of a cell. Most cells of a sweep share
# the settings of a group, which are resolved once if they refer to nothing outside the group: pickled -> resolved.
_resolved: dict[bytes, dict[str, Any]] = {}


def list_shapes() -> list[str]:
    """Return the names that `model.like=` accepts."""
    return sorted(path.stem for path in SHAPES.glob("*.json"))


def methods_available() -> list[str]:
    """Return the names that `method=` accepts."""
    return list_choices("method")


@cache
def _compose_choice(group: str, name: str) -> dict[str, Any]:
    """Return the settings of conf/<group>/<name>.yaml with the defaults that it names, before interpolation."""
    require_choice(group, name, list_choices(group), LISTED_BY)
    try:
        default = compose()
        made = default if default.choices[group] == name else compose([f"{group}={name}"])
    except (yaml.YAMLError, HydraException, OmegaConfBaseException) as error:
        raise SettingError(error_message(error) or " ".join(str(error).split())) from None
    return to_dict(made.config[group])


@cache
def _pack_choice(group: str, name: str) -> bytes:
    """Return the pickled settings of `_compose_choice`. Unpickling them is quicker than creating them."""
    return pickle.dumps(OmegaConf.create(_compose_choice(group, name)))


@cache
def _resolve_choice(group: str, name: str) -> dict[str, Any]:
    """Return the resolved settings of conf/<group>/<name>.yaml without overrides."""
    return resolve(group, OmegaConf.create(_compose_choice(group, name)))


def load_settings(group: str, name: str, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the resolved settings of conf/<group>/<name>.yaml.

    Args:
        group: Folder of conf/, such as "method".
        name: Name of a file in it, without ".yaml".
        overrides: Settings to change, by name.

    Raises:
        SettingError: The file does not exist or cannot be used, or an override names no setting of it.
    """
    if not overrides:
        return deepcopy(_resolve_choice(group, name))
    config: DictConfig = pickle.loads(_pack_choice(group, name))
    names = [key for key in config if key not in ("_target_", "name", *NO_SETTINGS)]
    for key, value in overrides.items():
        if not names:
            raise SettingError(f"{group} setting={key}: {name} has no settings")
        require_choice(f"{group} setting", key, names)
        try:
            config[key] = value
        except OmegaConfBaseException:
            raise SettingError(f"{group}.{key}={value}: a setting cannot have a value of this type") from None
    return resolve(group, config)


@cache
def _resolve_presets(group: str, name: str) -> dict[str, dict[str, Any]]:
    """Return the settings that each preset of conf/<group>/<name>.yaml chooses, resolved, the default preset first."""
    offered = _compose_choice(group, name)
    presets = offered.get("presets") or {}
    resolved = {}
    for preset in sorted(presets, key=lambda candidate: candidate != offered["preset"]):
        settings = load_settings(group, name, {"preset": preset})
        resolved[preset] = {key: settings[key] for key in presets[preset] or () if key in settings}
    return resolved


def find_preset(group: str, settings: Mapping[str, Any]) -> str | None:
    """Return the preset that a part of a run has the settings of, or None if that is the default one, or none is.

    Args:
        group: "method", "allocator" or "codec".
        settings: The part's settings, as in a run's identity.
    """
    chosen = next(iter(list_presets(group, settings)), None)
    return None if chosen is None or chosen == next(iter(_resolve_presets(group, settings["name"]))) else chosen


def list_presets(group: str, settings: Mapping[str, Any]) -> list[str]:
    """Return all presets that a part of a run has the settings of, the default one first.

    Args:
        group: As in `find_preset`.
        settings: Likewise.
    """
    name = settings["name"]
    presets = _resolve_presets(group, name) if name in list_choices(group) else {}
    return [
        preset for preset, values in presets.items() if all(settings.get(key) == value for key, value in values.items())
    ]


def find_nearest_preset(group: str, settings: Mapping[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """Return the preset that most settings of a part of a run are those of, and the other settings.

    Files are not compared, because a run records their hashes, and neither are settings that only the run or only
    today's file has. A preset that chooses a setting which the run lacks is left out.

    Args:
        group: As in `find_preset`.
        settings: Likewise.

    Returns:
        The name of the preset, or None for the default one or if there is none; and the settings that are not those of
        the preset, by name. The first of several presets that are as near is taken, the default one first.
    """
    name, changed = settings["name"], {}
    known = _resolve_whole_presets(group, name) if name in list_choices(group) else {}
    for preset, usual in known.items():
        if preset and not _resolve_presets(group, name)[preset].keys() <= settings.keys():
            continue
        shared = sorted((settings.keys() & usual.keys()) - UNCOMPARED)
        changed[preset] = {
            key: settings[key]
            for key in shared
            if _describe_inner(group, settings[key]) != _describe_inner(group, usual[key])
        }
    nearest = min(changed, key=lambda preset: len(changed[preset]), default=None)
    return None if nearest == next(iter(known), None) else nearest, changed.get(nearest, {})


@cache
def _resolve_whole_presets(group: str, name: str) -> dict[str | None, dict[str, Any]]:
    """Return all settings of a part with each of its presets, the default one first; by None if it has no presets."""
    presets = _resolve_presets(group, name)
    whole: dict[str | None, dict[str, Any]] = {
        preset: load_settings(group, name, {"preset": preset}) for preset in presets
    }
    return whole or {None: _resolve_choice(group, name)}


def describe_part(group: str, settings: Mapping[str, Any]) -> str:
    """Return the name of a part of a run and its settings that differ from the default ones, such as "palu, bits 4".

    A preset is given by its name, or the nearest one with what differs from it. A file is not named.

    Args:
        group: "method", "allocator" or "codec".
        settings: The part's settings, as in a run's identity.
    """
    name = settings["name"]
    preset, changed = find_nearest_preset(group, settings)
    usual = _resolve_choice(group, name) if name in list_choices(group) else settings
    only = settings.keys() - usual.keys() - UNCOMPARED  # today's file may lack a setting of an older run
    texts = [f"{key} {format_value(_describe_inner(group, settings[key]))}" for key in sorted(changed.keys() | only)]
    return ", ".join([f"{name} {preset}" if preset else name, *texts])


def _describe_inner(group: str, value: object) -> object:
    """Return a setting's value; for a method or codec inside another one what `describe_part` says of it."""
    return f"({describe_part(group, value)})" if isinstance(value, Mapping) and "name" in value else value


def resolve(group: str, config: DictConfig) -> dict[str, Any]:
    """Return the settings of a group with its preset and, in a composite, the settings of its base method applied.

    Raises:
        SettingError: A preset, a base method or a setting of it does not exist.
    """
    return complete(group, read_settings(group, config))


def read_settings(group: str, config: DictConfig) -> dict[str, Any]:
    """Return the resolved settings of a part of the configuration, with the chosen preset applied.

    Raises:
        SettingError: The preset does not exist, or a setting refers to one that does not exist.
    """
    if "presets" in config:
        if not isinstance(config.presets, DictConfig):
            raise SettingError(f"{group}.presets={format_value(config.presets)}: presets belong into the file")
        require_choice(f"{group}.preset", config.preset, list(config.presets))
    packed = pickle.dumps(to_dict(config))
    if (resolved := _resolved.get(packed)) is None:
        try:
            resolved = to_dict(config, resolve=True)
        except OmegaConfBaseException as error:
            raise SettingError(f"{group}: {str(error).splitlines()[0]}") from None
        if not OUTER_REFERENCE.search(packed):
            _resolved[packed] = resolved
    for key, value in resolved.items():
        # the class that takes `path` checks it
        if is_path(key) and key != "path" and not isinstance(value, str | None):
            raise SettingError(f"{group}.{key}={format_value(value)}: a path, or null")
    return {key: value for key, value in deepcopy(resolved).items() if key not in NO_SETTINGS}


def is_path(key: str) -> bool:
    """Return whether a setting of this name is the path of a file or folder."""
    return key in ("cache", "path") or key.endswith("_path")


def complete(group: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's resolved settings in which the settings of its base method replace that method's name.

    Only composites, such as `method=criticalkv`, have the settings `base` and `base_args`.

    Raises:
        SettingError: The base method, or one of its settings, does not exist.
    """
    completed = dict(settings)
    if "base" in completed:
        args = completed.pop("base_args", None)
        require_choice(f"{group}.base", completed["base"], list_choices(group), LISTED_BY)
        if not isinstance(args, Mapping | None):
            raise SettingError(f"{group}.base_args={args}: settings of {completed['base']}, such as {{preset: paper}}")
        completed["base"] = load_settings(group, completed["base"], args)
    return completed


def identity_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's settings as a run's identity contains them.

    A file counts by its content instead of its path. The preset's name does not count, because its values do.
    """
    plain = {key: value for key, value in settings.items() if key not in ("_target_", "preset")}
    if plain.get("path") is not None:
        plain["path"] = content_hash(Path(plain["path"]).expanduser())
    if "base" in plain:
        plain["base"] = identity_settings(plain["base"])
    return plain


def task_identity(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a task's settings as a run's identity contains them.

    Paths do not count, because the identity covers the data behind them. The temperature does not count, because it is
    one of the sampling settings. A variant, a number of rows or a system prompt that is null does not count, so that
    runs made before it could be chosen keep their names.
    """
    skipped = [key for key in settings if is_path(key)]
    skipped += ["_target_", "preset", "temperature"]
    skipped += [key for key in ("variant", "rows", SYSTEM) if settings.get(key) is None]
    return {key: value for key, value in settings.items() if key not in skipped}


def build(group: str, resolved: Mapping[str, Any]) -> Any:
    """Build the object that resolved settings describe, such as a method, an allocator, a codec or a task.

    Raises:
        SettingError: The class cannot be imported, or it refuses a value.
    """
    args = {key: value for key, value in resolved.items() if key not in ("preset", "presets")}
    if group == "task":
        args.pop(SYSTEM, None)
    if "base" in args:
        try:
            args["base"] = build(group, args["base"])
        except SettingError as error:
            reason = str(error).removeprefix(f"{group}.")
            line = f"{group}.base={args['base']['name']}: {reason}; {group}.base_args={{…}} holds its settings"
            raise SettingError(line) from None
    kind = load_class(f"{group}={resolved.get('name')}", args.pop("_target_"))
    try:
        return kind(**args)
    except SettingError:
        raise
    except Exception as error:
        raise SettingError(f"{group}={resolved.get('name')}: {error.__cause__ or error}".splitlines()[0]) from error


class TimeLimitReached(BaseException):
    """Code of others took too long. As a BaseException, it passes through their `except Exception`."""


def load_class(owner: str, target: str) -> Any:
    """Import a class.

    Standard output is reserved for tables. If the module prints during the import, the first line goes to standard
    error.

    Args:
        owner: Beginning of the messages, such as "method=snapkv".
        target: Full name of the class, such as "kvbench.methods.snapkv.SnapKV".

    Raises:
        SettingError: The module cannot be imported within `IMPORT_SECONDS`, or does not define the class.
    """
    module, _, name = target.rpartition(".")
    printed, reason = io.StringIO(), None
    try:
        with limit_seconds(IMPORT_SECONDS), redirect_stdout(printed):
            return getattr(import_module(module), name)
    except TimeLimitReached:
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
    """Raise `TimeLimitReached` inside this context after some seconds.

    There is no limit in other threads than the main one, because only the main thread receives signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        raise TimeLimitReached

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
    """Return a message of one line if an error, or one of its causes, is about the settings; None otherwise."""
    while error is not None:
        if isinstance(error, SettingError):
            return str(error)
        if isinstance(error, yaml.YAMLError) and (line := describe_damage(error)) is not None:
            return line
        if isinstance(error, OverrideParseException):
            return explain_quoting(str(error.override))
        if isinstance(error, MissingConfigException) and error.missing_cfg_file and "/" in error.missing_cfg_file:
            group, _, name = error.missing_cfg_file.rpartition("/")
            return describe_unknown(group, name)
        if isinstance(error, OmegaConfBaseException) and error.full_key:
            return describe_setting_error(error)
        if isinstance(error, HydraException) and not isinstance(
            error.__cause__, HydraException | OmegaConfBaseException
        ):
            return " ".join(str(error).split())
        error = error.__cause__
    return None


def describe_setting_error(error: OmegaConfBaseException) -> str:
    """Return a message about a setting that does not exist, with the closest names, or whose value has a wrong type."""
    setting, parent = str(error.full_key), error.parent_node
    if not isinstance(error, ConfigAttributeError | ConfigKeyError):
        return f"{setting}: {str(error).splitlines()[0]}"
    if not isinstance(parent, DictConfig) or not parent:  # a single value, and no group of settings
        return f"{setting}: no such setting; {setting.rpartition('.')[0]} is given as a whole"
    names = [str(name) for name in parent if name not in ("hydra", "name", "_target_", *NO_SETTINGS)]
    listed_by = f"kvbench run --cfg {'hydra' if setting.startswith('hydra') else 'job'}"
    return f"{setting}: no such setting; {describe_choices(str(error.key), names, listed_by)}"


def describe_damage(error: yaml.YAMLError, path: Path | None = None) -> str | None:
    """Return a message that names the file of conf/ that is not valid YAML, the line and the reason.

    Args:
        error: The error of the YAML parser.
        path: The file, if the error does not name it.

    Returns:
        The message, or None if the file is not in one of the folders of configuration files.
    """
    mark = getattr(error, "problem_mark", None)
    path = path or Path(mark.name if mark else getattr(error, "name", ""))
    if not any(path.is_relative_to(folder) for folder in folders()):
        return None
    where = f" line {mark.line + 1}" if mark else ""
    reason = getattr(error, "problem", None) or getattr(error, "reason", None) or type(error).__name__
    return f"{path.parent.name}={path.stem}: {show_path(path)}{where} is not valid YAML ({reason})"


def explain_quoting(override: str) -> str:
    """Return a message that shows how to quote an override that Hydra cannot read: for Hydra and for the shell."""
    name, _, value = override.partition("=")
    line = f"{override}: cannot be read; a value with = [ ] {{ }} ( ) ' \" , or letters beyond ASCII is quoted twice"
    if not value or value[0] in "'\"":  # there is no value, or it is quoted already
        return f"{line}, for Hydra and for the shell: 'task.path=\"/data/a=b\"'"
    return line + ", for Hydra and for the shell: " + shlex.quote(f"{name}={quote_value(value)}")


def quote_value(value: str) -> str:
    """Return a value in quotes, as Hydra reads it."""
    return '"' + re.sub(r'(\\*)("|$)', lambda end: 2 * end[1] + ('\\"' if end[2] else ""), value) + '"'
