"""The GitHub Action and the job for GitLab, run as their runners do: what a merge request is told, and stopped by."""

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from specdecode_operator.version import __version__
from tests.support.gitops.action import ACTION, INSTALL, Job, example_inputs, run_action, shell
from tests.support.golden import EXAMPLES, ROOT
from tests.unit.cli.conftest import WriteObject, manifest
from tests.unit.handlers.test_admission_findings import POLICY, binding

GITLAB = yaml.safe_load((EXAMPLES / "ci/gitlab.yml").read_text())["specdecode"]
NODES = json.dumps(
    {
        "kind": "List",
        "items": [
            {
                "kind": "Node",
                "metadata": {"name": "a", "labels": {"nvidia.com/gpu.product": "NVIDIA-H200"}},
                "status": {"allocatable": {"nvidia.com/gpu": "8"}},
            }
        ],
    }
)
FITS = manifest("fits")
TOO_LARGE = manifest("too-large", parallelism={"tensor": 1})
INVALID = manifest("invalid", target={})


def gitlab(folder: Path, **given: str) -> Job:
    code = shell("\n".join(GITLAB["script"]), folder, **{**GITLAB["variables"], **given})
    return Job(code, (folder / "specdecode.md").read_text(), folder)


def test_pull_request_without_problems_passes(tmp_path: Path, write: WriteObject) -> None:
    write("pairs/a.yaml", FITS)
    write("nodes.yaml", NODES)
    job = run_action(tmp_path, files="pairs\n", nodes="nodes.yaml", strict="true", rendered="rendered.yaml")
    assert (job.code, job.refused) == (0, [])
    assert "### specdecode lint\n" in job.summary
    assert "| `fits` | `2 x H200, TP 2` | `Fits` |" in job.summary
    assert {"Deployment", "Service"} <= {
        each["kind"] for each in yaml.safe_load_all((tmp_path / "rendered.yaml").open())
    }


def test_exit_code_is_that_of_the_worst_object(tmp_path: Path, write: WriteObject) -> None:
    write("pairs/a.yaml", FITS, INVALID, TOO_LARGE)
    job = run_action(tmp_path, files="pairs")
    assert (job.code, job.refused) == (2, ["Invalid"])
    assert "**error** `pairs/a.yaml" in job.summary
    assert "**DoesNotFit** `too-large`" in job.summary


def test_unknown_model_passes_with_allow_unknown(tmp_path: Path, write: WriteObject) -> None:
    write("a.yaml", manifest("a", target={"model": "nobody/knows"}))
    assert run_action(tmp_path, **{"allow-unknown": "true"}).code == 0


def test_host_path_and_pod_template_fields_pass_if_allowed(tmp_path: Path, write: WriteObject) -> None:
    pod = {"spec": {"hostNetwork": True, "containers": [{"name": "engine", "securityContext": {"privileged": True}}]}}
    write("a.yaml", manifest("a", models={"volume": {"hostPath": {"path": "/mnt/models"}}}, podTemplate=pod))
    refused = run_action(tmp_path, files="a.yaml")
    assert refused.code == 2
    assert {"HostPathNotAllowed", "PodTemplateNotAllowed"} & set(refused.refused)
    (tmp_path / ".output").unlink()
    allowed = {"allow-host-path": "/opt/models\n/mnt/models\n", "allow-pod-template": "hostNetwork\nprivileged"}
    job = run_action(tmp_path, files="a.yaml", rendered="rendered.yaml", **allowed)
    assert (job.code, job.refused) == (0, [])


def test_admission_policy_violation_fails_the_pull_request(tmp_path: Path, write: WriteObject) -> None:
    write("pairs/a.yaml", manifest("a", parallelism={"tensor": 2}))
    write("policy.yaml", POLICY, binding())
    job = run_action(tmp_path, files="pairs", **{"admission-policy": "policy.yaml"})
    assert (job.code, job.refused) == (2, ["AdmissionPolicy"])
    assert "spec.parallelism.tensor: 2: use 1" in job.summary


def test_action_inputs_are_not_run_by_the_shell(tmp_path: Path, write: WriteObject) -> None:
    for step in ACTION["runs"]["steps"]:
        assert "${{" not in step["run"]
    name = "$(touch injected)`touch injected`; touch injected"
    write(f"{name}.yaml", TOO_LARGE)
    assert run_action(tmp_path, files=f"{name}.yaml").code == 4
    assert not (tmp_path / "injected").exists()


def test_object_text_is_no_workflow_command(
    tmp_path: Path, write: WriteObject, capfd: pytest.CaptureFixture[str]
) -> None:
    write("a.yaml", manifest("a", target={"model": "##[add-mask]fits"}))
    assert run_action(tmp_path, files="a.yaml").code != 0
    first, *lines, last = capfd.readouterr().out.splitlines()
    word, resume = first.rsplit("::", 1)
    assert word == "::stop-commands"
    assert len(resume) == 32
    assert last == f"::{resume}::"
    assert any("##[add-mask]" in each for each in lines)


def test_gitlab_job_passes_or_reports_what_does_not_fit(tmp_path: Path, write: WriteObject) -> None:
    write("pairs/a.yaml", FITS)
    write("nodes.yaml", NODES)
    job = gitlab(tmp_path)
    assert (job.code, job.refused) == (0, [])
    assert "| `fits` | `2 x H200, TP 2` | `Fits` |" in job.summary
    assert all((tmp_path / each).exists() for each in GITLAB["artifacts"]["paths"])
    write("pairs/b.yaml", TOO_LARGE)
    job = gitlab(tmp_path)
    assert job.code == 4
    assert "**DoesNotFit** `too-large`" in job.summary


def test_gitlab_example_names_the_image_of_this_version() -> None:
    assert GITLAB["image"]["name"].endswith(f"/specdecode-operator:{__version__}")


def test_examples_use_only_inputs_of_the_action() -> None:
    assert set(example_inputs()) <= set(ACTION["inputs"])


@pytest.mark.long
def test_action_installs_the_command_without_running_repository_code(tmp_path: Path) -> None:
    path = tmp_path / "path"
    for module in ("venv", "pip", "argparse"):
        (tmp_path / f"{module}.py").write_text("open('ran', 'w')")
    assert shell(INSTALL["run"], tmp_path, RUNNER_TEMP=str(tmp_path), GITHUB_PATH=str(path), SOURCE=str(ROOT)) == 0
    said = subprocess.check_output([Path(path.read_text().strip()) / "specdecode", "--version"], text=True)
    assert said.startswith("specdecode ")
    assert not (tmp_path / "ran").exists()
