"""Many episodes over one engine, without lock-step: an episode asks for its next turn as soon as its tools are done.

Each episode goes: next_request -> engine -> accept (parse, run tools; in a thread, because the SQL runs in worker
processes) -> next_request ... until it ends and its record is yielded. Records come in the order of finishing.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from shared.chat import ChatCodec
from shared.data.example import Example
from shared.engines.base import Completion, Engine, Request
from shared.episode import Episode, EpisodeConfig, EpisodeRecord
from shared.sql.sandbox import Sandbox
from shared.tools.executor import ToolExecutor


@dataclass(frozen=True)
class Task:
    """One episode to run: the example, and the seed that all its sampling derives from."""

    example: Example
    seed: int = 0


def run_episodes(
    tasks: Iterable[Task],
    engine: Engine,
    codec: ChatCodec,
    sandbox: Sandbox,
    config: EpisodeConfig,
    *,
    concurrency: int = 64,
    tool_threads: int = 4,
    wait_for_tools: bool | None = None,
) -> Iterator[tuple[int, EpisodeRecord]]:
    """Run every task and yield (its index, its record) as episodes end.

    At most `concurrency` episodes are alive. With `wait_for_tools` the engine steps only when no tool is running; the
    engine says which it wants (`Engine.batches_by_itself`) unless it is given.
    SetupError (a missing database, say) stops the whole run: it would be wrong to charge it to the model.
    """
    if concurrency < 1 or tool_threads < 1:
        raise ValueError("concurrency and tool_threads must be at least 1")
    if wait_for_tools is None:
        wait_for_tools = not engine.batches_by_itself
    until = ALL_COMPLETED if wait_for_tools else FIRST_COMPLETED
    source = enumerate(tasks)
    running: dict[str, tuple[int, Episode]] = {}
    tools: dict[Future[Request | None], str] = {}

    def start(index: int, task: Task) -> tuple[Episode, Request | None]:
        executor = ToolExecutor(task.example.database, sandbox)
        # The index makes the name unique: a question may be sampled several times.
        episode = Episode(
            task.example, executor, codec, config, seed=task.seed, name=f"{index}:{task.example.question_id}"
        )
        return episode, episode.next_request()

    def advance(episode: Episode, completion: Completion) -> Request | None:
        episode.accept(completion)
        return episode.next_request()

    with ThreadPoolExecutor(tool_threads, thread_name_prefix="tools") as pool:
        try:
            exhausted = False
            while not exhausted or running:
                while not exhausted and len(running) < concurrency:
                    item = next(source, None)
                    if item is None:
                        exhausted = True
                        break
                    index, task = item
                    episode, request = start(index, task)
                    if request is None:
                        yield index, episode.record()
                        continue
                    running[episode.name] = (index, episode)
                    engine.add(request)
                if engine.has_work():
                    for completion in engine.step():
                        name = completion.request_id.rpartition("#")[0]
                        tools[pool.submit(advance, running[name][1], completion)] = name
                block = not engine.has_work() or wait_for_tools
                finished = wait(tools, timeout=None if block else 0, return_when=until).done if tools else ()
                # Sets have no order; the engine must see requests in the same order in every run.
                for future in [f for f in tools if f in finished]:
                    name = tools.pop(future)
                    request = future.result()
                    if request is not None:
                        engine.add(request)
                        continue
                    engine.end_session(name)
                    index, episode = running.pop(name)
                    yield index, episode.record()
        finally:
            for name in running:
                engine.end_session(name)
