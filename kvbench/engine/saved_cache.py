"""Write compressed contexts to a safetensors file and read them back.

The file holds what `PromptContext.snapshot` holds, so that whatever a branch returns to is also what is loaded. Tensors
are named after their place, such as `contexts.0.layers.3.rows.places`. The header's metadata has `format`, `version`
and `about`. The last one is JSON: the model, the method, allocator and codec, and every context.

Values of JSON stand for themselves, and so do lists of values. Any other value is an object with one key:

    {"tensor": [name, device]}    {"tuple": [...]}    {"dict": [[key, value], ...]}    {"fraction": "1/3"}
    {"dtype": name}               {"device": name}    {"path": name}
    {"zero": null}                a tally that has counted nothing yet
    {"codec": null}               the codec of the layer
    {"make": [class, {...}]}      a dataclass or a named tuple with these fields

Nothing is unpickled, and a file does not name what is imported. The method, the allocator and the codec are those of
`conf/` with the names in the file. The class in "make" is looked up among those that their modules define or import.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor

from kvbench.atomic import replace_file
from kvbench.cache.accounting import ZERO, LayerTally
from kvbench.cache.eviction import HeadShares
from kvbench.cache.guard import MAPPINGS, Call, Guarded
from kvbench.cache.hook_table import guard_rows
from kvbench.cache.layer import Layer, LayerSnapshot
from kvbench.cache.policy import CachePolicy, Progress, choose_cache
from kvbench.cache.storage import StoredRows
from kvbench.config.catalogue import list_choices, load_class, load_settings
from kvbench.config.provenance import content_hash, find_version
from kvbench.engine.context import ContextSnapshot
from kvbench.engine.generation import GenerationContext
from kvbench.interfaces.allocator import Allocator
from kvbench.interfaces.budget import Budget
from kvbench.interfaces.codec import Codec, Plain
from kvbench.interfaces.method import Method
from kvbench.interfaces.observation import KeyRotation
from kvbench.interfaces.tensor_files import open_weights
from kvbench.models.loading import hash_weights
from kvbench.models.transformers_port import Frequencies, list_decoder_layers, text_config
from kvbench.validation import SettingError, format_value, refuse_on_error, require_choice

FORMAT, VERSION = "kvbench compressed context", "1"
WHAT = "compressed context"  # what messages call the file
Part = Method | Allocator | Codec
JSON = (bool, int, float, str, type(None))  # types of values that JSON holds as they are
OF_SNAPSHOT = "seen", "since_cut", "drawn", "logits", "progress", "shared", "sliding", "recurrent"  # saved as they are
OF_LAYER = "tally", "shares", "token_bytes", "attended", "state"
KINDS = (StoredRows, Plain, LayerTally, HeadShares, Progress, Budget)  # what the engine itself saves
# folders of conf/, in the order of a policy
GROUPS: dict[str, type[Part]] = {"method": Method, "allocator": Allocator, "codec": Codec}
UNCOUNTED = {  # settings of a model's configuration that change no logits
    "architectures", "chunk_size_feed_forward", "dtype", "id2label", "initializer_range", "label2id",
    "output_attentions", "output_hidden_states", "problem_type", "return_dict", "torch_dtype", "transformers_version",
    "use_cache", "bos_token_id", "eos_token_id", "pad_token_id",
}  # fmt: skip


class Writer:
    """Turns values into JSON and tensors.

    Args:
        kinds: The classes that values may have beside plain ones, by name.
        owners: Who may have made a value that cannot be saved, for messages.
    """

    def __init__(self, kinds: Mapping[str, type], owners: str = "") -> None:
        self.kinds, self.owners = kinds, owners
        self.tensors: dict[str, Tensor] = {}
        self.names: dict[int, str] = {}  # id of a tensor -> its name, so that a tensor of two owners is written once

    def write(self, value: Any, name: str, codec: Codec | None = None) -> Any:
        """Return a value as JSON.

        Args:
            value: The value.
            name: Its place, after which its tensors are named.
            codec: The codec of the layer that the value belongs to.

        Raises:
            SettingError: The value is of a type that cannot be saved.
        """
        kind = type(value)
        if kind in JSON:
            return value
        if kind is list:
            return [self.write(item, f"{name}.{number}", codec) for number, item in enumerate(value)]
        if value is ZERO:
            return {"zero": None}
        if isinstance(value, Tensor):
            return {"tensor": [self.name_tensor(value, name), str(value.device)]}
        if kind is tuple:
            return {"tuple": self.write(list(value), name, codec)}
        if kind in MAPPINGS:
            pairs = ((self.write(key, name), self.write(item, f"{name}.{key}", codec)) for key, item in value.items())
            return {"dict": list(pairs)}
        if isinstance(value, Fraction | torch.dtype | torch.device):
            return {kind.__name__.lower(): str(value).removeprefix("torch.")}
        if isinstance(value, Path):
            return {"path": str(value)}
        if isinstance(value, Codec) and value == codec:
            return {"codec": None}
        if self.kinds.get(kind.__name__) is kind:
            names = [field.name for field in fields(value) if field.init] if is_dataclass(value) else value._fields
            parts = {field: self.write(getattr(value, field), f"{name}.{field}", codec) for field in names}
            return {"make": [kind.__name__, parts]}
        raise SettingError(f"{self.owners}: the context cannot be saved, because {name} is of type {kind.__name__}")

    def name_tensor(self, tensor: Tensor, name: str) -> str:
        """Return the name under which a tensor is written."""
        if id(tensor) not in self.names:
            while name in self.tensors:  # the keys 1 and "1" of a dictionary
                name += "+"
            self.names[id(tensor)] = name
            self.tensors[name] = tensor  # holding it also keeps its id from being used again
        return self.names[id(tensor)]


class Reader:
    """Turns what a `Writer` wrote into values.

    Args:
        kinds: The classes that values may have, by name.
        tensors: The file, opened, or None where no tensor is expected.
        device: The only device of the model; None leaves tensors on the devices that they had.
    """

    def __init__(self, kinds: Mapping[str, type], tensors: Any = None, device: torch.device | None = None) -> None:
        self.kinds, self.tensors, self.device = kinds, tensors, device
        self.known: dict[str, Tensor] = {}

    def read(self, value: Any, codec: Codec | None = None) -> Any:
        """Return the value that JSON stands for, with the codec of the layer that it belongs to."""
        if isinstance(value, JSON):
            return value
        if isinstance(value, list):
            return [self.read(item, codec) for item in value]
        [(kind, content)] = value.items()
        if kind == "zero":
            return ZERO
        if kind == "tensor":
            return self.find_tensor(*content)
        if kind == "tuple":
            return tuple(self.read(content, codec))
        if kind == "dict":
            return {self.read(key): self.read(item, codec) for key, item in content}
        if kind == "fraction":
            return Fraction(content)
        if kind == "path":
            return Path(content)
        if kind == "dtype":
            return torch.empty(0, dtype=getattr(torch, content)).dtype
        if kind == "device":
            return self.find_device(content)
        if kind == "codec":
            return codec
        if kind == "make" and content[0] in self.kinds:
            parts = {field: self.read(part, codec) for field, part in content[1].items()}
            return self.kinds[content[0]](**parts)
        raise ValueError(f"a value of the unknown kind {kind} {content}")

    def find_tensor(self, name: str, device: str) -> Tensor:
        """Return a tensor in memory of its own: the file's is a part of a storage that holds the whole file."""
        if name not in self.known:
            self.known[name] = self.tensors.get_tensor(name).to(self.find_device(device), copy=True)
        return self.known[name]

    def find_device(self, name: str) -> torch.device:
        """Return the device that takes the place of the one with this name."""
        return torch.device(name) if self.device is None or name == "cpu" else self.device


