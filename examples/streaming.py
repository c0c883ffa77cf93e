"""Text as the channels produce it, without mixing them up.

Run it with: python examples/streaming.py
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import kev

QUESTIONS = ["Count from one to ten.", "Name the days of the week.", "List three rivers."]


async def main() -> None:
    """Ask, and print every piece of text behind the number of its question."""
    config = Path(__file__).with_name("kev.yaml")
    engine = await asyncio.to_thread(kev.AsyncEngine.from_config, config)
    async with engine:
        request_id = await engine.submit(QUESTIONS, max_tokens=24)
        texts = [""] * len(QUESTIONS)
        async for event in engine.stream(request_id):
            match event.type:
                case "delta" if event.question_index is not None:
                    texts[event.question_index] += event.text
                    print(f"[{event.question_index}] {event.text!r}")
                case "result" if event.result is not None:
                    # The pieces of a channel, joined, are its final text.
                    assert texts[event.result.question_index] == event.result.text
                    print(f"[{event.result.question_index}] ended: {event.result.finish_reason}")
                case "done":
                    print(f"request {event.state}")


if __name__ == "__main__":
    asyncio.run(main())
