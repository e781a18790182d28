"""LongBench's prompts: lm-eval's and the official ones.

lm-eval's prompts are read from the task files of the installed package. The official prompts are those of
config/dataset2prompt.json (THUDM/LongBench 2e00731). lm-eval 0.4.13 changed six of them, and this module changes them
back: lm-eval leaves out a line break before the question of triviaqa and samsum, and the blank or line break at the end
of four others.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from kvbench.tasks.common.lm_eval_strings import read_strings
from kvbench.tasks.longbench.subtasks import NAMES

LM_EVAL_STRINGS = "88633c2b84ade57de67b6624b0b619c90bfb89eac1d4fd0882756dfdf7a878d1"  # hash for lm-eval 0.4.13
CONTEXT, QUESTION = "{{context}}", "{{question}}"
BLANK_LINE = ("triviaqa", "samsum")  # between context and question
ENDS = {"passage_count": " ", "passage_retrieval_en": " ", "lcc": "\n", "repobench-p": "\n"}


@dataclass(frozen=True)
class PromptTemplate:
    """The text before the context, and the text after it with a place for the question, if the subtask asks one."""

    before: str
    after: str

    def render(self, context: str, question: str) -> tuple[str, str]:
        """Return the prompt up to the end of the context, and the rest of it."""
        return self.before + context, self.after.replace(QUESTION, question)


def load_official_prompt(name: str) -> PromptTemplate:
    """Load the official prompt of a subtask, e.g. "repobench-p"."""
    template = load_lm_eval_prompt(name)
    return PromptTemplate(template.before, ("\n" if name in BLANK_LINE else "") + template.after + ENDS.get(name, ""))


def load_lm_eval_prompt(name: str) -> PromptTemplate:
    """Load lm-eval's prompt of a subtask.

    Raises:
        SettingError: The installed lm-eval has other prompts than the tested one.
    """
    return PromptTemplate(*_load_texts()[name].split(CONTEXT))


@cache
def _load_texts() -> Mapping[str, str]:
    """Load lm-eval's prompts of all subtasks."""
    return read_strings("task=longbench", "longbench", _read_files, LM_EVAL_STRINGS)


def _read_files(folder: Path) -> dict[str, str]:
    """Read the prompts by subtask. The files are not loaded as tasks, because their tags import more packages."""
    return {name: _read_prompt(folder / f"{name}.yaml") for name in NAMES}


def _read_prompt(path: Path) -> str:
    node = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    if not isinstance(node, yaml.MappingNode):
        raise LookupError(f"{path.name} is no mapping")
    return next((value.value for key, value in node.value if key.value == "doc_to_text"), "")
