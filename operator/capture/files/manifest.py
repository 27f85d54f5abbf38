"""The manifest of a capture: what was recorded where, how it was checked, and a checksum of every file."""

from typing import Any, Final

from msgspec import Struct

from specdecode_operator.capture.recorder.lines import EngineConfig

SCHEMA: Final = 1
"""Version of the manifest and of our fields in the files."""


class FileEntry(Struct, kw_only=True, frozen=True):
    """One file.

    Attributes
    ----------
    bytes
        Its size.
    lines
        How many it has, a trace's first included.
    sha256
        Checksum, in hexadecimal.
    """

    bytes: int
    lines: int
    sha256: str


class SegmentEntry(Struct, kw_only=True, frozen=True):
    """What one API server's recorder said of itself.

    Attributes
    ----------
    boot
        Random, one for each start of a process.
    client_index
        Which API server it was.
    closed
        Why it ended; null where it was interrupted.
    requests, steps, dropped, unfinished
        Its own counts; null where it was interrupted.
    """

    boot: str
    client_index: int
    closed: str | None = None
    requests: int | None = None
    steps: int | None = None
    dropped: int | None = None
    unfinished: int | None = None


class Gate(Struct, kw_only=True, frozen=True):
    """One measure of a capture's quality.

    Attributes
    ----------
    value
        What was measured; null where it could not be.
    limit
        The most that passes; null where nothing is judged.
    passed
        Whether it did; what could not be measured passes.
    why
        What the value means.
    """

    value: float | None
    limit: float | None
    passed: bool
    why: str


class EngineCounters(Struct, kw_only=True, frozen=True):
    """How far the engine's own counters on /metrics went, from before the first measured request until it was idle.

    Attributes
    ----------
    generation_tokens
        Tokens generated, over all ranks.
    drafts, draft_tokens, accepted_tokens
        Verifications of one request's draft, tokens drafted, and tokens accepted of them; null without speculation.
    """

    generation_tokens: int
    drafts: int | None = None
    draft_tokens: int | None = None
    accepted_tokens: int | None = None


class AccountingEntry(Struct, kw_only=True, frozen=True):
    """Where every request went: ``sent = http_rejected + never_admitted + sum(engine)``.

    Attributes
    ----------
    sent
        Requests sent, without warm-up.
    http_rejected
        Refused by the server before the engine saw them.
    never_admitted
        Given up by the client before the engine saw them.
    engine
        Requests with a record of the engine, by the client's outcome.
    records
        Records of the engine: n for each request.
    not_sent
        Requests of the workload that were never sent, as the time was over.
    warmup
        Requests sent to warm up.
    mismatches
        Requests that do not fit into the equation.
    equation
        All of it in one line.
    """

    sent: int
    http_rejected: int
    never_admitted: int
    engine: dict[str, int]
    records: int
    not_sent: int
    warmup: int
    mismatches: int
    equation: str


class Manifest(Struct, kw_only=True, frozen=True):
    """Everything about a published capture.

    Attributes
    ----------
    schema
        Version of this manifest.
    namespace, capture, arm, repetition
        Which capture, and which part of it.
    capture_uid
        UID of its object, by which a later attempt knows these files for its own.
    attempt
        UID of the pod that made it.
    specdecode
        Version of the operator's image.
    vllm, model, gpu, host, config
        As the engine itself reports them.
    node
        Kubernetes node, where it is known.
    image_id
        Image that the engine's container ran, with its digest, as Kubernetes has it; null where it is not known.
    gpu_uuids
        What the driver calls the GPUs; empty where it does not tell.
    context
        What the operator gave: image, plan, recording flags added and more, as it stands.
    workload, seed
        What was asked for.
    record
        What was to be recorded.
    zero_monotonic_s, zero_wall_s
        The run's zero by CLOCK_MONOTONIC and in seconds since 1970.
    published_wall_s
        When the files were complete, in seconds since 1970.
    config_hash
        As vllm-vcr computes it (scheme v3).
    engine_hash
        Over everything that the engine runs with.
    accounting
        Where every request went.
    engine_counters
        What /metrics says of the run; null where it did not answer.
    files
        Every file with its checksum.
    gates
        How good the recording is.
    segments
        What the recorders said.
    notes
        What else a reader should know, such as torn ends that were left out.
    summary
        What was measured.
    """

    schema: int = SCHEMA
    namespace: str
    capture: str
    arm: str
    repetition: int
    capture_uid: str | None = None
    attempt: str
    specdecode: str
    vllm: str
    model: str | None
    gpu: str | None
    host: str
    config: EngineConfig
    node: str | None
    image_id: str | None = None
    gpu_uuids: list[str] = []
    context: dict[str, Any]
    workload: dict[str, Any]
    seed: int
    record: dict[str, Any]
    zero_monotonic_s: float
    zero_wall_s: float
    published_wall_s: float
    config_hash: str
    engine_hash: str
    accounting: AccountingEntry
    engine_counters: EngineCounters | None
    files: dict[str, FileEntry]
    gates: dict[str, Gate]
    segments: list[SegmentEntry]
    notes: list[str]
    summary: dict[str, Any]


class PartialManifest(Struct, kw_only=True, frozen=True):
    """Labels the files of an attempt that was not published.

    Attributes
    ----------
    schema
        Version of this manifest.
    namespace, capture, attempt
        Which attempt of which capture.
    reason, message
        Why it ended; ``Unfinished`` while it runs, and for ever if it was killed.
    files
        Bytes of each file, as they were.
    """

    schema: int = SCHEMA
    namespace: str
    capture: str
    attempt: str
    reason: str
    message: str
    files: dict[str, int] = {}
