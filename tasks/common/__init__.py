"""What several benchmarks use: rows of data sets, invented text, axes of a grid, samples that are kept."""
