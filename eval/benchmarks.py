"""The benchmarks by name: where their files lie under the data folder, how they load, which rule scores them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shared.data.bird import load_questions
from shared.data.sqale import load_sqale

from eval.config import EvalConfig
from eval.scorers import bird, sqale
from eval.scorers.base import Scores
from shared.data.example import Example
from shared.errors import SetupError

CUSTOM = "custom"
ScoreResults = Callable[..., Scores]


@dataclass(frozen=True)
class Benchmark:
    """`layouts` are (questions, databases) paths below the data folder, tried in order; for sqale (queries, schemas)."""

    layouts: tuple[tuple[str, str], ...]
    score_results: ScoreResults = bird.score_results


BENCHMARKS: Mapping[str, Benchmark] = {
    "bird": Benchmark(
        (("bird/dev/dev.json", "bird/dev/dev_databases"), ("bird_dev/dev.json", "bird_dev/dev_databases"))
    ),
    "bird-mini": Benchmark(
        (
            ("bird/minidev/mini_dev_sqlite.json", "bird/minidev/dev_databases"),
            ("bird_dev/mini_dev_sqlite.json", "bird_dev/dev_databases"),
        )
    ),
    "spider": Benchmark((("spider/dev.json", "spider/database"), ("spider_dev/dev.json", "spider_dev/database"))),
    "kaggledbqa": Benchmark((("kaggledbqa/questions.json", "kaggledbqa/databases"),)),
    "sqale": Benchmark(
        (("sqale/queries", "sqale/schemas"), ("sqale/sqale2_queries", "sqale/sqale2_schemas")), sqale.score_results
    ),
}


def scorer_of(benchmark: str) -> ScoreResults:
    """The rule that scores a benchmark; a name of the user's own is scored by BIRD's."""
    return BENCHMARKS[benchmark].score_results if benchmark in BENCHMARKS else bird.score_results


def load_examples(config: EvalConfig) -> tuple[str, list[Example]]:
    """The benchmark's name and its questions, filtered and limited as configured. SetupError when there are none."""
    name = config.benchmark or CUSTOM
    if (config.questions is None) != (config.databases is None):
        raise SetupError("--questions and --databases belong together: give both")
    if config.questions is not None and config.databases is not None:
        examples = _load(name, config.questions, config.databases, config.db)
    else:
        if config.benchmark is None:
            raise SetupError(
                f"nothing to evaluate on: give --benchmark ({', '.join(BENCHMARKS)}) or --questions and --databases"
            )
        if name not in BENCHMARKS:
            raise SetupError(
                f"unknown benchmark {name}: one of {', '.join(BENCHMARKS)}, or give --questions and --databases"
            )
        questions, databases = _locate(name, config.data)
        examples = _load(name, questions, databases, config.db)
    if config.db:
        known = {example.db_id for example in examples}
        if missing := [db for db in config.db if db not in known]:
            raise SetupError(f"no question of {name} is on database {missing[0]}: check --db")
    examples = examples[: config.limit]
    if not examples:
        raise SetupError(f"{name} has no questions: check the file")
    _check_unique(name, examples)
    return name, examples


def _load(name: str, questions: Path, databases: Path, db_ids: Sequence[str]) -> list[Example]:
    if name == "sqale":
        return [e for e in load_sqale(str(questions), str(databases)) if not db_ids or e.db_id in db_ids]
    return list(load_questions(questions, databases, name, db_ids=db_ids))


def _locate(name: str, data: Path) -> tuple[Path, Path]:
    layouts = [(data / questions, data / databases) for questions, databases in BENCHMARKS[name].layouts]
    for questions, databases in layouts:
        if questions.exists() and databases.exists():
            return questions, databases
    questions, databases = layouts[0]
    raise SetupError(f"benchmark {name} is not under {data}: put it at {questions} and {databases}, or give --data")


def _check_unique(name: str, examples: Sequence[Example]) -> None:
    seen: set[str] = set()
    for example in examples:
        if example.question_id in seen:
            raise SetupError(f"{name} has two questions with id {example.question_id}: ids must be unique")
        seen.add(example.question_id)
