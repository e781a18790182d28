"""Draw mutants of the program: `python tests/mutants/draw.py --seed 0 --each 5` writes mutants.jsonl.

A mutant is the program with one small mistake in one line: a comparison that includes its bound or no longer does, a
sum for a difference, a constant that is one too large, `or` for `and`, `min` for `max`. The draw takes as many from
each package, from different functions, and none from text, types, imports or decorators.
"""

import argparse
import ast
import json
import random
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("mutants.jsonl")
PACKAGES = ("kvbench/engine", "kvbench/cache", "methods", "kvbench/analysis", "kvbench/store", "kvbench/runs")
OPERATORS = {
    **{ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">")},
    **{ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in")},
    **{ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.And: ("and", "or"), ast.Or: ("or", "and")},
    **{ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*")},
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "amin": "amax", "amax": "amin"}


class Finder(ast.NodeVisitor):
    """Collects the places of a file where a mistake fits: (function, line, column, text, mistaken text)."""

    def __init__(self, lines: list[str]):
        self.lines, self.function, self.places = lines, "", []

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        before, self.function = self.function, f"{node.name}:{node.lineno}"
        for statement in node.body:  # neither decorators nor annotations
            self.visit(statement)
        self.function = before

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value:
            self.visit(node.value)

    def skip(self, node: ast.AST) -> None:
        """Messages and text are not mutated."""

    visit_JoinedStr = visit_Raise = visit_Import = visit_ImportFrom = skip

    def replace_between(self, left: ast.expr, right: ast.expr, kind: type) -> None:
        """An operator lies between two operands of one line."""
        if kind not in OPERATORS or left.end_lineno != right.lineno or not self.function:
            return
        text, mistaken = OPERATORS[kind]
        gap = self.lines[left.end_lineno - 1].encode()[left.end_col_offset : right.col_offset].decode()
        if gap.strip(" ()") == text:
            column = left.end_col_offset + gap.index(text)
            self.places.append((self.function, left.end_lineno, column, text, mistaken))

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            self.replace_between(left, right, type(operator))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in zip(node.values, node.values[1:], strict=False):
            self.replace_between(left, right, type(node.op))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if not any(isinstance(side, ast.JoinedStr) for side in (node.left, node.right)):
            self.replace_between(node.left, node.right, type(node.op))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if self.function and isinstance(node.value, bool):
            self.places.append((self.function, node.lineno, node.col_offset, str(node.value), str(not node.value)))
        elif self.function and type(node.value) is int and self.lines[node.lineno - 1].isascii():
            text = ast.get_source_segment("\n".join(self.lines), node)
            self.places.append((self.function, node.lineno, node.col_offset, text, str(node.value + 1)))

    def visit_Name(self, node: ast.Name) -> None:
        if self.function and node.id in NAMES:
            self.places.append((self.function, node.lineno, node.col_offset, node.id, NAMES[node.id]))


def list_places(package: str) -> dict[tuple[str, str], list[tuple[int, str, str]]]:
    """(file, function) -> the (line, text, mistaken text) of each mutant that can be made there."""
    found: dict[tuple[str, str], list[tuple[int, str, str]]] = {}
    for path in sorted((ROOT / package).glob("*.py")):
        lines = path.read_text(encoding="utf-8").split("\n")
        finder = Finder(lines)
        finder.visit(ast.parse("\n".join(lines)))
        for function, number, column, text, mistaken in finder.places:
            line = lines[number - 1].encode()
            assert line[column:].startswith(text.encode()), (path, number, text)
            mutated = line[:column] + mistaken.encode() + line[column + len(text) :]
            key = (path.relative_to(ROOT).as_posix(), function)
            found.setdefault(key, []).append((number, line.decode(), mutated.decode()))
    return found


def draw(seed: int, each: int) -> Iterator[dict[str, object]]:
    """`each` mutants of every package, each from a file of its own while there are enough."""
    for package in PACKAGES:
        generator = random.Random(f"{seed} {package}")
        places = list_places(package)
        by_file: dict[str, list[tuple[str, str]]] = {}
        for key in places:
            by_file.setdefault(key[0], []).append(key)
        for file in sorted(generator.sample(sorted(by_file), each)):
            key = generator.choice(by_file[file])
            line, before, after = generator.choice(places[key])
            yield {"file": file, "line": line, "before": before, "after": after}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--each", type=int, default=5, help="mutants of each package")
    chosen = parser.parse_args()
    LIST.write_text("".join(json.dumps(own) + "\n" for own in draw(chosen.seed, chosen.each)), encoding="utf-8")


if __name__ == "__main__":
    main()
