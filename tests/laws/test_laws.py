"""The seven laws of docs/architecture.md, for every method of conf/method/ with every allocator, in blocks.

`make test` checks every law with every method in several blocks (in one, if the method needs that), and with every
allocator in one block, in several and on every model. Where several cases would do, it takes the one with the fewest
blocks. `make test-all` checks every law with the full cross. If a method refuses a set-up, the test asserts the
refusal. No method is known by name here.
"""

import gc
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch

import kvbench
from kvbench.cache.policy import CachePolicy, choose_cache
from kvbench.cache.refusals import find_refusal
from kvbench.config.catalogue import list_choices
from kvbench.engine.generation import GenerationContext
from kvbench.engine.sampling import Sampling
from kvbench.interfaces.allocator import Allocator
from kvbench.interfaces.budget import Budget
from kvbench.interfaces.method import Method
from kvbench.validation import SettingError
from tests.support.dense_engine import DenseEngine, Head, HeadView
from tests.support.method_files import budget_for, build_policy, hold_all, make_tiny_method_args
from tests.support.selection import choose_covering
from tests.support.tiny_models import distinct, ids, tiny

BLOCKS = (None, 1, 7, 128)
MODELS = ("llama", "qwen3", "mistral", "gemma3")
OTHER = 21  # the seed of a second prompt
BUDGETS = (0.2, 0.5, 13)  # of 30 tokens at least 6 rows: of two keys, both are equally near their mean
CLOSE = dict(rtol=2e-4, atol=2e-4)  # float32 against another order of the same sums; logits have a spread of about 1


def prompt_of(tokens: int) -> torch.Tensor:
    """No token twice: keys of equal norm would be ranked by rounding, which differs between batch sizes."""
    return distinct(tokens, seed=1)


