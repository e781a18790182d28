"""Cuts that are repeated from a captured one leave what each layer's own cut would."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvbench.cache.guard import Guard
from kvbench.cache.policy import CachePolicy
from kvbench.cache.refusals import find_refusal
from kvbench.config.catalogue import list_choices
from kvbench.engine import repeated_cuts, shared_prefill
from kvbench.engine.cuts_in_turn import ContextFailed
from kvbench.engine.generation import GenerationContext
from kvbench.interfaces.budget import Budget
from kvbench.interfaces.method import Captured, Method
from kvbench.interfaces.observation import Observation, State
from kvbench.interfaces.rows import Rows
from kvbench.models.decoder_weights import collect_weights
from tests.support.answer_paths import assert_same
from tests.support.method_files import build_policy
from tests.support.replayed_operations import ReplayedOperations
from tests.support.tiny_models import COMMON, heads, ids

LAYERS = 6
BUDGETS = ((0.2, 100), (24, 100))  # nothing is cut with the last one, so nothing is repeated
REPEATED = {
    "andpro",
    "cake",
    "centroidkv",
    "criticalkv",
    "dropkv",
    "expected_attention",
    "h2o",
    "keydiff",
    "knorm",
    "observed_attention",
    "rkv",
    "sink",
    "snapkv",
    "tova",
}
"""Methods whose cuts are repeated. Others are not capturable, ask for the layer, or share rows out themselves."""


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**COMMON, **heads(6, 2), num_hidden_layers=LAYERS)).double().eval()


@pytest.fixture(autouse=True)
def graphs(monkeypatch) -> list[ReplayedOperations]:
    """What was captured."""
    captured: list[ReplayedOperations] = []

    def record(work: Callable[[], None]) -> ReplayedOperations:
        captured.append(ReplayedOperations(work))
        return captured[-1]

    monkeypatch.setattr(repeated_cuts, "record_launches", record)
    monkeypatch.setattr(repeated_cuts, "can_capture", lambda model: True)
    return captured


def make(model, policies, stepped=True) -> list[GenerationContext]:
    """A context for each policy and its budget."""
    made = [GenerationContext(model, own, Budget(budget), None, (7, 8), 2, answer=9) for own, budget in policies]
    for context in made:
        context.weights = collect_weights(model) if stepped else None
    return made


def compare(model, policies, tokens=80) -> None:
    """Contexts that read together hold the same, and count the same, as those that read alone."""
    prompt = torch.cat([ids(tokens, seed) for seed in (7, 8)])
    together = make(model, policies)
    assert min(shared_prefill.prefill(together, prompt)) > 0
    for context, alone in zip(together, make(model, policies, stepped=False), strict=True):
        alone.prefill(prompt)
        assert_same(alone, context)
        assert context.memory.snapshot() == alone.memory.snapshot()
        assert context.bytes() == alone.bytes()
        assert torch.equal(context.logits, alone.logits)
        for layer, own in zip(context.own_layers, alone.own_layers, strict=True):
            assert torch.equal(layer.rows.view().keys, own.rows.view().keys)


def count_cut_here(monkeypatch) -> list[int]:
    """How many contexts each layer cut by itself."""
    counts: list[int] = []
    real = shared_prefill.FanOutLayer.measure

    def measure(self):
        counts.append(len(self.cut_here))
        return real(self)

    monkeypatch.setattr(shared_prefill.FanOutLayer, "measure", measure)
    return counts


@pytest.mark.parametrize(("lse", "part"), [(False, slice(0, None, 2)), (False, slice(1, None, 2)), (True, slice(None))])
def test_every_method_holds_the_same_as_alone(model, graphs, monkeypatch, lse, part):
    policies, repeated = [], 0
    for number, method in list(enumerate(list_choices("method")))[part]:
        own = CachePolicy(*build_policy(method, "uniform", "llama", ("raw", "kivi")[number // 2 % 2]))
        if find_refusal(own.method, own.allocator, own.codec):
            own = CachePolicy(*build_policy(method, "uniform", "llama"))
        if ("lse" in own.method.wants) == lse and not own.method.needs_extra_reads and not hasattr(own.method, "path"):
            policies += [(own, budget) for budget in (BUDGETS[number // 2 % 2] if method != "full" else (1.0,))]
            repeated += method in REPEATED
    counts = count_cut_here(monkeypatch)
    compare(model, policies)
    assert len(graphs) == 1 and repeated >= 2
    assert counts == [len(policies), *[len(policies) - repeated] * (LAYERS - 2), len(policies)]


@dataclass(frozen=True)
class Capturable(Method):
    """A method whose hooks a graph may capture, as it says."""

    kind: str = "plain"

    captured = Captured()

    def score(self, observation: Observation, rows: Rows, state: State) -> torch.Tensor:
        time.sleep(0.005)
        scores = rows.keys.norm(dim=-1) + observation.output_weight[0, 0]
        if self.kind == "layer":
            return scores * (-1) ** observation.layer
        if self.kind == "last layer":
            return -scores if observation.is_last_layer else scores
        if self.kind == "memory":
            state.layer["mean"] = scores.mean()
        if self.kind == "list":
            state.layer["several"] = [scores.mean()]
        if self.kind == "view":
            state.layer["newest"] = observation.queries[:, :, -4:]
        if self.kind == "layer later" and "known" in state.shared:
            return scores * (-1) ** observation.layer
        if self.kind == "sum":
            scores = state.shared["known"] = scores + state.shared.get("known", 0)
        if self.kind == "list of layers":
            state.shared.setdefault("means", []).append(scores.mean())
            return scores * state.shared["means"][0]
        if self.kind != "plain":
            state.shared.setdefault("known", scores.mean())
        return scores


def pick(*kinds: str) -> list[tuple[CachePolicy, float]]:
    rest = build_policy("knorm", "uniform", "llama")[1:]
    return [(CachePolicy(Capturable(kind, kind=kind), *rest), 0.3) for kind in kinds]


@pytest.mark.parametrize(
    ("kind", "cut_here", "captured"),
    [
        ("plain", 0, 1), ("layer", 1, 1), ("memory", 0, 1), ("list", 1, 1), ("view", 1, 1), ("last layer", 0, 1),
        ("layer later", 1, 2), ("sum", 1, 2), ("list of layers", 1, 2),
    ],
)  # fmt: skip
def test_a_context_whose_layers_differ_cuts_each_of_them_itself(model, graphs, monkeypatch, kind, cut_here, captured):
    """The second layer may show it, so that the others are captured again without this context."""
    counts = count_cut_here(monkeypatch)
    compare(model, pick("plain", kind))
    assert len(graphs) == captured and counts == [2, *[cut_here] * (LAYERS - 2), 2]


def test_contexts_that_share_scores_differ_together(model, graphs, monkeypatch):
    """Of two budgets of a policy that asks for the layer, one takes the scores of the other and is not asked itself."""
    counts = count_cut_here(monkeypatch)
    plain, asking = pick("plain", "layer")
    compare(model, [plain, asking, (asking[0], 0.5)])
    assert len(graphs) == 1 and counts == [3, *[2] * (LAYERS - 2), 3]


@pytest.mark.parametrize("error", [torch.cuda.OutOfMemoryError, RuntimeError])
def test_each_layer_is_cut_on_its_own_if_a_capture_fails(model, monkeypatch, error):
    """A method that waits for the device ends it. It is not tried again, but it is where only memory was lacking."""
    tried = []

    def fail(work: Callable[[], None]) -> None:
        tried.append(work)
        work()
        raise error("the capture ended")

    monkeypatch.setattr(repeated_cuts, "record_launches", fail)
    policies = pick("plain", "memory")
    for _ in range(2):
        compare(model, policies)
    assert len(tried) == (2 if error is torch.cuda.OutOfMemoryError else 1)


def test_an_error_of_a_hook_in_a_capture_comes_again_where_it_has_an_owner(model, graphs, monkeypatch):
    calls = []

    def score(self, seen, rows, state):
        calls.append(seen.layers)
        if len(calls) > 2:
            raise ValueError("no score")
        return rows.keys.norm(dim=-1)

    monkeypatch.setattr(Capturable, "score", score)
    contexts = make(model, pick("plain", "memory"))
    with pytest.raises(ContextFailed, match="^0$") as failed:
        shared_prefill.prefill(contexts, ids(80).expand(2, -1))
    assert "score of layer 1 raised ValueError: no score" in str(failed.value.__cause__)


def test_a_repeated_cut_counts_as_long_as_the_last_one(model, graphs):
    contexts = make(model, pick("plain", "memory"))
    assert min(shared_prefill.prefill(contexts, ids(80).expand(2, -1))) > 5 * LAYERS and len(graphs) == 1
    assert all(layer.asked is None for context in contexts for layer in context.own_layers)


@pytest.mark.parametrize("why", ["much to compute", "few layers", "exact guards", "no graphs"])
def test_nothing_is_captured(model, graphs, monkeypatch, why):
    policies = pick("plain", "memory")
    if why == "much to compute":
        monkeypatch.setattr(repeated_cuts, "MOST", 1)
    elif why == "few layers":
        monkeypatch.setattr(repeated_cuts, "FEWEST", LAYERS + 1)
    elif why == "exact guards":
        policies = [(replace(policy, exact=True), budget) for policy, budget in policies]
    counts = count_cut_here(monkeypatch)
    contexts = make(model, policies, stepped=why != "no graphs")
    shared_prefill.prefill(contexts, ids(80).expand(2, -1))
    assert counts == [2] * LAYERS and not graphs


@pytest.mark.parametrize("layer", [1, 4, LAYERS - 2])
def test_the_error_names_the_layer_whose_repeated_cut_broke_the_contract(model, graphs, monkeypatch, layer):
    """A GPU finds it out when all layers have been cut."""

    def note(self, make: Callable[[], torch.Tensor], line: str) -> None:
        self.faults[line] = make()

    monkeypatch.setattr(Guard, "note", note)
    weight = model.model.layers[layer].self_attn.o_proj.weight
    before = weight[0, 0].clone()
    monkeypatch.setattr(
        Capturable, "score", lambda self, seen, rows, state: rows.keys.norm(dim=-1) + 0 * seen.output_weight[0, 0]
    )
    contexts = make(model, pick("plain", "plain", "plain"))
    with torch.no_grad():
        weight[0, 0] = torch.nan
    try:
        with pytest.raises(ContextFailed, match="^0$") as failed:
            shared_prefill.prefill(contexts, ids(80).expand(2, -1))
    finally:
        with torch.no_grad():
            weight[0, 0] = before
    assert str(failed.value.__cause__) == f"method=plain: score of layer {layer} returned NaN" and len(graphs) == 1
