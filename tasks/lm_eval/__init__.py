"""Tasks of the installed lm-eval."""
