"""What the hooks collect while the engine runs: as little as possible, made into lines by the writer thread."""

from array import array
from typing import Any

_STEP_BYTES = 2048
"""SchedulerStats of vLLM 0.32 with speculation and the details of the step have 1.4 KiB and a little more."""
_REQUEST_BYTES = 1024
_CHUNK_BYTES = 16
"""Two references; the moments are shared by all requests of a batch."""
_TOKEN_ID_BYTES = 36


class StepSample:
    """An engine step that carried scheduler statistics."""

    __slots__ = ("engine", "monotonic_s", "scheduler_stats")
    size_bytes = _STEP_BYTES

    def __init__(self, engine: int, monotonic_s: float, scheduler_stats: Any) -> None:
        self.engine = engine
        self.monotonic_s = monotonic_s
        self.scheduler_stats = scheduler_stats


class Moment:
    """What all chunks of one engine message have in common."""

    __slots__ = ("monotonic_s", "num_running", "prefill_tokens")

    def __init__(self, monotonic_s: float, num_running: int) -> None:
        self.monotonic_s = monotonic_s  # when the engine made the message, by its own clock
        # Requests that run after the step; at least 1, as the last one may just have ended.
        self.num_running = num_running if num_running > 0 else 1
        self.prefill_tokens = 0  # prompt tokens of the requests whose first token the message brought


class RequestSample:
    """A request of this API server, from its admission on."""

    __slots__ = (
        "arrival_monotonic_s",
        "arrival_wall_s",
        "cached_tokens",
        "concurrency",
        "counts",
        "ended_by",
        "engine",
        "external_id",
        "finish_reason",
        "id",
        "kept_tokens",
        "moments",
        "preemptions",
        "prefill_tokens",
        "prompt_token_ids",
        "prompt_tokens",
        "queued_s",
        "scheduled_s",
        "stop_reason",
        "stop_strings",
        "temperature",
        "token_ids",
    )

    def __init__(self, request: Any, arrival_monotonic_s: float, *, token_ids: bool) -> None:
        """Take what an EngineCoreRequest says."""
        parameters = request.sampling_params
        self.id: str = request.request_id
        self.external_id: str | None = request.external_req_id
        self.arrival_monotonic_s = arrival_monotonic_s
        self.arrival_wall_s: float = request.arrival_time
        self.concurrency = 1  # requests in flight at its arrival, itself included
        # 8 bytes a token instead of 40, for as long as it waits to be hashed; 0.14 ms for 8,000 of them.
        self.prompt_token_ids = array("q", request.prompt_token_ids or ())
        self.prompt_tokens = _prompt_tokens(request)
        # What it counts for in the step of its first token: its prompt, or nothing where another engine did that.
        self.prefill_tokens = 0 if _is_prefilled_elsewhere(parameters) else self.prompt_tokens
        self.temperature: float | None = getattr(parameters, "temperature", None)
        self.stop_strings = _stop_strings(parameters)  # what would end it, apart from the engine
        self.engine: int | None = None
        self.queued_s: float | None = None
        self.scheduled_s: float | None = None
        self.preemptions = 0
        self.cached_tokens: int | None = None
        # One entry a chunk
        self.moments: list[Moment] = []
        self.counts: list[int] = []
        # What was generated; None where that is not recorded.
        self.token_ids: list[int] | None = [] if token_ids else None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.ended_by = "unfinished"
        self.kept_tokens: int | None = None

    @property
    def size_bytes(self) -> int:
        """What it keeps in memory, about; all its tokens and chunks must be there."""
        ids = len(self.token_ids) if self.token_ids is not None else 0
        chunks_bytes = _CHUNK_BYTES * len(self.counts)
        prompt_bytes = self.prompt_token_ids.itemsize * len(self.prompt_token_ids)
        return _REQUEST_BYTES + prompt_bytes + chunks_bytes + _TOKEN_ID_BYTES * ids


def _prompt_tokens(request: Any) -> int:
    """Return the length of the prompt, which may have been given as embeddings."""
    given = request.prompt_token_ids if request.prompt_token_ids is not None else request.prompt_embeds
    return len(given) if given is not None else 0


def _is_prefilled_elsewhere(parameters: Any) -> bool:
    """Decide whether a request came from an engine that only prefills (vllm-vcr leaves those out too)."""
    extra = getattr(parameters, "extra_args", None)
    return bool(((extra or {}).get("kv_transfer_params") or {}).get("do_remote_prefill"))


def _stop_strings(parameters: Any) -> list[str]:
    given = getattr(parameters, "stop", None) or []
    return [given] if isinstance(given, str) else list(given)
