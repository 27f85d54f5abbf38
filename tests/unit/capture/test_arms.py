"""Arms of a capture."""

import dataclasses
import json
from typing import Any

import pytest

from specdecode_operator.api.capture import Arm
from specdecode_operator.capture.arms import arm_body
from specdecode_operator.capture.load.run_settings import RunSettings, read_settings
from specdecode_operator.capture.status import Decision
from specdecode_operator.deployment.conditions import full_message
from specdecode_operator.deployment.desired_state import Launch
from tests.support.capture_decisions import after, decided, words
from tests.support.captures import (
    SHORT,
    capture,
    capture_pod,
    capture_spec,
    ended,
    job,
    observed_deployment,
    surroundings,
)
from tests.support.field_cases import LLAMA_70B, NODES
from tests.support.objects import TINY_CONFIG, Body, pair_70b, parent, tiny_cpu

LLAMA_8B = LLAMA_70B.replace("70B", "8B")
PLAIN = {"name": "plain", "speculation": {"method": "none"}}
DEPLOYED = {"name": "deployed"}
NGRAM = {"name": "ngram", "speculation": {"method": "ngram", "numSpeculativeTokens": 4}}


def drafted(**draft: Any) -> Body:
    speculation = {"method": "draft_model", "numSpeculativeTokens": 3, "draft": {"model": LLAMA_8B, **draft}}
    return {"name": "drafted", "speculation": speculation}


def outcome(*arms: Body, of: Body | None = None, **spec: Any) -> tuple[Decision, dict[str, Any]]:
    """What becomes of a capture with these arms, and its condition `Accepted` with the full message."""
    asked = capture_spec(arms=list(arms), **spec)
    deployment = observed_deployment(of or pair_70b(), nodes=NODES, capture=asked)
    decision, status = decided(capture(asked), surroundings(deployment=deployment))
    accepted = next(each for each in status.conditions if each.type == "Accepted")
    return decision, accepted.model_dump(mode="json") | {"message": full_message(accepted, status.conditions)}


def rendered(*arms: Body, of: Body | None = None, **spec: Any) -> Body:
    decision, accepted = outcome(*arms, of=of, **spec)
    assert decision.writes.job is not None, accepted["message"]
    return decision.writes.job


def containers(job_: Body) -> dict[str, Body]:
    pod = job_["spec"]["template"]["spec"]
    return {each["name"]: each for each in [*pod["initContainers"], *pod["containers"]]}


def settings(job_: Body) -> RunSettings:
    environment = {each["name"]: each.get("value") for each in containers(job_)["load"]["env"]}
    return read_settings(environment["SPECDECODE_CAPTURE"].replace("$$", "$"))


def speculative_config(command: list[str]) -> Body | None:
    if "--speculative-config" not in command:
        return None
    found: Body = json.loads(command[command.index("--speculative-config") + 1])
    return found


