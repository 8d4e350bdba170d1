#!/usr/bin/env bash
# What a new user does in the first minute, with nothing but the package's own dependencies: try.sh ENVIRONMENT/bin
set -euo pipefail
bin=$1
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
"$bin/sartor" --version
"$bin/sartor" --help >/dev/null
"$bin/sartor" run fedavg --data digits --clients 3 --rounds 2 --out run
"$bin/python" -c 'import sartor; print(sartor.run("ditto", data="digits", clients=3, rounds=1, store=False).summary["accuracy"])'
# What an extra is needed for says which.
for words in "report run" "serve fedavg --listen 127.0.0.1:1"; do
  if "$bin/sartor" $words 2>message; then
    echo "sartor $words: should need an extra" >&2
    exit 1
  fi
  if ! grep -q "pip install 'sartor\[" message || [ "$(wc -l <message)" != 1 ]; then
    echo "sartor $words: should name the extra in one line, said:" >&2
    cat message >&2
    exit 1
  fi
done
echo "tried: $("$bin/python" --version)"
