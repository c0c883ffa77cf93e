"""Writes down stream entries as this version makes them, for the versions to come: once per release.

    python -m tests.contract.recorded.record

An existing record is never written again: it says what a deployed version has put into Redis.
"""

from __future__ import annotations

import base64
import json
import tomllib
from dataclasses import asdict
from pathlib import Path

from google.protobuf.message import Message

from common.codec import EnvelopeValue, open_envelope, seal
from common.types import (
    AggregateMode,
    ChannelDelta,
    ChannelResult,
    ChannelStarted,
    ErrorInfo,
    FinishReason,
    IsolationLevel,
    Prompt,
    QuestionRecord,
    QuestionSpec,
    Receipt,
    RequestRecord,
    RequestSpec,
    Route,
    SamplingParams,
    Strategy,
    TokenLogprob,
    Truncate,
    Verdict,
    WorkItem,
)
from kev.v1 import types_pb2 as pb

FOLDER = Path(__file__).parent
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SAMPLING = SamplingParams(
    max_tokens=64,
    temperature=0.7,
    top_p=0.9,
    top_k=40,
    min_p=0.05,
    seed=2**63 - 1,
    stop=("\nQuestion:", "。"),
    stop_token_ids=(2, 107),
    ignore_eos=True,
    min_tokens=1,
    logprobs=0,
    repetition_penalty=1.1,
    presence_penalty=-0.5,
    frequency_penalty=0.25,
)
ASKED = {"request_id": "5f0c8c8e-2f3d-4f0e-9d5e-0a8c5a0e7b11", "question_index": 3, "channel_id": 7}
RECEIPT = Receipt(level=IsolationLevel.SHARED, verdict=Verdict.BITWISE, mask_digest="ab" * 32, fingerprint="model/1")
VALUES: dict[str, EnvelopeValue] = {
    "work item": WorkItem(
        **ASKED,
        prompt=Prompt(ids=(1, 105, 2364, 262143), boundaries=(1, 3), num_truncated=2),
        num_shared=3,
        sampling=SAMPLING,
        isolation=IsolationLevel.SHARED,
        max_parallel=8,
        time_budget_ms=9_876,
        priority=-5,
        tenant="acme",
        fingerprint="model/1",
    ),
    "started": ChannelStarted(**ASKED, slot=2, attempt=2, node_id="node-1"),
    "delta": ChannelDelta(**ASKED, attempt=2, seq=11, text="隔离 🫨", num_tokens=12),
    "answer": ChannelResult(
        **ASKED,
        finish_reason=FinishReason.STOP,
        slot=2,
        text="隔离通道，互不干扰。",
        token_ids=(5, 6, 7),
        num_prompt_tokens=4,
        num_truncated=2,
        num_cached_tokens=3,
        queued_ms=1.25,
        first_token_ms=17.5,
        started_at=1_795_000_000.25,
        finished_at=1_795_000_001.5,
        attempt=2,
        node_id="node-1",
        receipt=RECEIPT,
        logprobs=(TokenLogprob(token_id=5, logprob=-0.125, top=((5, -0.125), (9, -2.5))),),
    ),
    "error": ChannelResult(
        **ASKED,
        finish_reason=FinishReason.ERROR,
        finished_at=1_795_000_001.5,
        error=ErrorInfo(reason="NON_FINITE_LOGITS", message="the model gave NaN"),
    ),
    "request record": RequestRecord(
        request_id=ASKED["request_id"],
        content_digest="cd" * 32,
        mode=AggregateMode.PRIORITY,
        isolation=IsolationLevel.SHARED,
        questions=(
            QuestionRecord(
                question_index=0,
                route=Route(
                    channel_id=7,
                    strategy=Strategy.SEMANTIC_HASH,
                    hash_bucket=2**64 - 1,
                    diverted_from=0,
                    normalized_text="a question",
                    removed=("please",),
                ),
                timeout_ms=10_000,
                priority=4,
                num_prompt_tokens=9,
                num_truncated=1,
            ),
        ),
        tenant="acme",
    ),
    "request spec": RequestSpec(
        request_id=ASKED["request_id"],
        questions=(
            QuestionSpec(
                text="a question?",
                sampling=SAMPLING,
                timeout_ms=10_000,
                priority=4,
                category="test",
                truncate=Truncate.LEFT,
            ),
        ),
        isolation=IsolationLevel.LOOSE,
        strategy=Strategy.CONSISTENT_HASH,
        mode=AggregateMode.SEQ_APPEND,
        max_parallel=4,
        system_prompt="be brief",
        tenant="acme",
        content_digest="cd" * 32,
    ),
}
LATER_FIELD = b"\x82\x7d\x05later"
"""Field 2000, five bytes: what a later version may add anywhere."""
REQUIRED = {
    "kev.v1.WorkItem": {"request_id", "prompt", "sampling", "isolation", "max_parallel", "time_budget"},
    "kev.v1.ChannelStarted": {"request_id", "attempt"},
    "kev.v1.ChannelDelta": {"request_id", "attempt", "text"},
    "kev.v1.ChannelResult": {"request_id", "finish_reason", "text"},
    "kev.v1.RequestRecord": {"request_id", "mode", "isolation", "questions"},
    "kev.v1.QuestionRecord": {"route", "timeout_duration"},
    "kev.v1.Route": {"strategy"},
    "kev.v1.RequestSpec": {"request_id", "questions", "isolation", "strategy", "mode"},
    "kev.v1.QuestionSpec": {"text", "sampling", "timeout_duration"},
    "kev.v1.Prompt": {"ids"},
}
"""All that an entry of an earlier version may be reduced to; other messages may be empty."""
MESSAGES: dict[str, type[Message]] = {
    "kev.v1.WorkItem": pb.WorkItem,
    "kev.v1.ChannelEvent": pb.ChannelEvent,
    "kev.v1.RequestRecord": pb.RequestRecord,
    "kev.v1.RequestSpec": pb.RequestSpec,
}


