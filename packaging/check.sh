#!/usr/bin/env bash
# Build what would be published and try it as a stranger would: in an environment with nothing else in it.
#   packaging/check.sh                                    # with python3
#   PYTHONS="python3.12 python3.13" packaging/check.sh    # with these
# What is built stays in build/dist.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

python3 -m venv "$work/tools"
"$work/tools/bin/pip" install --quiet build twine
rm -rf build/dist
"$work/tools/bin/python" -m build --outdir build/dist . >"$work/build.log" || { cat "$work/build.log"; exit 1; }
"$work/tools/bin/twine" check --strict build/dist/*

for python in ${PYTHONS:-python3}; do
  echo "== $("$python" --version)"
  environment="$work/$(basename "$python")"
  "$python" -m venv "$environment"
  wheel=$(ls build/dist/sartor-*.whl)
  "$environment/bin/pip" install --quiet -c constraints.txt "$wheel"
  (cd "$work" && "$OLDPWD/packaging/try.sh" "$environment/bin")
  # The image's steps, without an image: its extras from the same wheel, and the services of compose.yaml.
  "$environment/bin/pip" install --quiet -c constraints.txt "sartor[flower,report] @ file://$PWD/$wheel"
  "$environment/bin/pip" install --quiet pyyaml
  "$environment/bin/python" packaging/compose.py "$environment/bin/sartor"
done
