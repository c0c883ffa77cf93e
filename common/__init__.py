"""What two or more rooms need: domain types, errors, ports, tokenization, configuration, transports.

Not here: anything only one room uses, and nothing called ``utils``.
"""