class TestPlanning:
    @pytest.mark.parametrize(
        ("arm", "reason", "named", "fix"),
        [
            (
                drafted(model=LLAMA_70B),
                "ArmDoesNotFit",
                "DoesNotFit",
                "smallest change that fits: speculation.draft.quantization: FP8",
            ),
            (
                {"name": "drafted", "speculation": {**drafted()["speculation"], "method": "eagle3"}},
                "ArmRefused",
                f"spec.arms[1].speculation.draft.model: {LLAMA_8B}",
                "use method: draft_model",
            ),
            (
                {"name": "drafted", "targetQuantization": "INT4"},
                "ArmRefused",
                "spec.arms[1].targetQuantization: INT4",
                "use FP8",
            ),
            (
                {"name": "drafted", "speculation": {"method": "ngram", "numSpeculativeTokens": 4, "ngram": {}}},
                "",
                "",
                "",
            ),
        ],
        ids=["too large", "no head", "no such checkpoint", "good"],
    )
    def test_arm_that_cannot_start_is_not_accepted(self, arm: Body, reason: str, named: str, fix: str) -> None:
        decision, accepted = outcome(PLAIN, arm)
        if not named:
            assert accepted["status"] == "True"
            return
        assert (accepted["status"], accepted["reason"]) == ("False", reason)
        assert accepted["message"].startswith("spec.arms[1] (drafted): ")
        assert named in accepted["message"]
        assert fix in accepted["message"]
        assert decision.writes.job is None
        assert decision.writes.claim is None, "nothing is half-created"

    def test_deployment_rules_apply_to_arms(self) -> None:
        ranges = [{"from": 1, "to": 1000, "numSpeculativeTokens": 2}]
        arm = {**NGRAM, "speculation": {**NGRAM["speculation"], "numSpeculativeTokensByBatchSize": ranges}}
        _, accepted = outcome(PLAIN, arm)
        assert "spec.arms[1].speculation.numSpeculativeTokensByBatchSize" in accepted["message"]
        assert "a range goes beyond serving.maxNumSeqs" in accepted["message"]

    def test_arm_with_unknown_draft_model_waits_for_facts(self) -> None:
        decision, accepted = outcome(PLAIN, drafted(model="org/unknown"))
        assert (accepted["status"], accepted["reason"]) == ("Unknown", "ArmWaits")
        assert (
            "spec.arms[1] (drafted): speculation.draft.model: org/unknown: no facts about it yet" in accepted["message"]
        )
        assert "config.json" in accepted["message"]
        assert decision.writes.job is None

    def test_arms_with_two_revisions_of_a_model_are_refused(self) -> None:
        _, accepted = outcome(drafted(), {**drafted(revision="v2"), "name": "newer"})
        assert accepted["status"] == "False"
        assert f"spec.arms[1] (newer): needs {LLAMA_8B} at revision v2, but arm drafted" in accepted["message"]

    def test_arm_without_draft_ignores_draft_tensor_parallelism(self) -> None:
        split = pair_70b(parallelism={"tensor": 2, "draftTensor": 1})
        _, accepted = outcome(PLAIN, DEPLOYED, of=split)
        assert accepted["status"] == "True", accepted["message"]

    def test_arms_share_quantization_and_gpus_of_the_plan(self) -> None:
        auto = pair_70b(target={"model": LLAMA_70B, "quantization": "Auto"})
        told = settings(rendered(PLAIN, DEPLOYED, of=auto))
        plans = [arm.context["plan"] for arm in told.arms]
        assert len({(plan["targetQuantization"], plan["product"], plan["tensor"]) for plan in plans}) == 1

    def test_arm_uses_plan_in_force(self) -> None:
        free = pair_70b(target={"model": LLAMA_70B, "quantization": "Auto"})
        free["speculation"]["draft"]["quantization"] = "Auto"
        del free["parallelism"]
        desired = observed_deployment(free, nodes=NODES).desired.outcome
        assert isinstance(desired, Launch)
        plan = desired.plan_status.model_copy(update={"target_quantization": "BF16", "draft_quantization": "FP8"})
        in_force = dataclasses.replace(desired, plan_status=plan)
        spec = arm_body(Arm(name="deployed"), parent(free), in_force)["spec"]
        assert spec["target"]["quantization"] == "BF16"
        assert spec["speculation"]["draft"]["quantization"] == "FP8"
        assert (spec["accelerator"]["products"], spec["parallelism"]["tensor"]) == ([plan.product], plan.tensor)

    def test_equal_arms_are_noted_as_a_a_test_in_every_state(self) -> None:
        asked = capture_spec(arms=[PLAIN, {"name": "a"}, {"name": "b"}])
        subject, seen = capture(asked), surroundings(deployment=observed_deployment(capture=asked))
        for state in (seen, surroundings(job=job()), surroundings(job=job("Failed"))):
            _, status = decided(subject, state)
            accepted = next(each for each in status.conditions if each.type == "Accepted")
            assert "arms a and b start the same engine: an A/A test" in accepted.message
            subject = after(subject, state)

    def test_lossy_arm_is_noted_in_accepted_condition(self) -> None:
        lossy = {"rejectionSampling": "fly", "lossy": True}
        arm = {**drafted(), "speculation": {**drafted()["speculation"], **lossy}}
        newest = pair_70b(engine={"version": "0.33"})
        decision, accepted = outcome(PLAIN, arm, of=newest)
        assert "arm drafted: with speculation.rejectionSampling fly, outputs differ" in accepted["message"]
        assert decision.writes.job is not None
        assert [bool(each.lossy) for each in settings(decision.writes.job).arms] == [False, True]

    def test_only_speculating_arms_on_cpu_lose_temperatures(self) -> None:
        sampled = [{"temperature": "0.7", "sharePercent": 100}]
        workload = {**SHORT, "temperatures": sampled}
        _, accepted = outcome(PLAIN, DEPLOYED, NGRAM, of=tiny_cpu(), workload=workload)
        assert accepted["status"] == "True"
        assert accepted["message"].count("vllm#55005") == 1
        assert "arms deployed, ngram: speculation on a CPU" in accepted["message"]
        for of, asked in ((tiny_cpu(), SHORT), (pair_70b(), workload)):
            _, accepted = outcome(PLAIN, DEPLOYED, NGRAM, of=of, workload=asked)
            assert accepted["message"] == "Capture is valid"
        _, accepted = outcome(PLAIN, {**PLAIN, "name": "again"}, of=tiny_cpu(), workload=workload)
        assert "vllm#55005" not in accepted["message"]


