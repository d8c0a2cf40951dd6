#!/usr/bin/env bash
# Compare the protos below DIR (this directory unless told) with baseline.binpb: fail for a change that breaks callers.
# With --renew the protos become the baseline. BUF names buf (else the repository's, else the PATH's).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
buf=${BUF:-$here/../.venv/bin/buf}
[ -x "$buf" ] || buf=buf
renew=
[ "${1:-}" != --renew ] || { renew=1; shift; }
dir=${1:-$here}
image=$(mktemp --suffix .binpb)
trap 'rm -f "$image"' EXIT
"$buf" build "$dir" --path "$dir/photon_grpc" --exclude-source-info -o "$image"
if [ -n "$renew" ]; then
  cp "$image" "$here/baseline.binpb"
  echo "the line for CHANGELOG.md: baseline.binpb is now $(sha256sum "$here/baseline.binpb" | cut -c1-16)"
else
  "$buf" breaking "$image" --against "$here/baseline.binpb" --config "$here/breaking.yaml"
fi
