"""Answers that are decoded as one batch are those of contexts that answer alone, and leave the same behind."""

from contextlib import ExitStack
from itertools import chain, combinations

import pytest
import torch

from kvbench.engine import appended_rows, replaced_rows
from kvbench.engine.generation import Answer, GenerationContext
from kvbench.engine.joint_decoding import (
    join_answers,
    list_memory,
    run_alone,
    run_together,
    separate_memory,
)
from kvbench.engine.replaced_rows import ReplacedRows
from kvbench.engine.sampling import Sampling
from kvbench.engine.shared_prefill import prefill
from kvbench.engine.streams import join_after
from kvbench.interfaces.budget import Budget
from kvbench.kernels.joined_rows import attend_joined
from kvbench.methods.keydiff import KeyDiff
from kvbench.models.decoder_weights import collect_weights
from kvbench.validation import ContractError
from tests.support.answer_paths import CHUNK, assert_same, forget, make_contexts, read_given_both_ways, tell
from tests.support.delta_files import build_delta
from tests.support.method_files import make_method_args
from tests.support.palu_files import build_palu, find_palu
from tests.support.selection import choose_quick, only_in_full
from tests.support.tiny_models import ids, make_double, make_fresh

GROWING = Budget(0.3, "seen")
KINDS = {
    "full": ({"method": "full"}, 1.0),
    "snapkv": ({"method": "snapkv"}, 0.3),
    "uneven heads": ({"method": "snapkv", "allocator": "ada"}, 0.3),
    "a cut at each token": ({"method": "keydiff", "decoding": True}, 0.3),
    "a growing quota": ({"method": "tova", "decoding": True}, GROWING),
    "columns": ({"method": "h2o", "decoding": True}, 0.3),
    "rolling positions": ({"method": "sink"}, 0.3),
    "pages": ({"method": "quest", "page": 4, "dense_layers": 1}, 0.3),
    "codes": ({"method": "pqcache", "sinks": 3, "least": 0, "bits": 4}, 0.3),
    "listed rows": ({"method": "omnikv", "preset": "reference", "filters": [0], "wait": 0}, 0.3),
    "streaming heads": ({"method": "duo_attention", "decoding": True}, 0.7),
    "packed": ({"method": "snapkv", "codec": "kivi"}, 0.3),
    "rounded rows": ({"method": "snapkv", "allocator": "ada", "codec": "fp8"}, 0.3),
    "rounded rows, a cut at each token": ({"method": "keydiff", "codec": "int8"}, 0.3),
    "compressed": ({"method": "full", "codec": "delta"}, 1.0),
    "latents, a cut at each token": ({"method": "keydiff", "codec": "palu"}, 0.3),
    "listed compressed rows": ({"method": "deltakv", "codec": "delta", "full_layers": [0], "depth": None}, 0.3),
}


GROUPS = [tuple(KINDS)[number::4] for number in range(4)]
"""Every kind stands beside kinds of other rows."""
LONGEST = 2 * CHUNK + 5


def choose(method, allocator="uniform", codec="raw", **more):
    from kvbench.engine.compressed_cache import choose_cache
    from tests.support.method_files import build_policy

    made = {"delta": lambda: build_delta("short"), "palu": lambda: build_palu(find_palu("short"))}
    own = build_policy(method, allocator, "short", "raw" if codec in made else codec, **more)
    return choose_cache(*own[:2], made[codec]() if codec in made else own[2])


def make_pairs(model, names, prompts=None, batches=None) -> list[list[GenerationContext]]:
    """For each kind, one context that answers alone through the modules and one that may answer with others."""
    pairs = []
    for number, name in enumerate(names):
        chosen, budget = KINDS[name]
        prompt, batch = prompts[number] if prompts else 60, batches[number] if batches else 1
        pairs.append(make_contexts(model, choose(**chosen), budget, batch, prompt=prompt))
    return pairs


def answer_all(pairs, ends=None, **more) -> list[torch.Tensor]:
    """Answers of the second contexts of all pairs, together. Alone the first ones answer and count alike.

    All forget them. `ends` are further arguments for each pair.
    """
    own_ends = ends or [{}] * len(pairs)
    alone = [run_alone(forget(modules, **end, **more)) for (modules, _), end in zip(pairs, own_ends, strict=True)]
    joined = run_together([forget(own, **end, **more) for (_, own), end in zip(pairs, own_ends, strict=True)])
    for (answer, counts), (other, others) in zip(alone, joined, strict=True):
        assert torch.equal(answer, other) and counts == others
    return [answer for answer, _ in joined]


def assert_alike(pairs, tokens=CHUNK + 4) -> None:
    """Both contexts of each pair answer alike, those that may do so together, and read the same given tokens."""
    answer_all(pairs, tokens=tokens)
    assert all(own.decoded_together == len(pairs) for _, own in pairs)
    assert_read_alike(pairs)


