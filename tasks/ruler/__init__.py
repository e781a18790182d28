"""RULER: needles, variables, words and questions in texts of an exact length."""
