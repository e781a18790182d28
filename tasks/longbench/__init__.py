"""LongBench: long documents with a question, a summary or code."""
