"""One question over one database: what every loader yields and everything else consumes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shared.database import Database


@dataclass(frozen=True)
class Example:
    """A question with its gold SQL.

    `question_id` is unique within a benchmark. `evidence` is BIRD's hint ("" where there is none).
    `gold_sql` is "" only where a benchmark ships result files instead of a query.
    """

    question_id: str
    db_id: str
    question: str
    gold_sql: str
    database: Database
    evidence: str = ""
    difficulty: str = ""
    benchmark: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Loaded:
    """What a loader read, and how many questions it left out, by reason: nothing is left out silently."""

    examples: list[Example]
    skipped: Mapping[str, int] = field(default_factory=dict)

    def summary(self) -> str:
        """One line for a log, e.g. `974 questions over 7 databases (left out: 12 placeholder phrasing)`."""
        databases = len({example.db_id for example in self.examples})
        line = f"{len(self.examples)} questions over {databases} databases"
        if self.skipped:
            line += f" (left out: {', '.join(f'{count} {reason}' for reason, count in self.skipped.items())})"
        return line
