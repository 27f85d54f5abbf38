"""The table of reasons holds every reason that the code gives, and no other.

A reason is one word in CamelCase. So every such word in the code that decides is a reason of the table, or one of the
other words below: a new reason is found wherever it is written and however it is handed on.
"""

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

from bench.documents.reason_tables import FILE, read_conditions, read_reasons
from specdecode_operator.api.capture import KIND as CAPTURE
from specdecode_operator.api.capture import Regressed
from specdecode_operator.api.capture_status import ArmVerdict
from specdecode_operator.api.deployment import KIND as DEPLOYMENT
from specdecode_operator.api.training import KIND as TRAINING
from specdecode_operator.sizing.memory.budget import Verdict
from specdecode_operator.training.job_status import STEPS
from tests.support.documents import ROOT, sections, table

KINDS = (DEPLOYMENT, CAPTURE, TRAINING)
OPERATOR = ROOT / "operator"
REFRESHES = "training/refresh"
OF_DEPLOYMENTS = ("deployment/", "capture/schedules.py", REFRESHES)
CAPTURE_DECISIONS = tuple(f"capture/{path.name}" for path in (OPERATOR / "capture").glob("*.py"))
READERS_OF_ARMS = ("arm_folders.py", "compare_arms.py", "client_requests.py")
OF_CAPTURES = (
    *CAPTURE_DECISIONS,
    *(f"capture/comparison/{name}" for name in READERS_OF_ARMS),
    "capture/files/",
    "capture/job/",
)
ROWS_OF_TRAININGS = "capture/files/training_rows.py"
OF_TRAININGS = ("training/", ROWS_OF_TRAININGS)
STEPS_OF_TRAININGS = ("capture/job/pod_files.py", "capture/load/rebuilt_prompts.py")
WITHOUT_REASONS = {
    "http_server",
    "admission_findings",
    "webhook",
    "webhook_certificate",
    "certificate_renewal",
    "watched_objects",
}
HANDLERS = tuple(
    f"handlers/{path.name}" for path in (OPERATOR / "handlers").glob("*.py") if path.stem not in WITHOUT_REASONS
)
OF_ALL = (*HANDLERS, "problems.py", "cluster/clock.py", "deployment/conditions.py", "deployment/rollout/")
OF_WRITES = "handlers/apply_children.py"
VERDICTS = {
    DEPLOYMENT: {verdict.value for verdict in Verdict},
    CAPTURE: {verdict.value for verdict in (*ArmVerdict, *Regressed)},
    TRAINING: {phase.value for phase, _ in STEPS.values()},
}
"""Of a plan; of an arm, and of an engine beside an earlier one; of a training's pod."""

REFERENCE = ROOT / "docs/reference/reasons.md"
CONDITIONS = {
    DEPLOYMENT: ROOT / "docs/reference/status.md",
    CAPTURE: ROOT / "docs/measure/captures.md",
    TRAINING: ROOT / "docs/reference/training-fields.md",
}
"""Where the conditions of each kind are told."""

SUMMED_UP = {"Ready", "Reconciling", "Stalled"}
NO_CONDITION = {"an Event", "none"}

OTHER_WORDS = {
    *("Accepted", "Available", "BudgetAccurate", "Planned", "Ready", "Reconciling", "SpeculationActive", "Stalled"),
    *(
        "Cluster",
        "Namespaced",
        "ChildrenInSync",
        "SpeculationEffective",
        "Gate",
        "Canary",
        "Exposed",
        "Autoscaled",
        "SettingsInForce",
        "Pays",
        "Succeeded",
        "WaitingForGPUs",
        "True",
        "False",
        "Normal",
        "Warning",
        "Event",
        "ModelFacts",  # the kind of facts files
        "Unknown",  # the kubelet's reasons of a container whose node restarted
        "ContainerStatusUnknown",
    ),
    # What validation tells a person of files.
    *("Trace", "UnknownFile"),
    # What HorizontalPodAutoscalers and KEDA have and say.
    *(
        "AbleToScale",
        "AmbiguousSelector",
        "ScalingActive",
        "ScalingLimited",
        "TooManyReplicas",
        "Fallback",
    ),
    *("AverageValue", "External", "Pods"),
    # What Kubernetes says of nodes, pods and Jobs.
    *(
        "BackoffLimitExceeded",
        "Bound",
        "Pod",
        "Complete",
        "CreateContainerConfigError",
        "ReplicaSet",
        "StatefulSet",
        "CreateContainerError",
        "DisruptionTarget",
    ),
    *("ErrImageNeverPull", "ErrImagePull", "Evicted", "FailureTarget", "ImagePullBackOff", "InvalidImageName", "Lost"),
    *("NodeShutdown", "Pending", "PodScheduled", "ProgressDeadlineExceeded", "Progressing", "ReplicaFailure"),
    *("ContainerCreating", "PodInitializing", "RunContainerError", "Running", "Shutdown", "Terminated"),
    *(
        "Failed",
        "NodeAffinity",
        "OutOf",
        "Preempting",
        "TaintToleration",
        "TopologyAffinityError",
        "UnexpectedAdmissionError",
    ),
    # What it is told.
    *("Always", "ConfigMap", "Directory", "Exists", "In", "OnRootMismatch", "ReadOnlyMany", "ReadWriteMany"),
    "ReadWriteOncePod",
    "RuntimeDefault",
    "Gi",
    "SpecDecode",  # prefix of our kinds
    *("FallbackToLogsOnError", "Filesystem", "Memory", "PathPrefix", "RollingUpdate"),
    # Conditions of a route or a pool, reasons of Gateways, and what both refer to.
    *("PartiallyInvalid", "ResolvedRefs"),
    *("InvalidExtensionRef", "InvalidKind", "NoMatchingListenerHostname", "NoMatchingParent", "NotAllowedByListeners"),
    *("NotSupportedByParent", "RefNotPermitted"),
    *("Gateway", "InferencePool", "Service"),
    # What `/metrics` says is served.
    *("Cluster", "Namespaced"),
    # Classes of models, what the hub's library raises, and what a sentence begins with.
    *("GatedRepoError", "RepositoryNotFoundError"),
    # Classes of vLLM's connectors, and of ours.
    *("CpuHiddenStatesConnector", "ExampleHiddenStatesConnector"),
    "Engines",
    *("RevisionNotFoundError", "Volume"),
}


