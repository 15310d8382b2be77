"""The results of a model card: evaluation runs of one model as tables, and what they show against other models' runs.

Everything is read off finished run folders. A run of other weights than the card's is refused, so that no figure can
stand under the wrong name.
"""

from collections.abc import Sequence
from typing import Any

from eval.breakdown import accuracies, by_difficulty
from eval.compare import compare
from eval.compare_text import VerdictName, verdict_name
from eval.pairing import Run, question_scores
from eval.stats import holm
from eval.tables import Row, Table, number, p_value, percent, points, to_markdown
from eval.voting import score_interval
from shared.errors import SetupError
from shared.text import model_name
from shared.tools.protocol import PROMPT_SHA256

_SCORES = (
    "official: the benchmark's own rule. strict: order and duplicates count as well. submitted: answers handed in by "
    "submit_sql. truncated: episodes that a token limit cut. n counts the questions with a verdict; the others are "
    "charged to nobody."
)
_COMPARED = (
    "Paired on the question; the difference is this model minus the other one, with a bootstrap interval over "
    "questions; p is McNemar's exact test, Holm p is adjusted for all rows. A true difference below the detectable one "
    "would usually stay unseen at this n."
)
_VERDICTS: dict[VerdictName, str] = {
    "identical": "the same on every question",
    "b_better": "this model is better",
    "a_better": "this model is worse",
    "not_shown": "no difference shown",
    "cannot_show": "could not be shown at this n",
}


def results_markdown(runs: Sequence[Run], baselines: Sequence[Run], sha256: str) -> str:
    """Scores of `runs`, which must be of the model with this `eval.models.model_sha256`, and comparisons with others.

    Each baseline is compared with every run over the same questions in the same mode; all of it is one family.
    SetupError for a run of another model or prompt, and for a baseline that nothing can be compared with.
    """
    for run in runs:
        _check_model(run, sha256)
    tables = [_scores(runs), *_levels(runs)]
    if baselines:
        tables.append(_comparisons(runs, baselines, sha256))
    return "\n".join(map(to_markdown, [*tables, _settings(runs)]))


def _check_model(run: Run, sha256: str) -> None:
    """SetupError unless the run's record says that these weights answered, under the prompt of this project."""
    known = str(run.identity.get("model_sha256"))
    if known.startswith("served:") and known.count(":") < 2:
        raise SetupError(
            f"run {run.folder} asked a server, and nothing on record says which weights answered: "
            "evaluate with --tokenizer and the export's folder"
        )
    if not is_run_of(run, sha256):
        raise SetupError(
            f"run {run.folder} is of another model ({run.identity.get('model')}, {known[:16]}) than the export "
            f"({sha256[:16]}): evaluate the export itself"
        )
    if run.identity.get("prompt_sha256") != PROMPT_SHA256:
        raise SetupError(f"run {run.folder} used another system prompt than the card shows: evaluate the export again")


def is_run_of(run: Run, sha256: str) -> bool:
    """Whether the run's model, or the folder given for a served one, is the one with this `model_sha256`."""
    known = str(run.identity.get("model_sha256"))
    return known == sha256 or (known.startswith("served:") and known.endswith(f":{sha256}"))


def _what(run: Run) -> tuple[str, str]:
    subset = run.identity.get("subset", "all")
    name = str(run.identity["benchmark"])
    return (name if subset == "all" else f"{name} ({subset})", str(run.identity["mode"]))


def _score(run: Run, metric: str) -> tuple[str, str]:
    """A score and its interval; dashes under rules that do not know the metric."""
    if run.summary["rules"].get(metric) is None:
        return percent(None), percent(None)
    values = list(question_scores(run, metric).values())
    low, high = score_interval(values)["ci"]
    return percent(sum(values) / len(values)), f"{100 * low:.1f} – {100 * high:.1f}"


