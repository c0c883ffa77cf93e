"""Random faults, one after the other, under a load that never stops; judged round by round, so that memory stays small.

Invariants and semantics: a round has a workload and a history of its own. The next one begins before the former is
settled, so the load never pauses; a round is judged when the one after it has ended, so that a commit that comes a
whole round too late is still seen, and then forgotten. At most three rounds are remembered at a time. The same seed
makes the same choices; what they hit depends on the machine.

Not here: what is right (``checker``), settings from outside (``test_random_faults``).
"""

from __future__ import annotations

import asyncio
import random
import resource
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from tests.chaos import sabotage
from tests.chaos.checker import Report, check, merged
from tests.chaos.cluster import Cluster
from tests.chaos.history import Broken, History
from tests.chaos.processes import ServiceProcess
from tests.chaos.proxy import Blackhole, CutAfterBytes, CutBeforeReply, Delay, Fault, FaultProxy, Refuse, Throttle
from tests.chaos.workload import Workload, WorkloadSettings

_PATIENCE_S = 60.0
_POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignSettings:
    """How long, and what of."""

    seed: int
    load: WorkloadSettings
    max_s: float
    """Nothing new is submitted or broken after so long."""
    num_questions: int = 0
    """Ends earlier when so many questions have ended ..."""
    num_faults: int = 0
    """... and so many faults have hit; with neither, the time alone counts."""
    round_s: float = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a campaign."""

    report: Report
    faults: dict[str, int]
    """How many of each kind have hit."""
    num_rounds: int
    spent_s: float
    peak_resident_bytes: int
    """Of this process, all rounds and proxies included."""
    bad_history: History | None
    """The records of the first round in which a guarantee was broken."""

    def as_json(self) -> dict[str, object]:
        """The figures; violations as their number."""
        report = self.report
        return {
            "questions": report.num_questions,
            "answers": report.num_answers,
            "placeholders": report.num_placeholders,
            "unknown": report.num_unknown,
            "events": report.num_events,
            "commits": report.num_commits,
            "faults": report.num_faults,
            "violations": {kind.value: number for kind, number in report.counts().items()},
            "reasons": report.reasons,
            "faults_by_kind": dict(sorted(self.faults.items())),
            "rounds": self.num_rounds,
            "seconds": round(self.spent_s, 1),
            "peak_resident_bytes": self.peak_resident_bytes,
        }


class Saboteur:
    """Breaks one thing at a time and mends it.

    Attributes:
        num_hits: faults that have hit, by name; one counts once, however much it hit.
    """

    def __init__(self, cluster: Cluster, numbers: random.Random) -> None:
        self.num_hits: Counter[str] = Counter()
        self._cluster = cluster
        self._numbers = numbers
        self._stopping = False
        self._kinds: list[Callable[[], Awaitable[tuple[str, int]]]] = [
            self._kill,
            self._stop,
            self._terminate,
            self._break_link,
            self._break_link,
            self._break_door,
            self._cut_everything,
            self._restart_redis,
            self._destroy_groups,
            self._leave,
        ]

    def stop(self) -> None:
        """Break nothing new."""
        self._stopping = True

    async def run(self) -> None:
        """Until stopped; everything works again at the end."""
        while not self._stopping:
            name, fired = await self._numbers.choice(self._kinds)()
            self.num_hits[name] += fired > 0
            await asyncio.sleep(self._numbers.uniform(0.0, 0.3))

    def _victim(self) -> ServiceProcess:
        return self._numbers.choice(self._cluster.services)

    async def _kill(self) -> tuple[str, int]:
        victim = self._victim()
        return f"kill {victim.name}", await sabotage.crash(victim)

    async def _stop(self) -> tuple[str, int]:
        victim = self._victim()
        victim.pause()
        await asyncio.sleep(self._numbers.uniform(0.1, 5.0))
        victim.resume()
        return f"stop {victim.name}", 1

    async def _terminate(self) -> tuple[str, int]:
        victim = self._victim()
        return f"replace {victim.name}", await sabotage.replace(victim)

    async def _break_link(self) -> tuple[str, int]:
        name = self._numbers.choice(sorted(self._cluster.links))
        return await self._break(f"link of {name}", self._cluster.links[name])

    async def _break_door(self) -> tuple[str, int]:
        name = self._numbers.choice(sorted(self._cluster.doors))
        return await self._break(f"door of {name}", self._cluster.doors[name])

    async def _break(self, name: str, proxy: FaultProxy) -> tuple[str, int]:
        numbers = self._numbers
        faults: list[Fault] = [
            CutBeforeReply(times=3),
            CutAfterBytes(numbers.randint(0, 2_000), times=3),
            Delay(numbers.uniform(0.001, 0.1)),
            Throttle(numbers.uniform(5_000, 100_000)),
            Blackhole(),
            Refuse(),
        ]
        async with proxy.broken_by(numbers.choice(faults)) as fault:
            if isinstance(fault, Refuse):
                await proxy.cut_all()
            await asyncio.sleep(numbers.uniform(0.1, 1.5))
        return f"{type(fault).__name__} {name}", fault.num_fired

    async def _cut_everything(self) -> tuple[str, int]:
        proxies = [*self._cluster.links.values(), *self._cluster.doors.values()]
        return "cut everything", sum([await proxy.cut_all() for proxy in proxies])

    async def _restart_redis(self) -> tuple[str, int]:
        return "restart redis", await sabotage.kill_redis(self._cluster, self._numbers.uniform(0.0, 1.0))

    async def _destroy_groups(self) -> tuple[str, int]:
        return "destroy groups", await sabotage.destroy_groups(self._cluster)

    async def _leave(self) -> tuple[str, int]:
        return "client leaves", await sabotage.leave_a_stream(self._cluster)


@dataclass(slots=True, eq=False)
class _Round:
    workload: Workload
    task: asyncio.Task[History]

    async def settle(self) -> None:
        """Submit nothing more; return when everything was read to its end."""
        self.workload.stop()
        await self.task


class Campaign:
    """One run against one cluster."""

    def __init__(self, cluster: Cluster, settings: CampaignSettings, tell: Callable[[str], None]) -> None:
        """A run whose progress is told once a round, in a line."""
        self._cluster = cluster
        self._settings = settings
        self._tell = tell
        self._saboteur = Saboteur(cluster, random.Random(settings.seed))
        self._reports: list[Report] = []
        self._bad_history: History | None = None
        self._num_rounds = 0
        self._num_ended = 0
        """Questions of settled rounds."""

    async def run(self) -> Outcome:
        """Run to the end."""
        self._begun_s = time.monotonic()
        async with self._cluster.client() as client, asyncio.TaskGroup() as group:

            def begin() -> _Round:
                self._num_rounds += 1
                load = replace(self._settings.load, seed=self._settings.seed + self._num_rounds)
                workload = Workload(client, load)
                return _Round(workload, group.create_task(workload.run()))

            breaking = group.create_task(self._saboteur.run())
            former: _Round | None = None
            current: _Round | None = begin()
            while current is not None:
                is_last = await self._await_round(current, breaking)
                following = None if is_last else begin()
                if is_last:
                    self._saboteur.stop()
                    await breaking
                await current.settle()
                self._num_ended += current.workload.num_ended
                await self._judge(former)
                former, current = current, following
                self._tell(self._progress())
            await self._judge(former)
        return self._outcome()

    async def _await_round(self, current: _Round, breaking: asyncio.Task[None]) -> bool:
        """Return when the round is to end; True: it was the last one."""
        settings = self._settings
        until_s = time.monotonic() + settings.round_s
        while time.monotonic() < until_s and not breaking.done():
            num_questions = self._num_ended + current.workload.num_ended
            num_faults = self._saboteur.num_hits.total()
            has_goal = settings.num_questions or settings.num_faults
            if has_goal and num_questions >= settings.num_questions and num_faults >= settings.num_faults:
                return True
            if time.monotonic() - self._begun_s > settings.max_s:
                return True
            await asyncio.sleep(_POLL_S)
        return breaking.done()

    async def _judge(self, ended: _Round | None) -> None:
        if ended is None:
            return
        history = ended.workload.history
        await self._cluster.note_attempts(history, history.request_ids())
        report = await asyncio.to_thread(check, history)  # the proxies live on this loop
        self._reports = [merged([*self._reports, report])]
        if not report.clean and self._bad_history is None:
            self._bad_history = history

    def _progress(self) -> str:
        spent_s = time.monotonic() - self._begun_s
        found = sum(len(report.violations) for report in self._reports)
        return (
            f"{spent_s:6.0f} s: {self._num_ended} questions, {self._saboteur.num_hits.total()} faults, "
            f"{found} violations, {_peak_resident_bytes() >> 20} MiB"
        )

    def _outcome(self) -> Outcome:
        faults = dict(self._saboteur.num_hits)
        hits = [Broken(fault=name, num_fired=number) for name, number in faults.items()]
        return Outcome(
            report=merged([*self._reports, check(hits)]),
            faults=faults,
            num_rounds=self._num_rounds,
            spent_s=time.monotonic() - self._begun_s,
            peak_resident_bytes=_peak_resident_bytes(),
            bad_history=self._bad_history,
        )


def _peak_resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
