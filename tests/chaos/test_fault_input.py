"""Bad input at every door of a running cluster; the last row of the fault matrix."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import httpx
import pytest

from common.errors import InvariantError, KevError
from common.types import FinishReason
from kev.testing import scripted_engine
from tests.chaos.cluster import Cluster, ClusterSettings
from tests.chaos.trial import texts
from tests.integration.surfaces import Verdict, async_verdict, http_verdict

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]

BAD: list[tuple[object, dict[str, object]]] = [
    ([], {}),
    (["x"] * 257, {}),
    (["x" * 300_000], {}),
    (["good", {"text": "b", "temperature": float("nan")}], {}),
    (["good"], {"top_p": float("inf")}),
    (["half \ud83d"], {}),
    (["nul\0here"], {}),
    ("bare", {}),
    ([None], {}),
    (["good"], {"max_tokens": 0}),
    (["good"], {"max_tokens": 4_097}),
    (["good"], {"max_parallel": 9}),
    (["good"], {"request_id": "a/b"}),
    (["good"], {"isolation": "none"}),
]


async def test_bad_input_over_the_network(tmp_path: Path) -> None:
    """The network blames another field than the engine, says INTERNAL, or falls over."""
    settings = ClusterSettings(num_nodes=1, gateway=True)
    sections = settings.config()
    embedded = {"kev": {name: sections[name] for name in ("router", "core", "aggregator")}}
    async with (
        Cluster(tmp_path, settings) as cluster,
        cluster.client() as client,
        httpx.AsyncClient(base_url=cluster.gateway_url, timeout=20) as http,
        scripted_engine(str, embedded) as engine,
    ):
        for queries, options in BAD:
            verdicts = {
                "Engine": await async_verdict(engine, queries, options),
                "gRPC": await async_verdict(client, queries, options),  # type: ignore[arg-type]
                "HTTP": http_verdict(
                    await http.post("/v1/query", content=json.dumps({**options, "queries": queries}).encode())
                ),
            }
            assert len(set(verdicts.values())) == 1, verdicts
            assert isinstance(verdicts["Engine"], Verdict)
            assert verdicts["Engine"].reason != InvariantError.reason
        garbage = await http.post("/v1/query", content=b"\xff\xfe{")
        assert 400 <= garbage.status_code < 500
        assert await _codes_of_garbage(cluster.address("router-0")) <= {grpc.StatusCode.INVALID_ARGUMENT}
        with pytest.raises(KevError):
            await client.wait("never-submitted", 1)
        assert (await client.ask(texts("")))[0].finish_reason is FinishReason.STOP


async def _codes_of_garbage(address: str) -> set[grpc.StatusCode]:
    """What gRPC says to bytes that are no message, and to a message whose text is not UTF-8."""
    codes = set()
    async with grpc.aio.insecure_channel(address) as channel:
        submit = channel.unary_unary("/kev.v1.RouterService/SubmitQuery", bytes, bytes)
        for request in (b"\xff\xff\xff", b"\x0a\x02\xc3\x28"):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await submit(request, timeout=10.0)
            codes.add(refused.value.code())
    return codes
