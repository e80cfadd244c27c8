"""Benches that need more than the simulated GPU."""
