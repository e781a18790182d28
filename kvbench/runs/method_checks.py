"""Check one method against the laws of kvbench, before its results are trusted.

The checks read random tokens into a small model in float64 on the CPU, with exact guards (kvbench.cache.guard), and
take less than a minute. Every check prints one line: `ok`, `FAIL` with what is wrong, or `-` with the reason why it
does not apply to the method. The exit code is 1 if a check fails and 2 if the method cannot be constructed.

A pass does not show that the method computes what its paper says. That needs an independent implementation, as in
tests/support/oracles.py.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from kvbench.cache.policy import CachePolicy, choose_cache
from kvbench.config import catalogue
from kvbench.config.provenance import source_hashes
from kvbench.engine.cuts_in_turn import ContextFailed
from kvbench.engine.generation import GenerationContext
from kvbench.engine.rehearsal import rehearse
from kvbench.engine.sampling import Sampling
from kvbench.engine.shared_prefill import prefill
from kvbench.interfaces.budget import Budget
from kvbench.interfaces.method import Method
from kvbench.interfaces.observation import PromptEncoder
from kvbench.models.chat_template import make_prompt_encoder
from kvbench.models.checkpoint import Checkpoint
from kvbench.models.transformers_port import read_layout, text_config
from kvbench.runs.check_list import CheckFailed, NotApplicable, print_checks
from kvbench.runs.integrity import Definitions, WeightHashes
from kvbench.store.runs import name_some
from kvbench.validation import ContractError, SettingError

TOKENS = 96  # tokens of a prompt
BUDGETS = (0.5, 0.2, 13)
BLOCKS = (None, 7, 40)
CLOSE = 1e-6  # tolerance of logits in float64, whose spread is about 1
COMPARED = ("keys", "values", "places", "mass")


@dataclass(frozen=True)
class MethodUnderTest:
    """The method under test, and the model on which it is tested."""

    name: str
    overrides: dict[str, Any]
    checkpoint: Checkpoint

    @cached_property
    def settings(self) -> dict[str, Any]:
        return catalogue.load_settings("method", self.name, self.overrides)

    @cached_property
    def method(self) -> Method:
        return catalogue.build("method", self.settings)

    @cached_property
    def model(self) -> torch.nn.Module:
        return self.checkpoint.weights(torch.float64, "cpu")

    @cached_property
    def weights(self) -> WeightHashes:
        return WeightHashes(self.model)

    def reload_model(self) -> None:
        """Load the model again for the next check, because its weights have changed."""
        for name in ("model", "weights"):
            vars(self).pop(name, None)

    @cached_property
    def words(self) -> PromptEncoder:
        return make_prompt_encoder(self.checkpoint.tokenizer())

    def prompt(self, seed: int = 0, tokens: int | None = None) -> Tensor:
        """Draw different token ids, shape (1, tokens). Equal ones would give keys that only rounding can rank."""
        vocabulary = text_config(self.model).vocab_size
        generator = torch.Generator().manual_seed(seed)
        return (torch.randperm(vocabulary - 3, generator=generator)[: tokens or TOKENS] + 3)[None]

    def choice(self, allocator: str = "uniform") -> CachePolicy:
        """Combine the method with an allocator; SettingError if they do not go together."""
        built = choose_cache(self.method, build_named("allocator", allocator), build_named("codec", "raw"))
        return CachePolicy(built.method, built.allocator, built.codec, exact=True)

    def context(
        self, budget: float | int, block: int | None = None, batch: int = 1, allocator: str = "uniform"
    ) -> GenerationContext:
        return GenerationContext(
            self.model, self.choice(allocator), Budget(budget), block, (0,) * batch, 0, self.words, compile=False
        )

    def read(self, budget: float | int, block: int | None = None, prompt: Tensor | None = None) -> GenerationContext:
        """Make a context that has read a prompt."""
        prompt = self.prompt() if prompt is None else prompt
        context = self.context(budget, block, len(prompt))
        context.prefill(prompt)
        return context

    def cases(self) -> Iterator[tuple[float | int, int | None]]:
        """Yield the budgets and block sizes that the method takes."""
        for block in (None,) if self.method.one_block else BLOCKS:
            for budget in BUDGETS:
                yield budget, block


def build_named(group: str, name: str) -> Any:
    """Build a method, an allocator or a codec with its default settings."""
    return catalogue.build(group, catalogue.load_settings(group, name))


def require_budget(subject: MethodUnderTest) -> None:
    """Raise NotApplicable if the method decides how many rows stay, so that no budget keeps all of them."""
    if subject.method.budget_setting is not None:
        raise NotApplicable(f"method.{subject.method.budget_setting} decides how many rows stay, whatever the budget")


def check_guards(subject: MethodUnderTest) -> str:
    """Check that no hook writes into its arguments, in prompt, blocks, questions and decoding."""
    rehearse(subject.model, subject.choice(), subject.words, subject.prompt())
    for budget, block in subject.cases():
        context = subject.read(budget, block)
        with context.branch():
            context.extend(subject.prompt(5, 3))
            list(context.generate(3, Sampling(), frozenset()))
        list(context.generate(3, Sampling(), frozenset()))
    return f"{len(list(subject.cases()))} set-ups with copies compared around every hook"


def check_full_budget(subject: MethodUnderTest) -> str:
    """Check that a full budget gives the model's own logits, also for tokens that follow."""
    require_budget(subject)
    more, most = subject.prompt(3, 9), 0.0
    with torch.no_grad():
        model_logits = subject.model(input_ids=torch.cat([subject.prompt(), more], 1)).logits[0]
    for block in (None,) if subject.method.one_block else BLOCKS:
        context = subject.read(1.0, block)
        with context.branch():
            logits = torch.cat([context.last_logits, context.extend(more)[0]])
        most = max(most, (logits - model_logits[TOKENS - 1 :]).abs().max().item())
        if most > CLOSE:
            raise CheckFailed(f"block_size={block or 'null'}: logits differ by {most:.2g} from the model's own")
    return f"logits differ by {most:.0e} at most"


