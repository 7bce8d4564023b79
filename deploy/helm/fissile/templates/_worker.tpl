{{/*
The Pod of a worker: (list $ role). The role is `worker` for a worker alone, and in a group `leader` for the Pod that
serves, `rank` for the others, which run ranks only.
*/}}
{{- define "fissile.workerPod" -}}
{{- $root := index . 0 -}}{{- $role := index . 1 -}}
{{- $values := $root.Values.worker -}}{{- $name := include "fissile.fullname" $root -}}
{{- $tls := and $root.Values.tls.enabled (ne $role "rank") -}}
{{- /* Ranks speak no gRPC beside health, and the kubelet's probes no TLS: health has a port of its own then. */ -}}
{{- $probed := or $tls (eq $role "rank") | ternary 50063 50061 -}}
{{- $own := dict "drain-timeout" (printf "%ds" (int $values.drainTimeoutSeconds)) -}}
{{- if ne $role "rank" -}}{{- $_ := set $own "metrics-port" 9464 -}}{{- end -}}
{{- if $tls -}}
{{- $_ := set $own "tls-cert" "/etc/fissile-tls/tls.crt" -}}
{{- $_ := set $own "tls-key" "/etc/fissile-tls/tls.key" -}}
{{- /* Only who has a certificate of this CA with the routers' name gets in. */ -}}
{{- $_ := set $own "tls-client-ca" "/etc/fissile-tls/ca.crt" -}}
{{- $_ := set $own "router-identity" (list (printf "%s-router" $name)) -}}
{{- end -}}
{{- if eq $probed 50063 -}}{{- $_ := set $own "health-port" 50063 -}}{{- end -}}
{{- if ne $role "worker" -}}{{- $_ := set $own "dist-secret" "/etc/fissile-ranks/secret" -}}{{- end -}}
metadata:
  labels: {{- include "fissile.selector" (list $root (eq $role "rank" | ternary "rank" "worker")) | nindent 4 }}
  {{- if ne $role "rank" }}
  annotations: {{- include "fissile.annotations" $root | nindent 4 }}
    {{- with $values.podAnnotations }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- end }}
