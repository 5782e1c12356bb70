#!/usr/bin/env bash
# Builds the images of the four services: `make dist-images`.
#
#   REGISTRY=registry.example.com/team    stands before their names: by default fulmen-store:VERSION and so on
#   PUSH=1                                pushes them with an SBOM and provenance, signs each with cosign by the identity of the
#                                         machine that builds, and writes their digests into dist/images.txt
#
# FULMEN_PYTHON_IMAGE is what they are built on, FULMEN_BUILD_NETWORK the network of the build.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/distributions.sh

version=$(python3 tools/version.py)
revision=$(git rev-parse HEAD)
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
mkdir -p dist
rm -f dist/images.txt

# A local wheel of torch takes the place of a download.
if [ -x .venv/bin/python ]; then
  for links in $(find_links .venv); do
    for wheel in "$links"/torch-*.whl; do [ ! -e "$wheel" ] || cp -u "$wheel" deploy/wheels/; done
  done
fi

for service in store llm_proxy runner algorithm console; do
  image=${REGISTRY:+$REGISTRY/}fulmen-${service//_/-}
  arguments=(--file deploy/docker/Dockerfile --network "${FULMEN_BUILD_NETWORK:-default}" --tag "$image:$version"
    --build-arg "SERVICE=$service" --build-arg "VERSION=$version" --build-arg "REVISION=$revision"
    --build-arg "PYTHON_IMAGE=${FULMEN_PYTHON_IMAGE:-python:3.11-slim}")
  if [ -z "${PUSH:-}" ]; then
    docker build --quiet "${arguments[@]}" . >/dev/null
  else
    docker buildx build --push --sbom=true --provenance=mode=max --metadata-file "dist/metadata-$service.json" "${arguments[@]}" .
    digest=$(python3 -c "import json, sys; print(json.load(open(sys.argv[1]))['containerimage.digest'])" "dist/metadata-$service.json")
    rm "dist/metadata-$service.json"
    cosign sign --yes "$image@$digest"
    echo "$image@$digest" >> dist/images.txt
  fi
  echo "dist-images: $image:$version"
done
