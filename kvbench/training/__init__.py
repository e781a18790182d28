"""Train the embedded model, and compute the files that some methods need for a model."""
