"""Compose the settings of a run that somebody else made. Nothing of the stranger's names a file, a class or a text.

The settings come from conf/ on this machine, for the model, method, allocator, codec and task that the run's identity
names. On top of them count, of the identity, only

* numbers, booleans and null, up to a size;
* texts that conf/ has at this setting, by default or in a preset, and those that `TEXTS` lists;
* nothing for the settings in `GIVEN`, which lead to files, to data sets of the hub, or to code. But a hash of a file
  that comes with kvbench stands for this file.

Whoever executes the run gives everything else on the command line. Afterwards the settings must be those of the
identity, which the run's hash names. All of this happens before a class is imported or an object is built.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from kvbench.config import catalogue
from kvbench.config.compose import compose_config, list_choices, to_dict
from kvbench.config.paths import PACKAGE
from kvbench.config.provenance import content_hash
from kvbench.runs.checks import CACHE, DTYPES, keep_settings
from kvbench.store.runs import flatten
from kvbench.validation import SettingError, escape, format_value

GROUPS = ("model", *CACHE, "task")
SUBTASKS = (
    "all", "offline",
    "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3",
    "niah_multivalue", "niah_multiquery", "ruler_vt", "ruler_cwe", "ruler_fwe", "ruler_qa_squad", "ruler_qa_hotpot",
    "narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "gov_report", "qmsum", "multi_news",
    "trec", "triviaqa", "samsum", "passage_count", "passage_retrieval_en", "lcc", "repobench-p",
    "scbench_kv", "scbench_prefix_suffix", "scbench_vt", "scbench_qa_eng", "scbench_qa_chn", "scbench_choice_eng",
    "scbench_many_shot", "scbench_summary", "scbench_mf", "scbench_summary_with_needles",
)  # fmt: skip
# Every setting of conf/ that is a text, a list, a mapping or null somewhere, and the texts that a stranger may choose
# for it besides those that conf/ has there itself. A test compares the names with conf/.
TEXTS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("block_size", "limit"), ()),
    "budget_of": ("prompt", "seen"),
    "question": ("visible", "hidden"),
    "device": ("cpu", "cuda"),
    "dtype": DTYPES,
    "model.compile": ("auto", "off"),
    "model.device_map": ("auto",),
    "model.thinking": ("on", "off"),
    "model.weights": ("int4",),
    **dict.fromkeys(("model.longest", "model.solvable"), ()),
    "method.anchor": ("median", "pairwise"),
    "method.metric": ("dot", "euclidean"),
    "method.norm": ("none", "count"),
    "method.gqa": ("mean", "max"),
    **dict.fromkeys(
        (
            *("method.base", "method.base_args", "method.budget_setting", "method.chunk", "method.count"),
            *("method.decode_queries", "method.decode_size", "method.depth", "method.filters", "method.first"),
            *("method.full_layers", "method.group", "method.highest", "method.later", "method.least", "method.p_dtype"),
            *("method.pooling", "method.positions", "method.question", "method.rank", "method.recent"),
            *("method.reference", "method.scope", "method.selector", "method.sinks", "method.skip_layers"),
            *("method.sparsity", "allocator.mode", "allocator.arithmetic", "codec.base", "codec.base_args"),
            *("codec.backend", "codec.bits", "codec.depth", "codec.format", "codec.full_layers", "codec.group"),
            *("codec.hadamard", "codec.rotation", "codec.scale", "codec.scales", "codec.scope", "codec.values"),
            "codec.zero",
        ),
        (),
    ),
    "codec.remove": ("residual", "reference"),
    "codec.rounding": ("written", "cut"),
    "task.answers": ("own",),
    "task.extract": ("boxed", "flexible"),
    "task.fit": ("upstream",),
    "task.mode": ("shared_context",),
    "task.protocol": ("lm_eval",),
    "task.question": ("visible", "hidden"),
    "task.size_of": ("tokens",),
    "task.start": ("beginning",),
    "task.subtasks": SUBTASKS,
    "task.variant": ("e",),
    **dict.fromkeys(
        (
            *("task.align", "task.answer_prefix", "task.bandwidth", "task.baseline", "task.buffer", "task.context"),
            *("task.depths", "task.fill", "task.flops", "task.implementation", "task.keywords", "task.length"),
            *("task.lengths", "task.limit", "task.max_length", "task.max_new_tokens", "task.measure", "task.metric"),
            *(
                "task.most_batch",
                "task.needle",
                "task.new_tokens",
                "task.num_fewshot",
                "task.positions",
                "task.prompt",
                "task.rows",
            ),
            *("task.sizes", "task.tasks", "task.until", "task.wording"),
        ),
        (),
    ),
}
GIVEN = frozenset(
    (
        *("model.path", "model.revision", "model.like", "model.tokenizer", "model.factors"),
        *("method.path", "codec.path"),
        *("task.path", "task.haystack_path", "task.qa_path", "task.cache", "task.include_path"),
        *("task.gen_kwargs", "task.metadata", "task.system", "results", "workers"),
    )
)  # settings whose value is never a stranger's
# those whose files are data, not code
LOCAL = ("model.path", "model.factors", "task.path", "task.haystack_path", "task.qa_path")
OWN_FILES = PACKAGE / "models"
AXIS = {"start", "stop", "steps"}  # keys of a mapping that a stranger may write
MOST = 10_000_000  # largest number, so that sizes do not take all memory
LARGEST = {"seed": 2**63, "task.seed": 2**63, "task.samples": 10_000, "task.trials": 10_000, "task.repeats": 10_000}
MOST_ITEMS = 10_000  # of a list, and steps of an axis


def choose_names(value: Mapping[str, Any]) -> dict[str, str]:
    """Return the file of conf/ for each group of a run's identity.

    Raises:
        SettingError: conf/ has no such method, allocator, codec or task.
    """
    names = {}
    for group in GROUPS:
        part = value.get(group)
        name = part.get("name") if isinstance(part, Mapping) else None
        if group == "model" and isinstance(name, str) and (weights := get(value, group, "weights")) is not None:
            name = name.removesuffix(f"_{weights}")  # the format of its weights ends its name
        if group == "model" and name not in list_choices(group):
            name = "hf"  # a checkpoint is named after its folder
        if name not in list_choices(group):
            raise SettingError(f"{group}={shorten(name)}: conf/ has no such {group} on this machine")
        names[group] = str(name)
    return names


def list_settings(value: Mapping[str, Any]) -> set[str]:
    """Return the dotted names of the settings that can be given for a run.

    Raises:
        SettingError: As `choose_names`.
    """
    config = compose_config([f"{group}={name}" for group, name in choose_names(value).items()])
    names = {str(name) for name in config}
    for group in GROUPS:
        names |= {f"{group}.{name}" for name in to_dict(config[group])}
    for group in CACHE:
        base, prefix = value[group].get("base"), f"{group}.base_args"
        while isinstance(base, Mapping):
            names |= {f"{prefix}.{name}" for name in base}
            base, prefix = base.get("base"), f"{prefix}.base_args"
    return names


def compose_run(value: Mapping[str, Any], given: Mapping[str, Any]) -> DictConfig:
    """Compose the settings of a run from conf/, its identity, and what whoever executes it gives.

    Args:
        value: The identity, whose hash names the run.
        given: Settings by dotted name, such as {"model.path": "/data/model"}. A name that the run does not have is
            passed over.

    Raises:
        SettingError: A setting would be a text or a number of the stranger's that is not allowed, or the settings are
            not those of the identity. The message names the setting.
    """
    names = choose_names(value)
    config = compose_config([f"{group}={name}" for group, name in names.items()])
    there = list_settings(value)
    given = {name: chosen for name, chosen in given.items() if name in there}
    for name, chosen in read_top_level(value):
        if name not in given:
            check_value(name, chosen, [OmegaConf.select(config, name)])
            OmegaConf.update(config, name, chosen)
    for group in (*CACHE, "task"):
        for name, chosen in choose_settings(group, value[group], given, group).items():
            if name not in config[group]:
                raise SettingError(f"{group}.{shorten(name)}: {names[group]} has no such setting on this machine")
            config[group][name] = chosen
    for name, chosen in given.items():
        OmegaConf.update(config, name, chosen)
    if "cache" in config.task:
        config.task.cache = None  # samples of a stranger's run are made again
    compare_settings(value, config)
    return config


def read_top_level(value: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of the settings that belong to no method, allocator, codec or task."""
    for name in ("budget", "budget_of", "block_size", "question", "seed"):
        yield name, value.get(name)
    yield "fidelity", value.get("fidelity", False)
    for name in ("temperature", "top_p"):
        yield name, get(value, "sampling", name)
    for name in ("longest", "thinking", "weights"):
        yield f"model.{name}", get(value, "model", name)
    yield "device", get(value, "device", "type")
    yield "dtype", get(value, "device", "dtype")
    yield "max_batch", get(value, "device", "max_batch") or 1
    yield "model.device_map", get(value, "device", "device_map")
    yield "model.compile", "off" if get(value, "device", "compile") is False else "auto"


