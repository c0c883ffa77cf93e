"""Four independent questions, each in its own channel.

Run it with: python examples/minimal.py
"""

from __future__ import annotations

from pathlib import Path

import kev

QUESTIONS = [
    "What is the capital of France?",
    "Explain what a cache is.",
    "解释一下注意力机制",
    "注意力机制有什么缺点",
]

with kev.Engine.from_config(Path(__file__).with_name("kev.yaml")) as engine:
    for result in engine.ask(QUESTIONS, isolation="strict"):
        print(f"channel={result.channel_id} | time={result.elapsed_ms}ms | tokens={result.tokens}")
        print(result.error.message if result.error else result.text.strip())
