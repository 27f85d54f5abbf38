"""Heads that trainings offer to their deployment."""

from typing import Any

import pytest

from specdecode_operator.training.offers import Offers, offers_of
from tests.support.better_trainings import HEAD_CONFIG, asking, better_training, condition, head
from tests.support.objects import Body, parent, tiny_cpu


def deployment(spec: Body | None = None, **status: Any) -> Body:
    body = parent(spec or asking(), status=status)
    return {**body, "metadata": {**body["metadata"], "namespace": "team"}}


def offered(*trainings: Body, spec: Body | None = None, **status: Any) -> Offers:
    found = offers_of(deployment(spec, **status), trainings)
    assert found is not None
    return found


def test_better_head_is_offered_from_the_claim_of_its_training() -> None:
    (found,) = offered(better_training()).heads
    assert found.speculation == {
        "method": "eagle3",
        "numSpeculativeTokens": 3,
        "draft": {
            "model": "team/chat/head",
            "persistentVolumeClaim": {"claimName": "chat-training"},
            "config": HEAD_CONFIG,
        },
    }


def test_deployment_that_does_not_ask_gets_no_offer() -> None:
    assert offers_of(deployment(tiny_cpu()), [better_training()]) is None


@pytest.mark.parametrize(
    "training",
    [
        better_training(spec={"promote": "Manual"}),
        better_training(spec={"deployment": "other"}),
        better_training(status={"conditions": [condition("Better", "False")]}),
        better_training(status={"conditions": [condition("Better", "Unknown")]}),
        better_training(status={"conditions": []}),
        better_training(status={"conditions": "Better"}),
        {**better_training(), "metadata": {**better_training()["metadata"], "namespace": "other"}},
        {
            **better_training(),
            "metadata": {**better_training()["metadata"], "deletionTimestamp": "2026-01-02T00:00:00Z"},
        },
    ],
)
def test_other_trainings_offer_nothing(training: Body) -> None:
    found = offered(training)
    assert (found.heads, dict(found.invalid)) == ([], {})


@pytest.mark.parametrize(
    ("status", "field"),
    [
        ({"claim": "secrets"}, "status.claim"),
        ({"claim": None}, "status.claim"),
        ({"head": head(path="team/chat/head/../../../etc")}, "status.head.path"),
        ({"head": head(path="/etc")}, "status.head.path"),
        ({"head": head(path="team/other/head")}, "status.head.path"),
        ({"head": head(sha256="ab")}, "status.head.sha256"),
        ({"head": head(sha256="ab" * 32 + "\n")}, "status.head.sha256"),
        ({"head": head(config={**HEAD_CONFIG, "auto_map": {"AutoConfig": "config.py"}})}, "auto_map"),
        ({"head": head(config={**HEAD_CONFIG, "speculators_model_type": "dflash"})}, "speculators_model_type"),
        ({"head": None}, "no head"),
        ({"verdict": None}, "no verdict"),
    ],
)
def test_untrusted_status_cannot_choose_what_is_mounted(status: Body, field: str) -> None:
    found = offered(better_training(status=status))
    assert found.heads == []
    assert found.invalid["chat"].reason == "HeadInvalid"
    assert field in found.invalid["chat"].message


@pytest.mark.parametrize(
    "change",
    [
        {"model": "pair/fine-tune"},
        {"revision": "v2"},
        {"quantization": "FP8"},
        {"ropeScaling": {"type": "yarn", "factor": "4.0", "originalMaxPositionEmbeddings": 2048}},
        {"model": "pair/target", "quantization": "Auto"},
    ],
)
def test_head_of_another_target_is_not_offered(change: Body) -> None:
    spec = asking()
    spec["target"] |= change
    found = offered(better_training(), spec=spec)
    assert (found.heads, found.invalid["chat"].reason) == ([], "OtherTarget")


def test_newest_head_comes_first() -> None:
    older = better_training("older", created="2026-01-01T00:00:00Z")
    newer = better_training("newer", created="2026-02-01T00:00:00Z")
    assert [each.training for each in offered(older, newer).heads] == ["newer", "older"]


