"""What a record keeps of two executed queries: their first rows, and in which way the rows differ.

A verdict says "different sets of rows". A reader wants to see the rows, and the failure taxonomy wants to
know whether rows are missing, surplus, or merely in another order. Both are small here, whatever the results' size.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from shared.sql.sandbox import QueryResult

SHOWN_ROWS = 8
SHOWN_COLUMNS = 20
CELL_CHARACTERS = 120
# Columns are matched by content only up to this size: it says how an answer failed, never whether.
_MATCHED_CELLS = 200_000


def shown_results(pred: QueryResult | None, gold: QueryResult | None) -> dict[str, Any]:
    """The part of a record that this module makes: `pred` and `gold` as `preview`, None for one that has no rows to
    show because it failed or was not given, and `difference` as `row_difference` where both ran."""
    pred, gold = (result if result is not None and result.outcome == "ok" else None for result in (pred, gold))
    return {
        "pred": None if pred is None else preview(pred),
        "gold": None if gold is None else preview(gold),
        "difference": None if pred is None or gold is None else row_difference(pred, gold),
    }


def preview(result: QueryResult) -> dict[str, Any]:
    """The head of a result as JSON: column names, the first rows as text (NULL is None), and the full size."""
    return {
        "columns": [_cut(name) for name in result.columns[:SHOWN_COLUMNS]],
        "rows": [[_cell(cell) for cell in row[:SHOWN_COLUMNS]] for row in result.rows[:SHOWN_ROWS]],
        "n_rows": len(result.rows),
        "n_columns": len(result.columns),
    }


def _cell(cell: Any) -> str | None:
    if cell is None:
        return None
    if isinstance(cell, bytes):
        return _cut(f"x'{cell[:CELL_CHARACTERS].hex()}'")
    return _cut(str(cell))


def _cut(text: str) -> str:
    return text if len(text) <= CELL_CHARACTERS else text[: CELL_CHARACTERS - 1] + "…"


def row_difference(pred: QueryResult, gold: QueryResult) -> dict[str, Any]:
    """How the rows of two results that both ran differ, as JSON.

    - `missing`, `surplus`: distinct gold rows that the answer lacks, distinct answer rows that gold lacks;
      `gold_distinct`: how many distinct rows gold has.
    - `same_bag`: the rows are the same with their multiplicities, so at most their order differs.
    - `gold_columns_found`: every gold column is there as a column of the answer (same cells, each taken once, rows
      sorted), so the answer has its columns in another order or too many of them. None when too large to tell.
    """
    if pred.rows == gold.rows:
        distinct = len(set(gold.rows))
        return {"missing": 0, "surplus": 0, "gold_distinct": distinct, "same_bag": True, "gold_columns_found": True}
    pred_rows, gold_rows = [list(map(tuple, result.rows)) for result in (pred, gold)]
    pred_set, gold_set = set(pred_rows), set(gold_rows)
    return {
        "missing": len(gold_set - pred_set),
        "surplus": len(pred_set - gold_set),
        "gold_distinct": len(gold_set),
        "same_bag": Counter(pred_rows) == Counter(gold_rows),
        "gold_columns_found": _columns_found(pred_rows, gold_rows),
    }


def _columns_found(pred: Sequence[tuple[Any, ...]], gold: Sequence[tuple[Any, ...]]) -> bool | None:
    if len(pred) != len(gold) or not gold:
        return False
    if len(gold) * (len(pred[0]) + len(gold[0])) > _MATCHED_CELLS:
        return None
    # Columns with the same cells are interchangeable, so counting them is a matching.
    have, want = (
        Counter(frozenset(Counter(column).items()) for column in zip(*rows, strict=True)) for rows in (pred, gold)
    )
    return want <= have
