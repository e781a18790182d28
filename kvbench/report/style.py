"""How a method is drawn: a colour and a shape that follow from its name alone, whatever else is on the page.

Nine colours (Okabe and Ito's and Tol's), which people with any common colour blindness tell apart, on white; the same
colour comes back with another shape. Methods of this repository have a pair of their own each, any other name the one
that its hash chooses.
"""

from hashlib import sha256

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#332288", "#56B4E9", "#882255", "#999933")
SHAPES = ("circle", "square", "triangle-up")
FULL = "#333333"
DASHES = ([], [6, 3], [2, 2], [8, 2, 2, 2])  # variants of one method in one panel
ORDER = (
    *("snapkv", "keydiff", "dropkv", "h2o", "sink", "expected_attention", "knorm", "kvzip", "tova"),
    *("cake", "criticalkv", "centroidkv", "andpro", "observed_attention", "duo_attention", "quest", "qfilters"),
    *("omnikv", "random"),
)  # only ever append


def choose_style(method: str) -> dict[str, str]:
    """{"colour": …, "shape": …}"""
    if method == "full":  # with a codec: the full cache as it is has no curve
        return {"colour": FULL, "shape": "diamond"}
    if method in ORDER:
        place = ORDER.index(method)
    else:
        digest = sha256(method.encode("utf-8", "surrogatepass")).digest()
        place = int.from_bytes(digest[:4], "big") % (len(COLOURS) * len(SHAPES))
    return {"colour": COLOURS[place % len(COLOURS)], "shape": SHAPES[place // len(COLOURS)]}
