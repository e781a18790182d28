"""Run kvpress on the cases of a job and write which rows it keeps and which tokens follow.

test_kvpress.py here starts this script in the environment of `make parity`, where kvpress and the transformers version
that it needs are installed. The script therefore imports nothing of kvbench:

    python tests/parity/kvpress_reference.py job.json result.safetensors

A job names a model's folder, prompts (token ids) and groups of cases. The presses of a group share one prefill: each
press's own hook gets the arguments that kvpress would give it, and a cache of its own. A group that is `alone` has one
press that only masks rows; it runs as kvpress documents it: `with press(model): model(...)`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import kvpress
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache


class PatternFromFolder(kvpress.DuoAttentionPress):
    """DuoAttention with a pattern from a folder instead of from the web."""

    folder = ""

    def load_attention_pattern(self, model: torch.nn.Module) -> tuple[int, int, np.ndarray]:
        folder = Path(self.folder)
        sizes = json.loads((folder / "config.json").read_text())
        scores = np.loadtxt(folder / "full_attention_heads.tsv", delimiter="\t", ndmin=2)
        return sizes["sink_size"], sizes["recent_size"], np.clip(scores, 0, 1)


class FiltersFromFile(kvpress.QFilterPress):
    """Q-Filters with filters from a file instead of from the hub."""

    file = ""

    def load_q_filters(self, name: str) -> Tensor:
        return load_file(self.file)["q_filters"]


class NotedRotation(kvpress.KeyRerotationPress):
    """A press that turns the keys it keeps, and notes by layer which those are."""

    def rerotate_keys(self, module: torch.nn.Module, indices: Tensor, keys: Tensor) -> Tensor:
        self.noted = {**getattr(self, "noted", {}), module.layer_idx: indices}
        return super().rerotate_keys(module, indices, keys)


class NotedDecoding(kvpress.DecodingPress):
    """A press that cuts while decoding, and notes by layer the places of the rows it keeps, (KV heads, rows)."""

    def compress(self, module: torch.nn.Module, hidden_states: Tensor, keys: Tensor, *others: Any) -> Any:
        kept = super().compress(module, hidden_states, keys, *others)
        places = self.places_of(module.layer_idx, keys)
        self.noted = getattr(self, "noted", {})
        self.noted[module.layer_idx] = places.gather(-1, find_rows(kept[0][0], keys[0])), int(places.max()) + 1
        return kept

    def places_of(self, layer: int, keys: Tensor) -> Tensor:
        """(KV heads, n) places of all rows that the layer holds: those of the last cut, and the tokens since."""
        before, seen = getattr(self, "noted", {}).get(layer, (torch.zeros(keys.shape[1], 0, dtype=torch.int64), 0))
        new = torch.arange(seen, seen + keys.shape[2] - before.shape[1])
        return torch.cat([before, new.expand(keys.shape[1], -1)], -1)


def build_press(spec: dict[str, Any], ratio: float) -> kvpress.BasePress:
    """The press of a specification: its class, the class's arguments, and the file that it reads."""
    spec = dict(spec)
    name = spec.pop("class")
    if name == "DuoAttentionPress":
        press = PatternFromFolder(head_compression_ratio=ratio)
        press.folder = spec["file"]
        return press
    if name == "QFilterPress":
        press = FiltersFromFile(ratio)
        press.file = spec["file"]
        return press
    if name == "DecodingPress":
        return NotedDecoding(**{**spec, "base_press": build_press(spec["base_press"], 0.0)})
    if "press" in spec:
        own = NotedRotation if name == "KeyRerotationPress" else getattr(kvpress, name)
        return own(**{**spec, "press": build_press(spec["press"], ratio)})
    return getattr(kvpress, name)(compression_ratio=ratio, **spec)


class Several(kvpress.BasePress):
    """Presses that share a prefill. `caches` and `masks` (by layer) are what each of them leaves."""

    def __init__(self, presses: list[kvpress.BasePress]) -> None:
        self.presses = presses
        self.caches = [DynamicCache() for _ in presses]
        self.masks: list[list[Any]] = [[] for _ in presses]

    def post_init_from_model(self, model: torch.nn.Module) -> None:
        for press in self.presses:
            press.post_init_from_model(model)

    def forward_hook(self, module: torch.nn.Module, input: Any, kwargs: dict, output: Any) -> Any:
        layer = kwargs["past_key_values"].layers[module.layer_idx]
        for press, cache, masks in zip(self.presses, self.caches, self.masks, strict=True):
            cache.update(layer.keys, layer.values, module.layer_idx)  # copies them
            module.masked_key_indices = None
            press.forward_hook(module, input, {**kwargs, "past_key_values": cache}, output)
            masks.append(module.masked_key_indices)
        module.masked_key_indices = None
        return output


def attention_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [layer.self_attn for layer in model.model.layers]


def read_alone(model: torch.nn.Module, press: kvpress.BasePress, ids: Tensor) -> tuple[Tensor, DynamicCache, list[Any]]:
    """Logits (1, 1, vocab), the cache and the masks by layer that a press leaves."""
    cache = DynamicCache()
    with press(model):
        logits = model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits
    return logits, cache, [module.masked_key_indices for module in attention_modules(model)]


