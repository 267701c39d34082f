#!/usr/bin/env python3
"""How training scales over the GPUs of this host: the same tokens a GPU on 1, 2, 4, 8 of them, one process a GPU, beside what scaling.py predicts.

  dev/bench/multi_gpu.py [--models 100M,1.9B] [--recipes bf16,quartet2,fp8] [--ranks 1,2,4,8] [--zero 0,1] [--reduce-dtype float32|bf16] [--steps 30]
                         [--batch N] [--seq N] [--program ./train_gpt_nvfp4] [--out build/multi_gpu.jsonl] [--minutes N] [--table]

Trains on random tokens at the preset's batch a GPU, one micro-batch a step. A row of the table: median step of rank 0, the first third left out; tokens/s and MFU of all
GPUs; efficiency, tokens/s over that many times one GPU's; exposed, what a step takes longer than on one GPU (communication that nothing hides, waiting for the slowest
rank, and what NCCL's kernels take from the others); the efficiency that scaling.py expects from that one GPU's step; and memory a GPU. One GPU is measured for every model
and recipe, whether --ranks names it or not.

Every row is a line of --out: a row that is there is not measured again, so that a table can be made over several sittings (--minutes ends one: no row is begun after
that). --table only prints. Variables of the environment go along: NCCL_NVLS_ENABLE=0 leaves NVLink multicast off."""

import argparse
import array
import json
import os
import random
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time

import cost
import scaling

KEY = ("model", "recipe", "zero", "reduce_dtype", "ranks", "batch", "seq")


def options(arguments):
    o = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    listed = lambda text: text.split(",")
    numbers = lambda text: [int(n) for n in text.split(",")]
    o.add_argument("--models", type=listed, default=["100M", "1.9B"])
    o.add_argument("--recipes", type=listed, default=["bf16", "quartet2", "fp8"])
    o.add_argument("--ranks", type=numbers, default=[1, 2, 4, 8])
    o.add_argument("--zero", type=numbers, default=[0, 1])
    o.add_argument("--reduce-dtype", default="float32", choices=("float32", "bf16"))
    o.add_argument("--steps", type=int, default=30)
    o.add_argument("--batch", type=int, help="sequences a GPU [the preset's]")
    o.add_argument("--seq", type=int, help="tokens of a sequence [the preset's]")
    o.add_argument("--program", default="./train_gpt_nvfp4")
    o.add_argument("--out", default="build/multi_gpu.jsonl")
    o.add_argument("--minutes", type=float, default=1e9)
    o.add_argument("--table", action="store_true")
    a = o.parse_args(arguments)
    for model in a.models:
        if model not in cost.presets():
            o.error(f"--models {model}: the presets are {', '.join(cost.presets())}")
    if a.steps < 3 or min(a.ranks) < 1 or not set(a.zero) <= {0, 1} or (a.batch or 1) < 1 or (a.seq or 1) < 1:
        o.error("at least 3 --steps and one rank, sequence and token; --zero is 0, 1 or both")
    return a


def rows_wanted(a):
    """One GPU first, on which --zero and --reduce-dtype change nothing."""
    for model in a.models:
        p = cost.presets()[model]
        shape = (a.batch or p["batch"], a.seq or p["seq"])
        for recipe in a.recipes:
            yield dict(zip(KEY, (model, recipe, 0, "float32", 1, *shape)))
            for ranks in sorted(set(a.ranks) - {1}):
                for zero in a.zero:
                    yield dict(zip(KEY, (model, recipe, zero, a.reduce_dtype, ranks, *shape)))


def rows_read(path):
    """-> key -> row, of the lines that are whole."""
    rows = {}
    if os.path.exists(path):
        with open(path, encoding="utf-8") as f:
            for number, line in enumerate(f, 1):
                try:
                    row = json.loads(line)
                    rows[tuple(row[k] for k in KEY)] = row
                except (ValueError, LookupError, TypeError):
                    sys.exit(f"error: {path}, line {number}: is not a row that this program wrote; remove the line, or use another --out")
    return rows


