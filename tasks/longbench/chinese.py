"""LongBench's metrics of Chinese answers (THUDM/LongBench 2e00731, LongBench/metrics.py).

jieba cuts a text into words. `qa_f1` is the F1 of the bags of words, and `rouge` is `metrics.rouge` of the words with
blanks between them. A Chinese full stop is no ".", so most answers are one sentence for ROUGE, and an answer that has
about a thousand words together with its reference may score 0 (`metrics.STEPS`).

Another version of jieba may cut other words. 0.39 has the same dictionary as 0.42.1, and treats hyphens differently.
LongBench pins no version. The newest one, 0.42.1 of January 2020, is older than LongBench.
"""

import string
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kvbench.tasks.common.lm_eval_strings import find_literal, parse_source, read_strings
from kvbench.tasks.longbench import metrics
from kvbench.validation import SettingError

JIEBA = "0.42.1"
LM_EVAL_STRINGS = "5f86ce48981e780179eec762828f3289b5631c519ac701aab6ee70d36ac373ab"  # for lm-eval 0.4.13


def qa_f1(output: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Return the F1 of the bags of words, without case, white space, and the punctuation of ASCII and Chinese."""
    return metrics.bag_f1(_words(output), _words(reference))


def rouge(output: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Return the ROUGE-L f of the words. Upstream has one more frame here than for English, so the walk is shorter."""
    cut = load_cutter()
    return metrics.rouge(" ".join(cut(output)), " ".join(cut(reference)), steps=metrics.STEPS - 1)


def require_jieba() -> None:
    """Raise a SettingError unless the version of jieba is installed that cuts the words that scores are made of."""
    try:
        installed = version("jieba")
    except PackageNotFoundError:
        installed = None
    if installed != JIEBA:
        state = "is missing" if installed is None else f"{installed} may cut other words"
        raise SettingError(f"task=longbench: jieba cuts Chinese answers into words and {state}; install jieba=={JIEBA}")


@cache
def load_cutter() -> Callable[[str], Iterable[str]]:
    """Return the function that cuts a text into words. It reads jieba's dictionary, which takes about a second.

    jieba would read the dictionary from a file in the folder for temporary files, where other users can write it.
    """
    require_jieba()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about its regular expressions and pkg_resources
        import jieba
    cutter = jieba.Tokenizer()
    cutter.FREQ, cutter.total = cutter.gen_pfdict(cutter.get_dict_file())
    cutter.initialized = True
    return cutter.cut


@cache
def load_punctuation() -> frozenset[str]:
    """Load the characters that `qa_f1` leaves out.

    Raises:
        SettingError: The installed lm-eval has other ones than the tested one.
    """
    strings = read_strings("task=longbench", "longbench", _read_files, LM_EVAL_STRINGS)
    return frozenset(string.punctuation + strings["punctuation"])


def _read_files(folder: Path) -> dict[str, str]:
    return {"punctuation": find_literal(parse_source(folder / "metrics.py"), "cn_punctuation")}


def _words(text: str) -> list[str]:
    marks = load_punctuation()
    words = (
        "".join(one for one in word.lower() if one not in marks and not one.isspace()) for word in load_cutter()(text)
    )
    return [word for word in words if word]