def assert_read_alike(pairs) -> None:
    """Given tokens that the second contexts read together, and the first ones alone, leave the same behind."""
    read_given_both_ways(pairs, ids(CHUNK + 2, 7))
    for modules, own in pairs:
        torch.testing.assert_close(modules.last_logits, own.last_logits, rtol=0, atol=1e-5)
        assert_same(modules, own)


@pytest.mark.parametrize("kinds", [*GROUPS, only_in_full(tuple(KINDS))], ids=len)
def test_every_kind_of_rows_answers_with_the_others(kinds):
    pairs = make_pairs(make_double("short"), kinds, [60 + 7 * number for number in range(len(kinds))])
    for tokens in (CHUNK + 3, 8):
        answer_all(pairs, tokens=tokens)
        for modules, own in pairs:
            assert (modules.decoding, modules.decoded_together) == ("modules", 1)
            assert (own.decoding, own.decoded_together) == ("graph", len(kinds))
            assert len(own.stamps) == tokens and own.stamps == sorted(own.stamps)
            assert_same(modules, own)


@pytest.mark.parametrize(
    ("kinds", "branches"),
    [(GROUPS[0], True), *map(only_in_full, [GROUPS[1], tuple(KINDS), tuple(KINDS)], [False, True, False])],
)
def test_given_tokens_are_read_side_by_side_and_stay(kinds, branches):
    """An answer attends to them, also in a branch, where other answers leave no rows."""
    pairs, question = make_pairs(make_double("short"), kinds), ids(CHUNK + 2, 7)
    drawn = pairs[0][1].drawn
    with ExitStack() as stack:
        for context in chain(*pairs) if branches else ():
            stack.enter_context(context.branch())
        read_given_both_ways(pairs, question)
        for modules, own in pairs:
            assert own.decoded_together == len(pairs) and own.drawn == drawn
            torch.testing.assert_close(modules.last_logits, own.last_logits, rtol=0, atol=1e-5)
            assert_same(modules, own)
        answer_all(pairs, tokens=9)
    if branches:
        for modules, own in pairs:
            assert_same(modules, own)


def test_contexts_whose_rows_only_grow_share_a_call(monkeypatch):
    """They stand between others, on prompts of several lengths, and are of several samples."""
    pairs = make_pairs(
        make_double("short"), ["columns", "snapkv", "a cut at each token", "full", "uneven heads"],
        [60, 75, 41, 66, 90], [1, 3, 2, 1, 2],
    )  # fmt: skip
    calls = []

    def attend(queries, *given, **more):
        calls.append(len(queries))
        return attend_joined(queries, *given, **more)

    monkeypatch.setattr(appended_rows, "attend_joined", attend)
    answer_all(pairs, tokens=CHUNK + 4)
    assert set(calls) == {3 + 1 + 2}


CUTTING = {
    "cake": {},
    "dropkv": {"p_dtype": "fp32"},
    "h2o": {"norm": "count", "recent": 0.5},
    "keydiff": {"recent": 0.2},
    "knorm": {"skip_layers": [0]},  # where the keys of a repeated token have the same norm, apart from rounding
    "qfilters": {"recent": 4},
    "sink": {"positions": "rolling"},
    "snapkv": {},
    "tova": {"recent": 2},
}
QUICK = ("cake",)  # it has a state; h2o, which watches every token, and sink, which forgets in order, are below
CONTEXTS = [(0.3, 60, 1), (0.2, 75, 2), (GROWING, 41, 1), (0.3, 60, 1)]  # budget, tokens of the prompt, samples
LIKE = [(0.3, 60, 1), (0.3, 60, 2)]  # all heads hold the same number of rows


def make_cutting_pairs(model, method, contexts, **more):
    args = make_method_args(method, "joint", model, [ids(100, seed)[0] for seed in range(4)])
    chosen = choose(method, decoding=True, **{**CUTTING.get(method, {}), **args, **more})
    return [make_contexts(model, chosen, budget, batch, prompt=prompt) for budget, prompt, batch in contexts]


@pytest.fixture
def pieces(monkeypatch):
    """The number of contexts of each batch of replaced rows, and whether any of its layers grows."""
    made = []

    def make(weights, answers, *given):
        rows = ReplacedRows(weights, answers, *given)
        made.append((len(answers), any(rows.grows)))
        return rows

    monkeypatch.setattr(replaced_rows, "ReplacedRows", make)
    return made


