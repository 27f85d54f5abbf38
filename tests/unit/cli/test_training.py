"""`specdecode training`: what is shown of a training, and the patch that serves its head."""

import json
from typing import Any

import pytest
import yaml

from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.training.job.trainer_log import progress_line
from tests.support.better_trainings import HEAD_CONFIG, SHA256, asking, better_training, condition, head
from tests.support.objects import Body
from tests.unit.cli.capture.conftest import Cluster
from tests.unit.cli.conftest import Specdecode

VERDICT = {
    "capture": "chat-judge",
    "ratio": "1.500",
    "low": "1.300",
    "high": "1.700",
    "arms": [
        {"name": "current", "goodput": "100.0", "acceptancePercent": 20},
        {"name": "trained", "goodput": "150.0", "acceptancePercent": 80},
        {"name": "none", "goodput": "50.0"},
    ],
}


def llama(spec: Body | None = None, **status: Any) -> Body:
    return {"metadata": {"namespace": "team", "name": "llama"}, "spec": spec or asking(), "status": status}


class Team:
    """A namespace with a training and its deployment."""

    def __init__(self, cluster: Cluster, specdecode: Specdecode) -> None:
        self.objects = {"specdecodetraining/chat": better_training(), "specdecodedeployment/llama": llama()}
        self.log = ""
        self._cluster, self._specdecode = cluster, specdecode

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """Run a command; return its exit code, output and errors."""
        self._cluster.holds(**self.objects, streams={"log": self.log})
        answer = self._specdecode("training", *arguments)
        return answer.exit_code, answer.stdout, answer.stderr

    def calls(self, verb: str) -> list[list[str]]:
        return self._cluster.calls(verb)


@pytest.fixture
def team(cluster: Cluster, specdecode: Specdecode) -> Team:
    return Team(cluster, specdecode)


def merged(before: Any, patch: Any) -> Any:
    """What a JSON merge patch makes of an object (RFC 7386)."""
    if not isinstance(patch, dict):
        return patch
    kept = dict(before) if isinstance(before, dict) else {}
    for name, value in patch.items():
        if value is None:
            kept.pop(name, None)
        else:
            kept[name] = merged(kept.get(name), value)
    return kept


def patches(team: Team) -> list[tuple[str, str, Body]]:
    calls = team.calls("patch")
    found = []
    for call in calls:
        (patch,) = (json.loads(each.removeprefix("--patch=")) for each in call if each.startswith("--patch="))
        kind, name = [each for each in call if not each.startswith("--")][1:3]
        found.append((kind.partition(".")[0], name, patch))
    return found


class TestList:
    def test_one_line_per_training(self, team: Team) -> None:
        team.objects["specdecodetraining/chat"]["status"]["verdict"] = VERDICT
        code, out, _ = team.run("list", "-A")
        assert code == 0
        heading, row = (line.split() for line in out.splitlines())
        assert heading[:3] == ["NAMESPACE", "NAME", "PHASE"]
        told = dict(zip(heading, row, strict=True))
        assert (told["NAME"], told["PHASE"], told["BETTER"], told["RATIO"]) == ("chat", "Complete", "Better", "1.500")

    def test_no_trainings(self, team: Team) -> None:
        del team.objects["specdecodetraining/chat"]
        assert team.run("list")[:2] == (0, "no SpecDecodeTrainings here\n")


