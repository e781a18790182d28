"""Convert GGUF files into folders that kvbench loads like any other checkpoint.

transformers can read a GGUF file, but it needs tens of seconds for a small one, and a model that was read from a GGUF
file cannot be saved as it is. kvbench therefore converts a file once, into bfloat16 safetensors in the folder
`.models`. Every later run loads the converted folder, which gets its name only when it is complete.

transformers' GGUF reader (5.5 to 5.17) ignores parts of a file. This module adds these parts or refuses the file:

* It takes the end token from the field of the first token. The module sets all special tokens from the file's header.
* It splits the text of every byte-level tokenizer as GPT-2 does. The module sets the pre-tokenizer that the header
  names if it knows it (`PRE_TOKENIZERS`). It refuses the others, because the model would read other tokens than it was
  trained on.
* It does not read the size of a head for every architecture. The module takes it from the header.
* It ignores RoPE scaling (`rope.scaling.type`, `rope_freqs.weight`). The module refuses such files.
* It fills tensors that a file lacks with random numbers, drops those that it does not know, and adds no first token.
  The module refuses the former and follows the header in the latter.
"""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from gguf import GGUFReader, GGUFValueType
from safetensors import SafetensorError
from tokenizers import Regex, decoders, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kvbench.models.converted_folders import find_folder, make_folder
from kvbench.models.silence import silence_transformers
from kvbench.validation import SettingError, name_file_in_errors, summarize

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")  # as GGUF names them; Mistral's files say llama
SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # ours -> the header's
LLAMA3_WORDS = (  # meta-llama/Meta-Llama-3-8B, tokenizer.json
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# keys of the JSON files that transformers writes about itself and the machine, not about the model
VOLATILE = ("transformers_version", "_model_name_or_path", "is_local", "local_files_only")
# pre-tokenizers whose texts begin with the first token if the header does not say it, as in llama.cpp
BEGINNING = (None, "llama-bpe")
PLAIN = {None, 1.0}  # RoPE factors that scale nothing
PROBE = "It's 2048 tokens,\n\n  and a few more: über."  # a text that a reloaded tokenizer must read alike


def split_digits() -> pre_tokenizers.PreTokenizer:
    """Make the pre-tokenizer of SmolLM2 (HuggingFaceTB/SmolLM2-135M-Instruct): every digit is a token."""
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def split_like_llama3() -> pre_tokenizers.PreTokenizer:
    """Make the pre-tokenizer of Llama 3."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


# names in a header's `tokenizer.ggml.pre`; None if transformers' conversion already sets the pre-tokenizer
PRE_TOKENIZERS = {"smollm": split_digits, "llama-bpe": split_like_llama3, "qwen2": None, "gpt-2": None}


@dataclass(frozen=True)
class Header:
    """The header of a GGUF file."""

    architecture: str
    pre_tokenizer: str | None
    """None for a tokenizer that is not byte-level."""
    special_tokens: dict[str, int]
    """Token ids by name, such as "eos"."""
    adds_bos: bool
    """Whether a text begins with the first token."""
    head_dim: int | None
    """None if it is the hidden size divided by the number of heads."""
    tensors: int
    """Number of tensors."""
    weights: int
    """Number of weights in all tensors."""


class BoundedReader(GGUFReader):
    """gguf's reader, which refuses an array that is longer than the file before it makes a list of its elements."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type == GGUFValueType.ARRAY:
            [length] = self._get(orig_offs + 4, np.uint64)
            if length > self.data.nbytes:
                raise ValueError(f"an array of {length} elements in a file of {self.data.nbytes} bytes")
        return super()._get_field_parts(orig_offs, raw_type)


def read_header(path: Path) -> Header:
    """Read the header of a GGUF file.

    Raises:
        SettingError: The file is no GGUF file, is damaged or truncated, or holds a model that cannot be converted.
    """
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise SettingError(f"model.path={path}: it is no GGUF file, although its name ends with .gguf")
        reader = BoundedReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items() if len(field.data) <= 1}
        tensors = {tensor.name: int(tensor.n_elements) for tensor in reader.tensors}
    except OSError as error:
        raise SettingError(f"model.path={path}: cannot be read ({error.strerror})") from None
    except SettingError:
        raise
    except Exception as error:  # the reader may fail in any way on a damaged file
        raise SettingError(f"model.path={path}: it is damaged or truncated ({summarize(error)})") from None
    architecture = str(fields.get("general.architecture"))
    if architecture not in ARCHITECTURES:
        raise SettingError(
            f"model.path={path}: its architecture {architecture} cannot be read from GGUF; use one of "
            f"{', '.join(ARCHITECTURES)}, or the model's safetensors"
        )
    rope = {name.removeprefix(f"{architecture}.rope."): value for name, value in fields.items()}
    scaled = (
        rope.get("scaling.type", "none") != "none" or {rope.get("scaling.factor"), rope.get("scale_linear")} - PLAIN
    )
    if scaled or any(name.startswith(("rope_freqs", "rope_factors")) for name in tensors):
        raise SettingError(f"model.path={path}: its RoPE scaling cannot be read from GGUF; use the model's safetensors")
    kind, pre = fields.get("tokenizer.ggml.model"), None
    if kind == "gpt2":
        pre = str(fields.get("tokenizer.ggml.pre"))
        if pre not in PRE_TOKENIZERS:
            raise SettingError(
                f"model.path={path}: its pre-tokenizer {pre} cannot be read from GGUF; use one of "
                f"{', '.join(PRE_TOKENIZERS)}, or the model's safetensors"
            )
    elif kind != "llama":  # SentencePiece
        raise SettingError(f"model.path={path}: its tokenizer {kind} cannot be read; use gpt2 or llama")
    names = {role: f"tokenizer.ggml.{theirs}_token_id" for role, theirs in SPECIAL_TOKENS.items()}
    special = {role: int(fields[name]) for role, name in names.items() if name in fields}
    known = len(reader.fields["tokenizer.ggml.tokens"].data) if "tokenizer.ggml.tokens" in reader.fields else 0
    if wrong := {role: number for role, number in special.items() if not 0 <= number < known}:
        raise SettingError(f"model.path={path}: it is damaged: {wrong} are not among its {known} tokens")
    adds_bos = bool(fields.get("tokenizer.ggml.add_bos_token", pre in BEGINNING)) and "bos" in special
    head_dim = fields.get(f"{architecture}.attention.key_length")
    return Header(architecture, pre, special, adds_bos, head_dim, len(tensors), sum(tensors.values()))


