"""What records say: means with intervals, pairs, curves, the closing table."""
