"""Describe the methods of a store for their pages: definition, equation, source and presets.

The texts come from the docstring of the method's module and from conf/method/<name>.yaml. Both are read as text,
because importing a method would need torch. A method that this checkout does not have gets no description.
"""

import ast
import re
from itertools import takewhile
from pathlib import Path
from textwrap import dedent
from typing import Any

import yaml

from kvbench.config.compose import find_file, list_choices
from kvbench.config.paths import FILES

PRESET = re.compile(r"^  (\w+):.*?\}\s*(?:#\s*(.*))?$", re.MULTILINE)  # a line with a preset, and its comment
EQUATION = "    "  # a paragraph of a docstring that begins so is an equation


def describe_method(name: str) -> dict[str, Any] | None:
    """Return what the page of a method says, or None if there is no such method in conf/method.

    Returns:
        `definition`: the first paragraph, or the file's first comment if the module describes another method, such as
        that of observed_attention, which is h2o with other settings; `equation`: its equations; `source`: the paragraph
        that names it; `more`: the other paragraphs; `presets`: name, settings and comment of each; `preset`: the
        default one.
    """
    if name not in list_choices("method"):
        return None
    text = find_file("method", name).read_text(encoding="utf-8")
    config = yaml.safe_load(text)
    paragraphs = split_docstring(read_docstring(config.get("_target_", "")))
    source = [paragraph for paragraph in paragraphs if paragraph.startswith("Source")]
    equations = [paragraph for paragraph in paragraphs if paragraph.startswith(EQUATION)]
    notes = dict(PRESET.findall(text))
    if paragraphs and not paragraphs[0].startswith(f"{name}:"):  # a file that sets up the class of another method
        paragraphs.insert(0, read_first_comment(text))
    return {
        "definition": paragraphs[0] if paragraphs else "",
        "equation": dedent("\n".join(equations)),
        "source": " ".join(source),
        "more": [paragraph for paragraph in paragraphs[1:] if paragraph not in (*source, *equations)],
        "presets": [
            [preset, ", ".join(f"{key}={value}" for key, value in (settings or {}).items()), notes.get(preset, "")]
            for preset, settings in (config.get("presets") or {}).items()
        ],
        "preset": config.get("preset"),
    }


def read_docstring(target: str, root: Path = FILES) -> str:
    """Return the docstring of the module that defines a class such as "kvbench.methods.snapkv.SnapKV".

    "" if the checkout in the folder `root` has no such module.
    """
    package, *parts, _ = target.split(".") if target.count(".") > 1 else ("", "", "")
    if package != "kvbench":
        return ""
    path = root.joinpath(*parts).with_suffix(".py") if parts else Path()
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "") if path.is_file() else ""


def read_first_comment(text: str) -> str:
    """Return the comment at the beginning of a YAML file in one line."""
    lines = takewhile(lambda line: line.startswith("#"), text.splitlines())
    return " ".join(line.removeprefix("#").strip() for line in lines)


def split_docstring(text: str) -> list[str]:
    """Return the paragraphs of a docstring. The lines of an equation stay apart, those of other paragraphs do not."""
    paragraphs = [paragraph for paragraph in text.split("\n\n") if paragraph.strip()]
    return [paragraph if paragraph.startswith(EQUATION) else " ".join(paragraph.split()) for paragraph in paragraphs]
