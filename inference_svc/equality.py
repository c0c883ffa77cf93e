"""Do several engine cores give the same bits?

Invariants and semantics: an answer must not depend on the core that gave it. Before any of them serves, all cores
answer the same question, alone, and tokens and logits are compared with the first one's. Cores on GPUs of different
kinds usually differ.

Not here: whether a core keeps a question's bits in company (``probe``).
"""

from __future__ import annotations

from collections.abc import Sequence

from inference_svc.probe import Bench, ProbeQuestion, Recording, probe_prompt, run_questions

_NUM_TOKENS = 9


def differing(benches: Sequence[Bench]) -> list[int]:
    """Indexes of the cores that answer a question with other bits than the first one."""
    first, *others = [_answer(bench) for bench in benches]
    return [index for index, other in enumerate(others, start=1) if not first.same_bits(other)]


def _answer(bench: Bench) -> Recording:
    num_tokens = min(_NUM_TOKENS, bench.max_context // 2)
    ids = probe_prompt(bench.vocab_size, "core", min(bench.shapes.segment_tokens + 3, bench.max_context - num_tokens))
    [made] = run_questions(bench, [ProbeQuestion(ids=ids, num_tokens=num_tokens)])
    return Recording(made.token_ids, [row.cpu() for row in made.logits])
