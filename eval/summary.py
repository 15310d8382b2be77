"""From episode records to the figures of a run. Pure: the same records give the same summary, in any order."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from eval.gold import EXCLUSION_RULE
from eval.measures import length_quantiles, summarize_measures
from eval.scorers.bird import UNDECODABLE_RULE

Record = Mapping[str, Any]
_TRIVIAL = ("empty", "one_null", "one_zero")


def summarize(records: Sequence[Record], identity: Mapping[str, Any]) -> dict[str, Any]:
    """All figures of a finished run.

    `n` counts the scored episodes: every rate and mean has this denominator. Episodes whose gold failed
    and episodes that a fault of ours ended are not among them; `excluded` lists each with its reason.
    """
    scored = [record for record in records if record["status"] == "scored"]
    return {
        **_scores(scored),
        "n_questions": len(records),
        "submit_rate": _mean(scored, lambda r: r["origin"] == "submitted"),
        "answer_rate": _mean(scored, lambda r: r["answer_sql"] is not None),
        "fallback_rate": _mean(scored, lambda r: r["origin"] == "fallback"),
        "executes_rate": _mean(scored, lambda r: r["scores"]["pred_outcome"] == "ok"),
        "truncation_rate": _mean(scored, lambda r: r["truncated"]),
        "clean_turn_rate": _mean([turn for r in scored for turn in r["turns"]], lambda t: t["clean"]),
        "mean_turns": _mean(scored, lambda r: len(r["turns"])),
        "mean_calls": _mean(scored, lambda r: sum(len(turn["calls"]) for turn in r["turns"])),
        "mean_sampled_tokens": _mean(scored, lambda r: r["sampled_tokens"]),
        "mean_tokens": _mean(scored, lambda r: r["total_tokens"]),
        "by_difficulty": _by(scored, lambda r: r["difficulty"] or "(none)"),
        "by_origin": _by(scored, lambda r: r["origin"]),
        "by_gold_length": {label: _scores(group) for label, group in length_quantiles(scored).items()},
        "by_database": _by(scored, lambda r: r["db_id"]),
        "ended": dict(sorted(Counter(r["ended"] for r in scored).items())),
        "outcomes": dict(sorted(Counter(r["scores"]["pred_outcome"] for r in scored).items())),
        "measures": summarize_measures(scored),
        "gold": _gold(records, scored),
        "excluded": [
            {"question_id": r["question_id"], "sample": r["sample"], "status": r["status"], "reason": r["reason"]}
            for r in records
            if r["status"] != "scored"
        ],
        "exclusion_rule": f"{EXCLUSION_RULE}; nor has an episode that a fault of the harness ended",
        "rules": {
            key: next((r["scores"][key]["rule"] for r in scored if r["scores"][key] is not None), None)
            for key in ("official", "strict", "soft_f1")
        },
        "identity": dict(identity),
    }


def _mean(items: Sequence[Any], value: Callable[[Any], float]) -> float | None:
    return sum(value(item) for item in items) / len(items) if items else None


def _scores(scored: Sequence[Record]) -> dict[str, Any]:
    def mean(key: str) -> float | None:
        return _mean([r for r in scored if r["scores"][key] is not None], lambda r: r["scores"][key]["score"])

    return {"n": len(scored), "official": mean("official"), "strict": mean("strict"), "soft_f1": mean("soft_f1")}


def _by(scored: Iterable[Record], label: Callable[[Record], str]) -> dict[str, dict[str, Any]]:
    groups: dict[str, list[Record]] = {}
    for record in scored:
        groups.setdefault(label(record), []).append(record)
    return {key: _scores(groups[key]) for key in sorted(groups)}


def _gold(records: Sequence[Record], scored: Sequence[Record]) -> dict[str, Any]:
    """How the golds ran, and the score with and without the questions that a degenerate answer would match."""
    trivial, telling = ([r for r in scored if (r["gold"]["shape"] in _TRIVIAL) is wanted] for wanted in (True, False))
    return {
        "status": dict(sorted(Counter(r["gold"]["status"] for r in records).items())),
        "shape": dict(sorted(Counter(r["gold"]["shape"] for r in scored).items())),
        "undecodable": sum(r["gold"]["undecodable"] for r in scored),
        "undecodable_rule": UNDECODABLE_RULE,
        "official_without_trivial": _scores(telling)["official"],
        "official_on_trivial": _scores(trivial)["official"],
    }
