#!/usr/bin/env bash
# Makes the Python stubs of protos/**/*.proto into the given folder (protos itself, or a scratch folder to compare with).
# The pinned generator is older than the runtime: stubs load on the generator's own protobuf and anything newer.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
out=$(mkdir -p "${1:?usage: protos.sh FOLDER}" && cd "$1" && pwd)
bin=$root/.venv-protos/bin
cd "$root/protos"
mapfile -t files < <(find fissile -name '*.proto' | sort)
"$bin/python" -m grpc_tools.protoc -I. \
  --plugin=protoc-gen-mypy="$bin/protoc-gen-mypy" --plugin=protoc-gen-mypy_grpc="$bin/protoc-gen-mypy_grpc" \
  --python_out="$out" --grpc_python_out="$out" --mypy_out=quiet:"$out" --mypy_grpc_out=quiet:"$out" "${files[@]}"