def write_contexts(path: Path, contexts: list[GenerationContext], prompt: Tensor | None) -> None:
    """Write contexts with one policy and one model to a file, completely or not at all.

    Args:
        path: The file. An old one is replaced.
        contexts: The contexts. An answer that is being generated ends.
        prompt: The ids of their prompts, (samples, tokens), or None.

    Raises:
        SettingError: The method, the allocator or the codec cannot be made again by its name and settings, it remembers
            something that is no value, or the file cannot be written.
    """
    choice, model = contexts[0].choice, contexts[0].model
    writer = Writer(find_kinds(choice), choice.owners)
    about = {
        "kvbench": find_version(),
        "model": describe_model(model),
        "policy": {group: describe_part(group, part) for group, part in list_parts(choice).items()},
        "prompt": writer.write(prompt, "prompt"),
        "contexts": [describe_context(context, writer, f"contexts.{i}") for i, context in enumerate(contexts)],
    }
    metadata = {"format": FORMAT, "version": VERSION, "about": json.dumps(about)}
    tensors = {name: copy_to_host(tensor) for name, tensor in writer.tensors.items()}
    with refuse_on_error(f"path={path}: cannot write the {WHAT}"), replace_file(path) as draft:
        draft.touch()
        mode = draft.stat().st_mode
        save_file(tensors, draft, metadata)  # safetensors makes a file that others cannot read
        draft.chmod(mode)


