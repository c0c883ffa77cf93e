"""Routing on a real, tiny model and through every door: where a question goes never changes its answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from common.config import load_config
from common.errors import ConfigError, InvalidRequestError, QueueFullError
from common.model_files import projection_path
from common.types import Result, Strategy
from inference_svc import model_loader
from kev import Question, cli
from kev.engine import AsyncEngine, Engine
from kev.gateway.app import create_app
from kev.route import find_routes
from kev.testing import scripted_engine
from router_svc.embedding import ProjectionTable
from tests.integration.grpc_cluster import open_cluster
from tests.integration.tiny_checkpoint import save_checkpoint, settings_for

ROUTER: dict[str, object] = {
    "max_parallel_queries": 4,
    "channel_pool_size": 8,
    "length_tiers": [12, 30],
    "prebucket_classes": [
        {"name": "refund", "num_channels": 2, "categories": ["退款"], "patterns": ["怎么*退款", "money back"]},
        {"name": "code", "num_channels": 3, "patterns": ["^write"]},
    ],
}
CLASSES = {"refund": range(2), "code": range(2, 5), "default": range(5, 8)}
QUESTIONS = [
    Question("怎么才能退款", temperature=0),
    Question("I want my money back, all of it, today please", temperature=0.8, seed=5),
    Question("write quicksort", category="code", temperature=0),
    Question("x", temperature=1.5, seed=9, top_k=20),
    Question("what is a KV cache and why does it hold keys and values of all layers", temperature=0),
    Question("anything", category="退款", temperature=0),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_checkpoint(folder, "llama")
    return folder


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with Engine.from_config(settings_for(model, router=ROUTER)) as engine:
        yield engine


def answers(results: list[Result]) -> list[object]:
    """Everything of an answer that the model and the sampler decide."""
    return [(result.text, result.token_ids, result.logprobs, result.finish_reason) for result in results]


@pytest.mark.parametrize("strategy", list(Strategy))
def test_no_strategy_changes_an_answer(engine: Engine, strategy: Strategy) -> None:
    """A question would be answered differently because of where it was sent (bits, not rounding)."""
    options: dict[str, Any] = {"logprobs": 3, "max_tokens": 6}
    alone = [answers(engine.ask([question], **options))[0] for question in QUESTIONS]
    together = engine.ask(QUESTIONS, strategy=strategy.value, **options)
    assert answers(together) == alone
    assert {result.strategy for result in together} == {strategy}


def test_a_class_has_its_channels(engine: Engine) -> None:
    """Channels of a class would be used by others."""
    results = engine.ask(QUESTIONS, strategy="prebucket", max_tokens=1)
    names = ["refund", "refund", "code", "default", "default", "refund"]
    assert [result.channel_id in CLASSES[name] for result, name in zip(results, names, strict=True)] == [True] * 6
    assert [result.hash_bucket // 64 for result in results] == [list(CLASSES).index(name) for name in names]


@pytest.mark.parametrize("index", range(len(QUESTIONS)))
def test_kev_route_tells_what_the_engine_does(engine: Engine, model: Path, index: int) -> None:
    """An operator would look for the cause of a hot spot in the wrong place."""
    question = QUESTIONS[index]
    config = load_config(settings_for(model, router=ROUTER), {})
    told = find_routes(config, model, question.text, question.category or "", lambda line: None)
    assert [decision.strategy for decision in told.decisions] == list(Strategy)
    for decision in told.decisions:
        (result,) = engine.ask([question], strategy=decision.strategy.value, max_tokens=1)
        if decision.strategy is not Strategy.ROUND_ROBIN:  # whose turn it is depends on who asked before
            assert (decision.channel_id, decision.hash_bucket) == (result.channel_id, result.hash_bucket)


def test_kev_route_loads_no_weights(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking at routing would need the memory of the model."""

    def refuse(*_: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(model_loader, "load_model", refuse)
    (tmp_path / "kev.yaml").write_text(json.dumps(settings_for(model, router=ROUTER)), encoding="utf-8")
    config = ["--config", str(tmp_path / "kev.yaml")]
    assert cli.main(["route", "您好，怎么退款？？？？", *config, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["normalized_text"] == "您好，怎么退款？"
    assert told["removed"] == ["？？？"]
    assert told["num_saved_tokens"] == 9  # a byte each
    assert [each["strategy"] for each in told["strategies"]] == list(Strategy)
    assert told["strategies"][-1]["channel_id"] in CLASSES["refund"]
    assert cli.main(["route", "hi", "--category", "refnud", *config]) == 0
    shown = capsys.readouterr().out
    assert "semantic_hash (configured): channel" in shown
    assert "refused: queries[0].category: no class has the category 'refnud'; did you mean 'refund'?" in shown
    assert cli.main(["route", " ", *config]) == 1
    assert "must not be blank" in capsys.readouterr().err


def test_a_kept_table_is_used(model: Path) -> None:
    """Router, node and `kev route` would each make their own table, a second at every start."""
    config = load_config(settings_for(model, router=ROUTER), {})
    kept = projection_path(model, config)
    np.save(kept, np.full(300, 7, dtype=np.uint32))
    try:
        found = find_routes(config, model, "a b c", "", lambda line: None)
        assert found.decisions[0].hash_bucket == ProjectionTable.load(kept, 6).bucket([1]) == 7
    finally:
        kept.unlink()


@pytest.mark.parametrize("strategy", list(Strategy))
async def test_every_door_takes_strategy_and_category(strategy: Strategy) -> None:
    """A surface would drop the override or the category, and the operator's classes would not hold there."""
    options: dict[str, Any] = {"strategy": strategy.value, "category": "code", "seed": 1}
    queries = ["one", {"text": "two", "category": "退款"}, {"text": "怎么退款", "category": ""}]
    found: dict[str, list[tuple[str, int, int]]] = {}
    async with open_cluster({"kev": {"router": ROUTER, "core": {"max_context": 500}}}) as cluster:
        for door in ("engine", "http", "grpc"):
            if door == "http":
                transport = httpx.ASGITransport(create_app(cluster.engine))
                async with httpx.AsyncClient(transport=transport, base_url="http://kev") as client:
                    response = await client.post("/v1/query", json={"queries": queries, **options})
                assert response.status_code == 200, response.text
                results = response.json()["results"]
                found[door] = [(r["strategy"], r["channel_id"], r["hash_bucket"]) for r in results]
                continue
            async with cluster.client() as grpc_client:
                asker = grpc_client if door == "grpc" else cluster.engine
                asked = await asker.ask(queries, **options)
                found[door] = [(r.strategy.value, r.channel_id, r.hash_bucket) for r in asked]
    assert [name for results in found.values() for name, _, _ in results] == [strategy.value] * 9
    if strategy is not Strategy.ROUND_ROBIN:
        assert found["engine"] == found["http"] == found["grpc"]
    if strategy is Strategy.PREBUCKET:
        channels = [channel for _, channel, _ in found["http"]]
        wanted = [CLASSES["code"], CLASSES["refund"], CLASSES["refund"]]
        assert all(channel in of for channel, of in zip(channels, wanted, strict=True))


async def test_every_door_refuses_an_unknown_category_alike() -> None:
    """A misspelt category would join the default class at one of the doors."""
    options: dict[str, Any] = {"strategy": "prebucket", "category": "refnud"}
    sentences: list[str] = []
    async with open_cluster({"kev": {"router": ROUTER}}) as cluster, cluster.client() as grpc_client:
        for asker in (cluster.engine, grpc_client):
            with pytest.raises(InvalidRequestError) as caught:
                await asker.ask(["one"], **options)
            sentences.append(str(caught.value))
        transport = httpx.ASGITransport(create_app(cluster.engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://kev") as client:
            response = await client.post("/v1/query", json={"queries": ["one"], **options})
        assert response.status_code == 400
    assert sentences[0] == sentences[1]
    assert sentences[0].startswith("category: no class has the category 'refnud'; did you mean 'refund'?")
    assert "refnud" in response.text


async def test_every_door_tells_a_tenant_at_its_limit_when_to_come_back() -> None:
    """A tenant could pass its budget at one of the doors, or its client would not know that trying again helps."""
    limits = {**ROUTER, "max_tenant_questions": 2}
    async with open_cluster({"kev": {"router": limits}}) as cluster, cluster.client() as grpc_client:
        cluster.runner.gate.clear()
        held = await cluster.engine.submit(["one", "two"], tenant="acme")
        sentences: list[str] = []
        for asker in (cluster.engine, grpc_client):
            with pytest.raises(QueueFullError, match="tenant 'acme' has 2 of 2 questions in flight") as caught:
                await asker.submit(["three"], tenant="acme")
            assert caught.value.retry_after_s > 0
            sentences.append(str(caught.value).partition("in about")[0])
        assert sentences[0] == sentences[1]
        transport = httpx.ASGITransport(create_app(cluster.engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://kev", timeout=20) as client:
            refused = await client.post("/v1/query", json={"queries": ["three"], "tenant": "acme"})
            assert (refused.status_code, refused.json()["error"]["reason"]) == (429, "QUEUE_FULL")
            assert int(refused.headers["retry-after"]) >= 1
            never = await client.post("/v1/query", json={"queries": ["a", "b", "c"], "tenant": "acme"})
            assert (never.status_code, "may have 2 in flight" in never.text) == (400, True)
            other = await grpc_client.submit(["four"], tenant="other")
            cluster.runner.gate.set()
            await cluster.engine.wait(held)
            await grpc_client.wait(other)
            again = await client.post("/v1/query", json={"queries": ["three", "five"], "tenant": "acme"})
            assert again.status_code == 200
        assert (await cluster.engine.stats()).router.num_rejected == 3


async def test_the_embedded_form_knows_the_weights_of_tenants(tmp_path: Path) -> None:
    """A tenant that pays for more gets it in a cluster, and not from ``kev serve`` in one process."""
    keys = tmp_path / "keys.yaml"
    keys.write_text("key-of-big: {tenant: big, weight: 3}\nkey-of-small: small\n", encoding="utf-8")
    config = {"kev": {"router": {"max_tenant_questions": 2}, "cluster": {"api_keys_file": str(keys)}}}
    async with scripted_engine(lambda prompt: "ok", config) as engine:
        transport = httpx.ASGITransport(create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://kev", timeout=20) as client:
            for tenant, limit in (("big", 6), ("small", 2), ("stranger", 2)):
                body = {"tenant": tenant, "max_tokens": 4}
                fits = await client.post("/v1/query", json={**body, "queries": ["a"] * limit})
                assert fits.status_code == 200, fits.text
                never = await client.post("/v1/query", json={**body, "queries": ["a"] * (limit + 1)})
                assert (never.status_code, f"may have {limit} in flight" in never.text) == (400, True)


def test_a_wrong_file_of_weights_is_told_before_the_model_is_loaded(tmp_path: Path) -> None:
    """After a minute of loading, or at the first question, a typo ends the process."""
    config = {"kev": {"core": {"model_path": "/nowhere"}, "cluster": {"api_keys_file": str(tmp_path / "none.yaml")}}}
    with pytest.raises(ConfigError, match="api_keys_file: cannot read"):
        AsyncEngine.from_config(config)