def later(message: Message) -> None:
    """Give a message and all below it a field that this version does not know."""
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.full_name.startswith("kev."):
            for child in value if field.is_repeated else [value]:
                later(child)
    message.MergeFromString(LATER_FIELD)


def earlier(message: Message) -> None:
    """Take everything away that an earlier version need not have had."""
    kept = REQUIRED.get(message.DESCRIPTOR.full_name)
    for field, value in message.ListFields():
        if kept is not None and field.name not in kept:
            message.ClearField(field.name)
        elif field.message_type is not None and field.message_type.full_name in REQUIRED:
            for child in value if field.is_repeated else [value]:
                earlier(child)


def variants(value: EnvelopeValue) -> dict[str, bytes]:
    """The entry as it is, as a later version and as an earlier version would write it."""
    current = pb.Envelope.FromString(seal(value, TRACE))
    newer = MESSAGES[current.type].FromString(current.payload)
    older = MESSAGES[current.type].FromString(current.payload)
    later(newer)
    earlier(older)
    later_envelope = pb.Envelope(version=1, type=current.type, payload=newer.SerializeToString(), trace=TRACE)
    later_envelope.MergeFromString(LATER_FIELD)
    earlier_envelope = pb.Envelope(version=1, type=current.type, payload=older.SerializeToString())
    return {
        "current": current.SerializeToString(),
        "later": later_envelope.SerializeToString(),
        "earlier": earlier_envelope.SerializeToString(),
    }


def refused() -> dict[str, bytes]:
    """Entries that nobody may guess at."""
    current = pb.Envelope.FromString(seal(VALUES["answer"]))
    newer_enum = pb.ChannelEvent.FromString(current.payload)
    newer_enum.result.finish_reason = 99  # type: ignore[assignment]
    return {
        "envelope.version": pb.Envelope(version=2, type=current.type, payload=current.payload).SerializeToString(),
        "envelope.type": pb.Envelope(version=1, type="kev.v2.WorkItem", payload=b"").SerializeToString(),
        "event.result.finish_reason": pb.Envelope(
            version=1, type=current.type, payload=newer_enum.SerializeToString()
        ).SerializeToString(),
        "event": pb.Envelope(version=1, type=current.type, payload=LATER_FIELD).SerializeToString(),
    }


def plain(value: EnvelopeValue) -> object:
    """A value as JSON gives it back."""
    return json.loads(json.dumps({"value": type(value).__name__} | asdict(value)))


def main() -> None:
    """Write the record of this version."""
    project = tomllib.loads((FOLDER.parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    path = FOLDER / f"{project['version']}.json"
    entries = [
        {
            "name": name,
            "variant": variant,
            "envelope": base64.b64encode(data).decode(),
            "value": plain(open_envelope(data)[0]),
        }
        for name, value in VALUES.items()
        for variant, data in variants(value).items()
    ]
    bad = [{"field": field, "envelope": base64.b64encode(data).decode()} for field, data in refused().items()]
    with path.open("x", encoding="utf-8") as file:
        json.dump(
            {"version": project["version"], "entries": entries, "refused": bad}, file, indent=1, ensure_ascii=False
        )
        file.write("\n")


if __name__ == "__main__":
    main()
