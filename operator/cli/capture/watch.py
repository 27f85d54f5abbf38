"""Apply captures from files after a dry run, and follow their progress."""

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from pydantic import ValidationError

from specdecode_operator.api import base
from specdecode_operator.api import capture as api
from specdecode_operator.api.base import Body
from specdecode_operator.api.capture import Source, SpecDecodeCaptureSpec
from specdecode_operator.api.capture_status import CapturePhase
from specdecode_operator.api.crd_validation import metadata_problems
from specdecode_operator.capture.job.collect_settings import JOINING
from specdecode_operator.capture.observation import COLLECT, LOAD
from specdecode_operator.cli.input_files import Document, Other, files_below, read_all
from specdecode_operator.cli.kubectl import Kubectl, KubectlError, condition_of
from specdecode_operator.cli.terminal import say_line
from specdecode_operator.problems import printable, shown, shown_or_missing
from specdecode_operator.untrusted import mapping, parse_json

DEPLOYMENTS: Final = "specdecodedeployments.specdecode.io"
RESOURCE: Final = "specdecodecaptures.specdecode.io"
FINAL: Final = frozenset({CapturePhase.SUCCEEDED, CapturePhase.FAILED, CapturePhase.CANCELLED})
_UNDER_WAY: Final = frozenset({CapturePhase.LOADING, CapturePhase.RECORDING})
SERVING: Final = _UNDER_WAY | {CapturePhase.SUCCEEDED}
"""Phases in which the engine serves or has served."""
_PERIOD_S: Final = 2.0
_SEEN_WITHIN_S: Final = 60.0
"""An operator reconciles all objects within this time after installation or a change of leader."""
_OUTAGE_S: Final = 120.0
"""An API server answers again within this time after a restart or failover."""
_NOT_FOUND: Final = "DeploymentNotFound"
_LONGEST_LOG_BYTES: Final = 2**25
_FIGURES: Final = ("sent", "recorded", "completed", "failed", "rate", "eta_s", "pods", "joined", "seen", "sampled_out")


class CaptureError(Exception):
    """A command failed. The message is one line."""


class CaptureFailedError(CaptureError):
    """A capture did not reach the phase that a command waits for."""


def phase_of(capture: Body) -> CapturePhase | None:
    """Return the phase of a capture; None before the operator has seen its current spec."""
    phase = capture.get("status", {}).get("phase")
    if phase not in set(CapturePhase):
        return None
    # A cancelled capture may have been resumed since.
    current = capture["status"].get("observedGeneration") == capture["metadata"].get("generation")
    return CapturePhase(phase) if current or phase in (CapturePhase.SUCCEEDED, CapturePhase.FAILED) else None


def message_of(capture: Body) -> str:
    """Return the message of the condition Ready."""
    if phase_of(capture) is None:
        return "not reconciled yet"
    return str(condition_of(capture, "Ready").get("message", ""))


def verdict_of(capture: Body) -> str:
    """Return the verdict on several arms; empty if there is no verdict yet."""
    condition = condition_of(capture, "Pays")
    known = condition.get("reason") not in (None, "NotCompared")
    return f"{condition['reason']}: {condition['message']}" if known else ""


def get_capture(kubectl: Kubectl, name: str, otherwise: str = "check the name, or set the namespace (-n)") -> Body:
    """Return a capture; raise CaptureError with the fix ``otherwise`` if it does not exist."""
    found = kubectl.find(f"{RESOURCE}/{name}")
    if found is None:
        raise CaptureError(f"capture {name}: not found ({names_here(kubectl, name)}): {otherwise}")
    return found


def names_here(kubectl: Kubectl, name: str) -> str:
    """Return a hint for a name that was not found: a similar name, and the existing ones."""
    return kubectl.names_here(RESOURCE, "captures", name)


class Timeouts(NamedTuple):
    """Seconds to wait for a phase, and for a deployment that does not exist or cannot be launched."""

    phase_s: float
    deployment_s: float


