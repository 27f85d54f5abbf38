"""Run the containers `prepare` and `load` of a capture's Job.

`prepare` runs before the engine, `load` alongside it. For each part of the capture, `load` waits for the engine and
its recorders, sends the workload, closes the recorders, merges, validates and publishes. Both report in the
container's termination message: the summary, or ``{"error": {"reason", "message"}}``.
"""

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from specdecode_operator.capture.comparison.arm_verdict import comparison_status
from specdecode_operator.capture.comparison.compare_arms import compare_capture, write_comparison
from specdecode_operator.capture.comparison.comparison_file import Comparison
from specdecode_operator.capture.comparison.regression import regression_status, with_regression
from specdecode_operator.capture.files.formats import MESSAGE_BYTES, CaptureError
from specdecode_operator.capture.files.summary import summary_text
from specdecode_operator.capture.job import pod_files
from specdecode_operator.capture.job.finish import Asked, Published, finish, published_before
from specdecode_operator.capture.job.record_part import PATIENT, Load, Part, Pod, Recording, Timeouts, parts_of
from specdecode_operator.capture.load import run_settings
from specdecode_operator.capture.load.datasets import DATASET_MOUNT, BadDatasetError
from specdecode_operator.capture.load.prompts import prompt_source
from specdecode_operator.capture.load.runner import print_line, run_load
from specdecode_operator.redaction import clip
from specdecode_operator.vllm.plugin_bundle import RECORDER

_MESSAGE_CHARACTERS: Final = 2000


