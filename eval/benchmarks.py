"""The benchmarks by name: where their files lie under the data folder, how they load, which rule scores them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from eval.config import EvalConfig
from eval.goldbook import ScoreResults
from eval.scorers import bird, sqale
from shared.data.bird import read_questions
from shared.data.example import Example, Loaded
from shared.data.spider2 import read_spider2
from shared.data.sqale import read_sqale
from shared.errors import SetupError

CUSTOM = "custom"
SPIDER2 = "spider2"


@dataclass(frozen=True)
class Benchmark:
    """`layouts` are (questions, databases) paths below the data folder, tried in order; sqale: (queries, schemas).

    `score_results` holds two executed queries against each other; None where golds are tables. `source` says where
    it comes from, `published` how many questions and databases a whole copy has (None: not stated).
    """

    layouts: tuple[tuple[str, str], ...]
    source: str
    published: tuple[int, int] | None
    score_results: ScoreResults | None = bird.score_results


BENCHMARKS: Mapping[str, Benchmark] = {
    "bird": Benchmark(
        (
            ("bird/dev/dev.json", "bird/dev/dev_databases"),
            ("bird/dev_20240627/dev.json", "bird/dev_20240627/dev_databases"),
            ("bird_dev/dev.json", "bird_dev/dev_databases"),
        ),
        "dev.zip of https://bird-bench.github.io (unpack dev_databases.zip inside it too)",
        (1534, 11),
    ),
    "bird-mini": Benchmark(
        (
            ("bird/minidev/mini_dev_sqlite.json", "bird/minidev/dev_databases"),
            ("minidev/MINIDEV/mini_dev_sqlite.json", "minidev/MINIDEV/dev_databases"),
            ("bird_dev/mini_dev_sqlite.json", "bird_dev/dev_databases"),
        ),
        "minidev.zip of https://github.com/bird-bench/mini_dev",
        (500, 11),
    ),
    "spider": Benchmark(
        (
            ("spider/dev.json", "spider/database"),
            ("spider_data/dev.json", "spider_data/database"),
            ("spider_dev/dev.json", "spider_dev/database"),
        ),
        "spider_data.zip of https://yale-lily.github.io/spider",
        (1034, 20),
    ),
    SPIDER2: Benchmark(
        tuple(
            (f"{folder}/{name}", f"{folder}/{databases}")
            for folder in ("spider2-lite", "Spider2/spider2-lite", "spider2_lite")
            for name in ("spider2-lite.jsonl", "spider2-lite.local.jsonl")
            for databases in ("resource/databases/spider2-localdb", "databases")
        ),
        "the folder spider2-lite of https://github.com/xlang-ai/Spider2, and its local_sqlite.zip unpacked into "
        "resource/databases/spider2-localdb",
        (135, 30),
        None,
    ),
    "kaggledbqa": Benchmark(
        (("kaggledbqa/questions.json", "kaggledbqa/databases"),),
        "https://github.com/Chia-Hsuan-Lee/KaggleDBQA (examples/*.json joined into one questions.json)",
        (272, 8),
    ),
    "sqale": Benchmark(
        (("sqale/queries", "sqale/schemas"), ("sqale/sqale2_queries", "sqale/sqale2_schemas")),
        "`hf download --repo-type dataset trl-lab/sqale2_queries` and trl-lab/sqale2_schemas",
        None,
        sqale.score_results,
    ),
}


_NAMES = ", ".join(BENCHMARKS)


@dataclass(frozen=True)
class Questions:
    """What a run asks: the benchmark's name, its questions, and how many were left out of it, by reason."""

    benchmark: str
    examples: list[Example]
    left_out: Mapping[str, int]


def load_benchmark(config: EvalConfig) -> Questions:
    """The questions that the config names, filtered and limited. SetupError when there are none."""
    name = config.benchmark or CUSTOM
    if (config.questions is None) != (config.databases is None):
        raise SetupError("--questions and --databases belong together: give both")
    if config.questions is not None and config.databases is not None:
        loaded = _load(name, config.questions, config.databases, config)
    elif config.benchmark is None:
        raise SetupError(f"nothing to evaluate on: give --benchmark ({_NAMES}) or --questions and --databases")
    elif name not in BENCHMARKS:
        raise SetupError(f"unknown benchmark {name}: one of {_NAMES}, or give --questions and --databases")
    else:
        loaded = _load(name, *_locate(name, config.data), config)
    known = {example.db_id for example in loaded.examples}
    if missing := [db for db in config.db if db not in known]:
        raise SetupError(f"no question of {name} is on database {missing[0]}: check --db")
    if not loaded.examples:
        raise SetupError(f"{name} has no questions: check the file")
    examples, left_out = loaded.examples, dict(loaded.skipped)
    if config.engine == "gold" and (silent := sum(not example.gold_sql.strip() for example in examples)):
        left_out["without a gold query, which --engine gold would answer with"] = silent
        examples = [example for example in examples if example.gold_sql.strip()]
        if not examples:
            raise SetupError(f"no question of {name} here has a gold query: --engine gold has nothing to say")
    if config.limit is not None and config.limit < len(examples):
        left_out["beyond --limit"] = len(examples) - config.limit
    return Questions(name, examples[: config.limit], left_out)


def _load(name: str, questions: Path, databases: Path, config: EvalConfig) -> Loaded:
    if name == SPIDER2:
        return read_spider2(
            questions, databases, subset=config.subset, db_ids=config.db, present_only=config.present_only
        )
    if config.subset != "all":
        raise SetupError(f"--subset belongs to {SPIDER2}: {name} has none")
    if name != "sqale":
        return read_questions(
            questions,
            databases,
            name,
            db_ids=config.db,
            present_only=config.present_only,
            number_repeats=name == "bird-mini",
        )
    loaded = read_sqale(str(questions), str(databases), split=config.split, phrasing=config.phrasing)
    if not config.db:
        return loaded
    kept = [example for example in loaded.examples if example.db_id in config.db]
    return Loaded(kept, {**loaded.skipped, "on other databases": len(loaded.examples) - len(kept)})


def places(name: str, data: Path) -> list[tuple[Path, Path]]:
    """Where the questions and databases of a benchmark may be below `data`, the preferred place first."""
    return [(data / questions, data / databases) for questions, databases in BENCHMARKS[name].layouts]


def _locate(name: str, data: Path) -> tuple[Path, Path]:
    for questions, databases in places(name, data):
        if questions.exists() and databases.exists():
            return questions, databases
    questions, databases = places(name, data)[0]
    raise SetupError(f"benchmark {name} is not under {data}: put it at {questions} and {databases}, or give --data")
