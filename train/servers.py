"""vLLM servers as the rollout engine: requests over HTTP, weights through a folder, each update proven.

Each rank asks its share of the servers (`share`). When the trainer's weights have changed, or a server says that it
holds others (it was started anew), rank 0 writes them once, in the engine's types, into `rollout.sync_folder`. Each
server is told to load them, and the checksum of each tensor, as its kernels have it, must be the trainer's. Then it
gets the fingerprint as the label that it puts on every completion (shared/engines/vllm_server_client.py).

All ranks make the same collective calls, and fail together: a problem of one is told to all.
"""

import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from accelerate.utils import gather_object
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from shared.engines.base import Completion, Request
from shared.engines.openai import ServedEngine
from shared.engines.vllm_server_client import VllmServer
from shared.engines.vllm_weights import checksum
from shared.errors import SetupError
from shared.files import replacing
from train.config import RolloutConfig, TrainConfig
from train.live import live_tensors
from train.weight_sync import Piece, checkpoint_names, is_conditional, plan_pieces, refuse_not_finite

ADDRESSES = "EXECPLAN_ROLLOUT_SERVERS"
# Numbers that one file holds at most, so that rank 0 never has all weights a second time.
_FILE_NUMBERS = 1 << 30
Value = TypeVar("Value")


def server_addresses(rollout: RolloutConfig) -> list[str]:
    """The servers of the config, or those that the environment names. SetupError when there are none."""
    found = list(rollout.servers) or os.environ.get(ADDRESSES, "").replace(",", " ").split()
    if not found:
        raise SetupError(f"rollout.engine: server needs rollout.servers: [http://host:port, …], or {ADDRESSES}")
    for address in found:
        if not address.startswith(("http://", "https://")):
            raise SetupError(f"rollout.servers: {address} is no address; give one like http://host:8000")
    if len(set(found)) < len(found):
        raise SetupError("rollout.servers names a server twice")
    return found


def share(servers: Sequence[Value], rank: int, ranks: int) -> list[Value]:
    """The servers that a rank asks: every `ranks`-th, or, when there are fewer servers than ranks, one."""
    return list(servers[rank::ranks]) or [servers[rank % len(servers)]]


def check_servers(config: TrainConfig) -> None:
    """SetupError when a server cannot serve this run; asked before anything is loaded."""
    for address in server_addresses(config.rollout):
        try:
            VllmServer.at(address).check(config.rollout.max_tokens)
        except SetupError as error:
            raise SetupError(f"rollout.servers: {error}") from None


def together(action: Callable[[], Value]) -> Value:
    """Do this on every rank; when it fails on one, SetupError on all of them."""
    result: list[Value] = []
    problem: str | None = None
    try:
        result.append(action())
    except SetupError as error:
        problem = str(error)
    for said in gather_object([problem]):
        if said is not None:
            raise SetupError(said)
    return result[0]


class WeightFolder:
    """The trainer's weights as files that servers load: written by one rank, removed when all have them.

    Each update has a folder of its own: other nodes may remember for a while what was in one that they have read.
    """

    def __init__(self, folder: Path, *, writes: bool) -> None:
        """`folder` is this run's alone: what it leaves there when it is killed, it removes at its next start."""
        self.files: list[Path] = []
        self._base = folder.absolute()
        self._folder = self._base
        self._writes = writes
        self._waiting: dict[str, Tensor] = {}

    def begin(self) -> None:
        """A new, empty folder. SetupError when it cannot be made."""
        self.remove()
        if not self._writes:
            return
        self._folder = self._base / secrets.token_hex(8)
        try:
            self._folder.mkdir(parents=True)
        except OSError as error:
            raise SetupError(f"rollout.sync_folder: {self._folder} cannot be made ({error.strerror})") from None

    def add(self, name: str, tensor: Tensor) -> None:
        """One more tensor, under its checkpoint name."""
        if not self._writes:
            return
        self._waiting[name] = tensor.detach().cpu().contiguous()
        if sum(held.numel() for held in self._waiting.values()) >= _FILE_NUMBERS:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        if not self._waiting:
            return
        path = self._folder / f"weights-{len(self.files):05d}.safetensors"
        try:
            with replacing(path) as beside:
                save_file(self._waiting, beside)
        except (OSError, SafetensorError) as error:
            raise SetupError(f"rollout.sync_folder: {path} cannot be written ({error})") from None
        self._waiting = {}
        self.files.append(path)

    def remove(self) -> None:
        """The files are in every server, or of no use."""
        self._waiting, self.files = {}, []
        if self._writes:
            shutil.rmtree(self._base, ignore_errors=True)


