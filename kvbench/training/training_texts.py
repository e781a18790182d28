"""Generate essays and documents for training, with the code of the tasks and with seeds that no evaluation uses."""

import random
from collections import deque
from itertools import accumulate, chain

from kvbench.tasks.common import synthetic_prose, synthetic_qa
from kvbench.tasks.ruler.texts import load_texts


class EndlessTexts:
    """Texts for the generators of RULER: the official word lists, but an endless supply of new essays and documents.

    Args:
        name: Part of the seed of the documents.
        rng: Generator that draws the essays.
    """

    def __init__(self, name: str, rng: random.Random) -> None:
        self.name, self.rng, self.renewals = name, rng, 0
        official = load_texts()
        self.nouns, self.adjectives, self.pool = official.nouns, official.adjectives, official.pool
        self.sentences: deque[list[str]] = deque(maxlen=4000)
        while len(self.sentences) < 600:
            self.write()

    def write(self, sentences: int = 24) -> None:
        """Add sentences to the essay and drop the oldest ones."""
        self.sentences.extend(s.split() for s in synthetic_prose.write_essay(self.rng, sentences))

    def essay(self, units: int) -> tuple[tuple[str, ...], list[int]]:
        """Return `units` words from a random sentence on, and the number of words up to the end of each sentence."""
        self.write()
        start = self.rng.randrange(len(self.sentences))
        taken: list[list[str]] = []
        have = 0
        while have < units:
            taken.append(self.sentences[(start + len(taken)) % len(self.sentences)])
            have += len(taken[-1])
        return tuple(chain.from_iterable(taken))[:units], list(accumulate(map(len, taken)))

    def renew(self) -> None:
        """Replace the articles and chains by new ones. Each has documents, and questions about them with answers."""
        self.renewals += 1
        inventor = synthetic_qa.Inventor(f"kvbench reference/{self.name}/{self.renewals}")
        self.articles, self.chains = [], []
        for _ in range(24):
            paragraphs = synthetic_qa.make_article(inventor)["paragraphs"]
            asked = [(q["question"], q["answers"][0]["text"]) for p in paragraphs for q in p["qas"]]
            self.articles.append(([p["context"] for p in paragraphs], asked))
        for _ in range(140):
            pages, asked = synthetic_qa.make_chain(inventor)
            documents = [f"{title}\n{''.join(text)}" for title, text in pages]
            # A chain takes two steps through two documents. The answer names the person of the first step, then the
            # fact about that person.
            self.chains.append((documents, [(question, f"{pages[1][0]}, {answer}") for question, answer in asked]))
