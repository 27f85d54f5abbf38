"""Read captures for a report: sums of bounded size, identity, and the arms of an experiment.

Values of manifests and headers are untrusted; they are made safe to show.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from specdecode_operator.capture.comparison.compare_arms import compare_capture
from specdecode_operator.capture.comparison.comparison_file import Comparison
from specdecode_operator.capture.files.formats import (
    CLIENT,
    GZIP_SUFFIX,
    MANIFEST,
    TRACE,
    BrokenGzipError,
    CaptureError,
    ClientRecord,
    Live,
    NoTrailerError,
    TraceMeta,
    read_lines,
)
from specdecode_operator.capture.files.live import ALL_PERCENT, loss_text
from specdecode_operator.capture.files.trace_rules import UnreadableLineError, decode
from specdecode_operator.capture.report.capture_sums import ClientSums, RequestSums, StepSums
from specdecode_operator.capture.trace_reader import (
    OnBadLine,
    RecordingError,
    find_steps,
    find_trace,
    no_requests,
    read_requests,
    read_steps,
)
from specdecode_operator.problems import printable, shown
from specdecode_operator.untrusted import MAX_BYTES, UnreadableTextError, parse_json

_NAME: Final = 130
"""Most characters of a name. Two names of Kubernetes have 63 each; model names are shorter."""

_HASH: Final = 12
_OURS: Final = "specdecode-operator"


@dataclass(frozen=True, kw_only=True)
class Identity:
    """A capture's identity, each part short enough for a caption, and empty if it is not known."""

    name: str  # namespace/name, and its arm where it has several
    model: str
    gpu: str
    vllm: str
    config_hash: str
    speculation: str  # such as ``draft_model, K 4``; ``none`` for an engine without
    source: str  # who made it, where that was not our own recorder in front of a real engine
    plan: Mapping[str, Any] = field(default_factory=dict)  # what the operator planned, as the manifest repeats it
    kv_cache_tokens: int | None = None  # what the engine said it allocated
    live: Live | None = None  # how a live capture was recorded

    def caption(self, requests: int) -> str:
        """Return the identity in one line."""
        vllm, config = self.vllm and f"vLLM {self.vllm}", self.config_hash and f"config {self.config_hash}"
        count = f"{requests:,} request{'s' * (requests != 1)}"
        parts = (self.name, self.model, self.gpu, vllm, config, count, self.source)
        return " · ".join(filter(None, parts))


def identify(folder: Path | None, meta: TraceMeta, trace: str) -> tuple[Identity, str | None]:
    """Return a capture's identity, and why its manifest could not be read, if so."""
    manifest, problem = _manifest(folder / MANIFEST) if folder else ({}, None)
    context, live = _object(manifest.get("context")), _live(manifest)
    named = f"{manifest.get('namespace')}/{manifest['capture']}" if manifest.get("capture") else meta.capture
    if named and manifest.get("arm") and isinstance(manifest.get("experiment"), dict):
        named = f"{named}/{manifest['arm']}"
    said = meta.speculative or {}
    speculation = f"{_text(said.get('method')) or 'unknown method'}, K {_text(said.get('num_speculative_tokens'))}"
    tokens = _object(manifest.get("engine_counters")).get("kv_cache_tokens")
    return Identity(
        name=_text(named or (folder.resolve().name if folder else trace)),
        model=_text(manifest.get("model") or meta.model),
        gpu=_text(manifest.get("gpu") or meta.gpu),
        vllm=_text(manifest.get("vllm") or meta.vllm_version),
        config_hash=_text(manifest.get("config_hash") or meta.config_hash)[:_HASH],
        speculation=speculation if said else "none",
        source=_live_words(live) if live else "" if meta.source in {None, _OURS} else f"made by {_text(meta.source)}",
        plan=_object(context.get("plan")),
        kv_cache_tokens=tokens if isinstance(tokens, int) and tokens > 0 else None,
        live=live,
    ), problem


def _live(manifest: Mapping[str, Any]) -> Live | None:
    try:
        return msgspec.convert(manifest.get("live"), Live | None)
    except msgspec.ValidationError:
        return None


def _live_words(live: Live) -> str:
    pods = sum(pod.missing is None for pod in live.pods)
    sample = f", {live.sample_percent} % of the requests" if live.sample_percent < ALL_PERCENT else ""
    return f"live traffic of {pods} pod{'s' * (pods != 1)} in {live.window.seconds:.0f} s{sample}"


_MOST_LOSSES: Final = 3


def _losses(live: Live) -> Iterator[str]:
    """Yield what a live capture did not record."""
    yield from (f"Pod {pod.pod} was not recorded: {pod.missing}" for pod in live.pods if pod.missing is not None)
    yield from (f"{text[0].upper()}{text[1:]}" for text in map(loss_text, live.lost[:_MOST_LOSSES]))
    if (rest := len(live.lost) - _MOST_LOSSES) > 0:
        yield f"{rest} more gaps in the recording are in live.lost of the manifest"