class TestPod:
    def test_one_container_runs_the_engines_of_all_arms(self) -> None:
        made = rendered(PLAIN, DEPLOYED, NGRAM)
        engine = containers(made)["engine"]
        assert engine["command"][3] == "/specdecode/recorder"
        assert engine["command"][4:] == ["python3", "-I", engine["command"][6], "/specdecode/switch"]
        assert "startupProbe" not in engine, "or the load generator, which tells it what to start, never comes"
        assert engine["restartPolicy"] == "Always"
        for name in ("engine", "load"):
            mounts = {each["mountPath"] for each in containers(made)[name]["volumeMounts"]}
            assert "/specdecode/switch" in mounts
        told = settings(made)
        methods = [(speculative_config(arm.command) or {}).get("method") for arm in told.arms]
        assert methods == [None, "draft_model", "ngram"]
        assert [arm.name for arm in told.arms] == ["plain", "deployed", "ngram"]
        assert told.repetitions == 2
        assert (told.checks.greedy_prompts, told.checks.structured_requests) == (8, 8)
        assert "SPECDECODE_RECORD_DIR" not in {each["name"] for each in engine["env"]}, "each run has its own"

    def test_capture_without_arms_has_no_switcher(self) -> None:
        made = rendered()
        assert settings(made).arms == []
        assert "startupProbe" in containers(made)["engine"]
        assert "/specdecode/switch" not in json.dumps(made)

    def test_repetitions_without_arms_measure_one_engine(self) -> None:
        told = settings(rendered(repetitions=3))
        assert [arm.name for arm in told.arms] == ["as-deployed"]
        assert told.repetitions == 3
        assert told.checks.greedy_prompts == 0, "there is nothing to compare"

    def test_pod_deadline_covers_all_arms_and_repetitions(self) -> None:
        def deadline_s(**spec: Any) -> int:
            found: int = rendered(**spec, of=tiny_cpu())["spec"]["template"]["spec"]["activeDeadlineSeconds"]
            return found

        one = deadline_s()
        assert deadline_s(repetitions=3) == 3 * one
        two = rendered(PLAIN, PLAIN | {"name": "again"}, of=tiny_cpu(), repetitions=5)
        assert two["spec"]["template"]["spec"]["activeDeadlineSeconds"] == 10 * one

    def test_draft_models_of_all_arms_are_downloaded(self) -> None:
        smaller = {**drafted(model="meta-llama/Llama-3.2-1B-Instruct"), "name": "smaller"}
        made = containers(rendered(PLAIN, drafted(), smaller))
        commands = [" ".join(each["command"]) for name, each in made.items() if name.startswith("download-")]
        assert [LLAMA_70B in each for each in commands] == [True, False, False]
        assert [each for each in commands if LLAMA_8B in each]
        assert [each for each in commands if "3.2-1B" in each]

    def test_drafts_of_all_arms_are_mounted_from_their_claims(self) -> None:
        def head(claim: str) -> Body:
            arm = drafted(model="head", config=TINY_CONFIG, persistentVolumeClaim={"claimName": claim})
            return {**arm, "name": claim}

        job_ = rendered(PLAIN, head("one"), head("two"), of=tiny_cpu())
        mounts = {each["mountPath"]: each for each in containers(job_)["engine"]["volumeMounts"]}
        claims = {
            each["name"]: each["persistentVolumeClaim"]["claimName"]
            for each in job_["spec"]["template"]["spec"]["volumes"]
            if "persistentVolumeClaim" in each
        }
        assert {claims[mounts[f"/drafts/{name}"]["name"]] for name in ("one", "two")} == {"one", "two"}
        commands = [speculative_config(list(arm.command)) for arm in settings(job_).arms]
        assert [each and each["model"] for each in commands] == [None, "/drafts/one/head", "/drafts/two/head"]

    def test_each_arm_has_its_own_compile_cache(self) -> None:
        """vLLM's own keys leave out what the start-up plan depends on."""
        cached = pair_70b(models={"volume": {"persistentVolumeClaim": {"claimName": "models"}}})
        cached["models"]["cache"] = {"persistentVolumeClaim": {"claimName": "cache"}}
        made = rendered(PLAIN, DEPLOYED, of=cached)
        mounts = {each["mountPath"]: each for each in containers(made)["engine"]["volumeMounts"]}
        compiled = [each for path, each in mounts.items() if path.startswith("/compiled")]
        assert len({each["subPath"] for each in compiled}) == 2
        folders = [
            next(word for word in arm.command if word.startswith(flag)).partition("=")[2]
            for arm in settings(made).arms
            for flag in ("--folder=", "--cache=")
        ]
        assert len(set(folders)) == 4
        assert {folders[0], folders[2]} <= set(mounts)


