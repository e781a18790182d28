"""RULER's prompt strings: read from the installed lm-eval package and corrected to the official wording.

The official strings are those of NVIDIA/RULER c3f5e3b, `scripts/data/synthetic/constants.py`. lm-eval changed some of
them, and this module changes them back:

* The answer prefixes of niah and qa begin with a space.
* "assgined" in vt is spelt "assigned", as upstream spells it since 4a216f4.
"""

import ast
import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from kvbench.tasks.common.lm_eval_strings import find_literal, parse_source, read_strings

LM_EVAL_STRINGS = "7b469e6cb82fd93b841635d80612f5f9a41ec00944bc7565a01d99532cde03c1"  # hash for lm-eval 0.4.13


@dataclass(frozen=True)
class RenderedPrompt:
    """One prompt in its three parts, and the reference answers.

    Attributes:
        context: The text up to the end of the haystack.
        question: The text between the haystack and the answer prefix.
        answer_prefix: The beginning of the answer, which the model continues.
        answers: The reference answers.
        solved: Where the answer of a solved example begins and ends in `context`, in characters. A chat template makes
            that answer a turn of its own. Empty without such an example.
    """

    context: str
    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    solved: tuple[int, ...] = ()

    @property
    def prompt(self) -> str:
        return self.context + self.question + self.answer_prefix


@dataclass(frozen=True)
class Wording:
    """A template with one `{context}`, and the answer prefix."""

    template: str
    prefix: str

    def render(self, context: str, answers: Iterable[str], **slots: object) -> RenderedPrompt:
        """Fill the template with a haystack and the values of its other slots."""
        before, after = self.template.split("{context}")
        parts = before.format(**slots) + context, after.format(**slots), self.prefix.format(**slots)
        return RenderedPrompt(*parts, answers=tuple(answers))

    def singular(self) -> "Wording":
        """Return the wording that asks for exactly one value, by the replacements of upstream's niah.py."""

        def one(text: str) -> str:
            return text.replace("Some", "A").replace("are all", "is").replace("are", "is")

        return Wording(one(self.template), one(self.prefix))


@dataclass(frozen=True)
class Wordings:
    """RULER's templates by family, the needle's sentence, the noise sentence and the heading of a document."""

    niah: Wording
    vt: Wording
    cwe: Wording
    fwe: Wording
    qa: Wording
    needle: str
    noise: str
    document: str

    def fingerprint(self) -> str:
        """Hash all strings."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


@cache
def load_wordings() -> Wordings:
    """Load the official strings.

    Raises:
        SettingError: The installed lm-eval has other strings than the tested one.
    """
    strings = read_strings("task=ruler", "ruler", _read_files, LM_EVAL_STRINGS)
    return Wordings(
        niah=Wording(strings["niah"], " " + strings["niah_prefix"]),
        vt=Wording(strings["vt"], strings["vt_prefix"].replace("assgined", "assigned")),
        cwe=Wording(strings["cwe"], strings["cwe_prefix"]),
        fwe=Wording(strings["fwe"], strings["fwe_prefix"]),
        qa=Wording(strings["qa"], " " + strings["qa_prefix"]),
        needle=strings["needle"],
        noise=strings["noise"],
        document=strings["document"],
    )


def _read_files(folder: Path) -> dict[str, str]:
    """Read lm-eval's strings from the files of its folder `ruler`."""
    prepare, qa = parse_source(folder / "prepare_niah.py"), parse_source(folder / "qa_utils.py")
    configs = {
        "vt": find_literal(parse_source(folder / "vt_utils.py"), "CONFIG")["variable_tracking"],
        "cwe": find_literal(parse_source(folder / "cwe_utils.py"), "CONFIG"),
        "fwe": find_literal(parse_source(folder / "fwe_utils.py"), "CONFIG"),
        "qa": find_literal(qa, "CONFIG"),
    }
    return {
        "niah": find_literal(parse_source(folder / "niah_utils.py"), "TEMPLATE"),
        "niah_prefix": _find_plural_prefix(prepare),
        "needle": find_literal(prepare, "NEEDLE"),
        "noise": find_literal(prepare, "haystack"),
        "document": find_literal(qa, "DOCUMENT_PROMPT"),
        **{name: config["template"] for name, config in configs.items()},
        **{f"{name}_prefix": config["answer_prefix"] for name, config in configs.items()},
    }


def _find_plural_prefix(prepare: ast.Module) -> str:
    """Find the f-string under "gen_prefix" for several values, with its placeholders in braces."""
    for node in ast.walk(prepare):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "gen_prefix" and isinstance(value, ast.IfExp):
                    return _unparse_template(value.orelse)
    raise LookupError("no gen_prefix for several values")


def _unparse_template(node: ast.expr) -> str:
    """Turn an f-string into a template for `str.format`."""
    if not isinstance(node, ast.JoinedStr):
        raise LookupError("gen_prefix is no f-string")
    parts = []
    for part in node.values:
        if isinstance(part, ast.FormattedValue):
            parts.append(f"{{{ast.unparse(part.value)}}}")
        elif isinstance(part, ast.Constant):
            parts.append(str(part.value))
    return "".join(parts)
