"""The tables of a report, as cells of text: the HTML page and the markdown file show the same ones."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval.breakdown import Accuracy, accuracies, accuracy, by_database, by_difficulty, by_gold_length, group_by
from eval.measures import CLASSES, Record
from shared.text import escape_markdown

MINUS = "−"


@dataclass(frozen=True)
class Row:
    """One line. `filters` are the viewer's filters that show the episodes behind it."""

    cells: tuple[str, ...]
    filters: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Table:
    """A titled table; the first column is its row heads, `words` are other columns that hold words and not figures."""

    title: str
    note: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    words: tuple[int, ...] = ()


def percent(value: float | None, digits: int = 1) -> str:
    """`63.4%`; a dash for what could not be measured."""
    return "–" if value is None else f"{100 * value:.{digits}f}%"


def points(value: float) -> str:
    """A difference of two rates in percentage points, signed: `+2.8`."""
    return f"{100 * value:+.1f}".replace("-", MINUS)


def number(value: float | None, digits: int = 1) -> str:
    """A figure with thousands set apart."""
    return "–" if value is None else f"{value:,.{digits}f}"


def p_value(p: float) -> str:
    """Four digits, or `< 0.0001`."""
    return f"{p:.4f}" if p >= 0.0001 else "< 0.0001"


_SCORES_NOTE = (
    "official: the rule of the benchmark; strict: order and duplicates count as well; fair: duplicates count, order "
    "where gold has an ORDER BY. 95% interval of the official score."
)
_ORIGINS_NOTE = (
    "submitted: by submit_sql; final_text: as text in the closing turn; fallback: the last query that ran; "
    "none: no answer."
)


def score_tables(records: Sequence[Record], summary: Mapping[str, Any]) -> list[Table]:
    """Scores over all questions and by difficulty, gold length, database and answer origin."""
    whole = accuracy("all questions", records)
    rows = [*([whole] if whole else []), *_vote(summary), *accuracies(by_difficulty(records))]
    lengths, databases = accuracies(by_gold_length(records)), accuracies(by_database(records))
    origins = accuracies(group_by(records, lambda record: record["origin"]))
    tables = [_scores("Scores", _SCORES_NOTE, rows, "difficulty")]
    tables += [_scores("By length of the gold query", "Quarters of the questions.", lengths, "")] * (len(lengths) > 1)
    tables += [_scores("By database", "", databases, "db")] * (len(databases) > 1)
    tables += [_scores("By origin of the answer", _ORIGINS_NOTE, origins, "origin")] * (len(origins) > 1)
    return tables


def _vote(summary: Mapping[str, Any]) -> list[Accuracy]:
    """The score of a vote among the samples, where there are several."""
    samples = summary["samples"]
    if (vote := samples.get("vote")) is None:
        return []
    low, high = vote["ci"]
    return [Accuracy(f"vote of {samples['k']}", vote["n"], vote["n"], vote["official"], low, high, vote["strict"])]


def _scores(title: str, note: str, rows: Sequence[Accuracy], key: str) -> Table:
    """One line a group; the lines of a level of `key` show its episodes in the viewer."""
    rules = [rule for rule in ("strict", "fair") if any(getattr(row, rule) is not None for row in rows)]
    return Table(
        title,
        note,
        ("", "n", "official", "95% interval", *rules),
        tuple(
            Row(
                (
                    row.label,
                    f"{row.n:,}",
                    percent(row.official),
                    f"{100 * row.low:.1f} – {100 * row.high:.1f}",
                    *(percent(getattr(row, rule)) for rule in rules),
                ),
                {key: row.label}
                if key and row.label != "all questions" and not row.label.startswith("vote of")
                else None,
            )
            for row in rows
        ),
    )


def outcome_table(summary: Mapping[str, Any]) -> Table:
    """How the scored episodes ended: one line a class that occurs."""
    counts, n = summary["measures"]["classes"], summary["n"]
    return Table(
        "How episodes ended",
        "Every scored episode is in exactly one line; the first rule that fits decides.",
        ("", "episodes", "share", "rule"),
        tuple(
            Row((CLASSES[key].label, f"{count:,}", percent(count / n), CLASSES[key].doc), {"outcome": key})
            for key, count in counts.items()
        ),
        words=(3,),
    )


