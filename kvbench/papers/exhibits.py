"""Read the papers' exhibits that studies fill, from conf/papers/exhibits/, and say what holds of their claims.

An exhibit is a table or a figure of a paper that shows no scores and no costs. Its specification has these keys:

    title       the paper, the number, and what is shown
    study       the study that computes its numbers (kvbench/studies/)
    lines       the numbers that it shows: values of `quantity` and other columns of a study's file
    chart       how a figure is drawn (kvbench.report.study_charts)
    axes        x, y, value -> the title of an axis or of the scale of colours; log -> those with a logarithmic scale
    names       series or quantity -> the paper's name of it, for legends and titles
    claims      quantity -> the paper's claim in words. The number is the share of instances in which it holds
    proof       quantity -> exact, bound or estimate; a claim without an entry is counted exactly
    notes       the reading that is taken where the paper leaves something open, and what the paper got wrong

and, for a table, the keys of kvbench.papers.table_spec.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from kvbench.papers.table_spec import PAPERS, read_tables
from kvbench.store.study_lines import HOLDS, Line, StudyFolder
from kvbench.validation import SettingError, find_closest, format_value, require_choice

EXHIBITS = PAPERS / "exhibits"

Exhibit = Mapping[str, Any]


def load_exhibits(paper: str | None = None, name: str | None = None) -> dict[str, Exhibit]:
    """Load specifications of exhibits.

    Args:
        paper: Load only the exhibits of this paper.
        name: Load only this exhibit of the paper, such as ``figure14``.

    Returns:
        <paper>_<exhibit> -> its specification, in the order of the files.

    Raises:
        SettingError: There is no such paper or exhibit. The message names similar ones.
    """
    files = find_files()
    if paper is not None:
        require_choice("PAPER", paper, [*files, "all"])
        files = {paper: files[paper]}
    exhibits = {f"{stem}_{key}": spec for stem, path in files.items() for key, spec in read_tables(path).items()}
    if name is not None:
        full_name = f"{paper}_{normalize_name(name)}"
        if full_name not in exhibits:
            refuse_exhibit(name, [key.removeprefix(f"{paper}_") for key in exhibits])
        exhibits = {full_name: exhibits[full_name]}
    return exhibits


def find_files() -> dict[str, Path]:
    """Return paper -> the file with its exhibits."""
    return {path.stem: path for path in sorted(EXHIBITS.glob("*.yaml"))}


def make_study_command(name: str) -> str:
    """Return the command that fills the exhibit <paper>_<exhibit>."""
    paper = next(stem for stem in find_files() if name.startswith(f"{stem}_"))
    return f"python -m kvbench papers study {paper} {name.removeprefix(f'{paper}_')}"


def normalize_name(name: str) -> str:
    """Return the name of an exhibit as the files write it: figure4 becomes figure04, and 12 becomes table12."""
    match = re.fullmatch(r"(figure|table|)(\d+)(.*)", name)
    return f"{match[1] or 'table'}{int(match[2]):02d}{match[3]}" if match else name


def refuse_exhibit(name: str, there: Iterable[str]) -> NoReturn:
    """Raise the error about an exhibit that does not exist, with similar names first.

    Args:
        name: The name that was given.
        there: The names that there are.

    Raises:
        SettingError: Always.
    """
    there = list(there)
    asked = [f"figure{name}", name] if re.fullmatch(r"\d+\D.*", name) else [name]
    near = list(dict.fromkeys(closest for one in asked for closest in find_closest(normalize_name(one), there, 3)))
    meant = f"did you mean {' or '.join(near[:3])}? " if near else ""
    raise SettingError(f"EXHIBIT={format_value(name)}: {meant}Choose one of {', '.join(there)}")


def list_studies(exhibits: Mapping[str, Exhibit]) -> list[str]:
    """Return the names of the studies that fill exhibits, each once."""
    return list(dict.fromkeys(spec["study"] for spec in exhibits.values()))


def select_lines(lines: Iterable[Line], select: Mapping[str, Any]) -> list[Line]:
    """Return the lines with these values in these columns; a list of values allows each of them."""
    for name, value in select.items():
        values = value if isinstance(value, list) else [value]
        lines = [line for line in lines if getattr(line, name) in values]
    return list(lines)


def describe_claims(exhibits: Mapping[str, Exhibit], study: StudyFolder) -> Iterator[str]:
    """Yield a line for each claim: the words, the verdict, and the measured share with its interval."""
    for name, spec in exhibits.items():
        for claim in list_claims(spec, study.lines):
            yield f"{name}: {claim.words} {claim.text}"


@dataclass(frozen=True)
class Claim:
    """A claim of a paper.

    Attributes:
        quantity: Its name in the lines of its study.
        words: The claim.
        line: The share of instances in which it holds; None if the study did not measure it on this model.
        proof: Whether the share is exact, a bound or an estimate.
    """

    quantity: str
    words: str
    line: Line | None
    proof: str

    @property
    def verdict(self) -> str:
        """Whether the claim holds, by the share of instances in which it does."""
        if self.line is None:
            return "Not measured."
        if self.line.value == 1:
            return "Holds."
        return "Does not hold." if self.line.value == 0 else f"Holds for {100 * self.line.value:.1f} %."

    @property
    def text(self) -> str:
        """The verdict, the share with its interval, the number of instances, and the proof."""
        return self.verdict if self.line is None else f"{self.verdict} ({describe_share(self.line)}; {self.proof})"


def list_claims(spec: Exhibit, lines: Iterable[Line]) -> list[Claim]:
    """Return the claims of an exhibit with what a study found."""
    shares = select_lines(lines, {"study": spec["study"], "series": HOLDS})
    made = []
    for quantity, words in spec.get("claims", {}).items():
        fitting = select_lines(shares, {"quantity": quantity})
        proof = spec.get("proof", {}).get(quantity, "counted exactly")
        made.append(Claim(quantity, " ".join(words.split()), fitting[0] if fitting else None, proof))
    return made


def describe_share(line: Line) -> str:
    """Return a share in per cent with its interval over prompts and the number of its instances."""
    between = "" if line.low is None else f" [{100 * line.low:.1f}, {100 * (line.high or 0):.1f}]"
    prompts = f", {line.prompts} prompts" if line.prompts > 1 else ""
    return f"{100 * line.value:.1f} %{between} of {line.n}{prompts}"