def read_contexts(path: Path, model: torch.nn.Module) -> tuple[list[GenerationContext], Tensor | None]:
    """Read what `write_contexts` wrote.

    Returns:
        The contexts, and the ids of their prompts, (samples, tokens), or None.

    Raises:
        SettingError: The file cannot be read or is no such file, or the context was made with another model, other
            weights or other files of a method or codec. The message says which.
    """
    where = f"path={path}"
    with open_weights(path, where, WHAT) as opened:
        metadata = opened.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise SettingError(f"{where}: is no {WHAT} of kvbench")
        if metadata.get("version") != VERSION:
            raise SettingError(
                f"{where}: has version {metadata.get('version')} of the format, and this kvbench reads {VERSION}"
            )
        with refuse_on_error(f"{where}: cannot read the {WHAT}"):
            about = json.loads(metadata["about"])
            compare_models(where, about["model"], describe_model(model))
            choice = choose_cache(*(make_part(where, group, about["policy"][group]) for group in GROUPS))
            devices = {weight.device for weight in model.parameters()}
            reader = Reader(find_kinds(choice), opened, devices.pop() if len(devices) == 1 else None)
            contexts = [make_context(model, choice, described, reader) for described in about["contexts"]]
            return contexts, reader.read(about["prompt"])


def copy_to_host(tensor: Tensor) -> Tensor:
    """Return a copy in memory of its own, as safetensors needs it."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


# The model


def describe_model(model: torch.nn.Module) -> dict[str, Any]:
    """Return what identifies a model: its settings, with the device and dtype of its weights, and their hash."""
    config, weight = text_config(model).to_dict(), next(model.parameters())
    counted = {name: value for name, value in config.items() if name not in UNCOUNTED and name[0] != "_"}
    counted |= {"device": weight.device.type, "dtype": str(weight.dtype).removeprefix("torch.")}
    return {"settings": json.loads(json.dumps(counted, default=str)), "weights": hash_weights(model)}


def compare_models(where: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise a SettingError unless a context was made with this model (`describe_model`).

    Settings that only one of two versions of transformers knows do not count.
    """
    ours = now["settings"]
    for name, value in then["settings"].items():
        if name in ours and ours[name] != value:
            line = f"{name} is {format_value(ours[name])}, and was {format_value(value)}"
            raise SettingError(f"{where}: was made with another model: {line}")
    if then["weights"] != now["weights"]:
        raise SettingError(
            f"{where}: was made with other weights: their hash is {now['weights']}, and was {then['weights']}"
        )


# The method, the allocator and the codec