def test_head_in_force_is_the_one_that_the_status_names() -> None:
    trainings = [better_training("older"), better_training("newer", created="2026-02-01T00:00:00Z")]
    (newer, older) = offered(*trainings).heads
    named = {"training": "older", "sha256": older.sha256}
    assert offered(*trainings, trainedDraft=named).present == older
    assert offered(*trainings, trainedDraft={**named, "sha256": "0" * 64}).present is None
    assert offered(*trainings, trainedDraft="older").present is None
    assert offered(*trainings[1:], trainedDraft=named).present is None
    assert newer != older


@pytest.mark.parametrize(
    ("speculation", "expected"),
    [
        ({"method": "none"}, {"numSpeculativeTokens": 3}),
        ({"method": "suffix", "numSpeculativeTokens": 40}, {"numSpeculativeTokens": 32}),
        (
            {
                "method": "ngram",
                "numSpeculativeTokens": 5,
                "ngram": {"promptLookupMax": 4},
                "rejectionSampling": "block",
            },
            {"numSpeculativeTokens": 5, "rejectionSampling": "block"},
        ),
        (
            {
                "method": "eagle3",
                "numSpeculativeTokens": 5,
                "draft": {"model": "org/head"},
                "draftSampling": "probabilistic",
                "numSpeculativeTokensByBatchSize": [{"from": 1, "to": 4, "numSpeculativeTokens": 5}],
            },
            {
                "numSpeculativeTokens": 5,
                "draftSampling": "probabilistic",
                "numSpeculativeTokensByBatchSize": [{"from": 1, "to": 4, "numSpeculativeTokens": 5}],
            },
        ),
    ],
)
def test_head_keeps_the_settings_that_its_method_has(speculation: Body, expected: Body) -> None:
    (found,) = offered(better_training(), spec=asking(speculation=speculation)).heads
    assert {name: value for name, value in found.speculation.items() if name not in {"method", "draft"}} == expected


def test_measured_k_replaces_the_deployments() -> None:
    speculation = {
        "method": "eagle3",
        "numSpeculativeTokens": 5,
        "draft": {"model": "org/head"},
        "numSpeculativeTokensByBatchSize": [{"from": 1, "to": 4, "numSpeculativeTokens": 5}],
    }
    training = better_training(spec={"judgement": {"numSpeculativeTokens": 2}})
    (found,) = offered(training, spec=asking(speculation=speculation)).heads
    assert found.speculation["numSpeculativeTokens"] == 2
    assert "numSpeculativeTokensByBatchSize" not in found.speculation


def test_more_ranges_than_an_arm_can_have_are_dropped() -> None:
    ranges = [{"from": 2 * number + 1, "to": 2 * number + 2, "numSpeculativeTokens": 5} for number in range(17)]
    speculation = {"method": "eagle3", "numSpeculativeTokens": 5, "draft": {"model": "org/head"}}
    for kept, given in ((False, ranges), (True, ranges[:16])):
        spec = asking(speculation={**speculation, "numSpeculativeTokensByBatchSize": given})
        (found,) = offered(better_training(), spec=spec).heads
        assert ("numSpeculativeTokensByBatchSize" in found.speculation) is kept


@pytest.mark.parametrize(("method", "served"), [("peagle", "eagle3"), ("dflash", "dflash")])
def test_head_is_served_with_the_method_of_its_kind(method: str, served: str) -> None:
    config = {**HEAD_CONFIG, "speculators_model_type": method}
    (found,) = offered(better_training(spec={"method": method}, status={"head": head(config=config)})).heads
    assert found.speculation["method"] == served


def test_another_head_in_the_same_folder_changes_the_pods() -> None:
    (found,) = offered(better_training()).heads
    (other,) = offered(better_training(status={"head": head(sha256="cd" * 32)})).heads
    body = deployment()
    assert found.engine_of(body) != other.engine_of(body)
    applied = found.applied_to(body)
    assert "trainedDrafts" not in applied["spec"]["speculation"]
    assert body == deployment(), "the object itself stays as it is"


def test_draft_tensor_parallelism_of_another_method_is_dropped() -> None:
    spec = asking(parallelism={"tensor": 2, "draftTensor": 1})
    (found,) = offered(better_training(), spec=spec).heads
    assert found.applied_to(deployment(spec))["spec"]["parallelism"] == {"tensor": 2}