def random_shard(folder, vocab, tokens):
    draw = random.Random(1)
    with open(os.path.join(folder, "train_0.bin"), "wb") as f:
        f.write(struct.pack("<256i", 20240520, 1, tokens, *[0] * 253))
        array.array("H", (draw.randrange(vocab) for _ in range(tokens))).tofile(f)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def train(a, row, folder):
    """Starts the row's processes and waits for them. -> the log of rank 0, as objects; exits with the first rank's words where one fails."""
    out = os.path.join(folder, "run")
    command = [os.path.abspath(a.program), "--model", row["model"], "--recipe", row["recipe"], "--batch", row["batch"], "--seq", row["seq"],
               "--total-batch", row["ranks"] * row["batch"] * row["seq"], "--zero", row["zero"], "--reduce-dtype", row["reduce_dtype"], "--steps", a.steps, "--eval-every", 0,
               "--save-every", 0, "--log-every", 0, "--sample-every", 0, "--train-data", os.path.join(folder, "train_0.bin"), "--out", out]
    group = {"WORLD_SIZE": str(row["ranks"]), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    said = [open(os.path.join(folder, f"rank{r}"), "w+", encoding="utf-8", errors="replace") for r in range(row["ranks"])]
    processes = [subprocess.Popen([str(w) for w in command], env={**os.environ, **group, "RANK": str(r), "LOCAL_RANK": str(r)}, stdin=subprocess.DEVNULL,
                                  stdout=subprocess.DEVNULL, stderr=said[r]) for r in range(row["ranks"])]
    failed = [r for r, p in enumerate(processes) if p.wait() != 0]
    for f in said:
        f.seek(0)
    if failed:
        sys.exit(f"error: {' '.join(str(row[k]) for k in KEY)}: rank {failed[0]} ended with status {processes[failed[0]].returncode}: "
                 f"{''.join(f.read() for f in said).strip() or 'it said nothing'}")
    with open(os.path.join(out, "log.jsonl"), encoding="utf-8") as f:
        return [json.loads(line) for line in f]


def measure(a, row):
    p = cost.presets()[row["model"]]
    with tempfile.TemporaryDirectory(prefix="multi_gpu_") as folder:
        # Two batches: an epoch may end within the run.
        random_shard(folder, p["vocab"], 2 * row["ranks"] * row["batch"] * row["seq"] + 1)
        log = train(a, row, folder)
    run, machine = log[0]["run"], log[0]["machine"]
    if machine["ranks"] != row["ranks"]:
        sys.exit(f"error: {a.program} trained as {machine['ranks']} processes where {row['ranks']} were started; build it with NCCL ('make probe' says what was found)")
    steps = [line for line in log if "step" in line][a.steps // 3:]
    seconds = statistics.median(line["timing"]["step_s"] for line in steps)
    row = {**row, "step_s": seconds, "tokens_per_s": row["ranks"] * row["batch"] * row["seq"] / seconds, "memory_bytes": run["memory_bytes"],
           "device": machine["device"], "revision": machine["revision"], "date": machine["started"][:10]}
    peak = [line["timing"]["mfu"] / line["timing"]["tokens_per_s"] for line in steps if "mfu" in line["timing"]]
    if peak:
        row["mfu"] = peak[0] * row["tokens_per_s"]
    return row


def expected(row, one):
    """The efficiency that scaling.py foresees, from the step measured on one GPU; None where that has no place in its model."""
    p = cost.presets()[row["model"]]
    if (row["batch"], row["seq"]) != (p["batch"], p["seq"]) or row["ranks"] not in scaling.COUNTS:
        return None
    a = scaling.options(["--model", row["model"], "--step-ms", str(one["step_s"] * 1e3), "--zero", str(row["zero"]), "--reduce-dtype", row["reduce_dtype"], "--weak"])
    return next(r[5] for r in scaling.table(a) if r[0] == row["ranks"])


def table(rows):
    """The rows as lines of Markdown; one GPU's row stands before its others."""
    lines = ["| model, batch x tokens a GPU | recipe | GPUs | ZeRO | gradients | ms a step | tokens/s | MFU | efficiency | expected | exposed ms | GiB a GPU |",
             "|---|---|---|---|---|---|---|---|---|---|---|---|"]
    for row in rows.values():
        one = rows.get(tuple({**row, "ranks": 1, "zero": 0, "reduce_dtype": "float32"}[k] for k in KEY))
        share = lambda x: "-" if x is None else f"{100 * x:.1f} %"
        efficiency, foreseen, exposed = None, None, "-"
        if one and row is not one:
            efficiency = row["tokens_per_s"] / row["ranks"] / one["tokens_per_s"]
            foreseen = expected(row, one)
            exposed = f"{(row['step_s'] - one['step_s']) * 1e3:.2f}"
        lines.append(f"| {row['model']}, {row['batch']} x {row['seq']} | {row['recipe']} | {row['ranks']} | {row['zero']} | {row['reduce_dtype']} | {row['step_s'] * 1e3:.2f} | "
                     f"{row['tokens_per_s']:.0f} | {share(row.get('mfu'))} | {share(efficiency)} | {share(foreseen)} | {exposed} | {row['memory_bytes'] / 2 ** 30:.2f} |")
    return lines


def main(arguments):
    a = options(arguments)
    rows = rows_read(a.out)
    wanted = [row for row in rows_wanted(a) if tuple(row[k] for k in KEY) not in rows]
    if not a.table and wanted and not os.access(a.program, os.X_OK):
        sys.exit(f"error: {a.program} is not there; build it with make, or name another by --program")
    os.makedirs(os.path.dirname(a.out) or ".", exist_ok=True)
    end = time.monotonic() + 60 * a.minutes
    for row in [] if a.table else wanted:
        if time.monotonic() > end:
            print("the sitting is over; the same command goes on", file=sys.stderr)
            break
        done = measure(a, row)
        rows[tuple(row[k] for k in KEY)] = done
        with open(a.out, "a", encoding="utf-8") as f:
            f.write(json.dumps(done) + "\n")
        print(f"{' '.join(str(row[k]) for k in KEY)}: {done['step_s'] * 1e3:.2f} ms", file=sys.stderr)
    for device, date in sorted({(row["device"], row["date"]) for row in rows.values()}):
        print(f"{device}, {date}")
    order = {tuple(row[k] for k in KEY): i for i, row in enumerate(rows_wanted(a))}
    print("\n".join(table(dict(sorted(rows.items(), key=lambda kv: order.get(kv[0], len(order)))))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
