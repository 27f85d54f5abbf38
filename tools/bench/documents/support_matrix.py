"""Generate the table of docs/reference/supported.md: tested versions, and the test of each."""

import json
import re
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Final

import yaml

from devcluster.builds import binaries
from devcluster.cluster.nodes import PRODUCTS
from specdecode_operator.vllm.versions import LAUNCHED_VERSIONS
from tests.engine.engine_versions import NEWEST, SERVED
from tests.support.prometheus import OLDEST

ROOT: Final = Path(__file__).parents[3]
_Row = tuple[str, str, str, str]
_PATHS: Final = re.compile(r"`((?:tests|\.github|charts|operator)/[\w/.-]+)`")
TESTED, CONTRACT, CLAIMED = "tested", "contract", "claimed"
_LIBRARIES: Final = {
    "sigs.k8s.io/cli-utils": "kstatus",
    "github.com/fluxcd/pkg/runtime": "Flux, `healthCheckExprs`",
    "github.com/yuin/gopher-lua": "Argo CD, `health.lua`",
}
"""Go module of `tools/devcluster/tools/health`, and what it stands for."""

_MONITORS: Final = "github.com/prometheus-operator/prometheus-operator"
_KEDA: Final = "github.com/kedacore/keda/v2"
_GATEWAY_API: Final = "sigs.k8s.io/gateway-api"
_INFERENCE: Final = "sigs.k8s.io/gateway-api-inference-extension"
_GITOPS_ENGINE: Final = "github.com/argoproj/gitops-engine"
_CONFORMANCE: Final = "`tests/component/admission/test_conformance.py`"


def oldest_kubernetes() -> str:
    """Return the minor that the chart asks for at least."""
    chart = yaml.safe_load((ROOT / "charts/specdecode-operator/Chart.yaml").read_text())
    return str(chart["kubeVersion"]).removeprefix(">=").removesuffix(".0-0")


def support_matrix() -> str:
    """Return a row for each version of each platform component."""
    rows: list[_Row] = [("component", "version", "status", "test or check"), ("---",) * 4]
    for part in (_kubernetes(), _engines(), _gpus(), _tools()):
        rows += part
    return "".join(f"| {' | '.join(row)} |\n" for row in map(_linked, rows))


def _linked(row: _Row) -> _Row:
    return (*row[:3], _PATHS.sub(r"[`\1`](../../\1)", row[3]))


def _kubernetes() -> Iterator[_Row]:
    what, minors = "Kubernetes", [_minor(each) for each in binaries.KUBERNETES]
    doctor = "`specdecode doctor` warns (`operator/cli/doctor.py`)"
    yield what, f"1.{minors[0] + 1} and newer", "not tried", doctor
    for (minor, release), older in zip(binaries.KUBERNETES.items(), [*minors[1:], None], strict=True):
        pushed = "`tests/component`, `tests/e2e/fleet`, and with a kubelet `tests/e2e/serving`, on each push"
        parts = "`tests/component/operator`, `tests/component/admission`"
        nightly = f"{parts}, without nodes, every night (`.github/workflows/long.yml`)"
        yield what, release, TESTED, pushed if minor == binaries.USUAL else nightly
        if older and (between := [f"1.{each}" for each in range(_minor(minor) - 1, older, -1)]):
            yield what, ", ".join(between), CLAIMED, "between two tested versions"
    yield what, f"older than {oldest_kubernetes()}", "refused", "by Helm (`charts/specdecode-operator/Chart.yaml`)"


def _minor(version: str) -> int:
    return int(version.split(".")[1])


def _engines() -> Iterator[_Row]:
    what, newest, by = "vLLM", LAUNCHED_VERSIONS[-1], "[each method](engine-versions.md), `tests/engine`"
    yield what, f"newer than {newest}", CLAIMED, "uses the newest profile, with a larger margin and a condition"
    yield what, SERVED, TESTED, "on CPUs, `tests/e2e/serving` and `tests/engine`, on each push"
    if NEWEST != SERVED:
        yield what, NEWEST, CONTRACT, f"{by}, on each push"
    others = ", ".join(version for version in LAUNCHED_VERSIONS if version not in (SERVED, NEWEST))
    yield what, others, CONTRACT, f"{by}, every night"
    yield what, f"older than {LAUNCHED_VERSIONS[0]}", "refused", "by the field `spec.engine.version`"


def _gpus() -> Iterator[_Row]:
    simulated = {product.name for product in PRODUCTS.values()}
    devices = json.loads((ROOT / "operator/sizing/data/devices.json").read_text())["devices"]
    products = [str(device["product"]) for device in devices]
    yield "GPU", _listed(products, simulated), CONTRACT, "planned and scheduled on simulated nodes, `tests/e2e/fleet`"
    sized = "sized with the memory terms of H100; all except A100 (SXM) are uncalibrated"
    yield "GPU", _listed(products, {*products} - simulated), CLAIMED, sized
    yield "GPU", "none (CPUs)", TESTED, "for trials, with a real vLLM, `tests/e2e/serving`"


def _listed(products: Sequence[str], wanted: Container[str]) -> str:
    return ", ".join(f"`{product}`" for product in products if product in wanted)


def _tools() -> Iterator[_Row]:
    released = {group.name: group.version for group in binaries.GROUPS}
    yield "Helm", released["helm"], TESTED, "`tests/component/admission/test_helm_life.py`"
    groups = "its controller on simulated nodes, `tests/e2e/fleet/test_multi_node.py`"
    yield "LeaderWorkerSet", released["lws"], TESTED, groups
    debian = f"{OLDEST}, or a newer one on the test machine"
    yield "Prometheus", debian, TESTED, "`tests/component/admission/test_prometheus.py`"
    yield "Prometheus operator", _pinned("prometheus-operator")[_MONITORS], CONTRACT, f"its CRDs, {_CONFORMANCE}"
    routes = "its CRDs, without a gateway, `tests/component/operator/test_expose.py`"
    yield "Gateway API", _pinned("gateway-api")[_GATEWAY_API], CONTRACT, routes
    pools = "its CRDs, without an endpoint picker, `tests/component/operator/test_expose.py`"
    yield "Gateway API Inference Extension", _pinned("inference-extension")[_INFERENCE], CONTRACT, pools
    scaling = "`tests/component/operator/test_autoscaler.py`"
    adapter = "with Prometheus and a HorizontalPodAutoscaler, `./just demo-autoscale`"
    yield "prometheus-adapter", released["prometheus-adapter"], TESTED, adapter
    yield "KEDA", _pinned("keda")[_KEDA], CONTRACT, f"the CRD of ScaledObjects, without KEDA, {scaling}"
    libraries = _pinned("health")
    for module, name in _LIBRARIES.items():
        yield name, f"{libraries[module]} of `{module}`", CONTRACT, "`tests/component/admission/gitops`"
    argo = "its own diff and sync, `tests/component/admission/gitops/test_argo.py`, every night"
    yield "Argo CD, sync", f"{_pinned('argo')[_GITOPS_ENGINE]} of `{_GITOPS_ENGINE}`", CONTRACT, argo
    untested = "the operator or chart creates objects for them, but no test runs them"
    yield "Kueue, cert-manager", "any", CLAIMED, untested


def _pinned(tool: str) -> dict[str, str]:
    """Return the versions of what a Go module requires by itself."""
    text = (ROOT / "tools/devcluster/tools" / tool / "go.mod").read_text()
    return dict(re.findall(r"^(?:require |\t)(\S+) v(\S+)", text, re.MULTILINE))