def error_message(error: CaptureError) -> bytes:
    """Return the termination message of a failure."""
    message = clip(error.message, _MESSAGE_CHARACTERS)
    while len(text := msgspec.json.encode({"error": {"reason": error.reason, "message": message}})) > MESSAGE_BYTES:
        message = clip(message, len(message) * 3 // 4)
    return text


def success_message(published: Published, comparison: Comparison | None = None) -> bytes:
    """Return the termination message of a success: ``status.summary`` within the limit of Kubernetes."""
    # With several arms it is nested without its files, beside ``status.comparison``.
    status: dict[str, Any] = dict(published.status)

    def encoded(compared: dict[str, Any] | None) -> bytes:
        return msgspec.json.encode(status if compared is None else {"summary": status, "comparison": compared})

    compared = None
    if comparison is not None:
        del status["files"]
        compared = comparison_status(comparison)
    for dropped in ("files", "perPositionPercent", "lateMs", "latencyMs"):
        if len(text := encoded(compared)) <= MESSAGE_BYTES:
            return text
        status.pop(dropped, None)
    text = encoded(compared)
    if comparison is not None and len(text) > MESSAGE_BYTES:
        return encoded(comparison_status(comparison, MESSAGE_BYTES - len(encoded({}))))
    return text


def comparison_report(comparison: Comparison) -> str:
    """Return the log lines of the arms."""
    return "\n".join(f"{arm.name}: {arm.verdict}: {arm.message}" for arm in comparison.arms if arm.verdict is not None)


def report(published: Published) -> str:
    """Return the last log lines of a success."""
    return f"{summary_text(published.summary)}\n{published.manifest.equation}\n{published.status['path']}"


class Job:
    """One attempt of a capture."""

    def __init__(
        self,
        environment: Mapping[str, str],
        timeouts: Timeouts = PATIENT,
        image_id_file: Path = pod_files.IMAGE_ID_FILE,
        switch_folder: Path = Path(pod_files.SWITCH_FOLDER),
    ) -> None:
        text, attempt = run_settings.required(environment)
        try:
            self.settings = run_settings.read_settings(text)
        except run_settings.InvalidSettingsError as error:
            raise CaptureError("InvalidSettings", str(error)) from error
        self.parts = parts_of(self.settings, msgspec.json.decode(text, type=Asked), attempt)
        self.places = self.parts[0].places
        self._timeouts = timeouts
        self._pod = Pod(environment.get(run_settings.NODE_VARIABLE), image_id_file, switch_folder)

    def prepare(self, recorder: Path, datasets: Path = DATASET_MOUNT) -> None:
        """Prepare the volume and write the recorder, unless an earlier attempt has published all parts."""
        left = [part for part in self.parts if published_before(part.places, part.asked) is None]
        for part in left:
            pod_files.look_at_volume(part.places)
            # The folder of an arm is created when its turn comes.
            if part.arm is None:
                pod_files.begin(part.places)
        if left:
            RECORDER.write(recorder)
            try:
                # Before the engine starts, so that no GPU loads a model for an unreadable dataset.
                prompt_source(self.settings, datasets)
            except BadDatasetError as error:
                failure = CaptureError("InvalidDataset", str(error))
                _label(left[0].places, failure)
                raise failure from error

    def run(self, load: Load = run_load) -> Published:
        """Record and publish all parts; a failure leaves the files of its part labelled as partial."""
        # Parts that an earlier attempt has published are skipped. With several arms, the last repetition of the first
        # arm that is compared with the baseline is returned.
        compared = self.settings.arms[1].name if self._compares else None
        last = shown = None
        for part in self.parts:
            last = published_before(part.places, part.asked) or self._run(part, load)
            if part.arm is not None:
                # JSON, like progress: the other lines are searched for the cause when a pod is killed.
                print_line(msgspec.json.encode({"published": part.places.path}).decode())
            shown = last if part.places.arm == compared else shown
        assert last is not None  # noqa: S101 - there is at least one part
        return shown or last

    def compare(self) -> Comparison | None:
        """Write ``comparison.json`` of published arms; return None if there is only one arm."""
        if not self._compares:
            return None
        folder = self.places.of_capture
        try:
            comparison = compare_capture(folder)
        except CaptureError:
            raise
        except Exception as error:
            message = f"the arms are published, but comparing them failed: {type(error).__name__}: {error}"
            raise CaptureError("InternalError", f"{message}: compare them with specdecode capture compare") from error
        with pod_files.volume_errors(self.places.root):
            write_comparison(folder, comparison)
        return comparison

    @property
    def _compares(self) -> bool:
        return len(self.settings.arms) > 1

    def _run(self, part: Part, load: Load) -> Published:
        with label_failure(part.places, part.named):
            if part.arm is not None:
                pod_files.look_at_volume(part.places)
                pod_files.begin(part.places)
            return finish(part.places, part.asked, asyncio.run(Recording(part, self._timeouts, self._pod).run(load)))


@contextmanager
def label_failure(
    places: pod_files.Places, named: Callable[[CaptureError], CaptureError] = lambda error: error
) -> Iterator[None]:
    """Label the files of an attempt with a failure, and raise it as a CaptureError; ``named`` adds whose it is."""
    try:
        yield
    except Exception as error:
        failure = error
        if not isinstance(failure, CaptureError):
            failure = CaptureError("InternalError", f"{type(error).__name__}: {error}: see the log of this container")
        failure = named(failure)
        _label(places, failure)
        raise failure from error


def _label(places: pod_files.Places, error: CaptureError) -> None:
    # If even this cannot be written, the initial label still says that it is unfinished.
    with suppress(OSError):
        pod_files.label_attempt(places, error.reason, error.message)


def prepare_job(recorder: Path) -> bytes:
    """Run the container `prepare`; return its termination message."""
    job = Job(os.environ)
    job.prepare(recorder)
    return msgspec.json.encode({"prepared": str(job.places.folder)})


def run_job() -> bytes:
    """Run the container `load`, and print the summary; return its termination message."""
    job = Job(os.environ)
    published = job.run()
    print_line(report(published))
    comparison = job.compare()
    if comparison is not None:
        print_line(comparison_report(comparison))
    regression = regression_status(os.environ, job.places.final.parent)
    if regression is not None:
        print_line(f"against {regression['against']}: {regression['message']}")
    return with_regression(success_message(published, comparison), regression)
