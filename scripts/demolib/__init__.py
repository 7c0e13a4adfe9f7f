"""Helpers of `scripts/demo`: Python's standard library only."""
