"""The pods of the engines that a capture runs, and the one pod in which those of all arms run."""

from collections.abc import Sequence

from specdecode_operator.api.base import Body
from specdecode_operator.capture.control.observation import CapturedDeployment
from specdecode_operator.deployment.objects.engine_pod import engine_pod
from specdecode_operator.deployment.spec.model_storage import COMPILE_CACHE_PATH, COMPILED_PATH
from specdecode_operator.deployment.spec.pod_template_merge import ENGINE_CONTAINER

_KEPT = (("--folder", COMPILED_PATH), ("--cache", COMPILE_CACHE_PATH))
"""Arguments of the script that starts engines with what earlier ones compiled, and their folders."""


def engine_pod_of(source: CapturedDeployment) -> Body:
    """Return the pod that the deployment's engine runs in."""
    return engine_pod(source.key, source.launch.facts, source.launch.plan)


def engine_container(pod: Body) -> Body:
    """Return the engine's container of a pod."""
    (engine,) = (each for each in pod["spec"]["containers"] if each["name"] == ENGINE_CONTAINER)
    return dict(engine)


def plain_command(pod: Body) -> list[str]:
    """Return an engine's command as it is run, after Kubernetes has put in what stands for other things."""
    return [argument.replace("$$", "$") for argument in engine_container(pod)["command"]]


def command_of(source: CapturedDeployment) -> tuple[str, ...]:
    """Return what is run for an engine."""
    return tuple(plain_command(engine_pod_of(source)))


def common_engine_pod(pods: Sequence[Body]) -> Body:
    """Return the first arm's pod with what the others need, too; of the engine's variables what all have alike.

    All pods are of one deployment: they differ in the draft that they download, in where they keep what they compile,
    and in the engine's command and variables.
    """
    engines = [engine_container(pod) for pod in pods]
    env = [each for each in engines[0]["env"] if all(each in other["env"] for other in engines)]
    mounts = [mount for engine in engines for mount in engine.get("volumeMounts") or []]
    shared = {**engines[0], "env": env, "volumeMounts": _each_once(mounts)}
    first = pods[0]["spec"]
    others = [each for each in first["containers"] if each["name"] != ENGINE_CONTAINER]
    volumes = _each_once([volume for pod in pods for volume in pod["spec"].get("volumes") or []])
    downloads = _each_once([each for pod in pods for each in pod["spec"].get("initContainers") or []])
    spec = {**first, "containers": [shared, *others], "volumes": volumes, "initContainers": _with_own_names(downloads)}
    return {**pods[0], "spec": spec}


def apart(pod: Body, number: int) -> Body:
    """Return an arm's pod that keeps what it compiles, and the start-up plan in it, where no other arm finds it."""
    if number == 0:
        return pod
    own = {path: f"{path}-{number}" for path in (COMPILED_PATH, COMPILE_CACHE_PATH)}
    flags = {f"{flag}={path}": f"{flag}={own[path]}" for flag, path in _KEPT}
    engine = engine_container(pod)
    mounts = [{**each, "mountPath": own.get(each["mountPath"], each["mountPath"])} for each in engine["volumeMounts"]]
    changed = {
        **engine,
        "command": [flags.get(argument, argument) for argument in engine["command"]],
        "volumeMounts": mounts,
    }
    containers = [changed if each["name"] == ENGINE_CONTAINER else each for each in pod["spec"]["containers"]]
    return {**pod, "spec": {**pod["spec"], "containers": containers}}


def literals(engine: Body, *, beside: Body) -> dict[str, str]:
    """Return the variables of an engine that its container does not have."""
    own = [each for each in engine["env"] if each not in beside["env"]]
    return {each["name"]: each["value"].replace("$$", "$") for each in own}


def _each_once(items: Sequence[Body]) -> list[Body]:
    return [each for index, each in enumerate(items) if each not in items[:index]]


def _with_own_names(containers: Sequence[Body]) -> list[Body]:
    """Return init containers of which some have one name: the drafts of several arms are downloaded one by one."""
    names = [each["name"] for each in containers]
    return [
        {**each, "name": f"{name}-{names[:index].count(name) + 1}"} if name in names[:index] else each
        for index, (name, each) in enumerate(zip(names, containers, strict=True))
    ]
