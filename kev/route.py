"""``kev route``: what every strategy would do with a question, and why.

Invariants and semantics: nothing runs and nothing is kept: the tokenizer and the table of the semantic hash are read,
no weights. Every strategy is asked as a router that has just started and is idle, so ``round_robin`` is at its first
turn; normalization, tokens, buckets and channels are those of a running router with the same configuration.

Not here: the strategies (``router_svc.strategies``), what the router does under load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from common.config import Config
from common.errors import InvalidRequestError
from common.model_files import max_context, projection_path
from common.request import RequestRules, parse_request
from common.tokenization import Tokenizer
from common.types import Strategy
from kev.live_table import printable
from router_svc.embedding import ProjectionTable
from router_svc.settings import RouterSettings
from router_svc.strategies import RoutingStrategy, build_strategies
from router_svc.tokens import Prepared, prepare, routing_view


@dataclass(frozen=True, slots=True)
class Decision:
    """Of one strategy."""

    strategy: Strategy
    channel_id: int | None
    """None: under this strategy the question would be refused."""
    hash_bucket: int | None
    why: str


@dataclass(frozen=True, slots=True)
class Routes:
    """Of one question."""

    text: str
    category: str
    prepared: Prepared
    configured: Strategy
    decisions: tuple[Decision, ...]


@dataclass(frozen=True, slots=True)
class _Asker:
    """Asks an idle router."""

    tokenizer: Tokenizer
    settings: RouterSettings
    rules: RequestRules
    question: dict[str, str]

    def prepared(self, name: Strategy, strategy: RoutingStrategy) -> tuple[Prepared, str]:
        """The question as the router would prepare it, and the strategy's reason."""
        spec = parse_request([self.question], {"strategy": name}, self.rules)
        (ready,) = prepare(spec, self.tokenizer, strategy, self.settings)
        view = routing_view(spec.questions[0], ready.normalized, ready.prompt)
        return ready, strategy.explain(view, ready.routing_key, self.idle)

    @property
    def idle(self) -> list[int]:
        """The loads of a router that has just started."""
        return [0] * self.settings.channel_pool_size

    def decide(self, name: Strategy, strategy: RoutingStrategy) -> Decision:
        """What one strategy would do."""
        try:
            ready, why = self.prepared(name, strategy)
        except InvalidRequestError as error:
            return Decision(name, None, None, f"refused: {error}")
        pick = strategy.pick(ready.routing_key, self.idle)
        return Decision(name, pick.channel_id, pick.hash_bucket, why)


def find_routes(config: Config, model: Path, question: str, category: str, progress: Callable[[str], None]) -> Routes:
    """Ask every strategy.

    Args:
        config: the deployment.
        model: directory of the model.
        question: as a caller writes it.
        category: of the question; empty for none.
        progress: told in words what takes longer.

    Raises:
        InvalidRequestError: the question would be refused under any strategy.
        ModelError: tokenizer or embeddings cannot be read.
    """
    tokenizer = Tokenizer.from_dir(
        model, prompt_template=config.core.prompt_template, knowledge_prefix=config.isolation.knowledge_prefix
    )
    limit = max_context(model, config)
    settings = replace(RouterSettings.from_config(config), max_context=limit)
    rules = RequestRules.for_model(
        config, vocab_size=tokenizer.vocab_size, uses_chat_template=tokenizer.uses_chat_template, max_context=limit
    )
    strategies = build_strategies(settings, tokenizer.encode_plain, _table(config, model, progress))
    asker = _Asker(tokenizer, settings, rules, {"text": question, "category": category})
    name, plainest = Strategy.CONSISTENT_HASH, strategies[Strategy.CONSISTENT_HASH]
    prepared, _ = asker.prepared(name, plainest)  # what is refused here is refused by every strategy
    return Routes(
        text=question,
        category=category,
        prepared=prepared,
        configured=config.router.strategy,
        decisions=tuple(asker.decide(name, strategy) for name, strategy in strategies.items()),
    )


def _table(config: Config, model: Path, progress: Callable[[str], None]) -> ProjectionTable:
    """The one that a node has left beside the model, else one made of the embeddings alone."""
    router, kept = config.router, projection_path(model, config)
    if kept.exists():
        return ProjectionTable.load(kept, router.semantic_planes)
    progress("reading the model's embeddings for semantic_hash")
    from inference_svc.projection import projection_of_directory

    return ProjectionTable(
        projection_of_directory(model, router.semantic_planes, router.hash_key), router.semantic_planes
    )


def as_data(routes: Routes) -> dict[str, object]:
    """The routes as JSON data."""
    ready = routes.prepared
    return {
        "question": routes.text,
        "category": routes.category,
        "normalized_text": ready.normalized.text,
        "removed": list(ready.normalized.removed),
        "num_saved_tokens": ready.num_saved_tokens,
        "num_prompt_tokens": len(ready.prompt.ids),
        "num_budget_tokens": ready.num_tokens,
        "configured_strategy": routes.configured.value,
        "strategies": [
            {
                "strategy": decision.strategy.value,
                "channel_id": decision.channel_id,
                "hash_bucket": decision.hash_bucket,
                "why": decision.why,
            }
            for decision in routes.decisions
        ],
    }


def lines(routes: Routes) -> Iterator[str]:
    """The routes for people."""
    ready = routes.prepared
    removed = ready.normalized.removed
    yield f"normalized  {printable(ready.normalized.text)}"
    if removed:
        pieces = ", ".join(repr(piece) for piece in removed)
        yield f"removed     {printable(pieces)} ({ready.num_saved_tokens} tokens saved)"
    yield f"tokens      {len(ready.prompt.ids)} of the prompt, {ready.num_tokens} with the answer's max_tokens"
    for decision in routes.decisions:
        mark = " (configured)" if decision.strategy is routes.configured else ""
        yield ""
        if decision.channel_id is None:
            yield f"{decision.strategy}{mark}"
        else:
            yield f"{decision.strategy}{mark}: channel {decision.channel_id}, bucket {decision.hash_bucket}"
        yield f"    {printable(decision.why)}"
