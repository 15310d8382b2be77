"""Accuracy with its uncertainty, over all of a run's episodes and over groups of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from eval.measures import Record, length_quantiles
from eval.voting import score_interval

_LEVELS = ("simple", "moderate", "challenging", "easy", "medium", "hard", "extra")


@dataclass(frozen=True)
class Accuracy:
    """The scores of a group of scored episodes, and a 95% interval of the official one.

    `n` counts episodes, `questions` the questions they are of: a score is the mean over questions of the mean over a
    question's samples. `strict` and `fair` are None under rules that know no such thing.
    """

    label: str
    n: int
    questions: int
    official: float
    low: float
    high: float
    strict: float | None
    fair: float | None = None


def accuracy(label: str, records: Sequence[Record]) -> Accuracy | None:
    """The scores of a group; None when none of it is scored.

    Wilson's interval where each question scores 0 or 1 (with one sample it does); else a bootstrap over questions.
    """
    scored = [record for record in records if record["status"] == "scored"]
    if not scored:
        return None
    official = _question_means(scored, "official")
    assert official is not None  # every benchmark has an official rule
    low, high = score_interval(official)["ci"]
    strict, fair = (_question_means(scored, key) for key in ("strict", "fair"))
    return Accuracy(
        label=label,
        n=len(scored),
        questions=len(official),
        official=sum(official) / len(official),
        low=low,
        high=high,
        strict=sum(strict) / len(strict) if strict else None,
        fair=sum(fair) / len(fair) if fair else None,
    )


def _question_means(scored: Sequence[Record], key: str) -> list[float] | None:
    """The mean score of each question that has one under the rule `key`; None when none has."""
    groups: dict[str, list[float]] = {}
    for record in scored:
        if (verdict := record["scores"].get(key)) is not None:
            groups.setdefault(str(record["question_id"]), []).append(float(verdict["score"]))
    return [sum(values) / len(values) for values in groups.values()] or None


def group_by(records: Sequence[Record], label: Callable[[Record], str]) -> dict[str, list[Record]]:
    """The records by label, labels in order of first appearance."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(label(record), []).append(record)
    return groups


def difficulty_order(label: str) -> tuple[int, str]:
    """Sorts BIRD's and Spider's levels from easy to hard, and unknown ones after them by name."""
    return (_LEVELS.index(label) if label in _LEVELS else len(_LEVELS), label)


def by_difficulty(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The records by level, easy ones first; {} where the benchmark has none."""
    groups = group_by(records, lambda record: record["difficulty"])
    if set(groups) <= {""}:
        return {}
    order = sorted(groups, key=difficulty_order)
    return {label or "(none)": groups[label] for label in order}


def by_database(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The records by database, in the order of names."""
    return dict(sorted(group_by(records, lambda record: record["db_id"]).items()))


def by_gold_length(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The records by quarter of gold length."""
    return length_quantiles(records)


def accuracies(groups: Mapping[str, Sequence[Record]]) -> list[Accuracy]:
    """One row a group, without the groups in which nothing is scored."""
    return [row for label, records in groups.items() if (row := accuracy(label, records)) is not None]
