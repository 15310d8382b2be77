"""The pool of training questions, in an order that depends on nothing but the questions."""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shared.data.example import Example, Loaded
from shared.errors import SetupError
from shared.sql.structure import gold_length
from train.audit import drop_flagged, read_audit
from train.config import DataConfig
from train.curriculum import Floats, drawable, quantile_ranks

# Where a run on generated questions keeps them, and those it validates on.
TOY = "toy"
TOY_HELD_OUT = "toy-held-out"


@dataclass(frozen=True)
class Levels:
    """The difficulties of a pool in lower case ("" where none is given), and for each question the index of its own."""

    names: tuple[str, ...]
    codes: NDArray[np.int32]


@dataclass(frozen=True)
class Pool:
    """Questions sorted by (gold length, question id), with their lengths in tokens and their quantile ranks."""

    examples: Sequence[Example]
    lengths: Sequence[int]
    quantiles: Floats

    @cached_property
    def content_hash(self) -> str:
        """sha256 (hex) over ids, databases and gold queries in order: a resumed run must have the same."""
        digest = hashlib.sha256()
        for example in self.examples:
            digest.update(f"{example.question_id}\0{example.db_id}\0{example.gold_sql}\0".encode("utf-8", "replace"))
        return digest.hexdigest()

    @cached_property
    def levels(self) -> Levels:
        """Each question's difficulty, 4 bytes a question."""
        codes: dict[str, int] = {}
        found = (codes.setdefault(example.difficulty.lower(), len(codes)) for example in self.examples)
        array = np.fromiter(found, dtype=np.int32, count=len(self.examples))
        return Levels(tuple(codes), array)

    def factors(self, mix: Mapping[str, float]) -> Floats | None:
        """What `curriculum.mix` multiplies the weight of each question by; None for an empty mix.

        SetupError for a difficulty that no question has.
        """
        if not mix:
            return None
        wanted = {name.lower(): factor for name, factor in mix.items()}
        if missing := sorted(wanted.keys() - set(self.levels.names)):
            known = ", ".join(sorted(set(self.levels.names) - {""})) or "none: its questions carry no difficulty"
            raise SetupError(f"curriculum.mix: no question is '{missing[0]}'; the pool has {known}")
        return np.array([wanted.get(name, 1.0) for name in self.levels.names], dtype=np.float32)[self.levels.codes]


def build_pool(examples: Sequence[Example]) -> Pool:
    """Rank examples by the length of their gold query. SetupError for an empty pool, or question ids that repeat."""
    if not examples:
        raise SetupError(
            "the training pool is empty: no question is left after data.split, data.difficulties, data.limit "
            "and data.audit"
        )
    repeated, count = Counter(example.question_id for example in examples).most_common(1)[0]
    if count > 1:
        raise SetupError(f"question id {repeated} occurs {count} times in the training data; ids must be unique")
    lengths = [gold_length(example.gold_sql) for example in examples]
    order = sorted(range(len(examples)), key=lambda i: (lengths[i], examples[i].question_id))
    sorted_lengths = [lengths[i] for i in order]
    return Pool([examples[i] for i in order], sorted_lengths, quantile_ranks(sorted_lengths))


def check_draws(pool: Pool, mix: Mapping[str, float], n: int) -> Floats | None:
    """The factors of `mix`, after a check that the pool can fill a step of `n` questions. SetupError if it cannot."""
    factors = pool.factors(mix)
    if (left := drawable(pool.quantiles, factors)) < n:
        size = len(pool.examples)
        of = "" if left == size else f", of which curriculum.mix leaves {left}"
        raise SetupError(f"the pool has {size} questions{of}, a step draws {n}: lower rollout.questions or add data")
    return factors


def select(examples: Sequence[Example], config: DataConfig) -> list[Example]:
    """Keep the wanted difficulties (case ignored), then the first `limit`; questions without gold SQL are left out.

    SetupError when a wanted difficulty does not occur, naming those that do.
    """
    kept = [example for example in examples if example.gold_sql.strip()]
    if config.difficulties:
        present = {example.difficulty.lower() for example in kept}
        wanted = {difficulty.lower() for difficulty in config.difficulties}
        if missing := sorted(wanted - present):
            known = ", ".join(sorted(present - {""})) or "none: its questions carry no difficulty"
            raise SetupError(f"data.difficulties: no question is '{missing[0]}'; the data has {known}")
        kept = [example for example in kept if example.difficulty.lower() in wanted]
    return kept[: config.limit] if config.limit else kept


def load_pool(config: DataConfig, output: Path, seed: int, report: Callable[[str], None] = lambda line: None) -> Pool:
    """Load, select and rank the training questions that `config` describes; toy databases are made under `output`.

    `report` gets a line with what was read and what was left out, by reason.
    """
    audit = None if config.audit is None else read_audit(config.audit)
    loaded = _load(config, output, seed)
    examples = select(loaded.examples, config)
    line = f"training pool: {loaded.summary()}"
    if len(examples) < len(loaded.examples):
        line += f"; {len(examples):,} left after data.difficulties, data.limit and questions without gold SQL"
    report(line)
    if audit is not None:
        examples = drop_flagged(examples, loaded, audit, config, report)
    return build_pool(examples)


def _load(config: DataConfig, output: Path, seed: int) -> Loaded:
    # Imported where used: each benchmark brings its own dependencies.
    if config.benchmark == "toy":
        from shared.data.toy import toy_examples

        return Loaded(toy_examples("train", config.toy_databases, config.toy_questions, seed, output / TOY))
    if config.benchmark == "questions":
        from shared.data.bird import read_questions

        assert config.questions is not None
        assert config.databases is not None
        return read_questions(config.questions, config.databases)
    from shared.data.sqale import read_sqale

    assert config.queries is not None
    assert config.schemas is not None
    return read_sqale(
        config.queries,
        config.schemas,
        split=config.split,
        phrasing=config.phrasing,
        difficulties=config.difficulties,
        limit=config.limit or None,
    )
