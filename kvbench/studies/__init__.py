"""Studies: what a full cache holds, and what the papers claim about it. One quantity a file."""
