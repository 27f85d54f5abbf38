"""The main job on this machine: cluster, operator, a real vLLM that speculates.

Run as `./just demo`; `./just demo-full` lets a capture of it follow, through the command that users have, a replay
of the capture, and the verdict whether its draft pays. `./just down` removes what it leaves running.
"""

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from devcluster.builds import binaries
from devcluster.cluster.cluster import Cluster
from devcluster.cluster.kubectl import Kubectl
from devcluster.demo_replay import SPECDECODE, replay_and_report
from devcluster.host.errors import ClusterError
from devcluster.host.paths import REPOSITORY
from devcluster.host.progress import say, step
from devcluster.host.threads import together
from devcluster.install import install_operator, load_engine_image, load_operator_image, prepare

NAME = "demo"
CAPTURE, VERDICT = "demo", "does-it-pay"
DEPLOYMENT = "tiny"
EXAMPLES = REPOSITORY / "examples"
_MODELS_DEADLINE_S = 180
READY_DEADLINE_S = 600
_PROOF_DEADLINE_S = 120
_PROMPTS = (
    "The quick brown fox",
    "Speculative decoding is",
    "A draft model proposes",
    "The target model verifies",
)
_OUTPUT_TOKENS = 96


def main() -> int:
    """Run the demo and return the exit status."""
    times: dict[str, float] = {}
    report: Path | None = None
    verdict = ""
    try:
        with timed(times, "images, engine and programs"):
            prepare()
        cluster = Cluster(NAME)
        with timed(times, "cluster up"):
            cluster.up("real")
        kubectl = Kubectl(cluster.kubeconfig)
        with timed(times, "operator and tiny models"):
            load_engine_image(cluster)
            together(lambda: _install(cluster, kubectl), lambda: _make_models(kubectl))
        with timed(times, "applied to Ready"):
            _serve(kubectl)
        with timed(times, "completions and proof"):
            answers = _complete(kubectl)
            _wait_for_proof(kubectl)
        if "--capture" in sys.argv[1:]:
            with timed(times, "capture: load, check, fetch"):
                capture = _capture(kubectl, CAPTURE, "capture-tiny.yaml")
            with timed(times, "its replay, and a report of both"):
                report = replay_and_report(capture)
            with timed(times, "whether the draft pays"):
                verdict = _verdict(kubectl)
            with timed(times, "serving again, and proof"):
                _wait_for_engines(kubectl)
                answers = _complete(kubectl)
                _wait_for_proof(kubectl)
        moment = _moment(kubectl)
    except ClusterError as error:
        say(f"error: {error}")
        say("to find the cause, use ./just cluster-logs, and kubectl describe with the kubeconfig named above")
        return 1
    _report(kubectl, moment, answers, times)
    if report is not None:
        print(f"\nDoes it pay? {verdict}")
        print(f"The capture against its replay, in pictures: {report}")
    return 0


@contextmanager
def timed(times: dict[str, float], name: str) -> Iterator[None]:
    """Record how long the block takes."""
    started = time.monotonic()
    yield
    times[name] = time.monotonic() - started


def _install(cluster: Cluster, kubectl: Kubectl) -> None:
    load_operator_image(cluster)
    install_operator(kubectl)


def _make_models(kubectl: Kubectl) -> None:
    with step("making the tiny targets and their drafts: kubectl apply -f examples/tiny-models.yaml"):
        kubectl.must("apply", f"--filename={EXAMPLES / 'tiny-models.yaml'}")
        kubectl.wait("job/tiny-models", "condition=Complete", _MODELS_DEADLINE_S)


def _serve(kubectl: Kubectl) -> None:
    with step("kubectl apply -f examples/tiny-cpu.yaml, and waiting until it is Ready (vLLM starts)"):
        kubectl.must("apply", f"--filename={EXAMPLES / 'tiny-cpu.yaml'}")
        kubectl.wait(f"sdd/{DEPLOYMENT}", "condition=Ready", READY_DEADLINE_S)


def _complete(kubectl: Kubectl) -> list[dict[str, Any]]:
    """Send a few completions to the Service, and return what the engine answered."""
    url = f"http://{kubectl.service_address(DEPLOYMENT)}/v1/completions"
    with step(f"sending {len(_PROMPTS)} completions to {url}"):
        return [post(url, _request(prompt)) for prompt in _PROMPTS]


def _request(prompt: str) -> dict[str, Any]:
    # vLLM on a CPU verifies drafts wrongly at other temperatures (EngineProfile.loses_sampling_on_cpu).
    return {"model": "target", "prompt": prompt, "max_tokens": _OUTPUT_TOKENS, "temperature": 0}


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Send JSON to a Service on this machine, and return the answer."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    # The Service is on this machine: a proxy of the environment does not apply.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def _wait_for_proof(kubectl: Kubectl) -> None:
    with step("waiting until the operator has seen the engine draft"):
        kubectl.wait(f"sdd/{DEPLOYMENT}", "condition=SpeculationActive", _PROOF_DEADLINE_S)


