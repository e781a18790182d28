"""Parse JSON and YAML that somebody else may have written, with limits on size, depth and number of values.

A parser without limits is a way to end a process: six kilobytes of YAML aliases unfold to gigabytes, a text of 200,000
brackets overflows the stack of libyaml, and a list of empty lists takes thirty times its size in memory. All limits
are checked on the bytes, before any value is built.
"""

import json
import re
from typing import Any, NoReturn

import yaml

from kvbench.validation import summarize

MOST_BYTES = 4_000_000  # of one document, such as a record or the settings of a run
MOST_DEPTH = 50
MOST_VALUES = 200_000
TEXTS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)  # an unfinished text matches too, so this is linear
BRACKETS = re.compile(rb"[\[\]{}]")


def parse_json(content: bytes, most_bytes: int = MOST_BYTES, most_values: int = MOST_VALUES) -> Any:
    """Return the value of a JSON document.

    Args:
        content: The document, in UTF-8.
        most_bytes: Size that it may have.
        most_values: Upper limit of the number of its values, which are counted by the commas and brackets, also of
            those within texts.

    Raises:
        ValueError: It is no JSON, contains NaN or an infinity, names a key of an object twice, or exceeds a limit. The
            message is a part of a line, such as "is nested deeper than 50".
    """
    check_size(content, most_bytes)
    opened = content.count(b"[") + content.count(b"{")
    if opened + content.count(b",") > most_values:
        raise ValueError(f"has more than {most_values} values")
    if opened > MOST_DEPTH and measure_depth(content) > MOST_DEPTH:
        raise ValueError(f"is nested deeper than {MOST_DEPTH}")
    try:
        return json.loads(content.decode(), parse_constant=refuse_constant, object_pairs_hook=make_object)
    except UnicodeDecodeError:
        raise ValueError("is not in UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is no JSON ({error.msg}, line {error.lineno} column {error.colno})") from None


def measure_depth(content: bytes) -> int:
    """Return how deep the brackets of a JSON document are nested, without those within texts."""
    depth = deepest = 0
    for bracket in BRACKETS.finditer(TEXTS.sub(b"", content)):
        depth += 1 if bracket[0] in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest


def refuse_constant(name: str) -> NoReturn:
    """Raise a ValueError about a constant that JavaScript has and JSON has not."""
    raise ValueError(f"contains {name}, which is no JSON")


def make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these pairs.

    Raises:
        ValueError: A key is there twice, so that two readers could take different values.
    """
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"has the key {next(name for name in names if names.count(name) > 1)!r} twice")
    return members


class PlainLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """A loader of mappings, lists, texts, numbers, booleans and null. A date is a text."""


PlainLoader.yaml_implicit_resolvers = {
    start: [pair for pair in pairs if pair[0] not in ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:merge")]
    for start, pairs in PlainLoader.yaml_implicit_resolvers.items()
}


def parse_yaml(content: bytes, most_bytes: int = MOST_BYTES, most_values: int = MOST_VALUES) -> Any:
    """Return the value of a YAML document without anchors, aliases and tags, such as yaml.safe_dump writes.

    Args:
        content: The document, in UTF-8.
        most_bytes: Size that it may have.
        most_values: Number of values that it may have.

    Raises:
        ValueError: As `parse_json`.
    """
    check_size(content, most_bytes)
    depth = count = 0
    try:
        for event in yaml.parse(content, Loader=PlainLoader):  # does not recurse, and builds no value
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) or getattr(event, "tag", None):
                raise ValueError("has an anchor, an alias or a tag")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            count += isinstance(event, yaml.NodeEvent)
            if depth > MOST_DEPTH:
                raise ValueError(f"is nested deeper than {MOST_DEPTH}")
            if count > most_values:
                raise ValueError(f"has more than {most_values} values")
        return yaml.load(content, PlainLoader)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise ValueError(f"is no YAML ({summarize(error)})") from None


def check_size(content: bytes, most: int) -> None:
    """Raise a ValueError if a document is too large."""
    if len(content) > most:
        raise ValueError(f"has {len(content)} bytes, more than {most}")
