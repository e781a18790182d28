"""Write what studies found as the papers' exhibits: <results>/papers/<model>-<prompts>-<hash>/<paper>_<exhibit>.*

Every exhibit becomes Markdown (what is shown, the claims with verdicts, the readings), CSV and LaTeX. A table is built
like all other tables of papers (kvbench.papers.build). The CSV of a figure has the lines of the study that it shows,
and its LaTeX includes the PDF, which kvbench.report.study_charts draws. This module does not import torch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kvbench.analysis.text_table import escape_latex
from kvbench.papers.build import build_table
from kvbench.papers.exhibits import Claim, Exhibit, list_claims, select_lines
from kvbench.papers.paper_table import PaperTable, escape_all_markdown, escape_outside_code
from kvbench.papers.table_spec import read_printed
from kvbench.store.study_lines import Line, StudyFolder, find_studies, format_lines
from kvbench.validation import SettingError, escape, name_file_in_errors


@dataclass(frozen=True)
class ExhibitPage:
    """An exhibit, filled by the studies of one folder.

    Attributes:
        name: <paper>_<exhibit>.
        spec: Its specification.
        study: The folder of studies.
        results: The folder of results.
    """

    name: str
    spec: Exhibit
    study: StudyFolder
    results: Path

    @cached_property
    def lines(self) -> list[Line]:
        """The lines that the exhibit shows."""
        return select_lines(self.study.by_study[self.spec["study"]], self.spec.get("lines", {}))

    @cached_property
    def claims(self) -> list[Claim]:
        """The claims with what the study found."""
        return list_claims(self.spec, self.study.by_study[self.spec["study"]])

    @property
    def is_filled(self) -> bool:
        """Whether the study has been computed on this model and these prompts."""
        return bool(self.table.is_measured if self.table else self.lines)

    @property
    def folder(self) -> Path:
        """Where its files are written."""
        return self.results / "papers" / self.study.name

    @cached_property
    def table(self) -> PaperTable | None:
        """The table; None if the exhibit is a figure.

        Raises:
            SettingError: The specification of a cell fits several lines.
        """
        if "rows" not in self.spec:
            return None
        notes = [self.about, *self.describe_claims(), *self.notes]
        lines = self.study.by_study[self.spec["study"]]
        try:
            return build_table({**self.spec, "notes": notes}, (), read_printed(self.results, self.spec), study=lines)
        except ValueError as error:
            raise SettingError(f"{self.name}: {error}") from None

    @property
    def source(self) -> str:
        """The model, the prompts and the machine of the study."""
        device = self.study.about.get("device", {})
        machine = {"": "", "cpu": ", on a CPU"}.get(device.get("type", ""), f", on {device.get('gpu')}")
        return f"{self.study.source}{machine}."

    @property
    def about(self) -> str:
        """`source`, whether only the first prompt is shown, and the layer and head if all lines are of one head."""
        single = self.study.about["prompts"]["count"] > 1 and {line.prompts for line in self.lines} == {1}
        heads = {(line.layer, line.head) for line in self.lines if line.head is not None}
        places = [f"Layer {layer}, head {head}." for layer, head in heads] if len(heads) == 1 else []
        return " ".join([self.source, *["Shown is the first prompt."] * single, *places])

    @property
    def notes(self) -> list[str]:
        """The readings, and which numbers are exact, bounds or estimates."""
        claims, names = self.spec.get("claims", {}), self.spec.get("names", {})
        proofs = {name: proof for name, proof in self.spec.get("proof", {}).items() if name not in claims}
        said = [f"{names.get(name, name.replace('_', ' '))}: {proof}." for name, proof in proofs.items()]
        return [" ".join(note.split()) for note in [*self.spec.get("notes", ()), *said]]

    def describe_claims(self) -> Iterator[str]:
        """Yield a sentence for each claim, with its verdict."""
        for claim in self.claims:
            yield f"Claim: {claim.words} {claim.text}"

    def to_markdown(self, pictured: bool) -> str:
        """Return the Markdown page, with a picture if there is one."""
        if self.table:
            return self.table.to_markdown()
        title = escape_all_markdown(self.spec["title"])
        texts = [self.about, *self.describe_claims(), *self.notes]
        picture = [f"![{title}]({self.name}.svg)", ""] if pictured else []
        return "\n".join([f"# {title}", "", *picture, *(f"* {escape_outside_code(text)}" for text in texts)]) + "\n"

    def to_csv(self) -> str:
        """Return the table as CSV, or the lines of the figure and its claims."""
        if self.table:
            return self.table.to_csv()
        return format_lines([*self.lines, *(claim.line for claim in self.claims if claim.line)])

    def to_latex(self) -> str:
        """Return a tabular, or a figure environment that includes the PDF."""
        if self.table:
            return self.table.to_latex()
        caption = " ".join([f"{self.spec['title']}.", self.about, *self.describe_claims(), *self.notes])
        return "\n".join(
            [
                f"% {escape(self.spec['title'])}",
                r"\begin{figure}",
                r"\centering",
                rf"\includegraphics[width=\linewidth]{{{self.name}.pdf}}",
                rf"\caption{{{escape_latex(caption)}}}",
                rf"\label{{fig:{self.name}}}",
                "\\end{figure}\n",
            ]
        )

    def write(self, pictured: bool) -> list[Path]:
        """Write the files, except for the picture, and return their paths."""
        self.folder.mkdir(parents=True, exist_ok=True)
        forms: dict[str, Callable[[], str]] = {
            "md": lambda: self.to_markdown(pictured),
            "csv": self.to_csv,
            "tex": self.to_latex,
        }
        paths = [self.folder / f"{self.name}.{suffix}" for suffix in forms]
        for path, form in zip(paths, forms.values(), strict=True):
            with name_file_in_errors(path):
                path.write_text(form(), encoding="utf-8")
        return paths


def fill_exhibits(
    results: Path, wanted: Mapping[str, Exhibit], folders: Sequence[StudyFolder] | None = None
) -> dict[str, list[ExhibitPage]]:
    """Return the pages of each exhibit, one for each folder of studies that fills it.

    Args:
        results: The folder of results.
        wanted: <paper>_<exhibit> -> its specification.
        folders: Its folders of studies, if they have been read.

    Raises:
        SettingError: A file of studies cannot be read.
    """
    folders = find_studies(results) if folders is None else folders
    pages = {name: [ExhibitPage(name, spec, study, results) for study in folders] for name, spec in wanted.items()}
    return {name: [page for page in exhibit_pages if page.is_filled] for name, exhibit_pages in pages.items()}
