"""Time, memory and throughput."""
