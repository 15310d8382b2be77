"""Run a file of scoring cases: `python -m eval.check_cases FILE.jsonl [--parity upstream]`.

One JSON object a line: id, comparator (bird_official, bird_strict, bird_soft_f1, spider2), input,
expected, note, meta. By default prediction and gold run isolated and read-only, and the expected score
is `meta.isolated_readonly` where a case has one; `--parity upstream` runs them as the upstream programs
do, and expects `expected`. Prints the misses and agreed/total; exit code 1 on any miss.
"""

import json
import sqlite3
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from eval.scorers import bird, spider2
from eval.scorers.base import Scores
from eval.scorers.parity import UpstreamRunner
from shared.cli import ArgumentParser, run_main
from shared.database import Database
from shared.errors import SetupError
from shared.sql.sandbox import Limits, QueryResult, Sandbox

Parity = Literal["isolated", "upstream"]
COMPARATORS = (bird.OFFICIAL, bird.STRICT, bird.SOFT_F1, spider2.RULE)
SPIDER2_SECONDS = 30.0
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Case:
    """One line of a case file."""

    id: str
    comparator: str
    input: dict[str, Any]
    expected: float
    note: str
    meta: dict[str, Any]
    isolated: float | None = None

    @property
    def pair(self) -> str:
        """Identity of what is executed: cases that differ only in their comparator share it."""
        return json.dumps(self.input, sort_keys=True)

    def wanted(self, parity: Parity) -> float:
        """The score that this way of executing must give (`meta.by_pandas`: under the pandas at hand)."""
        if "by_pandas" in self.meta:
            major = version("pandas").split(".")[0]
            return next(
                (float(v) for k, v in self.meta["by_pandas"].items() if k.startswith(f"{major}.")), self.expected
            )
        return self.expected if parity == "upstream" or self.isolated is None else self.isolated


@dataclass(frozen=True)
class Miss:
    """A case whose score is not the wanted one."""

    case: Case
    wanted: float
    got: float
    reason: str


def load_cases(path: Path) -> list[Case]:
    """Read a case file. Raises SetupError naming the file and line of anything that is no case."""
    if not path.is_file():
        raise SetupError(f"case file {path} does not exist: give a JSONL file of scoring cases")
    cases = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
            expected, meta = float(data["expected"]), data.get("meta", {})
            case = Case(data["id"], data["comparator"], data["input"], expected, data.get("note", ""), meta)
        except (ValueError, KeyError, TypeError) as error:
            raise SetupError(f"{path}:{number} is not a scoring case ({error!r}): mend or remove the line") from error
        if case.comparator not in COMPARATORS:
            raise SetupError(
                f"{path}:{number}: unknown comparator {case.comparator!r}: one of {', '.join(COMPARATORS)}"
            )
        cases.append(case)
    if not cases:
        raise SetupError(f"case file {path} is empty: give a JSONL file of scoring cases")
    return _with_isolated(cases)


def _with_isolated(cases: list[Case]) -> list[Case]:
    """Fill in what isolated execution must give, which only official cases state (`meta.isolated_readonly`).

    Where isolation turns a pair's official score from 1 to 0, its strict and soft-F1 scores turn to 0 as
    well: the prediction was refused, or no longer hides what gold reads.
    """
    official = {case.pair: case for case in cases if "isolated_readonly" in case.meta}

    def fill(case: Case) -> Case:
        twin = official.get(case.pair)
        if twin is None:
            return case
        isolated = float(twin.meta["isolated_readonly"])
        if case.comparator == bird.OFFICIAL:
            return replace(case, isolated=isolated)
        return replace(case, isolated=0.0) if isolated < twin.expected else case

    return [fill(case) for case in cases]