Figure = tuple[str, Callable[[Mapping[str, Any]], str], str]
_M = "measures"
FIGURES: tuple[Figure, ...] = (
    ("answered", lambda s: percent(s["answer_rate"]), "episodes that ended with an answer"),
    ("submitted", lambda s: percent(s["submit_rate"]), "answers handed in by submit_sql"),
    ("executes", lambda s: percent(s["executes_rate"]), "answers that run without error"),
    ("truncated", lambda s: percent(s["truncation_rate"]), "episodes that a token limit cut"),
    ("clean turns", lambda s: percent(s["clean_turn_rate"]), "turns of a think block and calls, nothing else"),
    ("turns", lambda s: number(s["mean_turns"], 2), "mean of an episode, the closing turn included"),
    ("tool calls", lambda s: number(s["mean_calls"], 2), "mean of an episode"),
    ("distinct calls", lambda s: number(s[_M]["calls"]["mean_distinct"], 2), "the same tool and arguments count once"),
    ("tokens sampled", lambda s: number(s["mean_sampled_tokens"], 0), "mean of an episode"),
    ("tokens in context", lambda s: number(s["mean_tokens"], 0), "mean of an episode at its end"),
    (
        "tokens a right answer",
        lambda s: number(s[_M]["compute"]["sampled_tokens_per_right_answer"], 0),
        "all sampled tokens over all right answers",
    ),
    (
        "opened every gold table",
        lambda s: percent(s[_M]["opened_gold_tables"]["share"]),
        "looked into each table that gold reads, by a call that succeeded",
    ),
    (
        "… official when it did",
        lambda s: percent(s[_M]["opened_gold_tables"]["official_if_opened"]),
        "score of those episodes",
    ),
    (
        "… official when not",
        lambda s: percent(s[_M]["opened_gold_tables"]["official_if_not"]),
        "score of the others",
    ),
    (
        "literals seen",
        lambda s: percent(s[_M]["answer_literals"]["seen_in_results"]),
        "constants compared with in answers that a tool result had shown",
    ),
    (
        "literals from nowhere",
        lambda s: percent(s[_M]["answer_literals"]["from_nowhere"]),
        "constants that neither a result nor the question holds",
    ),
)


def behaviour_table(summaries: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Table:
    """What the model did and what it cost, a column a run."""
    return Table(
        "Behaviour and cost",
        "Over the scored episodes.",
        ("", *names, "what it is"),
        tuple(Row((label, *(show(summary) for summary in summaries), doc)) for label, show, doc in FIGURES),
        words=(len(names) + 1,),
    )


def unscored_table(summary: Mapping[str, Any]) -> Table | None:
    """The questions without a verdict; None when there are none."""
    if not summary["excluded"]:
        return None
    return Table(
        "Without a verdict",
        summary["exclusion_rule"] + ".",
        ("question", "status", "reason"),
        tuple(
            Row((str(item["question_id"]), item["status"], " ".join(str(item["reason"]).split())[:300]))
            for item in summary["excluded"]
        ),
        words=(1, 2),
    )


def rules_table(summary: Mapping[str, Any]) -> Table:
    """Which rule gave each score, and what the golds are worth."""
    gold, samples = summary["gold"], summary["samples"]
    rows = [(key, str(rule)) for key, rule in summary["rules"].items() if rule is not None]
    rows.append(("questions", f"{summary['n_questions']:,} asked, {summary['n']:,} episodes scored"))
    if "vote" in samples:
        vote = samples["vote"]
        rows += [
            ("samples", f"{samples['k']} a question; some sample right {percent(samples['any_right'])}"),
            ("flip rate", f"{percent(samples['flip_rate'])}: two samples of a question differ in their verdict"),
            ("vote", f"{vote['ties']:,} ties, {vote['without_vote']:,} questions without a vote; {vote['rule']}"),
        ]
    rows += [
        ("golds that return nothing, NULL or 0", _counts(gold["shape"], "rows")),
        ("official without those", percent(gold["official_without_trivial"])),
        ("golds with text that is not UTF-8", f"{gold['undecodable']:,}; {gold['undecodable_rule']}"),
    ]
    rows += [
        (f"{flag.replace('_', ' ')}: {len(ids):,}", f"{gold['flag_rules'].get(flag, '')}. {_some(ids)}")
        for flag, ids in gold["flagged"].items()
    ]
    if gold["flagged"]:
        rows.append(("official without flagged golds", percent(gold["official_without_flagged"])))
    return Table("Rules and golds", "", ("", ""), tuple(map(Row, rows)), words=(1,))


def _some(ids: Sequence[Any], most: int = 12) -> str:
    """The first of a list of ids, and how many more there are."""
    more = f" and {len(ids) - most:,} more" if len(ids) > most else ""
    return ", ".join(map(str, ids[:most])) + more


def _counts(counts: Mapping[str, int], left_out: str) -> str:
    return ", ".join(f"{count:,} {key}" for key, count in counts.items() if key != left_out) or "none"


# ---- markdown


def to_markdown(table: Table) -> str:
    """A GitHub-flavoured table with its title. Any text stays text: no cell can open a link, a tag or a column."""
    lines = [f"### {escape_markdown(table.title)}", ""]
    lines += [escape_markdown(table.note), ""] if table.note else []
    lines.append(_markdown_row(table.columns))
    lines.append(
        "|" + "|".join(" :-- " if i == 0 or i in table.words else " --: " for i in range(len(table.columns))) + "|"
    )
    lines += [_markdown_row(row.cells) for row in table.rows]
    return "\n".join(lines) + "\n"


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(escape_markdown(cell) for cell in cells) + " |"
