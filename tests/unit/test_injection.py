"""What somebody writes into a field of text is text in what the operator makes of it, and nothing else.

An object with hostile text is held against the same object with a plain word: both must have the same structure, with
as many arguments, variables, containers and volumes, and a process must get the very text that was written.
"""

import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from specdecode_operator.api.capture import SpecDecodeCaptureSpec
from specdecode_operator.api.crd_validation import object_problems
from specdecode_operator.capture.decision import decide
from specdecode_operator.capture.observation import read_capture
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.problems import InvalidSpecError
from tests.support.capture_field_cases import CAPTURE_FIELDS
from tests.support.captures import capture, golden, observed_deployment, surroundings
from tests.support.decisions import NOW, desired_state
from tests.support.field_cases import DEPLOYMENT_FIELDS, NODES, FieldCase, at
from tests.support.objects import TINY_CONFIG, Body, parent, tiny_cpu
from tests.support.replay_field_cases import REPLAY_FIELDS
from tests.support.simulated_load import DATASETS
from tests.unit.test_every_field import leaves

CRDS = Path(__file__).parents[2] / "crds"
HOSTILE = (
    "--trust-remote-code",
    "a/../../etc/passwd",
    "/etc/passwd",
    "$(HF_TOKEN)$$(VLLM_API_KEY)",
    'x; `id` \' || true; \' ", "hostNetwork": true, {{ 7 * 7 }}{% for %s !!python/object/apply:os.system [id] &a *a',
    "x\nhostNetwork: true\r\nX-Injected: yes\x00\u2028\u202e\ufeff\U0001f600",
)
PLAIN = "plain/word"
HUB = {"hubTokenSecret": {"name": "hub", "key": "token"}}
CACHE = {**HUB, "cache": {"persistentVolumeClaim": {"claimName": "hub"}}}
DRAFT = {"model": "pair/draft", "config": {**TINY_CONFIG, "num_hidden_layers": 1}}
UNREAD = tiny_cpu(target={"model": "pair/target"})

Make = Callable[[Any], list[Body]]


def _texts(kind: str) -> Iterator[str]:
    """Fields of text of a kind."""
    for file in CRDS.glob("*.yaml"):
        crd = yaml.safe_load(file.read_text())
        if crd["kind"] == "CustomResourceDefinition" and crd["spec"]["names"]["kind"] == kind:
            schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
            yield from (field for field in leaves(schema) if _is_text(schema, field))


def _is_text(schema: Body, path: str) -> bool:
    for step in re.findall(r"\w+|\[\]", path):
        schema = schema["items"] if step == "[]" else schema["properties"][step]
    return schema.get("type") == "string" and "enum" not in schema


def deployment_objects(spec: Body, case: FieldCase) -> list[Body]:
    """What is made for a spec: workload, Service, plan, Jobs that read and download."""
    owner = parse_deployment(parent(spec))
    if isinstance(owner.spec, InvalidSpecError) or object_problems(owner.spec):
        return []  # the API server lets no such object be
    return desired_state(owner, case.nodes).children


def capture_objects(spec: Body, case: FieldCase) -> list[Body]:
    """The Job of a capture; nothing where there is none."""
    try:
        if object_problems(SpecDecodeCaptureSpec.model_validate(spec)):
            return []
        subject = read_capture(capture(spec))
        deployment = observed_deployment(case.deployment, nodes=case.nodes, capture=spec, engines_wanted=1)
    except ValidationError:
        return []
    seen = surroundings(deployment=deployment, dataset={"data": DATASETS}, golden=golden(of=case.on))
    job = decide(subject, seen, NOW).writes.job
    return [job] if job else []