def list_parts(choice: CachePolicy) -> dict[str, Any]:
    """Return the method, the allocator and the codec of a policy by their groups."""
    return {group: getattr(choice, group) for group in GROUPS}


def find_kinds(choice: CachePolicy) -> dict[str, type]:
    """Return the classes of values that are saved: dataclasses and named tuples, by name."""
    modules = {name: None for part in list_parts(choice).values() for name in list_modules(part)}
    classes = [value for name in modules for value in vars(sys.modules[name]).values() if isinstance(value, type)]
    return {kind.__name__: kind for kind in (*classes, *KINDS) if is_dataclass(kind) or hasattr(kind, "_fields")}


def list_modules(part: Part) -> Iterator[str]:
    """Yield the modules of a part's classes, and of those of a part that it holds, as a composite does."""
    yield from (kind.__module__ for kind in type(part).__mro__)
    for field in fields(part):
        if isinstance(value := getattr(part, field.name), Part):
            yield from list_modules(value)


def describe_part(group: str, part: Part) -> dict[str, Any]:
    """Return the name and the settings of a part, and the hash of its file.

    Args:
        group: "method", "allocator" or "codec".
        part: The part.

    Raises:
        SettingError: The name and the settings do not make the same part.
    """
    where = f"{group}={part.name}"
    writer, settings = Writer({}, where), {}
    for field in fields(part):
        value = getattr(part, field.name)
        if isinstance(value, GROUPS[group]):  # the base of a composite
            settings[field.name] = {"part": describe_part(group, value)}
        elif field.init and field.name != "name":
            settings[field.name] = writer.write(value, f"its setting {field.name}")
    if part.name not in list_choices(group) or find_class(group, part.name) is not type(part):
        raise SettingError(f"{where}: the context cannot be saved, because this {group} has no file in conf/{group}")
    described = {"name": part.name, "settings": settings, "content": hash_file(part)}
    if make_part(where, group, described) != part:
        raise SettingError(f"{where}: the context cannot be saved, because its settings do not make this {group} again")
    return described


def make_part(where: str, group: str, described: Mapping[str, Any]) -> Any:
    """Make a part that `describe_part` described.

    Args:
        where: What messages begin with.
        group: "method", "allocator" or "codec".
        described: The description.

    Raises:
        SettingError: There is no such part or setting, or its file is missing or not what it was.
    """
    name, reader = described["name"], Reader({})
    require_choice(f"{where}: {group}", name, list_choices(group))
    settings = {
        key: make_part(where, group, value["part"])
        if isinstance(value, dict) and "part" in value
        else reader.read(value)
        for key, value in described["settings"].items()
    }
    part = find_class(group, name)(name=name, **settings)
    if hash_file(part) != described["content"]:
        raise SettingError(f"{where}: was made with another content of {group}.path={part.path}")
    return part


def hash_file(part: object) -> str | None:
    """Return the hash of the file or folder that a part reads, or None if it reads none."""
    path = getattr(part, "path", None)
    return None if path is None else content_hash(Path(path).expanduser())


def find_class(group: str, name: str) -> Any:
    """Return the class that conf/<group>/<name>.yaml names."""
    return load_class(f"{group}={name}", load_settings(group, name)["_target_"])


# Contexts


def describe_context(context: GenerationContext, writer: Writer, name: str) -> dict[str, Any]:
    """Return a context as JSON, and hand its tensors to the writer, whose names begin with `name`."""
    context.leave_path()
    snapshot = context.snapshot()
    values: dict[str, Any] = {key: getattr(snapshot, key) for key in OF_SNAPSHOT}
    values |= {key: getattr(context, key) for key in ("budget", "block_size", "seeds", "prefix")}
    values |= {"peak": snapshot.memory[1], "frequencies": describe_frequencies(snapshot.frequencies)}
    described = {key: writer.write(value, f"{name}.{key}") for key, value in values.items()}
    described["layers"] = [
        describe_layer(layer, held, writer, f"{name}.layers.{layer.index}")
        for layer, held in zip(context.own_layers, snapshot.layers, strict=True)
    ]
    return described


