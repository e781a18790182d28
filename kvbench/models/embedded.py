"""The folder of the embedded model, whose weights are part of the project."""

from pathlib import Path

REFERENCE = Path(__file__).resolve().parent / "embedded_v2"
