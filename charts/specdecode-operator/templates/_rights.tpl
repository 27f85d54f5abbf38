{{/* Generated from operator/cluster/rights.py by ./just docs */}}
{{- define "specdecode.rights.served" -}}
# Read SpecDecodeDeployments.
- apiGroups: [specdecode.io]
  resources: [specdecodedeployments]
  verbs: [list, watch]
# Write conditions, the plan and observations.
- apiGroups: [specdecode.io]
  resources: [specdecodedeployments/status]
  verbs: [patch]
# Read captures; create, cancel (`spec.suspend`) and delete captures of schedules, gates and trainings; delete captures
# after `ttlSecondsAfterFinished`.
- apiGroups: [specdecode.io]
  resources: [specdecodecaptures]
  verbs: [list, watch, create, patch, delete]
# Write phase, results and conditions of captures.
- apiGroups: [specdecode.io]
  resources: [specdecodecaptures/status]
  verbs: [patch]
# Read trainings; create and delete trainings of schedules.
- apiGroups: [specdecode.io]
  resources: [specdecodetrainings]
  verbs: [list, watch, create, delete]
# Write phase, results and conditions of trainings.
- apiGroups: [specdecode.io]
  resources: [specdecodetrainings/status]
  verbs: [patch]
# Store plans, last good templates, model facts, the recorder and the input of captures; read the dataset of a capture
# or a training.
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get, list, watch, create, patch, delete]
# Create the Service of the engines; Kubernetes deletes it with its owner.
- apiGroups: [""]
  resources: [services]
  verbs: [get, list, watch, create, patch]
# Run engines.
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
# Run engines on several nodes, if LeaderWorkerSet is installed.
- apiGroups: [leaderworkerset.x-k8s.io]
  resources: [leaderworkersets]
  verbs: [get, list, watch, create, patch, delete]
# Route requests from a Gateway to the engines, if the Gateway API is installed and `expose.httpRoute` is set.
- apiGroups: [gateway.networking.k8s.io]
  resources: [httproutes]
  verbs: [get, list, watch, create, patch, delete]
# Claim the GPUs of engines, captures and trainings, if `accelerator.resourceClaim` is set.
- apiGroups: [resource.k8s.io]
  resources: [resourceclaimtemplates]
  verbs: [get, list, watch, create, patch, delete]
# Let the number of engines follow the load, if `autoscaling` is set.
- apiGroups: [autoscaling]
  resources: [horizontalpodautoscalers]
  verbs: [get, list, watch, create, patch, delete]
# Let KEDA do so, if KEDA is installed and `autoscaling.keda` is set.
- apiGroups: [keda.sh]
  resources: [scaledobjects]
  verbs: [get, list, watch, create, patch, delete]
# Let an endpoint picker choose the engine of a request, if the Gateway API Inference Extension is installed and
# `expose.inferencePool` is set.
- apiGroups: [inference.networking.k8s.io]
  resources: [inferencepools]
  verbs: [get, list, watch, create, patch, delete]
# Run captures and trainings; read and download models.
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]
# Create claims for the files of captures and trainings; delete kept claims only by the retention of their schedule.
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get, list, watch, create, patch, delete]
# Limit how many engines are evicted at the same time.
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
# Read the state of engines and Jobs.
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
# Check with a dry run that the pod of a capture is accepted before the capture borrows GPUs; detect with a dry run
# whether image volumes are supported; no pod is created.
- apiGroups: [""]
  resources: [pods]
  verbs: [create]
# Restart an engine whose acceptance has decayed, if a policy allows it.
- apiGroups: [""]
  resources: [pods/eviction]
  verbs: [create]
# Report changes and problems as Events.
- apiGroups: [""]
  resources: [events]
  verbs: [create]
{{- end -}}

{{- define "specdecode.rights.own" -}}
# Read the image of its own pod, to use it for Jobs.
- apiGroups: [""]
  resources: [pods]
  verbs: [get]
# Create the Lease for leader election.
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
# Take and renew the Lease for leader election.
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [{{ include "specdecode.name" . }}]
  verbs: [get, patch]
# Store a snapshot for the next start; server-side apply sends the name, so `create` is limited to it.
- apiGroups: [""]
  resources: [configmaps]
  resourceNames: [{{ include "specdecode.name" . }}-snapshot]
  verbs: [get, create, patch]
{{- end -}}

{{- define "specdecode.rights.named" -}}
# Claim the namespace for this operator.
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [specdecode-serves]
  verbs: [get, patch]
{{- end -}}

{{- define "specdecode.rights.cluster" -}}
# Find namespaces that other operators have claimed.
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [specdecode-serves]
  verbs: [list]
# Read the GPUs of the nodes.
- apiGroups: [""]
  resources: [nodes]
  verbs: [list, watch]
# Read product and memory of the GPUs that engines may claim, if an object sets `accelerator.resourceClaim`.
- apiGroups: [resource.k8s.io]
  resources: [resourceslices]
  verbs: [list]
# Read which GPUs belong to the class in `accelerator.resourceClaim`.
- apiGroups: [resource.k8s.io]
  resources: [deviceclasses]
  verbs: [list]
# Check that the volume of a capture can be created before the capture borrows GPUs.
- apiGroups: [storage.k8s.io]
  resources: [storageclasses]
  verbs: [list]
# Detect kinds that are installed later; read the version of its own CRDs.
- apiGroups: [apiextensions.k8s.io]
  resources: [customresourcedefinitions]
  verbs: [list, watch]
{{- end -}}
