"""Load models of transformers, and connect them to kvbench's cache."""
