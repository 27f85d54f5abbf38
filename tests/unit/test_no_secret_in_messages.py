"""No message shows a part of a secret, wherever in its text the secret stands."""

import io
import json
import logging
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, Final, cast

import pytest

from specdecode_operator.api.deployment import KIND, Key, PolicyStatus
from specdecode_operator.api.deployment_status import ConditionStatus
from specdecode_operator.capture.files.formats import CaptureError
from specdecode_operator.capture.job.entrypoint import error_message as capture_message
from specdecode_operator.capture.job_status import read_failure
from specdecode_operator.capture.load.engine_client import error_text
from specdecode_operator.capture.load.run_settings import InvalidSettingsError, read_settings
from specdecode_operator.capture.observation import LOAD
from specdecode_operator.cli.calibrate import EngineRun
from specdecode_operator.cli.kubectl import one_line
from specdecode_operator.cli.main import run_to_its_end
from specdecode_operator.cli.terminal import say, say_line
from specdecode_operator.cluster.client import error_message as api_message
from specdecode_operator.cluster.clock import ServerTime
from specdecode_operator.deployment.conditions import Blocked, ConditionUpdate, stamp
from specdecode_operator.deployment.models.checkpoint_reader import CheckpointError, pack_error
from specdecode_operator.deployment.models.model_jobs import DOWNLOADER, READER
from specdecode_operator.deployment.rollout.blocked_pods import blocked_pod
from specdecode_operator.deployment.rollout.engine_errors import error_lines
from specdecode_operator.deployment.speculation_policy import given_up
from specdecode_operator.handlers.status_writer import Reporter
from specdecode_operator.importing.spec_builder import MigrationError, SpecBuilder
from specdecode_operator.problems import OneLine, Problem, shown
from specdecode_operator.sizing.calibration import CalibrationError, parse_calibration
from tests.support.captures import capture_pod, job
from tests.support.captures import ended as capture_ended
from tests.support.objects import ended, pod
from tests.support.secret_forms import FORMS, SecretForm

NOW: Final = datetime(2026, 1, 1, tzinfo=UTC)
KEY: Final = Key("team", "a", KIND)
AROUND: Final = 6
"""Characters around a clip, and around each edge of a secret, at which the secret is moved one by one."""
MAIN: Final = ("token of the hub", "password in a URL")
"""Forms that are moved by one character; the others by some, and by one in ``tests/unit/test_redaction.py``."""
STRIDE: Final = 31


def _condition(text: str) -> str:
    return stamp([ConditionUpdate("Ready", ConditionStatus.FALSE, "Bad", text)], [], 1, NOW)[0].message


def _event(text: str) -> str:
    posted: list[str] = []

    def post(event: dict[str, Any]) -> None:
        posted.append(event["message"])

    cluster = cast("Any", SimpleNamespace(post_event=post, clock=ServerTime()))
    reporter = Reporter(cluster, cast("Any", None), Key("team", "a", KIND), "uid")
    reporter.post_event("Bad", text)
    return posted[0]


def _blocked(blocked: Blocked | object | None) -> str:
    assert isinstance(blocked, Blocked)
    return blocked.message


def _engine(text: str) -> str:
    return _blocked(blocked_pod(pod(containerStatuses=[ended(1, f"RuntimeError: {text}")])))


def _refused_arguments(text: str) -> str:
    return _blocked(blocked_pod(pod(containerStatuses=[ended(2, f"api_server.py: error: {text}")])))


def _init_container(text: str) -> str:
    status = {**ended(1, text, "download-target"), "ready": False}
    return _blocked(blocked_pod(pod(initContainerStatuses=[status])))


def _reader(text: str) -> str:
    return _blocked(READER.read({"exitCode": 1, "message": pack_error(CheckpointError("HubUnreachable", text))}))


def _broken_reader(text: str) -> str:
    return _blocked(READER.read({"exitCode": 1, "message": f"{{{text}"}))


def _reader_with_a_log(text: str) -> str:
    return _blocked(READER.read({"exitCode": 1, "message": f"OSError: {text}"}))


def _download(text: str) -> str:
    return _blocked(
        DOWNLOADER.read({"exitCode": 1, "message": json.dumps({"error": {"reason": "a", "message": text}})})
    )


def _capture(text: str) -> str:
    said = json.dumps({"error": {"reason": "DiskFull", "message": text}})
    return read_failure(capture_pod(containerStatuses=[capture_ended(LOAD, 1, said)]), job()).message


def _capture_with_a_log(text: str) -> str:
    return read_failure(capture_pod(containerStatuses=[capture_ended(LOAD, 1, f"OSError: {text}")]), job()).message


def _settings(text: str) -> str:
    with pytest.raises(InvalidSettingsError) as refused:
        read_settings(json.dumps({"namespace": {"a": text}}))
    return str(refused.value)


def _import(text: str) -> str:
    builder = SpecBuilder()
    builder.decide("spec.engine", text, "must be true")
    return f"{MigrationError('spec.engine', text, 'must be true')} {builder.decisions[0]}"


def _given_up(text: str) -> str:
    status = PolicyStatus(mode="Enforce", action="Keep", outcome="Kept", reason="NoEvidence", message="", asked="a")
    after = given_up(status, text, NOW)
    return f"{after.message} {after.decisions[0].message}"


def _calibration(text: str) -> str:
    with pytest.raises(CalibrationError) as refused:
        parse_calibration(text)
    return str(refused.value)


