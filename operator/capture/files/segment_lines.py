"""Lines that the recorder writes beside the engine, one file per API server: the raw material of a capture.

Every time is in seconds of the host's CLOCK_MONOTONIC unless its name says wall.
"""

from typing import Any

from msgspec import Struct


class Speculative(Struct, frozen=True, kw_only=True):
    """How the engine speculates.

    Attributes
    ----------
    method
        As vLLM calls it, such as ``ngram`` or ``draft_model``.
    num_speculative_tokens
        K: tokens drafted per step at most.
    model
        The draft model, where there is one.
    """

    method: str | None = None
    num_speculative_tokens: int | None = None
    model: str | None = None


class EngineConfig(Struct, frozen=True, kw_only=True):
    """What the engine resolved its settings to; what its version does not have is null.

    Attributes
    ----------
    max_num_seqs
        Requests in one batch at most.
    block_size
        Tokens in a block of the KV cache, which is what block hashes are over.
    max_model_len
        Tokens of one request at most.
    max_num_batched_tokens
        Tokens in one step at most.
    tensor_parallel, pipeline_parallel, data_parallel
        GPUs, stages and replicas of the engine.
    gpu_memory_utilization
        Share of a GPU's memory that the engine may use.
    enforce_eager, enable_prefix_caching, async_scheduling
        Switches.
    speculative
        Absent without speculative decoding.
    """

    max_num_seqs: int | None = None
    block_size: int | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    data_parallel: int | None = None
    gpu_memory_utilization: float | None = None
    enforce_eager: bool | None = None
    enable_prefix_caching: bool | None = None
    async_scheduling: bool | None = None
    speculative: Speculative | None = None


class Header(Struct, frozen=True, kw_only=True, tag_field="k", tag="header"):
    """First line of a segment: who recorded what.

    Attributes
    ----------
    schema
        Version of these lines.
    recorder, vllm
        Versions of the recorder and of the engine.
    boot
        Random, one for each start of a process.
    host
        Its host name.
    pid
        Its process id.
    client_index, client_count
        Which API server of how many.
    engines
        Indexes of the engines it talks to.
    wall_s, monotonic_s
        When it started, by both clocks.
    model
        What the engine serves.
    config
        The engine's settings.
    gpu
        Name of the GPU; absent on CPU.
    token_ids, steps
        Whether token ids and step statistics are recorded.
    start
        The same for all API servers of one start of the engine; absent where the recorder could not tell.
    gpu_uuids
        What the driver calls the GPUs.
    """

    schema: int
    recorder: str
    vllm: str
    boot: str
    host: str
    pid: int
    client_index: int
    client_count: int
    engines: list[int]
    wall_s: float
    monotonic_s: float
    model: str | None = None
    config: EngineConfig
    gpu: str | None = None
    token_ids: bool = False
    steps: bool = True
    start: str | None = None
    gpu_uuids: list[str] = []


class Request(Struct, frozen=True, kw_only=True, tag_field="k", tag="request"):
    """One request as the engine served it, written when it ended.

    Attributes
    ----------
    id, external_id
        The engine's own id, and the one that the API server made of X-Request-Id.
    engine
        Index of the engine that ran it; absent if none did.
    arrival_monotonic_s, arrival_wall_s
        When the API server handed it to the engine.
    prompt_tokens
        Length of the prompt in tokens.
    concurrency
        Requests in flight at this API server at arrival, this one included.
    temperature
        Of sampling.
    queued_s, scheduled_s
        When the engine queued it, and first scheduled it.
    preemptions
        How often it was preempted.
    cached_tokens
        Prompt tokens found in the prefix cache.
    chunk_s
        The engine's stamp of each output chunk.
    chunk_tokens, num_running, prefill_tokens
        Parallel to ``chunk_s``: tokens as the engine produced them; requests running after the step; full prompt
        lengths of the requests whose first token came in the step.
    kept_tokens
        Tokens of the last chunk that a stop string left, where one cut it.
    block_hashes
        Chained hashes of the prompt's full blocks.
    finish_reason, stop_reason
        As vLLM says them.
    ended_by
        ``engine``, ``stop_string``, ``abort``, or ``unfinished`` when recording ended first.
    token_ids
        The output, where asked for.
    """

    id: str
    external_id: str | None = None
    arrival_monotonic_s: float
    arrival_wall_s: float
    prompt_tokens: int
    ended_by: str
    engine: int | None = None
    concurrency: int = 1
    temperature: float | None = None
    queued_s: float | None = None
    scheduled_s: float | None = None
    preemptions: int = 0
    cached_tokens: int | None = 0
    chunk_s: list[float] = []
    chunk_tokens: list[int] = []
    num_running: list[int] = []
    prefill_tokens: list[int] = []
    kept_tokens: int | None = None
    block_hashes: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class Step(Struct, frozen=True, kw_only=True, tag_field="k", tag="step"):
    """One output message of an engine that carried statistics.

    Attributes
    ----------
    engine
        Index of the engine.
    t
        The engine's stamp of the message.
    scheduler
        vLLM's SchedulerStats, whole; absent where another API server got those of this step.
    """

    engine: int
    t: float
    scheduler: dict[str, Any] | None = None


class Anchor(Struct, frozen=True, kw_only=True, tag_field="k", tag="anchor"):
    """The two clocks at one moment, every ten seconds.

    Attributes
    ----------
    monotonic_s, wall_s
        CLOCK_MONOTONIC and seconds since 1970.
    """

    monotonic_s: float
    wall_s: float


class Off(Struct, frozen=True, kw_only=True, tag_field="k", tag="off"):
    """The recorder switched itself off; the engine went on.

    Attributes
    ----------
    reason
        Why.
    """

    reason: str


class Closed(Struct, frozen=True, kw_only=True, tag_field="k", tag="closed"):
    """Last line of a segment that came to its end.

    Attributes
    ----------
    reason
        ``ordered``, ``exit``, ``disk_full`` or ``unknown_shape``.
    requests, steps
        Lines of each kind in this segment.
    dropped
        Lines that were lost because the writer could not keep up.
    unfinished
        Requests that were still running when recording ended.
    errors, first_error
        How often the recorder failed inside the engine, and how the first time.
    """

    reason: str
    requests: int
    steps: int
    dropped: int
    unfinished: int = 0
    errors: int = 0
    first_error: str | None = None


SegmentLine = Header | Request | Step | Anchor | Off | Closed
