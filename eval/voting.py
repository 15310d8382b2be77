"""Several samples a question: their mean, how often they disagree, and what a vote among them would answer.

Voting is execution consistency: answers whose results are the same set of rows are one class, and the largest class
wins. It needs no gold and no model, so it is read off the records of a run with several samples.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from eval.stats import paired_bootstrap, wilson

Record = Mapping[str, Any]
VOTE_RULE = (
    "each sample whose answer ran votes for its result, as a set of rows; the result with the most votes wins, of "
    "equals the one that the lowest sample number returned; the verdict is that of the winner's lowest sample. An "
    "answer that failed, was missing, or was lost to a fault of the harness does not vote; without any vote the "
    "question scores 0"
)


@dataclass(frozen=True)
class Vote:
    """How the samples of one question voted.

    `winner` is the record whose answer wins, None when no answer ran. `sizes` are the votes of each class, most first.
    `tied`: another class had as many votes as the winner's.
    """

    question_id: str
    winner: Record | None
    sizes: tuple[int, ...]
    tied: bool

    def score(self, metric: str) -> float | None:
        """The winner's score under a metric, 0 without a winner, None under rules that know no such metric."""
        if self.winner is None:
            return 0.0
        verdict = self.winner["scores"][metric]
        return None if verdict is None else float(verdict["score"])


def by_question(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The scored records of each question, samples in order; questions in order of first appearance."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        if record["status"] == "scored":
            groups.setdefault(str(record["question_id"]), []).append(record)
    return {question: sorted(group, key=lambda r: int(r["sample"])) for question, group in groups.items()}


def vote(question_id: str, records: Sequence[Record]) -> Vote:
    """The vote of one question's scored records, in the order of their samples."""
    classes: dict[str, list[Record]] = {}
    for record in records:
        if (digest := record.get("answer_set_sha256")) is not None:
            classes.setdefault(digest, []).append(record)
    if not classes:
        return Vote(question_id, None, (), False)
    winner = max(classes.values(), key=len)  # the first of equals: classes stand in the order of their lowest sample
    sizes = tuple(sorted(map(len, classes.values()), reverse=True))
    return Vote(question_id, winner[0], sizes, sizes.count(sizes[0]) > 1)


def votes(records: Sequence[Record]) -> dict[str, Vote]:
    """The vote of every question that has a scored sample."""
    return {question: vote(question, group) for question, group in by_question(records).items()}


def flip_rate(records: Sequence[Record], metric: str = "official") -> float | None:
    """Share of (question, pair of its samples) whose two verdicts differ: the noise floor of one model.

    Questions count equally. None without a question that has two scored samples.
    """
    shares = []
    for group in by_question(records).values():
        pairs = list(combinations([_right(record, metric) for record in group], 2))
        if pairs:
            shares.append(sum(a != b for a, b in pairs) / len(pairs))
    return sum(shares) / len(shares) if shares else None


def _right(record: Record, metric: str) -> float:
    return float(record["scores"][metric]["score"])


def summarize_samples(records: Sequence[Record], *, seed: int = 0) -> dict[str, Any]:
    """The figures of a run over its samples, as JSON. With one sample a question there is no vote and no flip rate.

    The interval is over questions, a question with all its samples; `per_sample` is the official score of each sample
    number over the questions it was scored on.
    """
    groups = by_question(records)
    k = len({int(record["sample"]) for record in records})
    if not groups:
        return {"k": k, "questions": 0}
    means = [sum(_right(r, "official") for r in group) / len(group) for group in groups.values()]
    figures: dict[str, Any] = {"k": k, "questions": len(groups), "official": math.fsum(means) / len(means)}
    figures |= score_interval(means, seed)
    if k == 1:
        return figures
    by_sample: dict[int, list[float]] = {}
    for group in groups.values():
        for record in group:
            by_sample.setdefault(int(record["sample"]), []).append(_right(record, "official"))
    figures["per_sample"] = [sum(scores) / len(scores) for _, scores in sorted(by_sample.items())]
    best = [max(_right(r, "official") for r in group) for group in groups.values()]
    figures["any_right"] = sum(best) / len(best)
    figures["flip_rate"] = flip_rate(records)
    figures["vote"] = _summarize_votes([vote(question, group) for question, group in groups.items()], seed)
    return figures


def score_interval(values: Sequence[float], seed: int = 0) -> dict[str, Any]:
    """95% interval of a mean score over questions, and its name.

    Wilson's where every question is right or wrong, which has a width at 0 and 1 too; else a bootstrap."""
    if set(values) <= {0.0, 1.0}:
        return {"ci": list(wilson(round(sum(values)), len(values))), "interval": "wilson"}
    interval = paired_bootstrap(values, seed=seed)
    name = f"bootstrap over questions, {interval.resamples} resamples, seed {interval.seed}"
    return {"ci": [interval.low, interval.high], "interval": name}


def _summarize_votes(found: Sequence[Vote], seed: int) -> dict[str, Any]:
    official = [v.score("official") or 0.0 for v in found]
    strict = [score for v in found if (score := v.score("strict")) is not None]
    agreement = [v.sizes[0] / sum(v.sizes) for v in found if v.sizes]
    return {
        "rule": VOTE_RULE,
        "n": len(found),
        "official": sum(official) / len(official),
        **score_interval(official, seed),
        "strict": sum(strict) / len(strict) if strict else None,
        "ties": sum(v.tied for v in found),
        "without_vote": sum(v.winner is None for v in found),
        "agreement": sum(agreement) / len(agreement) if agreement else None,
    }
