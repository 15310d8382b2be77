"""Audit the gold queries of a benchmark, without any model: `python -m eval.audit --benchmark bird [--out DIR]`.

Every gold is executed as `eval.run` executes it (twice, and in the other orders that its SQL allows; see
`eval.goldbook`), and what its result hangs on is listed with the rule for it. Gold as prediction is scored too: that
is the ceiling of the benchmark on this machine. `eval.run` finds the results in the cache and does not execute
them again. The command writes `audit.json` and exits with 1 when some gold cannot judge an answer.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from eval.benchmarks import Questions, load_benchmark
from eval.config import EvalConfig
from eval.gold import EXCLUSION_RULE, RULES, SLOW_RULE, SLOW_SHARE, UNCHECKED_RULE, Gold
from eval.goldbook import Book
from eval.goldcache import GoldCache, default_folder
from eval.identity import data_sha256, own_versions
from eval.judge import open_book
from eval.progress import Progress
from eval.records import write_json
from eval.scorers.bird import UNDECODABLE_RULE
from eval.summary import TRIVIAL_RULE
from shared.cli import ArgumentParser, run_main
from shared.config import build_config
from shared.files import check_output
from shared.sql.sandbox import Sandbox

AUDIT = "audit.json"
_LISTED = 12
_TRIVIAL = ("empty", "one_null", "one_zero")


def audit(config: EvalConfig) -> dict[str, Any]:
    """The audit of the benchmark that `config` names, as JSON. SetupError for anything the user can mend."""
    questions = load_benchmark(config)
    with Sandbox(workers=config.workers) as sandbox, Progress() as progress:
        cache = GoldCache(config.gold_cache or default_folder(), progress.note) if config.cache else None
        book = open_book(config, questions.benchmark, sandbox, cache)
        with progress.stage("gold queries", book.count(questions.examples)) as stage:
            book.prepare(questions.examples, config.workers, stage.advance)
        return _figures(config, questions, book)


def _figures(config: EvalConfig, questions: Questions, book: Book) -> dict[str, Any]:
    entries = []
    for example in questions.examples:
        gold, seconds = book.gold(example), book.seconds(example)
        slow = seconds is not None and seconds > SLOW_SHARE * config.gold_seconds
        entries.append(
            {
                "question_id": example.question_id,
                "db_id": example.db_id,
                **gold.to_json(),
                "slow": slow,
                "seconds": None if seconds is None else round(seconds, 4),
            }
        )
    golds = [book.gold(example) for example in questions.examples]
    flagged = {flag: [e["question_id"] for e in entries if flag in e["flags"]] for flag in RULES}
    usable = [gold for gold in golds if gold.usable]
    return {
        "benchmark": questions.benchmark,
        "data_sha256": data_sha256(questions.benchmark, questions.examples),
        "versions": own_versions(),
        "gold_seconds": config.gold_seconds,
        "left_out": dict(questions.left_out),
        "questions": len(entries),
        "distinct_golds": book.count(questions.examples),
        "usable": len(usable),
        "flagged": {flag: ids for flag, ids in flagged.items() if ids},
        "slow": [e["question_id"] for e in entries if e["slow"]],
        "ties_unchecked": [e["question_id"] for e in entries if not e["ties_checked"]],
        "shapes": {shape: sum(gold.shape == shape for gold in usable) for shape in ("rows", *_TRIVIAL)},
        "undecodable": sum(gold.undecodable for gold in usable),
        "ceiling": _ceiling(golds),
        "gold_queries": _gold_queries(questions),
        "rules": {
            **{flag: rule.doc for flag, rule in RULES.items()},
            "slow": SLOW_RULE,
            "ties_unchecked": UNCHECKED_RULE,
            "trivial": TRIVIAL_RULE,
            "undecodable": UNDECODABLE_RULE,
            "excluded": EXCLUSION_RULE,
        },
        "golds": entries,
    }


def _ceiling(golds: Sequence[Gold]) -> dict[str, Any]:
    """What gold as prediction scores, its second run held against its first: here, over the usable golds; as upstream
    counts, over all golds, where one that fails or returns text which is not UTF-8 scores 0."""
    usable = [gold for gold in golds if gold.usable]
    return {
        "n": len(usable),
        "official": sum(gold.repeats for gold in usable) / len(usable) if usable else None,
        "n_upstream": len(golds),
        "upstream": sum(gold.repeats and not gold.undecodable for gold in usable) / len(golds),
    }


def _gold_queries(questions: Questions) -> int:
    return sum(bool(example.gold_sql.strip()) for example in questions.examples)


def render(figures: Mapping[str, Any], console: Console) -> None:
    """The audit as text."""
    n, ceiling = figures["questions"], figures["ceiling"]
    table = Table(title=f"{figures['benchmark']}: {n} questions", title_justify="left")
    for name, justify in (
        ("", "left"),
        ("questions", "right"),
        ("share", "right"),
        ("verdict", "left"),
        ("rule", "left"),
    ):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    plain = n - len(set().union(*figures["flagged"].values(), figures["slow"]))
    table.add_row("ok", str(plain), f"{plain / n:.1%}", "counts", "nothing to say")
    for flag, ids in figures["flagged"].items():
        verdict = "left out" if RULES[flag].fails else "counts"
        table.add_row(flag, str(len(ids)), f"{len(ids) / n:.1%}", verdict, RULES[flag].doc)
    for name, rule in (("slow", SLOW_RULE), ("ties_unchecked", UNCHECKED_RULE)):
        if ids := figures[name]:
            table.add_row(name, str(len(ids)), f"{len(ids) / n:.1%}", "counts", rule.partition(": ")[2])
    console.print(table)
    for name, ids in {
        **figures["flagged"],
        "slow": figures["slow"],
        "ties_unchecked": figures["ties_unchecked"],
    }.items():
        if ids:
            more = f" … and {len(ids) - _LISTED} more" if len(ids) > _LISTED else ""
            console.print(f"{name}: {', '.join(ids[:_LISTED])}{more}", markup=False, soft_wrap=True)
    for reason, count in figures["left_out"].items():
        console.print(f"{count} questions left out: {reason}", markup=False, soft_wrap=True)
    shapes = figures["shapes"]
    trivial = ", ".join(f"{shapes[shape]} {shape.replace('_', ' ')}" for shape in _TRIVIAL)
    console.print(
        f"{figures['distinct_golds']} distinct golds; of {figures['usable']} usable: {trivial}; "
        f"{figures['undecodable']} return text that is not UTF-8",
        markup=False,
        soft_wrap=True,
    )
    if mismatched := figures["flagged"].get("gold_mismatch"):
        passing = figures["gold_queries"] - len(mismatched)
        console.print(
            f"gold queries that pass the gold tables: {passing} of {figures['gold_queries']}",
            markup=False,
            soft_wrap=True,
        )
    official = "-" if ceiling["official"] is None else f"{ceiling['official']:.4f}"
    console.print(
        f"gold as prediction: {official} over the {ceiling['n']} usable golds; "
        f"{ceiling['upstream']:.4f} over all {ceiling['n_upstream']} as upstream counts",
        markup=False,
        soft_wrap=True,
    )


def parse_arguments(argv: Sequence[str]) -> EvalConfig:
    """The config of a command line: the part of `eval.run`'s that golds depend on."""
    parser = ArgumentParser(prog="python -m eval.audit", description="Audit the gold queries of a benchmark.")
    parser.add_argument("--benchmark", help="bird, bird-mini, spider, spider2, kaggledbqa, sqale")
    parser.add_argument("--data", help="folder that holds the benchmarks (default: data)")
    parser.add_argument("--questions", help="questions JSON of your own (Spider or BIRD keys)")
    parser.add_argument("--databases", help="folder with <db_id>/<db_id>.sqlite for --questions")
    parser.add_argument("--db", action="append", metavar="DB_ID", help="only questions on this database (repeatable)")
    parser.add_argument("--present-only", action="store_true", default=None, help="leave out what the copy lacks")
    parser.add_argument("--subset", help="of spider2: all (default) or guess87")
    parser.add_argument("--split", help="split of sqale (default test)")
    parser.add_argument("--phrasing", help="phrasing of sqale's questions (default verbose)")
    parser.add_argument("--limit", type=int, help="only the first N questions")
    parser.add_argument("--gold-seconds", type=float, help="time limit of each run of a gold query (default 30)")
    parser.add_argument("--workers", type=int, help="processes that execute SQL (default 2)")
    parser.add_argument("--gold-cache", help="where gold results are kept (default ~/.cache/execplan/gold)")
    parser.add_argument("--no-cache", dest="cache", action="store_false", default=None, help="execute every gold again")
    parser.add_argument("--out", help="folder for audit.json (default: runs/audit-BENCHMARK)")
    given = {key: value for key, value in vars(parser.parse_args(argv)).items() if value is not None}
    return build_config(given, EvalConfig, "command line")


def main(argv: Sequence[str]) -> int:
    """The command line. Exit code 1 when some gold cannot judge an answer."""
    config = parse_arguments(argv)
    if config.out is not None:
        check_output(config.out / AUDIT, "--out")
    figures = audit(config)
    folder = config.out or Path("runs") / f"audit-{figures['benchmark']}"
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / AUDIT, figures)
    console = Console(file=sys.stdout, highlight=False)
    render(figures, console)
    console.print(f"written to {folder / AUDIT}", markup=False, soft_wrap=True)
    return 1 if figures["usable"] < figures["questions"] else 0


if __name__ == "__main__":
    run_main(lambda: main(sys.argv[1:]))
