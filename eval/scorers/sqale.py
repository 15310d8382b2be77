"""SQaLe: BIRD's rules, unchanged, under SQaLe's name.

No execution scorer is published with the data set. Two cautions belong to any figure on it: rows that
carry DDL alone give empty results, on which set equality is vacuous (the summary reports the share of
empty golds, and accuracy without them); and reference SQL was validated with several statements allowed,
while the rule here takes exactly one, so golds that fail for it are listed, not charged.
"""

from eval.scorers import bird
from eval.scorers.base import Scores
from shared.sql.sandbox import QueryResult

RULES = ("sqale_official", "sqale_strict", "sqale_soft_f1", "sqale_fair")


def score_results(
    pred: QueryResult | None,
    gold: QueryResult,
    *,
    undecodable: bird.Undecodable = "bytes",
    ordered: bool | None = None,
) -> Scores:
    """`eval.scorers.bird.score_results`, with verdicts that name SQaLe."""
    return bird.score_results(pred, gold, undecodable=undecodable, ordered=ordered, rules=RULES)
