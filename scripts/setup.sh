#!/usr/bin/env bash
# Installs what the quick start and the tests need, from Debian's or Ubuntu's packages, as root or through sudo.
#   scripts/setup.sh                  installs what is missing
#   scripts/setup.sh --no-install     only says what is missing, with the command that installs it
set -euo pipefail
packages=(build-essential pkg-config libcjson-dev libopenblas-dev libcmocka-dev libopenmpi-dev openmpi-bin
          python3 python3-matplotlib dict-gcide)

if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
    echo "setup: this is not a Debian or Ubuntu system; install these yourself: a C compiler, make, pkg-config, cJSON, OpenBLAS," \
         "cmocka, OpenMPI, python3 with matplotlib, and bring a text (./scripts/quickstart.sh --text FILE)"
    exit 0
fi
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
apt=(env DEBIAN_FRONTEND=noninteractive apt-get)
if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || {
        echo "error: packages are missing (${missing[*]}), and this user is neither root nor has sudo; ask an administrator to run:" \
             "apt-get install ${missing[*]}; or go on without them: --no-install" >&2; exit 1; }
    apt=(sudo "${apt[@]}")
fi
log=$(mktemp); trap 'rm -f "$log"' EXIT
echo "setup: installing ${missing[*]} (a minute or two)"
# An index that cannot be renewed (one of several sources is down, say) may still do.
"${apt[@]}" update >"$log" 2>&1 || { tail -3 "$log" >&2; echo "setup: apt-get update failed (above); trying with the package lists at hand" >&2; }
"${apt[@]}" install -y --no-install-recommends "${missing[@]}" >"$log" 2>&1 || {
    tail -5 "$log" >&2
    echo "error: apt-get install ${missing[*]} failed (above); mend it and run this again" >&2; exit 1; }