COMPARISON = {
    "baseline": "plain",
    "levelPercent": 95,
    "arms": [{"name": "ngram", "verdict": "Pays", "message": "goodput +18 %", "outputs": "Equal", "loads": []}],
}
SUMMARY = {"requests": {"sent": 1, "completed": 1}}


def finished(comparison: Any, **spec: Any) -> Any:
    said = ended("load", 0, {"summary": SUMMARY, "comparison": comparison})
    pod = capture_pod(phase="Succeeded", containerStatuses=[said])
    asked = capture_spec(**(spec or {"arms": [PLAIN, NGRAM]}))
    return capture(asked), surroundings(job=job("Complete"), pods=[pod])


class TestPays:
    @pytest.mark.parametrize(
        ("verdict", "status"),
        [
            ("Pays", "True"),
            ("DoesNotPay", "False"),
            *((word, "Unknown") for word in ("DependsOnLoad", "Inconclusive", "Incorrect")),
        ],
    )
    def test_pays_condition_keeps_verdict_of_second_arm(self, verdict: str, status: str) -> None:
        other = {**COMPARISON["arms"][0], "name": "other", "verdict": "Pays"}  # type: ignore[index]
        arms = [{**other, "name": "ngram", "verdict": verdict}, other]
        subject, seen = finished({**COMPARISON, "arms": arms})
        for state in (seen, surroundings()):
            _, found = decided(subject, state)
            assert words(found)["Pays"] == (status, verdict)
            assert found.comparison is not None
            assert found.comparison.arms[0].name == "ngram"
            subject = after(subject, state)
        message = next(each.message for each in found.conditions if each.type == "Pays")
        assert message == "ngram against plain: goodput +18 %"
        assert found.path == "default/demo", "all arms are below it"

    def test_pays_is_unknown_before_capture_ends(self) -> None:
        asked = capture_spec(arms=[PLAIN, NGRAM])
        _, status = decided(capture(asked), surroundings(job=job()))
        assert words(status)["Pays"] == ("Unknown", "NotCompared")

    def test_capture_without_arms_has_no_pays_condition(self) -> None:
        _, status = decided(*finished(None, repetitions=2))
        assert "Pays" not in words(status)
        assert status.path == "default/demo"

    @pytest.mark.parametrize(
        "said",
        [
            None,
            {},
            "Pays",
            {**COMPARISON, "levelPercent": 2**60},
            {**COMPARISON, "arms": COMPARISON["arms"] * 2},  # type: ignore[operator]
            {**COMPARISON, "arms": [{**COMPARISON["arms"][0], "message": "x" * 2000}]},  # type: ignore[index]
        ],
        ids=["nothing", "empty", "a word", "a number too large", "one arm twice", "a book"],
    )
    def test_invalid_comparison_is_ignored(self, said: Any) -> None:
        _, status = decided(*finished(said))
        assert words(status)["Succeeded"][0] == "True"
        assert words(status)["Pays"] == ("Unknown", "NotCompared")
        assert status.comparison is None
