"""Train a draft on captured traffic, judge it and serve it, on this machine: `./just demo-train`.

The model speaks two artificial languages. Its head is untrained, so it slows the engine down. A new head is
trained on a capture of today's traffic, measured on held-out prompts, and served if it is better.
"""

import argparse
import sys
import time
from random import Random
from typing import Any

from devcluster.cluster.cluster import Cluster
from devcluster.cluster.kubectl import Kubectl
from devcluster.demo import EXAMPLES, NAME, READY_DEADLINE_S, post, specdecode, timed
from devcluster.host.errors import ClusterError
from devcluster.host.progress import say, step
from devcluster.images.trainer_image import build_trainer_image
from devcluster.install import install_operator, load_engine_image, load_operator_image, prepare

DEPLOYMENT, CAPTURE, TRAINING = "language", "today", "today"
_MODELS_DEADLINE_S = 180
_TRAINING_DEADLINE_S = 3600  # on a busy machine, a step took 50 times as long
_LOOK_S = 2.0
_PROMPTS = 24
_WORDS_OF_TODAY = range(514, 1024)
"""Words of today's language in examples/tiny_language.py."""


def main() -> int:
    """Run the demo and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m devcluster.demo_train", description=__doc__)
    parser.add_argument("--name", default=NAME, help="name of the cluster (default: %(default)s)")
    name = parser.parse_args().name
    times: dict[str, float] = {}
    after = "not served, because the condition Better is not True"
    try:
        with timed(times, "images, engine and programs"):
            prepare()
            build_trainer_image()
        cluster = Cluster(name)
        with timed(times, "cluster, images, operator"):
            cluster.up("real")
            load_engine_image(cluster)
            load_operator_image(cluster)
            cluster.load_image(build_trainer_image())
            kubectl = Kubectl(cluster.kubeconfig)
            install_operator(kubectl)
        with timed(times, "model made and served"):
            before = _serve(kubectl)
        with timed(times, "today's traffic captured"):
            specdecode(kubectl, "capture", "up", str(EXAMPLES / "capture-language.yaml"))
            kubectl.wait(f"sdc/{CAPTURE}", "condition=Succeeded", READY_DEADLINE_S)
        with timed(times, "head trained and judged"):
            kubectl.must("apply", f"--filename={EXAMPLES / 'training-tiny.yaml'}")
            is_better = _follow(kubectl)
        if is_better:
            with timed(times, "head served"):
                after = _serve_head(kubectl)
    except ClusterError as error:
        say(f"error: {error}")
        say("to find the cause, use ./just cluster-logs, and kubectl describe with the kubeconfig named above")
        return 1
    print()
    specdecode(kubectl, "training", "status", TRAINING)
    print(f"\nAccepted on {_PROMPTS} new prompts: {before} before, {after} afterwards\n\nTimes")
    for part, elapsed_s in times.items():
        print(f"  {part:<32} {elapsed_s:6.1f} s")
    print(f"""
The cluster stays up. Try:
  export KUBECONFIG={kubectl.kubeconfig}
  kubectl get sdd,sdtr,sdc
  .venv/bin/specdecode training promote {TRAINING} -o yaml
  .venv/bin/specdecode training rollback {TRAINING}
  ./just cluster-down --name={name}""")
    return 0


def _serve(kubectl: Kubectl) -> str:
    """Serve the model with its untrained head; return the acceptance."""
    with step("making the model: kubectl apply -f examples/tiny-language.yaml"):
        kubectl.must("apply", f"--filename={EXAMPLES / 'tiny-language.yaml'}")
        kubectl.wait("job/tiny-language", "condition=Complete", _MODELS_DEADLINE_S)
    with step("kubectl apply -f examples/tiny-language-cpu.yaml, and waiting until it is Ready"):
        kubectl.must("apply", f"--filename={EXAMPLES / 'tiny-language-cpu.yaml'}")
        kubectl.wait(f"sdd/{DEPLOYMENT}", "condition=Ready", READY_DEADLINE_S)
    return _acceptance(kubectl)


def _acceptance(kubectl: Kubectl) -> str:
    """Send prompts that no capture has sent; return the acceptance that the operator observes."""
    random = Random(_PROMPTS)
    url = f"http://{kubectl.service_address(DEPLOYMENT)}/v1/completions"
    with step(f"sending {_PROMPTS} new prompts, and waiting until the condition SpeculationActive is True"):
        for _ in range(_PROMPTS):
            prompt = " ".join(f"w{random.choice(_WORDS_OF_TODAY)}" for _ in range(16))
            post(url, {"model": "target", "prompt": prompt, "max_tokens": 64, "temperature": 0, "ignore_eos": True})
        kubectl.wait(f"sdd/{DEPLOYMENT}", "condition=SpeculationActive", READY_DEADLINE_S)
    return str(kubectl.object("sdd", DEPLOYMENT)["status"]["observed"]["acceptance"])


def _follow(kubectl: Kubectl) -> bool:
    """Print each new phase of the training until it ends; return whether its head is better."""
    said, end = "", time.monotonic() + _TRAINING_DEADLINE_S
    while time.monotonic() < end:
        status = kubectl.object("sdtr", TRAINING).get("status", {})
        phase = status.get("phase", "Pending")
        if phase != said:
            say(f"training: {phase}")
            said = phase
        if phase == "Failed":
            succeeded = _condition(status, "Succeeded")
            raise ClusterError(f"the training failed: {succeeded['reason']}: {succeeded['message']}")
        if phase == "Complete":
            return bool(_condition(status, "Better")["status"] == "True")
        time.sleep(_LOOK_S)
    raise ClusterError(f"the training is still {said} after {_TRAINING_DEADLINE_S} s")


def _condition(status: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(each for each in status["conditions"] if each["type"] == name)
    return found


def _serve_head(kubectl: Kubectl) -> str:
    """Wait until the engines serve the new head; return its acceptance."""
    with step("waiting until the engines serve the new head"):
        kubectl.wait(f"sdtr/{TRAINING}", "condition=Promoted", READY_DEADLINE_S)
        kubectl.wait(f"sdd/{DEPLOYMENT}", "condition=Ready", READY_DEADLINE_S)
    return _acceptance(kubectl)


if __name__ == "__main__":
    sys.exit(main())
