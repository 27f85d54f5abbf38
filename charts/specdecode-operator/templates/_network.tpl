{{/* Egress to whoever answers names: clusters have them in pods, on nodes and outside. */}}
{{- define "specdecode.dnsEgress" -}}
- ports:
  - {port: 53, protocol: UDP}
  - {port: 53, protocol: TCP}
{{- end -}}

{{/* Pods of one namespace that may be one engine together: leaders and those that compute for them. */}}
{{- define "specdecode.groupPeers" -}}
- podSelector:
    matchLabels: {app.kubernetes.io/managed-by: specdecode-operator}
    matchExpressions:
    - {key: specdecode.io/deployment, operator: Exists}
- podSelector:
    matchLabels: {app.kubernetes.io/managed-by: specdecode-operator}
    matchExpressions:
    - {key: specdecode.io/computes-for, operator: Exists}
{{- end -}}

{{/* Port of the collector of a live capture: PORT in operator/capture/live_capture.py. */}}
{{- define "specdecode.collectorPort" -}}
8470
{{- end -}}

{{/* Egress to the API server, of .Values.networkPolicy: it is no pod, and each cluster has it elsewhere. */}}
{{- define "specdecode.apiServerEgress" -}}
- ports:
  {{- range .apiServer.ports }}
  - {port: {{ . }}, protocol: TCP}
  {{- end }}
  to:
  {{- range .apiServer.cidrs }}
  - ipBlock: {cidr: {{ . | quote }}}
  {{- end }}
{{- end -}}
