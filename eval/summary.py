"""From episode records to the figures of a run. Pure: the same records give the same summary, in any order."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from eval.gold import EXCLUSION_RULE, RULES, UNCHECKED_RULE
from eval.measures import length_quantiles, summarize_measures
from eval.scorers.bird import UNDECODABLE_RULE
from eval.voting import by_question, summarize_samples

Record = Mapping[str, Any]
METRICS = ("official", "strict", "fair", "soft_f1")
_TRIVIAL = ("empty", "one_null", "one_zero")
TRIVIAL_RULE = "a gold result that is empty, one NULL or one 0, which an answer that looked at nothing can match"


def summarize(records: Sequence[Record], identity: Mapping[str, Any]) -> dict[str, Any]:
    """All figures of a finished run.

    `n` counts the scored episodes: every rate and mean has this denominator. Episodes whose gold failed
    and episodes that a fault of ours ended are not among them; `excluded` lists each with its reason.
    A score is the mean over questions of the mean over a question's scored samples.
    """
    scored = [record for record in records if record["status"] == "scored"]
    samples = summarize_samples(records)
    return {
        **_scores(scored),
        "official_ci": samples.get("ci"),
        "n_questions": len({record["question_id"] for record in records}),
        "n_episodes": len(records),
        "samples": samples,
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
        "exclusion_rule": f"{identity.get('exclusion_rule', EXCLUSION_RULE)}; "
        "nor has an episode that a fault of the harness ended",
        "rules": {
            key: next((r["scores"][key]["rule"] for r in scored if r["scores"].get(key) is not None), None)
            for key in METRICS
        },
        "identity": dict(identity),
    }


def _mean(items: Sequence[Any], value: Callable[[Any], float]) -> float | None:
    return math.fsum(value(item) for item in items) / len(items) if items else None


def _scores(scored: Sequence[Record]) -> dict[str, Any]:
    groups = by_question(scored).values()

    def mean(key: str) -> float | None:
        means = [_mean(group, lambda r: r["scores"][key]["score"]) for group in groups if _has(group, key)]
        return _mean(means, float)

    return {"n": len(scored), **{key: mean(key) for key in METRICS}}


def _has(group: Sequence[Record], key: str) -> bool:
    return all(record["scores"].get(key) is not None for record in group)


def _by(scored: Iterable[Record], label: Callable[[Record], str]) -> dict[str, dict[str, Any]]:
    groups: dict[str, list[Record]] = {}
    for record in scored:
        groups.setdefault(label(record), []).append(record)
    return {key: _scores(groups[key]) for key in sorted(groups)}


def _gold(records: Sequence[Record], scored: Sequence[Record]) -> dict[str, Any]:
    """What the golds are worth, by question, and the official score with and without those that are flagged.

    `share_trivial` is over the scored questions, as are all scores here; `status` and `flagged` are over all questions.
    """
    first = {str(record["question_id"]): record for record in reversed(records)}
    golds = {question: first[question]["gold"] for question in dict.fromkeys(str(r["question_id"]) for r in records)}
    trivial, telling = ([r for r in scored if (r["gold"]["shape"] in _TRIVIAL) is wanted] for wanted in (True, False))
    flagged = {flag: [q for q, gold in golds.items() if flag in gold.get("flags", ())] for flag in RULES}
    flagged = {flag: questions for flag, questions in flagged.items() if questions}
    kept = {flag: set(questions) for flag, questions in flagged.items() if not RULES[flag].fails}
    any_kept = set[str]().union(*kept.values())
    questions = by_question(scored)
    return {
        "n": len(golds),
        "status": dict(sorted(Counter(gold["status"] for gold in golds.values()).items())),
        "shape": dict(sorted(Counter(group[0]["gold"]["shape"] for group in questions.values()).items())),
        "undecodable": sum(group[0]["gold"]["undecodable"] for group in questions.values()),
        "undecodable_rule": UNDECODABLE_RULE,
        "trivial_rule": TRIVIAL_RULE,
        "share_trivial": len(by_question(trivial)) / len(questions) if questions else None,
        "official_without_trivial": _scores(telling)["official"],
        "official_on_trivial": _scores(trivial)["official"],
        "flagged": flagged,
        "ties_unchecked": [question for question, gold in golds.items() if not gold.get("ties_checked", True)],
        "official_without": {
            flag: _scores([r for r in scored if r["question_id"] not in ids])["official"] for flag, ids in kept.items()
        },
        "official_without_flagged": _scores([r for r in scored if r["question_id"] not in any_kept])["official"],
        "flag_rules": {flag: RULES[flag].doc for flag in flagged} | {"ties_unchecked": UNCHECKED_RULE},
    }
