"""What kube-scheduler says of pods that no node takes, word for word (Kubernetes 1.34 unless said otherwise)."""

from typing import Final

UNMOUNTABLE: Final = (
    'persistentvolumeclaim "mine" not found',
    'persistentvolumeclaim "mine" bound to non-existent persistentvolume "pv"',
    "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims.",
    "0/3 nodes are available: 1 node(s) didn't match PersistentVolume's node affinity, 2 Insufficient nvidia.com/gpu.",
    # Until Kubernetes 1.33.
    "0/3 nodes are available: 1 node(s) had volume node affinity conflict, 2 Insufficient nvidia.com/gpu.",
    "0/3 nodes are available: 3 node(s) didn't find available persistent volumes to bind.",
    "0/3 nodes are available: 3 node(s) unavailable due to one or more pvc(s) bound to non-existent pv(s).",
    "0/3 nodes are available: 3 node(s) did not have enough free storage.",
    "0/3 nodes are available: 3 node(s) had no available volume zone.",
    "0/3 nodes are available: 3 node(s) exceed max volume count.",
    "0/3 nodes are available: 3 node(s) had no available disk.",
)
"""Of volumes that are not there, or are not where there is room."""

NO_ROOM: Final = (
    "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
    "0/3 nodes are available: 1 Insufficient ephemeral-storage, 2 node(s) didn't match Pod's node affinity/selector.",
    # The volume is on a node whose GPUs are in use: it is they that are waited for.
    "0/3 nodes are available: 1 Insufficient nvidia.com/gpu, 2 node(s) didn't satisfy plugin(s) [VolumeBinding].",
)
"""Of nodes that lack something else."""
