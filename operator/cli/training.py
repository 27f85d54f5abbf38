"""`specdecode training`: trainings of draft heads, their verdicts and promotion, through kubectl."""

import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, Final

import typer
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.alias_generators import to_camel

from specdecode_operator.api import base, deployment
from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.training import Promote, SpecDecodeTrainingSpec
from specdecode_operator.api.training_status import TrainedHead, TrainingPhase
from specdecode_operator.cli.kubectl import Kubectl, KubectlError, condition_of, with_kubectl
from specdecode_operator.cli.main import application
from specdecode_operator.cli.options import AllNamespaces, Selector, TableOrData, Watch, ended, fail
from specdecode_operator.cli.outputs import Output, print_data, print_json, yaml_text
from specdecode_operator.cli.terminal import (
    age_text,
    aligned,
    cell,
    labelled,
    line_width,
    say,
    say_line,
    show_live,
    whole_cell,
)
from specdecode_operator.cluster.resources import SPECDECODE_DEPLOYMENT, SPECDECODE_TRAINING
from specdecode_operator.problems import printable
from specdecode_operator.training.observation import Training, read_training
from specdecode_operator.training.offers import head_problem, head_speculation
from specdecode_operator.untrusted import mapping, objects, parse_json

_TRAININGS: Final = SPECDECODE_TRAINING.qualified_plural
_DEPLOYMENTS: Final = SPECDECODE_DEPLOYMENT.qualified_plural
_TRAIN: Final = "train"
"""Container of the trainer, whose log has the progress."""

_LOG_LINES: Final = 50
_LOG_BYTES: Final = 2**20

training_app = application("Trainings of draft heads: list, follow, promote, roll back.")

_Name = Annotated[str, typer.Argument(help="Name of the training.")]
_Format = Annotated[TableOrData, typer.Option("--output", "-o", help="Output format.")]


class PatchFormat(StrEnum):
    """Format of a patch."""

    YAML = "yaml"
    JSON = "json"


