"""The folders of the embedded models, whose weights are part of the project."""

from pathlib import Path

VERSIONS = Path(__file__).resolve().parent
REFERENCE = VERSIONS / "embedded_v2"  # the folder of model=reference
FOLDERS = {
    "reference": REFERENCE,
    "reference_v1": VERSIONS / "embedded_v1",
    "reference_v2": VERSIONS / "embedded_v2",
}
EMBEDDED_MODELS = {name: folder for name, folder in FOLDERS.items() if folder.is_dir()}  # a wheel has version 2 alone
