#!/usr/bin/env bash
# Write the stubs of the protos, and those of the examples' own, below OUT: this directory unless told.
#
#     clients/go/generate.sh [OUT]
#
# Needs Go and buf (BUF names it; else the repository's, else the PATH's). The plugins are those of tools/go.mod.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=$(mkdir -p "${1:-$here}" && cd "${1:-$here}" && pwd)
buf=${BUF:-$here/../../.venv/bin/buf}
[ -x "$buf" ] || buf=buf
plugins=$(mktemp -d)
trap 'rm -rf "$plugins"' EXIT
go -C "$here/tools" build -o "$plugins" \
  google.golang.org/protobuf/cmd/protoc-gen-go google.golang.org/grpc/cmd/protoc-gen-go-grpc
PATH="$plugins:$PATH"
"$buf" generate "$here/../../protos" --path "$here/../../protos/photon_grpc" --template "$here/buf.gen.yaml" --output "$out"
"$buf" generate "$here/examples/acmev1" --template "$here/buf.gen.yaml" --output "$out"
