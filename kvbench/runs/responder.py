"""Answer the samples of one run: read prompts into its cache, generate tokens, and make records of the answers."""

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from hashlib import sha256
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvbench.cache.accounting import find_largest
from kvbench.cache.guard import ask
from kvbench.engine.compressed_cache import trim
from kvbench.engine.generation import Answer, GenerationContext
from kvbench.engine.graph_decoding import CHUNK
from kvbench.engine.joint_decoding import Reading, Session, finish_answer, read_on, run_alone
from kvbench.engine.rehearsal import rehearse
from kvbench.engine.spending import spend
from kvbench.engine.timing import forget_peak, now, peak
from kvbench.interfaces.task import Graded, Sample
from kvbench.models.chat_template import THOUGHT_END, make_prompt_encoder, split_template
from kvbench.models.transformers_port import watch_numbers
from kvbench.runs.fidelity import TOKENS, kl_divergence, mean_nll, pack_predictions, predict
from kvbench.runs.prompt import Prompt
from kvbench.runs.resources import Resources
from kvbench.runs.spec import RunSpec
from kvbench.runs.survival import find_evidence, measure_survival
from kvbench.runs.task_calls import grade_output
from kvbench.store.record import ABSENT, Record
from kvbench.validation import ContractError, NumericalError

T = TypeVar("T")
UNGRADED: dict[str, Any] = {"score": None, "answer": None, "also": {}}
ASKED = 1000  # characters of a question that are recorded
TAIL = 32  # characters before a right answer that are encoded together with it
WARM_UP = tuple(range(64))  # token ids of the short prompt that is read first


def list_turns(uid: str, prompts: Mapping[str, tuple[Sample, Prompt]]) -> list[str]:
    """List all turns of the conversation that a sample belongs to, in order; none if it belongs to none."""
    conversation = prompts[uid][0].conversation
    if not conversation:
        return []
    return [other for other, (sample, _) in prompts.items() if sample.conversation == conversation]


@dataclass(frozen=True)
class SharedPrefix:
    """The beginning of a batch, which is read and compressed before anything else.

    Attributes:
        ids: Token ids of each sample.
        groups: The group of each sample.
        prefix: The number of tokens before the sample's own text.
        room: Tokens to reserve after the prompt. Not compared: prompts that differ only in `room` share a prefill.
    """

    ids: tuple[tuple[int, ...], ...]
    groups: tuple[str, ...]
    prefix: int = 0
    room: int = field(default=0, compare=False)


