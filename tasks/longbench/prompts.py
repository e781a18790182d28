"""LongBench's prompts: lm-eval's, read from the task files of its installed package, and the official ones, which are
those with the official wording put back.

lm-eval 0.4.13 changed these of config/dataset2prompt.json (THUDM/LongBench 2e00731): a line break less before the
question of triviaqa and samsum, and the blank or line break at the end of four others.
"""

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import yaml

CONTEXT, QUESTION = "{{context}}", "{{question}}"
BLANK_LINE = ("triviaqa", "samsum")  # between context and question
ENDS = {"passage_count": " ", "passage_retrieval_en": " ", "lcc": "\n", "repobench-p": "\n"}


@dataclass(frozen=True)
class PromptTemplate:
    """What stands before the context, and what follows it with a place for the question (if it has one)."""

    before: str
    after: str

    def render(self, context: str, question: str) -> tuple[str, str]:
        """The prompt up to the end of the context, and the rest of it."""
        return self.before + context, self.after.replace(QUESTION, question)


@cache
def load_official_prompt(name: str) -> PromptTemplate:
    """The official prompt of a subtask, e.g. "repobench-p"."""
    own = load_lm_eval_prompt(name)
    return PromptTemplate(own.before, ("\n" if name in BLANK_LINE else "") + own.after + ENDS.get(name, ""))


@cache
def load_lm_eval_prompt(name: str) -> PromptTemplate:
    """lm-eval's prompt. The file is parsed and not loaded: its tags would import modules that need more packages."""
    package = find_spec("lm_eval").submodule_search_locations[0]
    node = yaml.compose(Path(package, "tasks", "longbench", f"{name}.yaml").read_text(encoding="utf-8"))
    text = next(value.value for key, value in node.value if key.value == "doc_to_text")
    return PromptTemplate(*text.split(CONTEXT))
