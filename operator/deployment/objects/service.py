"""The Service by which clients reach the engines."""

from specdecode_operator.api.base import Body
from specdecode_operator.api.key import Key
from specdecode_operator.deployment.objects.engine_pod import scheme
from specdecode_operator.deployment.spec.facts import Facts
from specdecode_operator.kube.labels import selector_labels
from specdecode_operator.kube.manifests import owned, render_template


def render_service(key: Key, uid: str, facts: Facts) -> Body:
    """Return the Service; of a group of pods it selects the leader alone, for workers have other labels."""
    values = {
        "name": key.name,
        "selector": selector_labels(key.name),
        "port": facts.spec.serving.port,
        "scheme": scheme(facts.spec),
    }
    return owned(render_template("service", values), key, uid)
