"""Make prompts of rows that kvpress published (NVIDIA/kvpress evaluation/, kvpress/pipeline.py).

Such a row holds a whole prompt in three parts. kvpress renders the chat template around the context, puts the question
behind the context, and the answer prefix behind what the template writes after a message. Without a template it puts a
line break between question and answer prefix. It evicts after the context, which is `question=hidden` here.

The text is kvpress's to the byte, but for templates that strip white space from the end of a message. kvpress adds the
question after the template is rendered, so that its white space stays. kvpress also tokenises the context by itself,
while kvbench tokenises the whole prompt. A token can therefore span the border between context and question.
"""

from typing import Any

from kvbench.interfaces.task import Tokenizer
from kvbench.tasks.common.dataset_rows import Columns, Row
from kvbench.validation import SettingError

COLUMNS: Columns = {"context": str, "question": str, "answer_prefix": str, "max_new_tokens": int}


def make_prompt(row: Row, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what a `Sample` has of these columns."""
    between = "" if getattr(tokenizer, "chat_template", None) else "\n"
    return {**{name: row[name] for name in COLUMNS}, "question": row["question"] + between}


def check_limit(setting: str, where: str, row: Row) -> None:
    """Raise a SettingError unless the row allows at least one token for its answer."""
    if row["max_new_tokens"] < 1:
        raise SettingError(f"{setting}: {where}: max_new_tokens is {row['max_new_tokens']}, expected at least 1")
