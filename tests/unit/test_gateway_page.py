"""The page at ``/``."""

from __future__ import annotations

import re
from dataclasses import fields

from common.types import BucketHeat, ChannelSnapshot, HotSpot, NodeStats, RouterStats
from kev.gateway.app import Gateway, create_app
from kev.gateway.page import page
from kev.gateway.testing import ScriptedBackend
from tests.unit.http_probe import SETTINGS, client_of


async def test_the_page_is_there_before_the_model_and_reaches_nothing_else() -> None:
    """An operator would see nothing while the model loads, or a page that calls out of a closed network."""
    async with client_of(Gateway(SETTINGS).build_app()) as client:
        answer = await client.get("/")
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert not re.search(r"https?:|//[a-z]|<link|<img|src=|@import|url\(", answer.text)
        assert (await client.get("/v1/stats")).status_code == 503
    async with client_of(create_app(ScriptedBackend(), SETTINGS)) as client:
        assert (await client.get("/", headers={"if-none-match": "x"})).status_code == 200
        assert (await client.post("/")).status_code == 405


def test_the_page_reads_what_the_server_tells() -> None:
    """A field that was renamed would be shown as undefined."""
    text = bytes(page().body).decode()
    told = {"channel": ChannelSnapshot, "router": RouterStats, "node": NodeStats, "heat": BucketHeat, "spot": HotSpot}
    for name, kind in told.items():
        read = set(re.findall(rf"\b{name}\.([a-z_]+)", text))
        assert read and read <= {field.name for field in fields(kind)}, (name, read)
    assert set(re.findall(r'read\("([a-z0-9/]+)"\)', text)) == {"v1/channels", "v1/stats"}


def test_the_page_sets_text_only_as_text() -> None:
    """What a node or an error says would become markup."""
    text = bytes(page().body).decode()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