@pytest.mark.parametrize("method", choose_quick(CUTTING, *QUICK))
def test_contexts_that_cut_at_every_token_share_their_calls(pieces, method):
    """They differ in budget, prompt and samples, and other contexts stand between them."""
    model = make_double("short")
    pairs = make_cutting_pairs(model, method, CONTEXTS)
    pairs[1:1] = make_pairs(model, ["snapkv"])
    pairs[3:3] = make_cutting_pairs(model, "tova", [(0.3, 60, 1)], recent=3)
    assert_alike(pairs)
    assert pieces == 2 * [(len(CONTEXTS), True), (1, False)]  # the one context is of another method


@pytest.mark.cover
@pytest.mark.parametrize("contexts", [CONTEXTS, LIKE])
@pytest.mark.parametrize("method", ["h2o", only_in_full("keydiff"), "sink"])
def test_contexts_that_share_their_calls_end_on_their_own(pieces, method, contexts):
    """Then they read tokens together that stay."""
    pairs = make_cutting_pairs(make_double("short"), method, contexts)
    ends = [{"after": after} for after in (None, CHUNK + 3, 5, None)[: len(pairs)]]
    answer_all(pairs, ends, tokens=2 * CHUNK + 4)
    assert_read_alike(pairs)
    answer_all(pairs, tokens=8)
    assert [count for count, _ in pieces] == 3 * [len(pairs)] and pieces[0][1] == (contexts is CONTEXTS)


def test_contexts_with_other_settings_or_layers_do_not_share_calls(pieces):
    model = make_double("short")
    pairs = make_cutting_pairs(model, "knorm", LIKE) + make_cutting_pairs(model, "knorm", LIKE[:1], skip_layers=[])
    pairs += make_pairs(model, ["streaming heads", "streaming heads", "columns"])
    assert_alike(pairs, tokens=8)
    assert [count for count, _ in pieces] == 2 * [2, 1, 1, 1, 1] and not pieces[0][1]


def test_a_score_that_is_not_a_number_stops_all_contexts_of_its_batch(pieces, monkeypatch):
    pairs = make_cutting_pairs(make_fresh("short"), "keydiff", CONTEXTS)
    score = KeyDiff.score

    def fail(self, observation, rows, state):
        scores = score(self, observation, rows, state)
        return scores.masked_fill((rows.places >= 80).any(-1, keepdim=True), torch.nan)

    monkeypatch.setattr(KeyDiff, "score", fail)
    with pytest.raises(ContractError, match="keydiff: score returned NaN"):
        run_together([forget(own, 30) for _, own in pairs])
    assert pieces == [(len(CONTEXTS), True)]
    monkeypatch.setattr(KeyDiff, "score", score)
    answer_all(pairs, tokens=8)


def test_samples_of_a_batch_and_windows():
    pairs = make_pairs(make_double("gemma3"), ["full", "snapkv", "a cut at each token"], [60, 75, 41], [1, 3, 2])
    assert_alike(pairs)


@pytest.mark.parametrize(
    ("count", "after"), [(4, CHUNK), *map(only_in_full, (6, 6, 6, 6), (2, CHUNK, CHUNK + 1, CHUNK + 4))]
)
def test_answers_end_on_their_own(count, after):
    """One answer ends by itself, another one is ended, and the others go on. Then all answer again."""
    names = ["a cut at each token", "snapkv", "packed", "pages", "columns", "rolling positions"][:count]
    pairs = make_pairs(make_double("short"), names)
    with pairs[0][0].branch():
        free = run_alone(tell(pairs[0][0], LONGEST)).flatten().tolist()
    stop = next(token for place, token in enumerate(free) if place >= after and token not in free[:place])
    ends = [{"stop": [stop]}, {"after": after}, {"after": after + 1}, {}, {"after": after}, {}][:count]
    assert len({len(some) for some in answer_all(pairs, ends, tokens=LONGEST)}) > 2
    assert_read_alike(pairs)
    answer_all(pairs, tokens=8)


def test_each_answer_draws_its_own_tokens():
    pairs = make_pairs(make_double("short"), ["full", "snapkv", "a cut at each token"])
    for sampling in (Sampling(1.0), Sampling(0.7, 0.9)):
        answer_all(pairs, tokens=CHUNK + 4, sampling=sampling)
    answer_all(pairs, [{"sampling": own} for own in (Sampling(), Sampling(1.0), Sampling(0.5))], tokens=CHUNK + 4)


