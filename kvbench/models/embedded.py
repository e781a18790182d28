"""The folders of the embedded models, whose weights are part of the project."""

from pathlib import Path

VERSIONS = Path(__file__).resolve().parent
REFERENCE = VERSIONS / "embedded_v2"  # the folder of model=reference
EMBEDDED_MODELS = {
    "reference": REFERENCE,
    "reference_v1": VERSIONS / "embedded_v1",
    "reference_v2": VERSIONS / "embedded_v2",
}