class TrainerProgress(Output):
    """Progress of the trainer, from its log."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, alias_generator=to_camel)

    step: int | None = None
    """Number of finished steps."""
    epochs_done: int | None = None
    """Number of finished passes over the rows."""
    epochs: int | None = None
    """Total number of passes over the rows."""
    loss: float | None = None
    """Loss of the last step."""
    validation_loss: float | None = None
    """Loss on the validation rows after the last finished pass."""
    eta_seconds: float | None = None
    """Estimated remaining time in seconds."""


class TrainingOutput(Output):
    """A SpecDecodeTraining."""

    training: dict[str, Any]
    """The object from the API server, without managedFields."""
    trained_draft: dict[str, Any] | None = None
    """status.trainedDraft of the deployment: the trained head that it serves. Null if NAME is not given, or if the
    deployment serves the draft of its spec."""
    progress: TrainerProgress | None = None
    """Progress of the trainer; null if NAME is not given or the trainer does not run."""


class TrainingsOutput(Output):
    """SpecDecodeTrainings of a cluster."""

    trainings: list[TrainingOutput]
    """One object if NAME is given, otherwise all objects that the options select."""


@training_app.command("list")
@with_kubectl
def list_command(
    kubectl: Kubectl,
    *,
    all_namespaces: AllNamespaces = False,
    selector: Selector = None,
    watch: Watch = False,
    output: _Format = TableOrData.TABLE,
) -> None:
    """List trainings: phase, deployment, verdict, and whether the head is served.

    For example: specdecode training list -A

    Exits with 0, or 2 when the cluster cannot be reached.
    """

    def find() -> TrainingsOutput:
        found = kubectl.select(_TRAININGS, all_namespaces=all_namespaces, selector=selector)
        return TrainingsOutput(trainings=[TrainingOutput(training=_lean(each)) for each in found])

    def show(found: TrainingsOutput) -> None:
        if output is TableOrData.TABLE:
            bodies = [each.training for each in found.trainings]
            say("\n".join(_table(bodies, datetime.now(UTC), with_namespace=all_namespaces)))
        else:
            print_data(found, output)

    with ended(KubectlError):
        show_live(find, show, watch=watch)


@training_app.command("status")
@with_kubectl
def status_command(kubectl: Kubectl, *, name: _Name, watch: Watch = False, output: _Format = TableOrData.TABLE) -> None:
    """Show a training: progress, rows, losses, verdict, and the head that its deployment serves.

    For example: specdecode training status chat -w

    Exits with 0, or 2 when there is no such training or the cluster cannot be
    reached.
    """

    def find() -> TrainingsOutput:
        body = _training(kubectl, name)
        told = TrainingOutput(
            training=_lean(body),
            trained_draft=_trained_draft(kubectl, body),
            progress=_progress(kubectl, body),
        )
        return TrainingsOutput(trainings=[told])

    def show(found: TrainingsOutput) -> None:
        if output is TableOrData.TABLE:
            say("\n".join(_screen(found.trainings[0])))
        else:
            print_data(found, output)

    with ended(KubectlError):
        show_live(find, show, watch=watch)


@training_app.command("promote")
@with_kubectl
def promote_command(
    kubectl: Kubectl,
    *,
    name: _Name,
    apply: Annotated[
        bool, typer.Option("--apply", help="Apply the patch to the deployment instead of printing it.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Promote the head even if the condition Better is not True.")
    ] = False,
    output: Annotated[PatchFormat, typer.Option("--output", "-o", help="Format of the patch.")] = PatchFormat.YAML,
) -> None:
    """Print a patch that makes the deployment serve the head of a training.

    The patch replaces method, K and draft in the deployment's spec. Commit it as
    a patch of a kustomization, or apply it with kubectl patch --type=merge. With
    --apply, the command applies the patch instead of printing it. To let the
    operator promote better heads, set promote: OnBetter in the training and
    speculation.trainedDrafts in the deployment.

    For example: specdecode training promote chat > patch.yaml

    Exits with 0, 1 when the condition Better is not True, 2 when there is no head
    or the cluster cannot be reached.
    """
    with ended(KubectlError):
        body = _training(kubectl, name)
        training, spec, head = _published(body)
        if condition_of(body, "Better").get("status") != "True" and not force:
            say_line(f"error: training {name}: {_why_not_better(body)}: to promote it anyway, add --force", err=True)
            raise typer.Exit(1)
        owner = _deployment(kubectl, spec.deployment)
        patch = _patch(owner, training, spec, head)
        if apply:
            options = (f"--patch={json.dumps(patch)}", "--type=merge", "--output=name")
            kubectl.within(body).text("patch", _DEPLOYMENTS, spec.deployment, *options)
            say_line(f"deployment {spec.deployment}: spec.speculation now names the head of training {name}")
        elif output is PatchFormat.JSON:
            print_json(patch)
        else:
            typer.echo(yaml_text(patch), nl=False)


@training_app.command("rollback")
@with_kubectl
def rollback_command(kubectl: Kubectl, *, name: _Name) -> None:
    """Withdraw the head of a training from its deployment.

    Sets promote: Manual in the training. The deployment then serves a better head
    of an older training with promote: OnBetter, or the draft of its spec. If the
    spec itself names the head, the command prints the fields to change.

    For example: specdecode training rollback chat

    Exits with 0, 1 when the deployment's spec names the head, 2 when there is no
    such training or the cluster cannot be reached.
    """
    with ended(KubectlError):
        body = _training(kubectl, name)
        here, training = kubectl.within(body), read_training(body)
        patch = json.dumps({"spec": {"promote": Promote.MANUAL.value}})
        here.text("patch", _TRAININGS, name, "--type=merge", f"--patch={patch}", "--output=name")
        say_line(f"training {name}: promote is {Promote.MANUAL}, so the operator withdraws its head")
        owner = here.find(f"{_DEPLOYMENTS}/{training.deployment_key.name}")
        draft = mapping(mapping(mapping(owner or {}, "spec"), "speculation"), "draft")
        claim = mapping(draft, "persistentVolumeClaim").get("claimName")
        if claim is not None and claim == training.status.claim:
            what = f"deployment {training.deployment_key.name}: spec.speculation.draft names claim {claim}"
            fix = (
                "restore the earlier spec.speculation, in Git if the deployment is there, and remove"
                " persistentVolumeClaim and config if the earlier draft did not have them"
            )
            say_line(f"error: {what}: {fix}", err=True)
            raise typer.Exit(1)


def _training(kubectl: Kubectl, name: str) -> Body:
    body = kubectl.find(f"{_TRAININGS}/{name}")
    if body is None:
        here = kubectl.names_here(_TRAININGS, "SpecDecodeTrainings", name)
        fail(f"SpecDecodeTraining {name}: not found ({here}): check the name, or set the namespace with -n")
    return body


def _deployment(kubectl: Kubectl, name: str) -> Body:
    body = kubectl.find(f"{_DEPLOYMENTS}/{name}")
    if body is None:
        fail(f"spec.deployment: {name}: not found: create it, or train a head for another deployment")
    return body


def _published(body: Body) -> tuple[Training, SpecDecodeTrainingSpec, TrainedHead]:
    """Return a training with its head; exit if it has none, or if its status names another claim or folder."""
    training = read_training(body)
    head = training.status.head
    try:
        spec = SpecDecodeTrainingSpec.parse(training.spec, newer=True)
    except ValidationError as error:
        fail(f"training {training.key.name}: invalid spec ({error.error_count()} errors)")
    if head is None:
        fail(f"training {training.key.name}: has no head yet (phase {training.status.phase or 'unknown'})")
    if problem := head_problem(training, spec, head):
        fail(f"training {training.key.name}: {problem}")
    return training, spec, head


def _why_not_better(body: Body) -> str:
    better = condition_of(body, "Better")
    if not better:
        return "the head was not measured"
    return f"condition Better is {better.get('status')} ({better.get('reason')}: {better.get('message')})"


def _patch(owner: Body, training: Training, spec: SpecDecodeTrainingSpec, head: TrainedHead) -> Body:
    """Return a JSON merge patch (RFC 7386) of the deployment, in which null removes a field."""
    try:
        written = SpecDecodeDeploymentSpec.parse(owner["spec"], newer=True).speculation
    except ValidationError as error:
        fail(f"deployment {spec.deployment}: its spec is invalid ({error.error_count()} errors): fix it first")
    speculation, earlier = head_speculation(written, training, spec, head), mapping(owner["spec"], "speculation")
    if "trainedDrafts" in earlier:
        speculation["trainedDrafts"] = earlier["trainedDrafts"]
    changes: Body = {"speculation": _replacing(earlier, speculation)}
    is_same_method = earlier.get("method") == speculation["method"]
    if "draftTensor" in mapping(owner["spec"], "parallelism") and not is_same_method:
        changes["parallelism"] = {"draftTensor": None}
    metadata = {"name": spec.deployment, "namespace": training.key.namespace}
    return {"apiVersion": base.API_VERSION, "kind": deployment.KIND, "metadata": metadata, "spec": changes}


def _replacing(earlier: Body, wanted: Body) -> Body:
    """Return a merge patch that makes one object equal to another."""
    gone = dict.fromkeys(name for name in earlier if name not in wanted)
    kept = {
        name: _replacing(mapping(earlier, name), value) if isinstance(value, dict) else value
        for name, value in wanted.items()
    }
    return {**gone, **kept}


def _trained_draft(kubectl: Kubectl, body: Body) -> Body | None:
    name = mapping(body, "spec").get("deployment")
    owner = kubectl.within(body).find(f"{_DEPLOYMENTS}/{name}") if name else None
    return mapping(mapping(owner or {}, "status"), "trainedDraft") or None


def _progress(kubectl: Kubectl, body: Body) -> TrainerProgress | None:
    """Return the newest line of progress in the trainer's untrusted log; None if the trainer does not run."""
    status = mapping(body, "status")
    job = status.get("job")
    if status.get("phase") != TrainingPhase.TRAINING or not job:
        return None
    command = ("logs", f"job/{job}", f"--container={_TRAIN}", f"--tail={_LOG_LINES}")
    try:
        lines = kubectl.within(body).short_text(*command, most_bytes=_LOG_BYTES).splitlines()
    except KubectlError:
        return None
    return next(filter(None, map(_progress_of, reversed(lines))), None)


