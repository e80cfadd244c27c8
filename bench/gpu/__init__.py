"""Compares allocators on a real GPU: start with `session.py`; `report.py` writes the page of results."""
