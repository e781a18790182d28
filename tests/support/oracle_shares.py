"""How allocators share rows among heads and layers, written out in loops."""

import math
from dataclasses import dataclass, field

import numpy as np
import torch

import kvbench
from tests.support.dense_engine import DenseEngine, Head, HeadView
from tests.support.oracle_scores import attention, pool
from tests.support.oracles import CLOSE, assert_same_rows, find_top, fit_protected
from tests.support.tiny_models import distinct, tiny


def count_winners(scores: list[np.ndarray], total: int) -> list[int]:
    everything = sorted((-s, h, j) for h, own in enumerate(scores) for j, s in enumerate(own) if s > -np.inf)
    return [sum(h == head for _, h, _ in everything[:total]) for head in range(len(scores))]


def share_safeguarded(alpha: float):
    def share(scores, protected, quota):
        safe = [min(max(int(alpha * quota), 1, int(own.sum())), len(own)) for own in protected]
        open_ = []
        for own, count in zip(scores, safe, strict=True):
            own = own.copy()
            own[find_top(own, count)] = -np.inf
            open_.append(own)
        won = count_winners(open_, quota * len(scores) - sum(safe))
        return [a + b for a, b in zip(safe, won, strict=True)]

    return share


def share_interpolated(alpha: float):
    def share(scores, protected, quota):
        own = [int(p.sum()) for p in protected]
        free = quota - own[0]
        won = count_winners(
            [np.where(p, -np.inf, s) for s, p in zip(scores, protected, strict=True)], free * len(scores)
        )
        targets = [c * (1 - alpha) + free * alpha for c in won]
        counts = [math.floor(t + 1e-9) for t in targets]
        by_remainder = sorted(range(len(won)), key=lambda h: (counts[h] - targets[h], h))
        for h in by_remainder[: free * len(scores) - sum(counts)]:
            counts[h] += 1
        return [max(1, c + p) for c, p in zip(counts, own, strict=True)]

    return share


def round_shares(targets: list[float], most: list[int], total: int) -> list[int]:
    """Rounded down, then single rows to whoever lacks most, none beyond what there is."""
    counts = [min(math.floor(target), high) for target, high in zip(targets, most, strict=True)]
    while sum(counts) < min(total, sum(most)):
        poor = [i for i in range(len(counts)) if counts[i] < most[i]]
        counts[min(poor, key=lambda i: (counts[i] - targets[i], i))] += 1
    while sum(counts) > total:
        counts[min(range(len(counts)), key=lambda i: (targets[i] - counts[i], i))] -= 1
    return counts


def assert_allocator_agrees(dense, model, method, budget, block, allocator, decoding=False, tokens=60, **args):
    """Both engines over one prompt and seven tokens more hold the same rows. Returns held."""
    prompt, more = distinct(tokens + 7).split([tokens, 7], dim=1)
    expected = dense.prefill(prompt, block)
    name, allocator_args = allocator
    held = kvbench.prefill(
        tiny(model), prompt, method, budget, block, name, method_args=args, allocator_args=allocator_args
    )
    torch.testing.assert_close(held.logits[0].double(), expected, **CLOSE)
    assert_same_rows(held, dense)
    dense.cuts_decoding = decoding
    for part in more.split([1, 1, 5], dim=1):
        torch.testing.assert_close(held.extend(part)[0].double(), dense.extend(part), **CLOSE)
        assert_same_rows(held, dense)
    return held