@dataclass(frozen=True)
class Case:
    """One set-up: a prompt, what it is read into, and how."""

    method: str
    allocator: str
    block: int | None
    model: str
    budget: float | int | None

    def __str__(self) -> str:
        return f"{self.method}-{self.allocator}-{self.block}-{self.model}-{self.budget}"

    @property
    def prompt(self) -> torch.Tensor:
        return prompt_of(self.tokens)

    @property
    def tokens(self) -> int:
        return 30 if self.block == 1 else 140

    @property
    def blocks(self) -> list[int]:
        size = self.block or self.tokens
        return [min(size, self.tokens - first) for first in range(0, self.tokens, size)]

    @property
    def choice(self) -> CachePolicy:
        return choose_cache(*self.built)

    @property
    def args(self) -> dict:
        """Settings that the method cannot do without."""
        return make_tiny_method_args(self.method, self.model)

    @property
    def built(self) -> list:
        """Method, allocator and codec."""
        return build_policy(self.method, self.allocator, self.model)

    @property
    def refused(self) -> bool:
        """Whether the method says that it cannot work with the allocator, or needs one block."""
        return is_refused(self.method, self.allocator, several=len(self.blocks) > 1)

    @property
    def holds_all(self) -> bool:
        """The full cache, and the law of readers: all rows are held, few are attended while decoding."""
        return self.method == "full" or self.built[0].attends_subset

    @property
    def args_to_hold_all(self) -> dict:
        """Settings with which a budget that holds all rows evicts none."""
        return self.args | hold_all(self.method)

    def quota(self, seen: int) -> int:
        """Rows per head that may stay, by fractions."""
        if self.holds_all or self.budget is None:
            return seen
        if isinstance(self.budget, int):
            return min(seen, self.budget)
        return min(seen, max(1, Fraction(str(self.budget)) * self.tokens // 1))


@cache
def is_refused(method: str, allocator: str, several: bool) -> bool:
    """Whether a method says that it cannot work with an allocator, or with several blocks, on whatever model."""
    own, *others = build_policy(method, allocator, "wide")
    return find_refusal(own, *others) is not None or (own.one_block and several)


def list_features(case: Case) -> frozenset[Hashable]:
    """What a selection of cases has to hold: see the docstring of this file. A refused case stands for its refusal."""
    if case.refused:
        return frozenset([("refused", case.method)])
    several = len(case.blocks) > 1
    features = [("allocator", case.allocator, several), (case.allocator, case.model)]
    if several or case.built[0].one_block:  # what one block shows, the first of several shows too
        features.append(("method", case.method))
    return frozenset([*features, ("block", case.block), ("budget", case.budget)])


CASES = [
    Case(*row, budget_for(row[0], BUDGETS[index % len(BUDGETS)]))
    for index, row in enumerate(product(list_choices("method"), list_choices("allocator"), BLOCKS, MODELS))
]
WIDE = [
    Case(method, allocator, block, "wide", budget_for(method, 0.25))
    for method, allocator, block in product(list_choices("method"), list_choices("allocator"), (None, 64))
]

SELECTED, SELECTED_WIDE = (
    [
        cases[own]
        for own in choose_covering([list_features(case) for case in cases], [len(case.blocks) for case in cases])
    ]
    for cases in (CASES, WIDE)
)


def each_case(
    selected: Sequence[Case], cases: Sequence[Case]
) -> Callable[[Callable[[Case], None]], Callable[[Sequence[Case]], None]]:
    """Run a law for the selected cases in `make test`, for all in `make test-all`. A refused case must be refused.

    Each selected case is a test of its own. The others of a method and an allocator are one test, since thousands of
    tests take long to collect; a failure names its case in a note.
    """
    rest: dict[str, list[Case]] = {}
    for case in cases:
        if case not in selected:
            rest.setdefault(f"{case.method}-{case.allocator}-rest", []).append(case)
    params = [pytest.param([case], id=str(case)) for case in selected]
    params += [pytest.param(own, id=name, marks=pytest.mark.full) for name, own in rest.items()]

    def decorate(law: Callable[[Case], None]) -> Callable[[Sequence[Case]], None]:
        def check(cases: Sequence[Case]) -> None:
            for case in cases:
                try:
                    check_case(case, law)
                except BaseException as error:
                    error.add_note(f"case {case}")
                    raise

        check.__doc__ = law.__doc__
        return pytest.mark.parametrize("cases", params)(check)

    return decorate


def check_case(case: Case, law: Callable[[Case], None]) -> None:
    """Check the law, or the refusal."""
    if not case.refused:
        law(case)
        return
    with pytest.raises(SettingError, match=f"{case.method}|block_size"):
        kvbench.prefill(
            tiny(case.model), case.prompt, case.method, case.budget, case.block, case.allocator, method_args=case.args
        )


@contextmanager
def after_each_block(model: torch.nn.Module, note: Callable[[], None]) -> Iterator[None]:
    """Call `note` whenever the model has read a block."""
    handle = model.register_forward_hook(lambda *_: note())
    try:
        yield
    finally:
        handle.remove()


@dataclass
class Trace:
    """A cut prefill and what every head held after each block: rows by (layer, head)."""

    context: GenerationContext
    held: list[dict[tuple[int, int], Head]]
    counts: list[dict[int, list[int]]]


def note_rows(context: GenerationContext) -> dict[tuple[int, int], Head]:
    found = {}
    for layer in context.own_layers:
        rows = layer.rows.view()
        for head in range(rows.heads):
            here = rows.mass[0, head] > 0
            columns = (rows.keys, rows.values, rows.places, rows.mass)
            found[layer.index, head] = Head(*(column[0, head][here].double().numpy() for column in columns))
    return found


def note_counts(context: GenerationContext) -> dict[int, list[int]]:
    return {layer.index: layer.rows.counts()[0].tolist() for layer in context.own_layers}


def context_of(case: Case, batch: int = 1, choice: CachePolicy | None = None) -> GenerationContext:
    value = 1.0 if case.method == "full" else case.budget
    return GenerationContext(tiny(case.model), choice or case.choice, Budget(value), case.block, (0,) * batch)


@cache
def trace(case: Case) -> Trace:
    """The case's prefill, run once. Tests branch before they read on."""
    context, held, counts = context_of(case), [], []

    def note() -> None:
        held.append(note_rows(context))
        counts.append(note_counts(context))

    with after_each_block(context.model, note):
        context.prefill(case.prompt)
    if context.choice.method.needs_extra_reads:  # cut when all was read, after the last block
        held.clear(), counts.clear(), note()
    return Trace(context, held, counts)


@cache
def read_other(case: Case) -> GenerationContext:
    """Another prompt of the case, read once by a set-up of its own. Tests branch before they read on."""
    context = context_of(case)
    context.prefill(distinct(case.tokens, OTHER))
    return context


@cache
def own_logits(model: str, tokens: int, more: int = 9) -> torch.Tensor:
    """(tokens + more, vocab) of transformers' own attention."""
    everything = torch.cat([prompt_of(tokens), ids(more, seed=2)], 1)
    with torch.no_grad():
        return tiny(model)(input_ids=everything).logits[0]


def spared(case: Case, layer: int) -> bool:
    context = trace(case).context
    return context.choice.method.skips_layer(layer, len(context.layers))


@pytest.mark.parametrize("selected", [SELECTED, SELECTED_WIDE], ids=["SELECTED", "SELECTED_WIDE"])
def test_every_method_and_allocator_is_under_every_law(selected):
    """In the selection that `make test` runs: every method accepted in several blocks, unless it needs one."""
    accepted = [case for case in selected if not case.refused]
    for several in (False, True):
        own = [case for case in accepted if (len(case.blocks) > 1) == several]
        assert {case.allocator for case in own} == set(list_choices("allocator"))
        assert {case.method for case in own} >= {
            name for name in list_choices("method") if build_policy(name, "uniform", "wide")[0].one_block != several
        }
    assert {case.method for case in selected if case.refused} == {case.method for case in CASES if case.refused}
    if selected is SELECTED:
        assert {(case.allocator, case.model) for case in accepted} == set(product(list_choices("allocator"), MODELS))
        assert {case.block for case in accepted} == set(BLOCKS) and {case.budget for case in accepted} == {
            *BUDGETS,
            None,
        }


@each_case(SELECTED, CASES)
def test_law_1_a_full_budget_changes_nothing(case):
    own = own_logits(case.model, case.tokens)
    budget, args = budget_for(case.method, 1.0), case.args_to_hold_all
    held = kvbench.prefill(
        tiny(case.model), case.prompt, case.method, budget, case.block, case.allocator, method_args=args
    )
    torch.testing.assert_close(held.logits[0], own[case.tokens - 1], **CLOSE)
    with held.branch():
        torch.testing.assert_close(held.extend(ids(9, seed=2))[0], own[case.tokens :], **CLOSE)
        assert held.resident_bytes == held.full_bytes
    answer = held.generate(6, stop=frozenset())
    with torch.no_grad():
        logits = tiny(case.model)(input_ids=torch.cat([case.prompt, answer], 1)).logits[0, case.tokens - 1 : -1]
    assert (logits.max(-1).values - logits.gather(1, answer.T)[:, 0] <= 1e-4).all()  # greedy, but for ties
    assert held.evicted(case_layer(held), 0) == 0


def case_layer(held: "kvbench.engine.compressed_cache.CompressedCache") -> int:
    return next(layer for layer in range(len(held.contexts[0].layers)) if layer not in held.sliding_layers)


@each_case(SELECTED, CASES)
def test_law_2_every_cut_leaves_exactly_the_quota(case):
    run = trace(case)
    allocator = run.context.choice.allocator
    own_share = type(allocator).layer is not Allocator.layer
    own_law = run.context.choice.method.sets_head_quotas  # its test file has the rest of it
    seen, most, before = 0, 0, None
    for block, counts in zip(case.blocks, run.counts, strict=True):
        seen += block
        most = max(most, block + (max(map(max, before.values())) if before else 0))
        before = counts
        quota = case.quota(seen)
        for layer, rows in counts.items():
            assert min(rows) >= 1 and max(rows) <= seen
            if spared(case, layer):
                assert set(rows) == {seen}
            elif own_law:
                pass
            elif allocator.even and not own_share:
                assert set(rows) == {quota}
            elif not own_share:
                assert sum(rows) == quota * len(rows)
        total = sum(map(sum, counts.values()))
        if not any(spared(case, layer) for layer in counts):
            limit = quota * sum(map(len, counts.values()))
            assert total <= limit if allocator.cascades or own_law else total == limit
    if run.context.choice.method.needs_extra_reads:  # its test file says what it holds meanwhile
        return
    assert max(layer.tally.peak_attended for layer in run.context.own_layers) == most
    assert max(layer.tally.peak_rows for layer in run.context.own_layers) == max(
        max(max(rows) for rows in counts.values()) for counts in run.counts
    )
    if allocator.even and not own_share and not own_law and not any(spared(case, layer) for layer in before):
        assert most <= case.quota(case.tokens) + max(case.blocks)


@each_case(SELECTED, CASES)
def test_law_2_while_decoding(case):
    """Methods that cut while decoding are back at the quota every `decode_interval` tokens; others append."""
    context = trace(case).context
    method, allocator = context.choice.method, context.choice.allocator
    expected, since = case.quota(case.tokens), 0

    def check(read: int) -> None:
        nonlocal expected, since
        expected, since = expected + read, since + read
        if method.decoding and since >= method.decode_interval:
            expected, since = min(expected, case.quota(10**6)), 0
        for layer, rows in note_counts(context).items():
            if method.sets_head_quotas:  # its own law, in its test file
                continue
            if spared(case, layer):
                assert set(rows) == {context.seen}
            elif allocator.even and type(allocator).layer is Allocator.layer:
                assert set(rows) == {expected}
            elif type(allocator).layer is Allocator.layer:
                assert sum(rows) == expected * len(rows) and min(rows) >= 1

    with context.branch():
        for read in (5, 58):
            context.extend(ids(read, seed=read))
            check(read)
        for count, _ in enumerate(context.generate(4, Sampling(), frozenset())):
            if count:
                check(1)
        assert context.seen == case.tokens + 5 + 58 + 3


@each_case(SELECTED, CASES)
def test_law_3_tokens_are_conserved(case):
    run = trace(case)
    with run.context.branch():
        for more in (0, 1, 3):
            if more:
                run.context.extend(ids(more, seed=more))
            for (layer, head), rows in note_rows(run.context).items():
                own = run.context.layers[layer]
                evicted = 0 if own.tally.evicted is None else int(own.tally.evicted[0, head])
                if run.context.choice.method.weighs_rows:  # each row stands for its own token, whatever it weighs
                    assert (rows.mass > 0).all() and len(rows.mass) + evicted == run.context.seen
                else:
                    assert rows.mass.sum() + evicted == run.context.seen
                    assert (rows.mass >= 1).all() and (rows.mass == rows.mass.round()).all()
                assert (np.diff(rows.places) > 0).all() and 0 <= rows.places[0] <= rows.places[-1] < run.context.seen
                if not run.context.choice.method.merges:
                    assert (rows.mass == 1).all() and evicted == run.context.seen - len(rows.mass)


@each_case(SELECTED, CASES)
def test_law_4_no_state_leaks(case):
    """A sample read by a set-up that has read another before gives what it gives alone."""

    def answer(context: GenerationContext) -> tuple:
        logits = context.logits.tolist()
        with context.branch():
            tokens = torch.stack(list(context.generate(3, Sampling(temperature=1.0), frozenset())))
            rows = {key: own.places.tolist() for key, own in note_rows(context).items()}
        return logits, tokens.tolist(), rows

    before = read_other(case)
    found = [answer(before)]
    context = context_of(case, choice=before.choice)
    context.prefill(case.prompt)
    assert answer(context) == answer(trace(case).context) != found[0]


@each_case(SELECTED, CASES)
def test_law_5_ragged_equals_gathered(case):
    """After every block the dense engine is told which rows each head holds; its own attention must then agree, if
    rows are attended at their own positions.
    """
    run = trace(case)
    context, told = run.context, list(run.held)
    if (
        context.choice.method.uses_cache_positions
    ):  # the dense engine attends at original positions; its own test says at which slots
        return

    def cut(glances: list[HeadView]) -> list[Head]:
        kept = []
        for glance in glances:
            rows = told[number][glance.layer, glance.head]
            if context.choice.method.merges:  # tests of methods check what a merge makes; here, how it is attended
                kept.append(rows)
            else:
                kept.append(glance.rows.take(np.isin(glance.rows.places, rows.places)))
                assert len(kept[-1].places) == len(rows.places)
        return kept

    dense, number = DenseEngine(case.model, cut, cuts_decoding=True), 0
    for part in case.prompt.split(case.block or case.tokens, dim=1):
        logits = dense.prefill(part, None)
        number += 1
    assert_close(context.logits[0], logits)
    if context.choice.method.attends_subset:  # looks at few of them from here on; its own test says at which
        return
    with context.branch(), after_each_block(context.model, lambda: told.append(note_rows(context))):
        for tokens in (4, 60, 1, 1):
            found = context.extend(ids(tokens, seed=tokens))[0]
            assert_close(found, dense.extend(ids(tokens, seed=tokens)))
            number += 1


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), expected.double(), **CLOSE)


