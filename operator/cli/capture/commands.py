"""`specdecode capture`: commands that run a capture from start to finish, through kubectl."""

import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import typer

from specdecode_operator.api import base
from specdecode_operator.api import capture as api
from specdecode_operator.api.base import Body
from specdecode_operator.api.capture_status import CapturePhase
from specdecode_operator.api.deployment_rules import NAME_MAX_LENGTH
from specdecode_operator.capture.arms import asked_arms
from specdecode_operator.capture.job_manifest import wrap_up_s
from specdecode_operator.capture.live_capture import longest_attempt_s
from specdecode_operator.cli.capture import watch
from specdecode_operator.cli.capture.export import export_command
from specdecode_operator.cli.capture.fetch import FetchError, claim_of, fetch, find_files, refuse_earlier
from specdecode_operator.cli.capture.files import (
    compare_command,
    gate_command,
    push_command,
    report_command,
    validate_command,
)
from specdecode_operator.cli.kubectl import Kubectl, KubectlError, with_kubectl
from specdecode_operator.cli.main import Ending, application
from specdecode_operator.cli.options import (
    AllNamespaces,
    FilesArgument,
    Selector,
    Watch,
    fail,
    refuse_name_of_list,
    sources,
)
from specdecode_operator.cli.terminal import say, say_line, show_live
from specdecode_operator.cli.text_files import DocumentError
from specdecode_operator.problems import printable

_ENGINE_TIMEOUT_S: Final = 3600
_DEPLOYMENT_TIMEOUT_S: Final = 30
_STOPPED_WATCHING: Final = "stopped watching; the capture continues: run specdecode capture run again to follow it"
_HOW_TO_CREATE: Final = "add --create to create it with the default load"
_UNITS_S: Final = {"h": 3600, "m": 60, "s": 1}
_DURATION: Final = re.compile("".join(rf"(?:(?P<{unit}>[0-9]{{1,5}}){unit})?" for unit in _UNITS_S))
_LONGEST_S: Final = 86_400
_LINE_START: Final = "\r\033[K"
"""Terminal codes that return to the start of the line and clear it."""


capture_app = application("Captures: apply, follow, fetch, validate, compare, free the GPUs.")

CaptureFiles = Annotated[
    list[str] | None,
    typer.Option(
        "--file",
        "-f",
        metavar="FILE",
        help="YAML or JSON file with SpecDecodeCaptures, a folder of such files, or - for standard input. "
        "May be repeated.",
    ),
]
Timeout = Annotated[int, typer.Option(help="Seconds to wait for the engine.", min=1)]
DeploymentTimeout = Annotated[
    int,
    typer.Option(help="Seconds to wait for a deployment that does not exist or cannot be launched.", min=0),
]
Image = Annotated[
    str | None,
    typer.Option(help="Image of the pod that reads the volume. Defaults to status.operatorImage of the capture."),
]


@capture_app.command("up")
@with_kubectl
def up(  # noqa: PLR0913  each is an option
    kubectl: Kubectl,
    *,
    file: FilesArgument = None,
    with_option: CaptureFiles = None,
    recursive: Annotated[bool, typer.Option("--recursive", "-R", help="Also read the folders in a folder.")] = False,
    timeout: Timeout = _ENGINE_TIMEOUT_S,
    deployment_timeout: DeploymentTimeout = _DEPLOYMENT_TIMEOUT_S,
) -> None:
    """Apply captures from files, and wait until each engine serves.

    If the files contain several captures, either all are applied or none. A file
    with other objects is rejected. A cancelled capture (specdecode capture down)
    starts again, unless the file sets suspend: true.

    For example: specdecode capture up -f examples/capture-tiny.yaml

    Exits with 0 when the engines serve, 1 when one does not serve, 2 when the
    files are invalid or the cluster cannot be reached.
    """
    with _errors_in_one_line(_STOPPED_WATCHING):
        applied = watch.apply(kubectl, watch.read_captures(sources(file, with_option), recursive=recursive))
        for each in applied:
            say_line(f"capture {each.name} applied in namespace {each.kubectl.namespace}")
            _resume(each)
        for each in applied:
            capture = watch.wait_for(
                each.kubectl, each.name, watch.SERVING, watch.Timeouts(timeout, deployment_timeout)
            )
            say_line(f"capture {each.name}: {watch.phase_of(capture)}: {watch.message_of(capture)}")


