"""Questions about documents: RULER's qa_1 (SQuAD) and qa_2 (HotpotQA) (upstream: scripts/data/synthetic/qa.py).

The prompt holds the documents that the question needs, then other documents of the same article, then documents of the
whole set; they are shuffled and numbered.
"""

import random
from dataclasses import dataclass
from typing import Any, ClassVar

from kvbench.tasks.ruler.family import Family
from kvbench.tasks.ruler.questions import QuestionSet
from kvbench.tasks.ruler.templates import RenderedPrompt, load_wordings
from kvbench.tasks.ruler.texts import RulerTexts


@dataclass(frozen=True)
class QuestionFamily(Family):
    """A qa subtask. `source` names its set of questions: ``squad`` or ``hotpot``."""

    source: str
    new_tokens: ClassVar[int] = 32
    any_answer: ClassVar[bool] = True

    def draw(self, units: int, rng: random.Random, texts: RulerTexts, length: int, **fixed: int) -> dict[str, Any]:
        """Draw documents. Sample ``index`` asks question ``index``, as upstream; without it the question is drawn."""
        chosen = self._set(texts)
        number = fixed.get("index", rng.randrange(len(chosen.questions))) % len(chosen.questions)
        question, every = chosen.questions[number], len(chosen.documents)
        needed, related = list(question.documents), list(question.related)
        if units >= every:
            order = [i % every for i in range(units)]
        elif units - len(needed) <= len(related):
            order = needed + rng.sample(related, units - len(needed))
        else:
            known = {*needed, *related}
            drawn = rng.sample(range(every), units)  # at most len(known) of them are in `known`
            order = needed + related + [i for i in drawn if i not in known][: units - len(needed) - len(related)]
        rng.shuffle(order)
        return {"question": number, "documents": order}

    def render(self, draws: dict[str, Any], texts: RulerTexts) -> RenderedPrompt:
        chosen = self._set(texts)
        question = chosen.questions[draws["question"]]
        numbered = [
            load_wordings().document.format(i=i, document=chosen.documents[d])
            for i, d in enumerate(draws["documents"], 1)
        ]
        return load_wordings().qa.render("\n\n".join(numbered), question.answers, query=question.query)

    def least(self, texts: RulerTexts, length: int, index: int) -> int:
        questions = self._set(texts).questions
        return len(questions[index % len(questions)].documents)

    def floor(self, texts: RulerTexts, index: int) -> int:
        return self.least(texts, 0, index)

    def meta(self, draws: dict[str, Any], texts: RulerTexts) -> dict[str, Any]:
        return {"haystack": "none", "qa": texts.qa, "question": draws["question"]}

    def _set(self, texts: RulerTexts) -> QuestionSet:
        return texts.squad if self.source == "squad" else texts.hotpot


QA = (QuestionFamily("ruler_qa_squad", "squad"), QuestionFamily("ruler_qa_hotpot", "hotpot"))