class TestStatus:
    def test_screen_has_rows_head_verdict_and_what_is_served(self, team: Team) -> None:
        told = {"training": "chat", "reason": "Promoted", "message": "serves it"}
        team.objects["specdecodedeployment/llama"] = llama(trainedDraft=told)
        team.objects["specdecodetraining/chat"]["status"] |= {
            "verdict": VERDICT,
            "head": head(validationLoss="0.119", accuracyPercent=[98, 95, 92]),
        }
        code, out, _ = team.run("status", "chat")
        assert code == 0
        for words in ("900 to train on", "100 held out", SHA256, "0.119", "98 %, 95 %", "1.300 to 1.700", "this head"):
            assert words in out

    def test_missing_interval_is_omitted(self, team: Team) -> None:
        steps = {"arm": "3.0", "baseline": "1.5", "ratio": "2.000", "requests": 4, "stepCost": "Equal"}
        verdict = {name: each for name, each in VERDICT.items() if name not in {"low", "high"}}
        team.objects["specdecodetraining/chat"]["status"]["verdict"] = {**verdict, "tokensPerStep": steps}
        _, out, _ = team.run("status", "chat")
        assert "1.500x that of current, measured by capture chat-judge" in out
        assert "3.0 with trained, 1.5 with current, 2.000x" in out
        assert "95 %:" not in out

    def test_messages_of_conditions_are_whole(self, team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("COLUMNS", raising=False)
        message = " ".join(f"word{number}" for number in range(100))
        ready = {**condition("Ready", "False"), "message": message}
        team.objects["specdecodetraining/chat"]["status"]["conditions"] = [ready]
        assert message in team.run("status", "chat")[1]

    def test_other_head_is_named_as_served(self, team: Team) -> None:
        team.objects["specdecodedeployment/llama"] = llama(trainedDraft={"training": "newer"})
        data = json.loads(team.run("status", "chat", "-o", "json")[1])["trainings"][0]
        assert data["trained_draft"]["training"] == "newer"
        assert "newer" in team.run("status", "chat")[1]

    @pytest.mark.parametrize(
        ("log", "progress"),
        [
            (
                (
                    f"{progress_line({'step': 1, 'epochs': 3})}\nnoise\n"
                    f"{progress_line({'step': 4, 'epochsDone': 1, 'epochs': 3, 'loss': 0.5, 'etaSeconds': 40})}\n"
                ),
                {"step": 4, "epochs_done": 1, "epochs": 3, "loss": 0.5, "validation_loss": None, "eta_seconds": 40.0},
            ),
            ('{"progress": {"step": "4; rm -rf /"}}\n', None),
            ('{"progress": [4]}\n[4]\n{}\n', None),
            ("", None),
        ],
    )
    def test_progress_is_the_newest_line_of_the_trainer(self, team: Team, log: str, progress: Body | None) -> None:
        team.objects["specdecodetraining/chat"]["status"] |= {"phase": "Training", "job": "chat-training"}
        team.log = log
        data = json.loads(team.run("status", "chat", "-o", "json")[1])["trainings"][0]
        assert data["progress"] == progress
        assert ("step 4, 1 of 3 epochs done" in team.run("status", "chat")[1]) is (progress is not None)

    def test_log_is_read_only_while_the_trainer_runs(self, team: Team) -> None:
        team.objects["specdecodetraining/chat"]["status"]["job"] = "chat-training"
        team.run("status", "chat")
        assert team.calls("logs") == []

    def test_missing_training_names_the_existing_ones(self, team: Team) -> None:
        code, _, error = team.run("status", "chet")
        assert code == 2
        assert "did you mean chat?" in error


class TestPromote:
    def test_patch_replaces_method_k_and_draft(self, team: Team) -> None:
        spec = asking(parallelism={"tensor": 1, "draftTensor": 1})
        spec["speculation"] |= {"useHeterogeneousVocab": True, "rejectionSampling": "block"}
        team.objects["specdecodedeployment/llama"] = llama(spec)
        code, out, _ = team.run("promote", "chat")
        assert code == 0
        patch = yaml.safe_load(out)
        assert (patch["kind"], patch["metadata"]) == (
            "SpecDecodeDeployment",
            {"name": "llama", "namespace": "team"},
        )
        found = merged(spec, patch["spec"])
        assert found["speculation"] == {
            "method": "eagle3",
            "numSpeculativeTokens": 3,
            "rejectionSampling": "block",
            "trainedDrafts": True,
            "draft": {
                "model": "team/chat/head",
                "persistentVolumeClaim": {"claimName": "chat-training"},
                "config": HEAD_CONFIG,
            },
        }
        assert found["parallelism"] == {"tensor": 1}
        assert {name: each for name, each in found.items() if name not in {"speculation", "parallelism"}} == {
            name: each for name, each in spec.items() if name not in {"speculation", "parallelism"}
        }
        SpecDecodeDeploymentSpec.parse(found)
        assert patches(team) == []

    def test_json_equals_yaml(self, team: Team) -> None:
        as_yaml = team.run("promote", "chat")[1]
        assert json.loads(team.run("promote", "chat", "-o", "json")[1]) == yaml.safe_load(as_yaml)

    def test_apply_patches_the_deployment(self, team: Team) -> None:
        patch = json.loads(team.run("promote", "chat", "-o", "json")[1])
        code, _, _ = team.run("promote", "chat", "--apply")
        assert (code, patches(team)) == (0, [("specdecodedeployments", "llama", patch)])

    @pytest.mark.parametrize("conditions", [[], [condition("Better", "False")], [condition("Better", "Unknown")]])
    def test_head_that_is_not_better_needs_force(self, team: Team, conditions: list[Body]) -> None:
        team.objects["specdecodetraining/chat"]["status"]["conditions"] = conditions
        code, out, error = team.run("promote", "chat", "--apply")
        assert (code, out, patches(team)) == (1, "", [])
        assert "--force" in error
        assert team.run("promote", "chat", "--force")[0] == 0

    @pytest.mark.parametrize(
        ("status", "words"),
        [
            ({"head": None}, "no head"),
            ({"head": head(path="../../etc")}, "status.head.path"),
            ({"claim": "secrets"}, "status.claim"),
        ],
    )
    def test_training_without_a_valid_head_is_refused(self, team: Team, status: Body, words: str) -> None:
        team.objects["specdecodetraining/chat"]["status"] |= status
        code, out, error = team.run("promote", "chat", "--force", "--apply")
        assert (code, out, patches(team)) == (2, "", [])
        assert words in error

    def test_missing_deployment(self, team: Team) -> None:
        del team.objects["specdecodedeployment/llama"]
        assert team.run("promote", "chat")[0] == 2


class TestRollback:
    def test_training_becomes_manual(self, team: Team) -> None:
        code, _, _ = team.run("rollback", "chat")
        assert (code, patches(team)) == (0, [("specdecodetrainings", "chat", {"spec": {"promote": "Manual"}})])

    def test_draft_on_another_claim_is_no_error(self, team: Team) -> None:
        draft = {"model": "heads/other", "persistentVolumeClaim": {"claimName": "others"}}
        team.objects["specdecodedeployment/llama"] = llama(asking(speculation={"method": "eagle3", "draft": draft}))
        assert team.run("rollback", "chat")[0] == 0

    def test_head_in_the_deployments_own_spec_is_told(self, team: Team) -> None:
        patch = json.loads(team.run("promote", "chat", "-o", "json")[1])
        team.objects["specdecodedeployment/llama"] = llama(merged(asking(), patch["spec"]))
        code, _, error = team.run("rollback", "chat")
        assert code == 1
        assert "spec.speculation.draft" in error
        assert "remove persistentVolumeClaim and config" in error
