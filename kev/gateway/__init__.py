"""HTTP over anything that has the methods of ``kev.AsyncEngine``.

Not here: answering questions; the gateway parses, hands on, encodes and watches connections.
"""
