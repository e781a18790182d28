"""The embedded model's recipe, and the files that methods need of a model."""
