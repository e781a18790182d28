"""keep_ratios: shares of a cache that are stored and read, by DeltaKV's formulas, in % (Equation 6, Table 8, App. B.4).

With f of L layers full, every s-th token a reference, codes of c of the 2·d_k numbers of a token, and a share r of
tokens that attention reads (L_f, L_f + L_s, s, d_c and r in the paper), at a target x for r:

    stored          KR = f/L + (1 - f/L)·(1/s + c/2d_k); r for methods that evict, 1 for those that only select
    read            CR = f/L + (1 - f/L)·r; r for the other methods
    packed          stored share at 30 % if 4 bits replace 16 in the codes, in everything, or, as Appendix B.4 computes,
                    twice in the codes and once in the rest
    printed_stored, printed_read
                    (claims) share of the numbers of Table 8 that the formula gives, to the digit that is printed

The settings are those that the paper states for Llama-3.1-8B, whatever the model of the run: 32 layers, of which 5 are
full at 30 % and 4 at 20 %, s = 10, c/2d_k = 1/4. As in the paper, reference tokens have a code too, and indices, sinks,
recent tokens and compressors do not count.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import torch

from kvbench.config.paths import PUBLISHED
from kvbench.interfaces.layout import Layout
from kvbench.papers.table_spec import read_published
from kvbench.store.study_lines import Line
from kvbench.studies.study import ClosedForm, ModelConfig

LAYERS = 32
FULL = {30: 5, 20: 4}  # target in % -> full layers
REFERENCES, CODE = Fraction(1, 10), Fraction(1, 4)
BITS = Fraction(4, 16)
EVICTING, SELECTING = ("snapkv", "pyramidkv"), ("omnikv", "quest")
# published task -> quantity and claim
QUANTITIES = {"kv_keep_ratio": ("stored", "printed_stored"), "kv_compute_ratio": ("read", "printed_read")}


@dataclass(frozen=True)
class KeepRatios(ClosedForm):
    """What share of a cache DeltaKV and others store and read."""

    name: ClassVar[str] = "keep_ratios"

    def compute(self, layout: Layout, config: ModelConfig) -> Iterable[Line]:
        shares = {
            (quantity, method, target): ratio for target in FULL for quantity, method, ratio in list_ratios(target)
        }
        for (quantity, method, target), ratio in shares.items():
            yield self.line(quantity, 100 * float(ratio), series=method, x=target)
        codes, everything = count_stored(30, BITS * CODE), count_stored(30) * BITS
        for series, kept in (("codes", codes), ("everything", everything), ("codes twice", codes * BITS)):
            yield self.line("packed", 100 * float(kept), series=series, x=30)
        given: dict[str, list[bool]] = {}
        for row in read_published(PUBLISHED.parent, "deltakv_table08.csv"):
            quantity, claim = QUANTITIES[row["task"]]
            target = round(100 * float(row["variant"].removeprefix("target_budget=")))
            computed = 100 * shares[quantity, row["method"], target]
            given.setdefault(claim, []).append(abs(computed - Fraction(row["value"])) <= Fraction(1, 20))
        for claim, instances in given.items():
            yield self.claim(claim, [torch.tensor(instances)])


def count_stored(target: int, code: Fraction = CODE) -> Fraction:
    """Return DeltaKV's stored share.

    Args:
        target: Target of the share that is read, in %.
        code: Size of a code, as a share of a token's numbers.
    """
    full = Fraction(FULL[target], LAYERS)
    return full + (1 - full) * (REFERENCES + code)


def list_ratios(target: int) -> Iterable[tuple[str, str, Fraction]]:
    """Yield quantity, method and share for a target in %."""
    read, full = Fraction(target, 100), Fraction(FULL[target], LAYERS)
    for method in (*EVICTING, *SELECTING):
        yield "stored", method, read if method in EVICTING else Fraction(1)
        yield "read", method, read
    yield "stored", "deltakv", count_stored(target)
    yield "read", "deltakv", full + (1 - full) * read
