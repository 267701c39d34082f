#!/usr/bin/env bash
# Installs what the quick start and the tests need, from Debian's or Ubuntu's packages, as root or through sudo.
#   scripts/setup.sh                  installs what is missing
#   scripts/setup.sh --no-install     only says what is missing, with the command that installs it
set -euo pipefail
packages=(build-essential pkg-config libcjson-dev libopenblas-dev libcmocka-dev libopenmpi-dev openmpi-bin
          python3 python3-matplotlib dict-gcide)

command -v dpkg-query >/dev/null && command -v apt-get >/dev/null || {
    echo "setup: this is not a Debian or Ubuntu system; install these yourself: a C compiler, make, pkg-config, cJSON, OpenBLAS," \
         "cmocka, OpenMPI, python3 with matplotlib, and bring a text (data/prepare.py --text FILE)"; exit 0; }
missing=()
for p in "${packages[@]}"; do
    [ "$(dpkg-query -W -f='${db:Status-Status}' "$p" 2>/dev/null || true)" = installed ] || missing+=("$p")
done
[ ${#missing[@]} -gt 0 ] || { echo "setup: everything needed is installed"; exit 0; }
if [ "${1:-}" = --no-install ]; then
    echo "setup: missing: ${missing[*]}"
    echo "setup: install with: sudo apt-get install ${missing[*]}"
    exit 0
fi
as_root=()
if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || { echo "error: missing packages (${missing[*]}) and neither root nor sudo is at hand; ask an administrator to run: apt-get install ${missing[*]}" >&2; exit 1; }
    as_root=(sudo)
fi
echo "setup: installing ${missing[*]}"
log=$(mktemp)
export DEBIAN_FRONTEND=noninteractive
install() { ${as_root[@]+"${as_root[@]}"} apt-get install -y --no-install-recommends "${missing[@]}" >"$log" 2>&1; }
${as_root[@]+"${as_root[@]}"} apt-get update >"$log" 2>&1 || { tail -5 "$log" >&2; echo "error: apt-get update failed (above); is the network up?" >&2; exit 1; }
install || { tail -5 "$log" >&2; echo "error: apt-get install ${missing[*]} failed (above)" >&2; exit 1; }
rm -f "$log"
