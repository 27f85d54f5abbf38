{{/* Generated of operator/cluster/rights.py: ./just docs */}}
{{- define "specdecode.rights.served" -}}
# Read SpecDecodeDeployments.
- apiGroups: [specdecode.io]
  resources: [specdecodedeployments]
  verbs: [list, watch]
# Write conditions, plan and what was observed.
- apiGroups: [specdecode.io]
  resources: [specdecodedeployments/status]
  verbs: [patch]
# Read captures; create, cancel (`spec.suspend`) and delete those of schedules and gates; delete those whose
# `ttlSecondsAfterFinished` is over.
- apiGroups: [specdecode.io]
  resources: [specdecodecaptures]
  verbs: [list, watch, create, patch, delete]
# Write phase, results and conditions of captures.
- apiGroups: [specdecode.io]
  resources: [specdecodecaptures/status]
  verbs: [patch]
# Keep plans, last good templates, facts about models and input of captures; read the dataset of a capture.
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get, list, watch, create, patch, delete]
# Create the Service in front of engines; it is deleted with its owner.
- apiGroups: [""]
  resources: [services]
  verbs: [get, list, watch, create, patch]
# Run engines.
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
# Run engines over several nodes, if this kind is installed.
- apiGroups: [leaderworkerset.x-k8s.io]
  resources: [leaderworkersets]
  verbs: [get, list, watch, create, patch, delete]
# Run captures, and read and download models.
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]
# Create the claims that captures write to; delete kept ones only by the retention of their schedule.
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get, list, watch, create, patch, delete]
# Keep several engines from being evicted at once.
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
# Read the state of engines and Jobs.
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
# Check by a dry run that the pod of a capture would be accepted before the capture borrows GPUs; no pod is created.
- apiGroups: [""]
  resources: [pods]
  verbs: [create]
# Restart an engine whose drafter decayed, if a policy asks for it.
- apiGroups: [""]
  resources: [pods/eviction]
  verbs: [create]
# Report changes and problems as Events.
- apiGroups: [""]
  resources: [events]
  verbs: [create]
{{- end -}}

{{- define "specdecode.rights.own" -}}
# Read the image of its own pod, which Jobs run.
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
{{- end -}}

{{- define "specdecode.rights.named" -}}
# Claim the namespace for this operator.
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [specdecode-serves]
  verbs: [get, patch]
{{- end -}}

{{- define "specdecode.rights.cluster" -}}
# Find namespaces that another operator has claimed.
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [specdecode-serves]
  verbs: [list]
# Read which GPUs the nodes have.
- apiGroups: [""]
  resources: [nodes]
  verbs: [list, watch]
# Check that the volume of a capture can be created before the capture borrows GPUs.
- apiGroups: [storage.k8s.io]
  resources: [storageclasses]
  verbs: [list]
# Notice kinds that are installed while it runs, and the version of its own CRDs.
- apiGroups: [apiextensions.k8s.io]
  resources: [customresourcedefinitions]
  verbs: [list, watch]
{{- end -}}
