"""Costs of the C table of functions, on a simulated GPU: what the bridge calls, without torch and without a GPU."""
