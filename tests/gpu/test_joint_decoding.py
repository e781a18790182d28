"""Answers that CUDA graphs decode as one batch, against answers that are decoded alone.

`make test-gpu` on a machine with a GPU.
"""

from contextlib import ExitStack
from itertools import chain

import pytest
import torch
from transformers import LlamaForCausalLM

from kvbench.engine.compressed_cache import choose_cache
from kvbench.engine.generation import Answer, GenerationContext
from kvbench.engine.graph_decoding import CHUNK
from kvbench.engine.joint_decoding import Session, finish_answer, run_alone, run_together
from kvbench.engine.sampling import Sampling
from kvbench.interfaces.budget import Budget
from kvbench.store.runs import load_runs
from tests.support.answer_paths import read_given_both_ways
from tests.support.command_line import run_cli
from tests.support.gpu_models import make_llama
from tests.support.method_files import build_policy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
KINDS = [
    ("full", {}, "raw", 1.0),
    ("snapkv", {"allocator": "ada"}, "raw", 0.2),
    ("keydiff", {"decoding": True}, "raw", 0.2),
    ("tova", {"decoding": True}, "raw", Budget(0.2, "seen")),
    ("h2o", {"decoding": True}, "raw", 0.2),
    ("sink", {}, "raw", 0.2),
    ("quest", {}, "raw", 0.2),
    ("omnikv", {}, "raw", 0.2),
    ("pqcache", {}, "raw", 0.2),
    ("snapkv", {}, "kivi", 0.4),
]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return make_llama(torch.float32)


def make_contexts(model) -> list[GenerationContext]:
    contexts = []
    for number, (method, more, codec, budget) in enumerate(KINDS):
        allocator = more.get("allocator", "uniform")
        settings = {name: own for name, own in more.items() if name != "allocator"}
        choice = choose_cache(*build_policy(method, allocator, "llama", codec, **settings))
        own = budget if isinstance(budget, Budget) else Budget(budget)
        context = GenerationContext(model, choice, own, None, (0,), answer=64)
        generator = torch.Generator().manual_seed(number)
        context.prefill(torch.randint(3, 512, (1, 700 + 31 * number), generator=generator).to("cuda"))
        contexts.append(context)
    return contexts


def tell(context: GenerationContext, tokens: int, end: int | None = None) -> Session[list[int]]:
    """A session that answers and ends the answer after `end` tokens."""
    with context.branch():
        answer, found = Answer(context, tokens, Sampling(), frozenset()), []
        yield from finish_answer(answer, lambda token: found.append(int(token)) or len(found) != end)
        return found


@pytest.mark.parametrize("ends", [(None,) * len(KINDS), tuple(range(3, 3 + 4 * len(KINDS), 4))], ids=["whole", "ended"])
def test_graphs_of_many_contexts_give_what_each_alone_gives(model, ends):
    contexts = make_contexts(model)
    for tokens in (CHUNK + 30, 40):
        alone = [run_alone(tell(context, tokens, end)) for context, end in zip(contexts, ends, strict=True)]
        assert {context.decoding for context in contexts} == {"graph"}
        joined = run_together([tell(context, tokens, end) for context, end in zip(contexts, ends, strict=True)])
        assert [context.decoded_together for context in contexts] == [len(KINDS)] * len(KINDS)
        assert alone == joined
        for context in contexts:
            assert len(context.stamps) > 1 and context.stamps == sorted(context.stamps)


def test_graphs_read_given_tokens_as_modules_do(model):
    """In a branch. Codes of KIVI may now and then be the next ones."""
    pairs = list(zip(make_contexts(model), make_contexts(model), strict=True))
    question = torch.randint(3, 512, (1, CHUNK + 8), generator=torch.Generator().manual_seed(99)).to("cuda")
    with ExitStack() as stack:
        for context in chain(*pairs):
            stack.enter_context(context.branch())
        read_given_both_ways(pairs, question)
        for modules, own in pairs:
            assert (own.decoding, own.decoded_together, own.seen) == ("graph", len(KINDS), modules.seen)
            largest = modules.last_logits.abs().max()
            assert (own.last_logits - modules.last_logits).abs().max() <= 0.02 * largest, own.choice


def test_few_answers_of_a_sweep_change(tmp_path, monkeypatch, capsys):
    """In bfloat16 the batch rounds in another order. At most one answer of twenty may differ."""
    cells = ("-m", "method=snapkv,keydiff,quest,h2o", "budget=0.2,0.5", "task=ruler", "task.length=2048", "limit=3")
    outputs = []
    for shared in ("false", "true"):
        results = tmp_path / shared
        settings = ("model=reference", "device=cuda", f"sweep.share_decoding={shared}", f"results={results}")
        code, _, errors = run_cli([*cells, *settings], monkeypatch, capsys)
        assert code == 0, errors
        found = {(run.hash, uid): own for run in load_runs(results) for uid, own in run.records.items()}
        assert (max(own["decoded_together"] for own in found.values()) > 8) == (shared == "true")
        outputs.append({key: own["output"] for key, own in found.items()})
    changed = sum(outputs[0][key] != outputs[1][key] for key in outputs[0])
    assert outputs[0].keys() == outputs[1].keys() and changed <= 0.05 * len(outputs[0])
