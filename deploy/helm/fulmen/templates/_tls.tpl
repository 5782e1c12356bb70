{{/* TLS: one kubernetes.io/tls Secret for each service, with `ca.crt`, as files that the service reads again. */}}

{{/* The Secret of a service; (dict "root" $ "component" "llm-proxy" "key" "llmProxy"). */}}
{{- define "fulmen.tls.secretName" -}}
{{- $made := printf "%s-%s-tls" (include "fulmen.fullname" .root) .component }}
{{- index .root.Values.tls.existingSecrets .key | default $made }}
{{- end }}

{{- define "fulmen.tls.env" -}}
{{- if .root.Values.tls.enabled }}
- {name: {{ .prefix }}TLS_CERTIFICATE_FILE, value: /etc/fulmen/tls/tls.crt}
- {name: {{ .prefix }}TLS_KEY_FILE, value: /etc/fulmen/tls/tls.key}
- {name: {{ .prefix }}TLS_CA_FILE, value: /etc/fulmen/tls/ca.crt}
# Replicas and processes of a service know one another by this name, not by the addresses of pods.
- {name: {{ .prefix }}TLS_OWN_NAME, value: {{ include "fulmen.host" (dict "root" .root "service" .component) }}}
{{- if .root.Values.tls.clientCertificates }}
- {name: {{ .prefix }}TLS_CLIENT_CA_FILE, value: /etc/fulmen/tls/ca.crt}
{{- end }}
{{- end }}
{{- end }}

{{- define "fulmen.tls.volume" -}}
{{- if .root.Values.tls.enabled }}
- name: tls
  secret:
    secretName: {{ include "fulmen.tls.secretName" . }}
    defaultMode: 0440
{{- end }}
{{- end }}

{{- define "fulmen.tls.mount" -}}
{{- if .root.Values.tls.enabled }}
- {name: tls, mountPath: /etc/fulmen/tls, readOnly: true}
{{- end }}
{{- end }}
