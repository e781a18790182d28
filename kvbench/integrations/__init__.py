"""Connections to other programs: lm-eval, Weights & Biases and math-verify."""
