"""Choose the colour, mark and dash of every series.

A method has its colour and mark from its name alone, so that they are the same on every page and in every panel. The
nine colours (from Okabe and Ito, and from Tol) can be told apart on white with any common colour blindness.

The lines of a panel must also be told apart in grey. Each of them therefore takes one of 28 pairs of mark and dash that
no other line of its panel has. The first variant of a method takes the method's own pair. Further variants (another
allocator, codec, preset or block size) differ in mark and dash. Only from the 29th line on do pairs repeat.
"""

from collections.abc import Sequence
from hashlib import sha256
from typing import Any

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#332288", "#56B4E9", "#882255", "#999933")
DARK = {  # colour on a light page -> colour on a dark one
    **dict(
        zip(
            COLOURS,
            ("#4FB3F0", "#FF8A3D", "#2FCB9A", "#E59AC4", "#F2B93B", "#9D8DF1", "#8BD0F7", "#E0679F", "#C6C65A"),
            strict=True,
        )
    ),
    "#333333": "#D5D8DC",  # the full cache
    "#1a1a1a": "#E8EAED",  # text
    "#5f6368": "#A8AEB6",  # quiet text
    "#e8eaed": "#2D3138",  # lines of a grid
    "#bdc1c6": "#565C66",  # axes
    "#9aa0a6": "#7D848E",  # the Pareto front
    "#dadce0": "#454B54",  # the measured range
    "#ffffff": "#16181D",  # gaps between cells
}
SHAPES = ("circle", "square", "triangle-up", "cross", "triangle-down", "triangle-right", "triangle-left")
FULL, FULL_SHAPE = "#333333", "diamond"
DASHES: tuple[list[int], ...] = ([], [6, 3], [2, 2], [8, 2, 2, 2])
ORDER = (
    *("snapkv", "keydiff", "dropkv", "h2o", "sink", "expected_attention", "knorm", "kvzip", "tova"),
    *("cake", "criticalkv", "centroidkv", "andpro", "observed_attention", "duo_attention", "quest", "qfilters"),
    *("omnikv", "random"),
)  # append new names at the end only, so that no method changes its style


def choose_style(method: str) -> dict[str, str]:
    """Return the colour and the mark of a method as {"colour": …, "shape": …}."""
    if method == "full":  # only a full cache with a codec has a curve
        return {"colour": FULL, "shape": FULL_SHAPE}
    place = find_place(method)
    return {"colour": COLOURS[place % len(COLOURS)], "shape": SHAPES[place % len(SHAPES)]}


def find_place(method: str) -> int:
    """Return the number of a method: its place in ORDER, and for any other name a number from its hash."""
    if method in ORDER:
        return ORDER.index(method)
    digest = sha256(method.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:4], "big") % (len(COLOURS) * len(SHAPES) * len(DASHES))


def choose_styles(methods: Sequence[str]) -> list[dict[str, Any]]:
    """Return the style of every series of a panel as {"colour": …, "shape": …, "dash": …}.

    Args:
        methods: The method of each series. Series of the same method are its variants.
    """
    marks, dashes = len(SHAPES), len(DASHES)
    taken: set[tuple[int, int]] = set()
    found: dict[int, dict[str, Any]] = {}
    first = [methods.index(method) == place for place, method in enumerate(methods)]
    # known methods first, then others, then further variants: so that a method has its own pair wherever it can
    for place in sorted(range(len(methods)), key=lambda at: (not first[at], methods[at] not in ORDER, at)):
        method = methods[place]
        if method == "full" and first[place]:
            found[place] = choose_style(method) | {"dash": DASHES[0]}
            continue
        own = 0 if method == "full" else find_place(method)
        pairs = [((own + step) % marks, (own // marks + step) % dashes) for step in range(marks * dashes)]
        mark, dash = next((pair for pair in pairs if pair not in taken), pairs[place % len(pairs)])
        taken.add((mark, dash))
        found[place] = choose_style(method) | {"shape": SHAPES[mark], "dash": DASHES[dash]}
    return [found[place] for place in range(len(methods))]
