"""What kubectl complains of, in the words of `specdecode capture`."""

from collections.abc import Callable

import pytest
from click.testing import Result

_LOG = 'E1122 14:02:28.1 11257 memcache.go:265] "Unhandled Error" err="couldn\'t get current server API group list"\n'
SAID = {
    5 * _LOG + "The connection to the server localhost:8080 was refused - did you specify the right host or port?\n": (
        "KUBECONFIG: there: names no cluster: name a kubeconfig, or start a cluster"
    ),
    5 * _LOG + "The connection to the server 10.0.0.1:6443 was refused - did you specify the right host or port?\n": (
        "The connection to the server 10.0.0.1:6443 was refused: is it up, and is this the right one (--context,"
        " KUBECONFIG)?"
    ),
    "Unable to connect to the server: dial tcp: lookup nohost: no such host\n": (
        "Unable to connect to the server: dial tcp: lookup nohost: no such host: is it up, and is this the right one"
        " (--context, KUBECONFIG)?"
    ),
    "Error in configuration: context was not found for specified context: nope\n": (
        "--context: nope: the kubeconfig has no such context: kubectl config get-contexts lists them"
    ),
    'error: error loading config file "there": yaml: line 1: did not find expected node content\n': (
        'KUBECONFIG: there: error loading config file "there": yaml: line 1: did not find expected node content: name'
        " another kubeconfig"
    ),
    "error: timed out waiting for the condition\n": "timed out waiting for the condition",
    "Warning: old\n" + _LOG: "couldn't get current server API group list",
    "": "kubectl ended with exit code 1 and said nothing",
    'The SpecDecodeCapture "a" is invalid: \n* spec.seed: Invalid value\n* spec.record: Invalid value\n'
    "* <nil>: Invalid value: null: some validation rules were not checked because the object was invalid\n": (
        'The SpecDecodeCapture "a" is invalid: spec.seed: Invalid value; spec.record: Invalid value'
    ),
}


@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize("command", [["status"], ["run"], ["fetch", "demo", "out"], ["down"]])
@pytest.mark.usefixtures("cluster")
def test_what_kubectl_complains_of_is_one_line(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, said: str, command: list[str]
) -> None:
    monkeypatch.setenv("FAKE_SAYS", said)
    monkeypatch.setenv("KUBECONFIG", "there")
    answer = run(*command)
    assert (answer.exit_code, answer.stderr) == (1, f"error: {SAID[said]}\n")


def test_without_kubectl_one_line_says_so(run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    answer = run("status")
    assert answer.exit_code == 1
    assert answer.stderr == "error: kubectl: not on PATH: install it, captures are driven through it\n"