class ServerSync:
    """Brings servers to a live model's weights, again and again."""

    def __init__(self, model: nn.Module, servers: Sequence[VllmServer], folder: WeightFolder) -> None:
        """`servers` are those that this rank answers for; possibly none. SetupError when they hold another model."""
        self.model = model
        self.servers = list(servers)
        self.folder = folder
        described = gather_object(together(lambda: [server.describe() for server in self.servers]))
        if any(other != described[0] for other in described):
            raise SetupError("rollout.servers: they do not hold the same model in the same type")
        live = {name: tensor.shape for name, tensor in live_tensors(model).items()}
        shapes = {name: shape for name, (shape, _) in described[0].items()}
        self.pieces = plan_pieces(shapes, live)
        self.names = checkpoint_names(live, is_conditional(shapes))
        self._dtypes = {piece: getattr(torch, described[0][piece.engine][1]) for piece in self.pieces}

    @torch.no_grad()
    def push(self, label: str) -> None:
        """Load the live weights into the servers, prove it, and label them; all ranks call it.

        SetupError on all ranks when a number is not finite, a server fails, or holds something else than it was
        given; no server is asked for completions then.
        """
        try:
            expected = together(self._write)
            files = gather_object(self.folder.files)
            together(lambda: self._load(files, label, expected))
        finally:
            self.folder.remove()

    def _write(self) -> dict[Piece, int]:
        """Write the files, and return the checksum that each piece must have in a server."""
        by_name: dict[str, list[Piece]] = {}
        for piece in self.pieces:
            by_name.setdefault(piece.live, []).append(piece)
        expected: dict[Piece, int] = {}
        problem: SetupError | None = None
        try:
            self.folder.begin()
        except SetupError as error:
            problem = error
        for name, live in live_tensors(self.model).items():
            value = live.value()  # of all ranks, also when one has failed
            if problem is not None:
                continue
            try:
                refuse_not_finite(name, value)
                for piece in by_name[name]:
                    expected[piece] = checksum(value.to(self._dtypes[piece]))
                self.folder.add(self.names[name], value.to(self._dtypes[by_name[name][0]]))
            except SetupError as error:
                problem = error
        if problem is None:
            self.folder.flush()
            return expected
        raise problem

    def _load(self, files: Sequence[Path], label: str, expected: Mapping[Piece, int]) -> None:
        """All servers of this rank at once."""
        rows = [(piece.engine, piece.first, piece.rows) for piece in self.pieces]
        names = sorted(self.names.values())

        def load(server: VllmServer) -> None:
            found = server.load(files, names, rows)
            wrong = [piece for piece, sum_ in zip(self.pieces, found, strict=True) if sum_ != expected[piece]]
            if wrong:
                raise SetupError(
                    f"weight sync: {wrong[0].live} is not what {wrong[0].engine} of the server at {server.address} "
                    f"holds after loading ({len(wrong)} of {len(self.pieces)} pieces differ)"
                )
            server.vouch(label)

        if self.servers:
            with ThreadPoolExecutor(len(self.servers)) as threads:
                list(threads.map(load, self.servers))


class ServerRollouts:
    """The rollout engine of one rank: its share of the servers, and never from other weights than the trainer's.

    `syncs` and `sync_seconds` count the updates, the proof included.
    """

    batches_by_itself = True

    def __init__(
        self, servers: Sequence[VllmServer], sync: ServerSync, weights: Callable[[], str], *, concurrency: int
    ) -> None:
        """`servers` are those that this rank asks; `weights` names the trainer's present weights."""
        self.servers = list(servers)
        self.syncs, self.sync_seconds = 0, 0.0
        self._sync = sync
        self._weights = weights
        self._concurrency = concurrency
        self._held = ""
        # The server of each running episode, so that its next turn finds its prefix there.
        self._places: dict[str, VllmServer] = {}
        self._served = ServedEngine(self._ask, concurrency=concurrency)

    def refresh(self) -> None:
        """Bring the servers to the trainer's weights if any holds others. SetupError on all ranks when one fails."""
        wanted = self._weights()
        if self._served.has_work() and self._held != wanted:
            raise RuntimeError(f"the weights changed from {self._held} to {wanted} under running requests")
        labels = together(lambda: [server.label() for server in self._sync.servers])
        if any(gather_object([any(label != wanted for label in labels)])):
            started = time.perf_counter()
            self._held = ""
            self._sync.push(wanted)
            self.syncs += 1
            self.sync_seconds += time.perf_counter() - started
        self._held = wanted

    def add(self, request: Request) -> None:
        """Queue a request. RuntimeError when the servers were not refreshed since the weights changed."""
        if self._held != self._weights():
            raise RuntimeError(f"the servers hold {self._held or 'unknown weights'}: refresh comes first")
        if request.session not in self._places:
            busy = list(self._places.values())
            self._places[request.session] = min(self.servers, key=busy.count)
        self._served.add(request)

    def step(self) -> list[Completion]:
        """The answers that have come. SetupError when a server fails, or answers from other weights."""
        return self._served.step()

    def has_work(self) -> bool:
        return self._served.has_work()

    def end_session(self, session: str) -> None:
        self._served.end_session(session)
        self._places.pop(session, None)

    def reset(self) -> None:
        """Forget all requests; answers that are still under way go nowhere."""
        if self._served.has_work():
            self._served.close()
            self._served = ServedEngine(self._ask, concurrency=self._concurrency)
        self._places.clear()

    def close(self) -> None:
        self._served.close()

    def _ask(self, request: Request) -> Completion:
        return self._places[request.session].sample(request, self._held)


def server_rollouts(
    model: nn.Module, config: TrainConfig, weights: Callable[[], str], rank: int, ranks: int
) -> ServerRollouts:
    """The engine of this rank; a run's first refresh gives the servers its weights."""
    addresses = server_addresses(config.rollout)
    mine = [VllmServer.at(address) for address in share(addresses, rank, ranks)]
    # With fewer servers than ranks, the first rank that asks a server answers for it.
    loads = mine if rank < len(addresses) else []
    # The run's own folder within one that it may share with other runs.
    digest = hashlib.sha256(str(config.output.absolute()).encode()).hexdigest()[:8]
    folder = (config.rollout.sync_folder or config.output) / f"sync-{digest}"
    sync = ServerSync(model, loads, WeightFolder(folder, writes=rank == 0))
    return ServerRollouts(mine, sync, weights, concurrency=config.rollout.concurrency)