class CaseRunner:
    """Executes cases, each over a database file of its own; cases that share an input run it once."""

    def __init__(self, sandbox: Sandbox, upstream: UpstreamRunner, folder: Path, parity: Parity):
        self._sandbox, self._upstream, self._folder, self._parity = sandbox, upstream, folder, parity
        self._databases: dict[str, Path] = {}
        self._pairs: dict[str, Scores] = {}

    def score(self, case: Case) -> tuple[float, str]:
        """The case's score under its comparator, and the reason."""
        if case.comparator == spider2.RULE:
            verdict = self._spider2(case.input)
        else:
            scores = self._pair(case)
            chosen = {bird.OFFICIAL: scores.official, bird.STRICT: scores.strict, bird.SOFT_F1: scores.soft_f1}
            verdict = chosen[case.comparator]
        assert verdict is not None
        return verdict.score, verdict.reason

    def _query(self, path: Path, sql: str, seconds: float) -> QueryResult:
        """One isolated statement. What the sandbox refuses (it runs queries only) goes to a plain read-only connection.

        There a write fails as it must, while BEGIN or a temporary table gives no rows, as in the cases'
        reference scores. In an evaluation a refused answer simply scores 0.
        """
        result = bird.execute(self._sandbox, Database(path.stem, path=path), sql, Limits(seconds=seconds))
        return self._upstream.readonly(path, sql, seconds) if result.outcome == "refused" else result

    def _database(self, setup_sql: str) -> Path:
        if setup_sql not in self._databases:
            path = self._folder / f"case{len(self._databases)}.sqlite"
            connection = sqlite3.connect(path)
            try:
                connection.executescript(setup_sql)
                connection.commit()
                if path.stat().st_size == 0:  # no file at all to a sandbox; this writes an empty database
                    connection.execute("PRAGMA user_version = 0")
            finally:
                connection.close()
            self._databases[setup_sql] = path
        return self._databases[setup_sql]

    def _pair(self, case: Case) -> Scores:
        key, data = case.pair, case.input
        if key not in self._pairs:
            path, seconds = self._database(data["setup_sql"]), float(data.get("timeout_s", 30.0))
            if self._parity == "upstream":
                scores = self._upstream.bird(path, data["pred_sql"], data["gold_sql"], seconds)
            else:
                pred, gold = (self._query(path, data[key], seconds) for key in ("pred_sql", "gold_sql"))
                scores = bird.score_results(pred, gold, undecodable="fail")
            self._pairs[key] = scores
        return self._pairs[key]

    def _spider2(self, data: dict[str, Any]) -> Any:
        csvs = dict(zip(data["gold_names"], data["gold_csvs"], strict=True))
        gold = spider2.GoldTables(csvs, data["condition_cols"], data["ignore_order"])
        if data["kind"] == "csv":
            return spider2.score_csv(data["pred_csv"], gold)
        path, sql = self._database(data["setup_sql"]), spider2.extract_sql(data["pred_text"])
        run = self._upstream.spider2 if self._parity == "upstream" else self._query
        result = run(path, sql, SPIDER2_SECONDS)
        return spider2.score_result(result, gold).official


def check(cases: list[Case], parity: Parity = "isolated") -> Iterator[Miss | None]:
    """Run the cases in order, yielding None for each that agrees and a Miss for each that does not."""
    with (
        tempfile.TemporaryDirectory(prefix="execplan-cases-") as folder,
        Sandbox() as sandbox,
        UpstreamRunner() as upstream,
    ):
        runner = CaseRunner(sandbox, upstream, Path(folder), parity)
        for case in cases:
            got, reason = runner.score(case)
            wanted = case.wanted(parity)
            yield None if abs(got - wanted) <= TOLERANCE else Miss(case, wanted, got, reason)


def main() -> int:
    """The command line."""
    parser = ArgumentParser(prog="python -m eval.check_cases", description="Run a file of scoring cases.")
    parser.add_argument("file", type=Path, help="JSONL, one case a line")
    parser.add_argument(
        "--parity", choices=("isolated", "upstream"), default="isolated", help="how queries are executed"
    )
    arguments = parser.parse_args()
    cases = load_cases(arguments.file)
    misses = [outcome for outcome in check(cases, arguments.parity) if outcome is not None]
    for miss in misses:
        case, note = miss.case, f" [{miss.case.note}]" if miss.case.note else ""
        print(f"MISS {case.id} {case.comparator}: expected {miss.wanted:g}, got {miss.got:g}: {miss.reason}{note}")
    print(f"{len(cases) - len(misses)}/{len(cases)} agreed ({arguments.parity})")
    return 1 if misses else 0


if __name__ == "__main__":
    run_main(main)
