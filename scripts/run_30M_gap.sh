#!/usr/bin/env bash
# How far is each recipe from BF16? The comparison of Quartet II's paper at its smallest model: 30M, T = 512, 262 144 tokens a step, peak learning rate
# 1.2e-3, 10 % warm-up, cosine to a tenth, a BPE vocabulary of 32 000, the same data in the same order for all recipes of a seed.
#
#   scripts/run_30M_gap.sh [--corpus english|code] [--tokens N] [--recipes A,B,...] [--seeds 1,...] [--repeats A,B,...] [--repeat-seeds 2,...]
#                          [--data FOLDER] [--out FOLDER] [--logs FOLDER] [--program PROGRAM] [--minutes N] [--dry-run] [option of the trainer]...
#
# Every recipe (bf16 first) runs from seed 1, and --repeats (bf16, quartet2, quartet2-search, nvidia) from seeds 2 and 3, on which a spread can be stated;
# '--repeats none' leaves them out. Data: python3 data/gap.py CORPUS (english), which writes data/gap-CORPUS.
#
# Spread over sittings: give the same command again, with --minutes for the length of the sitting. A finished run leaves log.jsonl.gz and command.txt in
# LOGS (dev/bench/gap/CORPUS-TOKENS): all that a later sitting needs on another machine. A run that was cut off leaves its folder in OUT
# (runs/gap/CORPUS-TOKENS) with a checkpoint; bring that folder back and it goes on, otherwise it starts over. When all are finished, OUT has the table
# (summary.csv), loss.png and samples.txt of compare.sh over all of them.
#
# Cost (30M, 250 M tokens):
#   71.4 M parameters, 0.25 B tokens (3.5 a parameter), 0.318 GFLOP a token: 7.94e+16 FLOPs a run
# Minutes a run on one H200, from the speeds of dev/bench/h200.md and, for what was not measured at this vocabulary, README.md's table plus the head's time:
# 2.8 bf16, 2.7 fp8, 3.5 quartet2 and -no46, 2.9 -fwd, 3.4 -bwd, 3.8 search, nvidia and tetrajet2, 4.4 quartet and fp4-dge-occ; start and evaluations 0.3.
# The 13 recipes: 50 minutes, the 8 repeats: 29. --tokens 750M takes 3 times that. Memory 9 to 11 GiB; a log is some 0.2 MB, a checkpoint 0.7 GB.
set -euo pipefail
cd "$(dirname "$0")/.."
usage() { echo "usage: scripts/run_30M_gap.sh [--corpus C] [--tokens N] [--recipes A,...] [--seeds 1,...] [--repeats A,...|none] [--repeat-seeds 2,...] [--data FOLDER] [--out FOLDER] [--logs FOLDER] [--program PROGRAM] [--minutes N] [--dry-run] [option of the trainer]...${1:+: $1}" >&2; exit 2; }
corpus=english; tokens=250M; seeds=1; repeat_seeds=2,3; data=; out=; logs=; program=; minutes=; dry=; rest=()
recipes=bf16,fp8,quartet2,quartet2-no46,quartet2-fwd,quartet2-bwd,quartet2-search,quartet2-search-true,nvidia,nvidia-46,tetrajet2,quartet,fp4-dge-occ
repeats=bf16,quartet2,quartet2-search,nvidia
while [ $# -gt 0 ]; do
    case $1 in
        --corpus|--tokens|--recipes|--seeds|--repeats|--repeat-seeds|--data|--out|--logs|--program|--minutes)
            [ $# -gt 1 ] && [ -n "$2" ] || usage "$1 needs a value"
            name=${1#--}; printf -v "${name//-/_}" %s "$2"; shift 2 ;;
        --dry-run) dry=1; shift ;;
        --model|--steps|--train-data|--val-data|--recipe|--seed|--resume) usage "$1 is this script's own" ;;
        -h|--help) sed -n '2,22s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) rest+=("$1"); shift ;;
    esac