spec:
  {{- include "fissile.pod" (list $root "worker") | nindent 2 }}
  {{- $tolerations := $values.tolerations }}
  {{- $resources := deepCopy $values.resources }}
  {{- if ne $values.gpu.vendor "none" }}
  {{- $gpu := printf "%s.com/gpu" $values.gpu.vendor }}
  {{- $tolerations = prepend $tolerations (dict "key" $gpu "operator" "Exists" "effect" "NoSchedule") }}
  {{- $count := dict $gpu (toString (int $values.gpu.count)) }}
  {{- $resources = mergeOverwrite (dict "requests" (dict) "limits" (dict)) $resources (dict "requests" $count "limits" $count) }}
  {{- end }}
  {{- with $tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  # SIGTERM drains at once: routers hear of it on their Sessions, not from DNS, so there is no preStop to wait in. What
  # other workers take over is gone in a second; what nobody takes has the drain timeout, and ten seconds to end.
  terminationGracePeriodSeconds: {{ add $values.drainTimeoutSeconds 10 }}
  securityContext: {{- include "fissile.podSecurity" $root | nindent 4 }}
    {{- if eq $values.gpu.vendor "amd" }}
    supplementalGroups: {{ toJson $values.gpu.supplementalGroups | replace "," ", " }}
    {{- end }}
  containers:
    - name: worker
      image: {{ include "fissile.workerImage" $root }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      args:
        - worker
        {{- if ne $role "worker" }}
        # Number of Pods, number of this Pod and the leader from LWS_GROUP_SIZE, LWS_WORKER_INDEX, LWS_LEADER_ADDRESS.
        - --nnodes=auto
        {{- end }}
      {{- if ne $role "rank" }}
      ports:
        - {name: grpc, containerPort: 50061}
        - {name: metrics, containerPort: 9464}
      {{- end }}
      env:
        {{- include "fissile.variables" $root | nindent 8 }}
        {{- if ne $role "rank" }}
        - name: FISSILE_WORKER_ID
          valueFrom: {fieldRef: {fieldPath: metadata.name}}
        {{- end }}
        {{- if eq $values.gpu.vendor "amd" }}
        # Kernels that the image has not prebuilt: compiled once, and kept with the models.
        - {name: AITER_JIT_DIR, value: /cache/aiter}
        {{- end }}
        {{- include "fissile.workerVariables" (list $root $role $own) | trim | nindent 8 }}
        {{- with $values.extraEnv }}{{ toYaml . | nindent 8 }}{{ end }}
      # Until the model is loaded and warm, a download included.
      startupProbe:
        grpc: {port: {{ $probed }}, service: readiness}
        periodSeconds: 5
        timeoutSeconds: 2
        failureThreshold: {{ div (add $values.loadTimeoutSeconds 4) 5 }}
      readinessProbe:
        grpc: {port: {{ $probed }}, service: readiness}
        periodSeconds: 5
        timeoutSeconds: 2
        failureThreshold: 2
      # A worker whose engine fails ends itself, so this is for a process that is stuck as a whole.
      livenessProbe:
        grpc: {port: {{ $probed }}, service: liveness}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 3
        terminationGracePeriodSeconds: 5
      resources: {{- toYaml $resources | nindent 8 }}
      securityContext: {{- include "fissile.containerSecurity" $root | nindent 8 }}
      volumeMounts:
        - {name: cache, mountPath: /cache}
        - {name: tmp, mountPath: /tmp}
        {{- if $values.models }}
        - {name: models, mountPath: /models, readOnly: true}
        {{- end }}
        {{- if ne $role "worker" }}
        - {name: shm, mountPath: /dev/shm}
        - {name: ranks, mountPath: /etc/fissile-ranks, readOnly: true}
        {{- end }}
        {{- if $tls }}
        - {name: tls, mountPath: /etc/fissile-tls, readOnly: true}
        {{- end }}
  volumes:
    {{- if eq $values.cache.kind "emptyDir" }}
    # Kubernetes evicts a Pod that writes more, before it fills its node's disk.
    - name: cache
      emptyDir: {sizeLimit: {{ $values.cache.size }}}
    {{- else if eq $values.cache.kind "hostPath" }}
    - name: cache
      hostPath: {path: {{ required "worker.cache.name: the folder on the node, for the kind hostPath" $values.cache.name }}, type: DirectoryOrCreate}
    {{- else if eq $values.cache.kind "existingClaim" }}
    - name: cache
      persistentVolumeClaim: {claimName: {{ required "worker.cache.name: the claim, for the kind existingClaim" $values.cache.name }}}
    {{- else if ne $role "worker" }}
    {{- fail "worker.cache.kind: volumeClaim is for worker.kind statefulSet; use emptyDir, hostPath or existingClaim" }}
    {{- end }}
    - name: tmp
      emptyDir: {sizeLimit: 1Gi}
    {{- with $values.models }}
    - name: models
      {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- if ne $role "worker" }}
    # Ranks of one Pod share buffers here; the default of 64 MiB is too small.
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: 2Gi}
    - name: ranks
      secret: {secretName: {{ $values.group.secret }}, defaultMode: 0440}
    {{- end }}
    {{- if $tls }}
    - name: tls
      secret: {secretName: {{ $root.Values.tls.workerSecret }}, defaultMode: 0440}
    {{- end }}
{{- end -}}

{{/* Image of workers: that of their GPUs' vendor, unless the values name another one. */}}
{{- define "fissile.workerImage" -}}
{{- $vendor := .Values.worker.gpu.vendor -}}{{- $given := .Values.worker.image.repository -}}
{{- $ours := get (dict "none" "fissile-worker-cpu" "amd" "fissile-worker-rocm" "nvidia" "fissile-worker-cuda") $vendor -}}
{{- if and (ne $vendor "none") (hasPrefix "fissile-worker-" $given) (ne $given $ours) -}}
{{- fail (printf "worker.gpu.vendor is %s, but worker.image.repository is %s: use %s" $vendor $given $ours) -}}
{{- end -}}
{{- include "fissile.image" (list . (merge (dict "repository" ($given | default $ours)) .Values.worker.image)) -}}
{{- end -}}

{{/* Options of a worker as variables. Pods of ranks get those alone that they take: the others come from the leader. */}}
{{- define "fissile.workerVariables" -}}
{{- $root := index . 0 -}}{{- $own := index . 2 -}}
{{- $known := index ($root.Files.Get "files/options.json" | fromJson) "worker" -}}
{{- $all := include "fissile.options" (list $root "worker" $own) | fromJson -}}
{{- $taken := list "model" "tp-size" "threads" "log-level" "drain-timeout" "health-port" "dist-secret" -}}
{{- range $option, $value := $all -}}
{{- if or (ne (index $ 1) "rank") (has $option $taken) }}
- {name: {{ index $known $option }}, value: {{ include "fissile.text" $value | quote }}}
{{- end -}}
{{- end -}}
{{- end -}}
