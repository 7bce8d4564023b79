#!/usr/bin/env bash
# Builds the source archives of both packages into the given folder, with the tools that wheel.sh installed.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(mkdir -p "${1:?usage: sdist.sh FOLDER}" && cd "$1" && pwd)
python=build/wheel/bin/python
[ -x "$python" ] || { echo "error: run scripts/wheel.sh first, which installs build" >&2; exit 1; }
rm -f "$out"/fissile-*.tar.gz "$out"/fissile_client-*.tar.gz
{ "$python" -m build --sdist --outdir "$out" protos && "$python" -m build --sdist --outdir "$out" .; } >build/sdist.log 2>&1 \
  || { echo "error: the build failed: $(tail -n 1 build/sdist.log) (the whole log: build/sdist.log)" >&2; exit 1; }
ls "$out"/fissile-*.tar.gz "$out"/fissile_client-*.tar.gz