def continue_greedily(
    model: torch.nn.Module, logits: Tensor, cache: DynamicCache, masks: list[Any], position: int, tokens: int
) -> Tensor:
    """(tokens,) ids that follow, the first of them at `position`, decoded as kvpress's pipeline does. All of them are
    read into the cache.
    """
    for module, mask in zip(attention_modules(model), masks, strict=True):
        module.masked_key_indices = mask
    found = [logits[0, -1].argmax()]
    for place in range(position, position + tokens):
        places = torch.tensor([[place]])
        logits = model(input_ids=found[-1].view(1, 1), past_key_values=cache, position_ids=places).logits
        found.append(logits[0, -1].argmax())
    for module in attention_modules(model):
        module.masked_key_indices = None
    return torch.stack(found[:-1])


def cut_while_decoding(model: torch.nn.Module, press: NotedDecoding, ids: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Rows kept (layers, KV heads, n + tokens) and the tokens, where the prompt is read whole and the answer is cut."""
    cache, modules = DynamicCache(), attention_modules(model)
    logits = model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits
    with press(model):
        found = continue_greedily(model, logits, cache, [None] * len(modules), ids.shape[1], tokens)
    kept = torch.zeros(len(modules), cache.layers[0].keys.shape[1], ids.shape[1] + tokens, dtype=torch.bool)
    for layer, own in enumerate(cache.layers):
        kept[layer].scatter_(-1, press.places_of(layer, own.keys), True)
    return kept, found


def fingerprint(rows: Tensor) -> Tensor:
    """(..., n) int64, one number for the bits of each row (..., n, d)."""
    bits = rows.contiguous().view(torch.int32).long()
    odd = 2 * torch.randint(1 << 61, bits.shape[-1:], generator=torch.Generator().manual_seed(0)) + 1
    return (bits * odd).sum(-1)


def find_kept(press: kvpress.BasePress, cache: DynamicCache, masks: list[Any], full: DynamicCache | None) -> Tensor:
    """(layers, KV heads, n) bool: the rows that a press kept. Where it freed the others, the keys of the `full` cache
    tell which.
    """
    kept = []
    for layer, (own, mask) in enumerate(zip(cache.layers, masks, strict=True)):
        if mask is not None:
            present = torch.ones(own.keys.shape[1:3], dtype=torch.bool)
            present[mask[1:]] = False
        else:
            rows = full.layers[layer].keys[0]
            index = press.noted[layer][0] if isinstance(press, NotedRotation) else find_rows(own.keys[0], rows)
            present = torch.zeros(rows.shape[:2], dtype=torch.bool).scatter(-1, index, True)
        kept.append(present)
    return torch.stack(kept)


def find_rows(some: Tensor, rows: Tensor) -> Tensor:
    """(H, m) indices of `some` (H, m, d) among the `rows` (H, n, d), which are all different."""
    ordered, order = fingerprint(rows).sort(-1)
    assert (ordered.diff(dim=-1) != 0).all(), "two rows of a head are equal"
    wanted = fingerprint(some)
    place = torch.searchsorted(ordered, wanted).clamp(max=ordered.shape[-1] - 1)
    assert (ordered.gather(-1, place) == wanted).all(), "a row that was kept is none of the full cache's"
    return order.gather(-1, place)


@torch.no_grad()
def run(job: dict[str, Any]) -> dict[str, Tensor]:
    """Of each case `<name>.kept` (layers, KV heads, n) and `<name>.tokens`. n counts the prompt, and the answer where
    that is cut.
    """
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=getattr(torch, job["dtype"])).eval()
    prompts = {name: torch.tensor([ids]) for name, ids in job["prompts"].items()}
    found = {}
    for group in job["groups"]:
        ids = prompts[group["prompt"]]
        model.set_attn_implementation(group["attention"])
        presses = [build_press(case["press"], case["ratio"]) for case in group["cases"]]
        if isinstance(presses[0], NotedDecoding):
            for case, press in zip(group["cases"], presses, strict=True):
                kept, tokens = cut_while_decoding(model, press, ids, case["tokens"])
                found |= {f"{case['name']}.kept": kept, f"{case['name']}.tokens": tokens}
            continue
        full = None if group["alone"] else DynamicCache()
        if full is None:
            left = [read_alone(model, press, ids) for press in presses]
        else:
            several = Several(presses)
            with several(model):
                logits = model(input_ids=ids, past_key_values=full, logits_to_keep=1).logits
            left = [(logits, *own) for own in zip(several.caches, several.masks, strict=True)]
        for case, press, (logits, cache, masks) in zip(group["cases"], presses, left, strict=True):
            found[f"{case['name']}.kept"] = find_kept(press, cache, masks, full)
            position = cache.get_seq_length() if isinstance(press, NotedRotation) else ids.shape[1]
            found[f"{case['name']}.tokens"] = continue_greedily(model, logits, cache, masks, position, case["tokens"])
    return found


if __name__ == "__main__":
    save_file(run(json.loads(Path(sys.argv[1]).read_text())), sys.argv[2])
