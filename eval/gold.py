"""What a gold query is worth: how it ran, what its result hangs on, and what follows from that for the score.

A gold that fails cannot judge anybody: its questions keep their episodes on record, have no verdict, are listed, and
are left out of every denominator. A gold whose result hangs on the clock, on ties or on float noise can, so by
default it counts, as upstream counts it; it is listed too, and the score is given with and without such golds.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from eval.scorers.bird import has_undecodable
from shared.sql.sandbox import QueryResult

Shape = Literal["rows", "empty", "one_null", "one_zero"]


@dataclass(frozen=True)
class GoldRule:
    """One thing that can be said of a gold. `fails`: such a gold has no verdict to give."""

    key: str
    fails: bool
    doc: str


# In order of precedence: a gold's status is the first that fits, its flags are all that fit.
RULES: Mapping[str, GoldRule] = {
    rule.key: rule
    for rule in (
        GoldRule("gold_missing", True, "the question has neither a gold query nor gold tables"),
        GoldRule("gold_error", True, "the gold query fails or is refused: it must be one statement that only reads"),
        GoldRule("gold_timeout", True, "the gold query runs out of its own time limit, in the first or second run"),
        GoldRule("gold_limit", True, "the gold result breaks the size or memory limit"),
        GoldRule(
            "gold_clock",
            False,
            "two runs differ, or the text asks for the current time or a random number: it runs again for each answer",
        ),
        GoldRule(
            "gold_tie",
            False,
            "the set of rows changes under PRAGMA reverse_unordered_selects, or when rows that tie in an "
            "ORDER BY … LIMIT are taken in another order: a right answer may be judged wrong",
        ),
        GoldRule("gold_float", False, "the same, but only behind the 12th digit of a number: a sum of floats, say"),
        GoldRule("gold_mismatch", False, "the gold query's result does not pass the benchmark's own gold tables"),
        GoldRule("gold_empty", False, "the gold result has no rows: any answer that returns nothing matches it"),
    )
}
OK = "ok"
SLOW_SHARE = 1 / 3
SLOW_RULE = "slow: the first run took more than a third of the time limit (seen by the audit; depends on the machine)"
UNCHECKED_RULE = "ties unchecked: a run that would have shown ties failed or ran out of time"
EXCLUSION_RULE = "a question whose gold query is missing, fails, or breaks its time or size limit has no verdict"
EXCLUDABLE = tuple(rule.key for rule in RULES.values() if not rule.fails)

_FAILED = {"timeout": "gold_timeout", "limit": "gold_limit"}


def exclusion_rule(exclude: tuple[str, ...]) -> str:
    """EXCLUSION_RULE, with the flags that the run was told to leave out as well."""
    return EXCLUSION_RULE + (f"; nor has one flagged {' or '.join(sorted(set(exclude)))}" if exclude else "")


@dataclass(frozen=True)
class Gold:
    """How a gold query ran. `shape` tells apart results that a degenerate answer would match.

    `status` is "ok" or a key of RULES, `flags` are all keys that hold. `ties_checked` is False where that was tried
    and could not be done, `repeats` where gold as prediction does not score: its second run gave another set of rows.
    """

    status: str
    message: str = ""
    rows: int = 0
    shape: Shape | None = None
    undecodable: bool = False
    flags: tuple[str, ...] = field(default=())
    ties_checked: bool = True
    repeats: bool = True

    @property
    def usable(self) -> bool:
        """True when an answer can be held against this gold."""
        return self.status == OK or not RULES[self.status].fails

    def to_json(self) -> dict[str, Any]:
        """Plain data for a record; `from_json` reads it back."""
        return asdict(self) | {"flags": list(self.flags)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Gold":
        """The inverse of `to_json`."""
        return cls(**{**data, "flags": tuple(data["flags"])})


def describe(
    result: QueryResult, flags: tuple[str, ...] = (), *, ties_checked: bool = True, repeats: bool = True
) -> Gold:
    """What an executed gold is good for, given what further runs have shown (`flags`)."""
    if result.outcome != "ok" or result.truncated:
        status = _FAILED.get("limit" if result.outcome == "ok" else result.outcome, "gold_error")
        return Gold(status, result.message or "the result was cut", flags=(status,))
    shape = shape_of(result)
    found = {flag for flag in flags if flag != "gold_empty"} | ({"gold_empty"} if shape == "empty" else set())
    ordered = tuple(key for key in RULES if key in found)
    undecodable = has_undecodable(result)
    status = ordered[0] if ordered else OK
    return Gold(status, "", len(result.rows), shape, undecodable, ordered, ties_checked, repeats)


def shape_of(result: QueryResult) -> Shape:
    """Whether a result is one that a degenerate query returns: nothing, one NULL, one 0."""
    if not result.rows:
        return "empty"
    if len(result.rows) == 1 and len(result.rows[0]) == 1:
        cell = result.rows[0][0]
        if cell is None:
            return "one_null"
        if cell == 0:
            return "one_zero"
    return "rows"
