"""Reports: `python -m eval.report RUN` makes one HTML file of a finished run, `python -m eval.report A B` of two.

RUN may also be the folder of a training run, or one of its episodes/step-*.jsonl: the episodes that it sampled.

The file is whole in itself (it opens from a disk, without a network) and holds every episode, to be read turn by
turn. `--markdown FILE` writes the tables for a paper beside it.
"""

from collections.abc import Sequence
from pathlib import Path

from eval.content import Content, comparison_content, run_content
from eval.page import render_page
from eval.pairing import load_run
from eval.tables import to_markdown
from eval.training import LAST_STEPS, training_content
from eval.training_lines import default_report, is_training
from shared.cli import ArgumentParser, run_main
from shared.errors import SetupError
from shared.files import check_output, write_output
from shared.text import escape_markdown


def load_content(folders: Sequence[Path], last_steps: int = LAST_STEPS) -> Content:
    """The content of a report over one finished run, over two, or over `last_steps` sampled steps of a training run.

    SetupError says what is wrong with them.
    """
    if any(map(is_training, folders)):
        if len(folders) > 1:
            raise SetupError("the episodes of a training run are shown by themselves: give one RUN")
        return training_content(folders[0], last_steps)
    runs = [load_run(folder) for folder in folders]
    return run_content(runs[0]) if len(runs) == 1 else comparison_content(runs[0], runs[1])


def render_markdown(content: Content) -> str:
    """The sentence and the tables of a report, as GitHub-flavoured markdown."""
    title, *rest = map(escape_markdown, (content.title, content.subtitle, content.sentence))
    paragraphs = [f"## {title}", *rest]
    return "\n".join([*(f"{text}\n" for text in paragraphs), *map(to_markdown, content.tables)])


def main() -> int:
    """The command line."""
    parser = ArgumentParser(prog="python -m eval.report", description="One HTML file of a run, or of two compared.")
    parser.add_argument(
        "runs",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="folder of a finished eval.run, one or two; or of a training run, or one of its episodes/step-*.jsonl",
    )
    parser.add_argument(
        "--out", type=Path, help="the HTML file (default: report.html, or compare-A.html, in the last RUN)"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=LAST_STEPS,
        metavar="N",
        help=f"of a training run, the last N sampled steps (default {LAST_STEPS}; 0: all)",
    )
    parser.add_argument("--markdown", type=Path, help="write the tables as markdown too")
    arguments = parser.parse_args()
    if len(arguments.runs) > 2:
        raise SetupError("a report is of one run or of two: for more, python -m eval.compare prints all pairs")
    if arguments.steps < 0:
        raise SetupError(f"--steps {arguments.steps}: give the number of sampled steps to show, or 0 for all")
    for flag, path in (("--out", arguments.out), ("--markdown", arguments.markdown)):
        if path is not None:
            check_output(path, flag)
    content = load_content(arguments.runs, arguments.steps)
    default = "report.html" if len(arguments.runs) == 1 else f"compare-{arguments.runs[0].resolve().name}.html"
    out: Path = arguments.out or (
        default_report(arguments.runs[0]) if is_training(arguments.runs[0]) else arguments.runs[-1] / default
    )
    write_output(out, render_page(content), "--out")
    print(f"{out}: {len(content.episodes)} episodes, {out.stat().st_size / 1e6:.1f} MB")
    if arguments.markdown is not None:
        write_output(arguments.markdown, render_markdown(content), "--markdown")
        print(arguments.markdown)
    return 0


if __name__ == "__main__":
    run_main(main)
