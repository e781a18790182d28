"""Where the weights of the embedded model lie."""

from pathlib import Path

VERSIONS = Path(__file__).resolve().parent
REFERENCE = VERSIONS / "embedded_v2"  # what model=reference is
EMBEDDED_MODELS = {
    "reference": REFERENCE,
    "reference_v1": VERSIONS / "embedded_v1",
    "reference_v2": VERSIONS / "embedded_v2",
}
