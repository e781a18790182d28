"""Choose the colour, mark and dash of every series.

A method's file in conf/method states its look in the key `_style_`, so that it is the same on every page and in every
panel. The nine colours (from Okabe and Ito, and from Tol) can be told apart on white with any common colour blindness.
A method without the key gets a colour by its name, and one of the pairs of mark and dash that no file states.

The lines of a panel must also be told apart in grey. Each of them therefore takes one of 28 pairs of mark and dash that
no other line of its panel has. The first variant of a method takes the method's own pair. Further variants (another
allocator, codec, preset or block size) differ in mark and dash. Only from the 29th line on do pairs repeat.
"""

from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml

from kvbench.config.compose import find_file, list_choices, show_path
from kvbench.validation import SettingError, require_choice

COLOURS = {
    "blue": "#0072B2",
    "vermilion": "#D55E00",
    "green": "#009E73",
    "pink": "#CC79A7",
    "orange": "#E69F00",
    "indigo": "#332288",
    "sky": "#56B4E9",
    "wine": "#882255",
    "olive": "#999933",
}
DARK = {  # colour on a light page -> colour on a dark one
    **dict(
        zip(
            COLOURS.values(),
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
MARKS = ("circle", "square", "triangle-up", "cross", "triangle-down", "triangle-right", "triangle-left")
DASHES: dict[str, list[int]] = {
    "solid": [], "dashed": [6, 3], "dotted": [2, 2], "dash-dot": [8, 2, 2, 2], "long-dash": [12, 4],
}  # fmt: skip
PAIRS = [(mark, dash) for dash in DASHES for mark in MARKS]
FULL, FULL_MARK = "#333333", "diamond"  # only a full cache with a codec has a curve
KEYS = {"colour": COLOURS, "mark": MARKS, "dash": DASHES}


@cache
def read_style(path: Path) -> dict[str, str] | None:
    """Return the key `_style_` of a method's file as {"colour": …, "mark": …, "dash": …}; None if it has none.

    Raises:
        SettingError: The file is not valid YAML, or the key lacks a part or has one that does not exist.
    """
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingError(f"{show_path(path)} is not valid YAML ({' '.join(str(error).split())})") from None
    style = config.get("_style_") if isinstance(config, dict) else None  # only a run of such a method needs more
    if style is None:
        return None
    if not isinstance(style, dict) or style.keys() != KEYS.keys():
        raise SettingError(f"{show_path(path)}: _style_ states {', '.join(KEYS)}, as in conf/method/h2o.yaml")
    for key, allowed in KEYS.items():
        require_choice(f"{show_path(path)}: _style_.{key}", style[key], allowed)
    return style


def find_style(method: str) -> dict[str, str]:
    """Return the colour, mark and dash of a method by their names.

    Raises:
        SettingError: As in `read_style`.
    """
    stated = {name: style for name in list_choices("method") if (style := read_style(find_file("method", name)))}
    if method in stated:
        return stated[method]
    number = int.from_bytes(sha256(method.encode("utf-8", "surrogatepass")).digest()[:4], "big")
    taken = {(style["mark"], style["dash"]) for style in stated.values()}
    free = [pair for pair in PAIRS if pair not in taken] or PAIRS
    mark, dash = free[number % len(free)]
    return {"colour": list(COLOURS)[number // len(free) % len(COLOURS)], "mark": mark, "dash": dash}


def choose_style(method: str) -> dict[str, str]:
    """Return the colour and the mark of a method as {"colour": …, "shape": …}.

    Raises:
        SettingError: As in `read_style`.
    """
    (style,) = choose_styles([method])
    return {name: style[name] for name in ("colour", "shape")}


def choose_styles(methods: Sequence[str]) -> list[dict[str, Any]]:
    """Return the style of every series of a panel as {"colour": …, "shape": …, "dash": …}.

    Args:
        methods: The method of each series. Series of the same method are its variants.

    Raises:
        SettingError: As in `read_style`.
    """
    styles = {method: find_style(method) for method in dict.fromkeys(methods) if method != "full"}
    colours = {method: COLOURS[style["colour"]] for method, style in styles.items()} | {"full": FULL}
    own_pair = {method: (style["mark"], style["dash"]) for method, style in styles.items()} | {"full": PAIRS[0]}
    known = list_choices("method")
    taken: set[tuple[str, str]] = set()
    styles_by_place: dict[int, dict[str, Any]] = {}
    first = [methods.index(method) == place for place, method in enumerate(methods)]
    # known methods first, then others, then further variants: so that a method has its own pair wherever it can
    for place in sorted(range(len(methods)), key=lambda at: (not first[at], methods[at] not in known, at)):
        method = methods[place]
        if method == "full" and first[place]:
            styles_by_place[place] = {"colour": FULL, "shape": FULL_MARK, "dash": DASHES["solid"]}
            continue
        pairs = list_pairs(own_pair[method])
        pair = next((candidate for candidate in pairs if candidate not in taken), pairs[place % len(pairs)])
        taken.add(pair)
        styles_by_place[place] = {"colour": colours[method], "shape": pair[0], "dash": DASHES[pair[1]]}
    return [styles_by_place[place] for place in range(len(methods))]


def list_pairs(first: tuple[str, str]) -> list[tuple[str, str]]:
    """Return all pairs of mark and dash, beginning with `first`. Both change from each pair to the next."""
    marks, dashes = list(MARKS), list(DASHES)
    mark, dash = marks.index(first[0]), dashes.index(first[1])
    return [(marks[(mark + at) % len(marks)], dashes[(dash + at) % len(dashes)]) for at in range(len(PAIRS))]
