"""How well ``semantic_hash`` brings paraphrases together: ``python -m bench.semantic``.

Invariants and semantics: two sets of questions made for this purpose (``bench/routing_sets``), Chinese and English,
each in paragraphs that ask one thing in four ways. Recall is the share of pairs from one paragraph that fall into one
bucket; unrelated is that share of pairs from different paragraphs, which evenly used buckets make one in as many as
there are; the largest bucket and the entropy tell the spread. Every number is the mean over several hash keys. The
words that the topic leaves out were chosen on the even paragraphs; the odd ones are told apart as held out. The method
was chosen by figures of both.

Compared are Kev's two projections (the model's table, and the lexical one that needs no model) and, for each, the signs
of the mean vector (Charikar 2002), which is what semantic hashing usually means.

Not here: what a decision costs (``bench.routing``), how load spreads over channels (``bench.traffic``).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean

import numpy as np
from safetensors import safe_open

from common.tokenization import Tokenizer
from inference_svc.projection import projection_of_directory
from kev.models import resolve_model
from router_svc.embedding import HashedProjection, ProjectionTable
from router_svc.strategies.semantic_hash import SemanticBuckets

SETS = Path(__file__).with_name("routing_sets")
LANGUAGES = ("zh", "en")

Paragraphs = Sequence[Sequence[str]]
BucketOf = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one set under one projection."""

    recall: float
    unrelated: float
    largest_share: float
    """Of all questions of the set, in the fullest bucket."""
    entropy: float
    """Of the buckets, 1 when all are used evenly."""


def read_set(language: str) -> list[list[str]]:
    """The paragraphs of a set."""
    blocks = (SETS / f"{language}.txt").read_text(encoding="utf-8").split("\n\n")
    return [block.strip().split("\n") for block in blocks if not block.startswith("#")]


def figures(paragraphs: Paragraphs, bucket_of: BucketOf, num_buckets: int) -> Figures:
    """What a projection makes of a set."""
    found = [[bucket_of(text) for text in paragraph] for paragraph in paragraphs]
    inside = [one == other for paragraph in found for one, other in combinations(paragraph, 2)]
    across = [
        one == other
        for first, second in combinations(found, 2)
        for one in first
        for other in second
    ]  # fmt: skip
    counts = Counter(bucket for paragraph in found for bucket in paragraph)
    total = counts.total()
    entropy = -sum(n / total * math.log2(n / total) for n in counts.values())
    return Figures(fmean(inside), fmean(across), max(counts.values()) / total, entropy / math.log2(num_buckets))


def mean_figures(all_figures: Sequence[Figures]) -> Figures:
    """Over several keys."""
    columns = zip(*((f.recall, f.unrelated, f.largest_share, f.entropy) for f in all_figures), strict=True)
    return Figures(*(fmean(column) for column in columns))


def signs_of_mean(rows: np.ndarray, encode: Callable[[str], Sequence[int]]) -> BucketOf:
    """The usual semantic hash: bit p is the side of plane p on which the mean of the rows ``[V, planes]`` lies."""
    weights = 1 << np.arange(rows.shape[1])
    return lambda text: int((rows[list(encode(text))].sum(axis=0) > 0) @ weights)


def projections(path: Path, tokenizer: Tokenizer, num_planes: int, key: str) -> Iterator[tuple[str, BucketOf]]:
    """Every way from a text to a bucket, by name, under one key."""
    encode = tokenizer.encode_plain
    chance = np.random.default_rng(list(key.encode()))
    embedding = _embedding(path)
    planes = chance.choice([-1.0, 1.0], (embedding.shape[1], num_planes)).astype(np.float32)
    yield "signs of a mean, lexical", signs_of_mean(chance.standard_normal((len(embedding), num_planes)), encode)
    yield "signs of a mean, embedding", signs_of_mean((embedding - embedding.mean(axis=0)) @ planes, encode)
    lexical = HashedProjection(num_planes, key)
    yield "Kev, lexical", SemanticBuckets(projection=lexical, encode=encode, hash_key=key).bucket
    table = ProjectionTable(projection_of_directory(path, num_planes, key), num_planes)
    yield "Kev, the model's table", SemanticBuckets(projection=table, encode=encode, hash_key=key).bucket


def _embedding(path: Path) -> np.ndarray:
    with safe_open(path / "model.safetensors", framework="pt") as opened:
        embedding: np.ndarray = opened.get_tensor("model.embed_tokens.weight").float().numpy()
    return embedding


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print one row per set and projection."""
    parser = argparse.ArgumentParser(prog="python -m bench.semantic", description="How well paraphrases meet.")
    parser.add_argument("--model", default="demo", help="as core.model_path")
    parser.add_argument("--planes", type=int, default=6, help="as router.semantic_planes")
    parser.add_argument("--keys", type=int, default=5, help="hash keys to take the mean over")
    options = parser.parse_args(arguments)
    path = resolve_model(options.model, None, lambda line: print(line, file=sys.stderr)).path
    tokenizer = Tokenizer.from_dir(path, prompt_template="{question}")
    sets = {language: read_set(language) for language in LANGUAGES}
    parts = {"tuned": slice(0, None, 2), "held out": slice(1, None, 2)}
    measured: dict[tuple[str, str, str], list[Figures]] = {}
    for number in range(options.keys):
        for name, bucket_of in projections(path, tokenizer, options.planes, f"key {number}"):
            for language, paragraphs in sets.items():
                for part, chosen in parts.items():
                    found = figures(paragraphs[chosen], bucket_of, 1 << options.planes)
                    measured.setdefault((name, language, part), []).append(found)
    sizes = ", ".join(f"{language} {len(paragraphs)}" for language, paragraphs in sets.items())
    print(f"paragraphs: {sizes}; {1 << options.planes} buckets, mean of {options.keys} keys")
    print("| projection | set | paragraphs | recall | unrelated | ratio | largest bucket | entropy |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for (name, language, part), all_figures in measured.items():
        f = mean_figures(all_figures)
        ratio = f.recall / f.unrelated
        spread = f"{f.largest_share:.1%} | {f.entropy:.2f}"
        print(f"| {name} | {language} | {part} | {f.recall:.1%} | {f.unrelated:.1%} | {ratio:.1f} | {spread} |")


if __name__ == "__main__":
    main()