def check_quota(subject: MethodUnderTest) -> str:
    """Check that after every eviction a layer holds exactly the quota's rows in every head."""
    method = subject.method
    if method.attends_subset:
        raise NotApplicable("it holds every row and looks at few")
    if subject.name == "full":
        raise NotApplicable("the full cache holds every row")
    for budget, block in subject.cases():
        quota = int(Fraction(str(budget)) * TOKENS) if isinstance(budget, float) else budget
        context = subject.read(budget, block)
        layers = len(context.layers)
        held = {layer.index: layer.rows.counts()[0].tolist() for layer in context.own_layers}
        where = f"budget={budget} block_size={block or 'null'}"
        if method.sets_head_quotas:
            total, limit = sum(map(sum, held.values())), quota * sum(map(len, held.values()))
            if total > limit and not any(method.skips_layer(layer, layers) for layer in held):
                raise CheckFailed(f"{where}: {total} rows held in all, the budget is {limit}")
            continue
        for layer, counts in held.items():
            expected = TOKENS if method.skips_layer(layer, layers) else quota
            if set(counts) != {expected}:
                raise CheckFailed(f"{where}: the heads of layer {layer} hold {counts} rows, expected {expected}")
    return "the total stays within the budget" if method.sets_head_quotas else "in every head, for every block size"


