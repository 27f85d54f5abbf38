{{/* Generated of operator/kube/rights.py: ./just docs */}}
{{- define "specdecode.rights.served" -}}
# What people ask for.
- apiGroups: [specdecode.io]
  resources: [specdecodedeployments]
  verbs: [list, watch]
# What came of it.
- apiGroups: [specdecode.io]
  resources: [specdecodedeployments/status]
  verbs: [patch]
# Captures; those of schedules and gates are made, cancelled (`spec.suspend`) and deleted, and those whose
# `ttlSecondsAfterFinished` is over.
- apiGroups: [specdecode.io]
  resources: [specdecodecaptures]
  verbs: [list, watch, create, patch, delete]
# What came of them.
- apiGroups: [specdecode.io]
  resources: [specdecodecaptures/status]
  verbs: [patch]
# Plan, last good template, facts of models, what captures need; a capture's dataset.
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get, list, watch, create, patch, delete]
# How engines are reached; each goes with its object.
- apiGroups: [""]
  resources: [services]
  verbs: [get, list, watch, create, patch]
# Engines.
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
# Engines over several nodes, where this kind exists.
- apiGroups: [leaderworkerset.x-k8s.io]
  resources: [leaderworkersets]
  verbs: [get, list, watch, create, patch, delete]
# Captures, and reading and downloading of models.
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]
# What captures write to; a kept one is deleted by the retention of its schedule alone.
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get, list, watch, create, patch, delete]
# Of several engines not all are evicted at once.
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
# How engines and Jobs are.
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
# Whether the pod of a capture would be accepted, asked as a dry run before the capture borrows GPUs; it makes none.
- apiGroups: [""]
  resources: [pods]
  verbs: [create]
# A policy may start an engine anew whose drafter decayed.
- apiGroups: [""]
  resources: [pods/eviction]
  verbs: [create]
# What it tells people.
- apiGroups: [""]
  resources: [events]
  verbs: [create]
{{- end -}}

{{- define "specdecode.rights.own" -}}
# Its own pod names the image that captures run.
- apiGroups: [""]
  resources: [pods]
  verbs: [get]
# The Lease of the replica that works, once.
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
# Who works, and that it does.
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [{{ include "specdecode.name" . }}]
  verbs: [get, patch]
{{- end -}}

{{- define "specdecode.rights.named" -}}
# That it serves this namespace.
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [specdecode-serves]
  verbs: [get, patch]
{{- end -}}

{{- define "specdecode.rights.cluster" -}}
# Who serves single namespaces.
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [specdecode-serves]
  verbs: [list]
# Which GPUs there are.
- apiGroups: [""]
  resources: [nodes]
  verbs: [list, watch]
# Whether the volume of a capture would be there before the capture borrows GPUs.
- apiGroups: [storage.k8s.io]
  resources: [storageclasses]
  verbs: [list]
# Kinds that are installed while it runs, and of which version ours are.
- apiGroups: [apiextensions.k8s.io]
  resources: [customresourcedefinitions]
  verbs: [list, watch]
{{- end -}}
