"""The wire messages of Kev: modules generated from ``protos/kev/v1``; this package itself loads none of them.

Not here: hand-written code. The generated files are never edited; ``make proto`` writes them anew.
"""