def describe_layer(layer: Layer, snapshot: LayerSnapshot, writer: Writer, name: str) -> dict[str, Any]:
    """Return a layer as JSON. See `describe_context`."""
    rows, facts = snapshot.rows.without_room(), None
    if isinstance(rows.stored, Guarded):
        facts, rows = dict(rows.stored.owner.facts), replace(rows, stored=rows.stored.owner.subject)
    values: dict[str, Any] = {key: getattr(snapshot, key) for key in OF_LAYER}
    values |= {"rows": replace(rows, rotate=None), "rotates": rows.rotate is not None, "packed": facts}
    return {key: writer.write(value, f"{name}.{key}", find_codec(layer)) for key, value in values.items()}


def make_context(
    model: torch.nn.Module, choice: CachePolicy, described: Mapping[str, Any], reader: Reader
) -> GenerationContext:
    """Make a context that `describe_context` described."""
    values = {key: reader.read(value) for key, value in described.items() if key != "layers"}
    values.setdefault("recurrent", [])  # of models without such states, older files say nothing
    context = GenerationContext(
        model, choice, values["budget"], values["block_size"], values["seeds"], values["prefix"]
    )
    for window, (keys, tensors, _) in zip(context.sliding_layers(), values["sliding"], strict=True):
        window.update(keys[:, :, :0], tensors[:, :, :0])  # which makes it ready for tensors of this kind
    modules, layers = list_decoder_layers(model), []
    for port, layer, saved in zip(context.ports(), context.own_layers, described["layers"], strict=True):
        layers.append(make_layer_snapshot(layer, port.make_key_rotation(modules[layer.index]), saved, reader))
    frequencies = context.cache.frequencies
    if frequencies is not None:
        restore_frequencies(frequencies, values["frequencies"])
    state = {key: values[key] for key in OF_SNAPSHOT}
    memory = context.memory.held, values["peak"]
    context.restore(ContextSnapshot(layers=layers, frequencies=frequencies, memory=memory, **state))
    for layer in context.own_layers:
        layer.update_memory()
    return context


def make_layer_snapshot(
    layer: Layer, rotate: KeyRotation, described: Mapping[str, Any], reader: Reader
) -> LayerSnapshot:
    """Make a snapshot of an empty layer that brings it to the state that `describe_layer` described.

    Args:
        layer: The layer.
        rotate: Norms and rotates its keys.
        described: The description.
        reader: The reader of the file.
    """
    values = {key: reader.read(value, find_codec(layer)) for key, value in described.items()}
    rows: StoredRows = values["rows"]
    if values["packed"] is not None:
        owner = cast(Guarded, layer.codec).owner
        rows = replace(rows, stored=guard_rows(Call(owner, "pack", ()), rows.stored, **values["packed"]))
    if values["rotates"]:
        rows = replace(rows, rotate=rotate)
    state = {key: values[key] for key in OF_LAYER}
    return LayerSnapshot(rows=rows, shown=None, stamped=(), kept=layer.guard.handed(), **state)


def find_codec(layer: Layer) -> Codec:
    """Return the codec of a layer without its guard."""
    codec: Codec = cast(Guarded, layer.codec).owner.subject
    return codec


def describe_frequencies(frequencies: Frequencies | None) -> tuple[Any, ...] | None:
    """Return what changes in the rotary frequencies of a context: plain attributes, buffers and the length read."""
    if frequencies is None:
        return None
    attributes, buffers = frequencies.state
    plain = {name: value for name, value in attributes.items() if isinstance(value, (*JSON, Tensor))}
    return plain, buffers, frequencies.longest


def restore_frequencies(frequencies: Frequencies, described: tuple[Any, ...]) -> None:
    """Bring the frequencies of a new context to the state that `describe_frequencies` described."""
    plain, changed, frequencies.longest = described
    attributes, buffers = frequencies.state
    attributes |= plain
    buffers |= changed
