"""Models of transformers, their checkpoints, and the one that the project has the weights of."""
