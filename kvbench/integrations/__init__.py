"""Other programs: lm-eval, Weights & Biases, math-verify."""
