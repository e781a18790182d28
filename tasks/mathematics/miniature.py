r"""Make a few problems in the format of MATH-500's and AIME's rows, for trying the tasks. They are not the benchmark.

Each is a word problem whose numbers stand in its text, the synthetic articles of RULER's questions. It is asked in the
problem and again in `answer_prefix`, which opens the answer, because the embedded model answers nothing else. The
answers in MATH's format have the different spellings that a grader must accept, and every fourth is a fraction that has
to be computed.
"""

import random
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from kvbench.tasks.common.synthetic_qa import Inventor, make_article

PROBLEMS = 12


def make_problems(name: str, integers: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where, row). With `integers`, answers are whole numbers from 0 to 999, as in AIME."""
    for index in range(PROBLEMS):
        rng = random.Random(f"kvbench {name} miniature/{index}")
        paragraphs = make_article(Inventor(f"kvbench {name} miniature/{index}"))["paragraphs"]
        texts = [paragraph["context"] for paragraph in paragraphs]
        asked = [(qa["question"], qa["answers"][0]["text"]) for each in paragraphs for qa in each["qas"]]
        (question, value), (_, other) = rng.sample([pair for pair in asked if pair[0].startswith("How many")], 2)
        number, answer = int(value.replace(",", "")), ""
        if integers:
            answer = f"{number % 1000:03}"
            texts = [text.replace(value, answer) for text in texts]
        elif index % 4 == 3:
            share = Fraction(number, int(other.replace(",", "")))
            question = f"{question} Give it as a fraction of {other}, in lowest terms."
            answer = rf"\frac{{{share.numerator}}}{{{share.denominator}}}"
        else:
            answer = (str(number), value, value.replace(",", r",\!"))[index % 4]
        documents = "\n\n".join(f"Document {place}:\n{text}" for place, text in enumerate(texts, 1))
        yield (
            f"miniature row {index}",
            {
                "problem": f"{documents}\n\n{question}",
                "answer": answer,
                "subject": "Reading",
                "level": 1 + index % 5,
                "unique_id": f"miniature/{index}",
                "answer_prefix": f"\n\nQuestion: {question} Answer:",
            },
        )
