"""A ledger that the model adds up line by line."""