@capture_app.command("run")
@with_kubectl
def run(  # noqa: PLR0913  each is an option
    kubectl: Kubectl,
    *,
    name: Annotated[
        str | None, typer.Argument(help="Name of the capture. Defaults to the only unfinished capture.")
    ] = None,
    create: Annotated[
        bool, typer.Option("--create", help="Create the capture with the default load if it does not exist.")
    ] = False,
    deployment: Annotated[
        str | None, typer.Option(help="Deployment for a new capture. Defaults to the only one in the namespace.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the files. Defaults to captures/NAME.")] = None,
    timeout: Timeout = _ENGINE_TIMEOUT_S,
    deployment_timeout: DeploymentTimeout = _DEPLOYMENT_TIMEOUT_S,
    image: Image = None,
) -> None:
    """Follow a capture until it ends, and fetch its files.

    --create creates the capture if it does not exist, with the default load: one
    client for a minute, then 16 clients for two minutes. Ctrl-C stops only the
    command: the capture continues, and the same command follows it again.

    For example: specdecode capture run demo

    Exits with 0 when the files are fetched, 1 when the capture fails, takes too
    long or its files cannot be fetched, 2 when there is no such capture or the
    cluster cannot be reached.
    """
    with _errors_in_one_line(_STOPPED_WATCHING):
        if deployment is not None and not create:
            raise watch.CaptureError(
                f"--deployment: {deployment}: only used with --create: add it, or omit --deployment"
            )
        if create and name is None:
            raise watch.CaptureError("NAME is missing: --create needs a name for the capture")
        if name is None:
            names = [
                each["metadata"]["name"]
                for each in kubectl.items(watch.RESOURCE)
                if watch.phase_of(each) not in watch.FINAL
            ]
            if len(names) != 1:
                over = f"{len(names)} unfinished captures ({', '.join(names)})" if names else "no unfinished captures"
                raise watch.CaptureError(f"NAME: {over}: set NAME")
            name = str(names[0])
        out = out or Path("captures") / name
        kubectl = _found_or_created(kubectl, name, out, deployment, create=create)
        _watch_to_the_end(kubectl, name, out, watch.Timeouts(timeout, deployment_timeout), image)


def _watch_to_the_end(kubectl: Kubectl, name: str, out: Path, timeouts: watch.Timeouts, image: str | None) -> None:
    """Follow a capture until it ends, print its results, and fetch its files."""
    capture = watch.wait_for(kubectl, name, watch.SERVING, timeouts)
    _follow(kubectl, capture)
    timeouts = timeouts._replace(phase_s=_to_the_end_s(capture["spec"], int(timeouts.phase_s)))
    capture = watch.wait_for(kubectl, name, frozenset({CapturePhase.SUCCEEDED}), timeouts)
    say_line(f"capture {name}: {watch.message_of(capture)}")
    if verdict := watch.verdict_of(capture):
        say_line(f"  {verdict}")
    if watch.is_live(capture):
        say_line(f"  {watch.summary_text(capture)}")
    _fetch(kubectl, name, out, image)
    if watch.is_live(capture):
        say_line(f"to draw a report, run: specdecode capture report {shlex.quote(str(out))}")


