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
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end -}}
