"""Spider 2.0-lite's comparator: a predicted table against gold CSV files, on the local-SQLite questions.

Upstream never runs a gold query: it writes the prediction's rows to CSV, reads that back beside the gold
CSVs with pandas' defaults, and compares the two views. So pandas is the specification of the typing
("007" is 7, "NA" is missing, one word turns a whole column to text), and it is what reads both sides here.
pandas 2 and 3 differ in two corners (integers beyond 64 bits, the last bit of some floats); this
project pins the one that upstream's published figures were made with.

What the comparison does to a gold table, restricted to its `condition_cols` first:

1. Each table becomes one block of values: all-numeric columns with a float among them are all floats.
2. A missing cell is the integer 0, on both sides.
3. A gold column matches a predicted column of the same length when all cells match pairwise: two numbers
   (booleans included) within max(0.01, 1e-9 of the larger), anything else by equality.
4. With `ignore_order` both columns are sorted first, each by itself, by the text of its cells.
5. 1 when every gold column matches some predicted column. Names, column order, surplus predicted columns
   and the pairing of cells into rows do not count.
"""

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from eval.scorers.base import Scores, Verdict
from shared.data.spider2 import LETTERS, gold_files
from shared.errors import SetupError
from shared.sql.sandbox import BadText, QueryResult

if TYPE_CHECKING:
    import pandas as pd

RULE = "spider2"
_ABS_TOLERANCE, _REL_TOLERANCE = 0.01, 1e-9
_CHUNK_ROWS = 500
_FENCE = re.compile(r"```sql\n(.*?)\n```", re.DOTALL)

ConditionCols = Any  # as the evaluation file has it: None, a number, a list, a list of lists


@dataclass(frozen=True)
class GoldTables:
    """One question's gold: CSV texts by name ("" is the base file, else the letter after "_")."""

    csvs: Mapping[str, str]
    condition_cols: ConditionCols = None
    ignore_order: bool = True


def load_gold(folder: Path, question_id: str, condition_cols: ConditionCols, ignore_order: bool) -> GoldTables:
    """`<id>.csv` and `<id>_<letter>.csv` of `folder`. Raises SetupError when there is none."""
    csvs = {name: path.read_text(encoding="utf-8") for name, path in gold_files(folder, question_id).items()}
    return GoldTables(csvs, condition_cols, ignore_order)


def extract_sql(text: str) -> str:
    """The first ```sql block (lower-case tag, fences on lines of their own), stripped; else the text as it is."""
    match = _FENCE.search(text)
    return match.group(1).strip() if match else text


def result_to_csv(result: QueryResult) -> str:
    """The CSV that upstream would write: chunks of 500 rows, each typed by itself, header once.

    The chunking shows: a chunk in which an integer column has a NULL is written with decimals.
    """
    pd = _pandas()
    out = io.StringIO()
    columns = list(result.columns)
    for start in range(0, max(len(result.rows), 1), _CHUNK_ROWS):
        chunk = pd.DataFrame(result.rows[start : start + _CHUNK_ROWS], columns=columns)
        chunk.to_csv(out, index=False, header=start == 0)
    return out.getvalue()


def count_rows(csv: str) -> int:
    """How many rows a gold CSV has as pandas reads it. SetupError when it can't be read at all."""
    _pandas()
    try:
        return len(_read(csv))
    except Exception as error:  # pandas raises many kinds
        raise SetupError(f"a gold table cannot be read ({error}): download the gold results again") from None


def score_csv(pred_csv: str, gold: GoldTables) -> Verdict:
    """Judge a predicted CSV. An unreadable prediction, gold or column restriction scores 0, as upstream."""
    _pandas()  # a missing library must not pass for an unreadable table
    try:
        pred = _columns(_read(pred_csv))
    except Exception as error:  # pandas raises many kinds; upstream turns every one of them into 0
        return Verdict(RULE, 0.0, f"prediction unreadable: {error}")
    names = _gold_names(gold.csvs)
    if not names:
        return Verdict(RULE, 0.0, "no gold file")
    try:
        frames = [_read(gold.csvs[name]) for name in names]
        restrictions = _restrictions(gold.condition_cols, names)
        for name, frame, restrict in zip(names, frames, restrictions, strict=False):
            if _matches(pred, _columns(_restricted(frame, restrict)), gold.ignore_order):
                return Verdict(RULE, 1.0, f"matches gold {name or 'table'}")
        if len(restrictions) < len(names):
            raise IndexError(f"condition_cols has {len(restrictions)} entries for {len(names)} gold files")
    except Exception as error:  # upstream: any exception while comparing is a 0
        return Verdict(RULE, 0.0, f"comparison failed: {error}")
    return Verdict(RULE, 0.0, "matches no gold table")


