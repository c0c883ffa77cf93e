"""The aggregator: gathers the outcomes of a request's questions and gives them back in order.

Not here: routing, inference, and how a result travels (``common.ports``).
"""
