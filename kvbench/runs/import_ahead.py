"""Importing this module imports what workers need, and reads the sources that the hash of every run covers."""

import kvbench.runs.workers  # noqa: F401 - forked processes find it imported
from kvbench.config.provenance import source_hash

source_hash(["kvbench.runs.runner"])
