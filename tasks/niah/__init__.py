"""A needle in a haystack, over length and depth."""
