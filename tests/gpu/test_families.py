"""A miniature of each family on a GPU: its own eager attention is the truth there too, and graphs decode as modules do.

`make test-gpu` on a machine with a GPU. In bfloat16 kvbench may differ from the model in float32 as much as the model's
own attention does. There a text counts by the median of its tokens, because rounding exchanges the experts of a few.
"""

import copy

import pytest
import torch

from kvbench.cache.policy import choose_cache
from kvbench.config.catalogue import build, load_settings
from kvbench.engine.generation import GenerationContext
from kvbench.engine.sampling import Sampling
from kvbench.interfaces.budget import Budget
from kvbench.models import probe
from kvbench.models.layouts import ARCHITECTURES
from kvbench.models.probe import PROMPT, Trial
from tests.support.families import choose_types, make_trial
from tests.support.selection import choose_quick

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
CLOSE = 1e-3  # of the spread, in float32: products of a GPU are summed in another order
ANSWER = 16  # tokens, which graphs read at once
SHARE = 0.3  # of the rows stay
TYPES = [
    pytest.param(*case.values, marks=pytest.mark.rest) if hasattr(case, "values") else case
    for case in choose_quick(ARCHITECTURES, *choose_types())
]


def move(trial: Trial, dtype: torch.dtype) -> torch.nn.Module:
    """A copy of the miniature on the GPU."""
    return copy.deepcopy(trial.model).to("cuda", dtype)


def read(model: torch.nn.Module, ids: torch.Tensor, method: str, graphs: bool) -> GenerationContext:
    settings = {"full": 1.0, "snapkv": SHARE}
    parts = (build(group, load_settings(group, name)) for group, name in (("allocator", "uniform"), ("codec", "raw")))
    choice = choose_cache(build("method", load_settings("method", method)), *parts)
    context = GenerationContext(model, choice, Budget(settings[method]), None, (0,), compile=graphs, answer=64)
    context.prefill(ids[:, :PROMPT])
    return context


def measure_median(given: torch.Tensor, truth: torch.Tensor) -> float:
    """The median of the tokens' differences, each a root mean square, as a part of the logits' spread."""
    errors = (given - truth).square().mean(-1).sqrt() / truth.std()
    return float(errors.median().nan_to_num(torch.inf))


@pytest.mark.parametrize("name", TYPES)
def test_the_full_cache_reads_as_eager_does(name):
    trial = make_trial(name)
    truth = trial.truth.logits[0, PROMPT - 1 :]
    for dtype, measure in ((torch.float32, probe.measure), (torch.bfloat16, measure_median)):
        model, ids = move(trial, dtype), trial.ids.cuda()
        with torch.no_grad(), probe.use_attention(model, "eager"):
            eager = probe.run(model, ids).float().cpu()[0, PROMPT - 1 :]
        context = read(model, ids, "full", graphs=False)
        given = torch.cat([context.last_logits, context.extend(ids[:, PROMPT:])[0]]).float().cpu()
        assert measure(given, truth) <= 2 * measure(eager, truth) + CLOSE


@pytest.mark.parametrize("method", ["full", "snapkv"])
@pytest.mark.parametrize("name", TYPES)
def test_graphs_decode_what_modules_decode(name, method):
    model, ids = move(make_trial(name), torch.float32), make_trial(name).ids.cuda()
    modules, graph = (read(model, ids, method, graphs) for graphs in (False, True))
    answers = [torch.stack(list(context.generate(ANSWER, Sampling(), frozenset())), 1) for context in (modules, graph)]
    assert modules.decoding == "modules"
    if ARCHITECTURES[name].graphs:
        assert graph.decoding == "graph"
    if torch.equal(*answers):  # else two tokens were as likely
        assert probe.measure(graph.last_logits.cpu(), modules.last_logits.cpu()) <= CLOSE
    assert (answers[0] == answers[1]).float().mean() >= 0.5
