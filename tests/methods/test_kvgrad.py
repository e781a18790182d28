"""KVgrad against its formula in float64: scores in loops, gradients by autograd through transformers' own cache."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from transformers import AttentionInterface, DynamicCache

import kvbench
from kvbench.config.catalogue import load_settings
from kvbench.methods.kvgrad import KVgrad
from kvbench.validation import ContractError, SettingError
from tests.support.oracles import find_top
from tests.support.selection import choose_quick
from tests.support.tiny_models import distinct, ids, make_double, tiny

FIRST, LATER, POSTFIX = [5, 6, 7], [9, 8], 4


def read(
    model: torch.nn.Module, tokens: list[int], cache: DynamicCache
) -> tuple[torch.Tensor, dict, list[torch.Tensor]]:
    """The last layer's output, queries, keys and values by layer, and a zero that was added to each layer's attention.

    The attention is written out here, so that nothing of kvbench's is differentiated.
    """
    seen: dict[int, tuple] = {}
    zeros, hidden = [], []

    def attention(module, query, key, value, mask, scaling, sliding_window=None, **kwargs):
        seen[module.layer_idx] = query.detach()[0], key.detach()[0], value.detach()[0], scaling
        groups, rows, count = query.shape[1] // key.shape[1], key.shape[2], query.shape[2]
        logits = query @ key.repeat_interleave(groups, 1).mT * scaling
        behind = torch.arange(rows)[None] - (torch.arange(count) + rows - count)[:, None]
        hides = (behind > 0) if sliding_window is None else (behind > 0) | (behind <= -sliding_window)
        p = logits.masked_fill(hides, -torch.inf).softmax(-1)
        return (p @ value.repeat_interleave(groups, 1)).transpose(1, 2), None

    def add_zero(module, args, output):
        zeros.append(torch.zeros_like(output, requires_grad=True))
        return output + zeros[-1]

    handles = [layer.self_attn.o_proj.register_forward_hook(add_zero) for layer in model.model.layers]
    handles.append(
        model.model.layers[-1].register_forward_hook(
            lambda module, args, output: hidden.append(output[0] if isinstance(output, tuple) else output)
        )
    )
    AttentionInterface.register("written_out", attention)
    before = model.config._attn_implementation
    model.set_attn_implementation("written_out")
    model(input_ids=torch.tensor([tokens]), past_key_values=cache)
    model.set_attn_implementation(before)
    for handle in handles:
        handle.remove()
    return hidden[0], seen, zeros


def score_rows(
    name: str, prompt: torch.Tensor, prefix: int, safe: int, chunk: int
) -> dict[tuple[int, int], np.ndarray]:
    """The score of every row by layer and head."""
    model, tokens, scores = make_double(name), prompt[0].tolist(), {}
    prompt_cache = DynamicCache(config=model.config)
    with torch.no_grad():
        read(model, tokens, prompt_cache)
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * len(model.model.layers)
    for start in range(prefix, len(tokens), chunk):
        stop = min(start + chunk, len(tokens))
        asked = FIRST if start == prefix else LATER + tokens[max(prefix, start - POSTFIX) : start]
        said = asked + tokens[start:stop]
        hidden, seen, zeros = read(model, said, deepcopy(prompt_cache))
        hidden.pow(2).sum().backward()
        for layer, (queries, keys, values, scaling) in seen.items():
            if kinds[layer] == "sliding_attention":
                continue
            lengths = zeros[layer].grad[0].norm(dim=-1).numpy()
            weight = model.model.layers[layer].self_attn.o_proj.weight.detach().numpy()
            first = min(safe, start)
            index = np.r_[:first, start:stop, len(tokens) : len(tokens) + len(said)]
            groups, dim = len(queries) // len(keys), keys.shape[2]
            for head, (key, value) in enumerate(zip(keys.numpy(), values.numpy(), strict=True)):
                most = np.zeros(len(index))
                for member in range(head * groups, (head + 1) * groups):
                    part = weight[:, member * dim : (member + 1) * dim]
                    norms = np.array([np.sqrt(((part @ value[j]) ** 2).sum()) for j in index])
                    for t, query in enumerate(queries[member].numpy()):
                        visible = len(index) - len(said) + t + 1
                        logits = key[index[:visible]] @ query * scaling
                        powers = np.exp(logits - logits.max())
                        own = powers / powers.sum() * norms[:visible] * lengths[t]
                        most[:visible] = np.maximum(most[:visible], own)
                own = scores.setdefault((layer, head), np.zeros(len(tokens)))
                own[start:stop] = most[first : first + stop - start]
    model.zero_grad(set_to_none=True)
    return scores


def arguments(**own: object) -> dict:
    return {"first": FIRST, "later": LATER, "postfix": POSTFIX, "chunk": 23} | own


@pytest.mark.cover
@pytest.mark.parametrize("prefix, sinks, chunk", [(0, 4, 23), (5, None, 20), (0, 0, 100)])
@pytest.mark.parametrize("name", choose_quick(["llama", "qwen3", "mistral", "gemma3", "phi3"], "llama", "gemma3"))
def test_scores_are_those_of_the_formula(name, prefix, sinks, chunk, monkeypatch):
    """In float64, of every row; and of each head the rows with the largest stay."""
    found: dict[int, torch.Tensor] = {}
    monkeypatch.setattr(
        KVgrad, "score", lambda self, seen, rows, state: found.setdefault(seen.layer, state.layer["scores"])
    )
    args = arguments(sinks=sinks, chunk=chunk, scope="head")
    held = kvbench.prefill(make_double(name), distinct(60), "kvgrad", 17, method_args=args, prefix=prefix)
    safe = prefix if sinks is None else sinks
    expected = score_rows(name, distinct(60), prefix, safe, chunk)
    assert {layer for layer, _ in expected} == set(found)
    for (layer, head), own in expected.items():
        np.testing.assert_allclose(found[layer][0, head].numpy(), own, rtol=1e-9, atol=1e-12)
        stays = find_top(np.where(np.arange(60) < safe, np.inf, own), 17)
        assert held.places(layer, head).tolist() == stays.tolist()


def test_all_layers_and_heads_compete():
    held = kvbench.prefill(make_double("llama"), distinct(60), "kvgrad", 17, method_args=arguments())
    scores = score_rows("llama", distinct(60), 0, 4, 23)
    rivals = sorted(((-own[row], key, row) for key, own in scores.items() for row in range(4, 60)))
    won = {(key, row) for _, key, row in rivals[: len(scores) * (17 - 4)]}
    for layer, head in scores:
        stays = [row for row in range(60) if row < 4 or ((layer, head), row) in won]
        assert held.places(layer, head).tolist() == stays


@pytest.mark.cover
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_nothing_remains_of_the_gradients(name, frozen):
    """Neither in rows, nor in weights, nor in the state; whether or not weights require gradients."""
    model = make_double(name)
    prompts = torch.cat([distinct(60, seed) for seed in (0, 3)])
    model.requires_grad_(not frozen)
    held = kvbench.prefill(model, prompts, "kvgrad", 17, method_args=arguments())
    alone = kvbench.prefill(model, prompts[1:], "kvgrad", 17, method_args=arguments())
    model.requires_grad_(True)
    for context in held.contexts:
        rows = [own for layer in context.own_layers for own in layer.rows.named_tensors().values()]
        assert not any(own.requires_grad for own in rows) and context.bytes().state == 0
        assert not any(layer.read or layer.fresh for layer in context.own_layers)
        assert context.reread_tokens == 60 + 3 + 2 * (2 + 4)
    assert all(own.grad is None for own in model.parameters())
    answers = held.extend(ids(3, batch=2))
    assert not answers.requires_grad and torch.equal(alone.extend(ids(3, batch=2)[1:])[0], answers[1])


def test_a_chunk_is_what_is_held():
    """Activations of a read with half of the tokens take less memory than those of the whole prompt."""

    def most_saved(chunk: int) -> int:
        total, most = 0, 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal total, most
            total += tensor.nbytes
            most = max(most, total)
            return tensor

        def work(module, args, output):
            nonlocal total
            total = 0  # a read begins

        model = tiny("llama")
        handle = model.model.embed_tokens.register_forward_hook(work)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            kvbench.prefill(model, ids(200), "kvgrad", 17, method_args=arguments(chunk=chunk))
        handle.remove()
        return most

    assert most_saved(25) < most_saved(100) / 2


@pytest.mark.parametrize("wrong", [lambda hidden: 3.0, lambda hidden: hidden, lambda hidden: hidden.sum().detach()])
def test_an_objective_must_be_a_number_with_a_gradient(wrong, monkeypatch):
    monkeypatch.setattr(KVgrad, "objective", lambda self, hidden: wrong(hidden))
    with pytest.raises(ContractError, match="^method=kvgrad: objective must return one number"):
        kvbench.prefill(tiny("llama"), ids(60), "kvgrad", 17, method_args=arguments())


def test_variants_differ_and_appends_while_decoding():
    def rows(**args) -> list[list[int]]:
        held = kvbench.prefill(tiny("llama"), distinct(60), "kvgrad", 17, method_args=arguments(**args))
        held.extend(ids(5))
        return [held.places(layer, head).tolist() for layer in range(len(held.contexts[0].layers)) for head in range(2)]

    found = [rows(**args) for args in ({}, {"chunk": 12}, {"scope": "head"}, {"sinks": 0}, {"first": [9, 9]})]
    assert len({str(own) for own in found}) == len(found)
    assert all(own[-5:] == list(range(60, 65)) for own in found[0])


def test_presets_are_the_sources_own():
    text = load_settings("method", "kvgrad")
    assert [text[name] for name in ("chunk", "sinks", "scope", "postfix")] == [256, 4, "model", 8]
    assert load_settings("method", "kvgrad", {"preset": "layerwise"})["scope"] == "head"
    assert load_settings("method", "kvgrad", {"preset": "kvpress_055"})["chunk"] == 512


@pytest.mark.parametrize(
    "where, line",
    [
        ({"block_size": 8}, "^block_size=8: kvgrad needs the prompt as one block"),
        ({"allocator": "ada"}, "^allocator=ada: kvgrad shares rows out itself; use method.scope=head or"),
        ({"method_args": {"chunk": 0}}, "^method.chunk=0: a whole number of at least 1"),
        ({"method_args": {"scope": "layer"}}, "^method.scope=layer: choose one of model, head"),
    ],
)
def test_what_is_refused(where, line):
    with pytest.raises(SettingError, match=line):
        kvbench.prefill(tiny("llama"), ids(20), "kvgrad", 5, **where)


def test_it_is_no_base_of_criticalkv():
    args = {"base": "kvgrad", "base_args": {"first": FIRST, "later": LATER}}
    with pytest.raises(SettingError, match="^method.base=kvgrad: values would count twice"):
        kvbench.prefill(tiny("llama"), ids(20), "criticalkv", 5, method_args=args)
