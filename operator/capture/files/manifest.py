"""The manifest of a capture: what was recorded where, how it was checked, and a checksum of every file."""

from typing import Any, Final

from msgspec import Struct

from specdecode_operator.capture.recorder.lines import EngineConfig

SCHEMA: Final = 1
"""Version of the manifest and of our fields in the files."""


class FileEntry(Struct, kw_only=True, frozen=True):
    """One file."""

    bytes: int
    lines: int  # how many it has, a trace's first included
    sha256: str


class SegmentEntry(Struct, kw_only=True, frozen=True):
    """What one API server's recorder said of itself."""

    boot: str  # random, one for each start of a process
    client_index: int
    closed: str | None = None  # why it ended; null where it was interrupted
    # Its own counts; null where it was interrupted.
    requests: int | None = None
    steps: int | None = None
    dropped: int | None = None
    unfinished: int | None = None


class Gate(Struct, kw_only=True, frozen=True):
    """One measure of a capture's quality."""

    value: float | None  # null where it could not be measured
    limit: float | None  # the most that passes; null where nothing is judged
    passed: bool  # whether it did; what could not be measured passes
    why: str


class EngineCounters(Struct, kw_only=True, frozen=True):
    """How far the engine's own counters on /metrics went, from before the first measured request until it was idle."""

    generation_tokens: int  # over all ranks
    # Verifications of one request's draft, tokens drafted, and tokens accepted of them; null without speculation.
    drafts: int | None = None
    draft_tokens: int | None = None
    accepted_tokens: int | None = None
    # What the engine allocated for the KV cache, of the smallest rank; null where it does not say.
    num_gpu_blocks: int | None = None
    kv_cache_tokens: int | None = None


class AccountingEntry(Struct, kw_only=True, frozen=True):
    """Where every request went: ``sent = http_rejected + never_admitted + sum(engine)``."""

    sent: int  # without warm-up
    http_rejected: int  # refused by the server before the engine saw them
    never_admitted: int  # given up by the client before the engine saw them
    engine: dict[str, int]  # requests with a record of the engine, by the client's outcome
    records: int  # records of the engine: n for each request
    not_sent: int  # requests of the workload that were never sent, as the time was over
    warmup: int
    mismatches: int
    equation: str


class Experiment(Struct, kw_only=True, frozen=True):
    """What a part of a capture with several arms is a part of; the same in the manifest of each."""

    arms: list[str]  # in the order of the spec
    baseline: str  # the arm that the others are compared with: the first
    repetitions: int
    order: list[list[str]]  # in which the arms were measured, repetition by repetition; drawn from the seed
    slo: dict[str, int] = {}  # ``ttftMs``, ``tpotMs``, ``latencyMs``: what counts as goodput; all requests where empty
    lossy: dict[str, str] = {}  # arms that may answer otherwise by their settings, and why


class Manifest(Struct, kw_only=True, frozen=True):
    """Everything about a published capture."""

    schema: int = SCHEMA
    # Which capture, and which part of it
    namespace: str
    capture: str
    arm: str
    repetition: int
    experiment: Experiment | None = None  # null for a capture with one arm
    capture_uid: str | None = None  # UID of its object, by which a later attempt knows these files for its own
    attempt: str  # of the pod that made it
    specdecode: str  # of the operator's image
    # As the engine itself reports them
    vllm: str
    recorder_tried: bool = True  # with this version
    model: str | None
    gpu: str | None
    host: str
    config: EngineConfig
    node: str | None
    # Image that the engine's container ran, with its digest, as Kubernetes has it; null where it is not known.
    image_id: str | None = None
    gpu_uuids: list[str] = []  # what the driver calls the GPUs; empty where it does not tell
    context: dict[str, Any]  # what the operator gave: image, plan, recording flags added and more, as it stands
    workload: dict[str, Any]
    seed: int
    record: dict[str, Any]
    # The run's zero by CLOCK_MONOTONIC and in seconds since 1970.
    zero_monotonic_s: float
    zero_wall_s: float
    published_wall_s: float  # when the files were complete, in seconds since 1970
    config_hash: str  # as vllm-vcr computes it (scheme v3)
    engine_hash: str  # over everything that the engine runs with
    accounting: AccountingEntry
    engine_counters: EngineCounters | None  # what /metrics says of the run; null where it did not answer
    files: dict[str, FileEntry]
    gates: dict[str, Gate]
    segments: list[SegmentEntry]
    notes: list[str]  # what else a reader should know, such as torn ends that were left out
    summary: dict[str, Any]


class PartialManifest(Struct, kw_only=True, frozen=True):
    """Labels the files of an attempt that was not published."""

    schema: int = SCHEMA
    namespace: str
    capture: str
    attempt: str
    # Why it ended; ``Unfinished`` while it runs, and for ever if it was killed.
    reason: str
    message: str
    files: dict[str, int] = {}  # bytes of each, as they were
