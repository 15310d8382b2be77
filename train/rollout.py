"""One step's rollouts: which questions, their episodes, what the episodes earn, and the rows to train on."""

import hashlib
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

from shared.chat import ChatCodec
from shared.data.example import Example
from shared.database import Database
from shared.engines.base import Engine, SamplingParams
from shared.episode import EpisodeConfig, EpisodeRecord, Mode
from shared.errors import SetupError
from shared.runner import Task, run_episodes
from shared.sql.sandbox import Limits, Sandbox
from shared.sql.structure import join_structure
from train.batch import TrainRow
from train.config import RolloutConfig, TrainConfig
from train.curriculum import CurriculumSettings, draw, drawable
from train.loss import group_advantages
from train.pool import Pool
from train.reward import DEGENERATE_QUERIES, Candidate, Gold, Rows, Score, has_signal, score_group

# A result that is compared in full must fit; one beyond this earns nothing.
SCORING_BYTES = 16 * 2**20
GOLD_CACHE = 4096
# How far down the drawn order a step looks for questions whose gold can be used.
REFILL = 4


@dataclass(frozen=True)
class Question:
    """One question of a step: where it stands in the pool, its quantile, and whether its schema is withheld."""

    position: int
    example: Example
    quantile: float
    mode: Mode


@dataclass(frozen=True)
class Group:
    """A question's usable episodes with their scores, and the errors of the others (our faults)."""

    question: Question
    episodes: tuple[EpisodeRecord, ...]
    scores: tuple[Score, ...]
    errors: tuple[str, ...] = ()


def derived_number(*parts: object) -> int:
    """63 bits that depend on the parts and on nothing else."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode("utf-8", "replace")).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def question_mode(seed: int, step: int, example: Example, explore_share: float) -> Mode:
    """Withheld for a share of the questions; all candidates of one see the same, so that their rewards compare."""
    number: float = derived_number("mode", seed, step, example.question_id) / 2**63
    return "withheld" if number < explore_share else "full"


def episode_config(rollout: RolloutConfig, mode: Mode) -> EpisodeConfig:
    """The episode's budgets and sampling as the run's config has them."""
    return EpisodeConfig(
        mode=mode,
        max_turns=rollout.max_turns,
        max_new_tokens=rollout.max_new_tokens,
        max_tokens=rollout.max_tokens,
        max_failed_queries=rollout.max_failed_queries,
        max_calls_per_turn=rollout.max_calls_per_turn,
        strict_format=rollout.strict_format,
        fallback=rollout.fallback,
        sampling=SamplingParams(temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k),
    )


class Scorer:
    """Executes answers and gold queries through the sandbox, gold results cached, and scores groups."""

    def __init__(self, config: TrainConfig, sandbox: Sandbox) -> None:
        self._config = config
        self._sandbox = sandbox
        self._limits = Limits(seconds=config.rollout.query_seconds, max_bytes=SCORING_BYTES)
        self._golds: OrderedDict[str, Gold | str] = OrderedDict()

    def rows(self, database: Database, sql: str | None) -> Rows | None:
        """The complete result of a query, or None when there is no query or it did not run to one."""
        if sql is None:
            return None
        result = self._sandbox.query(database, sql, self._limits)
        if result.outcome == "setup_error":
            raise SetupError(f"database {database.db_id}: {result.message}")
        return result.rows if result.outcome == "ok" and not result.truncated else None

    def gold(self, example: Example) -> Gold | str:
        """The gold result, or in one word why the question cannot be trained on: "gold_fails" or "gold_empty"."""
        key = example.question_id
        if key not in self._golds:
            rows = self.rows(example.database, example.gold_sql)
            if rows is None:
                self._golds[key] = "gold_fails"
            elif not rows and self._config.data.empty_gold == "drop":
                self._golds[key] = "gold_empty"
            else:
                self._golds[key] = Gold(rows, join_structure(example.gold_sql))
            if len(self._golds) > GOLD_CACHE:
                self._golds.popitem(last=False)
        self._golds.move_to_end(key)
        return self._golds[key]

    def score(self, example: Example, answers: Sequence[str | None]) -> list[Score]:
        """Scores of the candidates of one question. ValueError when its gold cannot be used."""
        gold = self.gold(example)
        if isinstance(gold, str):
            raise ValueError(f"question {example.question_id}: {gold}")
        results = {sql: self.rows(example.database, sql) for sql in dict.fromkeys(answers)}
        return score_group([Candidate(sql, results[sql]) for sql in answers], gold, self._config.reward)

    def degenerate_rewards(self, examples: Sequence[Example]) -> dict[str, float]:
        """Mean reward over `examples` of policies that submit one fixed query whatever the question."""
        totals = dict.fromkeys(DEGENERATE_QUERIES, 0.0)
        usable = [example for example in examples if isinstance(self.gold(example), Gold)]
        for example in usable:
            for sql in DEGENERATE_QUERIES:
                totals[sql] += self.score(example, [sql] * self._config.rollout.candidates)[0].reward
        return {sql: total / max(len(usable), 1) for sql, total in totals.items()}


def curriculum_settings(config: TrainConfig) -> CurriculumSettings:
    """The curriculum's part of the config."""
    return CurriculumSettings(config.curriculum.enabled, config.curriculum.ramp_steps, config.curriculum.k)