def words(*rooms: str) -> set[str]:
    """CamelCase words that stand as strings in the code of some rooms."""
    files = [path for path in OPERATOR.rglob("*.py") if path.relative_to(OPERATOR).as_posix().startswith(rooms)]
    assert len(files) >= len(rooms)
    return set().union(*map(words_of, files))


@cache
def words_of(path: Path) -> frozenset[str]:
    """CamelCase words of a module, but for types in quotes."""
    return frozenset(words_in(ast.parse(path.read_text())))


def words_in(tree: ast.Module) -> Iterator[str]:
    nodes = list(ast.walk(tree))
    types = {id(inner) for node in nodes for part in annotations(node) for inner in ast.walk(part)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in types:
            yield from re.findall(r"\A[A-Z][a-z]+[A-Za-z]*\Z", node.value)


def annotations(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.AnnAssign(annotation=found) | ast.arg(annotation=ast.AST() as found):
            yield found
        case ast.FunctionDef(returns=ast.AST() as found) | ast.AsyncFunctionDef(returns=ast.AST() as found):
            yield found
        case ast.Call(func=ast.Name(id="cast"), args=[found, *_]):
            yield found


def reasons(kind: str) -> list[str]:
    return [name for table in read_reasons()[kind].values() for name in table]


@pytest.mark.parametrize(
    ("given", "tables"),
    [
        (words(*OF_DEPLOYMENTS) - words("deployment/pod_security.py"), [DEPLOYMENT]),
        (words(*OF_CAPTURES) - words("capture/schedules.py", ROWS_OF_TRAININGS), [CAPTURE]),
        (words(*OF_TRAININGS) - words(REFRESHES) - {"Promoted"}, [TRAINING]),
        (words(*OF_ALL), [DEPLOYMENT, CAPTURE, TRAINING]),
        (words(OF_WRITES), [DEPLOYMENT, CAPTURE]),
    ],
    ids=["deployments", "captures", "trainings", "all", "writes"],
)
def test_every_reason_in_the_code_is_in_the_table(given: set[str], tables: list[str]) -> None:
    explained = set(chain.from_iterable(reasons(kind) for kind in tables))
    assert given - explained - OTHER_WORDS == set(), "explain it in operator/api/reasons.toml"


@pytest.mark.parametrize(
    ("kind", "rooms"),
    [
        (DEPLOYMENT, OF_DEPLOYMENTS),
        (CAPTURE, OF_CAPTURES),
        (TRAINING, (*OF_TRAININGS, *CAPTURE_DECISIONS, *STEPS_OF_TRAININGS)),
    ],
)
def test_every_reason_in_the_table_is_in_the_code(kind: str, rooms: tuple[str, ...]) -> None:
    assert set(reasons(kind)) - words(*rooms, *OF_ALL) - VERDICTS[kind] == set()


@pytest.mark.parametrize("kind", KINDS)
def test_every_reason_has_its_conditions_listed(kind: str) -> None:
    groups = tomllib.loads(FILE.read_text())["conditions"][kind]
    assert sorted(chain.from_iterable(groups.values())) == sorted(reasons(kind)), "operator/api/reasons.toml"


def calls(*rooms: str) -> Iterator[ast.Call]:
    """Calls of a plain name with a reason in them, in the code of some rooms."""
    for path in OPERATOR.rglob("*.py"):
        if path.relative_to(OPERATOR).as_posix().startswith(rooms):
            yield from (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))


def literal(call: ast.Call, position: int) -> str:
    """The string at a position of a call; empty where it is none."""
    value = call.args[position] if len(call.args) > position else None
    return str(value.value) if isinstance(value, ast.Constant) else ""


@pytest.mark.parametrize(
    ("kind", "rooms"), [(DEPLOYMENT, OF_DEPLOYMENTS), (CAPTURE, CAPTURE_DECISIONS), (TRAINING, OF_TRAININGS)]
)
def test_conditions_of_reasons_in_the_code_match_the_table(kind: str, rooms: tuple[str, ...]) -> None:
    """Where condition or permanence stand beside the reason in the code."""
    conditions, found = read_conditions(kind), 0
    for call in calls(*rooms):
        permanent = {word.arg: word.value for word in call.keywords}.get("permanent")
        match call.func:
            case ast.Name(id="ConditionUpdate") if reason := literal(call, 2):
                assert literal(call, 0) in conditions[reason], reason
            case ast.Name(id="stalled") if reason := literal(call, 0):
                assert "Stalled" in conditions[reason], reason
            case ast.Name(id="Blocked") if (reason := literal(call, 0)) and permanent is None:
                assert not conditions[reason].endswith(", Stalled"), reason
            case ast.Name(id="Blocked" | "EngineError") if (reason := literal(call, 0)) and literal_true(permanent):
                assert "Stalled" in conditions[reason], reason
            case _:
                continue
        found += 1
    assert found > 15


def literal_true(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is True


def test_list_of_other_words_has_no_unused_entries() -> None:
    assert OTHER_WORDS - words(*OF_DEPLOYMENTS, *OF_CAPTURES, *OF_TRAININGS, *OF_ALL) == set()
    assert OTHER_WORDS.isdisjoint(reasons(DEPLOYMENT))


@pytest.mark.parametrize("kind", KINDS)
def test_every_verdict_is_explained(kind: str) -> None:
    """The conditions Planned and Pays have the verdict for their reason."""
    assert set(reasons(kind)) >= VERDICTS[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_each_reason_has_one_short_explanation(kind: str) -> None:
    assert len(reasons(kind)) == len(set(reasons(kind)))
    for explained in read_reasons()[kind].values():
        for name, texts in explained.items():
            assert 1 <= len(texts) <= 2, name
            assert all(text and not text.endswith(".") and "|" not in text for text in texts), name


@pytest.mark.parametrize("kind", KINDS)
def test_reasons_referred_to_in_explanations_exist(kind: str) -> None:
    text = " ".join(text for table in read_reasons()[kind].values() for texts in table.values() for text in texts)
    assert set(re.findall(r"(?:as for|see) `([A-Z]\w+)`", text)) <= set(reasons(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_reference_lists_the_conditions_of_each_reason(kind: str) -> None:
    reference = sections(REFERENCE)[f"Reasons of a {kind}"]
    rows = re.findall(r'^\| <a id="[\w-]+"></a>`(\w+)` \| ([^|]*) \|', reference, re.MULTILINE)
    found = {reason: set(re.split(", | if no engine serves", conditions)) for reason, conditions in rows}
    assert found.keys() == set(reasons(kind))
    for reason, conditions in read_conditions(kind).items():
        assert {*conditions.split(", ")} <= found[reason], reason


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ("Invalid", "Accepted, Ready, Available if no engine serves, Stalled"),
        ("DoesNotFit", "Planned, Ready, Available if no engine serves, Stalled"),
        ("EngineReadyTimeout", "Ready, Available if no engine serves, Stalled"),
        ("Starting", "Ready, Available"),
        ("Serving", "Ready"),
        ("EnginesServe", "Available"),
    ],
)
def test_reference_says_when_available_has_the_reason(reason: str, shown: str) -> None:
    assert f"`{reason}` | {shown} |" in REFERENCE.read_text().partition("## Reasons of a SpecDecodeCapture")[0]


@pytest.mark.parametrize("kind", KINDS)
def test_every_condition_with_a_reason_is_explained(kind: str) -> None:
    named = {each for conditions in read_conditions(kind).values() for each in conditions.split(", ")}
    explained = {row[0].strip("`") for row in table(CONDITIONS[kind], "condition")}
    assert explained | SUMMED_UP == {each.removeprefix("at times ") for each in named - NO_CONDITION} | SUMMED_UP


def test_a_deployment_has_at_most_fifteen_conditions() -> None:
    named = {condition for conditions in read_conditions(DEPLOYMENT).values() for condition in conditions.split(", ")}
    types = {each.removeprefix("at times ") for each in named - NO_CONDITION} | SUMMED_UP
    assert len(types) <= 15, sorted(types)