def check_tokens(subject: MethodUnderTest) -> str:
    """Check that held and evicted tokens add up to those read, and that rows are ordered by position."""
    for budget, block in subject.cases():
        context = subject.read(budget, block)
        context.extend(subject.prompt(5, 3))
        for layer in context.own_layers:
            for head in range(layer.rows.shape[1]):
                places, masses = layer.rows.head_places(0, head), layer.rows.head_masses(0, head)
                gone = 0 if layer.tally.evicted is None else int(layer.tally.evicted[0, head])
                where = f"budget={budget} block_size={block or 'null'}, layer {layer.index}, head {head}"
                held = len(places) if subject.method.weighs_rows else int(masses.sum())
                if held + gone != context.seen:
                    raise CheckFailed(f"{where}: {held} tokens held + {gone} gone, {context.seen} were read")
                if not (places.diff() > 0).all():
                    raise CheckFailed(f"{where}: the rows' places do not ascend")
    return "held + gone = read"


def collect_outcome(context: GenerationContext) -> dict[str, Tensor]:
    """Collect the held rows and the answer."""
    outcome = {
        f"{name} of layer {layer.index}": getattr(layer.rows.view(), name)
        for layer in context.own_layers
        for name in COMPARED
    }
    with context.branch():
        outcome["answer"] = torch.stack(list(context.generate(4, Sampling(), frozenset())))
    return outcome | {"logits": context.last_logits}


def find_difference(outcome: dict[str, Tensor], expected: dict[str, Tensor]) -> str | None:
    """Return the name of the first tensor that is not the same to the bit; None if all are."""
    return next((name for name, tensor in expected.items() if not torch.equal(outcome[name], tensor)), None)


def check_state(subject: MethodUnderTest) -> str:
    """Check that a prompt gives the same after another prompt and when it is read again."""
    for budget, block in list(subject.cases())[:: len(BUDGETS)]:
        expected = collect_outcome(subject.read(budget, block))
        subject.read(budget, block, subject.prompt(11))
        wrong = find_difference(collect_outcome(subject.read(budget, block)), expected)
        if wrong:
            raise CheckFailed(
                f"budget={budget} block_size={block or 'null'}: {wrong} differs when another was read before"
            )
    return "the same prompt gives the same to the bit"


def check_blocks(subject: MethodUnderTest) -> str:
    """Check that blocks give what one block gives, as long as nothing is evicted."""
    if subject.method.one_block:
        raise NotApplicable("it needs the prompt as one block")
    require_budget(subject)
    one = subject.read(TOKENS).last_logits
    for block in BLOCKS[1:]:
        most = (subject.read(TOKENS, block).last_logits - one).abs().max().item()
        if most > CLOSE:
            raise CheckFailed(f"block_size={block}: logits differ by {most:.2g} from those of one block")
    return "logits are those of one block"


def check_batch(subject: MethodUnderTest) -> str:
    """Check that a prompt keeps the same rows in a batch as alone."""
    prompts = torch.cat([subject.prompt(seed) for seed in (0, 21)])
    for budget, block in list(subject.cases())[:: len(BUDGETS)]:
        batch = subject.read(budget, block, prompts)
        for sample in range(len(prompts)):
            alone = subject.read(budget, block, prompts[sample : sample + 1])
            for layer, other in zip(alone.own_layers, batch.own_layers, strict=True):
                for head in range(layer.rows.shape[1]):
                    if not torch.equal(layer.rows.head_places(0, head), other.rows.head_places(sample, head)):
                        where = f"budget={budget} block_size={block or 'null'}, layer {layer.index}, head {head}"
                        raise CheckFailed(f"{where}: sample {sample} keeps other rows in a batch than alone")
    return "the rows kept in a batch are those kept alone"


