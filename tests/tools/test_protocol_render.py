"""What the environment says: numbering, cuts, budget line, closing request, first message."""

import pytest

from shared.tools.protocol import ToolResult, budget_line, closing_message, cut_text, first_user_message, render_results


def result(text: str, tool: str = "run_query") -> ToolResult:
    return ToolResult(tool, "ok", text)


def test_one_result_stands_bare() -> None:
    text = render_results([result("id | name\n1 | ant")], 4)
    assert text == "id | name\n1 | ant\n[4 tool turns left before you must answer]"


def test_several_results_are_numbered() -> None:
    text = render_results([result("item", "list_tables"), result("n\n3"), result("Error: x", "")], 1)
    assert text.split("\n") == [
        "#1 list_tables",
        "item",
        "#2 run_query",
        "n",
        "3",
        "#3 error",
        "Error: x",
        "[1 tool turn left before you must answer]",
    ]


@pytest.mark.parametrize(("left", "words"), [(0, "0 tool turns"), (1, "1 tool turn"), (2, "2 tool turns")])
def test_budget_line(left: int, words: str) -> None:
    assert budget_line(left) == f"[{words} left before you must answer]"


def test_dropped_calls_are_said() -> None:
    assert "(1 more call was not run)\n[2 tool turns" in render_results([result("x")], 2, dropped=1)
    assert "(3 more calls were not run)\n[2 tool turns" in render_results([result("x")], 2, dropped=3)


def test_a_large_result_does_not_crowd_out_the_small_ones() -> None:
    text = render_results([result("a" * 100_000), result("small one"), result("b" * 100_000)], 3, max_bytes=2000)
    assert len(text.encode()) <= 2000
    assert "small one" in text
    assert text.count("of 100000 bytes shown)") == 2
    assert text.count("a" * 800) == 1
    assert text.count("b" * 800) == 1


def test_a_cut_falls_between_characters_and_says_how_much() -> None:
    text = cut_text("é" * 1000, 101)
    assert len(text.encode("utf-8")) <= 101
    shown = text.partition("\n")[0]
    assert set(shown) == {"é"}
    assert text.endswith(f"\n... (cut: {len(shown.encode())} of 2000 bytes shown)")


@pytest.mark.parametrize("size", range(0, 60, 7))
def test_a_tiny_budget_still_holds(size: int) -> None:
    assert len(cut_text("äöü" * 50, size).encode("utf-8")) <= size


def test_closing_message_shows_the_last_good_query() -> None:
    text = closing_message("SELECT 1", "turn_limit")
    assert text.startswith("You have reached the exploration limit.\n")
    assert "\nYour last query that executed without error was:\nSELECT 1\n" in text
    assert text.endswith("return that query.")
    assert "last query" not in closing_message(None, "turn_limit")
    assert "failed" in closing_message(None, "failed_queries")


def test_first_user_message() -> None:
    assert first_user_message("How many?") == "Question: How many?"
    assert first_user_message("How many?", "n counts") == "Question: How many?\nEvidence: n counts"
    full = first_user_message("How many?", "", "CREATE TABLE t (a)")
    assert full == "Question: How many?\nDatabase schema:\nCREATE TABLE t (a)"