@each_case(SELECTED, CASES)
def test_law_6_blocks_without_eviction_equal_one_shot(case):
    budget, args = budget_for(case.method, case.tokens), case.args_to_hold_all
    held = kvbench.prefill(
        tiny(case.model), case.prompt, case.method, budget, case.block, case.allocator, method_args=args
    )
    torch.testing.assert_close(held.logits[0], own_logits(case.model, case.tokens)[case.tokens - 1], **CLOSE)
    assert held.places(case_layer(held), 0).tolist() == list(range(case.tokens))
    assert held.resident_bytes == held.full_bytes


@each_case(SELECTED, CASES)
def test_law_7_a_batch_gives_what_its_samples_give_alone(case):
    """Exactly through the interface; and the engine's own batched path, as GPUs use it, keeps the same rows."""
    model = tiny(case.model)
    text = torch.cat([distinct(case.tokens + 3, seed) for seed in (1, OTHER)])
    both, more = text.split([case.tokens, 3], dim=1)
    assert torch.equal(both[:1], case.prompt)

    batch = kvbench.prefill(model, both, case.method, case.budget, case.block, case.allocator, method_args=case.args)
    extended = batch.extend(more)
    together, contexts = context_of(case, batch=2), [trace(case).context, read_other(case)]
    assert together.prefill(both).shape == batch.logits.shape
    at_once = together.extend(more)
    with contexts[0].branch(), contexts[1].branch():
        alone = [
            (kvbench.engine.compressed_cache.CompressedCache([context]), context.extend(its))
            for context, its in zip(contexts, more.split(1), strict=True)
        ]
        for sample, (held, its) in enumerate(alone):
            assert torch.equal(extended[sample], its[0]) and torch.equal(batch.logits[sample], held.logits[0])
            torch.testing.assert_close(at_once[sample], its[0], **CLOSE)
            for layer in together.own_layers:
                for head in range(layer.rows.shape[1]):
                    places, masses = held.places(layer.index, head), held.masses(layer.index, head)
                    assert torch.equal(batch.places(layer.index, head, sample), places)
                    assert torch.equal(layer.rows.head_places(sample, head), places)
                    assert torch.equal(layer.rows.head_masses(sample, head), masses)
                    assert batch.evicted(layer.index, head, sample) == held.evicted(layer.index, head)


