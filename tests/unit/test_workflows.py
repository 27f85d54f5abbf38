"""CI runs every part of the suite, and every long test runs somewhere."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.figures import Figure, Row, Run, write_run
from devcluster.builds.binaries import CONTROL_PLANES, GROUPS
from tests.parts import NAMES
from tests.repeat import PARTS

ROOT = Path(__file__).parents[2]
WORKFLOWS = ROOT / ".github/workflows"
FILES = sorted([*WORKFLOWS.glob("*.yml"), *ROOT.glob(".github/actions/*/action.yml"), ROOT / "action.yml"])
WRITES = {
    "catalogue.yml compare": {"issues"},
    "codeql.yml analyze": {"security-events"},
    "docs.yml publish": {"pages", "id-token"},
    "engine-new.yml newest": {"issues"},
    "flaky.yml report": {"issues"},
    "nightly.yml compare": {"contents"},
    "release.yml release": {"contents", "packages", "id-token", "attestations"},
    "scorecard.yml analyze": {"security-events", "id-token"},
}
"""What jobs may change, all others nothing."""


def test_ci_workflow_runs_every_part_once() -> None:
    named = re.findall(r"\./just parts (.*)", (WORKFLOWS / "ci.yml").read_text())
    assert sorted(" ".join(named).split()) == sorted(NAMES)


def test_every_long_test_runs_at_night_or_weekly() -> None:
    text = "".join((WORKFLOWS / name).read_text() for name in ("long.yml", "empty-machine.yml"))
    run = [ROOT / path for path in re.findall(r"tests/[\w/.]+", text)]
    long = [path for path in ROOT.glob("tests/*/**/test_*.py") if re.search(r"pytest\.mark\.long", path.read_text())]
    assert len(long) > 10
    assert [path.name for path in long if not {path, *path.parents} & {*run}] == []


def jobs(file: Path) -> dict[str, dict[str, Any]]:
    """The jobs of a workflow; an action counts as one."""
    document = yaml.safe_load(file.read_text())
    found: dict[str, dict[str, Any]] = document.get("jobs") or {"action": document["runs"]}
    return found


def steps(file: Path) -> list[dict[str, Any]]:
    return [step for job in jobs(file).values() for step in job.get("steps", ())]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_workflows_run_only_existing_recipes(file: Path) -> None:
    recipes = re.findall(r"^(?!_)([a-z-]+)(?: [^:=\n]*)?:(?!=)", (ROOT / "justfile").read_text(), re.MULTILINE)
    run = "\n".join(step.get("run", "") for step in steps(file))
    assert set(re.findall(r"\./just ([a-z-]+)", run)) <= {*recipes}


@pytest.mark.parametrize("file", [file for file in FILES if file.parent == WORKFLOWS], ids=lambda file: file.name)
def test_jobs_have_only_the_listed_write_permissions(file: Path) -> None:
    document = yaml.safe_load(file.read_text())
    written = {}
    for name, job in jobs(file).items():
        granted = job.get("permissions", document["permissions"])
        written[f"{file.name} {name}"] = {scope for scope, right in granted.items() if right == "write"}
    assert {name: scopes for name, scopes in written.items() if scopes} == {
        name: scopes for name, scopes in WRITES.items() if name.startswith(f"{file.name} ")
    }


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_steps_keep_no_token_and_run_no_untrusted_input(file: Path) -> None:
    for step in steps(file):
        if str(step.get("uses", "")).startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False
        # What GitHub puts into a script before the shell reads it; names and titles of others are among it.
        assert not re.search(r"\$\{\{\s*(github\.(event|head_ref|ref_name)|inputs)\b", step.get("run", "")), step


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_actions_are_pinned_to_commits(file: Path) -> None:
    used = [step["uses"] for step in steps(file) if not step.get("uses", "./").startswith("./")]
    assert [each for each in used if not re.search(r"@[0-9a-f]{40}$", each)] == []


def test_release_job_uses_no_cache_and_its_own_environment() -> None:
    release = jobs(WORKFLOWS / "release.yml")["release"]
    assert [step["uses"] for step in release["steps"] if "cache" in step.get("uses", "")] == []
    assert release["environment"] == "release", "somebody looks before anything is published"


def test_release_waits_for_long_tests_and_runs_the_recipes_in_order() -> None:
    tests, release = jobs(WORKFLOWS / "release.yml").values()
    assert (tests["uses"], release["needs"]) == ("./.github/workflows/long.yml", "tests")
    run = "\n".join(step.get("run", "") for step in release["steps"])
    order = [run.index(each) for each in ("./just release ", "./just publish --keyless", "gh release create")]
    assert order == sorted(order)
    assert all(f'"--{each}=' in run for each in ("registry", "base", "tag"))


def test_programs_built_only_at_night_are_cached() -> None:
    long = jobs(WORKFLOWS / "long.yml")
    paths = steps(ROOT / ".github/actions/caches/action.yml")[-1]["with"]["path"]
    kept = paths.split("${{ env.SPECDECODE_CACHE }}/bin/")[1:]
    rare = [each for each in (*GROUPS, *CONTROL_PLANES.values()) if each.rarely or each not in GROUPS]
    assert sorted(each.strip() for each in kept) == sorted(f"{each.name}-*" for each in rare)
    for name in ("clusters", "kubernetes"):  # a key is written once: each row of a matrix has one of its own
        own = [step["with"]["own"] for step in long[name]["steps"] if "own" in step.get("with", {})]
        assert "${{" in "".join(own)


def test_dependabot_covers_every_folder_with_actions() -> None:
    (actions,) = yaml.safe_load((ROOT / ".github/dependabot.yml").read_text())["updates"]
    folders = {f"/{file.parent.relative_to(ROOT)}" for file in FILES if file.parent not in (WORKFLOWS, ROOT)}
    assert {*actions["directories"]} == {"/", *folders}, "/ also covers the workflows"


FORMS = sorted(file for file in ROOT.glob(".github/ISSUE_TEMPLATE/*.yml") if file.name != "config.yml")


@pytest.mark.parametrize("file", FORMS, ids=lambda file: file.name)
def test_issue_form_has_all_required_keys(file: Path) -> None:
    form = yaml.safe_load(file.read_text())
    assert form["name"]
    assert form["description"]
    fields = [each for each in form["body"] if each["type"] != "markdown"]
    assert all(each["attributes"]["label"] for each in fields)
    names = [each["id"] for each in fields]
    assert len(names) == len({*names})


def test_every_part_with_tests_is_repeated_at_night() -> None:
    repeat, report = jobs(WORKFLOWS / "flaky.yml").values()
    assert sorted(repeat["strategy"]["matrix"]["part"]) == sorted(PARTS)
    assert repeat["strategy"]["fail-fast"] is False
    (run,) = (step["run"] for step in repeat["steps"] if "./just repeat" in step.get("run", ""))
    assert "--times 5" in run
    assert (report["needs"], report["if"]) == ("repeat", "always()"), "a part that fails is what it reports"


@pytest.mark.parametrize("failed", [[], ["unit", "engine"]])
def test_flaky_tests_of_all_parts_go_into_one_issue(tmp_path: Path, failed: list[str]) -> None:
    for part in ("engine", "fleet", "unit"):
        folder = tmp_path / f"pages/flaky-{part}"
        folder.mkdir(parents=True)
        (folder / "page.md").write_text(f"## {part}: 9 tests\n\n- flaky: test_it\n" if part in failed else "")
    script = jobs(WORKFLOWS / "flaky.yml")["report"]["steps"][-1]["run"]
    called, body = _tell(tmp_path, "", script)
    created = [call.partition(" --body-file")[0] for call in called if "list" not in call]
    assert created == (["issue create --title Flaky tests"] if failed else [])
    assert re.findall("^## (.*):", body, re.MULTILINE) == sorted(failed)
    assert body.endswith("Output of the tests: https://run\n" if failed else "")


def test_nightly_benchmarks_are_compared_and_kept_on_a_branch(tmp_path: Path) -> None:
    origin = tmp_path / "origin/project"
    subprocess.run(["git", "init", "--quiet", "--bare", origin], check=True)
    parts = {step.get("name"): step.get("run") for step in jobs(WORKFLOWS / "nightly.yml")["compare"]["steps"]}

    def night(name: str, api_calls: float) -> tuple[list[int], list[str]]:
        folder = tmp_path / name
        folder.mkdir()
        write_run(folder / "run.json", Run({"date": name}, [Row("scale", Figure("API calls", api_calls, "an object"))]))
        for program, does in (("gh", ""), ("just", f'shift; exec {sys.executable} -m bench.history "$@"')):
            (folder / program).write_text(f"#!/bin/sh\n{does}\n")
            (folder / program).chmod(0o755)
        environment = os.environ | {
            "PATH": f"{folder}:{os.environ['PATH']}",
            "GITHUB_SERVER_URL": f"file://{origin.parent}",
            "GITHUB_REPOSITORY": origin.name,
            "GITHUB_SHA": "0123abc",
            "GITHUB_STEP_SUMMARY": str(folder / "summary.md"),
        }
        codes = []
        for part, place in (("Get the history", "."), ("Compare", "."), ("Keep the history", "history")):
            shell = ["bash", "-e", "-o", "pipefail", "-c", parts[part]]
            codes.append(subprocess.run(shell, cwd=folder / place, env=environment, check=False).returncode)
        shown = ["git", "-C", str(origin), "show", "bench-history:bench.jsonl"]
        kept = subprocess.run(shown, check=True, capture_output=True, text=True).stdout.splitlines()
        return codes, [json.loads(line)["runs"][0]["machine"]["date"] for line in kept]

    names = ["first", "second", "third"]
    for number, name in enumerate(names, 1):
        assert night(name, 10.0) == ([0, 0, 0], names[:number])
    assert night("worse", 12.0) == ([0, 1, 0], [*names, "worse"])
    assert "| scale | API calls |" in (tmp_path / "worse/summary.md").read_text()


NEW_ENGINE: str = steps(WORKFLOWS / "engine-new.yml")[-1]["run"]
"""The script that reports a new release."""


@pytest.mark.parametrize(("issues", "expected"), [("", "issue create --title vLLM 0.34"), ("17", "issue edit 17")])
def test_new_vllm_version_is_reported_in_one_issue(tmp_path: Path, issues: str, expected: str) -> None:
    text = "# vLLM 0.34: what to look at, against 0.33\n\n- Tests: all\n" + "x" * 100_000
    (tmp_path / "page.md").write_text(text)
    called, body = _tell(tmp_path, issues, NEW_ENGINE)
    assert called[-1].startswith(expected)
    assert body.startswith("- Tests: all\n")
    assert body.endswith(": https://run\n")
    assert len(body) < 65_536


def _tell(folder: Path, issues: str, script: str) -> tuple[list[str], str]:
    """Return what a stand-in for gh was called with, one line per call, and the text of the issue."""
    gh = folder / "gh"
    gh.write_text(
        f'#!/bin/sh\necho "$@" >>{folder}/calls\n'
        f'[ "$2" = list ] && printf "%s" "{issues}"\n'
        f'for each; do [ ! -f "$each" ] || cp "$each" {folder}/body; done\n'
    )
    gh.chmod(0o755)
    (folder / ".github").symlink_to(ROOT / ".github")
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "RUN": "https://run"}
    subprocess.run(["sh", "-eu", "-c", script], cwd=folder, check=True, env=environment)
    calls, body = folder / "calls", folder / "body"
    return (calls.read_text().splitlines(), body.read_text()) if calls.exists() else ([], "")
