{{/* Secret that the operator's pods show the webhook's certificate from. */}}
{{- define "specdecode.webhookSecret" -}}
{{- .Values.webhook.certificate.secretName | default (printf "%s-webhook-certificate" (include "specdecode.name" .)) -}}
{{- end -}}

{{/* The Job that makes it: names of CronJobs have 52 characters at most. */}}
{{- define "specdecode.webhookJob" -}}
{{- $name := include "specdecode.name" . -}}
{{- if gt (len $name) 32 -}}
{{- $name = printf "%s-%s" ($name | trunc 23 | trimSuffix "-") ($name | sha256sum | trunc 8) -}}
{{- end -}}
{{- printf "%s-webhook-certificate" $name -}}
{{- end -}}

{{/* The spec of the Job that makes the certificate, or keeps it while it is good. */}}
{{- define "specdecode.webhookCertificateJob" -}}
{{- $name := include "specdecode.name" . -}}
backoffLimit: 5
activeDeadlineSeconds: 600
template:
  metadata:
    labels:
      # Must differ from the labels of the operator's pods, which the webhook's Service selects.
      app.kubernetes.io/name: {{ include "specdecode.webhookJob" . }}
      app.kubernetes.io/part-of: specdecode
      {{- with .Values.extraLabels }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    {{- with .Values.extraAnnotations }}
    annotations:
      {{- toYaml . | nindent 6 }}
    {{- end }}
  spec:
    serviceAccountName: {{ include "specdecode.webhookJob" . }}
    automountServiceAccountToken: true
    enableServiceLinks: false
    restartPolicy: Never
    {{- with .Values.imagePullSecrets }}
    imagePullSecrets:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- with .Values.nodeSelector }}
    nodeSelector:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- with .Values.tolerations }}
    tolerations:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    securityContext:
      runAsNonRoot: true
      runAsUser: 65532
      runAsGroup: 65532
      fsGroup: 65532
      seccompProfile:
        type: RuntimeDefault
    containers:
    - name: certificate
      image: {{ include "specdecode.image" . | quote }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      args:
      - webhook-certificate
      - --namespace={{ .Release.Namespace }}
      - --secret={{ include "specdecode.webhookSecret" . }}
      - --service={{ $name }}-webhook
      - --configuration={{ $name }}
      - --current=/etc/specdecode/webhook
      resources:
        requests: {cpu: 50m, memory: 64Mi}
        limits: {memory: 256Mi}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities:
          drop: [ALL]
      volumeMounts:
      - name: certificate
        mountPath: /etc/specdecode/webhook
        readOnly: true
    volumes:
    - name: certificate
      secret:
        secretName: {{ include "specdecode.webhookSecret" . }}
        optional: true
        defaultMode: 0440
{{- end -}}
