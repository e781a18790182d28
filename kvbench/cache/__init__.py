"""The rows of one layer: stored, attended to, given up, and counted."""