class StepDraw:
    """The questions of one step, in drawn order; a pure function of (seed, step) but for golds that cannot be used.

    `skipped` counts why drawn questions were passed over: a question whose gold fails or is empty is replaced by the
    next of the same draw.
    """

    def __init__(self, pool: Pool, step: int, config: TrainConfig, scorer: Scorer) -> None:
        self.skipped: Counter[str] = Counter()
        self._step = step
        # A longer draw begins with the shorter one, so looking further ahead changes nothing.
        n = REFILL * config.rollout.questions * (1 + config.reward.refill)
        factors = pool.factors(config.curriculum.mix)
        self._order = draw(
            pool.quantiles,
            max(config.rollout.questions, min(n, drawable(pool.quantiles, factors))),
            seed=config.seed,
            step=step,
            settings=curriculum_settings(config),
            factors=factors,
        )
        self._questions = self._usable(pool, config, scorer)

    def take(self, n: int) -> list[Question]:
        """The next `n` questions that can be used, or as many as are left."""
        return list(islice(self._questions, n))

    def first(self, n: int) -> list[Question]:
        """The first `n`. SetupError when there are fewer."""
        questions = self.take(n)
        if len(questions) < n:
            raise SetupError(
                f"step {self._step}: only {len(questions)} of {len(self._order)} drawn questions have a usable gold "
                f"result ({', '.join(f'{n} {why}' for why, n in self.skipped.items())}); mend the data or lower "
                "rollout.questions"
            )
        return questions

    def _usable(self, pool: Pool, config: TrainConfig, scorer: Scorer) -> Iterator[Question]:
        for position in self._order.tolist():
            example = pool.examples[position]
            gold = scorer.gold(example)
            if isinstance(gold, str):
                self.skipped[gold] += 1
                continue
            mode = question_mode(config.seed, self._step, example, config.rollout.explore_share)
            yield Question(position, example, float(pool.quantiles[position]), mode)


def run_groups(
    questions: Sequence[Question],
    step: int,
    config: TrainConfig,
    engine: Engine,
    codec: ChatCodec,
    sandbox: Sandbox,
    on_episode: Callable[[EpisodeRecord], None] = lambda record: None,
) -> list[list[EpisodeRecord]]:
    """All candidates of the questions; result[i][j] is candidate j of question i, whatever the order of finishing.

    An episode's seed depends on (run seed, step, question id, candidate), so neither the number of ranks nor
    the batch it runs in has a say.
    """
    n = config.rollout.candidates
    found: dict[tuple[int, int], EpisodeRecord] = {}
    for mode in ("withheld", "full"):
        wanted = [(i, j) for i, question in enumerate(questions) if question.mode == mode for j in range(n)]
        tasks = (
            Task(
                questions[i].example, derived_number("episode", config.seed, step, questions[i].example.question_id, j)
            )
            for i, j in wanted
        )
        running = run_episodes(
            tasks,
            engine,
            codec,
            sandbox,
            episode_config(config.rollout, mode),
            concurrency=config.rollout.concurrency,
            tool_threads=config.rollout.sandbox_workers,
        )
        for index, record in running:
            found[wanted[index]] = record
            on_episode(record)
    return [[found[i, j] for j in range(n)] for i in range(len(questions))]


def score_groups(
    questions: Sequence[Question], episodes: Sequence[Sequence[EpisodeRecord]], scorer: Scorer, workers: int
) -> list[Group]:
    """Score each question's candidates, `workers` questions at a time (SQL runs in the sandbox's processes)."""

    def one(question: Question, records: Sequence[EpisodeRecord]) -> Group:
        usable = tuple(record for record in records if record.ended != "error")
        scores = scorer.score(question.example, [record.answer_sql for record in usable]) if usable else []
        errors = tuple(record.error or "unknown" for record in records if record.ended == "error")
        return Group(question, usable, tuple(scores), errors)

    with ThreadPoolExecutor(workers, thread_name_prefix="score") as threads:
        return list(threads.map(one, questions, episodes))


