"""Load tokenizers and weights with transformers, and make models with random weights.

transformers draws the weights that a checkpoint lacks at random and only warns. `load_weights` refuses such a
checkpoint, because a score of it says nothing.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedConfig
from transformers.utils import cached_file
from transformers.utils.quantization_config import Mxfp4Config

from kvbench.models.admission import admit_model
from kvbench.models.configuration import MXFP4, find_stored_format, load_configuration
from kvbench.models.int4 import (
    check_linear_share,
    count_quantized_bytes,
    fill_quantized,
    list_linear_layers,
    move_quantized,
)
from kvbench.models.layouts import read_head_dim, read_layer_config, read_value_dim
from kvbench.models.silence import silence_transformers
from kvbench.models.transformers_port import count_plain_states, find_factory, make_plain_cache, text_config
from kvbench.validation import SettingError, refuse_on_error, summarize

SHOWN = 3  # names of weights in a message
SAMPLES, SAMPLE = 16, 1 << 16  # pieces of a large tensor that its hash covers, and bytes of a piece
FINITE: WeakSet[torch.nn.Module] = WeakSet()  # models whose weights were checked


def load_tokenizer(path: str, revision: str | None = None) -> Any:
    """Load the tokenizer of a folder or of a model on the hub.

    Raises:
        SettingError: There is no tokenizer, it cannot be read, or it is not a fast one.
    """
    with refuse_on_error(f"model.path={path}: cannot read a tokenizer there"):
        tokenizer = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=False)
        len(tokenizer), tokenizer("a")  # a damaged one may fail only when it is used
    if not tokenizer.is_fast:
        raise SettingError(f"model.path={path}: its tokenizer gives no offsets; use a fast one (tokenizer.json)")
    return tokenizer


def load_weights(
    path: str,
    revision: str | None,
    device_map: str | None,
    dtype: torch.dtype,
    device: str,
    weights_format: str | None = None,
) -> torch.nn.Module:
    """Load a model from safetensors, ready to run.

    Args:
        path: A folder, or an id of the hub.
        revision: A revision of the hub.
        device_map: "auto" spreads the layers over all GPUs; None moves the model to `device`.
        dtype: The dtype of the weights.
        device: "cpu" or "cuda".
        weights_format: "int4" quantises the linear layers on their way to `device`; None keeps them in `dtype`.

    Raises:
        SettingError: The weights cannot be read, or most of them cannot be quantised. Some are missing, have no place
            in the model or another shape than in the model, or are not finite.
    """
    config = load_configuration(path, revision)
    if Path(path).is_dir():
        check_stored_size(Path(path), config)
    if weights_format is not None:
        check_linear_share(make_skeleton(config), "model.weights=int4")
    is_mxfp4 = find_stored_format(config) == MXFP4
    with refuse_on_error(f"model.path={path}: cannot read weights there"), silence_transformers():
        loaded: Any = find_factory(config).from_pretrained(
            path,
            config=config,
            revision=revision,
            dtype=dtype,
            trust_remote_code=False,
            use_safetensors=True,
            device_map=device_map,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # the report names them
            **({"quantization_config": Mxfp4Config(dequantize=True)} if is_mxfp4 else {}),
        )
    model, report = loaded
    if is_mxfp4:
        report = report | {"mismatched_keys": report["mismatched_keys"] or find_other_shapes(model, config)}
    check_report(path, report)
    if is_mxfp4:
        cast_dequantized(model, dtype)
    if weights_format is not None:
        model = move_quantized(model, device).eval()
    else:
        model = (model if device_map else model.to(device)).eval()
    assert isinstance(model, torch.nn.Module)
    admit_model(model)
    check_finite(model, f"model.path={path}", lambda: find_stored_fault(path, revision))
    return model


def find_other_shapes(model: torch.nn.Module, config: PreTrainedConfig) -> list[str]:
    """Return the names of the weights that have another shape than the configuration says.

    Some versions of transformers do not compare shapes if they make weights plain.
    """
    vars(config).pop("quantization_config", None)
    expected = {name: weight.shape for name, weight in make_skeleton(config).named_parameters()}
    return [name for name, weight in model.named_parameters() if weight.shape != expected.get(name)]


def cast_dequantized(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast the weights that transformers made plain to a dtype. It makes them in bfloat16, whatever it is asked for."""
    for weight in model.parameters():
        if weight.dtype == torch.bfloat16:
            weight.data = weight.data.to(dtype)