def test_what_cannot_join_answers_alone():
    model = make_double("short")
    names = ["snapkv", "full", "uneven heads"]
    pairs = make_pairs(model, names)
    pairs += [make_contexts(model, choose("tova", decoding=True, decode_interval=5))]  # needs two graphs
    pairs += [make_contexts(model, choose("snapkv"), stepped=False)]  # needs the modules
    answer_all(pairs, tokens=10)
    assert [own.decoded_together for _, own in pairs] == [3, 3, 3, 1, 1]
    assert [own.decoding for _, own in pairs] == ["graph"] * 4 + ["modules"]
    lengths = (10, 10, 15, 5, 10)  # another length, and one too short for a graph
    pairs = make_pairs(model, [*names, "snapkv", "columns"])
    joined = answer_all(pairs, [{"tokens": count} for count in lengths])
    assert [len(some) for some in joined] == list(lengths)
    assert [own.decoded_together for _, own in pairs] == [3, 3, 1, 1, 3]
    run_together([tell(pairs[0][1], 10), *(forget(own, 10) for _, own in pairs[1:3])])  # the first keeps its rows
    assert [own.decoded_together for _, own in pairs[:3]] == [1, 2, 2]


def test_contexts_that_would_append_to_the_same_memory_take_turns_or_get_their_own():
    model = make_double("short")
    chosen = [("full", {}), ("quest", {"page": 4, "dense_layers": 1}), ("full", {}), ("snapkv", {})]
    budgets = [Budget(1.0), Budget(0.3), Budget(1.0), Budget(0.3)]
    contexts = [
        GenerationContext(model, choose(method, **more), budget, None, (0,), answer=40)
        for (method, more), budget in zip(chosen, budgets, strict=True)
    ]
    prefill(contexts, ids(60))
    for context in contexts:
        context.weights = collect_weights(model)
    alone = []
    for context in contexts:
        with context.branch():
            alone.append(run_alone(tell(context, 10)))
    for context in contexts:
        context.reserve(10)
    before = [list_memory(context) for context in contexts]
    assert before[0] == before[1] == before[2] and not before[0] & before[3]
    assert find_joined(contexts) == [0, 3]
    answers = (answer for answer, _ in run_together([forget(context, 10) for context in contexts]))
    assert all(map(torch.equal, alone, answers))
    used = set()
    for context in contexts:
        separate_memory(context, used)
    after = [list_memory(context) for context in contexts]
    assert after[0] == before[0] and not any(one & other for one, other in combinations(after, 2))
    assert find_joined(contexts) == [0, 1, 2, 3]
    answers = (answer for answer, _ in run_together([forget(context, 10) for context in contexts]))
    assert all(map(torch.equal, alone, answers))


def find_joined(contexts) -> list[int]:
    """The numbers of the contexts whose answers, which they forget, would be decoded as one batch."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context.branch())
        answers = [Answer(context, 10, Sampling(), frozenset()) for context in contexts]
        joined = join_answers(answers)
        for answer in answers:
            answer.end()
            answer.close()
    return [number for number, answer in enumerate(answers) if answer in joined]


def test_an_error_ends_all_sessions_and_changes_nothing(monkeypatch):
    pairs = make_pairs(make_fresh("short"), ["snapkv", "a cut at each token", "full"])
    before = [(own.seen, [layer.rows.longest_head for layer in own.own_layers]) for _, own in pairs]
    score, calls = KeyDiff.score, []

    def fail(self, *given):
        calls.append(1)
        if len(calls) > 40:
            raise ContractError("method=keydiff: score failed")
        return score(self, *given)

    monkeypatch.setattr(KeyDiff, "score", fail)

    def session(context):
        with context.branch():
            return (yield from tell(context, 30))

    with pytest.raises(ContractError, match="score failed"):
        run_together([session(own) for _, own in pairs])
    assert all(own.path is None for _, own in pairs)
    assert before == [(own.seen, [layer.rows.longest_head for layer in own.own_layers]) for _, own in pairs]
    monkeypatch.setattr(KeyDiff, "score", score)
    answer_all(pairs, tokens=8)


def test_the_memory_of_every_forgotten_answer_is_counted():
    """The first answer stays, and leaves rows that the cache's meter does not know in full."""
    [[_, context]] = make_pairs(make_double("short"), ["snapkv"])
    run_alone(tell(context, 40, after=12))  # memory for 28 tokens is left
    peaks = []
    for _ in range(3):
        with context.branch():
            run_alone(tell(context, 12))
            assert context.memory.held == [layer.bytes().total for layer in context.own_layers]
            peaks.append(context.memory.peak)
    assert len(set(peaks)) == 1


def test_streams_join_whatever_happens_and_the_first_error_stays():
    joined = []

    def refuse() -> None:
        joined.append("refused")
        raise RuntimeError("the capture has ended")

    with join_after(lambda: joined.append("done")):
        pass
    with pytest.raises(torch.cuda.OutOfMemoryError), join_after(lambda: joined.append("failed")):
        raise torch.cuda.OutOfMemoryError
    with pytest.raises(torch.cuda.OutOfMemoryError), join_after(refuse):
        raise torch.cuda.OutOfMemoryError
    with pytest.raises(RuntimeError, match="^the capture has ended$"), join_after(refuse):
        pass
    assert joined == ["done", "failed", "refused", "refused"]
