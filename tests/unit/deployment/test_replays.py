"""Engines that replay or emulate: plan, pods, command line and status."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import ReplayMode
from specdecode_operator.api.deployment_status import SpecDecodeDeploymentStatus
from specdecode_operator.cli.main import app
from specdecode_operator.deployment.desired_state import Launch, NotLaunched
from specdecode_operator.deployment.observed.observation import Observation, observed_residual
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.deployment.status import compose_status
from tests.support.decisions import H100_NODE, H200_NODE, NOW, OPERATOR_IMAGE, decide, desired_state
from tests.support.objects import H200, pair_70b, parent
from tests.support.replay_field_cases import replaying
from tests.unit.deployment.test_status import SERVING, drafted, reading

FLEET = (H100_NODE, H200_NODE)
DRAFTING = {"llama-1": reading(speculation=drafted(100, 213), generation_tokens=313)}


def said(spec: Body, seen: Observation | None = None, nodes: Any = ()) -> dict[str, tuple[str, str, str]]:
    """Conditions by type, in a cluster without GPUs."""
    _, _, conditions = decide(parent(spec), seen, nodes)
    return {type_: (each.status, each.reason, each.message) for type_, each in conditions.items()}


def test_replay_of_a_pair_that_does_not_fit_is_not_launched() -> None:
    spec = replaying() | {"accelerator": {"products": ["NVIDIA-H100-80GB-HBM3"]}}
    outcome = desired_state(parse_deployment(parent(spec))).outcome
    assert isinstance(outcome, NotLaunched)
    assert said(spec)["Planned"][:2] == ("False", "DoesNotFit")


def test_replay_downloads_no_models() -> None:
    spec = replaying() | {"models": {"cache": {"persistentVolumeClaim": {"claimName": "cache"}}}}
    kinds = {child["kind"] for child in desired_state(parse_deployment(parent(spec))).children}
    assert kinds == {"ConfigMap", "Service", "Deployment"}


def test_unknown_operator_image_is_reported() -> None:
    desired = desired_state(parse_deployment(parent(replaying())), operator_image=None)
    assert isinstance(desired.outcome, NotLaunched)
    assert desired.outcome.readiness.reason == "OperatorImageUnknown"
    assert "SPECDECODE_OPERATOR_IMAGE" in desired.outcome.readiness.message
    assert isinstance(desired_state(parse_deployment(parent(pair_70b())), FLEET, operator_image=None).outcome, Launch)


def test_status_conditions_say_that_a_recording_is_replayed() -> None:
    conditions = said(replaying(), Observation(SERVING, [], DRAFTING))
    assert conditions["Ready"][:2] == ("True", "Serving")
    assert conditions["Available"][:2] == ("True", "EnginesServe")
    assert conditions["Ready"][2].endswith("replaying a recording (spec.engine.replay), no model runs")
    assert conditions["SpeculationActive"][:2] == ("True", "Replayed")
    assert "acceptance 71%" in conditions["SpeculationActive"][2]
    assert "with K=3, from the replayed recording" in conditions["SpeculationActive"][2]
    assert conditions["BudgetAccurate"][:2] == ("Unknown", "Replayed")


def test_replay_gives_no_kv_cache_residual() -> None:
    owner = parse_deployment(parent(replaying()))
    desired, seen = desired_state(owner), Observation(SERVING, [], DRAFTING)
    assert observed_residual(desired, seen) is None
    status = compose_status(owner, desired, seen, NOW)
    assert status.observed is not None
    assert status.observed.kv_cache_residual_bytes is None
    assert status.observed.num_speculative_tokens == 3


def test_recording_without_speculation_is_reported() -> None:
    conditions = said(replaying(), Observation(SERVING, [], {"llama-1": reading(speculation=None)}))
    assert conditions["SpeculationActive"][:2] == ("False", "NotDrafting")
    assert conditions["Ready"][:2] == ("True", "SpeculationInactive")


def test_acceptance_of_a_replay_is_not_kept_for_the_model() -> None:
    owner = parse_deployment(parent(replaying()))
    replayed = compose_status(owner, desired_state(owner), Observation(SERVING, [], DRAFTING), NOW)
    assert replayed.acceptance is not None
    later = parse_deployment(parent(pair_70b(), generation=2, status=_dumped(replayed)))
    assert compose_status(later, desired_state(later, FLEET), Observation(SERVING), NOW).acceptance is None


def test_replay_warns_of_extra_args_and_env() -> None:
    spec = replaying()
    spec["engine"] |= {"extraArgs": ["--enable-prefix-caching"], "env": [{"name": "A", "value": "b"}]}
    assert "engine.extraArgs and engine.env" in said(spec)["Planned"][2]


def _dumped(status: SpecDecodeDeploymentStatus) -> Body:
    return dict(status.model_dump(by_alias=True, mode="json", exclude_none=True))


ON_CLAIM = {"persistentVolumeClaim": {"claimName": "captures"}, "path": "team/nightly"}


def workload(spec: Body) -> Body:
    desired = desired_state(parse_deployment(parent(spec)))
    assert isinstance(desired.outcome, Launch), desired.conditions
    (found,) = (child for child in desired.children if child["kind"] in {"Deployment", "LeaderWorkerSet"})
    return found


def pod(spec: Body) -> Body:
    return dict(workload(spec)["spec"]["template"])


def engine(spec: Body) -> Body:
    (container,) = pod(spec)["spec"]["containers"]
    return dict(container)


def told(spec: Body) -> dict[str, Any]:
    """What `specdecode replay serve` takes the command of a pod for."""
    program, group, name, *arguments = engine(spec)["command"]
    assert program == "specdecode"
    command: Any = get_command(app)
    context = command.make_context(program, [], resilient_parsing=True)
    for each in (group, name):
        command = command.get_command(context, each)
    return dict(command.make_context(name, arguments).params)


def test_replay_command_parses_and_has_the_planned_kv_cache() -> None:
    spec = replaying()
    outcome = desired_state(parse_deployment(parent(spec))).outcome
    assert isinstance(outcome, Launch)
    given = told(spec)
    assert [str(path) for path in given["traces"]] == ["/recording/trace.jsonl"]
    assert given["kv_cache_tokens"] == outcome.plan.chosen.budget.kv_cache_tokens > 0
    assert (given["host"], given["port"], given["max_model_len"]) == ("0.0.0.0", 8000, 8192)
    assert given["served_model_name"] == ["Llama-3.1-70B-Instruct"]
    assert given["drain_timeout"] == 60


def test_every_replay_field_reaches_the_command_line() -> None:
    given = told(
        replaying(
            match="RequestId",
            unmatched="Refuse",
            acceptance=[{"fromSeconds": 0, "percent": 80}, {"fromSeconds": 60, "percent": 30}],
            timeScalePercent=50,
            loadFactor=10,
            seed=7,
            failures={"startSeconds": 30, "errorPercent": 5, "hangAfterSeconds": 60, "crashAfterSeconds": 90},
        )
    )
    assert (given["match"], given["unmatched"]) == ("request-id", "refuse")
    assert given["acceptance"] == "0:0.8,60:0.3"
    assert (given["time_scale"], given["load_factor"], given["seed"]) == (0.5, 10, 7)
    assert (given["slow_start"], given["fail_share"]) == (30, 0.05)
    assert (given["hang_after"], given["crash_after"]) == (60, 90)


def test_trace_claim_is_mounted_read_only() -> None:
    volume = pod(replaying(trace=ON_CLAIM))["spec"]["volumes"][0]
    assert volume["persistentVolumeClaim"] == {"claimName": "captures", "readOnly": True}
    assert told(replaying(trace=ON_CLAIM))["traces"][0].as_posix() == "/recording/team/nightly"


IMAGE = "localhost/vllm-cpu:1"
MODEL = {
    "schema": 1,
    "origin": {"model": "made-up", "gpu": H200, "tp": 2},
    "step_time": {"curve": [[1, 6.0]], "request_us": 20.0, "ranges": {"requests": [1, 64]}},
    "acceptance": {
        "num_speculative_tokens": 5,
        "outcomes": [[5, accepted] for accepted in range(6)],
        "classes": [{"share": 1, "outcomes": [0.2, 0.2, 0.18, 0.12, 0.1, 0.2]}],
    },
}
VLLM = """
import json, os, sys
print(json.dumps([sys.argv[1:], os.environ["PYTHONPATH"], "VLLM_CPU_KVCACHE_SPACE" in os.environ]))
"""


def emulated(**changes: Any) -> Body:
    spec = replaying(mode="Emulated", seed=3, trace={"configMap": {"name": "model"}, "path": "model.json"})
    spec["engine"]["image"] = IMAGE
    return spec | {"accelerator": {"products": [H200]}} | changes


def launched(spec: Body) -> tuple[Launch, Body]:
    """The plan in force, and the spec of its pods."""
    desired = desired_state(parse_deployment(parent(spec)))
    assert isinstance(desired.outcome, Launch), desired.conditions
    assert desired.workload is not None
    return desired.outcome, desired.workload["spec"]["template"]["spec"]


def refusal(spec: Body) -> str:
    outcome = desired_state(parse_deployment(parent(spec))).outcome
    assert isinstance(outcome, NotLaunched)
    return outcome.readiness.message


def prepared(pod: Body, folder: Path) -> Path:
    """Do what the init container does; return the folder that it writes."""
    container, _ = pod["initContainers"]
    shell, _, script, planned, model, *flags = [word.replace("$$", "$") for word in container["command"]]
    assert shell == "/bin/sh"
    assert script.startswith('printf %s "$0" | exec specdecode ')
    command = script.partition("exec specdecode ")[2].replace('"$@"', "").split()
    assert model == "/recording/model.json"
    (folder / "model.json").write_text(json.dumps(MODEL))
    out = folder / "out"
    kept = [flag for flag in flags if not flag.startswith("--out")]
    result = CliRunner().invoke(app, [*command, str(folder / "model.json"), f"--out={out}", *kept], input=planned)
    assert result.exit_code == 0, result.output
    return out


def test_emulated_engine_serves_files_of_the_operator_init_container() -> None:
    _, pod = launched(emulated())
    (before, recorder), (engine,) = pod["initContainers"], pod["containers"]
    assert before["image"] == OPERATOR_IMAGE
    assert engine["image"] == IMAGE
    assert engine["command"][4:] == ["python3", "/tmp/emulated/start.py", "--host=0.0.0.0", "--port=8000"]
    assert (recorder["name"], recorder["image"]) == ("recorder", IMAGE)
    assert "nvidia.com/gpu" not in str(engine["resources"])
    mounts = [{mount["mountPath"] for mount in each["volumeMounts"]} for each in (before, engine)]
    assert all({"/recording", "/tmp"} <= each for each in mounts)
    for each in (before, engine):
        assert each["securityContext"]["runAsUser"] == 65532
        assert each["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_kubelet_expands_no_variables_in_the_emulation_command() -> None:
    spec = emulated()
    spec["engine"] |= {"env": [{"name": "PROMPT", "value": "$(HOME) $HOME"}]}
    _, pod = launched(spec)
    command = pod["initContainers"][0]["command"]
    assert "--seed=3" in command
    # As the kubelet does it: $$ is a $, and $(NAME) a variable, of which there must be none.
    assert not any("$" in word.replace("$$", "") for word in command)
    planned = json.loads(command[3].replace("$$", "$"))
    assert planned["spec"]["engine"]["env"] == [{"name": "PROMPT", "value": "$(HOME) $HOME"}]


def test_emulated_vllm_starts_with_the_planned_arguments(tmp_path: Path) -> None:
    spec = emulated(parallelism={})
    spec["target"]["revision"] = "$(HOME)"
    launch, pod = launched(spec)
    out = prepared(pod, tmp_path)
    package = tmp_path / "packages/vllm/entrypoints/cli"
    package.mkdir(parents=True)
    (package / "main.py").write_text(VLLM)
    variables = {**os.environ, "PYTHONPATH": str(tmp_path / "packages"), "VLLM_CPU_KVCACHE_SPACE": "4"}
    line = [sys.executable, out / "start.py", "--port=8000"]
    said = subprocess.run(line, env=variables, capture_output=True, text=True, check=True).stdout
    arguments, path, sizes_its_cache = json.loads(said)
    chosen = launch.plan.chosen
    assert arguments[:2] == ["serve", str(out / "engine/target")]
    assert arguments[-1] == "--port=8000"
    told = dict(itertools.pairwise(arguments))
    assert told["--num-gpu-blocks-override"] == str(chosen.budget.num_blocks)
    assert told["--tensor-parallel-size"] == str(chosen.tensor)
    assert path.split(os.pathsep) == [str(out / "engine/plugins"), str(tmp_path / "packages")]
    assert not sizes_its_cache


@pytest.mark.parametrize("mode", ReplayMode)
def test_recording_without_a_source_is_refused(mode: ReplayMode) -> None:
    spec = replaying(mode=mode, trace={"path": "trace.jsonl"})
    spec["engine"]["image"] = "localhost/engine:1"
    assert refusal(spec) == (
        "spec.engine.replay.trace.configMap: is missing: a recording has one source: set one of configMap and"
        " persistentVolumeClaim"
    )


def test_specs_that_cannot_be_emulated_are_refused() -> None:
    nameless = emulated()
    del nameless["engine"]["image"]
    assert "spec.engine.image: absent: " in refusal(nameless)
    unknown = emulated(target={"model": "org/unknown"})
    assert "spec.target.config: absent: " in refusal(unknown)
    stages = emulated(
        parallelism={"tensor": 2, "pipeline": 2}, speculation={"method": "ngram", "numSpeculativeTokens": 4}
    )
    assert "spec.parallelism.pipeline: 2: " in refusal(stages)


def test_pod_template_cannot_change_the_emulation_init_container() -> None:
    own, _ = launched(emulated())[1]["initContainers"]
    for field in ("image", "command", "volumeMounts"):
        template = {"spec": {"initContainers": [{"name": own["name"], field: own[field]}]}}
        said = f"spec.podTemplate.spec.initContainers[0].{field}: set: {own['name']} is the operator's init container"
        assert said in refusal(emulated(podTemplate=template))