def _wait_for_engines(kubectl: Kubectl) -> None:
    """Wait until those that made room are back: the deployment is ready meanwhile, for it wants none."""
    serving = "jsonpath={.status.conditions[?(@.type=='Available')].reason}=EnginesServe"
    with step("waiting until the engines that made room for the capture serve again"):
        kubectl.wait(f"sdd/{DEPLOYMENT}", serving, READY_DEADLINE_S)


@dataclass(frozen=True)
class _Moment:
    """What the cluster says of the deployment at one moment."""

    table: str
    status: dict[str, Any]


def _moment(kubectl: Kubectl) -> _Moment:
    """Return the object and its line in a table, of one and the same version."""
    while True:
        body = kubectl.object("sdd", DEPLOYMENT)
        table = kubectl.must("get", "sdd").rstrip()
        if kubectl.object("sdd", DEPLOYMENT)["metadata"]["resourceVersion"] == body["metadata"]["resourceVersion"]:
            return _Moment(table, body["status"])


def _capture(kubectl: Kubectl, name: str, example: str) -> Path:
    """Capture the deployment, fetch the files and print their summary; return their folder."""
    with step(f"capturing it: specdecode capture up examples/{example}"):
        specdecode(kubectl, "capture", "up", str(EXAMPLES / example))
    # Another demo's files are of another capture, and stay.
    uid = kubectl.object("sdc", name)["metadata"]["uid"]
    out = REPOSITORY / "captures" / f"{name}-{uid[:8]}"
    specdecode(kubectl, "capture", "run", name, f"--out={out}")
    specdecode(kubectl, "capture", "validate", str(out))
    return out


def _verdict(kubectl: Kubectl) -> str:
    """Serve the same load with the draft and without, by turns, and return what comes out, with its interval."""
    _capture(kubectl, VERDICT, "does-it-pay-tiny.yaml")
    conditions = kubectl.object("sdc", VERDICT)["status"]["conditions"]
    pays = next(each for each in conditions if each["type"] == "Pays")
    return f"{pays['reason']}: {pays['message']}"


def specdecode(kubectl: Kubectl, *arguments: str) -> None:
    """Run the command as a user would, with the demo's kubeconfig."""
    program = binaries.find("kubectl")["kubectl"]
    environment = {
        **os.environ,
        "KUBECONFIG": str(kubectl.kubeconfig),
        # A cache of its own, as Kubectl has one.
        "KUBECACHEDIR": str(Path(kubectl.kubeconfig or "").parent / "kubectl-cache"),
        "PATH": os.pathsep.join([str(program.parent), os.environ.get("PATH", os.defpath)]),
    }
    sys.stdout.flush()
    done = subprocess.run([SPECDECODE, *arguments], env=environment, check=False)
    if done.returncode:
        raise ClusterError(f"specdecode {' '.join(arguments)} ended with exit code {done.returncode}")


def _report(kubectl: Kubectl, moment: _Moment, answers: list[dict[str, Any]], times: dict[str, float]) -> None:
    status = moment.status
    plan, observed = status["plan"], status["observed"]
    tokens = sum(answer["usage"]["completion_tokens"] for answer in answers)
    print("\n$ kubectl get sdd")
    print(moment.table)
    print(f"\nPlan      {plan['explanation']}")
    print(f"Promised  {plan['kvCacheTokens']:,} KV cache tokens; the engine reports {observed['kvCacheTokens']:,}")
    print(f"Proof     {observed['acceptance']} of {observed['draftTokens']:,} drafted tokens accepted,")
    length = observed["meanAcceptanceLength"]
    said = f"{len(answers)} completions gave {tokens} tokens"
    print(f"          {length} tokens a step, as the status was last written; {said}")
    print("\nConditions")
    for condition in status["conditions"]:
        if condition["type"] not in {"Reconciling", "Stalled"}:
            print(f"  {condition['type']:<18} {condition['status']:<8} {condition['message']}")
    print("\nTimes")
    for name, elapsed_s in times.items():
        print(f"  {name:<32} {elapsed_s:6.1f} s")
    print(f"  {'in all':<32} {sum(times.values()):6.1f} s")
    print(f"""
The cluster stays up. Try:
  export KUBECONFIG={kubectl.kubeconfig}{_path_of_kubectl()}
  kubectl describe sdd {DEPLOYMENT}
  kubectl patch sdd {DEPLOYMENT} --type=merge -p '{{"spec":{{"speculation":{{"numSpeculativeTokens":5}}}}}}'
  kubectl patch sdd {DEPLOYMENT} --type=merge -p '{{"spec":{{"suspend":true}}}}'
  ./just cluster-nodes --add 2xH100:8   # simulated machines, for the next line
  kubectl apply -f examples/llama-70b.yaml && kubectl describe sdd llama-70b
  ./just down""")


def _path_of_kubectl() -> str:
    """Return what puts the kubectl that was built here on a person's PATH; empty where there is one already."""
    if shutil.which("kubectl"):
        return ""
    return f' PATH="{binaries.find("kubectl")["kubectl"].parent}:$PATH"'


if __name__ == "__main__":
    sys.exit(main())
