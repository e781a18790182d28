"""Rows of which every token replaces one, at fixed addresses for a CUDA graph.

If a layer is cut after every token, a row of each head leaves for each that comes. The new row takes the slot of the
row that left, so a cut moves no keys and values. Each row's rank, its index in the order of the text, is kept beside
it. The method must take rows in any order (`Captured.order_free`).

A head whose rows fit its quota gives up none, and the next row takes the next unused slot. A head's slots in use are
therefore its first ones. Attention and the method see no others. Layers that are not cut only append (`AppendedRows`).

A token of all samples needs the same kernel calls, wherever in its text each sample is. So the rows of several answers
with the same method lie in one memory, in which each head has as many slots as the longest one of the layer needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from kvbench.cache.layer import Layer
from kvbench.cache.storage import StoredRows
from kvbench.engine.answer_quotas import AnswerQuotas, join_answer_quotas
from kvbench.engine.appended_rows import AppendedRows
from kvbench.engine.graph_decoding import StepRows
from kvbench.engine.quota_rows import QuotaRows
from kvbench.engine.streams import Beside
from kvbench.interfaces.codec import Plain
from kvbench.interfaces.observation import State
from kvbench.interfaces.rows import Rows
from kvbench.kernels.attention import RaggedRows, attend_ragged
from kvbench.kernels.rope_append import append
from kvbench.kernels.row_replacement import replace_row
from kvbench.kernels.row_selection import gather_rows
from kvbench.models.decoder_step import Attend, Norms
from kvbench.models.decoder_weights import DecoderWeights


def find_replaced_layers(layers: Sequence[Layer], plan: AnswerQuotas) -> list[int]:
    """Return the numbers of the layers whose rows are replaced. The others only append.

    They are those that are cut, and those that the method looks at without cutting them in this answer.
    """
    method = layers[0].choice.method
    looks = method.watches or method.uses_cache_positions  # at all layers that it does not spare
    pairs = enumerate(zip(plan.cut, layers, strict=True))
    return [number for number, (cut, layer) in pairs if cut or (looks and layer.index in layer.cut_layers)]


def make_replaced_rows(
    weights: DecoderWeights,
    answers: Sequence[Sequence[Layer]],
    tokens: int,
    plans: Sequence[AnswerQuotas],
    implementation: str | None = None,
) -> list[StepRows]:
    """Make rows for all layers of answers: `ReplacedRows`, and `AppendedRows` for the layers that are not cut.

    Arguments as of `ReplacedRows`. The answers are of one kind (`find_shared_kind`).
    """
    replaced = find_replaced_layers(answers[0], plans[0])
    appended = [number for number in range(len(answers[0])) if number not in replaced]
    some, others = ([[layers[n] for n in numbers] for layers in answers] for numbers in (replaced, appended))
    made: list[StepRows] = []
    if replaced:
        selected = [plan.select(replaced) for plan in plans]
        made.append(ReplacedRows(weights, some, tokens, selected, implementation))
    if appended:
        made.append(AppendedRows(weights, others, tokens, implementation))
    return made


def find_shared_kind(layers: Sequence[Layer], plan: AnswerQuotas) -> object | None:
    """Return what is equal for answers whose rows lie in one memory, or None if an answer has a memory by itself.

    The hooks are called once for all samples. They must therefore belong to the same method with the same settings,
    remember nothing of a context, and see the same layers, columns and prefix. Streaming methods give heads
    memory of different sizes and no keys and values to the hooks, which a batch with padded memory would show. A codec
    packs the tokens of one answer.
    """
    choice = layers[0].choice
    remembers = any(layer.state.layer or layer.state.shared for layer in layers)
    if choice.streams or choice.codec.packs or remembers:
        return None
    columns = tuple(tuple(sorted(layer.rows.columns)) for layer in layers)
    cut = tuple(find_replaced_layers(layers, plan))
    return choice.method, choice.codec, choice.exact, cut, columns, layers[0].progress.prefix, plan.tokens


@dataclass(frozen=True)
class Slots:
    """A layer's slots of one answer, which are views of the memory of all answers."""

    rows: Tensor
    """Keys and values, (2, R, d), of one head behind the other."""
    starts: Tensor
    """The first row of each head, (B, H)."""
    places: Tensor
    """Positions, (B, H, n), -1 for slots that are not in use."""
    ranks: Tensor
    """The rank of each slot's row, (B, H, n)."""
    order: Tensor
    """The slot of each rank, (B, H, n)."""
    mass: Tensor
    """1 or 0, (B, H, n)."""
    columns: dict[str, Tensor]
    """The method's values, (B, H, n) by name."""
    free: Tensor
    """The slot of the next token, (B, H)."""


