{{- define "belljar.name" -}}
{{- printf "%s" (ternary .Release.Name (printf "%s-belljar" .Release.Name) (contains "belljar" .Release.Name)) | trunc 45 | trimSuffix "-" -}}
{{- end -}}

{{/* The headless Service, whose name has an address for every host. */}}
{{- define "belljar.hosts" -}}
{{ include "belljar.name" . }}-hosts
{{- end -}}

{{- define "belljar.secret" -}}
{{ .Values.existingSecret | default (include "belljar.name" .) }}
{{- end -}}

{{- define "belljar.selector" -}}
app.kubernetes.io/name: belljar
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "belljar.labels" -}}
{{ include "belljar.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{/* What the server and its doctor have in common. */}}
{{- define "belljar.container" -}}
image: "{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}"
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  runAsGroup: 1000
  allowPrivilegeEscalation: false
  capabilities: {drop: [ALL]}
  procMount: {{ .Values.procMount }}
  seccompProfile: {{- toYaml .Values.seccompProfile | nindent 4 }}
  appArmorProfile: {{- toYaml .Values.appArmorProfile | nindent 4 }}
env:
  - name: POD_IP
    valueFrom: {fieldRef: {fieldPath: status.podIP}}
  - {name: BELLJAR_HTTP, value: "0.0.0.0:8000"}
  # Prometheus asks at the pod's own address.
  - {name: BELLJAR_METRICS, value: open}
  - name: BELLJAR_ALLOWED_HOSTS
    value: {{ concat (list "$(POD_IP)" "localhost" (include "belljar.name" .) (printf "%s.%s" (include "belljar.name" .) .Release.Namespace) (printf "%s.%s.svc" (include "belljar.name" .) .Release.Namespace)) .Values.allowedHosts | join "," | quote }}
  - {name: BELLJAR_LOG_FORMAT, value: json}
  - {name: BELLJAR_SANDBOX, value: {{ .Values.sandbox | quote }}}
  - {name: BELLJAR_FLEET_PEERS, value: "dns:{{ include "belljar.hosts" . }}.{{ .Release.Namespace }}.svc:8100"}
  - {name: BELLJAR_FLEET_ADDRESS, value: "$(POD_IP):8100"}
  - name: BELLJAR_FLEET_KEY
    valueFrom: {secretKeyRef: {name: {{ include "belljar.secret" . }}, key: fleet-key}}
  - name: BELLJAR_API_KEYS
    valueFrom: {secretKeyRef: {name: {{ include "belljar.secret" . }}, key: api-keys, optional: true}}
  - name: BELLJAR_STORE_KEY
    valueFrom: {secretKeyRef: {name: {{ include "belljar.secret" . }}, key: store-key, optional: true}}
  {{- if .Values.publicUrl }}
  - {name: BELLJAR_PUBLIC_URL, value: {{ .Values.publicUrl | quote }}}
  {{- end }}
  {{- if .Values.tls.existingSecret }}
  - {name: BELLJAR_TLS_CERTIFICATE, value: /tls/tls.crt}
  - {name: BELLJAR_TLS_KEY, value: /tls/tls.key}
  {{- else }}
  - {name: BELLJAR_TRUST_NETWORK, value: "true"}
  {{- end }}
  {{- range $name, $value := .Values.settings }}
  - {name: {{ printf "BELLJAR_%s" (upper $name) }}, value: {{ ternary $value ($value | toJson) (kindIs "string" $value) | quote }}}
  {{- end }}
  {{- with .Values.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
volumeMounts:
  - {name: data, mountPath: /data}
  {{- if .Values.tls.existingSecret }}
  - {name: tls, mountPath: /tls, readOnly: true}
  {{- end }}
{{- end -}}

{{- define "belljar.probe" -}}
httpGet:
  path: {{ .path }}
  port: http
  scheme: {{ ternary "HTTP" "HTTPS" (empty .root.Values.tls.existingSecret) }}
{{- end -}}
