{{/* Names, labels and what pods have in common. Helpers of a component take (dict "root" $ "component" NAME). */}}

{{- define "fulmen.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 36 | trimSuffix "-" }}
{{- end }}

{{/* At most 36 characters, so that `-algorithm-headless` and a pod's number fit behind it. */}}
{{- define "fulmen.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 36 | trimSuffix "-" }}
{{- else if contains (include "fulmen.name" .) .Release.Name }}
{{- .Release.Name | trunc 36 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "fulmen.name" .) | trunc 36 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "fulmen.selectorLabels" -}}
app.kubernetes.io/name: {{ include "fulmen.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "fulmen.labels" -}}
{{ include "fulmen.selectorLabels" . }}
app.kubernetes.io/part-of: fulmen
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Metadata of pods: nothing that changes with the chart's version alone, which would restart them all. */}}
{{- define "fulmen.podMetadata" -}}
labels:
  {{- include "fulmen.selectorLabels" . | nindent 2 }}
  {{- with .root.Values.commonLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .values.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "fulmen.image" -}}
{{- $image := .root.Values.image }}
{{- $path := .image.repository }}
{{- with $image.registry }}{{ $path = printf "%s/%s" . $path }}{{ end }}
{{- printf "%s:%s" $path (.image.tag | default $image.tag | default .root.Chart.AppVersion) }}
{{- end }}

{{/* Everything of a pod's spec that does not depend on the service. */}}
{{- define "fulmen.podSpec" -}}
# Without this the cluster would set FULMEN_STORE_PORT and the like, which the services take for settings.
enableServiceLinks: false
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext:
  {{- include "fulmen.podSecurity" . | nindent 2 }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{- define "fulmen.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "fulmen.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
readOnlyRootFilesystem: true
{{- end }}

{{- define "fulmen.spread" -}}
topologySpreadConstraints:
  {{- $labels := include "fulmen.selectorLabels" . }}
  {{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- $labels | nindent 8 }}
  {{- end }}
{{- end }}

{{/* Liveness restarts what does not answer for ten seconds, readiness takes out what cannot serve. */}}
{{- define "fulmen.probes" -}}
startupProbe:
  httpGet: {path: /healthz, port: metrics}
  periodSeconds: 2
  failureThreshold: {{ .startFailures | default 60 }}
livenessProbe:
  httpGet: {path: /healthz, port: metrics}
  periodSeconds: 2
  timeoutSeconds: 4
  failureThreshold: 2
readinessProbe:
  httpGet: {path: /readyz, port: metrics}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
{{- end }}

{{/* Settings of a service as variables. Numbers go through JSON: Helm by itself writes large ones as 6.7e+07. */}}
{{- define "fulmen.settings" -}}
{{- $prefix := .prefix }}
{{- with .root.Values.collector.endpoint }}
- {name: {{ $prefix }}OTLP_ENDPOINT, value: {{ . | quote }}}
{{- end }}
{{- range $name, $value := .values.settings }}
- name: {{ $prefix }}{{ $name }}
  value: {{ if kindIs "string" $value }}{{ $value | quote }}{{ else }}{{ toJson $value | quote }}{{ end }}
{{- end }}
{{- end }}

{{/* Where a service is in the cluster: (dict "root" $ "service" "store-headless"). */}}
{{- define "fulmen.host" -}}
{{ include "fulmen.fullname" .root }}-{{ .service }}.{{ .root.Release.Namespace }}.svc
{{- end }}

{{/* The gRPC addresses of all proxies, with commas: each has captures that are asked of no other. */}}
{{- define "fulmen.proxies" -}}
{{- $pods := include "fulmen.host" (dict "root" $ "service" "llm-proxy-headless") }}
{{- $name := printf "%s-llm-proxy" (include "fulmen.fullname" .) }}
{{- $scaling := .Values.llmProxy.autoscaling }}
{{- range $index := until (int (ternary $scaling.minReplicas .Values.llmProxy.replicas $scaling.enabled)) }}
{{- if $index }},{{ end }}{{ printf "%s-%d.%s:7201" $name $index $pods }}
{{- end }}
{{- end }}

{{- define "fulmen.scheme" -}}
{{ ternary "https" "http" .Values.tls.enabled }}
{{- end }}

{{/* Where agents send spans by gRPC: another port if the usual one asks for certificates, which agents lack. */}}
{{- define "fulmen.agentsPort" -}}
{{ ternary "7104" "7101" (and .Values.tls.enabled .Values.tls.clientCertificates) }}
{{- end }}

{{/* Keys of the release's Secret as files; (dict "root" $ "keys" (list ...)). */}}
{{- define "fulmen.secretsVolume" -}}
- name: secrets
  secret:
    secretName: {{ .root.Values.secrets.existingSecret }}
    defaultMode: 0440
    items:
      {{- range .keys }}
      - {key: {{ . }}, path: {{ . }}}
      {{- end }}
{{- end }}

{{- define "fulmen.secretsMount" -}}
- {name: secrets, mountPath: /etc/fulmen/secrets, readOnly: true}
{{- end }}

{{- define "fulmen.serviceAccountName" -}}
{{ include "fulmen.fullname" .root }}-{{ .component }}
{{- end }}
