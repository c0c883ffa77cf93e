"""Kev beside every installed peer: the works of the goal table, and how cost grows.

    python -m bench.compare --setup          # peers' environments, once
    python -m bench.compare [--works w1 w2] [--sweeps channels] [--json out.json] [--plots plots/] [--markdown out.md]

One noun per file: ``works`` (what is asked), ``catalogue`` (who answers), ``wire`` and ``peer_process`` (how they are
spoken to), ``rounds`` (who runs when), ``readings`` and ``goals`` (what the numbers say), ``tables`` and ``plots``.
"""
