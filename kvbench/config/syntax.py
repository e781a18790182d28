"""A Python source as a text of what it does, for hashes: without comments, docstrings, layout and messages.

`canonicalize` writes the syntax tree of a source in a form of its own. It is the same on Python 3.11 to 3.14, whose own
dumps (`ast.dump`, `ast.unparse`) differ from version to version. Left out is what cannot change a number:

* comments and layout, which the tree does not have;
* docstrings, and strings that stand alone as attributes' descriptions do;
* texts inside `raise`, `print` and behind the comma of `assert`: they say what happened, and to whom.

Everything else counts: operators, defaults, decorators, names, order, and annotations, because `constexpr` and
`ClassVar` change what a function or a class does.
"""

import ast
import json
from functools import cache

IGNORED = {"ctx", "kind", "type_comment", "type_ignores", "lineno", "col_offset", "end_lineno", "end_col_offset"}
OPTIONAL = {"type_params"}  # fields that older versions of Python lack: left out where they are empty
MESSAGE = "(message)"


def canonicalize(source: bytes) -> str:
    """Return the canonical text of a source.

    Raises:
        SyntaxError: The source is no Python.
    """
    parts: list[str] = []
    _write(ast.parse(source), False, parts)
    return "".join(parts)


def _write(value: object, message: bool, parts: list[str]) -> None:
    """Add the text of a node, of a field's value, or of a list; `message`: inside what only says something."""
    if isinstance(value, list):
        parts.append("[")
        for item in value:
            if not _is_docstring(item):
                _write(item, message, parts)
                parts.append(",")
        parts.append("]")
    elif message and (isinstance(value, ast.JoinedStr) or _is_text(value)):
        parts.append(MESSAGE)
    elif isinstance(value, ast.AST):
        parts.append(f"({type(value).__name__}")
        for name in _fields(type(value)):
            own = getattr(value, name, None)
            if name in OPTIONAL and not own:
                continue
            if isinstance(value, ast.JoinedStr):
                own = _join_parts(own)
            parts.append(f" {name}=")
            _write(own, message or _is_message(value, name), parts)
        parts.append(")")
    elif isinstance(value, bytes):
        parts.append(f"bytes {value.hex()}")
    elif isinstance(value, str):
        parts.append(json.dumps(value))  # ASCII; what `repr` shows depends on the version's Unicode tables
    elif value is None or value is Ellipsis or isinstance(value, bool | int | float | complex):
        parts.append(f"{type(value).__name__} {value!r}")
    else:
        raise TypeError(f"{type(value).__name__} in a syntax tree")


@cache
def _fields(kind: type[ast.AST]) -> tuple[str, ...]:
    """The fields of a kind of node that count, in one order on all versions."""
    return tuple(sorted(set(kind._fields) - IGNORED))


def _is_text(value: object) -> bool:
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _is_docstring(node: object) -> bool:
    """Whether a statement is a docstring, or a string that stands alone."""
    return isinstance(node, ast.Expr) and _is_text(node.value)


def _is_message(node: ast.AST, field: str) -> bool:
    """Whether texts in this field only say something."""
    if isinstance(node, ast.Raise):
        return field == "exc"
    if isinstance(node, ast.Assert):
        return field == "msg"
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"


def _join_parts(parts: list[ast.expr]) -> list[ast.expr]:
    """The parts of an f-string; neighbouring texts are one, which versions of Python split in different ways."""
    found: list[ast.expr] = []
    for part in parts:
        if _is_text(part) and found and _is_text(found[-1]):
            found[-1] = ast.Constant(found[-1].value + part.value)
        elif not (_is_text(part) and part.value == ""):
            found.append(part)
    return found
