"""Runs and their records on the disk: written, read, exported, audited."""
