"""Measures Lamassu beside other encrypting file systems: what `scripts/bench` and `make bench-smoke` run."""
