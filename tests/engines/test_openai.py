"""The served engine against a server that the tests play: what is asked, what is understood, what is tried again."""

import itertools
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from shared.engines import http
from shared.engines.base import Completion, Request, SamplingParams
from shared.engines.http import Refused, Server
from shared.engines.openai import ServedEngine, TokenExchange, reply_text, served_model, takes_token_ids
from shared.errors import SetupError
from tests.engines.fake_server import serving

PARAMS = SamplingParams(0.6, 0.95, 20, 7, seed=2**64 - 1, stop_token_ids=(5, 9))
REQUEST = Request("q#0", (1, 2, 3), PARAMS, session="q")


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "pauses", lambda: itertools.repeat(0.01))


# ---- the server


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("http://localhost:8000/v1", "http://localhost:8000/v1"),
        ("http://localhost:8000/v1/", "http://localhost:8000/v1"),
        ("http://localhost:8000", "http://localhost:8000/v1"),
        ("https://host/some/path", "https://host/some/path"),
    ],
)
def test_addresses(given: str, taken: str) -> None:
    assert Server(given).base_url == taken


@pytest.mark.parametrize("address", ["localhost:8000", "ftp://host/v1", "http://", "/v1", ""])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(SetupError, match="is no address"):
        Server(address)


@pytest.mark.parametrize(
    "trouble", [(503, {}), (500, b"oops"), (429, {}, {"Retry-After": "0.01"}), None, b"<html>", b"[]"]
)
def test_what_may_pass_is_tried_again(trouble: Any) -> None:
    answers = iter([trouble, trouble, {"ok": 1}])
    with serving(lambda path, body: next(answers)) as fake:
        assert Server(fake.url).post("/x", {"a": 1}) == {"ok": 1}
    assert [body for _, body, _ in fake.asked] == [{"a": 1}] * 3


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ((503, {"error": {"message": "loading\n the model"}}), r"answers 503 \(loading the model\)"),
        (None, "broke off|cannot be reached"),
        (b"{", "is not JSON"),
        ((429, {}, {"Retry-After": "3600"}), "answers 429"),
    ],
)
def test_patience_ends_in_one_line(trouble: Any, reason: str) -> None:
    with serving(lambda path, body: trouble) as fake, pytest.raises(SetupError, match=reason) as caught:
        Server(fake.url, patience=0.05).get("/models")
    assert fake.url in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_server_that_is_not_there_is_one_line() -> None:
    with serving(lambda path, body: {}) as fake:
        pass
    start = time.monotonic()
    with pytest.raises(SetupError, match=r"cannot be reached .*see that it runs"):
        Server(fake.url, patience=0.1).get("/models")
    assert time.monotonic() - start < 5


def test_a_slow_answer_is_given_up_and_asked_again() -> None:
    waits = iter([1.0, 0.0])

    def answer(path: str, body: dict[str, Any]) -> dict[str, Any]:
        time.sleep(next(waits))
        return {"ok": 1}

    with serving(answer) as fake:
        assert Server(fake.url, timeout=0.2).get("/x") == {"ok": 1}
    assert len(fake.asked) == 2


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"message": "no such\nmodel", "code": 404}}, "no such model"),
        ({"error": "no"}, "no"),
        ({"detail": "Not Found"}, "Not Found"),
        (b"<html>gone</html>", "<html>gone</html>"),
        (b"", "no reason given"),
        (b"x" * 1000, "x" * 300),
    ],
)
def test_a_refusal_is_not_tried_again(body: Any, message: str) -> None:
    with serving(lambda path, _: (400, body)) as fake, pytest.raises(Refused) as caught:
        Server(fake.url).get("/x")
    assert (caught.value.status, str(caught.value)) == (400, message)
    assert len(fake.asked) == 1


def test_the_key_goes_into_its_header_and_nowhere_else() -> None:
    with serving(lambda path, body: {}) as fake:
        server = Server(fake.url, "secret")
        server.get("/models")
    assert fake.asked[0][2]["Authorization"] == "Bearer secret"
    assert "secret" not in repr(server)