def _manifest(path: Path) -> tuple[Mapping[str, Any], str | None]:
    """Return a manifest, empty if it is missing, and why it cannot be read."""
    if not path.is_file():
        return {}, None
    try:
        with path.open("rb") as stream:
            return _object(parse_json(stream.read(MAX_BYTES + 1))), None
    except (OSError, UnreadableTextError) as error:
        return {}, f"{path}: {error.strerror if isinstance(error, OSError) else error}"


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    return "" if value is None else shown(value, _NAME)


_TRACES: Final = (TRACE, f"{TRACE}{GZIP_SUFFIX}")
_CLIENT: Final = msgspec.json.Decoder(ClientRecord)


@dataclass(kw_only=True)
class Capture:
    """The sums of one capture, which are drawn."""

    replayed: bool  # a replay of another one
    identity: Identity
    requests: RequestSums
    steps: StepSums | None  # None without step statistics
    client: ClientSums | None  # None without the load generator's log
    warnings: list[str] = field(default_factory=list)

    @property
    def speculates(self) -> bool:
        """Whether steps or bursts show drafts."""
        drafted = self.steps is not None and self.steps.draft_tokens > 0
        return drafted or bool(self.requests.bursts[2:].any())

    @property
    def zero_ms(self) -> float:
        """The first arrival, the zero of all drawn times, so that captures overlap."""
        arrivals = np.asarray(self.requests.arrival_ms)
        known = arrivals[~np.isnan(arrivals)]
        return float(known.min()) if len(known) else 0.0

    @property
    def caption(self) -> str:
        """Its identity in one line."""
        words = self.identity.caption(len(self.requests))
        return f"{words} · replayed" if self.replayed else words


def captures_below(path: Path) -> list[Path]:
    """Return the paths of captures: a folder with a trace, those in a folder, or a trace of another name."""
    if path.is_file() and path.name in _TRACES:
        return [path.parent]
    if path.is_dir() and not any((path / name).is_file() for name in _TRACES):
        below = sorted(manifest.parent for manifest in path.rglob(MANIFEST))
        if below:
            return below
    return [path if path.is_dir() else find_trace(path)]


def read_capture(path: Path, *, replayed: bool = False) -> Capture:
    """Return a capture's sums; lines that cannot be read are left out, with a warning."""
    trace, folder = find_trace(path), path if path.is_dir() else None
    first: RecordingError | None = None
    count = 0

    def bad(error: RecordingError) -> None:
        nonlocal count, first
        count, first = count + 1, first or error

    meta, requests, steps = TraceMeta(), RequestSums(), StepSums()
    for line in read_requests(trace, bad):
        if isinstance(line, TraceMeta):
            meta = line
        else:
            requests.add(line)
    if not len(requests):
        raise first or no_requests(trace)
    requests.flush()
    if folder and (found := find_steps(trace)):
        for step in read_steps(found, bad):
            steps.add(step)
        steps.flush()
    client = _client(folder, bad) if folder else None
    identity, problem = identify(folder, meta, trace.name)
    warnings = [*([problem] if problem else []), *(_losses(identity.live) if identity.live else ())]
    if count:
        warnings.append(f"{count:,} line{'s' * (count > 1)} that cannot be read left out, first {first}")
    return Capture(
        replayed=replayed,
        identity=identity,
        requests=requests,
        steps=steps if steps.steps else None,
        client=client,
        warnings=[printable(each) for each in warnings],
    )


def _client(folder: Path, bad: OnBadLine) -> ClientSums | None:
    path = next((path for suffix in ("", GZIP_SUFFIX) if (path := folder / f"{CLIENT}{suffix}").is_file()), None)
    if path is None:
        return None
    client = ClientSums()
    try:
        for line in read_lines(path):
            try:
                client.add(decode(_CLIENT, line.text))
            except UnreadableLineError as error:
                bad(RecordingError(f"{path}: line {line.number}: {error}"))
    except (BrokenGzipError, NoTrailerError) as error:
        bad(RecordingError(f"{path}: {error}"))
    except OSError as error:
        bad(RecordingError(f"{path}: cannot be read: {error.strerror}"))
    return client


@dataclass(frozen=True)
class Arms:
    """A capture with arms."""

    folders: Sequence[Path]  # of the first repetition of each
    comparison: Comparison | None
    warning: str | None  # why there is no comparison


def arms_of(path: Path) -> Arms | None:
    """Return the arms in a capture's folder; None if it has no arms."""
    firsts: dict[str, Path] = {}
    for manifest in sorted(path.glob(f"*/*/{MANIFEST}")):
        if isinstance(_manifest(manifest)[0].get("experiment"), dict):
            firsts.setdefault(manifest.parent.parent.name, manifest.parent)
    if not firsts:
        return None
    try:
        comparison = compare_capture(path)
    except CaptureError as error:
        return Arms(list(firsts.values()), None, f"{path}: its arms are not compared: {error.message}")
    return Arms([firsts[arm.name] for arm in comparison.arms if arm.name in firsts], comparison, None)
