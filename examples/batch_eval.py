"""An evaluation set of hundreds of questions through the channels.

Run it with: python examples/batch_eval.py [number of questions]

Every case is an independent question, so the whole list is one request; results are read as they come. The score says
something about the model only: together or one by one, the answers are the same.
"""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path

import yaml

import kev

NUM_CASES = 300


def make_cases(num_cases: int) -> list[tuple[str, str]]:
    """Questions with their right answers; the same ones in every run."""
    numbers = random.Random(0)
    pairs = [(numbers.randint(1, 9), numbers.randint(1, 9)) for _ in range(num_cases)]
    return [(f"What is {a} plus {b}?", str(a + b)) for a, b in pairs]


def is_right(text: str, expected: str) -> bool:
    """Whether the first number of an answer is the expected one."""
    number = re.search(r"\d+", text)
    return number is not None and number[0] == expected


def main(num_cases: int) -> None:
    """Ask all of them and print progress and score."""
    cases = make_cases(num_cases)
    config = yaml.safe_load(Path(__file__).with_name("kev.yaml").read_text(encoding="utf-8"))
    # With policy queue, submit returns at once and the questions wait inside Kev until a channel has room.
    config["kev"]["router"] |= {
        "overflow_policy": "queue",
        "overflow_queue_size": num_cases,
        "max_queries_per_request": num_cases,
        "strategy": "round_robin",
    }
    with kev.Engine.from_config(config) as engine:
        request_id = engine.submit(
            [question for question, _ in cases],
            mode="seq_append",
            max_tokens=8,
            stop=["\n"],
            timeout_ms=3_600_000,  # counts from acceptance, so it must cover the wait for a channel
        )
        num_right = num_done = 0
        for event in engine.stream(request_id):
            if event.result is None:
                continue
            num_done += 1
            num_right += is_right(event.result.text, cases[event.result.question_index][1])
            if num_done % 50 == 0 or num_done == len(cases):
                print(f"{num_done} of {len(cases)} answered, {num_right} right", flush=True)
        channels = {result.channel_id for result in engine.wait(request_id)}
        node = engine.stats().node
    print(f"{len(channels)} channels, {node.num_steps} forwards, {node.num_completion_tokens} tokens")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else NUM_CASES)