def score_result(pred: QueryResult | None, gold: GoldTables) -> Scores:
    """Judge an executed answer (None: nothing was answered). A result without columns is an error."""
    if pred is None:
        return Scores(Verdict(RULE, 0.0, "no answer"), None, None, "no_answer")
    reason = None
    if pred.outcome != "ok":
        reason = f"answer: {pred.outcome}: {pred.message}"
    elif pred.truncated:
        reason = "answer: limit: the result was cut"
    elif not pred.columns:
        reason = "answer: returns no columns"
    elif any(isinstance(cell, BadText) for row in pred.rows for cell in row):
        reason = "answer: undecodable text"
    verdict = Verdict(RULE, 0.0, reason) if reason else score_csv(result_to_csv(pred), gold)
    return Scores(verdict, None, None, pred.outcome)


def _pandas() -> ModuleType:
    """pandas, imported on first use: it takes longer to import than everything else here."""
    try:
        return import_module("pandas")
    except ImportError as error:
        raise SetupError("Spider 2.0 is scored with pandas: pip install 'execplan[eval]'") from error


def _read(text: str) -> "pd.DataFrame":
    return _pandas().read_csv(io.StringIO(text.removeprefix("\ufeff"), newline=""))


def _columns(frame: "pd.DataFrame") -> list[list[Any]]:
    """Steps 1 and 2: one block of values, column by column, missing cells as integer 0."""
    block = frame.to_numpy()
    missing = _pandas().isna(block)
    return [
        [0 if gone else cell for cell, gone in zip(column, holes, strict=True)]
        for column, holes in zip(block.T.tolist(), missing.T.tolist(), strict=True)
    ]


def _is_number(cell: Any) -> bool:
    return isinstance(cell, int | float)


def _cell_matches(a: Any, b: Any) -> bool:
    if _is_number(a) and _is_number(b):
        return math.isclose(float(a), float(b), rel_tol=_REL_TOLERANCE, abs_tol=_ABS_TOLERANCE)
    return bool(a == b)


def _sorted_by_text(column: list[Any]) -> list[Any]:
    return sorted(column, key=lambda cell: (str(cell), _is_number(cell)))


def _matches(pred: list[list[Any]], gold: list[list[Any]], ignore_order: bool) -> bool:
    """Steps 3 to 5."""
    if ignore_order:
        pred, gold = [_sorted_by_text(c) for c in pred], [_sorted_by_text(c) for c in gold]

    def same(a: list[Any], b: list[Any]) -> bool:
        return len(a) == len(b) and all(map(_cell_matches, a, b))

    return all(any(same(column, candidate) for candidate in pred) for column in gold)


def _gold_names(csvs: Mapping[str, str]) -> list[str]:
    """The gold files upstream finds: the base file alone where it exists, else one-letter suffixes in order."""
    return [""] if "" in csvs else sorted(name for name in csvs if name in LETTERS)


def _restrictions(condition_cols: ConditionCols, names: Sequence[str]) -> list[Any]:
    """One column restriction a gold file, with upstream's quirk for a single suffixed file.

    A base file takes `condition_cols` whole. Suffixed files: nothing means all columns; a flat list is
    shared by several files, but with ONE file it is read by position, so only its first element counts
    (and a first element of 0 is falsy: every column). A list of lists goes by position and may be too short.
    """
    if list(names) == [""]:
        return [condition_cols]
    if condition_cols in (None, [], [[]], [None]):
        return [[]] * len(names)
    if len(names) > 1 and not all(isinstance(entry, list) for entry in condition_cols):
        return [condition_cols] * len(names)
    return list(condition_cols)


def _restricted(frame: "pd.DataFrame", restrict: Any) -> "pd.DataFrame":
    if not restrict:
        return frame
    return frame.iloc[:, restrict if isinstance(restrict, list) else [restrict]]
