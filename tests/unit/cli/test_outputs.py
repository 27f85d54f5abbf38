"""Output, exit codes and help of every command."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from pydantic import BaseModel

from specdecode_operator.cli.main import TRACEBACK, Ending, app, run_to_its_end
from specdecode_operator.cli.options import HiddenName
from specdecode_operator.cli.plan.batch_output import BatchOutput
from specdecode_operator.cli.plan.data import ExplainOutput, PlanOutput
from tests.support.golden import EXAMPLES, ROOT
from tests.support.objects import H200
from tests.unit.cli.conftest import Specdecode, WriteObject, manifest
from tests.unit.cli.test_explain import figures

MODELS: dict[str, type[BaseModel]] = {"plan": PlanOutput, "plan --explain": ExplainOutput}
LARGE = {"accelerator": {"products": ["NVIDIA-H100-80GB-HBM3"]}}
CASE = {"gpu": "H100", "model": "meta-llama/Llama-3.1-8B-Instruct"}


@pytest.mark.parametrize("command", MODELS)
def test_json_output_matches_the_schema(specdecode: Specdecode, write: WriteObject, command: str) -> None:
    """Those that fit, that do not, that are invalid or unknown, on CPU and in files that cannot be read."""
    unknown = manifest("unknown", target={"model": "nobody/knows"}, speculation=None)
    files = [
        write("a.yaml", manifest("a"), manifest("large", **LARGE), manifest("bad", replicas="many"), unknown),
        write("broken.yaml", "{a: [1"),
        EXAMPLES,
    ]
    text = specdecode(*command.split(), *files, "-o", "json").stdout
    answer = MODELS[command].model_validate_json(text, extra="forbid")
    # What the schema describes is what was printed, key by key.
    assert answer.model_dump(mode="json") == json.loads(text)
    as_yaml = specdecode(*command.split(), *files, "-o", "yaml").stdout
    assert yaml.safe_load(as_yaml) == json.loads(text)
    verdicts = {each["verdict"] for each in json.loads(text)["objects"]}
    assert verdicts == {"Fits", "DoesNotFit", "Invalid", "Unknown"}
    assert len(json.loads(text)["errors"]) == 1


@pytest.mark.parametrize(
    "case",
    [
        CASE,
        {**CASE, "id": 7, "tp": 2},
        {**CASE, "max_model_len": 131_072, "min_concurrency": 50},
        {"model": CASE["model"], "available_kv_gib": 10},
        {"model": "nobody/knows", "gpu": "H100"},
    ],
)
def test_batch_line_matches_the_schema(specdecode: Specdecode, case: dict[str, Any]) -> None:
    line = specdecode("plan", "--batch", "-", "--out", "-", stdin=json.dumps(case)).stdout
    result = BatchOutput.model_validate_json(line, extra="forbid")
    assert result.model_dump(mode="json", exclude_unset=True) == json.loads(line)


@pytest.mark.parametrize("command", ["plan", "explain", "batch", "advise", "verdict"])
def test_schema_describes_each_key(specdecode: Specdecode, command: str) -> None:
    schema = json.loads(specdecode("schema", command).stdout)
    assert schema["$schema"].startswith("https://json-schema.org/")
    for name, part in schema["$defs"].items():
        for key, described in part["properties"].items():
            assert described.get("description"), f"{name}.{key}"


def test_explain_json_has_the_same_facts_as_its_text(
    specdecode: Specdecode, write: WriteObject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    path = write("a.yaml", manifest("a"))
    (answer,) = json.loads(specdecode("plan", "--explain", path, "-o", "json").stdout)["objects"]
    text = specdecode("plan", "--explain", path).stdout
    printed = figures(text)
    for term in (*answer["memory"], *answer["judged"]):
        assert printed[term["name"]] == term["bytes"]
        assert term["formula"] in text
        assert (term["source"] or "") in text
    taken = sum(term["bytes"] for term in answer["memory"] if term["name"].startswith("- "))
    sizes = {term["name"]: term["bytes"] for term in answer["memory"]}
    assert sizes["budget"] - taken == sizes["= left for KV cache"]
    assert [each["result"] for each in answer["kv_cache"] if each["name"] == "tokens"] == ["237,168"]
    assert answer["candidate"] == "2 x H200, TP 2"


# `specdecode plan` and `specdecode init` with options in the place of a file.

TARGET, DRAFT = "meta-llama/Llama-3.1-70B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"
PAIR = ("--model", TARGET, "--draft", DRAFT, "-K", 5, "--tp", 2, "--max-model-len", 8192)


def planned(specdecode: Specdecode, *arguments: object) -> dict[str, Any]:
    result = specdecode("plan", *arguments, "-o", "json")
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.stdout)["objects"]
    return dict(found)


def test_plan_of_options_equals_the_plan_of_a_file(specdecode: Specdecode, write: WriteObject) -> None:
    file = write("a.yaml", manifest("a", accelerator={"products": [H200]}))
    of_options, of_file = planned(specdecode, *PAIR, "--gpu", "H200"), planned(specdecode, file)
    assert of_options["candidates"] == of_file["candidates"]
    assert of_options["name"] == "llama-3-1-70b-instruct"


EVERY = {
    "method": ("--method", "ngram"),
    "pipeline": ("--pp", 2),
    "data": ("--dp", 2),
    "quantization": ("--quantization", "FP8"),
    "kv_cache_dtype": ("--kv-cache-dtype", "fp8"),
    "engine_version": ("--engine-version", "0.30"),
    "product": ("--gpu", "H100", "--gpu", "NVIDIA-H200"),
}


def test_init_writes_every_option_to_the_manifest(specdecode: Specdecode) -> None:
    options = [word for words in EVERY.values() for word in words]
    result = specdecode("init", "--model", TARGET, "--num-speculative-tokens", 3, "--tp", 4, *options)
    assert result.exit_code == 0, result.output
    assert yaml.safe_load(result.stdout) == {
        "apiVersion": "specdecode.io/v1alpha1",
        "kind": "SpecDecodeDeployment",
        "metadata": {"name": "llama-3-1-70b-instruct"},
        "spec": {
            "target": {"model": TARGET, "quantization": "FP8"},
            "speculation": {"method": "ngram", "numSpeculativeTokens": 3},
            "parallelism": {"tensor": 4, "pipeline": 2, "data": 2},
            "accelerator": {"products": ["NVIDIA-H100-80GB-HBM3", "NVIDIA-H200"]},
            "serving": {"kvCacheDtype": "fp8"},
            "engine": {"version": "0.30"},
        },
    }


def test_init_manifest_has_the_same_plan_as_the_options(specdecode: Specdecode, tmp_path: Path) -> None:
    file = tmp_path / "new.yaml"
    result = specdecode("init", *PAIR, "--gpu", "H200", "--name", "chat", "-n", "models", "--out", file)
    assert result.exit_code == 0
    assert result.stdout == ""
    assert "237,168 tokens" in result.stderr
    again = planned(specdecode, file)
    assert (again["name"], again["namespace"]) == ("chat", "models")
    assert again["candidates"] == planned(specdecode, *PAIR, "--gpu", "H200")["candidates"]


def test_init_keeps_an_existing_file(specdecode: Specdecode, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("mine")
    result = specdecode("init", *PAIR, "--gpu", "H200", "--out", file)
    assert result.exit_code == 2
    assert f"--out: {file}: File exists" in result.stderr
    assert file.read_text() == "mine"


def test_init_prints_a_manifest_that_does_not_fit_and_exits_with_4(specdecode: Specdecode) -> None:
    result = specdecode("init", *PAIR, "--gpu", "H100")
    assert result.exit_code == 4
    assert "does not fit" in result.stderr
    assert yaml.safe_load(result.stdout)["spec"]["target"]["model"] == TARGET


@pytest.mark.parametrize(
    ("target", "draft", "method"),
    [
        ("Qwen/Qwen3-8B", "RedHatAI/Qwen3-8B-speculator.dflash", "dflash"),
        ("Qwen/Qwen3-8B", "RedHatAI/Qwen3-8B-speculator.peagle", "eagle3"),
        ("google/gemma-4-12B-it", "google/gemma-4-12B-it-assistant", "mtp"),
        (TARGET, DRAFT, "draft_model"),
    ],
)
def test_method_defaults_to_that_of_a_known_draft_of_any_size(
    specdecode: Specdecode, target: str, draft: str, method: str
) -> None:
    result = specdecode("init", "--model", target, "--draft", draft, "-K", 7)
    assert yaml.safe_load(result.stdout)["spec"]["speculation"]["method"] == method
    rejected = specdecode("plan", "--model", target, "--draft", draft, "-K", 33)
    assert f"method {method} takes at most 32" in rejected.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--tp", 2), "error: --model is missing"),
        (("--model", TARGET, "--gpu", "H3"), "error: --gpu: H3: no memory figures are known"),
        (
            ("--model", TARGET, "--draft", DRAFT),
            "spec.speculation.numSpeculativeTokens: is missing: method draft_model needs it",
        ),
        (("--model", TARGET, "--tp", 0), "spec.parallelism.tensor: 0: must be at least 1"),
    ],
)
def test_invalid_options_are_reported_and_nothing_is_written(
    specdecode: Specdecode, tmp_path: Path, arguments: tuple[object, ...], said: str
) -> None:
    result = specdecode("init", *arguments, "--out", tmp_path / "new.yaml")
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.startswith("error: ")
    assert not list(tmp_path.iterdir())
    result = specdecode("plan", *arguments)
    assert result.exit_code == 2
    assert said in result.stdout + result.stderr


def test_missing_tokens_are_reported_with_first_values_by_method_and_the_option(
    specdecode: Specdecode, write: WriteObject
) -> None:
    described = specdecode("plan", "--model", "Qwen/Qwen3-8B", "--draft", "AngelSlim/Qwen3-8B_eagle3")
    file = write("a.yaml", manifest("a", speculation={"method": "dflash", "draft": {"model": "my/head"}}))
    written = specdecode("plan", file)
    for result, method in ((described, "eagle3"), (written, "dflash")):
        assert f"method {method} needs it: set it to 1 to 32, for example 3 for eagle" in result.stdout
        assert "15 for dflash" in result.stdout
    assert "(option -K)" in described.stdout
    assert "-K" not in written.stdout


def test_file_and_model_options_exclude_each_other(specdecode: Specdecode, write: WriteObject) -> None:
    file = write("a.yaml", manifest("a"))
    result = specdecode("plan", file, "--model", TARGET)
    assert result.exit_code == 2
    assert f"cannot be combined with files ({file})" in result.stderr


def test_init_with_an_unknown_version_derives_an_image_and_warns(specdecode: Specdecode, write: WriteObject) -> None:
    options = (*PAIR, "--gpu", "H200", "--engine-version", "0.99")
    written = specdecode("init", *options)
    assert written.exit_code == 0, written.output
    image = "docker.io/vllm/vllm-openai:v0.99.0"
    assert yaml.safe_load(written.stdout)["spec"]["engine"] == {"version": "0.99", "image": image}
    assert f"warning: spec.engine.image: {image}: derived from the version" in written.stderr
    assert "is untested" in written.stderr
    of_file = planned(specdecode, write("a.yaml", written.stdout))["advice"]
    # Options ask for a plan alone, which downloads no gated model.
    assert [each for each in of_file if "is gated" not in each] == planned(specdecode, *options)["advice"]


# Help, completion and colours: what all commands share.

BIN = Path(sys.executable).parent


def commands(group: Any, *before: str) -> Iterator[tuple[str, ...]]:
    """All commands, those below others too."""
    for name, command in group.commands.items():
        yield (*before, name)
        if hasattr(command, "commands"):
            yield from commands(command, *before, name)


ALL = [(), *commands(typer.main.get_command(app))]


@pytest.mark.parametrize("command", ALL, ids=" ".join)
def test_help_shows_no_python_types(specdecode: Specdecode, command: tuple[str, ...]) -> None:
    result = specdecode(*command, "-h")
    assert result.exit_code == 0
    assert result.stdout == specdecode(*command, "--help").stdout
    named = re.findall(r"<[\w ]+[\[>]|install-completion|show-completion", result.stdout)
    assert not named, "values are called what they are to people"
    assert "--help" in result.stdout


@pytest.mark.parametrize("command", ALL, ids=" ".join)
def test_help_fits_80_columns_with_whole_option_names(specdecode: Specdecode, command: tuple[str, ...]) -> None:
    text = specdecode(*command, "--help").stdout
    assert max(map(len, text.splitlines())) <= 80
    found = typer.main.get_command(app)
    for name in command:
        found = found.commands[name]  # type: ignore[attr-defined]
    shown = [each for each in found.params if not each.hidden and not str(each.name).endswith("_completion")]
    names = [name for each in shown for name in (*each.opts, *each.secondary_opts) if not isinstance(name, HiddenName)]
    assert not [name for name in names if name.startswith("--") and not re.search(rf"{name}\b", text)]


def completed(script_of: str, *words: str) -> list[str]:
    """What bash would offer for the last of some words."""
    line = " ".join(words)
    script = f"""source <(specdecode completion {script_of})
        COMP_WORDS=({line} {"''" if not words[-1] else ""}); COMP_CWORD={len(words) - 1}
        _specdecode_completion specdecode; printf '%s\\n' "${{COMPREPLY[@]}}" """
    env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
    return subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, check=True).stdout.split()


def test_bash_completes_commands_options_and_values() -> None:
    assert completed("bash", "specdecode", "pl") == ["plan"]
    assert "--matrix" in completed("bash", "specdecode", "plan", "--ma")
    assert completed("bash", "specdecode", "plan", "-o", "js") == ["json"]
    assert completed("bash", "specdecode", "plan", "--gpu", "H2") == ["H20", "H200"]
    assert completed("bash", "specdecode", "plan", "--method", "eag") == ["eagle", "eagle3"]
    offered = completed("bash", "specdecode", "plan", "--model", "meta-llama/Llama-3.1-70")
    assert "meta-llama/Llama-3.1-70B-Instruct" in offered


@pytest.mark.parametrize(
    ("shell", "words"), [("zsh", "#compdef specdecode"), ("fish", "complete --command specdecode")]
)
def test_zsh_and_fish_have_completion_scripts(specdecode: Specdecode, shell: str, words: str) -> None:
    result = specdecode("completion", shell)
    assert result.exit_code == 0
    assert words in result.stdout
    assert "_SPECDECODE_COMPLETE" in result.stdout


def test_unknown_shell_is_refused_with_the_known_ones(specdecode: Specdecode) -> None:
    result = specdecode("completion", "csh")
    assert result.exit_code == 2
    assert all(shell in result.stderr for shell in ("bash", "zsh", "fish"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("replay", "serve", "t", "--mode", "model"),
            "'--mode': 'model' is not one of 'steps', 'modelled', 'emulated'.",
        ),
        (("replay", "serve", "t", "--port", "99999"), "'--port': 99999: must be less than or equal to 65535"),
        (("replay", "serve", "t", "--seed", "x"), "'--seed': x: must be a valid integer"),
        (("plan", "-o", "xml"), "'xml' is not one of 'table', 'json', 'yaml', 'markdown'."),
    ],
)
def test_invalid_value_is_reported_in_plain_words(
    specdecode: Specdecode, arguments: tuple[str, ...], said: str
) -> None:
    result = specdecode(*arguments)
    assert result.exit_code == 2
    text = " ".join(result.stderr.replace("\N{BOX DRAWINGS LIGHT VERTICAL}", " ").split())
    assert said in text
    assert "Value error" not in text


# How the command line ends: without a traceback, and with an exit code of its own.

SPECDECODE = (sys.executable, "-m", "specdecode_operator")
EXAMPLE = "examples/llama-8b-ngram.yaml"


def started(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SPECDECODE, *arguments], check=False, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=60, **options
    )


@pytest.mark.parametrize("arguments", [("plan", EXAMPLE), ("crds",), ("plan", "--batch", "-", "--out", "-")])
def test_full_disk_is_reported_in_one_line(arguments: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        ended = started(*arguments, stdout=full, input="{}\n")
    assert ended.returncode == Ending.NOT_WRITTEN
    assert ended.stderr == "error: standard output: No space left on device: write to another place\n"


def test_closed_pipe_prints_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = started("crds", stdout=writing)
    finally:
        os.close(writing)
    assert not ended.stderr
    assert ended.returncode


def test_exit_codes_are_documented() -> None:
    documented = (ROOT / "docs/reference/cli.md").read_text(encoding="utf-8")
    assert all(f"| {code.value} |" in documented for code in Ending)
    assert TRACEBACK in documented


def fails_with(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (KeyError("spec\n\x1b[31m"), Ending.DEFECT, "error: KeyError: "),
        (RecursionError("too deep"), Ending.DEFECT, "error: RecursionError: too deep"),
        (MemoryError(), Ending.DEFECT, "error: out of memory"),
        (BrokenPipeError(), Ending.PIPE_CLOSED, ""),
        (KeyboardInterrupt(), Ending.INTERRUPTED, ""),
        (PermissionError(13, "Permission denied", "x.yaml"), Ending.NOT_WRITTEN, "error: x.yaml: Permission denied"),
        (SystemExit(4), 4, ""),
    ],
)
def test_any_exception_ends_in_a_one_line_error(
    error: BaseException, code: int, words: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["specdecode", "plan"])
    with pytest.raises(SystemExit) as ended:
        run_to_its_end(fails_with(error))
    said = capfd.readouterr().err
    assert ended.value.code == code
    assert said.startswith(words)
    assert said.count("\n") == bool(words)
    assert "\x1b" not in said


def test_traceback_is_shown_if_the_variable_is_set(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["specdecode", "plan"])
    monkeypatch.setenv(TRACEBACK, "1")
    with pytest.raises(SystemExit):
        run_to_its_end(fails_with(KeyError("spec")))
    assert "Traceback" in capfd.readouterr().err


@pytest.mark.parametrize("command", ["operator", "capture-job"])
def test_log_of_operator_and_capture_job_has_the_traceback(
    command: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["specdecode", command, "--verbose"])
    with pytest.raises(SystemExit):
        run_to_its_end(fails_with(KeyError("spec")))
    assert "Traceback" in capfd.readouterr().err
