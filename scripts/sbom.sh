#!/usr/bin/env bash
# Writes two SBOMs (CycloneDX) for the wheels in a folder: of the client alone, and of the service with the extras of
# the images. Each lists what a new environment has after the installation. PyTorch is not listed, because
# users choose its build.
set -euo pipefail
cd "$(dirname "$0")/.."
dist=$(cd "${1:?usage: sbom.sh WHEELS FOLDER}" && pwd)
out=$(mkdir -p "${2:?usage: sbom.sh WHEELS FOLDER}" && cd "$2" && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv "$folder/tools"
"$folder/tools/bin/python" -m pip install --quiet --disable-pip-version-check cyclonedx-bom==7.5.0

# list NAME WHEEL...
list() {
  local name=$1
  shift
  "$python" -m venv --without-pip "$folder/$name"
  "$folder/tools/bin/python" -m pip --python "$folder/$name/bin/python" install --quiet --disable-pip-version-check \
    -c requirements/tests.lock "$@"
  "$folder/tools/bin/cyclonedx-py" environment --output-reproducible --output-file "$out/$name.cdx.json" "$folder/$name/bin/python"
  echo "$out/$name.cdx.json"
}

client=("$dist"/fissile_client-*.whl)
service=("$dist"/fissile-*.whl)
list fissile-client "${client[0]}"
list fissile "${client[0]}" "${service[0]}[router,worker,http,smg,redis,mooncake]"
