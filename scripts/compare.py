#!/usr/bin/env python3
"""Lays finished (or running) runs side by side: a table, a CSV and a plot of loss and of the gap to BF16.

  scripts/compare.py --out DIR [--meta data/.../meta.json] RUN_FOLDER...

Reads RUN_FOLDER/log.jsonl only. The baseline is the run whose recipe is bf16 (else the first named). Writes DIR/summary.csv
(recipe,val_loss,gap,bits_per_byte,tokens_per_s) and DIR/loss.png (left out, with a word, when matplotlib is missing).
"""
import argparse, csv, json, math, os, statistics, sys


def read_run(folder):
    """-> dict of a run's curves, from its log. A line cut short at the end (a run still going on) is left out."""
    path = os.path.join(folder, "log.jsonl")
    run = {"folder": folder, "steps": [], "tokens": [], "loss": [], "eval_tokens": [], "val_loss": [], "bits_per_byte": None, "speeds": [], "sample": None}
    try:
        lines = open(path, encoding="utf-8").read().splitlines()
    except OSError as e:
        sys.exit(f"error: {path}: {e.strerror}; name the folder of a run (its --out)")
    for number, line in enumerate(lines, 1):
        try:
            o = json.loads(line)
        except ValueError:
            if number == len(lines):
                break
            sys.exit(f"error: {path}: line {number} is not JSON")
        if "run" in o:
            run["options"] = o["run"]["options"]
        elif "eval" in o:
            run["eval_tokens"].append(o["tokens"])
            run["val_loss"].append(o["val_loss"])
            run["bits_per_byte"] = o.get("bits_per_byte")
        elif "sample" in o:
            run["sample"] = o["text"]
        elif "step" in o and o["loss"] is not None:
            run["steps"].append(o["step"])
            run["tokens"].append(o["tokens"])
            run["loss"].append(o["loss"])
            run["speeds"].append(o["timing"]["tokens_per_s"])
    if "options" not in run or not run["steps"]:
        sys.exit(f"error: {path}: no steps in it yet; let the run go on")
    return run


def name_runs(runs):
    """A run is called by its recipe; runs of one recipe get their folder's name too."""
    recipes = [r["options"]["recipe"] for r in runs]
    for r in runs:
        recipe = r["options"]["recipe"]
        r["name"] = recipe if recipes.count(recipe) == 1 else f"{recipe} ({os.path.basename(os.path.normpath(r['folder']))})"


def summarize(run, base):
    """-> a row of the table. The loss is the last evaluation's, or the mean of the last tenth of the training losses."""
    def final(r):
        return r["val_loss"][-1] if r["val_loss"] else statistics.fmean(r["loss"][-max(1, len(r["loss"]) // 10):])
    return {"recipe": run["name"], "val_loss": final(run), "gap": final(run) - final(base), "bits_per_byte": run["bits_per_byte"],
            "tokens_per_s": statistics.median(run["speeds"])}


def print_table(rows):
    print(f"{'recipe':<16} {'val loss':>9} {'gap':>8} {'bits/byte':>10} {'tokens/s':>10}")
    for r in rows:
        bits = "-" if r["bits_per_byte"] is None else f"{r['bits_per_byte']:.4f}"
        print(f"{r['recipe']:<16} {r['val_loss']:9.4f} {r['gap']:+8.4f} {bits:>10} {r['tokens_per_s']:10.0f}")


def smooth(x, width):
    """Running mean over `width` steps, so that curves can be told apart."""
    out, total = [], 0.0
    for i, v in enumerate(x):
        total += v - (x[i - width] if i >= width else 0)
        out.append(total / min(i + 1, width))
    return out


def plot(runs, base, unigram, path):
    try:
        import matplotlib
        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        print("no plot: matplotlib is not installed (Debian: apt install python3-matplotlib)")
        return
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.6))
    width = max(1, len(base["loss"]) // 50)
    base_loss = smooth(base["loss"], width)
    base_at = dict(zip(base["tokens"], base_loss))
    for i, r in enumerate(runs):
        color = f"C{i}"
        curve = smooth(r["loss"], width)
        left.plot(r["tokens"], curve, color=color, lw=1.3, label=r["name"])
        left.plot(r["eval_tokens"], r["val_loss"], color=color, marker="o", ms=4, ls="none")
        if r is base:
            continue
        common = [(t, l - base_at[t]) for t, l in zip(r["tokens"], curve) if t in base_at]
        right.plot([t for t, _ in common], [g for _, g in common], color=color, lw=1.3, label=r["name"])
        base_eval = dict(zip(base["eval_tokens"], base["val_loss"]))
        evals = [(t, l - base_eval[t]) for t, l in zip(r["eval_tokens"], r["val_loss"]) if t in base_eval]
        right.plot([t for t, _ in evals], [g for _, g in evals], color=color, marker="o", ms=4, ls="none")
    if unigram:
        left.axhline(unigram, color="gray", ls=":", lw=1, label="unigram entropy")
    low = min(min(smooth(r["loss"], width)) for r in runs)
    high = max([unigram or 0] + [smooth(r["loss"], width)[len(r["loss"]) // 10] for r in runs])
    left.set_ylim(low - 0.05 * (high - low) - 0.02, high + 0.15 * (high - low) + 0.02)
    left.set(xlabel="tokens", ylabel="loss (nats a token)", title=f"loss: line training (mean of {width} steps), dots validation")
    right.axhline(0, color="gray", lw=0.8)
    right.set(xlabel="tokens", ylabel=f"loss minus {base['name']}'s", title=f"gap to {base['name']}")
    if runs and len(runs) > 1:
        steady = [g for r in runs if r is not base for t, g in zip(r["tokens"], [l - base_at.get(t2, l) for t2, l in zip(r["tokens"], smooth(r["loss"], width))]) if t > 0.1 * base["tokens"][-1]]
        if steady:
            span = max(max(steady), 0) - min(min(steady), 0) or 1e-3
            right.set_ylim(min(min(steady), 0) - 0.15 * span, max(max(steady), 0) + 0.15 * span)
        right.legend()
    left.legend()
    for axis in (left, right):
        axis.grid(alpha=0.25)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"wrote {path}")


def main():
    parser = argparse.ArgumentParser(description="Compares runs: table, summary.csv and loss.png.")
    parser.add_argument("--out", required=True, help="folder for summary.csv and loss.png")
    parser.add_argument("--meta", help="meta.json of the data: its unigram entropy is shown for scale")
    parser.add_argument("runs", nargs="+", help="run folders (each holds log.jsonl)")
    args = parser.parse_args()
    runs = [read_run(f) for f in args.runs]
    name_runs(runs)
    base = next((r for r in runs if r["options"]["recipe"] == "bf16"), runs[0])
    unigram = None
    if args.meta:
        with open(args.meta, encoding="utf-8") as f:
            unigram = json.load(f)["val_unigram_entropy"]
    rows = [summarize(r, base) for r in runs]
    print_table(rows)
    if unigram:
        print(f"for scale: the unigram entropy of the validation tokens is {unigram:.4f} nats a token ({unigram / math.log(2):.4f} bits)")
    os.makedirs(args.out, exist_ok=True)
    with open(os.path.join(args.out, "summary.csv"), "w", newline="") as f:
        writer = csv.DictWriter(f, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"wrote {os.path.join(args.out, 'summary.csv')}")
    plot(runs, base, unigram, os.path.join(args.out, "loss.png"))
    for r in runs:
        if r["sample"]:
            print(f"\n{r['name']} writes:\n{r['sample']}")


if __name__ == "__main__":
    main()
