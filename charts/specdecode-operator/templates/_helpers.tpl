{{/* Name of every object: the release's, with the chart's where it does not say it itself. */}}
{{- define "specdecode.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "specdecode.serviceAccountName" -}}
{{- .Values.serviceAccount.name | default (include "specdecode.name" .) -}}
{{- end -}}

{{- define "specdecode.selectorLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "specdecode.labels" -}}
{{ include "specdecode.selectorLabels" . }}
app.kubernetes.io/part-of: specdecode
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- with .Values.extraLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Labels of an object that has some of its own: (list ROOT OWN). */}}
{{- define "specdecode.labelsWith" -}}
{{- merge (dict) (index . 1) (include "specdecode.labels" (index . 0) | fromYaml) | toYaml -}}
{{- end -}}

{{/* Annotations of an object, if it has any: (list ROOT OWN); its own come before those that all have. */}}
{{- define "specdecode.annotations" -}}
{{- with merge (dict) (index . 1) (index . 0).Values.extraAnnotations -}}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end -}}
{{- end -}}

{{/* Fails without a repository: a checkout does not know where you pushed its image. */}}
{{- define "specdecode.image" -}}
{{- $image := .Values.image -}}
{{- if not $image.repository -}}
{{- fail "image.repository: not set, and no image is published yet; build one, push it, and add --set image.repository=REGISTRY/specdecode-operator (docs/install/install.md#from-a-checkout)" -}}
{{- end -}}
{{- if $image.digest -}}{{ $image.repository }}@{{ $image.digest }}{{- else -}}{{ $image.repository }}:{{ $image.tag | default .Chart.AppVersion }}{{- end -}}
{{- end -}}

{{/* Refuses an API server without ValidatingAdmissionPolicy: (list ROOT VALUE), VALUE being what would not be
held. Offline Helm knows no kinds, not even pods, and nothing is told. */}}
{{- define "specdecode.needsPolicies" -}}
{{- $served := (index . 0).Capabilities.APIVersions -}}
{{- if and ($served.Has "v1/Pod") (not ($served.Has "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy")) -}}
{{- fail (printf "%s: needs ValidatingAdmissionPolicy of admissionregistration.k8s.io/v1, which the API server does not serve: enable it there, or remove the value" (index . 1)) -}}
{{- end -}}
{{- end -}}

{{/* The fleet as a list of Nodes. */}}
{{- define "specdecode.fleet" -}}
{{- $nodes := list -}}
{{- range $node := .Values.fleet.nodes -}}
{{- range $number := until (int (default 1 $node.count)) -}}
{{- $metadata := dict "name" (printf "%s-%d" $node.name $number) "labels" (dict "nvidia.com/gpu.product" $node.product) -}}
{{- $status := dict "allocatable" (dict "nvidia.com/gpu" (toString $node.gpus)) -}}
{{- $nodes = append $nodes (dict "apiVersion" "v1" "kind" "Node" "metadata" $metadata "status" $status) -}}
{{- end -}}
{{- end -}}
{{- toJson (dict "apiVersion" "v1" "kind" "List" "items" $nodes) -}}
{{- end -}}

{{- define "specdecode.fleetName" -}}
{{- printf "%s-fleet-%s" (include "specdecode.name" .) (include "specdecode.fleet" . | sha256sum | trunc 8) -}}
{{- end -}}

{{- define "specdecode.factsName" -}}
{{- printf "%s-facts" (include "specdecode.name" .) -}}
{{- end -}}

{{/* Two operators for all namespaces would undo each other's work. Helm would say whose the binding is, and not why. */}}
{{- define "specdecode.refuseAnotherForAll" -}}
{{- with lookup "rbac.authorization.k8s.io/v1" "ClusterRoleBinding" "" .Chart.Name -}}
{{- $release := dig "annotations" "meta.helm.sh/release-name" "" .metadata -}}
{{- $namespace := (first .subjects).namespace -}}
{{- if or (ne $release $.Release.Name) (ne $namespace $.Release.Namespace) -}}
{{- fail (printf "the operator in namespace %s (%s) already serves all namespaces, and two operators would overwrite each other's changes: upgrade or remove that one" $namespace ($release | default "installed without Helm")) -}}
{{- end -}}
{{- end -}}
{{- end -}}
