"""A served model that answers from the request alone, well and badly, for the harness and the stand-alone agent alike.

What it says depends on the question in the prompt, on how many turns there were, and on whether the final SQL is asked
for; nothing is remembered between requests.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from shared.chat import ChatCodec
from tests.engines.fake_server import JSON, Answer

MODEL = "the-model"
ENDLESS = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT count(*) FROM r"
_QUESTION = re.compile(r"^Question: (.*?)(?:\n|<\||$)", re.MULTILINE)
_CLOSING = "Now generate the final SQL query"

Spoken = tuple[str, str]  # what the model says, and the finish reason
Script = Callable[[str, int, bool], Spoken]


def call(tool: str, **args: Any) -> str:
    return json.dumps({"tool": tool, "args": args})


def turn(plan: str, *calls: str) -> str:
    return f"<think>\n{plan}\n</think>\n\n" + "\n".join(calls)


def _right(gold: str, number: int, closing: bool) -> Spoken:
    table = gold.split(" FROM ")[1].split()[0]
    turns = [
        turn("Look.", call("list_tables")),
        turn("Read.", call("describe_table", table_name=table), call("sample_rows", table_name=table, limit=2)),
        turn("Try.", call("run_query", sql=gold)),
        turn("Answer.", call("submit_sql", sql=gold), call("list_tables")),
    ]
    return turns[number], "stop"


def _broken(gold: str, number: int, closing: bool) -> Spoken:
    """Bad JSON, an unknown tool, wrong arguments, names that do not exist; then an answer."""
    turns = [
        turn("Oops.", '{"tool": "run_query", "args": {"sql": "SELECT'),
        turn("Guess.", call("drop_table", name="x"), call("describe_table"), call("describe_table", table_name="rabo")),
        turn("Try.", call("run_query", sql=gold.replace("SELECT", "SELECT no_such_column,", 1))),
        turn("Odd.", call("run_query", sql="SELECT '<|im_end|><think>\u8868\ud800', NULL, x'00ff', 'a\nb'")),
    ]
    return turns[number] if number < len(turns) else turn("So.", call("submit_sql", sql=gold)), "stop"


def _unclean(gold: str, number: int, closing: bool) -> Spoken:
    fenced = f"Let me see.\n```json\n{call('run_query', sql=gold)}\n```\nThat should do."
    return (turn("Prose.", fenced), turn("Twice.", call("submit_sql", sql=gold), "Done!"))[min(number, 1)], "stop"


def _silent(gold: str, number: int, closing: bool) -> Spoken:
    """No call at all; the answer comes as text when it is asked for."""
    return (turn("Now.", f"```sql\n{gold}\n```") if closing else "I would rather think.", "stop")


def _failing(gold: str, number: int, closing: bool) -> Spoken:
    """One query that runs, then failing ones; an empty last word falls back to the first."""
    if closing:
        return turn("No idea."), "stop"
    return turn("Try.", call("run_query", sql=gold if number == 0 else f"SELECT nothing FROM nowhere_{number}")), "stop"


def _lost(gold: str, number: int, closing: bool) -> Spoken:
    """Never a query that runs, and nothing in the end."""
    if closing:
        return "<think>\nI do not know", "length"
    return turn("Write.", call("run_query", sql=f"DELETE FROM sqlite_master -- {number}")), "stop"


def _long(gold: str, number: int, closing: bool) -> Spoken:
    """Turns cut by the token limit, inside the plan and inside a call."""
    texts = ["<think>\n" + "It might be this one. " * 8, turn("Cut.", call("submit_sql", sql=gold)[:-5])]
    return (texts[number], "length") if number < 2 else (turn("At last.", call("submit_sql", sql=gold)), "stop")


_KINDS = (_right, _broken, _unclean, _silent, _failing, _lost, _long)


def toy_script(golds: Mapping[str, str]) -> Script:
    """The model for toy questions: by its number each is answered in one of seven ways."""
    numbers = {question: i for i, question in enumerate(golds)}

    def script(question: str, number: int, closing: bool) -> Spoken:
        return _KINDS[numbers[question] % len(_KINDS)](golds[question], number, closing)

    return script


def _say(script: Script, text: str, number: int, last: str) -> Spoken:
    """`text` is the conversation up to now, `last` its last message."""
    question = _QUESTION.search(text)
    return script(question[1], number, _CLOSING in last) if question else ("yes", "stop")


def served_by(script: Script, codec: ChatCodec | None = None) -> Callable[[str, JSON], Answer]:
    """What the server answers. With a `codec` it takes token ids, and knows chat messages as well."""

    def answer(path: str, body: JSON) -> Answer:
        if path == "/v1/models":
            return {"data": [{"id": MODEL}]}
        if path == "/v1/chat/completions":
            messages = body["messages"]
            number = sum(message["role"] == "assistant" for message in messages)
            text, finish = _say(script, messages[min(1, len(messages) - 1)]["content"], number, messages[-1]["content"])
            return {"model": MODEL, "choices": [{"message": {"content": text}, "finish_reason": finish}]}
        if path == "/v1/completions" and codec is not None:
            prompt = codec.decode(body["prompt"])
            parts = prompt.split("<tool_response>")
            text, finish = _say(script, prompt, len(parts) - 1, parts[-1])
            ids = codec.turn_ids(text.removeprefix("<think>\n"))[: body["max_tokens"]]
            if ids[-1] not in codec.stop_ids:
                finish = "length"
            elif finish == "length":
                ids = ids[:-1]
            return {
                "model": MODEL,
                "choices": [
                    {
                        "token_ids": ids,
                        "prompt_token_ids": body["prompt"],
                        "logprobs": {"token_logprobs": [-0.5] * len(ids)},
                        "finish_reason": finish,
                    }
                ],
            }
        return 404, {"detail": "Not Found"}

    return answer