@each_case(SELECTED, CASES)
def test_eviction_happens_inside_the_loop(case):
    """One block is exact whatever is cut after it; with several, later blocks no longer see what was cut."""
    run = trace(case)
    difference = (run.context.logits[0] - own_logits(case.model, case.tokens)[case.tokens - 1]).abs().max()
    if len(case.blocks) == 1 or case.holds_all:
        assert difference < 1e-4
    elif not any(spared(case, layer) for layer in run.counts[0]):
        assert difference > 1e-2


# Bytes: counted on the storages that Python can reach, not by the code that is tested.


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


@contextmanager
def newly_alive() -> Iterator[dict[int, int]]:
    """The storages, at the end, of tensors that were made inside and are still alive."""
    gc.collect()
    gc.freeze()  # what is there now is not looked at again
    found: dict[int, int] = {}
    yield found
    gc.collect()
    found |= storages(thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))


def reachable(thing: object, seen: set[int]) -> Iterator[torch.Tensor]:
    """Tensors below an object; models, their caches and methods (whose files are like weights) excepted."""
    if id(thing) in seen or isinstance(thing, torch.nn.Module | Method | type):
        return
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, dict):
        for value in thing.values():
            yield from reachable(value, seen)
    elif isinstance(thing, list | tuple | set):
        for value in thing:
            yield from reachable(value, seen)
    elif hasattr(thing, "__dict__"):
        yield from reachable(vars(thing), seen)


