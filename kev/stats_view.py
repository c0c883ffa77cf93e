"""How ``kev stats`` looks: a line of totals, the channels, the hot buckets, and what to do about hot spots.

Invariants and semantics: a picture in, something printable out. Everything fits 80 columns. Of many channels the
fullest are shown, in the order of their ids.

Not here: asking for pictures (``kev.stats``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from common.errors import KevError
from common.types import BreakerState, ChannelSnapshot, Diversion, RouterStats
from kev.gateway.encoding import encode
from kev.live_table import printable
from kev.stats import Picture
from router_svc.hot_spots import in_words

_MAX_CHANNELS = 32
_MAX_BUCKETS = 8
_BAR = 9
_STYLES = {BreakerState.OPEN: "red", BreakerState.HALF_OPEN: "yellow"}


@dataclass(slots=True)
class Screen:
    """Shows pictures: in place on a terminal, else one after the other."""

    console: Console
    is_live: bool
    as_json: bool
    _live: Live | None = field(init=False, default=None)

    def __enter__(self) -> Self:
        """Begin to draw."""
        if self.is_live and self.console.is_terminal and not self.as_json:
            self._live = Live(console=self.console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the last picture on the screen."""
        if self._live is not None:
            self._live.stop()

    def show(self, seen: Picture | KevError) -> None:
        """A picture, or why there is none at the moment."""
        if self.as_json:
            print(as_json(seen), file=self.console.file, flush=True)
            return
        drawn = Text(printable(str(seen)), style="red") if isinstance(seen, KevError) else render(seen)
        if self._live is not None:
            self._live.update(drawn, refresh=True)
        else:
            self.console.print(drawn)


def as_json(seen: Picture | KevError) -> str:
    """One JSON object: ``channels`` and ``stats`` as ``/v1/channels`` and ``/v1/stats`` answer, or ``error``."""
    told = {"error": seen.info} if isinstance(seen, KevError) else {"channels": seen.channels, "stats": seen.stats}
    return encode(told).decode("ascii")


def render(picture: Picture) -> RenderableType:
    """The whole picture."""
    router = picture.stats.router
    parts: list[RenderableType] = [_totals(picture), _channels(picture.channels)]
    if router.bucket_heat:
        parts.append(_heat(router))
    parts += [Text(printable(f"hot spot: {in_words(spot)}; {spot.remedy}"), style="red") for spot in router.hot_spots]
    return Group(*parts)


def _totals(picture: Picture) -> Text:
    router, node = picture.stats.router, picture.stats.node
    pace = "-" if router.releases_per_s is None else f"{router.releases_per_s:,.1f}/s"
    kv = f"{node.kv_bytes_used / node.kv_bytes_total:.0%}" if node.kv_bytes_total else "-"
    told = (
        f"{router.num_questions} questions in {router.num_requests} requests, {router.num_rejected} refused",
        f"{router.num_overflow} wait for a channel",
        f"pace {pace}",
        f"slots {node.num_running}/{node.max_slots}",
        f"KV {kv}",
    )
    return Text(printable(" | ".join(told)))


def _channels(channels: list[ChannelSnapshot]) -> Table:
    table = Table(title=f"{len(channels)} channels", title_justify="left", expand=False)
    table.add_column("channel", justify="right", min_width=5)
    table.add_column("questions", no_wrap=True)
    for name in ("oldest", "lately", "diverted"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("breaker", min_width=23)
    fullest = sorted(channels, key=lambda channel: (-channel.num_queued, -channel.num_recent, channel.channel_id))
    shown = sorted(fullest[:_MAX_CHANNELS], key=lambda channel: channel.channel_id)
    most = max((channel.num_queued for channel in channels), default=0)
    for channel in shown:
        table.add_row(
            str(channel.channel_id),
            _bar(channel.num_queued, most),
            f"{channel.oldest_ms / 1000:.1f}s" if channel.num_queued else "",
            str(channel.num_recent),
            str(channel.num_diverted),
            Text(_breaker(channel), style=_STYLES.get(channel.breaker, "")),
        )
    if len(channels) > len(shown):
        table.caption = f"and {len(channels) - len(shown)} more, none of them fuller"
    return table


def _breaker(channel: ChannelSnapshot) -> str:
    state = channel.breaker.value.replace("_", "-")
    if channel.breaker_why is None:
        return state
    kind = f" ({channel.main_failure})" if channel.breaker_why is Diversion.FAILURES and channel.main_failure else ""
    return printable(f"{state}: {channel.breaker_why.value.replace('_', ' ')}{kind}")


def _heat(router: RouterStats) -> Table:
    window = (
        f"{router.num_recent} questions in the last {router.window_ms / 1000:g} s, {router.num_recent_tokens} tokens"
    )
    table = Table(title=f"Hash buckets, {window}", title_justify="left", expand=False)
    table.add_column("strategy")
    table.add_column("bucket", justify="right")
    table.add_column("of questions", no_wrap=True)
    table.add_column("of tokens", no_wrap=True)
    for heat in router.bucket_heat[:_MAX_BUCKETS]:
        shares = heat.num_questions / max(router.num_recent, 1), heat.num_tokens / max(router.num_recent_tokens, 1)
        bars = (_bar(share, 1.0, label=f"{share:.0%}") for share in shares)
        table.add_row(heat.strategy.value, str(heat.hash_bucket), *bars)
    return table


def _bar(value: float, most: float, label: str | None = None) -> str:
    filled = round(_BAR * value / most) if most else 0
    return f"{'█' * filled}{'·' * (_BAR - filled)} {label or value}"
