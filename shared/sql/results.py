"""Compare two query results: the one place that decides whether rows are equal.

A result is a sequence of rows, a row a sequence of cells, a cell what SQLite hands over: int, float,
str, bytes or None. Cells compare as Python compares them, which is what the published evaluators do:
numbers across types and exactly (1 == 1.0, 0.0 == -0.0, 2**53 + 1 != 2.0**53), text by code point
(no trimming, no folding, no Unicode normalisation), text never equals a number, bytes never equal text,
None equals only None. There is no tolerance but in `fair_equal`. NaN cannot come out of SQLite (it is stored as NULL).

Nothing here executes SQL: whether a query failed is the caller's business (a failed query has no rows,
and must not be passed off as an empty result). Text that is not valid UTF-8 arrives from the sandbox as
a value of its own kind, which equals another such value with the same bytes and nothing else.
"""

import hashlib
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

Row = Sequence[Any]


def official_equal(pred: Iterable[Row], gold: Iterable[Row]) -> bool:
    """BIRD's rule: the *sets* of rows are equal. Row order and duplicates are ignored.

    Columns count by position; their names are never looked at. Two empty results are equal whatever
    their widths; one NULL row differs from no rows. SQLite orders rows of mixed types itself, so
    nothing here sorts.

    >>> official_equal([("b",), ("a",), ("a",)], [("a",), ("b",)])
    True
    >>> official_equal([("a", 1)], [(1, "a")])
    False
    """
    return set(map(tuple, pred)) == set(map(tuple, gold))


def strict_equal(pred: Iterable[Row], gold: Iterable[Row]) -> bool:
    """The *lists* of rows are equal: order and duplicates count. Implies `official_equal`.

    Where the gold query has no ORDER BY this penalises an order that SQLite was free to choose, so it
    is reported beside the official verdict, never instead of it.

    >>> strict_equal([(1,), (2,)], [(2,), (1,)])
    False
    """
    return list(map(tuple, pred)) == list(map(tuple, gold))


def fair_equal(pred: Iterable[Row], gold: Iterable[Row], *, ordered: bool) -> bool:
    """Duplicates count always, order only where gold asks for one, and numbers up to float noise.

    With `ordered` (the gold query has an ORDER BY) the lists of rows are equal, without it the multisets.
    A number with a fraction counts with 12 significant digits: summing in another order changes those behind.

    >>> fair_equal([(2,), (1,)], [(1,), (2,)], ordered=False), fair_equal([(0.1 + 0.2,)], [(0.3,)], ordered=True)
    (True, True)
    """
    a, b = rounded(pred), rounded(gold)
    return a == b if ordered else Counter(a) == Counter(b)


def rounded(rows: Iterable[Row]) -> list[tuple[Any, ...]]:
    """The rows, with numbers that have a fraction cut to 12 significant digits. Whole numbers stay exact."""

    def cut(cell: Any) -> Any:
        return float(f"{cell:.12g}") if type(cell) is float and not cell.is_integer() else cell

    return [tuple(map(cut, row)) for row in rows]


def set_digest(rows: Iterable[Row]) -> str:
    """sha256 (hex) of the *set* of rows: equal exactly for results that `official_equal` calls equal.

    >>> set_digest([(1,), (1.0,)]) == set_digest([(True,)])
    True
    """
    digest = hashlib.sha256()
    for row in sorted({_row_text(row) for row in rows}):
        digest.update(row.encode("utf-8", "surrogatepass") + b"\x1e")
    return digest.hexdigest()


def _row_text(row: Row) -> str:
    """A text for each row, the same for equal rows only: lengths keep cells apart, whatever they hold."""
    cells = [_cell_text(cell) for cell in row]
    return "".join(f"{len(cell)}:{cell}" for cell in cells)


def _cell_text(cell: Any) -> str:
    if cell is None:
        return "n"
    if isinstance(cell, bytes):
        return f"b{cell.hex()}"
    if isinstance(cell, str):
        raw = getattr(cell, "raw", None)  # TEXT that is not UTF-8
        return f"s{cell}" if raw is None else f"t{raw.hex()}"
    return f"i{int(cell)}" if isinstance(cell, int) or cell.is_integer() else f"f{cell!r}"


def soft_f1(pred: Iterable[Row], gold: Iterable[Row]) -> float:
    """BIRD mini-dev's soft F1, in [0, 1], quirks included. Not a training signal: it can be gamed.

    Duplicate rows are dropped (first occurrence kept), then the i-th predicted row is held against the
    i-th gold row of width w:

        TP += |cells of pred found anywhere in the gold row| / w
        FP += |cells of pred not found| / w
        FN += |cells of gold not found in the pred row| / w

    A gold row without partner adds 1 to FN, a surplus predicted row 1 to FP. F1 is the harmonic mean of
    TP / (TP + FP) and TP / (TP + FN), 0 where undefined, and 1 when both results are empty. So swapped
    columns score 1, a cell repeated in a predicted row counts each time, and a reversed list may score near 0.
    """
    pred_rows = list(dict.fromkeys(map(tuple, pred)))
    gold_rows = list(dict.fromkeys(map(tuple, gold)))
    if not pred_rows and not gold_rows:
        return 1.0
    tp = fp = fn = 0.0
    for pred_row, gold_row in zip(pred_rows, gold_rows, strict=False):
        width = len(gold_row)
        gold_cells, pred_cells = set(gold_row), set(pred_row)
        found = sum(cell in gold_cells for cell in pred_row)
        tp += found / width
        fp += (len(pred_row) - found) / width
        fn += sum(cell not in pred_cells for cell in gold_row) / width
    fn += max(len(gold_rows) - len(pred_rows), 0)
    fp += max(len(pred_rows) - len(gold_rows), 0)
    precision = tp / (tp + fp) if tp + fp else 0.0
    recall = tp / (tp + fn) if tp + fn else 0.0
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def multiset_f1(pred: Iterable[Hashable], gold: Iterable[Hashable]) -> float:
    """F1 of two multisets: 2 |P & G| / (|P| + |G|), where & takes the smaller count of each item.

    In [0, 1]; 1 exactly when the multisets are equal (two empty ones included), 0 when nothing is
    shared. A duplicate in the prediction costs precision, one missing costs recall.
    """
    pred_counts, gold_counts = Counter(pred), Counter(gold)
    total = pred_counts.total() + gold_counts.total()
    if total == 0:
        return 1.0
    return 2 * (pred_counts & gold_counts).total() / total


def multiset_row_f1(pred: Iterable[Row], gold: Iterable[Row]) -> float:
    """F1 over whole rows as a multiset: the partial credit of the training reward.

    >>> multiset_row_f1([(1,), (1,), (2,)], [(1,), (2,), (3,)])
    0.6666666666666666
    """
    return multiset_f1(map(tuple, pred), map(tuple, gold))


def multiset_cell_f1(pred: Iterable[Row], gold: Iterable[Row]) -> float:
    """F1 over the cells of all rows as one multiset; rows and columns are not looked at.

    More forgiving than `multiset_row_f1`: a surplus or swapped column still earns credit for its cells.

    >>> multiset_cell_f1([("a", 1)], [("a",)])
    0.6666666666666666
    """
    return multiset_f1((cell for row in pred for cell in row), (cell for row in gold for cell in row))