class Responder:
    """Answers samples with one model and one cache setting. Questions on one context reuse its compressed cache."""

    def __init__(self, run: RunSpec, bench: Resources) -> None:
        self.run, self.model, self.tokenizer, self.choice = run, bench.model, bench.tokenizer, run.choice()
        self.bench = bench
        self.made: dict[str, dict] = {}  # the full cache's records that were made here, by uid
        self.order = {uid: index for index, uid in enumerate(bench.prompts)}
        self.task = bench.run.task  # only the task that made the samples can score them
        self.stop = bench.ends
        self.context: GenerationContext | None = None  # the last compressed context
        self.opening: SharedPrefix | None = None
        self.prefill_ms, self.shared = 0.0, 1
        self.compiles = run.compile  # whether graphs may read tokens
        self.peak = 0  # bytes on a GPU since the context was begun, without those of inspecting it
        self.warm_up()

    def warm_up(self) -> None:
        """Read a short prompt twice.

        The first time exact guards are on, so that a hook that writes into its arguments is found before it can spoil a
        sample. The second time pays for everything that happens only once. If memory does not suffice, the samples'
        records will say so. Runs with the same method, allocator and codec do it once in a process.
        """
        choice = self.run.choice_name
        if choice in self.bench.rehearsed:
            return
        opening = SharedPrefix((WARM_UP,), ("warm-up",))

        def read() -> None:
            rehearse(self.model, self.choice, make_prompt_encoder(self.tokenizer), self._tensor([WARM_UP]))
            self._read(opening)

        with suppress(torch.cuda.OutOfMemoryError):
            self.blame_model(read)
            self.bench.rehearsed.add(choice)
        self.drop()
        if self.run.device != "cpu":
            torch.cuda.empty_cache()

    def answer(self, batch: Sequence[tuple[Sample, Prompt]]) -> list[dict]:
        """Answer a batch of prompts of equal length, or all turns of a conversation.

        If memory does not suffice, the samples of a batch are answered one by one, and a sample that does not fit alone
        gets a record with the error.

        Returns:
            One record for each sample.

        Raises:
            torch.cuda.OutOfMemoryError: A sample does not fit alone, and other processes of the sweep use the GPU too.
                It gets no record, because it may fit without them.
        """
        started, records = time.perf_counter(), self.attempt(batch)
        if records is None:
            self.drop()
            torch.cuda.empty_cache()
            if len(batch) > 1 and not batch[0][0].conversation:  # each may fit alone
                return [record for one in batch for record in self.answer([one])]
            if self.bench.gpu_processes > 1:
                raise torch.cuda.OutOfMemoryError("no memory beside the other processes of the GPU")
            measured = [{"output": "", "stop": "error", "error": "out_of_memory"} for _ in batch]
            records = self.make_records(batch, measured, time.perf_counter() - started)
        return records

    def attempt(self, batch: Sequence[tuple[Sample, Prompt]]) -> list[dict] | None:
        """Answer a batch as `answer` does; None if memory does not suffice."""
        started, measured = time.perf_counter(), None
        with suppress(torch.cuda.OutOfMemoryError):
            measured = self.blame_model(lambda: run_alone(self.begin(batch)))
        if measured is None:  # not in an except block: an error that is handled keeps its frames' tensors alive
            return None
        return self.make_records(batch, measured, time.perf_counter() - started)

    def blame_model(self, work: Callable[[], T]) -> T:
        """Do work that reads prompts, and find out after a ContractError whether the model is at fault.

        A method, an allocator or a codec that fails may have been handed numbers that are not finite. The work is then
        done once more by the model's modules, each of which is looked at.

        Raises:
            NumericalError: The model computed numbers that are not finite. The message names the dtype and the layer.
            ContractError: The model is not at fault.
        """
        try:
            return work()
        except ContractError as error:
            if error.spoils_model:
                raise
            self.drop()
            self.compiles = False
            try:
                with watch_numbers(self.model) as layers, suppress(ContractError):
                    work()
            finally:
                self.compiles = self.run.compile
                self.drop()
            if not layers:
                raise
            fault = f"layer {layers[0]} computes numbers that are not finite in {self.run.dtype}"
            if self.run.dtype == "float16":
                fault = f"float16 overflows in layer {layers[0]}; use dtype=bfloat16 or dtype=float32"
            raise NumericalError(f"model={self.run.checkpoint.name}: {fault}") from None

    def begin(self, batch: Sequence[tuple[Sample, Prompt]]) -> Session[list[dict]]:
        """Return a session that answers a batch and measures what it costs, with one result for each sample."""
        return self._converse(batch) if batch[0][0].conversation else self._measure(batch)

    def rehearse(self, batch: Sequence[tuple[Sample, Prompt]]) -> Session[None]:
        """Return a session that does what `begin` does, but only begins the answers, and keeps nothing."""
        context, hidden, method = self.open(batch), self.run.question == "hidden", self.choice.method
        # of an answer, so many that it is cut once
        tokens = max(CHUNK + 1, method.decode_interval + 2 if method.decoding else 0)
        rounds = [[turn] for turn in batch] if batch[0][0].conversation else [batch]
        with context.branch():
            for number, some in enumerate(rounds):
                yield from self._extend(context, [prompt.rest if number or hidden else () for _, prompt in some])
                sample = some[0][0]
                if self.run.fidelity and any(answers := [self._right_answer(*pair) for pair in some]):
                    yield from predict(context, answers, self._joins)
                context.reserve(sample.max_new_tokens)
                answer = Answer(
                    context,
                    sample.max_new_tokens,
                    self.run.sampling,
                    frozenset(),
                    min_new_tokens=sample.min_new_tokens,
                    keeps_rows=len(rounds) > 1,
                )
                yield from finish_answer(answer, partial(self._is_below, answer, tokens))

    @staticmethod
    def _is_below(answer: Answer, most: int, token: Tensor) -> bool:
        return answer.count < most

    @spend("grading")
    def make_records(
        self, batch: Sequence[tuple[Sample, Prompt]], measured: Sequence[dict], seconds: float
    ) -> list[dict]:
        """Score what was measured and make records of it.

        Args:
            batch: Samples with their prompts.
            measured: The results of `begin`.
            seconds: Time that it took. Scoring is added.
        """
        records, started = [], time.perf_counter() - seconds
        processes = self.bench.gpu_processes if self.bench.gpu_processes > 1 else ABSENT
        for (sample, prompt), measurement in zip(batch, measured, strict=True):
            grade = None if measurement["error"] else self._grade(sample, measurement["output"])
            graded = {"score": grade.score, "answer": grade.answer, "also": dict(grade.also)} if grade else UNGRADED
            spent = time.perf_counter() - started
            identity = self._identity(sample, prompt)
            record = Record(**identity, **measurement, **graded, gpu_processes=processes, seconds=spent)
            records.append(record.to_json())
        return records

    def _grade(self, sample: Sample, output: str) -> Graded:
        """Let the task score an output. A task that does not read thoughts is given what follows the last one."""
        if not getattr(self.task, "reads_thoughts", False) and THOUGHT_END in output:
            output = output.rpartition(THOUGHT_END)[2]
        return grade_output(f"task={self.run.task_settings.get('name')}", self.task, sample, output)

    def measure(self, sample: Sample, prompt: Prompt) -> dict:
        """Answer one prompt and measure what it cost, without a score."""
        return run_alone(self._measure([(sample, prompt)]))[0]

    def _identity(self, sample: Sample, prompt: Prompt) -> dict:
        target = sha256("\0".join(sample.answers).encode("utf-8", "surrogatepass")).hexdigest()[:16]
        return {
            "uid": sample.uid, "index": self.order[sample.uid], "subtask": sample.subtask,
            "group": sample.group or sample.uid,
            "prompt_hash": prompt.hash(), "target_hash": target, "target": list(sample.answers),
            "asked": shorten(sample.question + sample.answer_prefix),
            "tokens_in": len(prompt.ids), "tokens_context": len(prompt.context),
            "budget": 1.0 if self.run.full else self.run.budget.value, "meta": dict(sample.meta),
            "conversation": sample.conversation or None, "turn": len(prompt.earlier),
            "retokenized": prompt.retokenized or ABSENT, "architecture": self.bench.probed or ABSENT,
            "weights": self.run.checkpoint.weights_format or ABSENT,
        }  # fmt: skip

    def _measure(self, batch: Sequence[tuple[Sample, Prompt]]) -> Session[list[dict]]:
        rest = [prompt.rest if self.run.question == "hidden" else () for _, prompt in batch]
        context = self.open(batch)
        with context.branch():
            asked = yield from self._extend(context, rest)
            return (yield from self._generate_answers(context, batch, self.prefill_ms, asked))[0]

    def _converse(self, turns: Sequence[tuple[Sample, Prompt]]) -> Session[list[dict]]:
        """Answer the turns of a conversation. The task's or the model's own answers stay in the cache."""
        records = []
        context = self.open(turns)
        with context.branch():
            for turn, (sample, prompt) in enumerate(turns):
                rest = prompt.rest if turn or self.run.question == "hidden" else ()
                asked = yield from self._extend(context, [rest])
                spent = 0.0 if turn else self.prefill_ms
                with nullcontext() if sample.said is None else context.branch():
                    [record], answer = yield from self._generate_answers(context, [(sample, prompt)], spent, asked)
                records.append(record)
                last = int(answer[0, -1])  # not read yet; the next turn's text has the token that ends an answer
                if sample.said is None and last not in self.stop:
                    yield from self._extend(context, [(last,)])
        return records

    @property
    def _joins(self) -> bool:
        """Whether other runs may answer together with this one, because they have read the same prompt."""
        return self.run.shares_decoding and self.shared > 1

    def has_read(self, batch: Sequence[tuple[Sample, Prompt]]) -> bool:
        """Whether the batch's shared prefix was read last."""
        return self.opening == self.find_prefix(batch)

    def drop(self) -> None:
        """Free the last context."""
        self.context = self.opening = None

    def find_prefix(self, batch: Sequence[tuple[Sample, Prompt]]) -> SharedPrefix:
        """Return the beginning of a batch that is read first and then compressed."""
        hidden, (first, first_prompt) = self.run.question == "hidden", batch[0]
        room = first.max_new_tokens + (len(first_prompt.rest) if hidden else 0)
        if first.conversation:
            room, batch = sum(len(prompt.rest) + turn.max_new_tokens for turn, prompt in batch), batch[:1]
        ids = tuple(prompt.context if hidden else prompt.context + prompt.rest for _, prompt in batch)
        groups = tuple(sample.group or sample.uid for sample, _ in batch)
        return SharedPrefix(ids, groups, first_prompt.prefix, room)

    def make_context(self, opening: SharedPrefix, like: GenerationContext | None = None) -> GenerationContext:
        """Make the context into which a shared prefix is read. `like` is one just made for another run."""
        run, words = self.run, make_prompt_encoder(self.tokenizer)
        seeds = tuple(derive_seed(run.seed, group) for group in opening.groups)
        return GenerationContext(
            self.model,
            self.choice,
            run.budget,
            run.block_size,
            seeds,
            opening.prefix,
            words,
            self.compiles,
            opening.room,
            like,
        )

    def keep_context(
        self, opening: SharedPrefix, context: GenerationContext, milliseconds: float, shared: int = 1
    ) -> None:
        """Keep a context that was read. `shared` is the number of runs that shared the prefill."""
        self.opening, self.context, self.prefill_ms, self.shared = opening, context, milliseconds, shared
        self.peak = peak(self.run.device) or 0

    @spend("reading")
    def _read(self, opening: SharedPrefix) -> None:
        self.drop()  # freed before the new one grows
        forget_peak(self.run.device)
        begin = now(self.run.device)
        context = self.make_context(opening)
        context.prefill(self._tensor(opening.ids))
        self.keep_context(opening, context, 1000 * (now(self.run.device) - begin))

    def open(self, batch: Sequence[tuple[Sample, Prompt]]) -> GenerationContext:
        """Return the compressed context of a batch: the last one if it is the same."""
        if not self.has_read(batch):
            self._read(self.find_prefix(batch))
        assert self.context is not None  # it was read now or before
        return self.context

    def _extend(self, context: GenerationContext, rest: Sequence[tuple[int, ...]]) -> Session[Reading]:
        """Return a session that reads what follows the context, if anything, and says what that cost."""
        return (yield from read_on(context, self._tensor(rest))) if rest[0] else Reading()

    def _generate_answers(
        self, context: GenerationContext, batch: Sequence[tuple[Sample, Prompt]], spent: float, asked: Reading
    ) -> Session[tuple[list[dict], Tensor]]:
        """Generate the answers of a batch.

        Args:
            context: The context that was read.
            batch: Samples with their prompts.
            spent: Milliseconds that reading the context took.
            asked: What reading the questions cost.

        Returns:
            For each sample the answer and its costs, and the tokens, shape (B, n).
        """
        looked = self._inspect_context(context, batch)
        before, shared = self.peak, self.shared  # this responder may read another batch meanwhile
        if self.run.fidelity:
            compared = yield from self._compare(context, batch)
            looked = [inspection | more for inspection, more in zip(looked, compared, strict=True)]
        forget_peak(self.run.device)
        context.reserve(batch[0][0].max_new_tokens)
        counted = self._count(context) | {"batch": len(batch)}
        answers = yield from self._tokens(context, [sample for sample, _ in batch])
        tokens, gpu = answers.shape[1], self.run.device != "cpu"
        attended = list(chain.from_iterable(layer.attended for layer in context.own_layers))
        cached = context.memory.peak + context.sliding_bytes() + context.bytes().recurrent
        counted |= {
            "rows_attended": mean(attended) if attended else counted["rows_held"],
            "rows_held_end": mean([layer.rows.mean_rows for layer in context.own_layers]),
            "rows_seen_decoding": context.seen - (tokens - 2) / 2 if tokens > 1 else context.seen,
            "decoding": context.decoding,
            "decoded_together": context.decoded_together,
            "capture_ms": asked.capture_ms + context.capture_ms,
            "peak_rows": max(layer.tally.peak_rows for layer in context.own_layers),
            "peak_rows_attended": max(layer.tally.peak_attended for layer in context.own_layers),
            "prefill_ms": spent + asked.milliseconds,
            "shared_prefill": shared,  # runs that the prompt was read for at once
            "ttft_ms": spent + asked.milliseconds + 1000 * context.stamps[0],
            "peak_bytes": max(before, peak(self.run.device) or 0) if gpu else cached,
            "peak_of": "cuda" if gpu else "cache",
            "error": None,
        }
        if asked.together > 1:
            counted["asked_together"] = asked.together
        outputs = [self._output(sample, row, context.stamps) for (sample, _), row in zip(batch, answers, strict=True)]
        return [counted | inspection | output for inspection, output in zip(looked, outputs, strict=True)], answers

    def _tokens(self, context: GenerationContext, samples: Sequence[Sample]) -> Session[Tensor]:
        """Generate tokens, shape (B, n), until each sample's answer is over. In a conversation they may stay."""
        like, stop = samples[0], self.stop.union(samples[0].ends)
        seeds = tuple(derive_seed(self.run.seed, sample.uid) for sample in samples)
        answer = Answer(
            context,
            like.max_new_tokens,
            self.run.sampling,
            stop,
            seeds=seeds,
            min_new_tokens=like.min_new_tokens,
            keeps_rows=bool(like.conversation) and like.said is None,
        )
        tokens: list[Tensor] = []
        over = [False] * len(samples)

        def goes_on(token: Tensor) -> bool:
            nonlocal over
            tokens.append(token)
            if (
                not like.until or self.run.thinking == "on"
            ):  # a thought is decoded to its end; `_output` cuts the answer
                return True
            ids = torch.stack(tokens[-4 * max(map(len, like.until)) :], dim=1).tolist()  # 4 bytes a character
            texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
            ended = [
                row[-1] in stop or any(end in text for end in like.until) for row, text in zip(ids, texts, strict=True)
            ]
            over = [one or other for one, other in zip(over, ended, strict=True)]
            return not all(over)

        yield from finish_answer(answer, goes_on)
        return torch.stack(tokens, dim=1)

    @spend("comparing")
    def _inspect_context(self, context: GenerationContext, batch: Sequence[tuple[Sample, Prompt]]) -> list[dict]:
        """Record which of the read tokens are held when the answers begin.

        The memory that this takes is no part of the peak.
        """
        self.peak = max(self.peak, peak(self.run.device) or 0)
        shares = measure_survival([layer.rows for layer in context.own_layers], context.seen)
        return [
            {"survived": share, "evidence": find_evidence(*pair, context.seen)}
            for share, pair in zip(shares, batch, strict=True)
        ]

    def _compare(self, context: GenerationContext, batch: Sequence[tuple[Sample, Prompt]]) -> Session[list[dict]]:
        """Measure how likely the right answers are, and how far the predictions are from the full cache's.

        Nothing is compared if a conversation holds the model's own answers, because they differ between runs, or if a
        sample has no right answer. See kvbench.runs.fidelity.
        """
        answers = [self._right_answer(sample, prompt) for sample, prompt in batch]
        if not any(answers):
            return [{"fidelity": {}} for _ in batch]
        predictions, reading = yield from predict(context, answers, self._joins)
        begin = now(self.run.device)
        with spend("comparing"):
            comparisons = [
                self._compare_one(sample, answer, predicted, batch) if answer else {"fidelity": {}}
                for (sample, _), answer, predicted in zip(batch, answers, predictions, strict=True)
            ]
            spent = 1000 * (reading + now(self.run.device) - begin) / len(batch)
        return [
            comparison | {"fidelity_ms": spent} if comparison["fidelity"] else comparison for comparison in comparisons
        ]

    def _compare_one(
        self, sample: Sample, answer: Sequence[int], predicted: Tensor, batch: Sequence[tuple[Sample, Prompt]]
    ) -> dict[str, Any]:
        """Compare the predictions for a right answer, (longest, vocab), with the full cache's.

        The full cache's own predictions are kept.
        """
        log_probs, more = predicted[: len(answer)], {}
        kl: float | None = 0.0
        if self.run.value == self.run.baseline().value:
            more = {"predictions": pack_predictions(log_probs)}
            self.bench.predictions[sample.uid] = more["predictions"]
        else:
            full = self._full_predictions(sample.uid, batch)
            kl = None if full is None else kl_divergence(full, log_probs)
        return {"fidelity": {"nll": mean_nll(log_probs, answer), "kl": kl, "tokens": len(answer)}} | more

    def _right_answer(self, sample: Sample, prompt: Prompt) -> list[int]:
        """Return the first tokens of the right answer as they follow the prompt; none if nothing is compared."""
        if prompt.unknown:
            return []
        owner, task = f"task={self.run.task_settings.get('name')}", self.task
        assert hasattr(task, "reference")  # runs.checks refuses fidelity=true without it
        text = ask(owner, "reference", lambda: task.reference(sample), f" of {sample.uid}")
        before = sample.answer_prefix or (split_template(self.tokenizer)[1] if sample.chat else "") or sample.question
        tail = before[-TAIL:]  # some tokenizers begin a text with a token that never follows another
        text = tail + ("" if tail[-1:].isspace() else " ") + text
        encoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = [
            token
            for token, (_, end) in zip(encoding["input_ids"], encoding["offset_mapping"], strict=True)
            if end > len(tail)
        ]
        return ids[:TOKENS]

    def _full_predictions(self, uid: str, batch: Sequence[tuple[Sample, Prompt]]) -> str | None:
        """Return the full cache's predictions for a sample; None if the full cache did not fit into memory.

        They are read from its record if this process has not made them, or made now if no other process has either.
        """
        if (made := self.bench.predictions.get(uid)) is not None:
            return made
        record = (self.bench.full.record(uid) if self.bench.full else None) or self.made.get(uid)
        if record is None:
            prompts = self.bench.prompts
            turns = [prompts[other] for other in list_turns(uid, prompts)]
            self.made = {
                full_record["uid"]: full_record
                for full_record in Responder(self.run.baseline(), self.bench).answer(turns or batch)
            }
            record = self.made[uid]
        return record.get("predictions")

    @spend("comparing")
    def _count(self, context: GenerationContext) -> dict:
        """Return what one sample of the batch holds when the answer begins."""
        held, layers, batch = context.bytes(), context.own_layers, len(context.seeds)
        prompt = context.progress.prompt
        return {
            "quota": None if self.run.budget.value is None else context.budget.rows(prompt, prompt),
            "protected": find_largest(layer.tally.head_protected for layer in layers),
            # protected rows that the quota had no room for: the largest number in one head at one eviction
            "given_up": {
                kind: find_largest(layer.tally.head_given_up[kind] for layer in layers) for kind in ("sinks", "recents")
            },
            "allocation": layers[0].state.shared.get("allocation"),  # the rule that the allocator says it followed
            "resident_bytes": held.rows // batch, "full_bytes": context.full_bytes() // batch,
            "metadata_bytes": held.metadata // batch, "state_bytes": held.state // batch,
            "weights_bytes": self.choice.weights_bytes,
            "headroom_bytes": held.headroom // batch, "sliding_bytes": context.sliding_bytes() // batch,
            "recurrent_bytes": held.recurrent // batch or ABSENT,
            "rows_held": mean([layer.rows.mean_rows for layer in layers]), "rows_seen": context.seen,
            "while_decoding": "cuts" if self.choice.method.decoding else "appends",
            "reread_tokens": context.reread_tokens, "reread_ms": context.reread_ms,
        }  # fmt: skip

    def _output(self, sample: Sample, tokens: Tensor, stamps: list[float]) -> dict:
        stop = self.stop.union(sample.ends)
        kept = trim(tokens, stop)
        text, ended = self._text(kept), "eos" if int(kept[-1]) in stop else "length"
        if (place := self._find_until(sample, text)) is not None:
            fewest = self._count_tokens(kept, lambda shorter: self._find_until(sample, shorter) is not None)
            kept, ended, text = kept[:fewest], "until", text[:place]
        decode_ms = 1000 * (stamps[len(kept) - 1] - stamps[0])
        lengths = {}
        if thoughts := text.count(THOUGHT_END):
            thought = self._count_tokens(kept, lambda shorter: shorter.count(THOUGHT_END) >= thoughts)
            lengths = {"thought_tokens": thought, "answer_tokens": len(kept) - thought}
        return {"output": text, "tokens_out": len(kept), "stop": ended, "decode_ms": decode_ms} | lengths

    def _find_until(self, sample: Sample, text: str) -> int | None:
        """Return where the first stop text begins; None if there is none. A thought may contain such texts."""
        begin = 0
        if self.run.thinking == "on":
            begin = len(text) - len(text.partition(THOUGHT_END)[2].lstrip())
        return min((place for end in sample.until if (place := text.find(end, begin)) >= 0), default=None)

    def _count_tokens(self, tokens: Tensor, holds: Callable[[str], bool]) -> int:
        """Return the smallest number of tokens whose text meets a condition that the text of all of them meets."""
        return 1 + bisect_left(range(len(tokens)), True, key=lambda last: holds(self._text(tokens[: last + 1])))

    def _text(self, tokens: Tensor) -> str:
        """Decode tokens without special ones, except the one that ends a thought in some tokenizers."""
        ids, parts = tokens.tolist(), []
        while self._thought_end in ids:
            place = ids.index(self._thought_end)
            parts.append(ids[:place])
            ids = ids[place + 1 :]
        return THOUGHT_END.join(self.tokenizer.decode(part, skip_special_tokens=True) for part in (*parts, ids))

    @cached_property
    def _thought_end(self) -> int | None:
        """The special token that ends a thought; None if the tokenizer has none."""
        known = self.tokenizer.added_tokens_decoder.items()
        return next((token for token, added in known if added.special and added.content == THOUGHT_END), None)

    def _tensor(self, rows: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(rows, device=next(self.model.parameters()).device)


def shorten(text: str, most: int = ASKED) -> str:
    """Leave out the middle of a long text and say how many characters are missing."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]} […{len(text) - most // 2 * 2} characters…] {text[-(most // 2) :]}"


def mean(values: Sequence[float]) -> float:
    """Return the mean."""
    return sum(values) / len(values)


def derive_seed(seed: int, group: str) -> int:
    """Derive the seed of the samples of one context. It does not depend on other samples."""
    return int.from_bytes(sha256(f"{seed} {group}".encode()).digest()[:7], "big")