def check_weights(groups: Sequence[Group], expected: str) -> None:
    """Refuse episodes sampled from other weights than the ones about to be trained.

    Raises RuntimeError naming both fingerprints.
    """
    for group in groups:
        for record in group.episodes:
            if any(weights != expected for weights in record.weights):
                raise RuntimeError(
                    f"an episode of question {record.question_id} was sampled from weights "
                    f"{', '.join(record.weights)}, the trainer holds {expected}"
                )


def with_signal(groups: Sequence[Group], config: TrainConfig) -> list[Group]:
    """The groups that the step can learn from, by the config's filter."""
    return [group for group in groups if has_signal(group.scores, config.reward.group_filter)]


def training_rows(groups: Sequence[Group], config: TrainConfig) -> list[TrainRow]:
    """Rows of the groups that carry a signal, with advantages; groups without one are left out."""
    rows: list[TrainRow] = []
    for group in with_signal(groups, config):
        advantages = group_advantages([score.reward for score in group.scores])
        for record, advantage in zip(group.episodes, advantages, strict=True):
            rows.append(TrainRow(record.ids, record.mask, record.logprobs, advantage))
    return rows


def rollout_sums(groups: Sequence[Group], config: TrainConfig) -> dict[str, float]:
    """Sums over one rank's groups, ready to be added over ranks; `summarize` turns them into means."""
    sums: dict[str, float] = defaultdict(float)
    for group in groups:
        sums["groups"] += 1
        sums["groups_dropped"] += not has_signal(group.scores, config.reward.group_filter)
        sums["groups_right"] += any(score.exact for score in group.scores)
        sums["quantile"] += group.question.quantile
        sums["errors"] += len(group.errors)
        for record, score in zip(group.episodes, group.scores, strict=True):
            sums["episodes"] += 1
            sums["reward"] += score.reward
            sums["f1"] += score.f1
            sums["exact"] += score.exact
            sums[f"tier_{score.tier}"] += 1
            sums[f"origin_{record.origin}"] += 1
            sums["truncated"] += record.truncated
            sums["turns"] += len(record.turns)
            sums["clean_turns"] += sum(turn.clean for turn in record.turns)
            sums["calls"] += sum(len(turn.calls) for turn in record.turns)
            sums["tokens"] += len(record.ids)
            sums["sampled_tokens"] += sum(record.mask)
    return dict(sums)


_PER_EPISODE = ("reward", "f1", "exact", "truncated", "turns", "calls", "tokens", "sampled_tokens")


def add_sums(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The sums of several ranks, key by key."""
    total: dict[str, float] = defaultdict(float)
    for part in parts:
        for name, value in part.items():
            total[name] += value
    return total


def summarize(sums: Mapping[str, float]) -> dict[str, float]:
    """Means an episode (and a question for the quantile) from `rollout_sums`; shares are in [0, 1]."""
    sums = defaultdict(float, sums)
    episodes = max(sums["episodes"], 1)
    summary: dict[str, float] = {"episodes": sums["episodes"], "errors": sums["errors"]}
    summary |= {name: sums[name] / episodes for name in _PER_EPISODE}
    for name in ("equivalent", "executable", "parsable", "invalid"):
        summary[f"tier_{name}"] = sums[f"tier_{name}"] / episodes
    for name in ("submitted", "final_text", "fallback", "none"):
        summary[f"origin_{name}"] = sums[f"origin_{name}"] / episodes
    summary["clean_turns"] = sums["clean_turns"] / max(sums["turns"], 1)
    summary["quantile"] = sums["quantile"] / max(sums["groups"], 1)
    summary["groups_dropped"] = sums["groups_dropped"]
    summary["groups_right"] = sums["groups_right"]
    return summary


def episode_lines(groups: Sequence[Group], step: int) -> Iterator[dict[str, Any]]:
    """JSON-able records of a step's episodes with their scores, without the per-token lists."""
    for group in groups:
        for record, score in zip(group.episodes, group.scores, strict=True):
            yield {
                "step": step,
                "quantile": group.question.quantile,
                "question": group.question.example.question,
                "evidence": group.question.example.evidence,
                "difficulty": group.question.example.difficulty,
                "gold_sql": group.question.example.gold_sql,
                "score": score.__dict__ | {},
                "episode": record.to_json(tokens=False),
            }
