"""Reproduce tables of papers: their published values, the runs that answer them, and both side by side."""
