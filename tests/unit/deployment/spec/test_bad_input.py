"""What one object can tell to be wrong: all of it at once, each with field, value and what to write instead.

What takes a cluster to see is tested where it is seen: rollouts, claims, Secrets, nodes.
"""

from typing import Any

import pytest

from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.deployment.validation import valid_facts
from specdecode_operator.enums import Method
from specdecode_operator.problems import InvalidSpecError
from specdecode_operator.vllm.profiles import KNOWN_VERSIONS, find_profile
from specdecode_operator.vllm.speculation_rules import speculation_problems
from tests.support.engine_settings import replace
from tests.support.objects import pair_70b
from tests.unit.vllm.engine_cases import DRAFT_MODEL, PLAIN


def problems(**changes: Any) -> list[str]:
    with pytest.raises(InvalidSpecError) as error:
        valid_facts(SpecDecodeDeploymentSpec.model_validate(pair_70b(**changes)))
    return [str(problem) for problem in error.value.problems]


def test_a_split_that_divides_nothing_is_told_by_everything_that_it_does_not_divide() -> None:
    target, draft = problems(parallelism={"tensor": 11})
    for said, role, sizes in ((target, "target", (64, 28672, 8)), (draft, "draft", (32, 14336, 8))):
        heads, inner, kv_heads = sizes
        assert said.startswith(f"spec.parallelism.tensor: 11: {role}: ")
        for size in (
            f"num_attention_heads {heads}",
            f"num_key_value_heads {kv_heads}",
            f"intermediate_size {inner}",
            "vocab_size 128256",
        ):
            assert size in said
        assert said.endswith("; use 1, 2, 4, 8, 16 or 32")


def test_one_model_at_two_revisions_needs_two_folders() -> None:
    target = {"model": "meta-llama/Llama-3.1-8B-Instruct", "revision": "v2"}
    draft = {"model": "meta-llama/Llama-3.1-8B-Instruct", "revision": "main"}
    speculation = {"method": "draft_model", "numSpeculativeTokens": 3, "draft": draft}
    (problem,) = problems(target=target, speculation=speculation, models={})
    assert problem.startswith("spec.speculation.draft.revision: main: the target is the same model at v2")
    cached = {"cache": {"persistentVolumeClaim": {"claimName": "hub"}}}
    for fine in (
        {"models": cached, "speculation": speculation},
        {"models": {}, "speculation": speculation | {"draft": target}},
    ):
        valid_facts(SpecDecodeDeploymentSpec.model_validate(pair_70b(**{"target": target, **fine})))


OLDER = "spec.engine.version: 0.11: is a vLLM version that this operator does not know; write 0.28 or newer"
NEWER = (
    "spec.engine.image: absent: no GPU image of vLLM 0.99 is known; name one, or write spec.engine.version: "
    f"{KNOWN_VERSIONS[-1]}, the newest that this operator knows"
)


@pytest.mark.parametrize(("version", "said"), [("0.11", OLDER), ("0.99", NEWER)])
def test_a_version_that_nobody_knows_is_told_with_those_that_are(version: str, said: str) -> None:
    assert problems(engine={"version": version}) == [said]


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
def test_a_method_that_a_version_lacks_is_told_with_those_that_it_has(version: str) -> None:
    known = find_profile(version)
    lacking = replace(known, runners={Method.NGRAM: known.runners[Method.NGRAM]})
    (problem,) = speculation_problems(replace(PLAIN, speculation=DRAFT_MODEL), lacking)
    assert str(problem) == (
        f"spec.speculation.method: draft_model: vLLM {version} is not known to speculate so; use one of ngram"
    )


def test_all_that_is_wrong_is_told_at_once() -> None:
    said = problems(
        parallelism={"tensor": 3},
        serving={"maxNumBatchedTokens": 5, "maxNumSeqs": 4, "blockSize": 24},
        engine={"extraArgs": ["--tensor-parallel-size", "2", "--nonsense"]},
        podTemplate={"spec": {"containers": [{"name": "engine", "command": ["sh"]}]}},
    )
    fields = [
        "spec.parallelism.tensor: 3: target:",
        "spec.parallelism.tensor: 3: draft:",
        "spec.serving.blockSize: 24: must be a multiple of 16",
        "spec.serving.maxNumBatchedTokens: 5: must be at least",
        "spec.engine.extraArgs[0]: --tensor-parallel-size: is not for extraArgs; use spec.parallelism.tensor",
        "spec.engine.extraArgs[2]: --nonsense: vLLM 0.33 has no such flag",
        "spec.podTemplate.spec.containers[0].command: set: the operator writes it: use spec.engine.extraArgs",
    ]
    assert [field for field in fields if not any(each.startswith(field) for each in said)] == []
