"""JSON over HTTP to one OpenAI-compatible server, with retries; the standard library is enough.

A refusal (4xx) comes back at once as `Refused`. Anything that may pass (no connection, a time-out, 429, 5xx) is tried
again with growing pauses until patience runs out; then it is a SetupError that says what happened last.
"""

import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from shared.errors import SetupError

_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 8.0
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_BUSY = 429


class Refused(Exception):
    """The server understood the request and will not serve it. `status` is the HTTP status, 4xx."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Server:
    """One server. `base_url` is what an OpenAI client takes, usually ending in /v1; a bare host gets it.

    `api_key` goes into the Authorization header and nowhere else. `timeout` bounds one answer, in seconds; `patience`
    bounds how long a request that fails is tried again. SetupError for an address that is not http(s).
    """

    base_url: str
    api_key: str | None = field(default=None, repr=False)
    timeout: float = 600.0
    patience: float = 60.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SetupError(f"--base-url {self.base_url} is no address: give one like http://localhost:8000/v1")
        path = parts.path.rstrip("/") or "/v1"
        object.__setattr__(self, "base_url", f"{parts.scheme}://{parts.netloc}{path}")

    def get(self, path: str) -> dict[str, Any]:
        """GET a JSON object from `path` below the base URL."""
        return self._call(self.base_url + path, None)

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """POST `body` to `path` below the base URL."""
        return self._call(self.base_url + path, body)

    def beside(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """GET or POST `path` beside /v1, where servers keep what OpenAI's interface does not have."""
        return self._call(self.base_url.removesuffix("/v1") + path, body)

    def _call(self, url: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        deadline = time.monotonic() + self.patience
        for pause in pauses():
            try:
                return self._once(url, body)
            except _Passing as error:
                wait = error.after if error.after is not None else pause * random.uniform(0.75, 1.25)
                if time.monotonic() + wait > deadline:
                    raise SetupError(f"the server at {self.base_url} {error}: see that it runs, and go on") from None
            time.sleep(wait)
        raise AssertionError("pauses never end")

    def _once(self, url: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data=data, headers=headers)
        try:
            with self._opener().open(request, timeout=self.timeout) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            message = error_message(error.read())
            if error.code >= 500 or error.code == _BUSY:
                raise _Passing(
                    f"answers {error.code} ({message})", _retry_after(error.headers.get("Retry-After"))
                ) from None
            raise Refused(error.code, message) from None
        except urllib.error.URLError as error:
            raise _Passing(f"cannot be reached ({error.reason})") from None
        except (OSError, HTTPException) as error:  # time-outs and broken connections while the answer is read
            raise _Passing(f"broke off ({str(error) or type(error).__name__})") from None
        except ValueError as error:
            raise _Passing(f"answers with something that is not JSON ({error})") from None
        if not isinstance(answer, dict):
            raise _Passing("answers with something that is not a JSON object")
        return answer

    def _opener(self) -> urllib.request.OpenerDirector:
        """Proxies as the environment has them, but none to this machine."""
        if urlsplit(self.base_url).hostname in _LOOPBACK:
            return urllib.request.build_opener(urllib.request.ProxyHandler({}))
        return urllib.request.build_opener()


class _Passing(Exception):
    """A failure that may pass. `after` is the pause in seconds that the server asked for."""

    def __init__(self, message: str, after: float | None = None) -> None:
        super().__init__(message)
        self.after = after


def pauses() -> Iterator[float]:
    """Seconds between tries: doubling from 0.25 to 8, without end."""
    pause = _FIRST_PAUSE
    while True:
        yield pause
        pause = min(2 * pause, _LONGEST_PAUSE)


def error_message(body: bytes) -> str:
    """What a server says about an error, on one line: OpenAI's error object, FastAPI's detail, or the text itself."""
    text = body.decode("utf-8", "replace")
    try:
        data = json.loads(text)
    except ValueError:
        data = None
    if isinstance(data, dict):
        inner = data.get("error", data)
        found = inner if isinstance(inner, str) else inner.get("message") if isinstance(inner, dict) else None
        text = str(found or data.get("detail") or text)
    return " ".join(text.split())[:300] or "no reason given"


def _retry_after(value: str | None) -> float | None:
    try:
        return max(0.0, float(value or ""))
    except ValueError:  # absent, or a date
        return None