def test_this_machine_is_asked_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with serving(lambda path, body: {"ok": 1}) as fake:
        assert Server(fake.url).get("/x") == {"ok": 1}


# ---- which model


def models(*entries: dict[str, Any]) -> Callable[[str, Any], dict[str, Any]]:
    return lambda path, body: {"object": "list", "data": list(entries)}


def test_a_model_is_known_by_its_name_or_its_folder() -> None:
    with serving(models({"id": "a", "root": "/x/a"}, {"id": "b"})) as fake:
        server = Server(fake.url)
        assert served_model(server, "/x/a")["id"] == "a"
        assert served_model(server, "b")["id"] == "b"
        with pytest.raises(SetupError, match="serves a, b, not c: give that name with --model"):
            served_model(server, "c")
        with pytest.raises(SetupError, match="serves a, b, more than one"):
            served_model(server, None)
    with serving(models({"id": "a"})) as fake:
        assert served_model(Server(fake.url), None)["id"] == "a"


@pytest.mark.parametrize("answer", [{"data": []}, {"data": None}, {}, (404, {"detail": "Not Found"})])
def test_a_server_without_models_is_one_line(answer: Any) -> None:
    with serving(lambda path, body: answer) as fake, pytest.raises(SetupError, match="check --base-url"):
        served_model(Server(fake.url), None)


# ---- token ids


def completion(ids: Any, logprobs: Any, reason: str = "stop", model: str | None = "m") -> dict[str, Any]:
    choice = {"token_ids": ids, "logprobs": {"token_logprobs": logprobs}, "finish_reason": reason}
    return {"model": model, "choices": [choice]}


def test_a_request_says_everything_and_the_answer_is_taken_as_it_is() -> None:
    with serving(lambda path, body: completion([7, 9], [-0.5, None], "stop")) as fake:
        result = TokenExchange(Server(fake.url), "m", "w")(REQUEST)
    assert result.request_id == "q#0"
    assert (result.token_ids, result.stop_reason, result.weights) == ((7, 9), "stop", "w")
    assert result.logprobs[0] == -0.5
    assert math.isnan(result.logprobs[1])
    ((path, body, _),) = fake.asked
    assert path == "/v1/completions"
    assert body == {
        "model": "m",
        "prompt": [1, 2, 3],
        "max_tokens": 7,
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "seed": 2**63 - 1,
        "stop_token_ids": [5, 9],
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
        "skip_special_tokens": False,
    }


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (completion([1], [-0.5], model="other"), "answers with other, not m"),
        (completion(None, [-0.5]), "returns no token ids"),
        (completion([1, 2], [-0.5]), "returns no token ids"),
        (completion(["a"], [-0.5]), "returns no token ids"),
        ({"model": "m", "choices": [{"token_ids": [1], "logprobs": None}]}, "returns no token ids"),
        ({"model": "m", "choices": []}, "holds no completion"),
        ({}, "holds no completion"),
        ((400, {"error": {"message": "too long"}}), r"refuses a request \(400: too long\)"),
    ],
)
def test_an_answer_that_does_not_fit_stops_the_run(answer: Any, reason: str) -> None:
    with serving(lambda path, body: answer) as fake:
        engine = ServedEngine(TokenExchange(Server(fake.url), "m", "w"), concurrency=1)
        engine.add(REQUEST)
        with pytest.raises(SetupError, match=reason):
            finish(engine, 1)
        engine.close()


@pytest.mark.parametrize(
    ("answer", "takes"),
    [
        ({"choices": [{"prompt_token_ids": [1, 2], "token_ids": [3]}]}, True),
        ({"choices": [{"prompt_token_ids": [1, 2, 0], "token_ids": [3]}]}, False),
        ({"choices": [{"text": "x"}]}, False),
        ({"choices": None}, False),
        ((400, {"error": {"message": "prompt must be a string"}}), False),
        ((404, {}), False),
    ],
)
def test_whether_a_server_takes_token_ids_is_tried(answer: Any, takes: bool) -> None:
    with serving(lambda path, body: answer) as fake:
        assert takes_token_ids(Server(fake.url), "m", (1, 2)) is takes