def _cases() -> Iterator[tuple[str, Make]]:
    kinds: tuple[tuple[str, Mapping[str, FieldCase], Callable[[Body, FieldCase], list[Body]]], ...] = (
        ("SpecDecodeDeployment", {**DEPLOYMENT_FIELDS, **REPLAY_FIELDS}, deployment_objects),
        ("SpecDecodeCapture", CAPTURE_FIELDS, capture_objects),
    )
    for kind, cases, make in kinds:
        for field in _texts(kind):
            # Of podTemplate other tests tell: there one may write what one likes within the policy.
            if field in cases and not cases[field].refusal and not field.startswith("podTemplate"):
                yield f"{kind} {field}", _made(cases[field], field, make)
    ways = {
        "on a volume": tiny_cpu(),
        "read first": UNREAD,
        "read from the hub": {**UNREAD, "models": HUB},
        "downloaded by each pod": tiny_cpu(models=HUB),
        "downloaded by a Job": tiny_cpu(models=CACHE),
    }
    for way, spec in ways.items():
        for field in ("target.model", "target.revision", "speculation.draft.model", "speculation.draft.revision"):
            yield f"{field}, {way}", _made(at("", on=spec, nodes=NODES), field, deployment_objects)


def _made(case: FieldCase, field: str, make: Callable[[Body, FieldCase], list[Body]]) -> Make:
    return lambda text: make(FieldCase(text, case.on, case.nodes, deployment=case.deployment).changed(field), case)


CASES = dict(_cases())
PLAIN_OBJECTS: dict[str, list[Body]] = {}


def plain_objects(case: str) -> list[Body]:
    """What is made with a word of which nobody need fear anything: such as the field takes it."""
    if case not in PLAIN_OBJECTS:
        tried = (CASES[case](word) for word in (PLAIN, "plain", "1", "1Gi", "--seed=1"))
        PLAIN_OBJECTS[case] = max(tried, key=len)
    return PLAIN_OBJECTS[case]


def differences(plain: Any, hostile: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Texts that differ, of the hostile object; the structures must not."""
    assert type(plain) is type(hostile), path
    if isinstance(plain, dict):
        assert plain.keys() == hostile.keys(), path
        for name in plain:
            yield from differences(plain[name], hostile[name], f"{path}.{name}")
    elif isinstance(plain, list):
        assert len(plain) == len(hostile), f"{path}: {hostile}"
        for number, (one, other) in enumerate(zip(plain, hostile, strict=True)):
            yield from differences(one, other, f"{path}[{number}]")
    elif plain != hostile:
        yield path, hostile


def as_a_process_gets_it(argument: str) -> str:
    """What the kubelet makes of an argument or a variable: it puts in what $(NAME) stands for, and halves $$."""
    return re.sub(r"\$\$|\$\([^)]*\)", lambda found: "$" if found[0] == "$$" else "PUT IN", argument)


def containers(objects: list[Body]) -> Iterator[Body]:
    for each in objects:
        spec = each.get("spec", {})
        group = spec.get("leaderWorkerTemplate") or {}
        for template in (spec.get("template"), group.get("leaderTemplate"), group.get("workerTemplate")):
            pod = (template or {}).get("spec") or {}
            yield from [*(pod.get("initContainers") or []), *(pod.get("containers") or [])]


def check(case: str, text: str) -> None:
    """Hold what is made of a text against what is made of a plain word."""
    plain, hostile = plain_objects(case), CASES[case](text)
    if {each["kind"] for each in hostile} < {each["kind"] for each in plain}:
        return  # refused: nothing runs for it
    for path, value in differences(plain, hostile):
        if ".command[" in path or ".args[" in path:
            flag, _, rest = value.rpartition("=") if value.startswith("--") else ("", "", value)
            assert flag or not value.startswith("-") or "extraArgs" in case, f"{path}: a flag of somebody's: {value}"
            assert "PUT IN" not in as_a_process_gets_it(value), f"{path}: {value}"
            if rest.startswith("/models/"):
                assert f"{posixpath.normpath(rest)}/".startswith("/models/"), f"{path}: leaves its volume: {value}"
    for container in containers(hostile):
        command = [*(container.get("command") or []), *(container.get("args") or [])]
        for flag, script in pairwise(command):
            assert flag != "-c" or len(text) < len(min(HOSTILE[1:], key=len)) or text not in script, text


@pytest.mark.parametrize("case", CASES)
def test_hostile_text_does_not_change_the_objects(case: str) -> None:
    for text in HOSTILE:
        check(case, text)


@settings(max_examples=60)
@given(st.sampled_from(sorted(CASES)), st.lists(st.sampled_from([*HOSTILE, "a", "/", "B-9"]), min_size=2, max_size=4))
def test_combined_hostile_text_does_not_change_the_objects(case: str, pieces: list[str]) -> None:
    check(case, "".join(pieces))
