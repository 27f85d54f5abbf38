"""Classes by the vLLM versions whose registry has them."""

import pytest

from specdecode_operator.sizing.registered_classes import unregistered


@pytest.mark.parametrize(
    ("architecture", "version", "words"),
    [
        ("AliceAIForCausalLM", "0.30", "needs vLLM 0.33 (registered since)"),
        ("InklingMTPModel", "0.25", "needs vLLM 0.26 (registered since)"),
        ("ArcticForCausalLM", "0.29", "up to 0.28, and vLLM is 0.29 here: use vLLM 0.28"),
        ("XverseForCausalLM", "0.33", "up to 0.23, and vLLM is 0.33 here: use another model"),
        ("XverseForCausalLM", "0.34", "up to 0.23"),
        ("Phi3SmallForCausalLM", "0.33", "up to 0.9"),
        ("BertModel", "0.33", "is unknown to vLLM"),
    ],
)
def test_missing_class_is_refused_with_the_versions_that_have_it(architecture: str, version: str, words: str) -> None:
    found = unregistered(architecture, version)
    assert found is not None
    assert (found.architecture, found.refused) == (architecture, True)
    assert words in f"{found.why}: {found.fix}"


@pytest.mark.parametrize(
    ("architecture", "version"),
    [
        ("AliceAIForCausalLM", "0.33"),
        ("AliceAIForCausalLM", "0.34"),
        ("ArcticForCausalLM", "0.28"),
        ("LlamaForCausalLM", "0.17"),
        ("InventedForCausalLM", "0.33"),
        # Registered since 0.30; before that vLLM finds DeepseekV4ForCausalLM by the other ending.
        ("DeepseekV4ForConditionalGeneration", "0.28"),
    ],
)
def test_class_of_the_version_or_of_transformers_is_accepted(architecture: str, version: str) -> None:
    assert unregistered(architecture, version) is None


@pytest.mark.parametrize(
    ("architecture", "version", "words"),
    [
        ("MiniMaxForCausalLM", "0.33", "up to 0.23"),
        ("Glm5NextForConditionalGeneration", "0.29", "needs vLLM 0.30"),
        ("BertModel", "0.34", "the newest that this operator supports"),
    ],
)
def test_class_that_may_still_be_served_is_a_doubt(architecture: str, version: str, words: str) -> None:
    found = unregistered(architecture, version)
    assert found is not None
    assert not found.refused
    assert words in found.why