def convert(source: Path, header: Header, target: Path) -> None:
    """Write the model and the tokenizer of a GGUF file into the folder `target`, as bfloat16 safetensors.

    The same file gives the same bytes. Other versions of transformers give the same weights, but may write the
    tokenizer's files in another way.

    Raises:
        SettingError: transformers cannot read the file, or not all of its tensors, or loads another tokenizer.
        OSError: The folder cannot be written.
    """
    where: dict[str, Any] = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    try:
        with silence_transformers():
            config = AutoConfig.from_pretrained(**where)
            config.head_dim = header.head_dim or config.hidden_size // config.num_attention_heads
            loaded = AutoModelForCausalLM.from_pretrained(**where, config=config, dtype=torch.bfloat16)
            tokenizer = AutoTokenizer.from_pretrained(**where)
        config = loaded.config
        vars(config).pop("quantization_config", None)  # the weights are plain now, and save_pretrained would refuse
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.load_state_dict(loaded.state_dict(), assign=True)
        model.tie_weights()
    except Exception as error:  # transformers may fail in any way
        raise SettingError(f"model.path={source}: transformers cannot read it ({summarize(error)})") from None
    parameters = list(model.parameters())  # tied ones count once
    numbers = sum(tensor.numel() for tensor in parameters)
    if (len(parameters), numbers) != (header.tensors, header.weights):
        raise SettingError(
            f"model.path={source}: it has {header.tensors} tensors with {header.weights} numbers; a {config.model_type}"
            f" of its shape has {len(parameters)} with {numbers}"
        )
    set_tokens(tokenizer, header)
    with name_file_in_errors(target), silence_transformers():
        try:
            model.save_pretrained(target)
            tokenizer.save_pretrained(target)
        except SafetensorError as error:  # safetensors raises it for an OSError
            number = re.search(r"os error (\d+)", str(error))
            code = int(number[1]) if number else 0
            raise OSError(code, os.strerror(code) if number else str(error), str(target)) from None
        for path in target.glob("*config.json"):
            said = json.loads(path.read_text())
            for key in VOLATILE:
                said.pop(key, None)
            path.write_text(json.dumps(said, indent=2, sort_keys=True) + "\n")
    with silence_transformers():
        again = AutoTokenizer.from_pretrained(target)
    written, read = (either.backend_tokenizer.encode(PROBE).ids for either in (tokenizer, again))
    if written != read:
        raise SettingError(
            f"model.path={source}: transformers {transformers.__version__} changes its tokenizer when it loads it; use "
            "5.17 or newer"
        )


def set_tokens(tokenizer: Any, header: Header) -> None:
    """Set the special tokens and the pre-tokenizer of the header in a tokenizer that transformers converted."""
    for role, number in header.special_tokens.items():
        setattr(tokenizer, f"{role}_token", tokenizer.convert_ids_to_tokens(number))
    if header.adds_bos:
        first, number = tokenizer.bos_token, header.special_tokens["bos"]
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", pair=f"{first} $A {first} $B", special_tokens=[(first, number)]
        )
    if header.pre_tokenizer is None:
        return
    if make := PRE_TOKENIZERS[header.pre_tokenizer]:
        tokenizer.backend_tokenizer.pre_tokenizer = make()
        tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    tokenizer.clean_up_tokenization_spaces = False  # made for WordPiece; transformers ignores it with a warning


def make_converted(
    source: Path, header: Header, source_hash: str, target: Path, weights_hash: str | None = None
) -> None:
    """Convert a file into a folder, which gets its name when it is complete. The caller holds the folder's lock.

    Args:
        source: A GGUF file.
        header: The header that `read_header` returned.
        source_hash: The hash of the file, which is written into the folder's `conversion.json`.
        target: The folder.
        weights_hash: The value that `hash_weights` of the folder must have. None allows any value.

    Raises:
        SettingError: The file cannot be converted, the disk is full, or the weights have another hash.
        OSError: The folder cannot be written.
    """
    make_folder(
        source, source_hash, target, header.weights, lambda folder: convert(source, header, folder), weights_hash
    )


def find_converted(source: Path) -> Path:
    """Return the converted folder of a GGUF file. Convert the file if the folder is missing.

    Raises:
        SettingError: The file cannot be converted, or the disk is full.
    """
    return find_folder(
        source, "model.path", lambda known, target: make_converted(source, read_header(source), known, target)
    )
