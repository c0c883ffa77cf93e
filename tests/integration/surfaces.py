"""The doors into Kev, opened side by side, and what each of them says to the same input."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import httpx

from common.errors import InvalidRequestError, KevError
from common.types import EngineStats
from kev.engine import AsyncEngine, Engine
from kev.gateway.app import create_app
from kev.testing import scripted_engine
from tests.integration.scripted_runners import GuidedRunner

HTTP_FORMS: dict[str, dict[str, object]] = {
    "HTTP": {},
    "HTTP stream": {"stream": True},
    "HTTP background": {"background": True},
}
_MAX_HTTP_VIOLATIONS = 100


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a door said: an error's reason, its sentence and its (field, sentence) pairs."""

    reason: str
    message: str
    violations: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, error: KevError) -> Verdict:
        """The verdict that an exception carries."""
        violations = error.violations if isinstance(error, InvalidRequestError) else ()
        return cls(error.reason, str(error), tuple((v.field, v.message) for v in violations)[:_MAX_HTTP_VIOLATIONS])

    @property
    def fields(self) -> list[str]:
        """Paths of the wrong fields."""
        return [field for field, _ in self.violations]


class Doors:
    """A blocking engine, an asynchronous one over a guided runner, and HTTP over the latter."""

    def __init__(self, blocking: Engine, engine: AsyncEngine, client: httpx.AsyncClient, runner: GuidedRunner) -> None:
        self.blocking = blocking
        self.engine = engine
        self.client = client
        self.runner = runner

    async def verdicts(self, queries: object, options: Mapping[str, object]) -> dict[str, Verdict]:
        """What each door says to a request that must be refused."""
        found = {
            "Engine": await asyncio.to_thread(blocking_verdict, self.blocking, queries, options),
            "AsyncEngine": await async_verdict(self.engine, queries, options),
        }
        for form, extra in HTTP_FORMS.items():
            found[form] = await self.http_verdict({**options, "queries": queries, **extra})
        return found

    async def http_verdict(self, body: Mapping[str, object]) -> Verdict:
        """What ``POST /v1/query`` says."""
        return http_verdict(await self.client.post("/v1/query", content=json.dumps(body)))

    async def answers(self, queries: object, **options: object) -> dict[str, list[str]]:
        """The texts that each door answers with."""
        response = await self.client.post("/v1/query", content=json.dumps({"queries": queries, **options}))
        assert response.status_code == 200, response.text
        streamed = await self.client.post(
            "/v1/query", content=json.dumps({"queries": queries, "stream": True, **options})
        )
        blocking = await asyncio.to_thread(lambda: self.blocking.ask(queries, **options))
        return {
            "Engine": [result.text for result in blocking],
            "AsyncEngine": [result.text for result in await self.engine.ask(queries, **options)],
            "HTTP": [result["text"] for result in strict_json(response.content)["results"]],
            "HTTP stream": texts_of_stream(streamed.content),
        }

    async def stats(self) -> tuple[EngineStats, EngineStats]:
        """Counters of both engines."""
        return await self.engine.stats(), await asyncio.to_thread(self.blocking.stats)


@asynccontextmanager
async def open_doors(config: Mapping[str, object] | None = None) -> AsyncIterator[Doors]:
    """All doors over one echoing script."""
    runner = GuidedRunner(lambda prompt: prompt)
    async with scripted_engine(str, config, runner=runner) as engine:
        transport = httpx.ASGITransport(create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://kev", timeout=20) as client:
            with Engine(scripted_engine(lambda prompt: prompt, config)) as blocking:
                yield Doors(blocking, engine, client, runner)


async def async_verdict(engine: AsyncEngine, queries: Any, options: Mapping[str, Any]) -> Verdict:
    """What ``AsyncEngine.submit`` says."""
    try:
        request_id = await engine.submit(queries, **options)
    except KevError as error:
        return Verdict.of(error)
    raise AssertionError(f"AsyncEngine accepted it as {request_id}")


def blocking_verdict(engine: Engine, queries: Any, options: Mapping[str, Any]) -> Verdict:
    """What ``Engine.submit`` says."""
    try:
        request_id = engine.submit(queries, **options)
    except KevError as error:
        return Verdict.of(error)
    raise AssertionError(f"Engine accepted it as {request_id}")


def http_verdict(response: httpx.Response) -> Verdict:
    """The error in an answer, after checking that it is one, that the caller is at fault, and that it is valid JSON."""
    assert 400 <= response.status_code < 500, f"{response.status_code}: {response.text[:300]}"
    assert response.headers["content-type"] == "application/json"
    error = strict_json(response.content)["error"]
    violations = tuple((told["field"], told["message"]) for told in error.get("violations", []))
    return Verdict(error["reason"], error["message"], violations)


def strict_json(content: bytes) -> Any:
    """JSON as strict parsers read it: ASCII, no NaN."""
    return json.loads(content.decode("ascii"), parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def texts_of_stream(content: bytes) -> list[str]:
    """The joined deltas of every question in an event stream, after checking that they are the final texts."""
    joined: dict[int, str] = {}
    finals: dict[int, str] = {}
    for line in content.decode("ascii").split("\n"):
        if line.startswith("data: "):
            event = strict_json(line.removeprefix("data: ").encode())
            if event["type"] == "delta":
                joined[event["question_index"]] = joined.get(event["question_index"], "") + event["text"]
            elif event["type"] == "result":
                finals[event["question_index"]] = event["result"]["text"]
    assert joined == {index: text for index, text in finals.items() if text}
    return [finals[index] for index in sorted(finals)]


class Exchange:
    """One HTTP exchange with an application, driven by hand, that can be dropped at any moment."""

    def __init__(self, app: Any, method: str, path: str, body: object = None) -> None:
        self.status: int | None = None
        self.content = b""
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        content = b"" if body is None else json.dumps(body).encode()
        self._incoming.put_nowait({"type": "http.request", "body": content, "more_body": False})
        scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": []}
        self.task = asyncio.ensure_future(app(scope, self._incoming.get, self._send))

    async def _send(self, message: Any) -> None:
        self.status = message.get("status", self.status)
        self.content += message.get("body", b"")

    def drop(self) -> None:
        """The client leaves."""
        self._incoming.put_nowait({"type": "http.disconnect"})
