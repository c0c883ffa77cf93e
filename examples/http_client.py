"""Kev over HTTP with httpx: plain, streaming and in the background.

Start `kev serve --config examples/kev.yaml`, then run: python examples/http_client.py http://localhost:8765
"""

from __future__ import annotations

import json
import sys

import httpx

QUESTIONS = ["What is the capital of France?", "What is the capital of Japan?"]


def plain(client: httpx.Client) -> None:
    """One answer when every question has its outcome."""
    response = client.post("/v1/query", json={"queries": QUESTIONS, "isolation": "strict"})
    response.raise_for_status()
    for result in response.json()["results"]:
        print(f"channel={result['channel_id']} {result['finish_reason']}: {result['text'].strip()!r}")


def streaming(client: httpx.Client) -> None:
    """Server-sent events; a stream that broke is resumed after the last id that arrived."""
    body = {"queries": QUESTIONS, "stream": True, "max_tokens": 16}
    with client.stream("POST", "/v1/query", json=body) as response:
        if response.is_error:
            response.read()
            response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: "):
                continue
            event = json.loads(line.removeprefix("data: "))
            if event["type"] == "error":
                raise RuntimeError(event["error"]["message"])
            if event["type"] == "delta":
                print(f"[{event['question_index']}] {event['text']!r}")


def background(client: httpx.Client) -> None:
    """Submit now, ask later. With an id of your own a retry can never ask twice."""
    accepted = client.post("/v1/query", json={"queries": QUESTIONS, "background": True})
    accepted.raise_for_status()
    place = accepted.headers["location"]
    while (view := client.get(place, params={"wait_ms": 5000}).json())["state"] == "pending":
        print(f"{len(view['results'])} of {view['num_questions']} done")
    print(f"{place} is {view['state']}")


def refused(client: httpx.Client) -> None:
    """A wrong value is a 400 that names the field; nothing was run."""
    response = client.post("/v1/query", json={"queries": ["good", ""]})
    print(response.status_code, response.json()["error"]["message"])


def main(url: str) -> None:
    """Show all four."""
    with httpx.Client(base_url=url, timeout=120) as client:
        for show in (plain, streaming, background, refused):
            print(f"--- {show.__name__}")
            show(client)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8765")
