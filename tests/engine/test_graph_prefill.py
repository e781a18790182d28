"""Blocks read by the step of their own leave what the modules leave."""

import pytest
import torch

from kvbench.config.catalogue import methods_available
from kvbench.engine.compressed_cache import choose_cache
from kvbench.engine.generation import GenerationContext
from kvbench.engine.graph_prefill import GraphPrefill
from kvbench.engine.quota_rows import repeats_cuts
from kvbench.engine.sampling import Sampling
from kvbench.interfaces.budget import Budget
from kvbench.models.decoder_weights import collect_weights
from kvbench.validation import ContractError
from tests.support.answer_paths import assert_same
from tests.support.method_files import build_policy
from tests.support.tiny_models import ids, tiny

CAPTURABLE = (
    "andpro", "cake", "centroidkv", "criticalkv", "dropkv", "h2o", "keydiff", "knorm", "qfilters", "random", "sink",
    "snapkv", "tova", "triattention",
)  # fmt: skip


def choice_of(method, allocator="uniform", codec="raw", **more):
    return choose_cache(*build_policy(method, allocator, "llama", codec, **more))


def read(model, choice, size, budget, prompt, stepped):
    context = GenerationContext(model, choice, Budget(budget), size, tuple(range(len(prompt))), compile=False)
    context.weights = collect_weights(model) if stepped else None
    context.prefill(prompt.to(next(model.parameters()).device))
    return context


@pytest.mark.cover
@pytest.mark.parametrize("model", ["llama", "qwen3", "phi3", "gemma3"])
@pytest.mark.parametrize("method", CAPTURABLE)
@pytest.mark.parametrize(("size", "budget", "tokens"), [(7, 24, 80), (16, 0.2, 128), (30, 10, 191)])
def test_blocks_leave_what_the_modules_leave(method, size, budget, tokens, model, monkeypatch):
    prompt = torch.cat([ids(tokens, seed) for seed in range(2)])
    calls = []
    own = GenerationContext.count_tokens
    monkeypatch.setattr(
        GenerationContext, "count_tokens", lambda self, tokens: (calls.append(tokens), own(self, tokens))
    )
    read_all = GraphPrefill.read
    # a block is read on empty rows first, as capturing does on a GPU
    monkeypatch.setattr(GraphPrefill, "read", lambda self: (self.one(), read_all(self)))
    choice = choose_cache(*build_policy(method, "uniform", model))
    modules, step = (read(tiny(model), choice, size, budget, prompt, on) for on in (False, True))
    assert len(calls) == 1 and calls[0] % size == 0 and calls[0] > 4 * size
    assert torch.allclose(modules.logits, step.logits, atol=1e-4)
    assert modules.seen == step.seen == tokens
    assert_same(modules, step)
    for one, other in zip(modules.own_layers, step.own_layers, strict=True):
        assert one.tally.given_up == other.tally.given_up and one.tally.protected == other.tally.protected
    answers = [torch.stack(list(context.generate(9, Sampling(), frozenset()))) for context in (modules, step)]
    assert torch.equal(*answers)


def test_blocks_that_fit_the_quota_are_read_together_and_not_too_many(monkeypatch):
    """A block's size bounds the memory that reading takes."""
    monkeypatch.setattr("kvbench.engine.context.MOST", 25)
    read_, sizes = GenerationContext._read, []
    monkeypatch.setattr(
        GenerationContext, "_read", lambda own, ids, *a, **k: sizes.append(ids.shape[1]) or read_(own, ids, *a, **k)
    )
    prompt = ids(150, 5)  # no two scores near each other where a cut falls
    step = read(tiny("llama"), choice_of("keydiff"), 8, 70, prompt, True)
    assert sizes == [24, 24, 16, 8, 6]  # 8 are cut to 70 rows, the blocks between are not the modules'
    modules = read(tiny("llama"), choice_of("keydiff"), 8, 70, prompt, False)
    kept = same = 0
    for one, other in zip(modules.own_layers, step.own_layers, strict=True):
        for rows, others in zip(*(own.rows.view().places.flatten(0, 1).tolist() for own in (one, other)), strict=True):
            kept, same = kept + len(rows), same + len(set(rows) & set(others))
        assert (one.tally.peak_rows, one.tally.peak_attended) == (other.tally.peak_rows, other.tally.peak_attended)
    assert same >= 0.97 * kept  # two scores nearly tie, and a CPU may round either way; of other blocks a fifth differs
    sizes.clear()
    read(tiny("llama"), choice_of("keydiff"), 8, 500, prompt, True)
    assert sizes == [24] * 6 + [6]


def test_who_repeats_cuts():
    assert set(CAPTURABLE) <= set(methods_available())
    assert all(repeats_cuts(choice_of(name)) for name in CAPTURABLE)
    assert not repeats_cuts(choice_of("keydiff", "ada"))
    assert not repeats_cuts(choice_of("dms_threshold")) and not repeats_cuts(choice_of("duo_attention"))


def test_who_moves_what_it_remembers():
    """Blocks of a prompt are then left to the modules."""
    over = choice_of("criticalkv", base="rkv", base_args={"window": 4})
    assert over.captures_state and choice_of("rkv").captures_state and not choice_of("criticalkv").captures_state


def test_scores_that_are_no_numbers_raise(monkeypatch):
    choice = choice_of("keydiff")
    own = type(choice.method).score

    def divide_by_zero(method, observation, rows, state):
        scores = own(method, observation, rows, state)
        return scores / (rows.places < 0) * 0 if isinstance(observation.first, torch.Tensor) else scores

    monkeypatch.setattr(type(choice.method), "score", divide_by_zero)
    with pytest.raises(ContractError, match="method=keydiff: score returned NaN"):
        read(tiny("llama"), choice, 16, 32, ids(160), True)
