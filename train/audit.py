"""What the audit of golds said of the training questions, as far as the pool heeds it.

`python -m eval.audit` writes the file; the two sides share its format and no code. Read here, of one JSON object:

    golds    a list with an entry for each audited question:
             question_id, db_id    whose gold it is
             flags                 what holds of it: gold_error, gold_tie, … (docs/evaluation.md)
             slow, ties_checked    true or false: flags `slow`, and `ties_unchecked` where false
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.data.example import Example, Loaded
from shared.errors import SetupError
from train.config import DataConfig

# By question id: the database of its gold, and what holds of it.
Audit = Mapping[str, tuple[str, frozenset[str]]]
_COMMAND = "python -m eval.audit"


def read_audit(path: Path) -> Audit:
    """By question id: the database and the flags of its gold. SetupError when the file is missing or no audit."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return {entry["question_id"]: (entry["db_id"], _flags(entry)) for entry in data["golds"]}
    except OSError as error:
        why = error.strerror or str(error)
        raise SetupError(f"data.audit: {path} cannot be read ({why}); write it with {_COMMAND}") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise SetupError(f"data.audit: {path} is no audit of golds; give the audit.json of {_COMMAND}") from error


def _flags(entry: Mapping[str, Any]) -> frozenset[str]:
    flags = {str(flag) for flag in entry["flags"]}
    if entry.get("slow"):
        flags.add("slow")
    if not entry.get("ties_checked", True):
        flags.add("ties_unchecked")
    return frozenset(flags)


def drop_flagged(
    examples: Sequence[Example],
    loaded: Loaded,
    audit: Audit,
    config: DataConfig,
    report: Callable[[str], None],
) -> list[Example]:
    """`examples` (selected of `loaded`) without those whose gold has a flag of `config.audit_drop` in `config.audit`.

    `report` gets a line that says how many left by flag, and how many the audit does not know. A question with several
    flags is counted under each. SetupError when the audit is of other questions: no id in common, an id on another
    database, or an id that a whole read of the data does not have.
    """
    _check_same_questions(audit, loaded, config)
    dropping = set(config.audit_drop)
    kept: list[Example] = []
    counts: Counter[str] = Counter()
    unknown = 0
    for example in examples:
        if example.question_id not in audit:
            unknown += 1
            kept.append(example)
            continue
        if found := audit[example.question_id][1] & dropping:
            counts.update(found)
        else:
            kept.append(example)
    line = f"gold audit: {len(examples) - len(kept):,} of {len(examples):,} questions left out"
    if counts:
        line += f" ({', '.join(f'{counts[flag]:,} {flag}' for flag in config.audit_drop if counts[flag])})"
    if unknown:
        line += f"; {unknown:,} of the others are not in {config.audit}"
    report(line)
    return kept


def _check_same_questions(audit: Audit, loaded: Loaded, config: DataConfig) -> None:
    databases = {example.question_id: example.db_id for example in loaded.examples}
    strangers = [question_id for question_id in audit if question_id not in databases]
    # A loader that left questions out on purpose (by level, limit or phrasing) does not know their ids.
    partial = bool(loaded.skipped) or (config.benchmark == "sqale" and config.limit > 0)
    remedy = _remedy(config)
    if len(strangers) == len(audit):
        raise SetupError(f"data.audit: {config.audit} knows none of the pool's questions; {remedy}")
    if strangers and not partial:
        raise SetupError(
            f"data.audit: {config.audit} has {len(strangers)} questions that the pool does not know "
            f"({strangers[0]} for one); {remedy}"
        )
    for question_id, (db_id, _) in audit.items():
        if databases.get(question_id, db_id) != db_id:
            raise SetupError(
                f"data.audit: {config.audit} has question {question_id} on database {db_id}, the pool has it on "
                f"{databases[question_id]}; {remedy}"
            )


def _remedy(config: DataConfig) -> str:
    """How to get an audit of these questions; a generated benchmark (toy) has nothing to audit."""
    if config.benchmark == "toy":
        return "generated questions need no audit: set data.audit: null"
    command = f"{_COMMAND} --questions {config.questions} --databases {config.databases}"
    if config.benchmark == "sqale":
        command = (
            f"{_COMMAND} --benchmark sqale --questions {config.queries} --databases {config.schemas} "
            f"--split {config.split} --phrasing {config.phrasing}"
        )
    return f"audit the training questions themselves: {command}"
