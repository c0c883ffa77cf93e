"""One thing at a time on work streams, whose calls take several.

Not here: what is checked about several in one call (``tests.contract.transport_suite``).
"""

from __future__ import annotations

from common.ports import Lease, Report, ReportState, WorkStreams
from common.types import ChannelDelta, ChannelResult, ChannelStarted, WorkItem


async def publish(router: WorkStreams, item: WorkItem) -> None:
    """Publish an item.

    Raises:
        QueueFullError: it was refused.
    """
    [refusal] = await router.publish([item])
    if refusal is not None:
        raise refusal


async def emit(node: WorkStreams, lease: Lease, event: ChannelStarted | ChannelDelta) -> bool:
    """Report progress; False: the lease is lost."""
    [state] = await node.report([Report(lease=lease, events=(event,))])
    assert state in (ReportState.HELD, ReportState.STALE)
    return state is ReportState.HELD


async def commit(node: WorkStreams, lease: Lease, result: ChannelResult) -> ReportState:
    """Report an outcome."""
    [state] = await node.report([Report(lease=lease, events=(result,))])
    return state


async def renew(node: WorkStreams, lease: Lease) -> bool:
    """Extend a lease."""
    [is_held] = await node.renew([lease])
    return is_held


async def hand_back(node: WorkStreams, lease: Lease) -> bool:
    """Return an unstarted item."""
    [was_held] = await node.hand_back([lease])
    return was_held
