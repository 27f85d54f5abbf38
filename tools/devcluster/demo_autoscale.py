"""Play a day of load against replayed engines that an autoscaler scales: `./just demo-autoscale`.

A cluster with Prometheus, prometheus-adapter and Kubernetes' own controller of HorizontalPodAutoscalers. The engines
queue and slow down as recorded ones, and take some time to start. An hour of the day takes half a minute.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any

import aiohttp
import yaml

from devcluster.autoscale_day import HOURS, Day, Request, Sample, arrivals
from devcluster.builds import binaries
from devcluster.cluster import metrics
from devcluster.cluster.cluster import Cluster
from devcluster.cluster.kubectl import Kubectl
from devcluster.cluster.settings import Settings
from devcluster.demo_replay import SPECDECODE
from devcluster.host import packages
from devcluster.host.errors import ClusterError
from devcluster.host.paths import REPOSITORY
from devcluster.host.progress import say, step
from devcluster.images.operator_image import build_operator_image
from devcluster.install import install_operator, load_operator_image

NAME, DEPLOYMENT, RECORDING = "autoscale", "day", "day-recording"
PICTURE = REPOSITORY / "docs/pictures/autoscaling.svg"
RULES = REPOSITORY / "examples/autoscaling/prometheus-adapter.yaml"
ENGINE_REQUESTS, TARGET, MOST = 8, 5, 5
TOKENS, SLO_S = 100, 2.0
START_S, SLOWER_PERCENT = 10, 1000
_READY_DEADLINE_S = 180
_REQUEST_DEADLINE_S = 120
_LOOK_S = 0.5
Body = dict[str, Any]


def main() -> int:
    """Run the demo and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m devcluster.demo_autoscale", description=__doc__)
    parser.add_argument("--name", default=NAME, help="name of the cluster (default: %(default)s)")
    parser.add_argument("--metric", default="RunningRequests", help="spec.autoscaling.metric (default: %(default)s)")
    parser.add_argument("--target", type=int, default=TARGET, help="spec.autoscaling.target (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=12, help="duration of the day (default: %(default)s)")
    parser.add_argument("--picture", type=Path, default=PICTURE, help="file to write (default: %(default)s)")
    parser.add_argument("--keep", action="store_true", help="keep the cluster")
    asked = parser.parse_args()
    cluster = Cluster(asked.name)
    try:
        build_operator_image()
        programs = binaries.find("prometheus-adapter")
        packages.ensure(("prometheus",))
        cluster.up("real")
        load_operator_image(cluster)
        kubectl = Kubectl(cluster.kubeconfig)
        install_operator(kubectl)
        add_metrics(cluster, kubectl, programs["prometheus-adapter"])
        deploy(kubectl, {"metric": asked.metric, "target": asked.target})
        day = play(cluster, kubectl, hour_s=asked.minutes * 60 / HOURS, target=TARGET)
        day.draw(asked.picture)
    except ClusterError as error:
        say(f"error: {error}")
        say("what happened: ./just cluster-logs, and kubectl describe with the kubeconfig named above")
        return 1
    for name, value in day.figures().rows():
        print(f"| {name} | {value} |")
    print(f"The picture: {asked.picture}")
    if not asked.keep:
        cluster.down()
    return 0


def add_metrics(cluster: Cluster, kubectl: Kubectl, adapter: Path, every: str = "1s") -> None:
    """Start Prometheus and the adapter beside the cluster, and wait until the API server asks the adapter."""
    settings = Settings.load(cluster.state)
    assert settings is not None
    with step("starting Prometheus and prometheus-adapter"):
        metrics.write_files(cluster.state, RULES, every)
        program = Path(packages.which("prometheus") or "")
        commands = {
            "prometheus": metrics.prometheus(program, cluster.state),
            "metrics-adapter": metrics.adapter(adapter, cluster.state, every),
        }
        for component, command in commands.items():
            if cluster.component_pid(component) is None:
                cluster.start_beside(component, command)
        bodies = metrics.objects(cluster.state, settings.api_address)
        monitoring = kubectl.within(metrics.NAMESPACE)
        monitoring.must("apply", "--server-side", "--filename=-", stdin=yaml.safe_dump_all(bodies))
        for group in ("custom.metrics.k8s.io", "external.metrics.k8s.io"):
            kubectl.wait(f"apiservice/v1beta1.{group}", "condition=Available", _READY_DEADLINE_S)


def deploy(kubectl: Kubectl, autoscaling: Body) -> None:
    """Deploy the engines of the day with an autoscaler, and wait until the first one serves."""
    with tempfile.TemporaryDirectory(prefix="specdecode-day-") as scratch:
        made = Path(scratch) / "made"
        loads = [f"--arrivals=closed:{clients}" for clients in (1, 4, 8, 16)]
        lengths = ("--prompt-tokens=512", f"--output-tokens={TOKENS}", f"--max-num-seqs={ENGINE_REQUESTS}")
        command: list[str] = [str(SPECDECODE), "replay", "synth", f"--out={made}", "--requests=24", *loads, *lengths]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ClusterError(f"specdecode replay synth: {done.stderr.strip()}")
        recording = {"trace.jsonl": (made / "trace.jsonl").read_text()}
    example = list(yaml.safe_load_all((REPOSITORY / "examples/replay.yaml").read_text()))[-1]
    example["metadata"]["name"] = DEPLOYMENT
    example["spec"]["serving"] |= {"maxNumSeqs": ENGINE_REQUESTS}
    example["spec"]["engine"]["replay"] = {
        "mode": "Modelled",
        "trace": {"configMap": {"name": RECORDING}, "path": "trace.jsonl"},
        "timeScalePercent": SLOWER_PERCENT,
        "failures": {"startSeconds": START_S},
    }
    example["spec"]["autoscaling"] = {
        "minReplicas": 1,
        "maxReplicas": MOST,
        "scaleDownStabilizationSeconds": 30,
        **autoscaling,
    }
    data = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": RECORDING}, "data": recording}
    with step("deploying replayed engines with an autoscaler"):
        kubectl.must("apply", "--server-side", "--filename=-", stdin=yaml.safe_dump_all([data, example]))
        kubectl.wait(f"sdd/{DEPLOYMENT}", "condition=Available", _READY_DEADLINE_S)


@dataclass
class Watch:
    """Looks at the engines twice a second, keeps the targets of Prometheus up to date, and samples the replicas."""

    cluster: Cluster
    namespace: str = "default"
    hour_s: float = 0.0
    begun_s: float = 0.0
    samples: list[Sample] = field(default_factory=list)
    _ended: Event = field(default_factory=Event)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Look while the block runs."""
        thread = Thread(target=self._look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def _look(self) -> None:
        api = self.cluster.api()
        while not self._ended.wait(_LOOK_S):
            pods = api.get(
                f"/api/v1/namespaces/{self.namespace}/pods?labelSelector=specdecode.io/deployment%3D{DEPLOYMENT}"
            )
            spec = api.get(
                f"/apis/specdecode.io/v1alpha1/namespaces/{self.namespace}/specdecodedeployments/{DEPLOYMENT}"
            )["spec"]
            ready = {
                f"{pod['status']['podIP']}:8000": pod["metadata"]["name"]
                for pod in pods["items"]
                if any(
                    each["type"] == "Ready" and each["status"] == "True" for each in pod["status"].get("conditions", [])
                )
            }
            labels = {"namespace": self.namespace, "specdecode_deployment": DEPLOYMENT}
            metrics.write_targets(
                self.cluster.state, {address: {**labels, "pod": pod} for address, pod in ready.items()}
            )
            if self.begun_s:
                hour = (time.monotonic() - self.begun_s) / self.hour_s
                self.samples.append(Sample(hour, spec["replicas"], len(ready)))


def play(cluster: Cluster, kubectl: Kubectl, *, hour_s: float, target: int) -> Day:
    """Send the requests of a day, and return what came of them."""
    url = f"http://{kubectl.service_address(DEPLOYMENT)}/v1/completions"
    watch = Watch(cluster, kubectl.namespace, hour_s)
    with watch.running():
        with step("waiting until the autoscaler has metrics"):
            kubectl.wait(f"sdd/{DEPLOYMENT}", "condition=Autoscaled", _READY_DEADLINE_S)
        with step(f"playing a day of load in {HOURS * hour_s / 60:.0f} minutes"):
            watch.begun_s = time.monotonic()
            requests = asyncio.run(_send(url, arrivals(hour_s), watch.begun_s, hour_s))
    return Day(requests, watch.samples, target, MOST, SLO_S)


async def _send(url: str, hours: list[float], begun_s: float, hour_s: float) -> list[Request]:
    timeout = aiohttp.ClientTimeout(total=_REQUEST_DEADLINE_S)
    # A connection per request, because kube-proxy balances connections.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with (
        aiohttp.ClientSession(timeout=timeout, connector=connector, trust_env=False) as session,
        asyncio.TaskGroup() as group,
    ):
        tasks = []
        for hour in hours:
            await asyncio.sleep(begun_s + hour * hour_s - time.monotonic())
            tasks.append(group.create_task(_ask(session, url, hour)))
    return [task.result() for task in tasks]


async def _ask(session: aiohttp.ClientSession, url: str, hour: float) -> Request:
    body = {
        "model": "llama-70b",
        "prompt": "Once upon a time",
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": True,
    }
    sent_s, first_s = time.monotonic(), None
    try:
        async with session.post(url, json=body) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                if first_s is None and line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["text"]:
                    first_s = time.monotonic() - sent_s
    except (aiohttp.ClientError, TimeoutError):
        return Request(hour, time.monotonic() - sent_s)
    return Request(hour, time.monotonic() - sent_s, first_s, TOKENS)


if __name__ == "__main__":
    sys.exit(main())
