"""RULER's prompt strings, read from the source of the installed lm-eval package and corrected to the official wording.

The source is parsed, not imported: importing lm-eval's `prepare_niah` tries to download. What lm-eval changed against
NVIDIA/RULER c3f5e3b `scripts/data/synthetic/constants.py` is changed back: answer prefixes begin with a space (niah,
qa), and "assgined" is spelt right since upstream's 4a216f4 (vt).
"""

import ast
import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True)
class RenderedPrompt:
    """One prompt in its three parts, and the references of its answer."""

    context: str  # ends where the haystack ends
    question: str  # begins with what stands between haystack and question
    answer_prefix: str
    answers: tuple[str, ...]
    solved: tuple[int, ...] = ()  # where in the context a solved example's answer begins and ends: a turn of its own

    @property
    def prompt(self) -> str:
        return self.context + self.question + self.answer_prefix


@dataclass(frozen=True)
class Wording:
    """A template with one `{context}`, and the beginning of the answer."""

    template: str
    prefix: str

    def render(self, context: str, answers: Iterable[str], **slots: object) -> RenderedPrompt:
        before, after = self.template.split("{context}")
        parts = before.format(**slots) + context, after.format(**slots), self.prefix.format(**slots)
        return RenderedPrompt(*parts, answers=tuple(answers))

    def singular(self) -> "Wording":
        """The wording when exactly one value is asked (upstream's niah.py, by the same replacements)."""

        def one(text: str) -> str:
            return text.replace("Some", "A").replace("are all", "is").replace("are", "is")

        return Wording(one(self.template), one(self.prefix))


@dataclass(frozen=True)
class Wordings:
    niah: Wording
    vt: Wording
    cwe: Wording
    fwe: Wording
    qa: Wording
    needle: str
    noise: str
    document: str

    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


@cache
def load_wordings() -> Wordings:
    """The official strings; reading them takes a few milliseconds, once."""
    niah, prepare, vt, cwe, fwe, qa = (
        _parse(f"{n}.py") for n in ("niah_utils", "prepare_niah", "vt_utils", "cwe_utils", "fwe_utils", "qa_utils")
    )
    chain = _literal(vt, "CONFIG")["variable_tracking"]
    common, frequent, documents = _literal(cwe, "CONFIG"), _literal(fwe, "CONFIG"), _literal(qa, "CONFIG")
    return Wordings(
        niah=Wording(_literal(niah, "TEMPLATE"), " " + _plural_prefix(prepare)),
        vt=Wording(chain["template"], chain["answer_prefix"].replace("assgined", "assigned")),
        cwe=Wording(common["template"], common["answer_prefix"]),
        fwe=Wording(frequent["template"], frequent["answer_prefix"]),
        qa=Wording(documents["template"], " " + documents["answer_prefix"]),
        needle=_literal(prepare, "NEEDLE"),
        noise=_literal(prepare, "haystack"),
        document=_literal(qa, "DOCUMENT_PROMPT"),
    )


def _parse(name: str) -> ast.Module:
    package = find_spec("lm_eval").submodule_search_locations[0]
    return ast.parse(Path(package, "tasks", "ruler", name).read_text(encoding="utf-8"))


def _literal(module: ast.Module, name: str):
    """The literal value that is assigned to `name` anywhere in the module."""
    for node in ast.walk(module):
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            try:
                return ast.literal_eval(node.value)
            except ValueError:
                continue  # an assignment of something computed
    raise LookupError(f"lm-eval's RULER has no literal {name}: is lm-eval==0.4.13 installed?")


def _plural_prefix(prepare: ast.Module) -> str:
    """The f-string under "gen_prefix" for several values, with its placeholders in braces."""
    for node in ast.walk(prepare):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "gen_prefix":
                    return "".join(
                        p.value if isinstance(p, ast.Constant) else f"{{{ast.unparse(p.value)}}}"
                        for p in value.orelse.values
                    )
    raise LookupError("lm-eval's RULER has no gen_prefix: is lm-eval==0.4.13 installed?")