CLIPS: Final[dict[str, tuple[Callable[[str], str], int]]] = {
    "condition": (_condition, 4096),
    "Event": (_event, 1024),
    "last words of an engine": (_engine, 300),
    "refused arguments": (_refused_arguments, 300),
    "last words of an init container": (_init_container, 300),
    "answer of a reader": (_reader, 600),
    "broken answer of a reader": (_broken_reader, 200),
    "log of a reader": (_reader_with_a_log, 300),
    "answer of a download": (_download, 600),
    "message of a capture": (_capture, 1024),
    "log of a capture": (_capture_with_a_log, 300),
    "termination message of a capture": (lambda text: capture_message(CaptureError("A", text)).decode(), 2000),
    "termination message of many bytes": (
        lambda text: capture_message(CaptureError("A", text + "\x01" * 700)).decode(),
        600,
    ),
    "error of an engine": (lambda text: error_text(json.dumps({"error": {"message": text}}).encode()), 200),
    "error of an engine that is not valid JSON": (lambda text: error_text(text.encode()), 200),
    "error of the API server": (lambda text: api_message(json.dumps({"message": text}).encode(), 500), 500),
    "value": (shown, 120),
    "value within an object": (lambda text: shown({"a": [text]}), 112),
    "value of a problem": (lambda text: str(Problem("spec.a", shown(text), "must be b")), 120),
    "settings of a capture": (_settings, 120),
    "report of an import": (_import, 96),
    "policy": (_given_up, 960),
    "calibration file": (_calibration, 40),
}
"""Public functions that shorten a text, and about how many characters of it they keep."""


def texts(form: SecretForm, limit: int, stride: int) -> Iterator[str]:
    """Texts whose secret stands before, across and behind the place where they are cut."""
    filler = "it failed again and " * (limit // 20 + 2)
    for length in range(max(limit - len(form.text) - AROUND, 0), limit + AROUND, stride):
        yield f"{filler[:length]} {form.text} and so on{' and so on' * 20}"


@pytest.mark.parametrize("clip", CLIPS)
def test_no_shortened_message_shows_a_part_of_a_secret(clip: str) -> None:
    told, limit = CLIPS[clip]
    for name, form in FORMS.items():
        for text in texts(form, limit, 1 if name in MAIN else STRIDE):
            message = told(text)
            assert form.leaks_in(message) is None, (name, message)


LOG_BYTES: Final = 2048
SHARES: Final = (1755, 512)
"""What the kubelet leaves of a message where a pod has 7 and 24 containers."""


@pytest.mark.parametrize("line", ["one line", "several lines"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_log_cut_by_the_kubelet_shows_no_part_of_a_secret(form: SecretForm, line: str) -> None:
    space = " " if line == "one line" else "\n"
    log = f"it began{space}{form.text}{space}then it failed for good{space}"
    for cut in range(0, len(log), 3):
        kept = log[cut:].ljust(LOG_BYTES - 20, "." if line == "one line" else " ") + "\nValueError: the end\n"
        told = "\n".join(error_lines(kept))
        assert form.leaks_in(told) is None, told
        assert "ValueError: the end" in told
    for share in SHARES:
        for end in range(0, len(form.text) + 2, 3):
            kept = log[: len("it began ") + end].rjust(share)
            told = "\n".join(error_lines(kept))
            assert form.leaks_in(told) is None, told


def test_uncut_log_keeps_its_first_and_last_word() -> None:
    assert error_lines("ValueError: first\nlast") == ["ValueError: first", "last"]
    assert error_lines("x" * 1536 + "\n") == ["x" * 1536, ""]


def test_capture_log_with_progress_lines_shows_no_part_of_a_secret() -> None:
    """The lines of progress are left out, so what is left no longer has the length of a log that was cut."""
    progress = "\n".join(json.dumps({"phase": "single", "sent": number}) for number in range(60))
    form = FORMS["token of the hub"]
    for cut in range(len(form.text)):
        said = (f"{form.text[cut:]} is refused\n{progress}\n" + "OSError: the end").ljust(LOG_BYTES)
        message = read_failure(capture_pod(containerStatuses=[capture_ended(LOAD, 1, said)]), job()).message
        assert form.leaks_in(message) is None, message
        alone = (f"{form.text[cut:]} is refused\n{progress}").ljust(LOG_BYTES)
        assert (
            form.leaks_in(read_failure(capture_pod(containerStatuses=[capture_ended(LOAD, 1, alone)]), job()).message)
            is None
        )


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_multi_line_text_is_masked_before_it_is_split(form: SecretForm, capsys: pytest.CaptureFixture[str]) -> None:
    say(f"first\n{form.text}\nlast")
    say(f"first\n{form.text}\nlast", err=True)
    say_line(form.text)
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(OneLine())
    handler.handle(
        logging.LogRecord("a", logging.ERROR, __file__, 1, "%s", (form.text,), (OSError, OSError(form.text), None))
    )
    printed = capsys.readouterr()
    for told in (printed.out, printed.err, stream.getvalue(), one_line(f"error: {form.text}")):
        assert form.leaks_in(told) is None, told
    assert "first" in printed.out
    assert "last" in printed.out


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_unexpected_exception_is_printed_without_secrets(
    form: SecretForm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.dup2", lambda *_: None)
    for text in texts(form, 288, STRIDE):

        def fail(text: str = text) -> None:
            raise RuntimeError(text)

        with pytest.raises(SystemExit):
            run_to_its_end(fail)
        told = capsys.readouterr().err
        assert "RuntimeError: it failed" in told
        assert form.leaks_in(told) is None, told


def test_log_tail_of_a_calibration_engine_shows_no_part_of_a_secret() -> None:
    form = FORMS["token of the hub"]
    log = f"it began\n{form.text}".ljust(2000 + len(form.text) // 2, ".") + "\nit failed"
    command = (sys.executable, "-c", f"print({log!r}); raise SystemExit(3)")
    with pytest.raises(RuntimeError, match="it failed") as refused:
        EngineRun("64x8192", command, 64, 8192).start()
    assert form.leaks_in(str(refused.value)) is None