def check_report(path: str, report: Mapping[str, Any]) -> None:
    """Raise a SettingError if transformers reports weights that are missing, unexpected or of another shape.

    Args:
        path: The checkpoint, for the message.
        report: The loading report of `from_pretrained`. Weights that the architecture ties, and those that it says may
            be left out, are not in it.
    """
    faults = []
    kinds = {"missing": "missing_keys", "unexpected": "unexpected_keys", "of another shape": "mismatched_keys"}
    for kind, key in kinds.items():
        names = sorted(weight if isinstance(weight, str) else weight[0] for weight in report[key])
        if names:
            more = ", …" if len(names) > SHOWN else ""
            faults.append(f"{len(names)} {kind} ({', '.join(names[:SHOWN])}{more})")
    if faults or report.get("error_msgs"):
        faults += [summarize(ValueError(text)) for text in report.get("error_msgs", ())]
        raise SettingError(f"model.path={path}: its weights are not those of its config.json: {'; '.join(faults)}")


def check_stored_size(folder: Path, config: PreTrainedConfig) -> None:
    """Raise a SettingError if the files of a checkpoint are much too small for its configuration.

    transformers would allocate the missing weights before it reports them.

    Raises:
        SettingError: The files are too small, or one of them cannot be read.
    """
    text = config.get_text_config(decoder=True)
    least = text.vocab_size * text.hidden_size
    for index in range(text.num_hidden_layers):
        layer = read_layer_config(text, index)
        heads = layer.num_attention_heads * (read_head_dim(layer) + read_value_dim(layer))
        least += text.hidden_size * (heads + getattr(layer, "intermediate_size", 0))
    stored = 0
    for file in sorted(folder.glob("*.safetensors")):
        with refuse_on_error(f"model.path={folder}: cannot read {file.name}"), safe_open(file, "pt") as opened:
            stored += sum(torch.Size(opened.get_slice(key).get_shape()).numel() for key in opened.keys())  # noqa: SIM118
    if stored < least:
        raise SettingError(
            f"model.path={folder}: its *.safetensors hold {stored} weights, its config.json asks for {least} or more"
        )


def check_finite(model: torch.nn.Module, label: str, find_fault: Callable[[], str | None] | None = None) -> None:
    """Raise a SettingError if a weight of a model is NaN or infinite. A model is checked once.

    Every tensor is read once on its device, and the host waits once.

    Args:
        model: The model.
        label: What the message begins with.
        find_fault: Returns what is wrong with the stored weights, or None if they are finite, so that the cast to the
            model's dtype made the infinity. None if the weights were not loaded from files.
    """
    if model in FINITE:
        return
    named = {
        name: tensor for name, tensor in model.state_dict().items() if tensor.is_floating_point() and tensor.numel()
    }
    bad = list(find_not_finite(named))
    if bad:
        dtype = str(named[bad[0]].dtype).removeprefix("torch.")
        fault = None if find_fault is None else find_fault()
        if find_fault is not None and fault is None:
            fault = f"{bad[0]} does not fit into {dtype}; use dtype=bfloat16 or dtype=float32"
        raise SettingError(f"{label}: {fault or f'{bad[0]} is not finite ({dtype})'}")
    FINITE.add(model)


def hash_weights(model: torch.nn.Module) -> str:
    """Return 16 hex digits that identify the weights of a model in memory, on whatever device they are.

    Of a tensor over 1 MiB the hash covers 16 samples of 64 KiB.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if tensor.numel():
            content = tensor.detach().contiguous().flatten().view(torch.uint8)
            starts = range(0, len(content), max(SAMPLE, len(content) // SAMPLES))
            digest.update(torch.cat([content[start : start + SAMPLE] for start in starts]).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def find_not_finite(named: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield the names of the tensors that have a number that is not finite."""
    by_device: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for name, tensor in named.items():
        low, high = tensor.detach().aminmax()  # one pass, which hands NaN on
        by_device.setdefault(tensor.device, []).append((name, (low.float() - high.float()).isfinite()))
    for parts in by_device.values():
        flags = torch.stack([flag for _, flag in parts]).tolist()
        yield from (name for (name, _), is_finite in zip(parts, flags, strict=True) if not is_finite)


