"""The pods of emulated engines: vLLM's image serves what the operator's image has written for the plan in force."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from specdecode_operator.api.base import Body
from specdecode_operator.cli.main import app
from specdecode_operator.deployment.desired_state import Launch, NotLaunched
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from tests.support.decisions import OPERATOR_IMAGE, desired_state
from tests.support.objects import H200, parent
from tests.support.replay_field_cases import replaying

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
    (container,) = pod["initContainers"]
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


def test_vllms_image_serves_what_the_operators_image_wrote() -> None:
    _, pod = launched(emulated())
    (before,), (engine,) = pod["initContainers"], pod["containers"]
    assert before["image"] == OPERATOR_IMAGE
    assert engine["image"] == IMAGE
    assert engine["command"] == ["python3", "/tmp/emulated/start.py", "--host=0.0.0.0", "--port=8000"]
    assert "nvidia.com/gpu" not in str(engine["resources"])
    mounts = [{mount["mountPath"] for mount in each["volumeMounts"]} for each in (before, engine)]
    assert all({"/recording", "/tmp"} <= each for each in mounts)
    for each in (before, engine):
        assert each["securityContext"]["runAsUser"] == 65532
        assert each["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_the_kubelet_puts_nothing_into_what_is_prepared() -> None:
    spec = emulated()
    spec["engine"] |= {"env": [{"name": "PROMPT", "value": "$(HOME) $HOME"}]}
    _, pod = launched(spec)
    command = pod["initContainers"][0]["command"]
    assert "--seed=3" in command
    # As the kubelet does it: $$ is a $, and $(NAME) a variable, of which there must be none.
    assert not any("$" in word.replace("$$", "") for word in command)
    planned = json.loads(command[3].replace("$$", "$"))
    assert planned["spec"]["engine"]["env"] == [{"name": "PROMPT", "value": "$(HOME) $HOME"}]


def test_variables_that_are_given_are_vllms() -> None:
    spec = emulated()
    spec["engine"] |= {"env": [{"name": "VLLM_LOGGING_LEVEL", "value": "DEBUG"}]}
    (engine,) = launched(spec)[1]["containers"]
    assert {"name": "VLLM_LOGGING_LEVEL", "value": "DEBUG"} in engine["env"]


def test_vllm_is_started_for_the_plan_in_force(tmp_path: Path) -> None:
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


def test_blocks_that_a_calibration_planned_are_kept(tmp_path: Path) -> None:
    _, pod = launched(emulated())
    command = pod["initContainers"][0]["command"]
    command[-1] = "--num-gpu-blocks=1000"
    start = (prepared(pod, tmp_path) / "start.py").read_text()
    assert '"--num-gpu-blocks-override", "1000"' in start


def test_what_cannot_be_emulated_is_refused_before_a_pod_finds_out() -> None:
    nameless = emulated()
    del nameless["engine"]["image"]
    assert "spec.engine.image: absent: no CPU image of vLLM 0.33 is known; name one" in refusal(nameless)
    unknown = emulated(target={"model": "org/unknown"})
    assert "spec.target.config: absent: mode Emulated needs the model's config.json" in refusal(unknown)
    stages = emulated(
        parallelism={"tensor": 2, "pipeline": 2}, speculation={"method": "ngram", "numSpeculativeTokens": 4}
    )
    assert "spec.parallelism.pipeline: 2: one stage of one copy is emulated: use 1" in refusal(stages)


def test_extra_arguments_are_not_said_to_be_unused() -> None:
    spec = emulated()
    spec["engine"] |= {"extraArgs": ["--enable-prefix-caching"]}
    launch, _ = launched(spec)
    assert "do without" not in launch.plan_status.explanation


def test_what_writes_the_engines_files_is_the_operators_own() -> None:
    (own,) = launched(emulated())[1]["initContainers"]
    for field in ("image", "command", "volumeMounts"):
        template = {"spec": {"initContainers": [{"name": own["name"], field: own[field]}]}}
        said = f"spec.podTemplate.spec.initContainers[0].{field}: set: {own['name']} is the operator's own"
        assert said in refusal(emulated(podTemplate=template))