def _progress_of(line: str) -> TrainerProgress | None:
    try:
        found = parse_json(line)
        told = mapping(found, "progress") if isinstance(found, dict) else {}
        return TypeAdapter(TrainerProgress).validate_python(told, strict=True) if told else None
    except ValueError:
        return None


def _lean(body: Body) -> Body:
    return {**body, "metadata": {key: each for key, each in body["metadata"].items() if key != "managedFields"}}


def _table(found: Sequence[Body], now: datetime, *, with_namespace: bool) -> list[str]:
    if not found:
        return ["no SpecDecodeTrainings here"]
    rows = [["NAMESPACE", "NAME", "PHASE", "DEPLOYMENT", "METHOD", "BETTER", "RATIO", "PROMOTED", "AGE"]]
    for body in found:
        spec, status, metadata = mapping(body, "spec"), mapping(body, "status"), body["metadata"]
        cells = (
            metadata.get("namespace"),
            metadata.get("name"),
            status.get("phase"),
            spec.get("deployment"),
            spec.get("method"),
            condition_of(body, "Better").get("reason"),
            mapping(status, "verdict").get("ratio"),
            condition_of(body, "Promoted").get("reason"),
            age_text(metadata.get("creationTimestamp"), now),
        )
        rows.append([*map(cell, cells)])
    rows = rows if with_namespace else [row[1:] for row in rows]
    return aligned(rows, left=len(rows[0]), indent="")