@each_case(SELECTED_WIDE, WIDE)
def test_bytes_are_those_of_the_rows_held(case):
    """K and V: rows × 2 × d × 4 bytes exactly, metadata at most 3 %; nothing of the uncut cache stays alive."""
    model = tiny("wide")
    kvbench.prefill(model, ids(30))
    with newly_alive() as new:
        held = kvbench.prefill(
            model, ids(300), case.method, case.budget, case.block, case.allocator, method_args=case.args
        )
    layers = held.contexts[0].own_layers
    rows = sum(sum(layer.rows.counts()[0].tolist()) for layer in layers)
    exact, full = rows * 2 * 64 * 4, 300 * 2 * 2 * 2 * 64 * 4
    assert held.resident_bytes == exact and held.full_bytes == full
    limit = (300 if case.holds_all or case.budget is None else 75) * 4
    assert rows <= limit if case.built[0].sets_head_quotas else rows == limit
    owned = storages(reachable(layers, set()))
    shared: set[int] = set()  # what allocators remember for all layers: a few numbers a layer, which bytes do not count
    assert sum(storages(reachable(layers[0].state.shared, shared)).values()) <= 64 * len(layers)
    values = storages(t for t in reachable(layers, shared) if t.is_floating_point() or t.dtype == torch.uint8)
    weights = sum(layer.rows.mass.nbytes for layer in layers) if case.built[0].weighs_rows else 0  # float32
    assert sum(values.values()) == exact + weights + held.bytes.state
    assert held.bytes.metadata <= 0.03 * exact and held.bytes.state <= 0.07 * exact  # Quest's bounds are 6.25 %
    assert 0 <= sum(owned.values()) - held.bytes.total <= 64 * len(layers)
    logits = held.logits.nbytes
    files = storages(reachable(vars(layers[0].choice.method), set()))
    most = held.bytes.total + sum(files.values()) + logits + held.prompt.nbytes  # its ids are 8 bytes a token
    assert exact < sum(new.values()) <= most + 64 * (len(layers) + 1)
    held.extend(ids(3))
    rows = sum(sum(layer.rows.counts()[0].tolist()) for layer in layers)
    assert held.resident_bytes == rows * 2 * 64 * 4
    shared = set()
    list(reachable(layers[0].state.shared, shared))
    values = storages(t for t in reachable(layers, shared) if t.is_floating_point() or t.dtype == torch.uint8)
    assert sum(values.values()) == held.resident_bytes + held.bytes.headroom + weights + held.bytes.state


def test_bytes_of_sliding_layers_count_and_stay():
    held = kvbench.prefill(tiny("gemma3"), ids(100), "knorm", 10, 30)
    sliding, own = 4 * 15 * 2 * 2 * 32 * 4, 2 * 10 * 2 * 2 * 32 * 4
    assert held.resident_bytes == sliding + own
    assert held.full_bytes == sliding + 2 * 100 * 2 * 2 * 32 * 4
    caches = [c for c, layer in zip(held.contexts[0].cache.layers, held.contexts[0].layers, strict=True) if not layer]
    assert sum(storages(x for c in caches for x in (c.keys, c.values)).values()) == sliding
