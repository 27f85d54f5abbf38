"""`specdecode plan --explain`: every term with its formula; the sums are those of `plan`."""

import json
import re
from fractions import Fraction
from math import ceil, floor  # noqa: F401 (formulas are evaluated with them)

import pytest

from tests.unit.cli.conftest import Specdecode, WriteObject, manifest

FP8 = {"target": {"model": "meta-llama/Llama-3.1-70B-Instruct", "quantization": "FP8"}}
NGRAM = {"speculation": {"method": "ngram", "numSpeculativeTokens": 4}}
ON_V1 = {"engine": {"version": "0.30"}}
ALONE = {"speculation": None, "serving": {"maxModelLen": 8192, "enforceEager": True, "kvCacheDtype": "fp8"}}


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep each formula on one line."""
    monkeypatch.setenv("COLUMNS", "400")


def figures(text: str) -> dict[str, int]:
    """Bytes of each line of the tables, by the name of the term."""
    found = re.findall(r"^  (\S.*?)  .*?([-\d,]+) +[-\d,]+\.\d\d$", text, re.MULTILINE)
    return {name: int(number.replace(",", "")) for name, number in found}


GRAPHLESS = {"serving": {"maxModelLen": 8192, "cudagraphMode": "NONE"}}
PICKED = {"method": "draft_model", "numSpeculativeTokens": 5, "draftSampling": "probabilistic"}
PICKED |= {"draft": {"model": "meta-llama/Llama-3.1-8B-Instruct"}}
SAMPLING = ON_V1 | {"speculation": PICKED}


@pytest.mark.parametrize(
    "spec",
    [{}, FP8, NGRAM, ALONE, GRAPHLESS, SAMPLING],
    ids=["BF16", "FP8", "ngram", "alone", "no graphs", "sampling on V1"],
)
def test_terms_add_up_to_the_kv_cache_of_the_plan(
    specdecode: Specdecode, write: WriteObject, spec: dict[str, object]
) -> None:
    path = write("a.yaml", manifest("a", **spec))
    result = specdecode("plan", "--explain", "-f", path)
    assert result.exit_code in {0, 4}
    terms = figures(result.stdout)
    plan = json.loads(specdecode("plan", "-f", path, "-o", "json").stdout)["objects"][0]["candidates"][0]
    charged = sum(size for name, size in terms.items() if name.startswith("- "))
    assert terms["budget"] == plan["per_gpu"]["requested"]
    assert terms["budget"] - charged == terms["= left for KV cache"] == plan["per_gpu"]["available_kv"]
    assert f"= {plan['kv_cache_tokens']:,}" in result.stdout


def test_terms_on_cpu_add_up_to_the_memory_needed(specdecode: Specdecode, write: WriteObject) -> None:
    """On a GPU torch's allocator takes a little more than this model's weights."""
    spec = {
        "target": {"model": "Qwen/Qwen3-4B"},
        "speculation": None,
        "parallelism": {},
        "accelerator": {"type": "CPU", "cpuCores": 4, "memoryGiB": 16, "kvCacheGiB": 2},
        "engine": {"image": "example.org/engine:1"},
    }
    result = specdecode("plan", "--explain", "-f", write("a.yaml", manifest("a", **spec)))
    assert result.exit_code == 0, result.output
    terms = figures(result.stdout)
    added = sum(size for name, size in terms.items() if name.startswith("+ "))
    assert terms["KV cache"] + added == terms["= memory needed"]


KINDS = {
    "dense": "meta-llama/Llama-3.1-8B-Instruct",
    "experts": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "windows and MXFP4": "openai/gpt-oss-120b",
    "windows and images": "google/gemma-3-27b-it",
    "latent attention": "deepseek-ai/DeepSeek-V2-Lite",
    "states": "Qwen/Qwen3-Next-80B-A3B-Instruct",
}
KINDS_OF_MODELS = [
    {"target": {"model": model}, "speculation": None, "parallelism": {"tensor": tensor}}
    for model in KINDS.values()
    for tensor in (1, 2)
]
KINDS_IDS = [f"{kind} TP {tensor}" for kind in KINDS for tensor in (1, 2)]


@pytest.mark.parametrize("spec", KINDS_OF_MODELS, ids=KINDS_IDS)
def test_terms_add_up_for_every_kind_of_model(
    specdecode: Specdecode, write: WriteObject, spec: dict[str, object]
) -> None:
    test_terms_add_up_to_the_kv_cache_of_the_plan(specdecode, write, spec)
    terms = figures(specdecode("plan", "--explain", "-f", write("a.yaml", manifest("a", **spec))).stdout)
    assert all(size >= 0 for name, size in terms.items() if name.startswith("- "))


TOKEN = re.compile(r"ceil|floor|\bx\b|[A-Za-z'][\w'.-]*|\d+|[-+/()]")
PYTHON = {"x": "*", "ceil": "ceil", "floor": "floor"}


def computed(formula: str) -> Fraction | None:
    """The result of a formula, from its text without the words; None for one that is in words alone."""
    text = formula.replace(",", "").replace("the null block", "1")
    text = re.sub(r"\(fp8 from \S+\)| for \d+ tokens$| in layers of \d+ kinds", "", text)
    if not re.match(r"\d|\(|ceil|floor", text):
        return None
    tokens = [f"Fraction({each})" if each.isdigit() else PYTHON.get(each, each) for each in TOKEN.findall(text)]
    arithmetic = [each for each in tokens if not each[0].isalpha() or each.startswith(("Fraction", "ceil", "floor"))]
    return Fraction(eval("".join(arithmetic)))


@pytest.mark.parametrize(
    "spec",
    [{}, FP8, NGRAM, ON_V1, {**ON_V1, **FP8}, *KINDS_OF_MODELS],
    ids=["BF16", "FP8", "ngram", "V1", "V1 FP8", *KINDS_IDS],
)
def test_printed_formulas_compute_to_their_result(
    specdecode: Specdecode, write: WriteObject, spec: dict[str, object]
) -> None:
    """Those that are pure arithmetic are computed anew from their text."""
    text = specdecode("plan", "--explain", "-f", write("a.yaml", manifest("a", **spec))).stdout
    names = set()
    for line in text.splitlines():
        cells = [cell for cell in re.split(r" {2,}", line.strip()) if cell]
        if len(cells) < 3 or cells[0] == "full requests":
            continue
        result = computed(cells[1])
        if result is not None:
            names.add(cells[0])
            assert result == int(cells[2].removeprefix("= ").replace(",", "")), line
        # What is charged has arithmetic, whatever the model; in words is only what nothing is charged for.
        assert result is not None or not cells[0].startswith("- ") or cells[1] == "none", line
    assert {"budget", "- state", "- activation", "- non-torch"} <= names, text
    assert {"bytes of a token", "blocks", "blocks of a request"} <= names, text
    assert {"tokens", "KV cache needed", "- CUDA graphs", "slack: free outside the budget"} <= names, text
    assert ("overrun: verification" in names) is (", no speculation," not in text)
    assert any(name.endswith("rotary table") for name in names), text


def test_verdict_that_does_not_fit_has_its_numbers(specdecode: Specdecode, write: WriteObject) -> None:
    body = manifest("a", accelerator={"products": ["NVIDIA-H100-80GB-HBM3"]})
    result = specdecode("plan", "--explain", "-f", write("a.yaml", body))
    assert result.exit_code == 4
    terms = figures(result.stdout)
    assert terms["to spare"] == terms["= left for KV cache"] - terms["KV cache needed"] < 0
    assert "DoesNotFit" in result.stdout


@pytest.mark.parametrize(
    ("model", "dtype", "who"),
    [
        ("meta-llama/Llama-3.1-70B-Instruct", {"kvCacheDtype": "fp8"}, "serving.kvCacheDtype"),
        ("nvidia/Llama-3.1-70B-Instruct-FP8", {}, "the checkpoint"),
    ],
)
def test_kv_cache_line_names_the_dtype_and_its_origin(
    specdecode: Specdecode, write: WriteObject, model: str, dtype: dict[str, str], who: str
) -> None:
    spec = {"target": {"model": model}, "serving": {"maxModelLen": 8192, **dtype}}
    text = specdecode("plan", "--explain", "-f", write("a.yaml", manifest("a", speculation=None, **spec))).stdout
    assert f"80 full layers x 8 heads / 2 x (128 + 128) x 1 byte (fp8 from {who})" in text


def test_verdict_shows_the_memory_outside_the_budget(specdecode: Specdecode, write: WriteObject) -> None:
    serving = {"maxModelLen": 8192, "gpuMemoryUtilizationPercent": 99}
    path = write("a.yaml", manifest("a", serving=serving, accelerator={"products": ["NVIDIA-H200"]}))
    text = specdecode("plan", "--explain", "-f", path).stdout
    terms = figures(text)
    assert terms["overrun: verification"] > terms["slack: free outside the budget"]
    assert "Tight: " in text
    assert "outside the budget, where" in text