def wait_for(kubectl: Kubectl, name: str, phases: frozenset[CapturePhase], timeouts: Timeouts) -> Body:
    """Wait until a capture is in one of these phases; print each change.

    Raises CaptureFailedError if the capture stalls, ends in another phase, waits longer than allowed for its
    deployment, or takes too long.
    """
    shown, start, no_deployment_since, ignored_since = "", time.monotonic(), None, None
    while True:
        capture, now = _get_through_outage(kubectl, name), time.monotonic()
        phase, ready, stalled = phase_of(capture), condition_of(capture, "Ready"), condition_of(capture, "Stalled")
        words = f"{phase or CapturePhase.PENDING}: {message_of(capture)}"
        if phase in phases:
            return capture
        current = stalled.get("observedGeneration") == capture["metadata"].get("generation")
        is_stalled = current and stalled.get("status") == "True"
        needs_spec = ready.get("reason") in ("DeploymentNotPlanned", "DeploymentRolledBack") and is_stalled
        waits = needs_spec or ready.get("reason") == _NOT_FOUND
        no_deployment_since = (no_deployment_since or now) if waits else None
        if phase in FINAL or (is_stalled and not waits):
            resume = ""
            if phase is CapturePhase.CANCELLED:
                patch = """--type=merge --patch='{"spec":{"suspend":false}}'"""
                where = f"{name} -n {capture['metadata']['namespace']}"
                resume = f"; to start it again, run: kubectl patch sdc {where} {patch}"
            raise CaptureFailedError(f"capture {name}: {words}{resume}")
        if no_deployment_since is not None and now - no_deployment_since >= timeouts.deployment_s:
            raise CaptureFailedError(_deployment_missing(kubectl, capture))
        ignored_since = (ignored_since or now) if phase is None else None
        if ignored_since is not None and now - ignored_since >= _SEEN_WITHIN_S:
            raise CaptureFailedError(f"capture {name}: not reconciled by any operator: run specdecode doctor")
        if words != shown:
            say_line(f"  {words}")
            shown = words
        if now - start > timeouts.phase_s:
            raise CaptureFailedError(f"capture {name}: after {timeouts.phase_s:.0f} s still {words}")
        time.sleep(_PERIOD_S)


def _get_through_outage(kubectl: Kubectl, name: str) -> Body:
    failing_since: float | None = None
    while True:
        try:
            return get_capture(kubectl, name)
        except KubectlError as error:
            now = time.monotonic()
            if failing_since is None:
                failing_since = now
                say_line(f"  {error}; retrying for {_OUTAGE_S:.0f} s")
            if now - failing_since >= _OUTAGE_S:
                raise
            time.sleep(_PERIOD_S)


def _deployment_missing(kubectl: Kubectl, capture: Body) -> str:
    name, deployment = capture["metadata"]["name"], capture["spec"]["deployment"]
    namespace = capture["metadata"]["namespace"]
    if condition_of(capture, "Ready")["reason"] == _NOT_FOUND:
        there = ", ".join(each["metadata"]["name"] for each in kubectl.items(DEPLOYMENTS)) or "none"
        what = f"deployment {deployment} not found in namespace {namespace} (SpecDecodeDeployments there: {there})"
        fix = "apply it, or create the capture for another one"
    else:
        what, fix = message_of(capture), f"fix the deployment (kubectl describe sdd {deployment} -n {namespace})"
    return (
        f"capture {name}: {what}: {fix}; the capture then continues automatically; to wait for that, use"
        f" --deployment-timeout; to remove the capture, run kubectl delete sdc {name} -n {namespace}"
    )


def is_live(capture: Body) -> bool:
    """Return whether a capture records the requests of users."""
    return bool(capture["spec"].get("source") == Source.LIVE)


def _container(capture: Body) -> str:
    """Return the container whose log has the progress."""
    return COLLECT if is_live(capture) else LOAD


