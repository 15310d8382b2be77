"""From a finished episode to its record: its answer is executed and held against the gold."""

from dataclasses import replace
from typing import Any

from eval.benchmarks import BENCHMARKS
from eval.config import EvalConfig
from eval.goldbook import Book, GoldBook
from eval.goldcache import GoldCache
from eval.preview import shown_results
from eval.scorers import bird
from eval.scorers.bird import execute
from eval.tablebook import TableBook
from shared.data.example import Example
from shared.episode import EpisodeRecord
from shared.sql.results import set_digest
from shared.sql.sandbox import Limits, QueryResult, Sandbox

Line = tuple[dict[str, Any], dict[str, Any]]


def open_book(config: EvalConfig, benchmark: str, sandbox: Sandbox, cache: GoldCache | None = None) -> Book:
    """The golds of a benchmark, with the rule that scores it; a name of the user's own is scored by BIRD's."""
    limits = Limits(seconds=config.gold_seconds)
    score = BENCHMARKS[benchmark].score_results if benchmark in BENCHMARKS else bird.score_results
    if score is None:
        return TableBook(sandbox, limits, audit=config.audit)
    return GoldBook(sandbox, limits, score, cache=cache, audit=config.audit)


class Judge:
    """Makes the records of a run. Thread-safe."""

    def __init__(self, config: EvalConfig, sandbox: Sandbox, golds: Book):
        """Of the config, the scored query's time limit counts, and which golds shall give no verdict."""
        self._sandbox, self._golds = sandbox, golds
        self._limits, self._exclude = Limits(seconds=config.query_seconds), frozenset(config.exclude)

    def line(self, example: Example, sample: int, episode: EpisodeRecord) -> Line:
        """The episode's record and, apart from it, its timing. SetupError when the database is at fault.

        `answer_set_sha256` identifies the set of rows that the answer returned (None when it did not run).
        """
        gold, pred, seconds = self._golds.gold(example), None, 0.0
        judged: dict[str, Any] = {"status": gold.status, "reason": gold.message, "scores": None, "results": None}
        if episode.ended == "error":
            last = (episode.error or "unknown").strip().splitlines()[-1]
            judged |= {"status": "harness_error", "reason": last}
        elif gold.usable:
            if episode.answer_sql is not None:
                pred = execute(self._sandbox, example.database, episode.answer_sql, self._limits)
                seconds = pred.seconds
            judgement = self._golds.judge(example, pred)
            gold, scores = judgement.gold, judgement.scores
            if scores is not None:
                judged |= {"status": "scored", "reason": scores.official.reason, "scores": scores.to_json()}
                judged["results"] = shown_results(pred, judgement.gold_result)
            else:
                judged |= {"status": gold.status, "reason": gold.message}
            if barred := [flag for flag in gold.flags if flag in self._exclude]:
                judged |= {"status": barred[0], "reason": "left out by --exclude", "scores": None}
        # Without the token lists first: asdict copies them one by one, which takes longer than the rest together.
        data = replace(episode, ids=[], mask=[], logprobs=[]).to_json(tokens=False)
        call_seconds = [[call.pop("seconds") for call in turn["calls"]] for turn in data["turns"]]
        timing = {"question_id": example.question_id, "sample": sample, "answer": seconds, "calls": call_seconds}
        record = {
            "question_id": example.question_id,
            "sample": sample,
            "db_id": example.db_id,
            "database_sha256": example.database.content_hash,
            "difficulty": example.difficulty,
            "question": example.question,
            "evidence": example.evidence,
            "gold_sql": example.gold_sql,
            "gold": gold.to_json(),
            **judged,
            "answer_set_sha256": _digest(pred),
            "truncated": episode.truncated,
            "sampled_tokens": sum(episode.mask),
            "total_tokens": len(episode.ids),
        }
        return record | {key: value for key, value in data.items() if key not in record}, timing


def _digest(pred: QueryResult | None) -> str | None:
    return None if pred is None or pred.outcome != "ok" or pred.truncated else set_digest(pred.rows)
