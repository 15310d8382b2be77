"""What every scorer says: a verdict always names the rule that gave it."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Verdict:
    """One rule's judgement of one answer. `score` is in [0, 1]; `reason` says in words what decided it."""

    rule: str
    score: float
    reason: str


@dataclass(frozen=True)
class Scores:
    """All verdicts on one answer, side by side, and how the answer itself ran.

    `pred_outcome` is the sandbox's outcome for the answer, or "no_answer". `strict`, `soft_f1` and `fair`
    are None under a benchmark whose rules know no such thing.
    """

    official: Verdict
    strict: Verdict | None
    soft_f1: Verdict | None
    pred_outcome: str
    fair: Verdict | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain data for a record; `from_json` reads it back."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Scores":
        """The inverse of `to_json`."""

        def verdict(key: str) -> Verdict | None:
            return None if data.get(key) is None else Verdict(**data[key])

        official = Verdict(**data["official"])
        return cls(official, verdict("strict"), verdict("soft_f1"), data["pred_outcome"], verdict("fair"))
