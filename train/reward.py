"""What an episode earns.

For a candidate whose query runs (its result complete), against the gold result:

    exact     3.0                        the sets of rows are equal (BIRD's official rule)
    partial   0.9 x F1                   otherwise: F1 over the result rows as multisets (or over their cells)
    join      0.1 x agreement            of tables and joins with the gold query (shared/sql/structure.py)
    majority  0.1                        when its result is the one that most candidates of the group agree on

Nothing submitted, a query that fails, is refused, times out or overruns a limit: 0. So no wrong query
(at most 0.9 + 0.2) ranks above a right one (at least 3.0).

The two bonuses can make an all-wrong group look informative; `gate_bonuses` pays them only in groups
in which some candidate is right, and `group_filter: exact` looks at the exact outcome, not at the sum.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shared.sql.results import multiset_cell_f1, multiset_row_f1, official_equal
from shared.sql.structure import JoinStructure, join_agreement, join_structure, parses
from train.config import RewardConfig

Tier = Literal["equivalent", "executable", "parsable", "invalid"]
TIERS: tuple[Tier, ...] = ("equivalent", "executable", "parsable", "invalid")
Rows = Sequence[tuple[Any, ...]]


@dataclass(frozen=True)
class Gold:
    """A gold query's own result, and its join structure (None where sqlglot cannot read it)."""

    rows: Rows
    joins: JoinStructure | None


@dataclass(frozen=True)
class Candidate:
    """One episode's answer: its SQL (None if it gave none), and its rows (None unless it ran to a complete result)."""

    sql: str | None
    rows: Rows | None


@dataclass(frozen=True)
class Score:
    """One candidate's reward and its parts; `reward` is their sum.

    `f1` is reported for exact candidates too (though only wrong ones are paid for it).
    """

    reward: float
    tier: Tier
    exact: bool
    f1: float
    partial: float
    join: float
    majority: float


def outcome_tier(candidate: Candidate, exact: bool) -> Tier:
    """equivalent: the gold result; executable: another; parsable: a query that does not run; invalid: the rest."""
    if candidate.rows is not None:
        return "equivalent" if exact else "executable"
    return "parsable" if candidate.sql is not None and parses(candidate.sql) else "invalid"


def majority_result(results: Sequence[Rows | None]) -> frozenset[tuple[Any, ...]] | None:
    """The result (as a set of rows) that most candidates of a group agree on; None (failed) entries do not vote.

    It needs at least two votes and more than any other result: no agreement, no majority.
    """
    votes = Counter(frozenset(map(tuple, rows)) for rows in results if rows is not None).most_common(2)
    if not votes or votes[0][1] < 2 or (len(votes) == 2 and votes[1][1] == votes[0][1]):
        return None
    return votes[0][0]


def score_group(candidates: Sequence[Candidate], gold: Gold, config: RewardConfig) -> list[Score]:
    """The scores of the candidates of one question, in their order; see the module's docstring for the formula."""
    f1 = multiset_row_f1 if config.partial_over == "rows" else multiset_cell_f1
    exact = [c.rows is not None and official_equal(c.rows, gold.rows) for c in candidates]
    majority = majority_result([c.rows for c in candidates])
    pay_bonuses = any(exact) or not config.gate_bonuses
    structures: dict[str, JoinStructure | None] = {}
    scores = []
    for candidate, right in zip(candidates, exact, strict=True):
        tier = outcome_tier(candidate, right)
        if candidate.rows is None or candidate.sql is None:
            scores.append(Score(0.0, tier, False, 0.0, 0.0, 0.0, 0.0))
            continue
        overlap = f1(candidate.rows, gold.rows)
        # Duplicates alone can keep a right result's F1 below 1, and two wrong results' sets may still share rows.
        partial = 0.0 if right else config.partial * overlap
        join = agrees = 0.0
        if pay_bonuses:
            if candidate.sql not in structures:
                structures[candidate.sql] = join_structure(candidate.sql)
            join = config.join_bonus * join_agreement(structures[candidate.sql], gold.joins)
            if majority is not None and frozenset(map(tuple, candidate.rows)) == majority:
                agrees = config.majority_bonus
        base = config.exact if right else partial
        scores.append(Score(base + join + agrees, tier, right, overlap, partial, join, agrees))
    return scores


def has_signal(scores: Sequence[Score], group_filter: Literal["reward", "exact", "off"]) -> bool:
    """Whether a group is trained on.

    "reward": its rewards differ. "exact": some candidates are right and some are not. "off": always.
    """
    if group_filter == "off":
        return bool(scores)
    if group_filter == "exact":
        return len({score.exact for score in scores}) > 1
    return len({score.reward for score in scores}) > 1


# Policies that look at nothing. A pool on which one of them earns well would teach it.
DEGENERATE_QUERIES: tuple[str, ...] = ("SELECT 1 WHERE 0", "SELECT NULL", "SELECT 0", "SELECT 1", "SELECT ''")
