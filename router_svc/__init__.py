"""Decides what is asked and where: normalization, budgets, channels and overflow.

Invariants and semantics: a question's wording, token ids and channel are decided here once and recorded; nothing
here needs torch.

Not here: running questions (``inference_svc``), collecting their outcomes (``aggregator_svc``).
"""