def _screen(found: TrainingOutput) -> list[str]:
    body = found.training
    title = f"{body['metadata'].get('namespace')}/{body['metadata'].get('name')}"
    conditions = [
        [*(cell(each.get(field)) for field in ("type", "status", "reason")), whole_cell(each.get("message"))]
        for each in objects(mapping(body, "status"), "conditions")
    ]
    heading = ["TYPE", "STATUS", "REASON", "MESSAGE"]
    return [
        printable(title),
        *labelled(_summary(found)),
        "",
        "Verdict",
        *_arms(mapping(mapping(body, "status"), "verdict")),
        "",
        "Conditions",
        *aligned([heading, *conditions], left=len(heading), width=line_width(), foldable=(len(heading) - 1,)),
    ]


def _summary(found: TrainingOutput) -> Iterator[tuple[str, object]]:
    spec, status = mapping(found.training, "spec"), mapping(found.training, "status")
    rows, head = mapping(status, "rows"), mapping(status, "head")
    yield "Phase", status.get("phase")
    yield "Deployment", spec.get("deployment")
    yield "Method", spec.get("method")
    if found.progress is not None:
        yield "Progress", _progress_text(found.progress)
    if rows:
        counts = (("training", "to train on"), ("holdout", "held out"), ("duplicates", "duplicates left out"))
        told = ", ".join(f"{_number(rows.get(name))} {words}" for name, words in counts)
        yield "Rows", f"{told}, {_number(rows.get('tokens'))} tokens"
    if head:
        yield "Head", f"{head.get('path')} on claim {status.get('claim')}, {_number(head.get('bytes'))} bytes"
        yield "SHA-256", head.get("sha256")
        yield "Validation loss", head.get("validationLoss")
        accuracy = head.get("accuracyPercent")
        if isinstance(accuracy, list):
            yield "Accuracy", f"{', '.join(f'{each} %' for each in accuracy)} by draft position"
    draft = found.trained_draft or {}
    own = draft.get("training") == found.training["metadata"].get("name")
    yield "Served", "this head" if own else draft.get("training") or "the draft of the deployment's spec"
    if draft.get("reason"):
        yield "Reason", f"{draft.get('reason')}: {draft.get('message')}"
    if draft.get("updateMessage"):
        yield "Update", f"{draft.get('update')}: {draft.get('updateMessage')}"


def _progress_text(told: TrainerProgress) -> str:
    parts = [f"step {_number(told.step)}"]
    parts += [f"{told.epochs_done} of {told.epochs} epochs done"] if told.epochs is not None else []
    parts += [f"loss {told.loss:.3f}"] if told.loss is not None else []
    parts += [f"validation loss {told.validation_loss:.3f}"] if told.validation_loss is not None else []
    parts += [f"{told.eta_seconds:.0f} s left"] if told.eta_seconds is not None else []
    return ", ".join(parts)


def _arms(verdict: Body) -> list[str]:
    arms = objects(verdict, "arms")
    if not arms:
        return ["  not measured"]
    told = [[each.get("name"), each.get("goodput"), _percent(each.get("acceptancePercent"))] for each in arms]
    rows = [["ARM", "GOODPUT (TOKENS/S)", "ACCEPTANCE"], *([*map(cell, row)] for row in told)]
    ratio = ""
    if verdict.get("ratio") is not None:
        ratio = f"  goodput of trained: {verdict.get('ratio')}x that of current{_interval(verdict)}"
        ratio += f", measured by capture {verdict.get('capture')}"
    per_step = ""
    if steps := mapping(verdict, "tokensPerStep"):
        per_step = f"  tokens per step: {steps.get('arm')} with trained, {steps.get('baseline')} with current, "
        per_step += f"{steps.get('ratio')}x{_interval(steps)}"
    return [*aligned(rows), *(printable(each) for each in (ratio, per_step) if each)]


def _interval(estimate: Body) -> str:
    low, high = estimate.get("low"), estimate.get("high")
    return "" if low is None or high is None else f" (95 %: {low} to {high})"


def _percent(value: object) -> str | None:
    return f"{value} %" if isinstance(value, int) else None


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else "-"
