"""SCBench: several questions over one shared context."""