class ReplacedRows(QuotaRows):
    """The rows of layers, with a slot for each row of the longest head and one for the next token.

    A NaN score of one answer marks the tokens of all.
    """

    def __init__(
        self,
        weights: DecoderWeights,
        answers: Sequence[Sequence[Layer]],
        tokens: int,
        plans: Sequence[AnswerQuotas],
        implementation: str | None = None,
    ) -> None:
        """Allocate memory, which holds zeros until `back` copies the layers' rows.

        Args:
            weights: The model's weights.
            answers: The layers of each answer. The hooks of the first answer's layers are called for all.
            tokens: Number of tokens that will be read.
            plans: For each answer, what the heads may keep and do hold after each of these tokens.
            implementation: Name of the kernels' implementation; None chooses one.
        """
        layers, self.plans, self.seen = answers[0], plans, [answer[0].rows.seen for answer in answers]
        sizes = [answer[0].rows.shape[0] for answer in answers]
        plan = join_answer_quotas(plans, sizes)
        capacities = [rows.expand(sum(sizes), layers[0].rows.shape[1]) + 1 for rows in plan.rows[-1]]
        if not layers[0].choice.streams:  # it sees keys and values, which are padded to the longest head
            capacities = [torch.full_like(count, int(count.max())) for count in capacities]
        states = None
        if len(answers) > 1:
            seeds = tuple(chain.from_iterable(answer[0].state.seeds for answer in answers))
            states = [State(seeds) for _ in layers]
        first, end = min(self.seen), max(self.seen) + tokens
        super().__init__(weights, answers, capacities, first, end, implementation, states)
        per_sample = [
            (seen, answer[0].progress.prompt)
            for seen, answer, size in zip(self.seen, answers, sizes, strict=True)
            for _ in range(size)
        ]
        begins, prompts = torch.tensor(per_sample, device=self.device).T
        self.begins = begins[:, None, None]  # each sample's position at step 0
        self.offsets = begins - first  # of `angles`
        if len({answer[0].progress.prompt for answer in answers}) > 1:
            self.view.prompt = prompts[:, None, None]
        self.quotas = plan.quotas.to(self.device)
        self.grows = [not constant for constant in plan.constant]
        self.step = torch.zeros((), dtype=torch.int32, device=self.device)  # number of tokens read
        self.beside: Beside = Beside(self.device)  # rows are replaced there, while the next layers read the token
        self.ragged = [bool((count != count.max()).any()) for count in capacities]
        self.in_memory = [  # of all heads' slots, padded to the longest head, those that a ragged layer has memory for
            (torch.arange(int(count.max())) < count[..., None]).flatten().nonzero()[:, 0].to(self.device)
            if ragged
            else None
            for count, ragged in zip(capacities, self.ragged, strict=True)
        ]
        self.ranks = [torch.zeros_like(places) for places in self.places]  # of each slot's row
        self.order = [torch.zeros_like(places) for places in self.places]  # the slot of each rank
        self.free = torch.zeros(len(layers), *self.held, dtype=torch.int64, device=self.device)  # the next token's
        self.lengths = torch.ones_like(self.free)  # slots in use, the next token's included
        self.mass = [
            torch.zeros_like(mass) if grows else mass for mass, grows in zip(self.mass, self.grows, strict=True)
        ]
        # a new row's rank in a layer that does not grow
        self.last = torch.tensor([int(count.max()) - 1 for count in capacities], device=self.device)
        self.kept_tally: Tensor | None = None  # when the layers last got rows; None if they hold their first ones
        self.kept_order: Tensor | None = None  # `order` of all layers at that time, flat; None for that of the text

    def prepare(self) -> None:
        """Do nothing: each head has a slot for a token, and its other slots hold zeros."""

    def reader(self, cuts: bool) -> Attend:
        """Return the function that replaces a row and attends in one layer, for `forward_step`."""
        position = self.begins + self.step  # int64 as `places`, so that comparing them needs no conversion
        quotas = self.quotas.index_select(0, self.step[None])[0] if any(self.grows) else self.quotas[0]
        implementation, lse = self.implementation, self.view.wants_lse

        def attend(index: int, projected: Sequence[Tensor], norms: Norms) -> Tensor:
            given = position, self.angles[index], self.step, norms, self.offsets
            new_keys, new_values, rotates = self.pack(index, projected, *given)
            keys, values = (self.rows[index] if self.ragged[index] else self.padded(index)).unbind()
            queries = append(
                projected[0],
                new_keys,
                new_values,
                *self.angles[index],
                keys,
                values,
                0,
                self.step,
                slots=self.free[index],
                starts=self.starts[index] if self.ragged[index] else None,
                offsets=self.offsets,
                norms=norms,
                rotates_keys=rotates,
                implementation=implementation,
            )
            asking, held = queries, keys
            if self.tables is not None:
                asking, held = self.rotate(index, queries, position)
            in_use, tail = self.find_slots_in_use(index, held, values)
            extras = self.weights.blocks[self.layers[index].index].attention.extras
            outputs, sums = attend_ragged(
                asking, in_use, *tail, self.weights.scaling, lse=lse, extras=extras, implementation=implementation
            )
            with self.beside.work(queries, outputs, sums, position, quotas):
                self.replace(index, queries, outputs, sums, position, quotas[index])
            return outputs

        return attend

    def rotate(self, index: int, queries: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate a layer's queries and keys by their ranks. `position` is that of each sample, (B, 1, 1).

        Returns queries (B, Hq, 1, d) and keys (B, H, n, d).
        """
        asking, ranks = queries.view(*self.held, -1, queries.shape[3]), self.ranks[index]
        newest = self.lengths[index][..., None] - 1 if self.grows[index] else self.last[index]
        asking, keys = self.rotate_by_slot(index, asking, position, newest, ranks)
        return asking.view_as(queries), keys

    def find_slots_in_use(
        self, index: int, keys: Tensor, values: Tensor
    ) -> tuple[RaggedRows | None, tuple[Tensor, Tensor]]:
        """Return the slots of a layer that are in use, for attention, as ragged rows and a tail."""
        if not self.grows[index]:
            return None, (keys, values)
        dim, longest = keys.shape[-1], self.places[index].shape[2]
        starts, lengths = self.starts[index].flatten(), self.lengths[index].flatten()
        in_use = RaggedRows(keys.view(-1, dim), values.view(-1, dim), None, starts, lengths, longest)
        none = keys.new_empty(*self.held, 0, dim)
        return in_use, (none, none)

    def replace(
        self, index: int, queries: Tensor, outputs: Tensor, lse: Tensor | None, position: Tensor, quotas: Tensor
    ) -> None:
        """Let the method see the token, and choose the row of each head that leaves.

        `position` is that of each sample, (B, 1, 1). `quotas` broadcast to (B, H).
        """
        layer, columns, places, free = self.layers[index], self.columns[index], self.places[index], self.free[index]
        order, mass, method, grows = self.order[index], self.mass[index], layer.method, self.grows[index]
        capacity = places.shape[2]
        keys = values = self.rows[index].new_empty(*places.shape, 0)
        if not self.ragged[index]:
            keys, values = self.padded(index).unbind()
        rows, each = Rows(keys, values, places, mass, columns, order), None if grows else capacity
        quota = quotas[..., None] if grows else capacity - 1
        with layer.guard.unnoted():  # `invalid` notes NaN, so guards add nothing to the graph
            observation, rows = self.view.show(index, rows, queries, outputs, lse, position, each)
            scores = method.score(observation, rows, self.view.states[index])
            masks = method.protect_sinks(observation, rows, quota), method.protect(observation, rows, quota)
        layer.guard.release()
        replace_row(
            scores,
            *masks,
            places,
            self.ranks[index],
            order,
            free,
            position,
            self.invalid,
            self.tally[index],
            growth=(self.lengths[index], quotas, mass) if grows else None,
            implementation=self.implementation,
        )
        for name, column in columns.items():
            column.copy_(rows.columns[name])
            column.scatter_(-1, free[..., None], 0)

    def advance(self, cuts: bool) -> None:
        self.step += 1

    def slots(self, index: int, answer: int) -> Slots:
        """Return a layer's slots of one answer."""
        samples, rows, (_, heads, count) = self.samples[answer], self.rows[index], self.places[index].shape
        if len(self.answers) > 1:  # no layer is ragged then
            rows = rows[:, samples.start * heads * count : samples.stop * heads * count]
        return Slots(
            rows,
            self.starts[index][: samples.stop - samples.start],
            self.places[index][samples],
            self.ranks[index][samples],
            self.order[index][samples],
            self.mass[index][samples],
            {name: column[samples] for name, column in self.columns[index].items()},
            self.free[index, samples],
        )

    def back(self, step: int) -> int:
        """Copy the rows from the layers and return how many tokens have been read by then: `step` or fewer."""
        if self.kept_order is None:  # the rows stand in the slots in the order of the text
            slots = torch.arange(max(order.shape[2] for order in self.order), device=self.device)
            for slot_numbers in (*self.order, *self.ranks):
                slot_numbers.copy_(slots[: slot_numbers.shape[2]].expand_as(slot_numbers))
        else:  # back into the same slots, so that sums are done in the same order again
            kept = self.kept_order.split([order.numel() for order in self.order])
            for order, before in zip(self.order, kept, strict=True):
                order.copy_(before.view_as(order))
        self.invalid.zero_()
        if self.kept_tally is None:
            self.tally.zero_()
        else:
            self.tally.copy_(self.kept_tally)
        read = min(map(self.copy_rows, range(len(self.answers))))
        self.step.fill_(read)
        return read

    def copy_rows(self, answer: int) -> int:
        """Copy an answer's rows from its layers into the slots that `order` says.

        Returns how many tokens were read then.
        """
        layers, samples = self.answers[answer], self.samples[answer]
        read = layers[0].rows.seen - self.seen[answer]
        rows = self.plans[answer].rows[read]
        counts = rows.to(self.device)  # once for all layers, because the host waits for it
        equal = [
            held[0] if len(set(held)) == 1 else None for held in rows.flatten(1).tolist()
        ]  # of all heads of a layer
        self.free[:, samples] = counts
        self.lengths[:, samples] = counts + 1
        for index, (layer, count) in enumerate(zip(layers, equal, strict=True)):
            slots = self.slots(index, answer)
            if count is not None and self.kept_order is None and self.takes_in_order(index, layer, count):
                self.take_in_order(index, layer, slots, count)
            else:
                self.take_rows(index, layer, slots, counts[index].expand(slots.free.shape)[..., None])
        return read

    def takes_in_order(self, index: int, layer: Layer, count: int) -> bool:
        """Return whether all heads of a layer hold `count` rows, which `take_in_order` can copy."""
        held = layer.rows
        whole = held.even and held.longest == count and not held.tail and held.is_raw
        return whole and not self.ragged[index] and not self.columns[index]

    def take_in_order(self, index: int, layer: Layer, slots: Slots, count: int) -> None:
        """Copy a layer's rows into its first slots, with far fewer launches than `take_rows` needs.

        Other slots keep what they hold.
        """
        held, places = layer.rows, slots.places
        assert held.places is not None and held.stored is not None  # the layer was cut
        for into, rows in zip(slots.rows, held.stored.read(), strict=True):
            into.view(*places.shape, -1)[:, :, :count] = rows.view(*places.shape[:2], count, -1)
        places[..., :count] = held.places.view(*places.shape[:2], count)
        places[..., count] = held.seen
        if self.grows[index]:  # else every slot is in use
            places[..., count + 1 :] = -1
            slots.mass[..., : count + 1] = 1
            slots.mass[..., count + 1 :] = 0

    def take_rows(self, index: int, layer: Layer, slots: Slots, count: Tensor) -> None:
        """Copy a layer's rows into the slots that `order` says. The host does not wait for the GPU.

        Slots that are not in use get an arbitrary row.

        Args:
            index: The layer's number here.
            layer: The layer.
            slots: Its slots.
            count: Number of rows of each head, (B, H, 1).
        """
        places, ranks, order = slots.places, slots.ranks, slots.order
        held, numbers = layer.rows.view(), torch.arange(places.shape[2], device=self.device)
        longest, dim = held.keys.shape[2:]
        ranks.scatter_(-1, order, numbers.expand_as(places))
        first = (ranks + longest - count).clamp(min=0, max=longest - 1)  # the row of each slot
        heads = torch.arange(count.numel(), device=self.device).view_as(count)
        source = (first + longest * heads).flatten()  # in all heads' rows
        if self.ragged[index]:
            source = source[self.in_memory[index]]
        for into, old in zip(slots.rows, (held.keys, held.values), strict=True):
            torch.index_select(old.reshape(-1, dim), 0, source, out=into)
        absent, free = ranks >= count, order.gather(-1, count)
        places.copy_(held.places.gather(-1, first).masked_fill(absent, -1))
        places.scatter_(-1, free, layer.rows.seen)
        slots.free.copy_(free[..., 0])
        for name, column in slots.columns.items():
            column.copy_(held.columns[name].gather(-1, first).masked_fill(absent, 0))
        slots.mass.copy_(numbers <= count)

    def keep(self, read: int) -> None:
        """Give the layers the rows that the first `read` tokens left, as if the layers had read and cut them."""
        if self.give_layers(read, 0):
            self.kept_order = torch.cat([order.flatten() for order in self.order])
            self.kept_tally = self.tally.clone()

    def give_layers(self, read: int, answer: int) -> bool:
        """Give an answer's layers the rows after `read` tokens. Returns whether they lacked any."""
        before = self.answers[answer][0].rows.seen - self.seen[answer]
        for index in range(len(self.layers)) if read > before else ():
            self.give_rows(index, answer, before, read)
        return read > before

    def finish(self, read: int, answer: int = 0) -> None:
        """Give an answer's layers their rows, and how many of them were protected."""
        self.give_layers(read, answer)
        for index in range(len(self.layers)):
            if self.plans[answer].find_last_cut(index, 0, read) is not None:
                self.give_tally(index, answer)

    def forget(self, read: int, answer: int = 0) -> None:
        """Let an answer's layers count its first `read` tokens, and give them as many rows of arbitrary content."""
        layers, plan = self.answers[answer], self.plans[answer]
        before = layers[0].rows.seen - self.seen[answer]
        shape = layers[0].rows.shape
        counts = plan.rows[read].expand(-1, *shape).flatten(1)  # of the heads of each layer
        totals, longest = counts.sum(1).tolist(), counts.amax(1).tolist()
        for index, layer in enumerate(layers if read > before else ()):
            like, lengths = self.rows[index], layer.rows.lengths
            if lengths is None or layer.rows.tail or not plan.constant[index]:
                lengths = counts[index].view(shape).to(self.device)
            stored = Plain(*(like.new_empty(totals[index], like.shape[2]) for _ in range(2)))
            places = like.new_empty(totals[index], dtype=torch.int32)
            rows = layer.rows.replace_all(read - before, stored, places, lengths, longest[index], layer.even, {}, None)
            self.hand_over(index, answer, before, read, rows)

    def give_rows(self, index: int, answer: int, before: int, read: int) -> None:
        """Give a layer of an answer its rows after `read` tokens. It has those after `before` tokens."""
        layer, plan, slots = self.answers[answer][index], self.plans[answer], self.slots(index, answer)
        order, shape, cut = slots.order, layer.rows.shape, plan.find_last_cut(index, before, read)
        rows, even, packed = layer.rows, layer.rows.even if cut is None else layer.even, self.packed[index]
        now = plan.rows[read, index]
        length = rows.tail + read - before if cut is None else read - cut  # of the tail
        length = length if packed is None else 0
        stored, held_places, tail, lengths = None, None, None, None
        longest, starts = int(now.max()) - length, slots.starts[..., None]
        held = rows.lengths
        if held is None or rows.tail or not plan.constant[index]:  # else as many rows of each head as before
            held = (now - length).to(self.device).expand(shape).contiguous()
        flat = slots.rows[:, None, None].unbind()  # (1, 1, R, d) each
        if cut is not None or rows.stored is not None:
            in_order, held_places = order[..., :longest] + starts, slots.places.gather(-1, order[..., :longest]).int()
            if not even:
                mask = torch.arange(longest, device=self.device) < held[..., None]
                in_order, held_places = in_order[mask], held_places[mask]
            if packed is None:
                stored = Plain(*gather_rows(in_order.flatten(), *flat, implementation=self.implementation))
            held_places, lengths = held_places.flatten(), held
        if length:  # of uneven heads every token cuts some
            in_order = order[..., longest : longest + length] + starts
            last = gather_rows(in_order.flatten(), *flat, implementation=self.implementation)
            tail = [part.view(*shape, length, -1) for part in last]
        columns = {}
        if slots.columns:
            ranks = torch.arange(int(now.max()), device=self.device) - (longest - held)[..., None]  # absent rows first
            numbers = order.gather(-1, ranks.clamp(min=0))
            columns = {n: column.gather(-1, numbers).masked_fill(ranks < 0, 0) for n, column in slots.columns.items()}
        if packed is None:
            rows = rows.replace_all(read - before, stored, held_places, lengths, longest, even, columns, tail)
        else:
            assert held_places is not None  # packed rows are a cut part
            rows = packed.finish_cut(read, held_places, held, longest, even, columns)
        self.hand_over(index, answer, before, read, rows)

    def hand_over(self, index: int, answer: int, before: int, read: int, rows: StoredRows) -> None:
        """Give a layer of an answer its rows after `read` tokens, and let it count these. It has counted `before`."""
        plan, evicted = self.plans[answer], read - before
        gone: Tensor | int = evicted
        if plan.find_last_cut(index, before, read) is None:
            gone = 0
        elif not plan.constant[index]:
            more = plan.rows[read, index] - plan.rows[before, index]  # rows that were added
            gone = (evicted - more).expand(rows.shape).to(self.device)
        attended, most = plan.count_attended(before, read)
        self.answers[answer][index].replace_rows(rows, gone, attended[index], most[index])
