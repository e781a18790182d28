"""Choose the colour and the shape of a method from its name alone, so that they are the same on every page.

The nine colours (from Okabe and Ito, and from Tol) can be told apart on white with any common colour blindness. Each of
them is used again with another shape. Every method of this repository has its own pair; the hash of any other name
chooses one.
"""

from hashlib import sha256

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#332288", "#56B4E9", "#882255", "#999933")
SHAPES = ("circle", "square", "triangle-up")
FULL = "#333333"
DASHES: tuple[list[int], ...] = ([], [6, 3], [2, 2], [8, 2, 2, 2])  # for variants of one method in one panel
ORDER = (
    *("snapkv", "keydiff", "dropkv", "h2o", "sink", "expected_attention", "knorm", "kvzip", "tova"),
    *("cake", "criticalkv", "centroidkv", "andpro", "observed_attention", "duo_attention", "quest", "qfilters"),
    *("omnikv", "random"),
)  # append new names at the end only, so that no method changes its style


def choose_style(method: str) -> dict[str, str]:
    """Return the style of a method as {"colour": …, "shape": …}."""
    if method == "full":  # only a full cache with a codec has a curve
        return {"colour": FULL, "shape": "diamond"}
    if method in ORDER:
        place = ORDER.index(method)
    else:
        digest = sha256(method.encode("utf-8", "surrogatepass")).digest()
        place = int.from_bytes(digest[:4], "big") % (len(COLOURS) * len(SHAPES))
    return {"colour": COLOURS[place % len(COLOURS)], "shape": SHAPES[place // len(COLOURS)]}
