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