def find_stored_fault(path: str, revision: str | None) -> str | None:
    """Return which stored weight of a checkpoint is not finite, and in which file, or None if all are finite."""
    folder = path if Path(path).is_dir() else os.path.dirname(cached_file(path, "config.json", revision=revision) or "")
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (no mapping)
                tensor = opened.get_tensor(name)
                if tensor.is_floating_point() and any(find_not_finite({name: tensor})):
                    return f"{name} in {file.name} is not finite"
    return None


def find_stop_tokens(model: Any) -> frozenset[int]:
    """Return the token ids with which the model's generation_config, or else its config, ends an answer."""
    ids = model.generation_config.eos_token_id
    if ids is None:
        ids = text_config(model).eos_token_id
    return frozenset([] if ids is None else [ids] if isinstance(ids, int) else ids)


def make_random_model(
    config: PreTrainedConfig, dtype: torch.dtype, device: str, seed: int, weights_format: str | None = None
) -> torch.nn.Module:
    """Make a model with random weights. The global random state does not change.

    Its attention is the one that transformers chooses for its type: gpt-oss refuses `sdpa`, which has no sinks.

    Args:
        config: The model's configuration.
        dtype: The dtype of the weights.
        device: Where the weights are initialised, "cpu" or "cuda".
        seed: The seed of the weights.
        weights_format: "int4" quantises each linear layer when it is drawn; None keeps them in `dtype`.

    Raises:
        SettingError: Most weights cannot be quantised.
    """
    gpus = [torch.cuda.current_device()] if device == "cuda" else []
    made_on = device if weights_format is None else "meta"
    with torch.random.fork_rng(devices=gpus):
        torch.manual_seed(seed)
        with torch.device(made_on):
            model = find_factory(config).from_config(config, dtype=dtype).eval()
        assert isinstance(model, torch.nn.Module)
        if weights_format is not None:
            check_linear_share(model, "model.weights=int4")
            model = fill_quantized(model, device)
    admit_model(model)
    return model


def count_weight_bytes(config: Any, dtype: torch.dtype, weights_format: str | None) -> int:
    """Return the bytes that the weights of a model of this configuration take, tied ones once. It needs no memory.

    Args:
        config: The configuration.
        dtype: The dtype of the weights.
        weights_format: "int4", or None if all weights have the dtype.

    Raises:
        SettingError: transformers cannot make a model of it.
    """
    model = make_skeleton(config)
    saved = (
        0
        if weights_format is None
        else sum(
            layer.weight.numel() * dtype.itemsize - count_quantized_bytes(layer)
            for _, layer in list_linear_layers(model)
        )
    )
    return sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize - saved


def make_skeleton(config: Any) -> torch.nn.Module:
    """Return a model of a configuration whose weights have shapes and no memory.

    Raises:
        SettingError: transformers cannot make a model of it.
    """
    with refuse_on_error("model: its config.json makes no model"), torch.device("meta"):
        model = find_factory(config).from_config(config)
    assert isinstance(model, torch.nn.Module)
    return model


@torch.no_grad()
def count_states(config: Any, dtype: torch.dtype) -> int:
    """Return the bytes of a model's recurrent and convolutional states for one text. It needs no memory."""
    with silence_transformers(), torch.device("meta"):
        # grouped products of experts take bfloat16 alone where there are no numbers
        given = {"dtype": dtype, "attn_implementation": "eager", "experts_implementation": "batched_mm"}
        model = find_factory(config).from_config(config, **given)
        cache = make_plain_cache(model)
        model(input_ids=torch.zeros(1, 1, dtype=torch.long), past_key_values=cache, use_cache=True)
    return count_plain_states(cache)