def get(value: Mapping[str, Any], group: str, name: str) -> Any:
    """Return a setting of a part of an identity, None if it has none."""
    part = value.get(group)
    return part.get(name) if isinstance(part, Mapping) else None


def choose_settings(group: str, part: Mapping[str, Any], given: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the settings of a part of an identity that count, and `base` and `base_args` in place of its base.

    Args:
        group: Such as "method".
        part: The part, or the base method inside it.
        given: As in `compose_run`. What is given is left out.
        prefix: The beginning of the settings' names on the command line, such as "method.base_args".

    Raises:
        SettingError: A value is not allowed.
    """
    conf = compose_config([f"{group}={part['name']}"])[group]
    usual = catalogue.read_settings(group, conf)
    presets = (to_dict(conf).get("presets") or {}).values()
    settings: dict[str, Any] = {}
    for name, value in part.items():
        if name == "name" or f"{prefix}.{name}" in given:
            continue
        if name == "base" and isinstance(value, Mapping):
            if value.get("name") not in list_choices(group):
                raise SettingError(f"{prefix}.base={shorten(value.get('name'))}: conf/ has no such {group}")
            settings["base"] = value["name"]
            settings["base_args"] = choose_settings(group, value, given, f"{prefix}.base_args")
            continue
        if name == "path" and group in CACHE and (own := find_own_file(value)) is not None:
            settings[name] = str(own)
            continue
        known = [usual.get(name), *(preset[name] for preset in presets if preset and name in preset)]
        check_value(f"{prefix}.{name}", value, known, f"{group}.{name}")
        settings[name] = value
    return settings


def find_own_file(digest: object) -> Path | None:
    """Return the file for methods and codecs that comes with kvbench and has this `content_hash`; None without any."""
    return next((file for file in sorted(OWN_FILES.glob("*.safetensors")) if content_hash(file) == digest), None)


def check_value(name: str, value: object, known: Sequence[object], setting: str | None = None) -> None:
    """Check that a stranger's value may be used.

    Args:
        name: The setting's name on the command line.
        value: The value.
        known: Values that conf/ has there.
        setting: Its name in `TEXTS`, `GIVEN` and `LARGEST`, if it is another one.

    Raises:
        SettingError: It may not be used. The message says that it can be given on the command line.
    """
    setting = setting or name
    if value in known or value is None:
        return
    if setting in GIVEN:
        raise SettingError(f"{name}: leads to files, data or code, so nothing of a bundle counts; give {name}=… here")
    texts = {
        text
        for known_value in known
        for text in (known_value if isinstance(known_value, list) else [known_value])
        if isinstance(text, str)
    }
    texts |= {*TEXTS.get(setting, ())}
    items = value if isinstance(value, list) else [*value.values()] if isinstance(value, Mapping) else [value]
    if len(items) > MOST_ITEMS or (isinstance(value, Mapping) and not value.keys() <= AXIS):
        raise SettingError(f"{name}: a mapping or a list that is not taken from a bundle; give {name}=… here")
    steps = value.get("steps") if isinstance(value, Mapping) else None
    for item in items:
        if isinstance(item, str) and item not in texts:
            raise SettingError(f"{name}={shorten(item)}: a text that is not taken from a bundle; give {name}=… here")
        if not isinstance(item, str | int | float | None):
            raise SettingError(f"{name}: is nested, which is not taken from a bundle; give {name}=… here")
        most = MOST_ITEMS if item is steps else LARGEST.get(setting, MOST)
        if isinstance(item, int | float) and not (math.isfinite(item) and abs(item) <= most):
            raise SettingError(
                f"{name}={shorten(item)}: more than {most} is not taken from a bundle; give {name}=… here"
            )


def compare_settings(value: Mapping[str, Any], config: DictConfig) -> None:
    """Compare composed settings with an identity, before an object is built from them.

    Raises:
        SettingError: They differ. The message names up to three settings.
    """
    kept = keep_settings(config)
    now: dict[str, Any] = {
        group: catalogue.identity_settings(catalogue.complete(group, kept[group])) for group in CACHE
    }
    now["task"] = catalogue.task_identity(catalogue.complete("task", kept["task"]))
    one, other = flatten({group: value[group] for group in now}), flatten(now)
    if differ := sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name)):
        raise SettingError(escape(f"{', '.join(differ[:3])}: not what it was then"))


def find_local(settings: object) -> dict[str, str]:
    """Return those paths of a machine.json's settings that lead to a model or to data here, or to the hub's data.

    They are for pages about a store on this machine. Code is never read from them, and the data must have the hash that
    the run's identity states.
    """
    flat = flatten(settings) if isinstance(settings, Mapping) else {}
    paths = {name: path for name in LOCAL if isinstance(path := flat.get(name), str)}
    return {name: path for name, path in paths.items() if path == "hub" or Path(path).expanduser().exists()}


def shorten(value: object) -> str:
    """Return a value as it is typed, on one line, at most 60 characters."""
    text = escape(format_value(value))
    return text if len(text) <= 60 else f"{text[:57]}…"