@capture_app.command("live")
@with_kubectl
def live(  # noqa: PLR0913  each is an option
    kubectl: Kubectl,
    *,
    deployment: Annotated[str, typer.Argument(help="Deployment whose engines are recorded while they serve.")],
    duration: Annotated[
        str | None, typer.Option("--for", metavar="TIME", help="Duration of the recording, such as 90s, 10m or 1h30m.")
    ] = None,
    requests: Annotated[int | None, typer.Option(help="Number of requests to record.", min=1, max=10_000_000)] = None,
    sample: Annotated[
        int, typer.Option(metavar="PERCENT", help="Share of the requests to record, in percent.", min=1, max=100)
    ] = 100,
    pods: Annotated[
        list[str] | None,
        typer.Option(
            "--pod", metavar="POD", help="Engine pod to record. May be repeated. Defaults to all ready engine pods."
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the capture. Defaults to DEPLOYMENT-live- and the time in UTC.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the files. Defaults to captures/NAME.")] = None,
    timeout: Annotated[
        int, typer.Option(help="Seconds to wait for engines that can be recorded.", min=1)
    ] = _ENGINE_TIMEOUT_S,
    image: Image = None,
) -> None:
    """Record the requests that the engines of a deployment serve, and fetch the files.

    The engines continue without a restart, and no load is sent. Set --for or
    --requests. No text and no token ids are recorded. Ctrl-C stops only the
    command: the capture continues.

    For example: specdecode capture live llama-70b --for 10m

    Exits with 0 when the files are fetched, 1 when the capture fails, takes too
    long or its files cannot be fetched, 2 when it cannot be created or the
    cluster cannot be reached.
    """
    name = name or _name_of_live(deployment)
    shown = shlex.quote(name)
    stopped = (
        f"stopped watching; the capture continues: specdecode capture run {shown} follows it, and specdecode capture"
        f" down {shown} stops it"
    )
    with _errors_in_one_line(stopped):
        if (duration is None) == (requests is None):
            raise watch.CaptureError("--for: a recording ends by time or by requests: set one of --for and --requests")
        extent = {
            "durationSeconds": None if duration is None else _seconds(duration),
            "requests": requests,
            "samplePercent": sample,
            "pods": pods,
        }
        spec = {"source": api.Source.LIVE.value, "live": {field: value for field, value in extent.items() if value}}
        out = out or Path("captures") / name
        refuse_earlier(out, name, None)
        if kubectl.find(f"{watch.RESOURCE}/{name}"):
            raise watch.CaptureError(
                f"--name: {name}: this capture exists: use another name, or follow it: specdecode capture run {shown}"
            )
        captured = _deployment_named(kubectl, deployment, "DEPLOYMENT")
        (applied,) = watch.apply(kubectl, [_new_capture(name, {"deployment": captured, **spec})])
        say_line(f"capture {name} applied in namespace {applied.kubectl.namespace}")
        _watch_to_the_end(applied.kubectl, name, out, watch.Timeouts(timeout, _DEPLOYMENT_TIMEOUT_S), image)


@capture_app.command("status")
@with_kubectl
def status(
    kubectl: Kubectl,
    *,
    name: Annotated[
        str | None, typer.Argument(help="Name of the capture. Defaults to all captures in the namespace.")
    ] = None,
    all_namespaces: AllNamespaces = False,
    selector: Selector = None,
    following: Watch = False,
) -> None:
    """Show the phase, the message and the data location of captures.

    For example: specdecode capture status -A

    Exits with 0, or 2 when there is no such capture or the cluster cannot be
    reached.
    """
    refuse_name_of_list(name, all_namespaces=all_namespaces, selector=selector)

    def lines() -> list[str]:
        captures = (
            [watch.get_capture(kubectl, name)]
            if name
            else kubectl.select(watch.RESOURCE, all_namespaces=all_namespaces, selector=selector)
        )
        found = [line for each in captures for line in _status_lines(kubectl, each, qualified=all_namespaces)]
        return found or ["no captures here"]

    with _errors_in_one_line():
        show_live(lines, lambda found: say("\n".join(map(printable, found))), watch=following)


def _status_lines(kubectl: Kubectl, capture: Body, *, qualified: bool) -> list[str]:
    metadata = capture["metadata"]
    name = f"{metadata['namespace']}/{metadata['name']}" if qualified else metadata["name"]
    details = (watch.how_far(kubectl.within(capture), capture), watch.verdict_of(capture))
    where = _where(capture)
    return [
        f"{name}: {watch.phase_of(capture) or 'Pending'}: {watch.message_of(capture)}",
        *(f"  {each}" for each in details if each),
        *([f"  data: {where}"] if where else []),
    ]


@capture_app.command("fetch")
@with_kubectl
def fetch_files(
    kubectl: Kubectl,
    *,
    name: Annotated[str, typer.Argument(help="Name of the capture. It may be deleted, but its claim must exist.")],
    out: Annotated[Path, typer.Argument(help="Folder for the files. Complete files in it are not fetched again.")],
    image: Image = None,
) -> None:
    """Copy the files of a capture from its volume, and verify their checksums.

    It resumes an interrupted fetch. It needs only the claim: the capture, the
    engine and the deployment may be deleted.

    For example: specdecode capture fetch demo captures/demo

    Exits with 0 when the files are complete, 1 when they cannot be fetched, 2
    when the capture has none or the cluster cannot be reached.
    """
    with _errors_in_one_line():
        _fetch(kubectl, name, out, image)


@capture_app.command("down")
@with_kubectl
def down(
    kubectl: Kubectl,
    *,
    name: Annotated[
        str | None, typer.Argument(help="Name of the capture. Defaults to all unfinished captures in the namespace.")
    ] = None,
    selector: Selector = None,
) -> None:
    """Free the GPUs of captures, and print where their data is.

    An unfinished capture is cancelled (spec.suspend). Its recording is kept as
    partial files, and its claim remains. Repeating the command has no effect.

    Exits with 0, or 2 when the cluster cannot be reached.
    """
    refuse_name_of_list(name, all_namespaces=False, selector=selector)
    with _errors_in_one_line():
        found = kubectl.find(f"{watch.RESOURCE}/{name}") if name else None
        listed = [] if name else kubectl.select(watch.RESOURCE, all_namespaces=False, selector=selector)
        captures = [found] if found else listed
        for capture in captures:
            found_name = capture["metadata"]["name"]
            if watch.phase_of(capture) in watch.FINAL or capture["spec"].get("suspend"):
                say_line(f"{found_name}: {watch.phase_of(capture) or 'suspended'}: uses no GPUs")
            else:
                kubectl.text("patch", watch.RESOURCE, found_name, "--type=merge", '--patch={"spec":{"suspend":true}}')
                say_line(f"{found_name}: cancelled; the recording so far is kept as partial files")
            if where := _where(capture):
                say_line(f"  data: {where}")
        if not captures:
            here = watch.names_here(kubectl, name or "")
            say_line(f"{name}: not found ({here})" if name else here)
            if name and (claim := claim_of(kubectl, name)):
                say_line(f"  data: claim {claim}")


capture_app.command("validate")(validate_command)
capture_app.command("compare")(compare_command)
capture_app.command("gate")(gate_command)
capture_app.command("report")(report_command)
capture_app.command("export")(export_command)
capture_app.command("push")(push_command)


@contextmanager
def _errors_in_one_line(stopped: str = "stopped") -> Iterator[None]:
    try:
        yield
    except (watch.CaptureFailedError, FetchError) as error:
        say_line(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    except (watch.CaptureError, DocumentError, KubectlError) as error:
        fail(error)
    except OSError as error:
        say_line(f"error: {f'{error.filename}: ' if error.filename else ''}{error.strerror or error}", err=True)
        raise typer.Exit(Ending.NOT_WRITTEN) from error
    except KeyboardInterrupt:
        typer.echo(err=True)
        say_line(stopped, err=True)
        raise typer.Exit(130) from None


def _resume(applied: watch.Applied) -> None:
    name, kubectl = applied.name, applied.kubectl
    if not watch.get_capture(kubectl, name)["spec"].get("suspend"):
        return
    if applied.suspended:
        raise watch.CaptureError(f"capture {name}: spec.suspend is true in the file: remove it to start the capture")
    kubectl.text("patch", watch.RESOURCE, name, "--type=merge", '--patch={"spec":{"suspend":false}}')
    say_line(f"capture {name} was cancelled and now starts again")


def _found_or_created(kubectl: Kubectl, name: str, out: Path, deployment: str | None, *, create: bool) -> Kubectl:
    found = kubectl.find(f"{watch.RESOURCE}/{name}") if create else watch.get_capture(kubectl, name, _HOW_TO_CREATE)
    refuse_earlier(out, name, found["metadata"].get("uid") if found else None)
    if found is None:
        captured = _deployment_named(kubectl, deployment, "--deployment")
        (applied,) = watch.apply(kubectl, [_new_capture(name, {"deployment": captured})])
        say_line(f"capture {name} applied in namespace {applied.kubectl.namespace}")
        return applied.kubectl
    if deployment not in {None, found["spec"]["deployment"]}:
        raise watch.CaptureError(
            f"--deployment: {deployment}: capture {name} belongs to {found['spec']['deployment']}: use another NAME"
        )
    return kubectl


def _deployment_named(kubectl: Kubectl, deployment: str | None, option: str) -> str:
    """Return the deployment to capture: the one that an option names, or the only one in the namespace."""
    names = [each["metadata"]["name"] for each in kubectl.items(watch.DEPLOYMENTS)]
    found = ", ".join(names) or "none"
    if deployment is not None and deployment not in names:
        raise watch.CaptureError(f"{option}: {deployment}: not found (SpecDecodeDeployments in the namespace: {found})")
    if deployment is None and len(names) != 1:
        raise watch.CaptureError(
            f"{option} is missing: set the one to capture (SpecDecodeDeployments in the namespace: {found})"
        )
    return str(deployment or names[0])


def _new_capture(name: str, spec: Body) -> Body:
    return {"apiVersion": base.API_VERSION, "kind": api.KIND, "metadata": {"name": name}, "spec": spec}


def _name_of_live(deployment: str) -> str:
    suffix = f"-live-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    return f"{deployment[: NAME_MAX_LENGTH - len(suffix)].rstrip('-')}{suffix}"


def _seconds(text: str) -> int:
    """Return the seconds of a duration such as 1h30m; raise CaptureError if it is not one."""
    found = _DURATION.fullmatch(text)
    seconds = sum(int(found[unit] or 0) * factor for unit, factor in _UNITS_S.items()) if found else 0
    if not 0 < seconds <= _LONGEST_S:
        raise watch.CaptureError(f"--for: {printable(text)}: is not a time from 1s to 24h: write 90s, 10m or 1h30m")
    return seconds


def _to_the_end_s(spec: Body, engine_timeout_s: int) -> int:
    """Return the maximum duration of a capture after its engine serves, including engine starts of further attempts.

    With arms, the load generator runs before the first engine, and starts an engine for each run.
    """
    asked = api.SpecDecodeCaptureSpec.parse(spec, newer=True)
    if asked.source is api.Source.LIVE:
        return (1 + asked.backoff_limit) * (engine_timeout_s + longest_attempt_s(asked))
    once_s = asked.deadline_seconds + wrap_up_s(asked.deadline_seconds)
    arms = asked_arms(asked)
    attempt_s = len(arms) * asked.starts * (engine_timeout_s + once_s) if arms else once_s
    return attempt_s + asked.backoff_limit * (engine_timeout_s + attempt_s)


def _follow(kubectl: Kubectl, capture: Body) -> None:
    """Show the load's progress until its container ends. Without a terminal, show the last line of each phase."""
    start, last = _LINE_START if sys.stdout.isatty() else "", None
    for line in watch.progress(kubectl, capture):
        if last is not None and last["phase"] != line["phase"]:
            typer.echo(f"{start}  {watch.progress_text(last)}")
        if start:
            typer.echo(f"{start}  {watch.progress_text(line)}", nl=False)
        last = line
    if last is not None:
        typer.echo(f"{start}  {watch.progress_text(last)}")


def _fetch(kubectl: Kubectl, name: str, out: Path, image: str | None) -> None:
    folder = shlex.quote(str(out))
    again = f"specdecode capture fetch {shlex.quote(name)} {folder}"
    with _errors_in_one_line(f"stopped; fetched files are kept: {again} resumes"):
        location = find_files(kubectl, name, image)
        say_line(f"fetching {location.path} of claim {location.claim} to {out}")
        say_line(f"  reading the volume with a pod of image {location.image} ({location.image_source})")
        files = fetch(kubectl, location, out)
    say_line(f"{len(files)} files in {out}; to validate them, run: specdecode capture validate {folder}")


def _where(capture: Body) -> str:
    status = capture.get("status", {})
    if not status.get("claim"):
        return ""
    path = f", folder {status['path']}" if status.get("path") else ""
    return f"claim {status['claim']} in namespace {capture['metadata']['namespace']}{path}"