# ---- replies of chats


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": "<think>\na\n</think>\n\nb"}, "<think>\na\n</think>\n\nb"),
        ({"content": "a\n</think>\n\nb"}, "a\n</think>\n\nb"),
        ({"content": "b", "reasoning": "a\n"}, "<think>\na\n</think>\n\nb"),
        ({"content": "b", "reasoning_content": "a"}, "<think>\na\n</think>\n\nb"),
        ({"content": None, "reasoning": "a"}, "<think>\na"),
        ({"content": None}, ""),
        ({}, ""),
    ],
)
def test_a_think_block_is_found_wherever_the_server_puts_it(message: dict[str, Any], text: str) -> None:
    assert reply_text(message) == text


# ---- the engine


def finish(engine: ServedEngine, count: int, seconds: float = 20.0) -> list[Completion]:
    """Step until `count` completions are there."""
    done: list[Completion] = []
    deadline = time.monotonic() + seconds
    while len(done) < count:
        assert time.monotonic() < deadline, "the engine does not finish"
        done += engine.step()
    return done


def request(name: str) -> Request:
    return Request(name, (1,), PARAMS, session=name.partition("#")[0])


def answer_to(request: Request) -> Completion:
    return Completion(request.request_id, (7,), (0.0,), "stop")


def test_no_session_waits_for_another() -> None:
    gate = threading.Event()

    def exchange(request: Request) -> Completion:
        if request.session == "slow":
            assert gate.wait(20)
        return answer_to(request)

    engine = ServedEngine(exchange, concurrency=2)
    engine.add(request("slow#0"))
    for turn in range(20):
        engine.add(request(f"quick#{turn}"))
        assert [done.request_id for done in finish(engine, 1)] == [f"quick#{turn}"]
    assert engine.has_work()
    gate.set()
    assert [done.request_id for done in finish(engine, 1)] == ["slow#0"]
    assert not engine.has_work()
    engine.close()


def test_a_step_without_an_answer_returns_soon() -> None:
    gate = threading.Event()
    engine = ServedEngine(lambda request: (gate.wait(20), answer_to(request))[1], concurrency=1)
    assert engine.step() == []
    engine.add(request("a#0"))
    start = time.monotonic()
    assert engine.step() == []
    assert time.monotonic() - start < 5
    gate.set()
    finish(engine, 1)
    engine.close()


def test_at_most_so_many_requests_are_under_way() -> None:
    lock, under_way, most = threading.Lock(), 0, 0

    def exchange(request: Request) -> Completion:
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        time.sleep(0.01)
        with lock:
            under_way -= 1
        return answer_to(request)

    engine = ServedEngine(exchange, concurrency=3)
    for i in range(20):
        engine.add(request(f"{i}#0"))
    assert len(finish(engine, 20)) == 20
    assert most == 3
    engine.close()


def test_what_an_ended_session_asked_is_forgotten() -> None:
    gate = threading.Event()
    seen: list[str] = []

    def exchange(request: Request) -> Completion:
        seen.append(request.request_id)
        assert gate.wait(20)
        return answer_to(request)

    engine = ServedEngine(exchange, concurrency=1)
    engine.add(request("a#0"))
    engine.add(request("b#0"))
    engine.add(request("c#0"))
    while not seen:
        time.sleep(0.001)
    engine.end_session("a")
    engine.end_session("b")
    gate.set()
    assert [done.request_id for done in finish(engine, 1)] == ["c#0"]
    assert seen == ["a#0", "c#0"]
    engine.close()


def test_a_fault_of_ours_is_not_swallowed() -> None:
    engine = ServedEngine(lambda request: 1 // 0, concurrency=1)  # type: ignore[arg-type,return-value]
    engine.add(request("a#0"))
    with pytest.raises(ZeroDivisionError):
        finish(engine, 1)
    engine.close()


def test_closing_ends_the_threads() -> None:
    before = threading.active_count()
    engine = ServedEngine(answer_to, concurrency=8)
    assert threading.active_count() == before + 8
    engine.close()
    deadline = time.monotonic() + 20
    while threading.active_count() > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
