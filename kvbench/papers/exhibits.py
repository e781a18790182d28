"""Read the papers' exhibits that studies fill, from conf/papers/exhibits/, and say what holds of their claims.

An exhibit is a table or a figure of a paper that shows no scores and no costs. Its specification has these keys:

    title       the paper, the number, and what is shown
    study       the study that computes its numbers (kvbench/studies/)
    lines       the numbers that it shows: values of `quantity` and other columns of lines.csv
    chart       how a figure is drawn (kvbench.report.study_charts)
    claims      quantity -> the paper's claim in words. The number is the share of instances in which it holds
    proof       quantity -> exact, bound or estimate; a claim without an entry is counted exactly
    notes       the reading that is taken where the paper leaves something open, and what the paper got wrong

and, for a table, the keys of kvbench.papers.table_spec.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kvbench.papers.table_spec import PAPERS, read_tables
from kvbench.store.study_lines import HOLDS, Line, StudyFolder
from kvbench.validation import require_choice

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
    files = {path.stem: path for path in sorted(EXHIBITS.glob("*.yaml"))}
    if paper is not None:
        require_choice("PAPER", paper, [*files, "all"])
        files = {paper: files[paper]}
    found = {f"{own}_{key}": spec for own, path in files.items() for key, spec in read_tables(path).items()}
    if name is not None:
        require_choice("EXHIBIT", name, [key.removeprefix(f"{paper}_") for key in found])
        found = {f"{paper}_{name}": found[f"{paper}_{name}"]}
    return found


def list_studies(exhibits: Mapping[str, Exhibit]) -> list[str]:
    """Return the names of the studies that fill exhibits, each once."""
    return list(dict.fromkeys(spec["study"] for spec in exhibits.values()))


def select_lines(lines: Iterable[Line], select: Mapping[str, Any]) -> list[Line]:
    """Return the lines with these values in these columns; a list of values allows each of them."""
    wanted = {name: value if isinstance(value, list) else [value] for name, value in select.items()}
    return [line for line in lines if all(getattr(line, name) in values for name, values in wanted.items())]


def describe_claims(exhibits: Mapping[str, Exhibit], found: StudyFolder) -> Iterator[str]:
    """Yield a line for each claim: the words, the measured share with its interval, and the verdict."""
    for name, spec in exhibits.items():
        for quantity, words in spec.get("claims", {}).items():
            [line] = select_lines(found.lines, {"study": spec["study"], "quantity": quantity, "series": HOLDS})
            how = spec.get("proof", {}).get(quantity, "counted exactly")
            yield f"{name}: {words} {judge_claim(line)} ({describe_share(line)}; {how})"


def judge_claim(line: Line) -> str:
    """Return whether a claim holds, by the share of instances in which it does."""
    if line.value == 1:
        return "Holds."
    return "Does not hold." if line.value == 0 else f"Holds for {100 * line.value:.1f} %."


def describe_share(line: Line) -> str:
    """Return a share in per cent with its interval over prompts and the number of its instances."""
    between = "" if line.low is None else f" [{100 * line.low:.1f}, {100 * (line.high or 0):.1f}]"
    prompts = f", {line.prompts} prompts" if line.prompts > 1 else ""
    return f"{100 * line.value:.1f} %{between} of {line.n}{prompts}"
