"""Compose settings from conf/, build the objects that they name, and hash the sources of a run."""
