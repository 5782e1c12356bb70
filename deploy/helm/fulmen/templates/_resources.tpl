{{/* What several services have. All take (dict "root" $ "component" NAME "values" VALUES), and what is named. */}}

{{- define "fulmen.databaseVolume" -}}
- name: database
  secret:
    secretName: {{ .Values.database.existingSecret }}
    defaultMode: 0440
    items:
      - {key: {{ .Values.database.key }}, path: url}
      {{- with .Values.database.caKey }}
      - {key: {{ . }}, path: ca.crt}
      {{- end }}
      {{- with .Values.database.standbyKey }}
      - {key: {{ . }}, path: standby-url}
      {{- end }}
{{- end }}

{{/* "ports": list of (list NAME NUMBER), or (list NAME NUMBER TARGET). */}}
{{- define "fulmen.service" -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ include "fulmen.fullname" .root }}-{{ .component }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "fulmen.labels" . | nindent 4 }}
  {{- with .values.service.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  type: {{ .values.service.type }}
  selector:
    {{- include "fulmen.selectorLabels" . | nindent 4 }}
  ports:
    {{- range .ports }}
    - {name: {{ first . }}, port: {{ index . 1 }}, targetPort: {{ len . | eq 3 | ternary (last .) (first .) }}}
    {{- end }}
{{- end }}

{{/* Names of single pods, which gRPC balances by itself. "early": also of those that do not serve yet, or no more. */}}
{{- define "fulmen.headlessService" -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ include "fulmen.fullname" .root }}-{{ .component }}-headless
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "fulmen.labels" . | nindent 4 }}
spec:
  clusterIP: None
  {{- if .early }}
  publishNotReadyAddresses: true
  {{- end }}
  selector:
    {{- include "fulmen.selectorLabels" . | nindent 4 }}
  ports:
    {{- range .ports }}
    - {name: {{ first . }}, port: {{ index . 1 }}, targetPort: {{ len . | eq 3 | ternary (last .) (first .) }}}
    {{- end }}
{{- end }}

{{- define "fulmen.disruptionBudget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "fulmen.fullname" .root }}-{{ .component }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "fulmen.labels" . | nindent 4 }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels:
      {{- include "fulmen.selectorLabels" . | nindent 6 }}
{{- end }}

{{/* "kind": of the workload, by default Deployment; "scaling": minReplicas and maxReplicas; "cpu": percent. */}}
{{- define "fulmen.autoscaler" -}}
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  name: {{ include "fulmen.fullname" .root }}-{{ .component }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "fulmen.labels" . | nindent 4 }}
spec:
  scaleTargetRef:
    apiVersion: apps/v1
    kind: {{ default "Deployment" .kind }}
    name: {{ include "fulmen.fullname" .root }}-{{ .component }}
  minReplicas: {{ .scaling.minReplicas }}
  maxReplicas: {{ .scaling.maxReplicas }}
  metrics:
    - type: Resource
      resource:
        name: cpu
        target: {type: Utilization, averageUtilization: {{ .cpu }}}
  behavior:
    scaleDown:
      stabilizationWindowSeconds: 300
      policies: [{type: Pods, value: 1, periodSeconds: 60}]
{{- end }}

{{/* "claim": its name; "storage": size and storageClassName. */}}
{{- define "fulmen.claim" -}}
- metadata:
    name: {{ .claim }}
    labels:
      {{- include "fulmen.selectorLabels" . | nindent 6 }}
  spec:
    accessModes: [ReadWriteOnce]
    {{- with .storage.storageClassName }}
    storageClassName: {{ . }}
    {{- end }}
    resources:
      requests: {storage: {{ .storage.size }}}
{{- end }}

{{/* "resources" with "count" GPUs called "name" among the limits, and so among the requests. */}}
{{- define "fulmen.gpuResources" -}}
{{- $resources := deepCopy .resources }}
{{- if gt (int .count) 0 }}
{{- $_ := set $resources "limits" (merge (dict .name (int .count)) (default dict $resources.limits)) }}
{{- end }}
{{- toYaml $resources }}
{{- end }}

{{/* Gives the component's service account the role of its name; "kind": Role or ClusterRole; "name"; "namespace" of a Role. */}}
{{- define "fulmen.roleBinding" -}}
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ .kind }}Binding
metadata:
  name: {{ .name }}
  {{- with .namespace }}
  namespace: {{ . }}
  {{- end }}
  labels:
    {{- include "fulmen.labels" . | nindent 4 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: {{ .kind }}
  name: {{ .name }}
subjects:
  - kind: ServiceAccount
    name: {{ include "fulmen.serviceAccountName" . }}
    namespace: {{ .root.Release.Namespace }}
{{- end }}
