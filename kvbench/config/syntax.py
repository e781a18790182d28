"""Write a Python source as a canonical text for hashes, without comments, docstrings, layout and messages.

`canonicalize` prints the syntax tree of a source. The text is the same on Python 3.11 to 3.14, while the output of
`ast.dump` and `ast.unparse` differs between versions. It leaves out what cannot change a number:

* comments and layout, which the tree does not contain;
* docstrings, and other strings that form a statement alone, such as descriptions of attributes;
* strings inside `raise` and `print` and in the message of `assert`.

Everything else counts: operators, defaults, decorators, names, order, and annotations, because `constexpr` and
`ClassVar` change what a function or a class does.
"""

import ast
import json
from functools import cache

IGNORED = {"ctx", "kind", "type_comment", "type_ignores", "lineno", "col_offset", "end_lineno", "end_col_offset"}
OPTIONAL = {"type_params"}  # older versions of Python lack these fields, so empty ones are left out
MESSAGE = "(message)"


def canonicalize(tree: ast.Module) -> str:
    """Return the canonical text of a source, whose syntax tree is `tree`."""
    parts: list[str] = []
    _write(tree, False, parts)
    return "".join(parts)


def _write(value: object, message: bool, parts: list[str]) -> None:
    """Append the text of a syntax tree to `parts`.

    Args:
        value: A node, the value of a field, or a list of them.
        message: Whether the value is part of a message, in which strings do not count.
        parts: The pieces of the text.
    """
    if isinstance(value, list):
        parts.append("[")
        for item in value:
            if not _is_docstring(item):
                _write(item, message, parts)
                parts.append(",")
        parts.append("]")
    elif isinstance(value, ast.AST):
        if message and (isinstance(value, ast.JoinedStr) or _read_text(value) is not None):
            parts.append(MESSAGE)
            return
        parts.append(f"({type(value).__name__}")
        for name in _counted_fields(type(value)._fields):
            field = getattr(value, name, None)
            if name in OPTIONAL and not field:
                continue
            if isinstance(value, ast.JoinedStr):
                field = _join_parts(value.values)
            parts.append(f" {name}=")
            _write(field, message or _is_message(value, name), parts)
        parts.append(")")
    elif isinstance(value, str):
        parts.append(json.dumps(value))  # in ASCII, because `repr` depends on the Unicode tables of the version
    elif isinstance(value, bytes):
        parts.append(f"bytes {value.hex()}")
    elif value is None or value is Ellipsis or isinstance(value, bool | int | float | complex):
        parts.append(f"{type(value).__name__} {value!r}")
    else:
        raise TypeError(f"{type(value).__name__} in a syntax tree")


@cache
def _counted_fields(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the fields that count among those of a node, in the same order on all versions."""
    return tuple(sorted(set(names) - IGNORED))


def _read_text(value: object) -> str | None:
    """Return the string that a node writes as a literal; None for any other node."""
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def _is_docstring(node: object) -> bool:
    """Return whether a statement is a docstring or another string that forms a statement alone."""
    return isinstance(node, ast.Expr) and _read_text(node.value) is not None


def _is_message(node: ast.AST, field: str) -> bool:
    """Return whether strings in this field of a node are messages."""
    if isinstance(node, ast.Raise):
        return field == "exc"
    if isinstance(node, ast.Assert):
        return field == "msg"
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"


def _join_parts(parts: list[ast.expr]) -> list[ast.expr]:
    """Join neighbouring strings among the parts of an f-string, because Python's versions split them differently."""
    joined: list[ast.expr] = []
    for part in parts:
        text = _read_text(part)
        before = _read_text(joined[-1]) if joined else None
        if text is not None and before is not None:
            joined[-1] = ast.Constant(before + text)
        elif text != "":
            joined.append(part)
    return joined
