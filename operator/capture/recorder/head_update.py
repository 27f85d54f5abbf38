"""Replace the draft head of the engine, on the order of the sidecar, while requests wait.

The workers read and verify the new head while the engine serves. Then vLLM pauses between two steps, the workers load
the head, and the prefix cache is reset, because its blocks have keys and values of the old head. Running requests are
preempted for that, and continue. The sidecar then sends canary prompts, and decides whether to keep the new head.
"""

import asyncio
import inspect
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, Literal

import msgspec

from .head_loader import NEW, OLD
from .head_metrics import FAILED, KEPT, LONGEST_REASON, REFUSED, REVERTED, publish

logger = logging.getLogger("vllm.specdecode_recorder")

READ_TIMEOUT_S = 3600.0
LOAD_TIMEOUT_S = 600.0
VERDICT_TIMEOUT_S = 3600.0
_POLL_S = 0.2
_LONGEST_PATH = 1024


class Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Order to load another head."""

    root: Annotated[str, msgspec.Meta(pattern="^/.", max_length=_LONGEST_PATH)]  # mount of the claim
    path: Annotated[str, msgspec.Meta(min_length=1, max_length=_LONGEST_PATH)]  # folder of the head in the claim
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]  # of its model.safetensors


class Judged(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Verdict of the sidecar on the answers with the new head. Unless it is right, the old head is loaded again."""

    verdict: Literal["right", "wrong", "unchecked"]
    reason: Annotated[str, msgspec.Meta(max_length=LONGEST_REASON)]


Verdict = Callable[[], Judged | None]
Answer = Callable[[dict[str, str]], None]


class UpdateError(Exception):
    """The update failed, and the old head stays; the message is the reason."""

    def __init__(self, result: str, reason: str) -> None:
        super().__init__(reason)
        self.result = result


class HeadUpdater:
    """Replaces the head of one engine, one update at a time.

    Parameters
    ----------
    engine
        vLLM's AsyncLLM; None if it was not found.
    config
        vLLM's configuration.
    """

    def __init__(self, engine: Any, config: Any) -> None:
        self._engine, self._config = engine, config
        self._busy = threading.Lock()

    def follow(
        self, order: Head, verdict: Callable[[], Judged | None], answer: Callable[[dict[str, Any]], None]
    ) -> None:
        """Replace the head, tell the sidecar, and keep or revert it by its verdict; publish the result.

        ``verdict`` waits for the sidecar, and returns None if it does not answer. ``answer`` sends it a message.
        """
        if not self._busy.acquire(blocking=False):
            answer({"result": FAILED, "reason": "another update is in progress"})
            return
        try:
            result, reason, pause_s = self._update(order, verdict, answer)
            publish(order.sha256, result, reason, pause_s)
            logger.info("head: %s %s (%s)", order.sha256[:12], result, reason or "served without a restart")
            answer({"result": result, "reason": reason})
        finally:
            self._busy.release()

    def _update(self, order: Head, verdict: Verdict, answer: Answer) -> tuple[str, str, float]:
        pause_s = 0.0
        try:
            self._read(order)
            pause_s = self._load(NEW)
            answer({"result": NEW, "reason": ""})
            judged = verdict() or Judged("unchecked", "the sidecar did not judge the answers")
            if judged.verdict != "right":
                pause_s += self._load(OLD)
                return REVERTED if judged.verdict == "wrong" else FAILED, judged.reason, pause_s
        except UpdateError as error:
            return error.result, str(error), pause_s
        finally:
            self._call(lambda engine: engine.collective_rpc("specdecode_end_update"), LOAD_TIMEOUT_S, quiet=True)
        return KEPT, "", pause_s

    def _read(self, order: Head) -> None:
        """Let all workers read and verify the head; raise UpdateError."""
        parallel = self._config.parallel_config
        if self._engine is None:
            raise UpdateError(REFUSED, "this engine is not supported: its AsyncLLM was not found")
        if parallel.worker_extension_cls != f"{__package__}.head_loader.HeadLoader":
            raise UpdateError(REFUSED, "the engine was started without the extension of its workers")
        if parallel.data_parallel_size > 1:
            raise UpdateError(REFUSED, "the engine has more than one data-parallel rank")
        arguments = (order.root, order.path, order.sha256)
        self._call(lambda engine: engine.collective_rpc("specdecode_read_head", args=arguments), LOAD_TIMEOUT_S)
        until_s = time.monotonic() + READ_TIMEOUT_S
        while True:
            refused = self._call(lambda engine: engine.collective_rpc("specdecode_is_read"), LOAD_TIMEOUT_S)
            if reason := next(filter(None, refused), ""):
                raise UpdateError(REFUSED, reason)
            if None not in refused:
                return
            if time.monotonic() > until_s:
                raise UpdateError(FAILED, f"the head was not read within {READ_TIMEOUT_S:.0f} s")
            time.sleep(_POLL_S)

    def _load(self, which: str) -> float:
        """Load a head in all workers; return the length of the pause in seconds. Raises UpdateError."""
        failed, pause_s = self._call(lambda engine: self._paused(engine, which), LOAD_TIMEOUT_S)
        if failed:
            raise UpdateError(FAILED, failed)
        return float(pause_s)

    async def _paused(self, engine: Any, which: str) -> tuple[str, float]:
        begun_s = time.monotonic()
        await engine.pause_generation(mode="keep", clear_cache=False)
        try:
            failed = await self._loaded(engine, which)
            if failed and which == NEW:
                # A worker that failed has the old head again; the others must not keep the new one.
                await engine.collective_rpc("specdecode_load_head", args=(OLD,))
        finally:
            await engine.resume_generation()
        return failed, time.monotonic() - begun_s

    async def _loaded(self, engine: Any, which: str) -> str:
        """Load a head and reset the prefix cache; return why that failed, or an empty string."""
        try:
            told = await engine.collective_rpc("specdecode_load_head", args=(which,))
            if failed := next(filter(None, told), ""):
                return str(failed)
            if self._config.cache_config.enable_prefix_caching:
                await engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        except Exception as error:  # noqa: BLE001 (vLLM raises many types)
            return f"{type(error).__name__}: {error}"
        return ""

    def _call(self, make: Callable[[Any], Coroutine[Any, Any, Any]], timeout_s: float, *, quiet: bool = False) -> Any:
        """Run a coroutine on the engine's event loop; raise UpdateError if it fails, unless ``quiet``."""
        try:
            # The task that reads the engine's outputs runs on that loop.
            loop = self._engine.output_handler.get_loop()
            return asyncio.run_coroutine_threadsafe(make(self._engine), loop).result(timeout_s)
        except Exception as error:  # vLLM raises many types
            if not quiet:
                raise UpdateError(FAILED, f"{type(error).__name__}: {error}") from error
        return None


def engine_under_construction() -> Any:
    """Return the AsyncLLM whose constructor creates the plugin; None if it is not found.

    vLLM passes its configuration to the plugin, but not itself.
    """
    frame = inspect.currentframe()
    while frame is not None:
        found = frame.f_locals.get("self")
        if type(found).__name__ == "AsyncLLM":
            return found
        frame = frame.f_back
    return None
