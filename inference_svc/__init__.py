"""The inference room: schedules questions onto slots, runs the isolated forward and reports outcomes.

Symbols used in shape comments: ``R`` rows of a forward (fixed per kind), ``T`` rows in use, ``H`` query heads,
``Hkv`` key/value heads, ``D`` head size, ``P`` positions of the KV arena, ``L`` positions one row can see, ``V``
vocabulary.

Invariants: ``sequence``, ``plan``, ``slots``, ``prefixes``, ``scheduler``, ``answer``, ``stopping`` and ``memory_plan``
are plain Python without torch; torch lives in ``attention``, ``kv_cache``, ``model_loader``, ``model_runner``,
``sampler``, ``probe``, ``projection`` and ``gguf_import``.
"""