@dataclass
class CakeRule:
    """Indicator and preferences; cuts earlier layers in the dense engine's own rows."""

    quota: int
    layers: list[int]  # that are cut
    window: int
    kernel: int
    gamma: float
    tau1: float
    tau2: float
    cascade: bool
    dense: DenseEngine | None = None
    tokens: int = 10**9  # of the prompt: what is read beyond is decoding
    preferences: list[float] = field(default_factory=list)
    most: list[int] = field(default_factory=list)
    indicators: dict[int, list[dict[int, float]]] = field(default_factory=dict)
    shares: list[int] = field(default_factory=list)
    differed: bool = False  # shares of some cut

    def indicator(self, glance: HeadView) -> dict[int, float]:
        """Score by place."""
        decoding = glance.tokens > self.tokens
        p = attention(glance, 1 if decoding else self.window)
        outside = glance.rows.places < glance.tokens - self.window
        if not outside.any():  # the window covers all that is held: then only rows of the block have no score
            outside = glance.rows.places < glance.tokens - glance.queries.shape[1]
        total = np.zeros(outside.sum())
        for own in p:
            varies = own.var(0, ddof=1) if len(own) > 1 else np.zeros(own.shape[1])
            total += pool((own.mean(0) + self.gamma * varies)[outside], self.kernel, "avg") / len(p)
        return dict(zip(glance.rows.places, [*total, *np.zeros((~outside).sum())], strict=True))

    def preference(self, glances: list[HeadView]) -> float:
        entropy = variance = 0.0
        for glance in glances:
            outside = glance.rows.places < glance.tokens - self.window
            for own in attention(glance, self.window)[..., outside]:
                entropy -= sum(x * math.log(x + 1e-10) for x in own.flatten())
                variance += own.var(0, ddof=1).sum() if len(own) > 1 else 0.0
        return max(entropy, 0.0) ** (1 / self.tau1) * variance ** (1 / self.tau2)

    def choose(self, rows: Head, scores: dict[int, float], quota: int, tokens: int) -> Head:
        if len(rows.places) <= quota:
            return rows
        safe = fit_protected(rows.places >= tokens - self.window, quota)
        return rows.take(find_top(np.where(safe, np.inf, [scores[place] for place in rows.places]), quota))

    def cut(self, glances: list[HeadView]) -> list[Head]:
        layer, tokens = glances[0].layer, glances[0].tokens
        number, own = self.layers.index(layer), [glance.rows for glance in glances]
        if number == 0:
            self.indicators = {}
            if tokens <= self.tokens:
                self.preferences, self.most = [], []
        if tokens <= self.quota:
            self.shares = [self.quota] * len(self.layers)
            return own
        self.indicators[layer] = [self.indicator(glance) for glance in glances]
        if tokens <= self.tokens:
            self.preferences.append(self.preference(glances))
            self.most.append(len(own[0].places))
            if not self.cascade and number < len(self.layers) - 1:
                return own
            total = sum(self.preferences)
            parts = [one / total if total else 1 / len(self.most) for one in self.preferences]
            free = len(self.layers) * (self.quota - self.window)
            targets = [self.window + part * free for part in parts]
            self.shares = round_shares(targets, self.most, free + self.window * len(self.most))
            self.differed |= len(set(self.shares)) > 1
            for earlier, share in zip(self.layers[:number], self.shares, strict=False):
                before = zip(self.dense.held[earlier], self.indicators[earlier], strict=True)
                self.dense.held[earlier] = [self.choose(rows, scores, share, tokens) for rows, scores in before]
        pairs = zip(own, self.indicators[layer], strict=True)
        return [self.choose(rows, scores, self.shares[number], tokens) for rows, scores in pairs]


def assert_cake_agrees(model, cascade, block, quota=17, tokens=60, tau=(1.6, 0.4)):
    config = tiny(model).config
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    layers = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    args = dict(window=6, kernel=5, gamma=200.0)
    rule = CakeRule(quota, layers, **args, tau1=tau[0], tau2=tau[1], cascade=cascade, tokens=tokens)
    rule.dense = DenseEngine(model, rule.cut)
    shares = dict(tau1=tau[0], tau2=tau[1], window=6, cascade=cascade)
    held = assert_allocator_agrees(
        rule.dense, model, "cake", quota, block, ("cake", shares), decoding=True, tokens=tokens, **args
    )
    return held, rule


MODES = (("interpolate", share_interpolated), ("safeguard", share_safeguarded))  # of allocator=ada
