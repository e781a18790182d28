"""Admit architectures that are not on the tested list, if a probe finds nothing wrong.

A probe takes seconds (`kvbench.models.probe`). What it says is therefore kept in a file of the user's cache folder. A
hash of the configuration without names, the versions of torch and transformers, and the sources that probe name it.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from kvbench.atomic import replace_file
from kvbench.config.paths import CACHE
from kvbench.config.provenance import content_hash, find_installed_version
from kvbench.interfaces.layout import Probe
from kvbench.models.layouts import Configuration, is_tested, name_type
from kvbench.validation import SettingError

FOLDERS = ("cache", "interfaces", "kernels", "models")  # of kvbench: whatever reads layouts and probes
NAMES = frozenset(  # of what no probe depends on
    ["_name_or_path", "name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "use_cache"]
    + ["_attn_implementation", "attn_implementation", "quantization_config", "auto_map", "id2label", "label2id"]
)


@cache
def hash_sources() -> str:
    """Return 16 hex digits over the sources that read layouts and probe. They are not imported."""
    folders = [Path(folder) for name in FOLDERS for folder in import_module(f"kvbench.{name}").__path__]
    files = [file for folder in folders for file in sorted(folder.rglob("*.py"))]
    return sha256(" ".join(f"{file.stem} {content_hash(file)}" for file in files).encode()).hexdigest()[:16]


def probe_architecture(config: Configuration) -> Probe:
    """Return what a probe says about an architecture.

    Args:
        config: A configuration of transformers, of an architecture that is not on the tested list.

    Raises:
        SettingError: The probe refuses it. The message says why.
    """
    verdict = find_verdict(make_key(config), config)
    if isinstance(verdict, Probe):
        return verdict
    raise SettingError(
        f"model: architecture {name_type(config)} is not supported: {verdict}; docs/models.md lists those that are"
    )


VERDICTS: dict[str, Probe | str] = {}  # what this process knows already, by key


def find_verdict(key: str, config: Configuration) -> Probe | str:
    """Return what a probe says, or why it refuses the architecture. The user's cache folder keeps it."""
    if key in VERDICTS:
        return VERDICTS[key]
    kept = CACHE / "probes" / f"{key}.json"
    with suppress(OSError, ValueError, TypeError, KeyError):  # not there, or damaged: probed again
        read = json.loads(kept.read_text(encoding="utf-8"))
        VERDICTS[key] = str(read["refusal"]) if "refusal" in read else Probe(**read)
        return VERDICTS[key]
    from kvbench.models.probe import Refused, probe

    verdict: Probe | str
    try:
        verdict = probe(config)
    except Refused as error:
        verdict = str(error)
    VERDICTS[key] = verdict
    with suppress(OSError):  # without the file the next process probes again
        kept.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(kept) as draft:
            draft.write_text(json.dumps(asdict(verdict) if isinstance(verdict, Probe) else {"refusal": verdict}))
    return verdict


def make_key(config: Configuration) -> str:
    """Name what a probe of a configuration depends on."""
    text = json.dumps(drop_names(config.to_dict()), sort_keys=True, default=str)
    versions = "-".join(find_installed_version(name) for name in ("torch", "transformers"))
    return f"{sha256(text.encode()).hexdigest()[:16]}-{versions}-{hash_sources()}"


def drop_names(fields: object) -> object:
    """Return the fields of a configuration and of its parts without those of `NAMES`."""
    if not isinstance(fields, Mapping):
        return fields
    return {str(name): drop_names(value) for name, value in fields.items() if name not in NAMES}


def admit_model(model: object) -> None:
    """Let kvbench read a model that is in memory, once its architecture was probed or is on the tested list.

    Raises:
        SettingError: The probe refuses it, or the model is not of the class that was probed.
    """
    from kvbench.models.transformers_port import PROBED, find_class

    config: Configuration = cast(Any, model).config
    if is_tested(config) or model in PROBED:
        return
    if type(model) is not find_class(config):
        name = f"{type(model).__module__}.{type(model).__name__}"
        raise SettingError(f"model: {name} is no causal language model of transformers; kvbench reads no custom code")
    PROBED[cast(Any, model)] = probe_architecture(config)
