"""The transformers engine: many sessions decode together, one token a row and step.

All rows of the batch share one cache and are aligned at the right. In a step every active row feeds one
token: a given one (the tool result that was appended to its context) or the one it sampled last. So a session
that comes back with its next turn continues on its cache, nothing is prefilled again, and no session waits for
another. New prompts are prefilled together (equal ones once), and a long appended text goes through in one
forward of its own instead of token by token.

Linear-attention layers hold no columns, so padding could only leak into their state in a prefill of unequal
prompts; there transformers zeroes padded inputs, and the state before the first real token stays zero.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from shared.engines import kv
from shared.engines.base import Completion, Request, StopReason, refuse_nan
from shared.engines.sampling import draw_uniforms, sample_tokens


@dataclass(eq=False)
class _Row:
    """One session. `fed` ids are in the cache; `pending` ids come next; a request is being served or None."""

    session: str
    fed: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    request: Request | None = None
    uniforms: np.ndarray = field(default_factory=lambda: np.empty(0))
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ended: bool = False
    parked: DynamicCache | None = None

    def begin(self, request: Request) -> None:
        self.request = request
        self.pending = list(request.prompt_ids[len(self.fed) :])
        self.uniforms = draw_uniforms(request.params.seed, request.params.max_tokens)
        self.sampled, self.logprobs = [], []


class HFEngine:
    """Serves `shared.engines.base.Engine` with a causal language model of transformers.

    `weights` is called for the name of the weights each completion came from. `max_rows` bounds the batch,
    `chunk_tokens` is the length from which appended ids go through in one forward of their own, `prefill_tokens`
    bounds one forward over new prompts (padding included; a longer prompt goes alone).
    Changing the model's weights while requests run is the caller's error; call `reset` in between.
    """

    batches_by_itself = False

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        weights: Callable[[], str] = lambda: "",
        max_rows: int = 256,
        chunk_tokens: int = 64,
        prefill_tokens: int = 16384,
    ) -> None:
        self.model = model
        self.weights = weights
        self.max_rows = max_rows
        self.chunk_tokens = chunk_tokens
        self.prefill_tokens = prefill_tokens
        self.tokens_fed = 0
        self._waiting: list[Request] = []
        self._rows: list[_Row] = []
        self._cache: DynamicCache | None = None
        self._sessions: dict[str, _Row] = {}
        self._done: list[Completion] = []
        kv.check_supported(DynamicCache(config=model.config.get_text_config()))

    def add(self, request: Request) -> None:
        """Queue a request. ValueError for an empty prompt or max_tokens < 1: the caller's mistakes."""
        if not request.prompt_ids or request.params.max_tokens < 1:
            raise ValueError(f"request {request.request_id}: empty prompt or max_tokens < 1")
        self._waiting.append(request)

    def has_work(self) -> bool:
        return bool(self._waiting) or any(row.request is not None for row in self._rows)

    def end_session(self, session: str) -> None:
        row = self._sessions.pop(session, None)
        if row is not None:
            row.ended, row.request, row.parked = True, None, None

    def reset(self) -> None:
        """Forget every session and cache: what was computed under other weights must not be continued."""
        self._waiting, self._rows, self._cache, self._sessions = [], [], None, {}

    def close(self) -> None:
        self.reset()

    @torch.no_grad()
    def step(self) -> list[Completion]:
        """Feed one token to every active row (after admitting what waits); return what finished."""
        was_training = self.model.training
        if was_training:
            self.model.eval()
        try:
            self._done = []
            self._admit()
            self._feed_chunks()
            self._park_idle()
            if self._rows:
                self._feed_one()
            return self._done
        finally:
            if was_training:
                self.model.train()

    # ---- who is in the batch

    def _admit(self) -> None:
        """Start waiting requests: on their session's cache where it extends, else as new rows."""
        fresh: list[_Row] = []
        resumed: list[_Row] = []
        still_waiting: list[Request] = []
        active = sum(row.request is not None for row in self._rows)
        for request in self._waiting:
            if active >= self.max_rows:
                still_waiting.append(request)
                continue
            active += 1
            row = self._sessions.get(request.session) if request.session else None
            if row is not None and row.request is None and _extends(request.prompt_ids, row.fed):
                if row.parked is not None:
                    resumed.append(row)
            else:
                if row is not None:
                    row.ended = True
                row = _Row(request.session)
                fresh.append(row)
                if request.session:
                    self._sessions[request.session] = row
            row.begin(request)
        self._waiting = still_waiting
        if resumed:
            parked = [(row.parked, [row]) for row in resumed if row.parked is not None]
            self._join(parked)
            for row in resumed:
                row.parked = None
        if fresh:
            self._prefill(fresh)

    def _park_idle(self) -> None:
        """Take rows without a request out of the batch: ended ones for good, the others onto their own cache."""
        keep = [i for i, row in enumerate(self._rows) if row.request is not None and not row.ended]
        if len(keep) == len(self._rows):
            return
        for i, row in enumerate(self._rows):
            if row.request is None and not row.ended:
                assert self._cache is not None
                row.parked = kv.take(self._cache, [i], len(row.fed))
        self._keep(keep)

    def _keep(self, indices: list[int]) -> None:
        rows = [self._rows[i] for i in indices]
        if not rows:
            self._rows, self._cache = [], None
            return
        assert self._cache is not None
        self._cache = kv.take(self._cache, indices, max(len(row.fed) for row in rows))
        self._rows = rows

    def _join(self, parts: Sequence[tuple[DynamicCache, list[_Row]]]) -> None:
        groups = [(self._cache, self._rows)] if self._cache is not None else []
        groups.extend(parts)
        rows = [row for _, group in groups for row in group]
        self._cache = kv.join([cache for cache, _ in groups], max(len(row.fed) for row in rows))
        self._rows = rows

    # ---- forwards

    def _prefill(self, rows: list[_Row]) -> None:
        """Run new prompts through left-padded forwards, equal prompts once, and sample each row's first id."""
        unique: dict[tuple[int, ...], list[_Row]] = {}
        for row in rows:
            unique.setdefault(tuple(row.pending), []).append(row)
        for prompts in _token_budgeted(sorted(unique, key=len), self.prefill_tokens):
            cache = DynamicCache(config=self.model.config.get_text_config())
            cache, logits = self._forward(cache, 0, prompts, [0] * len(prompts))
            order = [row for prompt in prompts for row in unique[prompt]]
            source = [i for i, prompt in enumerate(prompts) for _ in unique[prompt]]
            for row in order:
                row.fed, row.pending = row.pending, []
            self._join([(kv.take(cache, source, len(prompts[-1])), order)])
            self._choose(order, logits[source])

    def _feed_chunks(self) -> None:
        """Rows with much to feed leave the batch, take it in one forward each, and come back."""
        long = [i for i, row in enumerate(self._rows) if len(row.pending) > self.chunk_tokens]
        if not long:
            return
        assert self._cache is not None
        parts: list[tuple[DynamicCache, list[_Row]]] = []
        for i in long:
            row = self._rows[i]
            own, logits = self._forward(
                kv.take(self._cache, [i], len(row.fed)), len(row.fed), [tuple(row.pending)], [len(row.fed)]
            )
            row.fed, row.pending = row.fed + row.pending, []
            self._choose([row], logits)
            parts.append((own, [row]))
        self._keep([i for i in range(len(self._rows)) if i not in set(long)])
        self._join(parts)

    def _feed_one(self) -> None:
        rows = self._rows
        assert self._cache is not None
        width = max(len(row.fed) for row in rows)
        lengths = [len(row.fed) for row in rows]
        self._cache, logits = self._forward(self._cache, width, [(row.pending[0],) for row in rows], lengths)
        for row in rows:
            row.fed.append(row.pending.pop(0))
        ready = [i for i, row in enumerate(rows) if not row.pending]
        if ready:
            self._choose([rows[i] for i in ready], logits if len(ready) == len(rows) else logits[ready])

    def _forward(
        self, cache: DynamicCache, width: int, chunks: Sequence[tuple[int, ...]], lengths: Sequence[int]
    ) -> tuple[DynamicCache, torch.Tensor]:
        """Feed `chunks` (left-padded to one length) after `width` cached columns, of which row b owns `lengths[b]`.

        Returns the cache and the logits (rows, vocabulary) after the last id of each row.
        """
        device = self.model.device
        longest = max(map(len, chunks))
        ids = torch.zeros(len(chunks), longest, dtype=torch.long)
        mask = torch.zeros(len(chunks), width + longest, dtype=torch.long)
        positions = torch.zeros(len(chunks), longest, dtype=torch.long)
        if longest == 1:
            ids[:, 0] = torch.tensor([chunk[0] for chunk in chunks])
            positions[:, 0] = torch.tensor(lengths)
            mask = (torch.arange(width + 1) >= (width - torch.tensor(lengths))[:, None]).long()
        else:
            for b, (chunk, length) in enumerate(zip(chunks, lengths, strict=True)):
                pad = longest - len(chunk)
                ids[b, pad:] = torch.tensor(chunk)
                positions[b, pad:] = torch.arange(length, length + len(chunk))
                mask[b, width - length : width] = 1
                mask[b, width + pad :] = 1
        self.tokens_fed += sum(map(len, chunks))
        output = self.model(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            position_ids=positions.to(device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.past_key_values, output.logits[:, -1]

    def _choose(self, rows: list[_Row], logits: torch.Tensor) -> None:
        """Sample one id for each row; finish the requests that end with it."""
        params = [row.request.params for row in rows if row.request is not None]
        tokens, logprobs = sample_tokens(logits, params, [row.uniforms[len(row.sampled)] for row in rows])
        for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
            request = row.request
            assert request is not None
            row.sampled.append(token)
            row.logprobs.append(logprob)
            row.pending = [token]
            stopped = token in request.params.stop_token_ids
            if stopped or len(row.sampled) >= request.params.max_tokens:
                ids, known = tuple(row.sampled), tuple(row.logprobs)
                reason: StopReason = "stop" if stopped else "length"
                done = Completion(request.request_id, ids, known, reason, self.weights())
                self._done.append(refuse_nan(done))
                row.request, row.pending = None, []
                row.ended = row.ended or not row.session


def _token_budgeted(prompts: list[tuple[int, ...]], budget: int) -> Iterator[list[tuple[int, ...]]]:
    """Split prompts, sorted by length, into groups of at most `budget` padded tokens (at least one prompt each)."""
    group: list[tuple[int, ...]] = []
    for prompt in prompts:
        if group and (len(group) + 1) * len(prompt) > budget:
            yield group
            group = []
        group.append(prompt)
    if group:
        yield group


def _extends(ids: Sequence[int], prefix: Sequence[int]) -> bool:
    return len(ids) > len(prefix) and list(ids[: len(prefix)]) == list(prefix)
