"""Simulated traffic over the real router: stories of skewed, bursty, long and hostile questions, and what helps.

Invariants and semantics: no model, no wall clock, no network; the same story with the same seed gives the same numbers
on every machine.

Not here: what a deployment of some size needs (``bench.capacity``), real processes under load (``bench.cluster``).
"""
