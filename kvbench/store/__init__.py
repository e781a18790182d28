"""Write, read, export and audit runs and their records on disk."""
