"""Finished runs, and the scores of two of them question by question."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.records import EPISODES, SUMMARY, Key, episode_key, read_episodes, read_json
from eval.voting import by_question, votes
from shared.errors import SetupError

METRICS = ("official", "strict", "fair")
# Two runs that agree in these and differ in their seeds are two runs of one model.
_MODEL = (
    "engine",
    "engine_settings",
    "model_sha256",
    "mode",
    "sampling",
    "budgets",
    "prompt_sha256",
    "template_sha256",
)


@dataclass(frozen=True)
class Run:
    """A finished run as comparison needs it. Episodes by (question_id, sample)."""

    folder: Path
    summary: dict[str, Any]
    episodes: dict[Key, dict[str, Any]]

    @property
    def identity(self) -> Mapping[str, Any]:
        """What the run is."""
        identity: Mapping[str, Any] = self.summary["identity"]
        return identity

    @property
    def questions(self) -> list[str]:
        """The ids of its questions, in its order."""
        return list(dict.fromkeys(question for question, _ in self.episodes))

    @property
    def samples(self) -> int:
        """How many episodes a question has."""
        return len({sample for _, sample in self.episodes})


@dataclass(frozen=True)
class Pair:
    """One question of both runs: its score in each (mean over samples, or the vote's), its stratum labels."""

    question_id: str
    db_id: str
    difficulty: str
    a: float
    b: float


def load_run(folder: Path) -> Run:
    """Read a run folder. SetupError when it is no finished run."""
    if not folder.is_dir():
        raise SetupError(f"run {folder} does not exist: give the --out folder of a finished eval.run")
    if not (folder / SUMMARY).is_file() and (folder / EPISODES).is_file():
        raise SetupError(f"run {folder} is not finished: run its eval.run command again to resume it")
    summary = read_json(folder / SUMMARY)
    return Run(folder, summary, {episode_key(record): record for record in read_episodes(folder / EPISODES)})


def check_comparable(a: Run, b: Run) -> None:
    """SetupError unless both runs answered the same questions over the same data under the same rules.

    How many samples each took may differ: a question counts once in either.
    """
    only_a, only_b = (sorted(set(x.questions) - set(y.questions)) for x, y in ((a, b), (b, a)))
    if only_a or only_b:
        raise SetupError(
            f"the runs answered different questions ({len(only_a)} only in {a.folder}, "
            f"{len(only_b)} only in {b.folder}, {(only_a or only_b)[0]} for one): evaluate both on the same set"
        )
    if a.identity["data_sha256"] != b.identity["data_sha256"]:
        raise SetupError(
            f"the runs saw different data (hash {a.identity['data_sha256'][:12]} in {a.folder}, "
            f"{b.identity['data_sha256'][:12]} in {b.folder}): questions or databases changed, evaluate both again"
        )
    if a.summary["rules"] != b.summary["rules"]:
        raise SetupError(f"the runs were scored by different rules: {a.summary['rules']} and {b.summary['rules']}")


def question_scores(run: Run, metric: str, *, voting: bool = False) -> dict[str, float]:
    """The score of each question that has a verdict: the mean over its scored samples, or that of their vote.

    SetupError for a metric that the run's rules do not know, and for a vote without several samples.
    """
    records = list(run.episodes.values())
    if voting and run.samples < 2:
        raise SetupError(f"run {run.folder} has one sample a question, which is no vote: run it with --vote K")
    scores: dict[str, float] = {}
    for question, group in by_question(records).items():
        verdicts = [record["scores"].get(metric) for record in group]
        if any(verdict is None for verdict in verdicts):
            raise SetupError(f"these runs have no {metric} score: compare them by official")
        scores[question] = sum(float(verdict["score"]) for verdict in verdicts) / len(verdicts)
    if voting:
        return {question: found.score(metric) or 0.0 for question, found in votes(records).items()}
    return scores


def pair_up(a: Run, b: Run, metric: str, *, voting: bool = False) -> tuple[list[Pair], int]:
    """The questions that both runs scored, in A's order, and how many were left out."""
    scores_a, scores_b = (question_scores(run, metric, voting=voting) for run in (a, b))
    first = {question: record for (question, _), record in reversed(a.episodes.items())}
    pairs = [
        Pair(q, first[q]["db_id"], first[q]["difficulty"], scores_a[q], scores_b[q])
        for q in a.questions
        if q in scores_a and q in scores_b
    ]
    return pairs, len(a.questions) - len(pairs)


def same_model(a: Run, b: Run) -> bool:
    """True for two runs of one model under the same settings and another seed: what differs between them is noise."""
    if a.identity.get("seed") == b.identity.get("seed"):
        return False
    return all(a.identity.get(key) == b.identity.get(key) for key in _MODEL)
