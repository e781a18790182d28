"""Make synthetic rows in LongBench's format, with small contexts, for trying the tasks. They are not the benchmark.

synthetic_prose and synthetic_qa make the English texts, which are always the same. The questions about documents are
RULER's synthetic ones, which the embedded model can answer. In the other tasks it scores by words in common only.

The Chinese texts are reports of transports, with invented names. The embedded model cannot read them.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kvbench.tasks.common import synthetic_prose
from kvbench.tasks.common.synthetic_qa import Inventor, make_article, make_chain
from kvbench.tasks.longbench.subtasks import CHINESE

ROWS = 4  # rows of each subtask
CLASSES = {"person": "Name of a person", "name": "Name", "date": "Date", "count": "Number"}  # "Name" is in another
GOODS = {"农产品": ("大米", "苹果", "茶叶"), "工业品": ("钢管", "水泥", "电线"), "文化用品": ("图书", "毛笔", "地图")}
ALL_CLASSES = {"trec": list(CLASSES.values()), "lsht": list(GOODS)}

Texts = tuple[str, str, list[str]]  # input, context, answers


def make_rows(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where, row) for a subtask, as the reader of the official files does."""
    inventor = Inventor(f"kvbench longbench {name}")
    for index, (question, context, answers) in enumerate(MAKERS[name](inventor)):
        where = f"miniature {name} row {index}"
        yield (
            where,
            {
                "input": question,
                "context": context,
                "answers": answers,
                "length": count_words(name, [question, context, *answers]),
                "dataset": name,
                "language": "zh" if name in CHINESE else "python" if name in ("lcc", "repobench-p") else "en",
                "all_classes": ALL_CLASSES.get(name),
                "_id": hashlib.sha256(where.encode()).hexdigest()[:48],
            },
        )


