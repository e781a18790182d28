"""Say what the results of a study cannot tell, by the models that were measured."""

from collections.abc import Sequence

from kvbench.report.results_cells import Section, list_models
from kvbench.report.results_models import describe_turned
from kvbench.report.results_text import join_words, wrap

ABOUT = {  # model -> what it is, in a few words
    "smollm2_long": "SmolLM2-135M tuned to the tasks (`smollm2_long`)",
    "smollm2": "SmolLM2-135M as it was published (`smollm2`)",
    "reference": "the embedded model, which kvbench trained (`reference`)",
}
LIMITS = {  # model -> what its numbers cannot tell
    "smollm2_long": (
        "SmolLM2-135M with the factors of `smollm2_long` is an instrument tuned to the task family: it was trained "
        "on other samples of the same kinds of tasks so that it can do them ([its page](smollm2-long.md)). It is no "
        "evidence about large models."
    ),
    "smollm2": (
        "SmolLM2-135M is a very small model, and kvbench gets its weights as a copy that was quantised to 4 bits ([its "
        "page](smollm2.md)). It finds single values in a text. It hardly follows chains of them, counts words or "
        "answers questions about texts. Where its full cache scores little, its tables are about finding values."
    ),
    "reference": (
        "The embedded model was trained by kvbench on tasks like these. Its tables test the harness and show what a "
        "method or codec does in this model. They are no evidence about others."
    ),
}
LARGE = (
    "How methods rank here is no evidence about how they rank at 8 billion parameters, and neither are the sizes of "
    "the differences. What does carry over is the way to compare: on the same samples, at equal measured bytes, and "
    "with an interval for each difference."
)
READING = (
    "Generated texts replace the benchmarks' own in most parts, so scores cannot be compared with published "
    "ones ([which](results-measured.md)). A low score is that of a method with these settings on this model: where "
    "authors have published code, the tests compare the method with what it computes ([Methods](methods.md)). Scores "
    "say nothing about time ([cost](results-cost.md)). What is said *jointly* holds with 95 % confidence within its "
    "sentence; that all sentences hold is less certain. All other intervals are those of one cell or pair. The largest "
    "or smallest of several is likely to be exaggerated."
)


def describe_models(sections: Sequence[Section]) -> str:
    """Return the models of a study as an English list."""
    return join_words([ABOUT.get(model, model) for model in list_models(sections)], "and")


def format_limits(sections: Sequence[Section]) -> list[str]:
    """Return the paragraphs of what the results of these models cannot tell."""
    texts = [LIMITS[model] for model in list_models(sections) if model in LIMITS]
    turned = describe_turned(sections, " ([which](results-models-and-lengths.md))")
    about_models = " ".join(text for text in (LARGE, turned) if text)
    return [f"{wrap(text)}\n" for text in (*texts, about_models, READING)]
