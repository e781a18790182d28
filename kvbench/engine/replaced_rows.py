"""Rows of which every token replaces one, at fixed addresses for a CUDA graph.

If a layer is cut after every token, a row of each head leaves for each that comes. The new row takes the slot of the
row that left, so a cut moves no keys and values. Each row's rank, its index in the order of the text, is kept beside
it. The method must take rows in any order (`Method.order_free`).

A head whose rows fit its quota gives up none, and the next row takes the next unused slot. A head's slots in use are
therefore its first ones. Attention and the method see no others. Layers that the method spares only append.

A token of all samples needs the same kernel calls, wherever in its text each sample is. Contexts with the same method
can therefore be read as one batch (`kvbench.engine.joined_replaced_rows`).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvbench.cache.layer import Layer
from kvbench.cache.storage import StoredRows
from kvbench.engine.answer_quotas import AnswerQuotas
from kvbench.engine.graph_decoding import AppendedRows, GrowingRows, Norms
from kvbench.engine.quota_rows import QuotaRows
from kvbench.engine.streams import Beside
from kvbench.interfaces.codec import Plain
from kvbench.interfaces.rows import Rows
from kvbench.kernels.attention import RaggedRows, attend_ragged
from kvbench.kernels.rope_append import append
from kvbench.kernels.row_replacement import replace_row
from kvbench.kernels.row_selection import gather_rows
from kvbench.models.decoder_weights import DecoderWeights


class SlotRows(QuotaRows):
    """The rows of all layers, with a slot for each row of the longest head and one for the next token."""

    growing: AppendedRows | None
    """The rows of the layers that the method spares, or None if it spares none."""

    def __init__(
        self, weights: DecoderWeights, layers: Sequence[Layer], tokens: int, plan: AnswerQuotas, seen: Sequence[int],
        implementation: str | None = None,
    ) -> None:  # fmt: skip
        """Prepare rows. `prepare` gives them memory, unless another object lends them some.

        Args:
            weights: The model's weights.
            layers: The layers, whose hooks are called.
            tokens: Number of tokens that will be read.
            plan: What the heads may keep and do hold after each of these tokens.
            seen: Number of tokens of each sample that were read so far.
            implementation: Name of the kernels' implementation; None chooses one.
        """
        super().__init__(weights, layers, len(seen), min(seen), max(seen) + tokens, implementation)
        method = layers[0].choice.method
        looks = method.watches or method.uses_cache_positions  # at all layers that it does not spare
        own = [cut or (looks and layer.index in layer.cut_layers) for cut, layer in zip(plan.cut, layers, strict=True)]
        self.plan, self.cut = plan, [index for index, cut in enumerate(own) if cut]
        self.quotas = plan.quotas.to(self.device)
        self.grows = [cut and not constant for cut, constant in zip(own, plan.constant, strict=True)]
        self.step = torch.zeros((), dtype=torch.int32, device=self.device)  # number of tokens read
        # each sample's position at step 0, (B, 1, 1)
        self.begins = torch.tensor(seen, device=self.device)[:, None, None]
        self.offsets = (self.begins - min(seen)).flatten()  # of `angles`
        spared = [index for index, cut in enumerate(own) if not cut]
        self.spared = {index: number for number, index in enumerate(spared)}
        self.beside = Beside(self.device)  # rows are replaced there, while the next layers read the token
        self.has_memory = False

    def prepare(self) -> None:
        """Allocate memory if there is none. Each head has a slot for a token, and its other slots hold zeros."""
        if not self.has_memory:
            self.allocate_slots()
            self.has_memory = True

    def allocate_slots(self) -> None:
        """Allocate memory for the slots of all heads, which hold zeros."""
        capacities = [rows.expand(self.held) + 1 for rows in self.plan.rows[-1]]
        if not self.layers[0].choice.method.streams:  # it sees keys and values, which are padded to the longest head
            capacities = [torch.full_like(count, int(count.max())) for count in capacities]
        capacities = [count * (index not in self.spared) for index, count in enumerate(capacities)]
        self.allocate(capacities)
        self.ragged = [bool((count != count.max()).any()) for count in capacities]
        self.in_memory = [  # of all heads' slots, padded to the longest head, those that a ragged layer has memory for
            (torch.arange(int(count.max())) < count[..., None]).flatten().nonzero()[:, 0].to(self.device)
            if ragged else None
            for count, ragged in zip(capacities, self.ragged, strict=True)
        ]  # fmt: skip
        self.ranks = [torch.zeros_like(own) for own in self.places]  # of each slot's row
        self.order = [torch.zeros_like(own) for own in self.places]  # the slot of each rank
        self.free = torch.zeros(len(self.layers), *self.held, dtype=torch.int64, device=self.device)  # the next token's
        self.lengths = torch.ones_like(self.free)  # slots in use, the next token's included
        self.mass = [torch.zeros_like(own) if grows else own for own, grows in zip(self.mass, self.grows, strict=True)]
        # a new row's rank in a layer that does not grow
        self.last = torch.tensor([int(count.max()) - 1 for count in capacities], device=self.device)

    def order_by_text(self) -> None:
        """Say that the rows stand in the slots in the order of the text."""
        slots = torch.arange(max(order.shape[2] for order in self.order), device=self.device)
        for own in (*self.order, *self.ranks):
            own.copy_(slots[: own.shape[2]].expand_as(own))

    def cuts(self, number: int) -> bool:
        """Return False: every token needs the same graph."""
        return False

    def reader(self, cuts: bool) -> Callable[[int, Sequence[Tensor], Norms], Tensor]:
        """Return the function that replaces a row and attends in one layer, for `forward_step`."""
        cos, sin = self.angles
        position = self.begins + self.step  # int64 as `places`, so that comparing them needs no conversion
        quotas = self.quotas.index_select(0, self.step[None])[0] if any(self.grows) else self.quotas[0]
        implementation, lse = self.implementation, self.layers[0].choice.method.wants_lse

        def attend(index: int, projected: Sequence[Tensor], norms: Norms) -> Tensor:
            if index in self.spared:
                assert self.growing is not None
                return self.growing.attend(self.spared[index], projected, norms)
            queries, new_keys, new_values = projected
            keys, values = (self.rows[index] if self.ragged[index] else self.padded(index)).unbind()
            queries = append(
                queries, new_keys, new_values, cos, sin, keys, values, 0, self.step, slots=self.free[index],
                starts=self.starts[index] if self.ragged[index] else None, offsets=self.offsets, norms=norms,
                implementation=implementation,
            )  # fmt: skip
            asking, held = queries, keys
            if self.table is not None:
                asking, held = self.rotate(index, queries, position)
            in_use, tail = self.find_slots_in_use(index, held, values)
            outputs, sums = attend_ragged(
                asking, in_use, *tail, self.weights.scaling, lse=lse, implementation=implementation
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
            observation, rows = self.show(index, rows, queries, outputs, lse, position, each)
            scores = method.score(observation, rows, self.states[index])
            masks = method.protect_sinks(observation, rows, quota), method.protect(observation, rows, quota)
        layer.guard.release()
        replace_row(
            scores, *masks, places, self.ranks[index], order, free, position, self.invalid, self.tally[index],
            growth=(self.lengths[index], quotas, mass) if grows else None, implementation=self.implementation,
        )  # fmt: skip
        for name, column in columns.items():
            column.copy_(rows.columns[name])
            column.scatter_(-1, free[..., None], 0)

    def use_lane(self, lane: int) -> None:
        self.beside.lane = lane

    def settle(self) -> None:
        self.beside.settle()

    def advance(self, cuts: bool) -> None:
        """Count a token after all layers have read it."""
        self.step += 1
        if self.growing is not None:
            self.growing.advance(cuts)


class ReplacedRows(SlotRows):
    """The rows of a context's layers."""

    def __init__(
        self, weights: DecoderWeights, layers: Sequence[Layer], tokens: int, plan: AnswerQuotas, seen: int,
        implementation: str | None = None,
    ) -> None:  # fmt: skip
        """Prepare rows. They get memory of their own when they are used, unless another object lends them some.

        Args:
            weights: The model's weights.
            layers: The layers.
            tokens: Number of tokens that will be read.
            plan: What the heads may keep and do hold after each of these tokens.
            seen: Number of tokens read so far.
            implementation: Name of the kernels' implementation; None chooses one.
        """
        super().__init__(weights, layers, tokens, plan, [seen] * layers[0].rows.shape[0], implementation)
        appended = [layers[index] for index in self.spared]
        self.growing = GrowingRows(weights, appended, tokens, seen, implementation) if appended else None
        self.kept_tally: Tensor | None = None  # when the layers got their rows last; None if they hold their first
        self.kept_order: Tensor | None = None  # of all layers at that time, flat; None for that of the text

    def back(self, step: int) -> int:
        """Copy the rows from the layers and return how many tokens have been read by then: `step` or fewer."""
        self.prepare()
        if self.kept_order is None:
            self.order_by_text()
        else:  # back into the same slots, so that sums are done in the same order again
            kept = self.kept_order.split([order.numel() for order in self.order])
            for order, before in zip(self.order, kept, strict=True):
                order.copy_(before.view_as(order))
        return self.copy_rows()

    def copy_rows(self) -> int:
        """Copy the rows from the layers into the slots that `order` says, and return how many tokens were read then."""
        read = self.layers[0].rows.seen - self.seen
        rows = self.plan.rows[read]
        counts = rows.to(self.device)  # once for all layers, because the host waits for it
        equal = [own[0] if len(set(own)) == 1 else None for own in rows.flatten(1).tolist()]  # of all heads of a layer
        self.free.copy_(counts)
        self.lengths.copy_(counts + 1)
        for index in self.cut:
            count = equal[index]
            if count is not None and self.kept_order is None and self.takes_in_order(index, count):
                self.take_in_order(index, count)
            else:
                self.take_rows(index, counts[index].expand(self.held)[..., None])
        self.invalid.zero_()
        if self.kept_tally is None:
            self.tally.zero_()
        else:
            self.tally.copy_(self.kept_tally)
        self.step.fill_(read)
        if self.growing is not None:
            self.growing.back(read)
        return read

    def takes_in_order(self, index: int, count: int) -> bool:
        """Return whether all heads of a layer hold `count` rows, which `take_in_order` can copy."""
        held = self.layers[index].rows
        whole = held.even and held.longest == count and not held.tail and held.is_raw
        return whole and not self.ragged[index] and not self.columns[index]

    def take_in_order(self, index: int, count: int) -> None:
        """Copy a layer's rows into its first slots, with far fewer launches than `take_rows` needs.

        Other slots keep what they hold.
        """
        held, places = self.layers[index].rows, self.places[index]
        assert held.places is not None and held.stored is not None  # the layer was cut
        for into, rows in zip(self.padded(index), held.stored.read(), strict=True):
            into[:, :, :count] = rows.view(*self.held, count, -1)
        places[..., :count] = held.places.view(*self.held, count)
        places[..., count] = held.seen
        if self.grows[index]:  # else every slot is in use
            places[..., count + 1 :] = -1
            self.mass[index][..., : count + 1] = 1
            self.mass[index][..., count + 1 :] = 0

    def take_rows(self, index: int, count: Tensor) -> None:
        """Copy a layer's rows into the slots that `order` says. The host does not wait for the GPU.

        Slots that are not in use get some row.

        Args:
            index: The layer.
            count: Number of rows of each head, (B, H, 1).
        """
        layer, places, ranks, order = self.layers[index], self.places[index], self.ranks[index], self.order[index]
        held, slots = layer.rows.view(), torch.arange(places.shape[2], device=self.device)
        longest, dim = held.keys.shape[2:]
        ranks.scatter_(-1, order, slots.expand_as(places))
        first = (ranks + longest - count).clamp(min=0, max=longest - 1)  # the row of each slot
        heads = torch.arange(count.numel(), device=self.device).view_as(count)
        source = (first + longest * heads).flatten()  # in all heads' rows
        if self.ragged[index]:
            source = source[self.in_memory[index]]
        for into, old in zip(self.rows[index], (held.keys, held.values), strict=True):
            torch.index_select(old.reshape(-1, dim), 0, source, out=into)
        absent, free = ranks >= count, order.gather(-1, count)
        places.copy_(held.places.gather(-1, first).masked_fill(absent, -1))
        places.scatter_(-1, free, layer.rows.seen)
        self.free[index] = free[..., 0]
        for name, column in self.columns[index].items():
            column.copy_(held.columns[name].gather(-1, first).masked_fill(absent, 0))
        self.mass[index].copy_(slots <= count)

    def keep(self, read: int) -> None:
        """Give the layers the rows that the first `read` tokens left, as if the layers had read and cut them."""
        before = self.layers[0].rows.seen - self.seen
        if read == before:
            return
        for index in self.cut:
            self.give_rows(index, before, read)
        self.kept_order, self.kept_tally = torch.cat([order.flatten() for order in self.order]), self.tally.clone()
        if self.growing is not None:
            self.growing.keep(read)

    def finish(self, read: int) -> None:
        """Give the layers the rows, and how many of them were protected."""
        super().finish(read)
        for index in self.cut:
            if self.plan.find_last_cut(index, 0, read) is not None:
                self.give_tally(index)

    def forget(self, read: int) -> None:
        """Let the layers count the first `read` tokens, and give them that many rows of no meaning."""
        before = self.layers[0].rows.seen - self.seen
        counts = self.plan.rows[read].expand(-1, *self.held).flatten(1)  # of the heads of each layer
        totals, longest = counts.sum(1).tolist(), counts.amax(1).tolist()
        for index in self.cut if read > before else ():
            layer, like = self.layers[index], self.rows[index]
            lengths = layer.rows.lengths
            if lengths is None or layer.rows.tail or not self.plan.constant[index]:
                lengths = counts[index].view(self.held).to(self.device)
            stored = Plain(*(like.new_empty(totals[index], like.shape[2]) for _ in range(2)))
            places = like.new_empty(totals[index], dtype=torch.int32)
            rows = layer.rows.replace_all(read - before, stored, places, lengths, longest[index], layer.even, {}, None)
            self.hand_over(index, before, read, rows)
        if self.growing is not None:
            self.growing.forget(read)

    def give_rows(self, index: int, before: int, read: int) -> None:
        """Give a layer its rows after `read` tokens. It has those after `before` tokens."""
        layer, plan, places, order = self.layers[index], self.plan, self.places[index], self.order[index]
        cut = plan.find_last_cut(index, before, read)
        rows, even = layer.rows, layer.rows.even if cut is None else layer.even
        now = plan.rows[read, index]
        length = rows.tail + read - before if cut is None else read - cut  # of the tail
        stored, held_places, tail, lengths = None, None, None, None
        longest, starts = int(now.max()) - length, self.starts[index][..., None]
        held = rows.lengths
        if held is None or rows.tail or not plan.constant[index]:  # else as many rows of each head as before
            held = (now - length).to(self.device).expand(self.held).contiguous()
        flat = self.rows[index][:, None, None].unbind()  # (1, 1, R, d) each
        if cut is not None or rows.stored is not None:
            in_order, held_places = order[..., :longest] + starts, places.gather(-1, order[..., :longest]).int()
            if not even:
                mask = torch.arange(longest, device=self.device) < held[..., None]
                in_order, held_places = in_order[mask], held_places[mask]
            stored = Plain(*gather_rows(in_order.flatten(), *flat, implementation=self.implementation))
            held_places, lengths = held_places.flatten(), held
        if length:  # of uneven heads every token cuts some
            in_order = order[..., longest : longest + length] + starts
            last = gather_rows(in_order.flatten(), *flat, implementation=self.implementation)
            tail = [part.view(*self.held, length, -1) for part in last]
        columns = {}
        if self.columns[index]:
            ranks = torch.arange(int(now.max()), device=self.device) - (longest - held)[..., None]  # absent rows first
            slots = order.gather(-1, ranks.clamp(min=0))
            columns = {n: own.gather(-1, slots).masked_fill(ranks < 0, 0) for n, own in self.columns[index].items()}
        self.hand_over(
            index, before, read,
            rows.replace_all(read - before, stored, held_places, lengths, longest, even, columns, tail),
        )  # fmt: skip

    def hand_over(self, index: int, before: int, read: int, rows: StoredRows) -> None:
        """Give a layer its rows after `read` tokens, and let it count these. It has counted `before` tokens."""
        evicted: Tensor | int = read - before
        if not self.plan.constant[index]:
            more = self.plan.rows[read, index] - self.plan.rows[before, index]  # rows than before
            evicted = (evicted - more).expand(self.held).to(self.device)
        attended, most = self.plan.count_attended(before, read)
        self.layers[index].replace_rows(rows, evicted, attended[index], most[index])
