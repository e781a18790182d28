"""Read the tiers of conf/measured.yaml: the sweeps behind docs/results.md, which `kvbench dev measured` runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from kvbench.config.paths import CONF
from kvbench.validation import SettingError, require_choice

TIERS = CONF / "measured.yaml"
FILES = "FILES/"  # begins the name of a file that a tier makes first


@dataclass(frozen=True)
class Tier:
    """Sweeps that are measured and published together.

    Attributes:
        name: Its key in conf/measured.yaml.
        title: Its title on the page.
        sweeps: Arguments of `kvbench run -m`, one line a sweep.
        common: Arguments that all sweeps share.
        files: Name of a file or folder that a sweep needs -> the `kvbench` command that makes it, without `--out`.
    """

    name: str
    title: str
    sweeps: Sequence[str]
    common: str = ""
    files: Mapping[str, str] = field(default_factory=dict)

    def list_sweeps(self, results: Path) -> list[list[str]]:
        """Return the arguments of each sweep, with results and files in the folder `results`."""

        def place(argument: str) -> str:
            name, _, values = argument.partition("=")
            each = values.split(",")
            if not all(value.startswith(FILES) for value in each):
                return argument
            return f"{name}={','.join(quote(find_place(value, results)) for value in each)}"

        lines = [f"{self.common} {line}".split() for line in self.sweeps]
        return [[*map(place, line), f"results={quote(results)}"] for line in lines]

    def find_files(self, results: Path) -> set[Path]:
        """Return the paths of files that the sweeps give to methods and codecs, made first or not, if they exist."""
        given = (argument.partition("=") for line in self.sweeps for argument in f"{self.common} {line}".split())
        texts = [text for name, _, text in given if name.startswith(("method.", "codec.")) and name.endswith(".path")]
        places = {find_place(file, results) for text in texts for file in text.split(",")}
        return {path for path in places if path.exists()}

    def list_files(self, results: Path) -> dict[Path, list[str]]:
        """Return the path of each missing file, and the arguments of `kvbench` that make it, without `--out`."""
        made = {find_place(FILES + name, results): command.split() for name, command in self.files.items()}
        return {path: command for path, command in made.items() if not path.exists()}


def find_place(text: str, results: Path) -> Path:
    """Return the path that a text names, which is in the folder `results` if the text begins with FILES."""
    return results / "files" / text.removeprefix(FILES) if text.startswith(FILES) else Path(text)


def quote(path: Path) -> str:
    """Return a path as a value on Hydra's command line, which would read spaces, commas and brackets otherwise."""
    text = str(path).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"


def read_tiers(path: Path = TIERS) -> dict[str, Tier]:
    """Return the tiers of a file by name.

    Raises:
        SettingError: The file cannot be read, or a tier has other keys than `Tier`.
    """
    try:
        tiers = yaml.safe_load(path.read_text(encoding="utf-8"))
        return {name: Tier(name, **fields) for name, fields in tiers.items()}
    except (OSError, UnicodeDecodeError, yaml.YAMLError, AttributeError, TypeError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise SettingError(f"--file={path}: cannot be read as tiers ({reason}); see conf/measured.yaml") from None


def choose_tiers(names: Sequence[str], path: Path = TIERS) -> list[Tier]:
    """Return the tiers of these names, each once.

    Raises:
        SettingError: There is no such tier.
    """
    tiers = read_tiers(path)
    for name in names:
        require_choice("tier", name, tiers)
    return [tiers[name] for name in dict.fromkeys(names)]
