"""What a routing decision costs: ``python -m bench.routing``.

Invariants and semantics: the real strategies, pool, breaker, overflow queue and heat counters, without model, transport
and event loop. Every question is routed as the router does it: its key is made, it is placed or waits, it is counted,
and later it is released and what waits is placed. Tokenization is left out: the token ids of words are made beforehand
and only looked up. Questions are skewed (a few texts are asked again and again), so that the breaker diverts and the
overflow queue is used. Times are CPU times of this process; each strategy is measured several times in turn and the
median is told.

Not here: how well a strategy spreads load (``bench.traffic``).
"""

from __future__ import annotations

import argparse
import logging
import random
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from common.clock import SystemClock
from common.types import Strategy
from router_svc.breakers import BreakerRules
from router_svc.channels import Burden, ChannelPool, Placement
from router_svc.heat import Heat
from router_svc.settings import RouterSettings
from router_svc.strategies import Choice, RoutingStrategy, RoutingView, build_strategies

_WORDS = "how do i get my money back order address change ship when model cache channel attention forward".split()
_NUM_TEXTS = 400
_QUESTION_BYTES = 128


@dataclass(frozen=True, slots=True)
class Costs:
    """Of one question, CPU microseconds."""

    key_us: float
    place_us: float
    count_us: float
    release_us: float

    @property
    def decision_us(self) -> float:
        """From the text to the channel."""
        return self.key_us + self.place_us + self.count_us


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every strategy and print a table."""
    parser = argparse.ArgumentParser(prog="python -m bench.routing", description="What a routing decision costs.")
    parser.add_argument("--questions", type=int, default=20_000, help="questions per measurement")
    parser.add_argument("--rounds", type=int, default=5, help="measurements per strategy")
    parser.add_argument("--channels", type=int, default=16, help="channels of the pool")
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)  # these questions are a hot spot, and are meant to be
    settings = replace(RouterSettings(), channel_pool_size=options.channels)
    views = _views(options.questions, random.Random(7))
    ids = {word: hash_of(word) for word in _WORDS}
    strategies = build_strategies(settings, lambda text: [ids[word] for word in text.split() if word in ids], None)
    measured: dict[Strategy, list[Costs]] = {name: [] for name in strategies}
    for _ in range(options.rounds):
        for name, strategy in strategies.items():
            measured[name].append(_measure(settings, name, strategy, views))
    print(f"{options.questions} questions, {options.channels} channels, median of {options.rounds} rounds, CPU time")
    print(f"{'strategy':16} {'key':>8} {'place':>8} {'count':>8} {'release':>8} {'decision':>10} {'decisions/s':>12}")
    for name, costs in measured.items():
        print(_row(name, costs))


def hash_of(word: str) -> int:
    """A token id that is the same in every run."""
    return sum(map(ord, word)) * 31 % 30_000


def _views(number: int, chance: random.Random) -> list[RoutingView]:
    texts = [" ".join(chance.choices(_WORDS, k=chance.randint(4, 24))) for _ in range(_NUM_TEXTS)]
    weights = [1 / (rank + 1) for rank in range(_NUM_TEXTS)]
    return [RoutingView(text=text, num_tokens=len(text)) for text in chance.choices(texts, weights, k=number)]


def _measure(
    settings: RouterSettings, name: Strategy, strategy: RoutingStrategy, views: Sequence[RoutingView]
) -> Costs:
    burden = Burden(num_bytes=_QUESTION_BYTES, expires_at_s=None)
    pool: ChannelPool[int] = ChannelPool(
        settings.channel_pool_size,
        channel_queue_size=settings.channel_queue_size,
        overflow_queue_size=settings.overflow_queue_size,
        breaker_queue_length=settings.breaker_queue_length,
        channel_queue_bytes=settings.channel_queue_bytes,
        overflow_queue_bytes=settings.overflow_queue_bytes,
        breaker=BreakerRules(max_age_s=60.0, failure_rate=0.5),
        burden_of=lambda _: burden,
    )
    clock = SystemClock()
    heat = Heat(settings, pool.recent, clock)

    started = time.process_time()
    choices = [Choice(strategy, strategy.key(view)) for view in views]
    key_s = time.process_time() - started

    outstanding: deque[int] = deque()
    placements: list[Placement] = []
    place_s = release_s = 0.0
    most = settings.channel_pool_size * settings.channel_queue_size * 9 // 8
    # In runs of the pool's size, so that the two reads of the clock weigh little.
    for first in range(0, len(choices), most):
        started = time.process_time()
        for question in range(first, min(first + most, len(choices))):
            choose = choices[question]
            placement = pool.place(question, choose, now_s=clock.monotonic())
            if placement is None:
                pool.enqueue(question, choose)
                placement = pool.preview(choose)
            else:
                outstanding.append(question)
            placements.append(placement)
        place_s += time.process_time() - started
        started = time.process_time()
        while outstanding:
            pool.release(outstanding.popleft(), clock.monotonic())
            outstanding.extend(question for question, _ in pool.drain())
        release_s += time.process_time() - started

    started = time.process_time()
    for placement in placements:
        heat.note(name, (placement,))
    count_s = time.process_time() - started
    per_us = 1e6 / len(views)
    return Costs(key_s * per_us, place_s * per_us, count_s * per_us, release_s * per_us)


def _row(name: Strategy, costs: Sequence[Costs]) -> str:
    parts = [
        statistics.median(getattr(cost, part) for cost in costs)
        for part in ("key_us", "place_us", "count_us", "release_us", "decision_us")
    ]
    all_us = parts[-1] + parts[-2]
    cells = [f"{value:6.2f}us" for value in parts]
    return f"{name:16} {' '.join(cells[:4])} {cells[4]:>10} {1e6 / all_us:12,.0f}"


if __name__ == "__main__":
    main()
