{{/* The prefix of all names: the release, with the chart's name unless it has it. */}}
{{- define "fissile.fullname" -}}
{{- $release := .Release.Name -}}
{{- (contains "fissile" $release | ternary $release (printf "%s-fissile" $release)) | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* Labels that select the Pods of a component: (list $ "router"). */}}
{{- define "fissile.selector" -}}
app.kubernetes.io/name: fissile
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* Name and labels of an object: (list $ "router"), or with another name: (list $ "router" "routers"). */}}
{{- define "fissile.metadata" -}}
{{- $root := index . 0 -}}
name: {{ include "fissile.fullname" $root }}-{{ last . }}
labels:
  {{- include "fissile.selector" (list $root (index . 1)) | nindent 2 }}
  app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
{{- end -}}

{{/* Image of a component: (list $ .Values.router.image). */}}
{{- define "fissile.image" -}}
{{- $root := index . 0 -}}{{- $image := index . 1 -}}
{{- with $root.Values.image.registry }}{{ . }}/{{ end -}}
{{ $image.repository }}:{{ $image.tag | default $root.Values.image.tag | default $root.Chart.AppVersion }}
{{- with $image.digest }}@{{ . }}{{ end -}}
{{- end -}}

{{/* A value as the command line takes it: whole numbers without an exponent, lists with blanks. */}}
{{- define "fissile.text" -}}
{{- if kindIs "float64" . -}}{{ if eq (floor .) . }}{{ int64 . }}{{ else }}{{ . }}{{ end }}
{{- else if kindIs "slice" . -}}{{ join " " . }}
{{- else -}}{{ . }}{{- end -}}
{{- end -}}

{{/* The options of a component as a map: (list $ "worker" own), where `own` are those that the chart sets. */}}
{{- define "fissile.options" -}}
{{- $root := index . 0 -}}{{- $component := index . 1 -}}{{- $own := index . 2 -}}
{{- $known := index ($root.Files.Get "files/options.json" | fromJson) $component -}}
{{- $given := (index $root.Values $component).options | default dict -}}
{{- $chart := list "config" "host" "port" "worker" "worker-id" "routers" "router-metrics" "admin-port" "admin-host" "metrics-port" "health-port" "scaler-port" "drain-timeout" "tls-cert" "tls-key" "tls-client-ca" "worker-ca" "worker-tls-name" "worker-client-cert" "worker-client-key" "router-identity" "router-ca" "router-tls-name" "router-client-cert" "router-client-key" "api-keys" "nnodes" "node-rank" "dist-init" "dist-secret" -}}
{{- range $name, $value := $given -}}
{{- if not (hasKey $known $name) -}}
{{- fail (printf "%s.options: %q is no option of `fissile %s` (docs/reference/options.md)" $component $name ($component | replace "facade" "http")) -}}
{{- end -}}
{{- if has $name $chart -}}
{{- fail (printf "%s.options: the chart sets %q itself" $component $name) -}}
{{- end -}}
{{- if and (has $name (list "dp-size" "dp-rank")) (ne (int $value) (eq $name "dp-size" | ternary 1 0)) -}}
{{- fail (printf "%s.options: the chart has no workers in lockstep (dp-size, dp-rank)" $component) -}}
{{- end -}}
{{- end -}}
{{- merge (dict) $own $given | toJson -}}
{{- end -}}

{{/* The same as environment variables of a container. */}}
{{- define "fissile.optionVariables" -}}
{{- $component := index . 1 -}}
{{- $known := index ((index . 0).Files.Get "files/options.json" | fromJson) $component -}}
{{- range $name, $value := include "fissile.options" . | fromJson }}
- {name: {{ index $known $name }}, value: {{ include "fissile.text" $value | quote }}}
{{- end -}}
{{- end -}}

{{/* The name of the model, for autoscaling. */}}
{{- define "fissile.model" -}}
{{- required "autoscaling needs the name of the model: worker.options.model-name" (index (.Values.worker.options | default dict) "model-name") -}}
{{- end -}}

{{/* Fields of a Pod that all components have: (list $ "router" groups). */}}
{{- define "fissile.pod" -}}
{{- $root := index . 0 -}}{{- $component := index . 1 -}}{{- $values := index $root.Values $component -}}
# Else a Service of the name `fissile` would set FISSILE_PORT, which is an option here, to tcp://...
enableServiceLinks: false
serviceAccountName: {{ include "fissile.fullname" $root }}-{{ $component }}
automountServiceAccountToken: false
{{- with $root.Values.priorityClass.name }}
priorityClassName: {{ . }}
{{- end }}
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - {name: {{ . }}}
  {{- end }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "fissile.selector" (list $root $component) | nindent 8 }}
{{- end -}}

{{- define "fissile.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
# So that the files of volumes and Secrets can be read and written.
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "fissile.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* Variables that all components have. */}}
{{- define "fissile.variables" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- {name: OTEL_RESOURCE_ATTRIBUTES, value: "k8s.pod.name=$(POD_NAME)"}
{{- with .Values.otlpEndpoint }}
- {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ . | quote }}}
{{- end -}}
{{- end -}}

{{/* A volume claim of the worker's cache. */}}
{{- define "fissile.claim" -}}
accessModes: [ReadWriteOnce]
{{- with .storageClass }}
storageClassName: {{ . }}
{{- end }}
resources: {requests: {storage: {{ .size }}}}
{{- end -}}

{{- define "fissile.annotations" -}}
prometheus.io/scrape: "true"
prometheus.io/port: "9464"
{{- end -}}