def check_sharing(subject: MethodUnderTest) -> str:
    """Check that the method and others give the same on a shared prefill as alone."""
    if subject.method.needs_extra_reads:
        raise NotApplicable("it reads prompts again, therefore alone")
    if "lse" in subject.method.wants:
        raise NotApplicable("it wants log-sum-exps and shares a prefill with its like only")
    others = [
        CachePolicy(build_named("method", name), build_named("allocator", "uniform"), build_named("codec", "raw"))
        for name in ("full", "knorm")
    ]
    tested = subject.choice()

    def make_context(choice: CachePolicy) -> GenerationContext:
        budget = Budget(1.0 if choice.method.name == "full" else 0.2)
        return GenerationContext(subject.model, choice, budget, None, (0,), compile=False)

    expected = []
    for choice in (*others, tested):
        alone = make_context(choice)
        alone.prefill(subject.prompt())
        expected.append(collect_outcome(alone))
    for place, order in {"first": (2, 0, 1), "second": (0, 2, 1), "last": (0, 1, 2)}.items():
        shared = [make_context((*others, tested)[number]) for number in order]
        where = f"where {subject.name} is the {place} of three"
        try:
            prefill(shared, subject.prompt())
        except ContextFailed as failed:
            if order[failed.number] == 2:
                raise (failed.__cause__ or failed) from None
            name = shared[failed.number].choice.method.name
            raise CheckFailed(f"{name} fails {where}: {failed.__cause__ or failed}") from None
        for number, context in zip(order, shared, strict=True):
            if wrong := find_difference(collect_outcome(context), expected[number]):
                raise CheckFailed(f"{context.choice.method.name}: {wrong} is not what it is alone, {where}")
    return "with full and knorm, at each place, to the bit"


def check_allocators(subject: MethodUnderTest) -> str:
    """Check that every allocator works with the method or is refused with a reason."""
    verdicts = []
    for name in catalogue.list_choices("allocator"):
        try:
            context = subject.context(0.2, None, allocator=name)
        except SettingError:
            verdicts.append(f"{name} refused")
            continue
        context.prefill(subject.prompt())
        verdicts.append(name)
    return ", ".join(verdicts)


CHECKS: tuple[tuple[str, Callable[[MethodUnderTest], str]], ...] = (
    ("writes into nothing it is handed", check_guards),
    ("a full budget changes nothing", check_full_budget),
    ("every cut leaves the quota", check_quota),
    ("tokens are conserved", check_tokens),
    ("no state leaks between prompts", check_state),
    ("blocks without eviction equal one block", check_blocks),
    ("a batch equals its samples", check_batch),
    ("a shared prefill equals a lone one", check_sharing),
    ("allocators", check_allocators),
)


def check_with_care(check: Callable[[MethodUnderTest], str], subject: MethodUnderTest, code: Definitions) -> str:
    """Return what a check finds; CheckFailed if the method changed kvbench's code or weights, which are put back."""
    weights = subject.weights
    try:
        return check(subject)
    finally:
        changed = code.find_changed(restore=True)
        if spoiled := weights.find_changed():
            subject.reload_model()
        if changed or spoiled:
            raise CheckFailed(f"the method changed {name_some([*changed, *spoiled])}")


def run_checks(subject: MethodUnderTest) -> int:
    """Print a line for each check; return how many failed."""
    definitions = Definitions()

    def run(check: Callable[[MethodUnderTest], str]) -> str:
        try:
            return check_with_care(check, subject, definitions)
        except ContractError as error:
            if error.spoils_model:
                subject.reload_model()
            raise

    return print_checks([(title, partial(run, check)) for title, check in CHECKS])


def print_subject(subject: MethodUnderTest) -> None:
    """Print the method's class and settings, and which of its sources are hashed."""
    target = subject.settings["_target_"]
    module = target.rpartition(".")[0]
    settings = {key: value for key, value in subject.settings.items() if key not in ("_target_", "name", "preset")}
    shape = read_layout(subject.model)
    print(f"method={subject.name}: {target} {settings or 'without settings'}")
    print(f"model={subject.checkpoint.name}: {shape.layers} layers, {shape.heads} KV heads, float64, {TOKENS} tokens")
    hashed = [name for name in source_hashes([module]) if name.split(".")[0] != "kvbench"]
    if hashed:
        print(f"hashed with it: {', '.join(hashed)}")
