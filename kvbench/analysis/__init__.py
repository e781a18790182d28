"""Analyse records: means with intervals, paired differences, curves, and the closing table."""
