"""Folders of studies with made-up lines, as kvbench papers study writes them."""

from collections.abc import Iterable
from pathlib import Path

import yaml

from kvbench.store.study_lines import Line, format_lines


def write_study(results: Path, lines: Iterable[Line], model: str = "reference", name: str = "0123456789abcdef") -> Path:
    """Write a folder of studies of two prompts, and return it."""
    folder = results / "studies" / name
    folder.mkdir(parents=True)
    about = {"model": {"name": model}, "prompts": {"name": "ruler", "count": 2, "longest": 1500}}
    (folder / "study.yaml").write_text(yaml.safe_dump(about))
    listed = list(lines)
    for study in {line.study for line in listed}:
        (folder / f"{study}.csv").write_text(format_lines(line for line in listed if line.study == study))
    return folder


def list_heads(study: str = "key_geometry", layers: int = 3, heads: int = 4) -> list[Line]:
    """Return a number for each layer and head, half of them below 0, and a claim about them."""
    place = [(layer, head) for layer in range(layers) for head in range(heads)]
    own = [
        Line(study, "cosine_of_means", (head - 1.5) / 10, layer=layer, head=head, prompts=2) for layer, head in place
    ]
    claim = Line(study, "opposite", 0.5, series="holds", n=2 * len(place), low=0.25, high=0.75, prompts=2)
    return [*own, claim]
