"""RULER: needles, variables, word counts and questions in texts of an exact length."""
