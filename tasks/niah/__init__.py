"""Needle in a haystack: one sentence hidden in a long text, over a grid of lengths and depths."""