def _scores(runs: Sequence[Run]) -> Table:
    columns = ("benchmark", "mode", "n", "official", "95% CI", "strict", "95% CI", "submitted", "truncated", "calls")
    rows = []
    for run in runs:
        summary = run.summary
        if not summary["n"]:
            raise SetupError(f"run {run.folder} scored no question: there is nothing to report")
        rows.append(
            Row(
                (
                    *_what(run),
                    f"{summary['samples']['questions']:,} of {summary['n_questions']:,}",
                    *_score(run, "official"),
                    *_score(run, "strict"),
                    percent(summary["submit_rate"]),
                    percent(summary["truncation_rate"]),
                    number(summary["mean_calls"]),
                )
            )
        )
    return Table("Scores", _SCORES, columns, tuple(rows), words=(1,))


def _levels(runs: Sequence[Run]) -> list[Table]:
    """The official score by difficulty, for the runs whose benchmark has levels."""
    rows = [
        Row(
            (
                *_what(run),
                level.label,
                f"{level.questions:,}",
                percent(level.official),
                f"{100 * level.low:.1f} – {100 * level.high:.1f}",
            )
        )
        for run in runs
        for level in accuracies(by_difficulty(list(run.episodes.values())))
    ]
    columns = ("benchmark", "mode", "level", "n", "official", "95% CI")
    return [Table("By difficulty", "", columns, tuple(rows), words=(1, 2))] if rows else []


def _comparisons(runs: Sequence[Run], baselines: Sequence[Run], sha256: str) -> Table:
    found: list[tuple[Run, Run, dict[str, Any]]] = []
    for other in baselines:
        if is_run_of(other, sha256):
            raise SetupError(f"run {other.folder} is of this model itself: a baseline is another model")
        matches = [run for run in runs if _asked(run) == _asked(other)]
        if not matches:
            raise SetupError(
                f"run {other.folder} ({' '.join(_what(other))}) asked other questions than every run of this model, or "
                "in another mode: evaluate both on the same"
            )
        found += [(other, run, compare(other, run)) for run in matches]
    adjusted = holm([result["p"] for _, _, result in found])
    rows = []
    for (other, run, result), p_holm in zip(found, adjusted, strict=True):
        low, high = result["ci"]
        detectable = result["minimum_detectable_effect"]
        rows.append(
            Row(
                (
                    model_name(str(other.identity.get("model"))),
                    *_what(run),
                    f"{result['n']:,}",
                    percent(result["score_a"]),
                    percent(result["score_b"]),
                    points(result["delta"]),
                    f"{points(low)} to {points(high)}",
                    f"{result['b']:,} / {result['c']:,}",
                    p_value(result["p"]),
                    p_value(p_holm),
                    "–" if detectable is None else f"{100 * detectable:.1f}",
                    _VERDICTS[verdict_name(result | {"p_holm": p_holm})],
                    ", ".join(result["differs"]) or "nothing",
                )
            )
        )
    columns = (
        "other model",
        "benchmark",
        "mode",
        "n",
        "other",
        "this",
        "points",
        "95% CI",
        "only other / only this right",
    )
    more = ("p", "Holm p", "detectable", "verdict", "runs also differ in")
    return Table("Against other models", _COMPARED, columns + more, tuple(rows), words=(1, 2, 12, 13))


def _asked(run: Run) -> tuple[Any, ...]:
    return (run.identity["data_sha256"], *_what(run))


def _settings(runs: Sequence[Run]) -> Table:
    """How each run was made: what someone needs to repeat it."""
    rows = []
    for run in runs:
        identity = run.identity
        sampling, budgets = identity["sampling"], identity["budgets"]
        versions = ", ".join(f"{name} {value}" for name, value in identity["versions"].items())
        rows.append(
            Row(
                (
                    *_what(run),
                    f"temperature {sampling['temperature']:g}, top-p {sampling['top_p']:g}, top-k {sampling['top_k']}",
                    str(identity["seed"]),
                    str(run.samples),
                    f"{budgets['max_turns']} tool turns, {budgets['max_new_tokens']:,} new tokens a turn, "
                    f"{budgets['max_tokens']:,} tokens",
                    f"{identity['engine']}; {versions}",
                    str(run.summary["rules"]["official"]),
                    str(identity["data_sha256"])[:16],
                )
            )
        )
    columns = (
        "benchmark",
        "mode",
        "sampling",
        "seed",
        "samples",
        "budget of an episode",
        "engine",
        "official rule",
        "data",
    )
    return Table("How it was measured", "", columns, tuple(rows), words=(1, 2, 5, 6, 7, 8))
