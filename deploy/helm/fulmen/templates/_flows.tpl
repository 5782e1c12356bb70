{{/* Who talks to whom, by component; ARCHITECTURE.md has the picture. `ports` empty: all of them. `peers`: components
of the release; `outside`: others, by their names in networkpolicies.yaml; `extra`: key in extraEgress. */}}
{{- define "fulmen.flows" -}}
{{- $engines := printf "{port: 7310, endPort: %d}" (add 7309 .Values.algorithm.maxEngines) }}
{{- $joined := .Values.engines.enabled | ternary ", engine" "" }}
{{- $otlp := "7103" }}
{{- if eq (include "fulmen.agentsPort" .) "7104" }}{{ $otlp = "7103, 7104" }}{{ end }}
store:
  in:
    - {ports: [7101], peers: [store, llm-proxy, runner, algorithm, console, test{{ $joined }}], outside: [agents, clients, keda]}
    - {ports: [{{ $otlp }}], peers: [runner], outside: [agents, clients]}
    - {ports: [7102], outside: [prometheus]}
  out:
    - {ports: [7101], peers: [store]}
  database: true
  collector: true
  extra: store
migration:
  database: true
llm-proxy:
  in:
    - {ports: [7200], peers: [runner], outside: [agents, clients]}
    - {ports: [7201], peers: [runner, algorithm, console, test], outside: [clients]}
    - {ports: [7202], outside: [prometheus]}
  out:
    - {ports: [7101], peers: [store]}
    - {ports: [{{ $engines }}], peers: [algorithm]}
    {{- if .Values.engines.enabled }}
    - {ports: [7510], peers: [engine]}
    {{- end }}
  collector: true
  extra: llmProxy
{{- if .Values.runner.enabled }}
runner:
  in:
    - {ports: [7401], outside: [clients]}
    - {ports: [7402], outside: [prometheus]}
  out:
    - {ports: [7101, {{ $otlp }}], peers: [store]}
    - {ports: [7200, 7201], peers: [llm-proxy]}
  apiServer: {{ .Values.runner.jobs.enabled }}
  collector: true
  extra: runner
{{- end }}
{{- if .Values.algorithm.enabled }}
algorithm:
  in:
    - {ports: [7301], peers: [algorithm, console, test{{ $joined }}], outside: [clients]}
    - {ports: [{{ $engines }}], peers: [llm-proxy]}
    - {ports: [7302], outside: [prometheus]}
    {{- if .Values.algorithm.ranks.enabled }}
    - {ports: [7303], outside: [ranks]}
    {{- end }}
  out:
    - {ports: [7101], peers: [store]}
    - {ports: [7201], peers: [llm-proxy]}
    - {ports: [7301], peers: [algorithm]}
  apiServer: {{ and .Values.algorithm.ranks.enabled (ne .Values.algorithm.ranks.namespace "") }}
  collector: true
  extra: algorithm
{{- end }}
{{- if .Values.console.enabled }}
console:
  in:
    - {ports: [7500], outside: [clients]}
    - {ports: [7502], outside: [prometheus]}
  out:
    - {ports: [7101], peers: [store]}
    - {ports: [7201], peers: [llm-proxy]}
    {{- if .Values.algorithm.enabled }}
    - {ports: [7301], peers: [algorithm]}
    {{- end }}
  collector: true
  extra: console
{{- end }}
{{- if .Values.engines.enabled }}
engine:
  in:
    - {ports: [7510], peers: [llm-proxy]}
    - {ports: [7501], peers: [engine]}
    - {ports: [7502], outside: [prometheus]}
  out:
    - {ports: [7101], peers: [store]}
    - {ports: [7301], peers: [algorithm]}
    - {ports: [7501], peers: [engine]}
  collector: true
  extra: engines
{{- end }}
{{- if .Values.torchrun.enabled }}
torchrun:
  in:
    - {peers: [torchrun]}
  out:
    - {peers: [torchrun]}
  extra: torchrun
{{- end }}
test:
  out:
    - {ports: [7101], peers: [store]}
    - {ports: [7201], peers: [llm-proxy]}
    - {ports: [7301], peers: [algorithm]}
{{- end }}

{{/* A flow as a rule; "side": from or to. Nothing if all of its peers are outside and none is named in the values. */}}
{{- define "fulmen.rule" -}}
{{- $outside := list }}
{{- range .flow.outside }}{{ $outside = concat $outside (index $.outside .) }}{{ end }}
{{- if or .flow.peers $outside -}}
- {{ .side }}:
    {{- range .flow.peers }}
    - podSelector:
        matchLabels:
          {{- include "fulmen.selectorLabels" (dict "root" $.root "component" .) | nindent 10 }}
    {{- end }}
    {{- with $outside }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with .flow.ports }}
  ports:
    {{- range . }}
    - {{ kindIs "map" . | ternary . (dict "port" .) | toJson }}
    {{- end }}
  {{- end }}
{{- end }}
{{- end }}