done
case $corpus in english|code) ;; *) usage "--corpus $corpus: there are english and code" ;; esac
[[ -z $minutes || $minutes =~ ^[0-9]+(\.[0-9]+)?$ ]] || usage "--minutes $minutes: is not a number"
data=${data:-data/gap-$corpus}
out=${out:-runs/gap/$corpus-$tokens}; logs=${logs:-dev/bench/gap/$corpus-$tokens}
if [ -z "$dry" ]; then
    for f in train_000000.bin val_000000.bin meta.json; do
        [ -f "$data/$f" ] || { echo "error: $data/$f is missing; build the corpus with: python3 data/gap.py $corpus" >&2; exit 1; }
    done
fi
deadline=$((SECONDS + $(awk -v m="${minutes:-1000000}" 'BEGIN { printf "%d", 60 * m }')))

# one SEED RECIPE : a run by compare.sh; its small files come from LOGS first and go there when it is finished.
one() {
    local folder=$out/seed$1/$2 kept=$logs/seed$1/$2 left=$((deadline - SECONDS)) status=0
    local command=(scripts/compare.sh --recipes "$2" --seeds "$1" --out "$out/seed$1" --meta "$data/meta.json" ${program:+--program "$program"} ${dry:+--dry-run}
        --model 30M --seq 512 --batch 128 --total-batch 262144 --tokens "$tokens" --lr 1.2e-3 --warmup 0.1 --schedule cosine --min-lr 0.1
        --train-data "$data/train_*.bin" --val-data "$data/val_*.bin" --eval-every 200 --eval-tokens 4Mi --log-every 50 ${rest[@]+"${rest[@]}"})
    if [ -n "$dry" ]; then "${command[@]}"; return; fi
    if [ ! -f "$folder/log.jsonl" ] && [ -f "$kept/log.jsonl.gz" ]; then
        mkdir -p "$folder"
        cp "$kept/command.txt" "$folder/command.txt"
        gunzip -c "$kept/log.jsonl.gz" >"$folder/log.jsonl"
    fi
    if [ "$left" -le 0 ] && ! [ -f "$kept/log.jsonl.gz" ]; then echo "the sitting is over; the same command goes on with $folder"; exit 0; fi
    [ "$left" -gt 0 ] || left=60                         # a finished run is only looked at
    python3 - "$left" "$folder/log.jsonl" "${command[@]}" <<'PY' || status=$?
import json, os, signal, subprocess, sys, time
# A process group of its own: the signal is for the trainer, which saves. The shell that started it ends sooner, so wait for the whole group.
process = subprocess.Popen(sys.argv[3:], stdin=subprocess.DEVNULL, start_new_session=True)
try:
    status = process.wait(timeout=float(sys.argv[1]))
except (subprocess.TimeoutExpired, KeyboardInterrupt):
    os.killpg(process.pid, signal.SIGTERM)
    process.wait()
    try:
        while True:
            os.killpg(process.pid, 0)
            time.sleep(0.1)
    except ProcessLookupError:
        sys.exit(75)
if status == 0:                                          # the trainer ends well too when someone else stopped it
    lines = [json.loads(l) for l in open(sys.argv[2], encoding="utf-8")]
    status = 0 if any(l.get("eval") == lines[0]["run"]["options"]["steps"] for l in lines) else 75
sys.exit(status)
PY
    if [ $status = 75 ]; then echo "the sitting is over; the same command goes on with $folder"; exit 0; fi
    [ $status = 0 ] || { echo "error: the run in $folder failed (status $status); see above, then give the same command again" >&2; exit 1; }
    mkdir -p "$kept"
    cp "$folder/command.txt" "$kept/command.txt"
    gzip -9nc "$folder/log.jsonl" >"$kept/log.jsonl.gz.partial"
    mv "$kept/log.jsonl.gz.partial" "$kept/log.jsonl.gz"
}

folders=()
all() { # SEEDS RECIPES
    local seed recipe
    for seed in ${1//,/ }; do for recipe in ${2//,/ }; do
        case " ${folders[*]-} " in *" $out/seed$seed/$recipe "*) continue ;; esac
        one "$seed" "$recipe"
        folders+=("$out/seed$seed/$recipe")
    done; done
}
all "$seeds" "$recipes"
[ "$repeats" = none ] || all "$repeat_seeds" "$repeats"
[ -n "$dry" ] || scripts/compare.sh --out "$out" --meta "$data/meta.json" "${folders[@]}"