def progress(kubectl: Kubectl, capture: Body) -> Iterator[Body]:
    """Yield the lines of progress of the load generator or the collector until it ends.

    The stream may break before that: the caller checks the phase afterwards.
    """
    job = capture["status"].get("job")
    if not job:
        return
    stream = kubectl.stream("logs", f"job/{job}", f"--container={_container(capture)}", "--follow")
    try:
        yield from (line for line, is_progress in _told(stream.stdout or ()) if is_progress)
    finally:
        stream.terminate()
        stream.communicate()


def how_far(kubectl: Kubectl, capture: Body) -> str | None:
    """Return the progress of a load or recording; None if none runs or its log cannot be read."""
    job = capture.get("status", {}).get("job")
    if phase_of(capture) not in _UNDER_WAY or not job:
        return None
    try:
        asked = SpecDecodeCaptureSpec.parse(capture["spec"], newer=True)
        command = ("logs", f"job/{job}", f"--container={_container(capture)}")
        log = kubectl.short_text(*command, most_bytes=_LONGEST_LOG_BYTES).splitlines()
    except (KubectlError, ValidationError):
        return None
    published, last = 0, None
    for line, is_progress in _told(log):
        if "published" in line:
            published, last = published + 1, None
        elif is_progress:
            last = line
    runs = max(1, len(asked.arms)) * asked.starts
    load = progress_text(last) if last else "no request yet" if is_live(capture) else "no request in the next run yet"
    return load if runs == 1 else f"{published} of {runs} runs published; {load}"