def single(inventor: Inventor) -> Iterator[Texts]:
    """Ask two questions about each document."""
    for _ in range(ROWS // 2):
        paragraphs = make_article(inventor)["paragraphs"]
        context = "\n\n".join(paragraph["context"] for paragraph in paragraphs)
        for paragraph in inventor.rng.sample(paragraphs, 2):
            asked = inventor.rng.choice(paragraph["qas"])
            yield asked["question"], context, [answer["text"] for answer in asked["answers"]]


def multi(inventor: Inventor) -> Iterator[Texts]:
    """Ask a question that needs two of ten passages."""
    for _ in range(ROWS):
        chains = [make_chain(inventor) for _ in range(5)]
        pages = [page for chain_pages, _ in chains for page in chain_pages]
        inventor.rng.shuffle(pages)
        question, answer = inventor.rng.choice(chains)[1][0]
        yield question, join_passages([f"{title}\n{' '.join(text)}" for title, text in pages]), [answer]


def report(inventor: Inventor) -> Iterator[Texts]:
    """Ask for a summary: the first sentence of each paragraph."""
    for _ in range(ROWS):
        paragraphs = [paragraph["context"] for paragraph in make_article(inventor)["paragraphs"]]
        yield "", "\n\n".join(paragraphs), [" ".join(map(first_sentence, paragraphs))]


def news(inventor: Inventor) -> Iterator[Texts]:
    """Ask for the same summary of numbered passages."""
    for _, context, answers in report(inventor):
        yield "", join_passages(context.split("\n\n")), answers


def meeting(inventor: Inventor) -> Iterator[Texts]:
    """Ask two queries about each transcript."""
    for _ in range(ROWS // 2):
        speakers = [inventor.draw("person") for _ in range(3)]
        said = [
            first_sentence(paragraph["context"]) for _ in range(2) for paragraph in make_article(inventor)["paragraphs"]
        ]
        lines = [(inventor.rng.choice(speakers), text) for text in said]
        for speaker, text in inventor.rng.sample(lines, 2):
            about = " ".join(text.split()[:6])
            yield (
                f'What was said on "{about}"?',
                "\n".join(f"{who}: {what}" for who, what in lines),
                [f"{speaker}: {text}"],
            )


def types(inventor: Inventor) -> Iterator[Texts]:
    """Show questions with the type of their answers, and ask for the type of another one."""
    for _ in range(ROWS):
        shots = [(asked["question"], answer_type(asked["answers"][0]["text"])) for asked in make_questions(inventor)]
        *shown, (question, kind) = inventor.rng.sample(shots, 13)
        examples = "\n".join(f"Question: {text}\nType: {label}" for text, label in shown)
        yield f"Question: {question}\nType:", examples, [kind]


def trivia(inventor: Inventor) -> Iterator[Texts]:
    """Show passages with a question each; the last question is asked."""
    for _ in range(ROWS):
        shots: list[str] = []
        last: list[str] = []
        for paragraph in make_article(inventor)["paragraphs"]:
            asked = inventor.rng.choice(paragraph["qas"])
            last = [answer["text"] for answer in asked["answers"]]
            shots.append(f"Passage:\n{paragraph['context']}\nQuestion:\n{asked['question']}\nAnswer:\n")
            shots.append(f"{last[0]}\n\n")
        yield shots[-2], "".join(shots[:-2]).rstrip("\n"), last


def dialogues(inventor: Inventor) -> Iterator[Texts]:
    """Show dialogues in which two people agree when and where to meet, and ask for a summary of the last one."""
    for _ in range(ROWS):
        shots = []
        for _ in range(8):
            one, other, place, date = (inventor.draw(slot) for slot in ("person", "person", "name", "date"))
            remark = " ".join(synthetic_prose.write_essay(inventor.rng, 1))
            talk = f"{one}: Where shall we meet?\n{other}: {remark} Come to {place}.\n{one}: On {date}?\n{other}: Yes."
            shots.append((talk, f"{one} and {other} will meet in {place} on {date}."))
        *shown, (talk, summary) = shots
        examples = "\n\n".join(f"Dialogue: {text}\nSummary: {outcome}" for text, outcome in shown)
        yield f"Dialogue: {talk}\nSummary: ", examples, [summary]


def repeated_paragraphs(inventor: Inventor) -> Iterator[Texts]:
    """Ask how many of ten paragraphs are different."""
    for _ in range(ROWS):
        different = [
            first_sentence(paragraph["context"]) for _ in range(2) for paragraph in make_article(inventor)["paragraphs"]
        ]
        different = different[: inventor.rng.randint(5, 9)]
        listed = different + inventor.rng.choices(different, k=10 - len(different))
        inventor.rng.shuffle(listed)
        yield "", join_paragraphs(listed), [str(len(different))]


def one_of_paragraphs(inventor: Inventor) -> Iterator[Texts]:
    """Show thirty paragraphs and the beginning of one, and ask for its number."""
    for _ in range(ROWS):
        listed = [
            first_sentence(paragraph["context"]) for _ in range(5) for paragraph in make_article(inventor)["paragraphs"]
        ]
        place = inventor.rng.randrange(len(listed))
        yield " ".join(listed[place].split()[:10]), join_paragraphs(listed), [f"Paragraph {place + 1}"]


def completion(inventor: Inventor) -> Iterator[Texts]:
    """Ask for the last line of a class whose methods look alike."""
    for _ in range(ROWS):
        *above, last = write_class(inventor, 12)
        head, line = last.rstrip("\n").rsplit("\n", 1)
        yield "", "".join(above) + head + "\n", [line]


def repository(inventor: Inventor) -> Iterator[Texts]:
    """Ask for the line in which a file uses the class of another one."""
    for _ in range(ROWS):
        *above, last = write_class(inventor, 8)
        name = last.split("def ")[1].split("(")[0]
        path, other = (f"{inventor.draw('name').lower()}.py" for _ in range(2))
        imports = f"# Path: {other}\nfrom {path.removesuffix('.py')} import Store\n\nstore = Store()\nstore."
        yield (
            f"{imports}{name.replace('set', 'get')}()\n",
            f"# Path: {path}\n{''.join(above)}{last}",
            [f"store.{name}(value)"],
        )


@dataclass(frozen=True)
class Transport:
    """A synthetic report in Chinese: who took which goods where, and how much of them."""

    person: str
    place: str
    goods: str
    kind: str
    boxes: int
    month: int

    @property
    def text(self) -> str:
        """Return the report."""
        return (
            f"{self.month}月，{self.person}把{self.boxes}箱{self.goods}送到了{self.place}。路上下了雨，货物没有损坏。"
        )

    @property
    def question(self) -> str:
        """Return a question that `place` answers."""
        return f"{self.person}把{self.goods}送到了什么地方？"

    @property
    def summary(self) -> str:
        """Return the report in one sentence."""
        return f"{self.person}送了{self.goods}。"


def report_transports(inventor: Inventor, count: int) -> list[Transport]:
    """Draw reports in which no person and no place occurs twice."""
    rng = inventor.rng
    people = rng.sample([first + second for first in "赵钱孙李周吴郑王" for second in "一二三四五六七八"], count)
    places = rng.sample([first + second for first in "东西南北上下青白" for second in "山村河城桥湖岭岛"], count)
    kinds = [rng.choice(list(GOODS)) for _ in range(count)]
    return [
        Transport(person, place, rng.choice(GOODS[kind]), kind, rng.randint(10, 99), rng.randint(1, 12))
        for person, place, kind in zip(people, places, kinds, strict=True)
    ]


def single_chinese(inventor: Inventor) -> Iterator[Texts]:
    """Ask where goods came to."""
    for _ in range(ROWS):
        listed = report_transports(inventor, 20)
        asked = inventor.rng.choice(listed)
        yield asked.question, "\n".join(one.text for one in listed), [asked.place]


def multi_chinese(inventor: Inventor) -> Iterator[Texts]:
    """Ask the same of numbered articles. Two answers are right."""
    for _ in range(ROWS):
        listed = report_transports(inventor, 20)
        asked = inventor.rng.choice(listed)
        articles = (f"文章{number}\n标题：{one.person}\n内容：{one.text}" for number, one in enumerate(listed, 1))
        yield asked.question, "\n\n".join(articles), [asked.place, f"送到了{asked.place}"]


def meeting_chinese(inventor: Inventor) -> Iterator[Texts]:
    """Ask for a summary of a meeting."""
    for _ in range(ROWS):
        listed = report_transports(inventor, 5)
        yield "", "\n".join(f"{one.person}：{one.text}" for one in listed), ["".join(one.summary for one in listed)]


def types_chinese(inventor: Inventor) -> Iterator[Texts]:
    """Show reports with the class of their goods, and ask for the class of another one."""
    for _ in range(ROWS):
        *shown, last = report_transports(inventor, 16)
        examples = "\n".join(f"新闻内容：{one.text}\n类别：{one.kind}" for one in shown)
        yield f"新闻内容：{last.text}\n类别：", examples, [last.kind]


def one_of_chinese(inventor: Inventor) -> Iterator[Texts]:
    """Show thirty paragraphs and the summary of one, and ask for its number."""
    for _ in range(ROWS):
        listed = report_transports(inventor, 30)
        place = inventor.rng.randrange(len(listed))
        context = "\n\n".join(f"段落{number}：{one.text}" for number, one in enumerate(listed, 1))
        yield listed[place].summary, context, [f"段落{place + 1}"]


def write_class(inventor: Inventor, count: int) -> list[str]:
    """Write a class with `count` setters, one text each."""
    names = [inventor.draw("name").lower() for _ in range(count)]
    methods = [f"    def set_{name}(self, value):\n        self.{name} = value\n\n" for name in names]
    return ["class Store:\n" + methods[0], *methods[1:]]


def make_questions(inventor: Inventor) -> list[dict[str, Any]]:
    """Make the questions of an article."""
    return [asked for paragraph in make_article(inventor)["paragraphs"] for asked in paragraph["qas"]]


def answer_type(answer: str) -> str:
    """Return the class of a synthetic answer."""
    if answer.replace(",", "").isdigit():
        return CLASSES["count"]
    if answer[0].isdigit():
        return CLASSES["date"]
    return CLASSES["person"] if " " in answer else CLASSES["name"]


def count_words(name: str, texts: list[str]) -> int:
    """Count the words of texts, in Chinese their characters, as the official rows do."""
    return sum(map(len, texts)) if name in CHINESE else len(" ".join(texts).split())


def first_sentence(paragraph: str) -> str:
    """Return the first sentence of a paragraph."""
    return paragraph.split(". ")[0].rstrip(".") + "."


def join_passages(texts: list[str]) -> str:
    """Number texts as passages and join them."""
    return "\n\n".join(f"Passage {number}:\n{text}" for number, text in enumerate(texts, 1))


def join_paragraphs(texts: list[str]) -> str:
    """Number texts as paragraphs and join them."""
    return "\n\n".join(f"Paragraph {number}: {text}" for number, text in enumerate(texts, 1))


MAKERS: dict[str, Callable[[Inventor], Iterator[Texts]]] = {
    "narrativeqa": single,
    "qasper": single,
    "multifieldqa_en": single,
    "hotpotqa": multi,
    "2wikimqa": multi,
    "musique": multi,
    "gov_report": report,
    "qmsum": meeting,
    "multi_news": news,
    "trec": types,
    "triviaqa": trivia,
    "samsum": dialogues,
    "passage_count": repeated_paragraphs,
    "passage_retrieval_en": one_of_paragraphs,
    "lcc": completion,
    "repobench-p": repository,
    "multifieldqa_zh": single_chinese,
    "dureader": multi_chinese,
    "vcsum": meeting_chinese,
    "lsht": types_chinese,
    "passage_retrieval_zh": one_of_chinese,
}