def _told(lines: Iterable[str | bytes]) -> Iterator[tuple[Body, bool]]:
    """Yield the JSON objects in an untrusted log, and whether each is a progress line."""
    for line in lines:
        try:
            found = parse_json(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            phase, figures = found.get("phase"), [found.get(name) for name in _FIGURES]
            is_text = isinstance(phase, str) and phase.isprintable()
            yield found, is_text and all(isinstance(each, int | float | None) for each in figures)


def progress_text(line: Body) -> str:
    """Return a progress line of a load or of a live capture as readable text."""
    parts = [f"{line.get('phase'):<14}", *(_load_parts(line) if line.get("pods") is None else _live_parts(line))]
    if line.get("rate") is not None:
        parts.append(f"{line['rate']:.1f}/s")
    if line.get("eta_s") is not None:
        parts.append(f"{line['eta_s']:.0f} s left")
    return "  ".join(parts)


def _load_parts(line: Body) -> Iterator[str]:
    yield f"sent {line.get('sent') or 0:>6,}"
    if line.get("recorded") is not None:
        yield f"recorded {line['recorded']:>6,}"
    yield f"answered {line.get('completed') or 0:>6,}"
    if line.get("failed"):
        yield f"failed {line['failed']:,}"


def _live_parts(line: Body) -> Iterator[str]:
    joined, pods = line.get("joined") or 0, line["pods"]
    if line.get("phase") == JOINING or joined < pods:
        yield f"{joined} of {pods} engine pods connected"
    if line.get("phase") != JOINING:
        yield f"seen {line.get('seen') or 0:>6,}"
        yield f"recorded {line.get('recorded') or 0:>6,}"
        yield f"sampled out {line.get('sampled_out') or 0:>6,}"


def summary_text(capture: Body) -> str:
    """Return the results of a capture on one line."""
    summary = mapping(mapping(capture, "status"), "summary")
    requests = mapping(summary, "requests")
    parts = [f"{requests.get('completed', 0)} of {requests.get('sent', 0)} requests completed"]
    figures = (
        ("acceptance", "{} of drafted tokens accepted"),
        ("meanAcceptanceLength", "{} tokens per step"),
        ("outputTokensPerSecond", "{} output tokens/s"),
    )
    parts += [words.format(summary[field]) for field, words in figures if field in summary]
    for field, words in (("ttftMs", "TTFT"), ("tpotMs", "TPOT")):
        if (quantiles := mapping(summary, field)).get("p50") is not None:
            parts.append(f"{words} P50 {quantiles['p50']} ms, P99 {quantiles.get('p99')} ms")
    return ", ".join(parts)


_SUFFIXES: Final = (".json", ".yaml", ".yml")
_PROBLEMS_NAMED: Final = 3


class Applied(NamedTuple):
    """An applied capture."""

    name: str
    kubectl: Kubectl  # In the capture's namespace
    suspended: bool  # spec.suspend in the file


def read_captures(sources: Sequence[str], *, recursive: bool = False) -> list[Body]:
    """Read captures from files, folders and ``-``, like ``kubectl apply``.

    Raises CaptureError for other objects and duplicate captures, and DocumentError for unreadable files.
    """
    files = [file for source in sources for file in _files(source, recursive=recursive)]
    found = [(file, each) for file in files for each in read_all(file)]
    wrong = [f"{printable(file)}: contains {each.name}" for file, each in found if isinstance(each, Other)]
    documents = [each for _, each in found if isinstance(each, Document)]
    wrong += filter(None, map(_wrong, documents))
    if wrong:
        more = f"; and {len(wrong) - _PROBLEMS_NAMED} more" if len(wrong) > _PROBLEMS_NAMED else ""
        raise CaptureError(f"nothing was applied: {'; '.join(wrong[:_PROBLEMS_NAMED])}{more}")
    if not documents:
        raise CaptureError(f"{', '.join(sources)}: contains no {api.KIND}: use another file or folder")
    names: set[str] = set()
    for document in documents:
        if document.qualified_name in names:
            twice = f"{document.place}: metadata.name: {shown(document.name)}: duplicate name"
            raise CaptureError(f"nothing was applied: {twice}: rename one")
        names.add(document.qualified_name)
    return [document.body for document in documents]


def _files(source: str, *, recursive: bool) -> list[str]:
    folder = Path(source)
    if not source or not folder.is_dir():
        return [source]
    found = files_below(folder) if recursive else sorted(folder.iterdir())
    files = [str(file) for file in found if file.suffix in _SUFFIXES and file.is_file()]
    if not files:
        below = "" if recursive else ", or add -R to read its subfolders"
        raise CaptureError(f"{source}: no {', '.join(_SUFFIXES)} file in this folder: use another{below}")
    return files


def _wrong(document: Document) -> str | None:
    """Return why a document cannot be applied as a capture; None if it can."""
    kind, version = document.body.get("kind") or None, document.body.get("apiVersion") or None
    if kind != api.KIND:
        return f"{document.place}: kind: {shown_or_missing(kind)}: is not a {api.KIND}: apply it with kubectl"
    if version != base.API_VERSION:
        return f"{document.place}: apiVersion: {shown_or_missing(version)}: use {base.API_VERSION}"
    if problems := metadata_problems(document.body.get("metadata")):
        return f"{document.place}: {problems[0]}"
    if not isinstance(document.body.get("spec", {}), dict):
        return f"{document.place}: spec: must be an object"
    return None


def apply(kubectl: Kubectl, captures: Sequence[Body]) -> list[Applied]:
    """Apply captures after a server-side dry run of all of them.

    The parsed objects are sent and not the text of the files, because another parser could find other objects in it.
    """
    listed: Body = {"apiVersion": "v1", "kind": "List", "items": [*captures]}
    if len(captures) > 1:
        kubectl.apply(listed, "--dry-run=server")
    answer = kubectl.apply(listed if len(captures) > 1 else captures[0])
    return [
        Applied(
            name=str(each["metadata"]["name"]),
            kubectl=kubectl.within(each),
            suspended=bool((sent.get("spec") or {}).get("suspend")),
        )
        for each, sent in zip(answer.get("items", [answer]), captures, strict=True)
    ]
