#!/usr/bin/env python3
"""Lays runs side by side, finished or still going on: a table, a CSV and a plot of the loss and of the gap to the baseline.

  scripts/compare.py --out DIR [--meta data/.../meta.json] RUN_FOLDER...

Reads RUN_FOLDER/log.jsonl only. The baseline is the first run whose recipe is bf16, else the first named. All runs are compared
after the same number of tokens: the last evaluation that all of them have. Writes DIR/summary.csv
(recipe,val_loss,gap,bits_per_byte,tokens_per_s), DIR/loss.png (left out, with a word, where matplotlib is missing) and
DIR/samples.txt (the last text each run wrote, if any).
"""
import argparse, csv, json, math, os, statistics, sys

MAY_DIFFER = {"recipe", "log-every", "sample-every", "sample-tokens", "save-every", "keep", "batch"}  # options that leave the comparison fair


def read_run(folder):
    """-> dict of a run's curves, from its log. A line cut short at the end (a run still going on) is left out."""
    path = os.path.join(folder, "log.jsonl")
    run = {"folder": folder, "options": None, "tokens": [], "loss": [], "evals": {}, "bits": {}, "speeds": [], "sample": None}
    try:
        with open(path, encoding="utf-8") as f:
            lines = f.read().splitlines()
    except (OSError, UnicodeDecodeError) as e:
        sys.exit(f"error: {path}: {getattr(e, 'strerror', None) or 'is not text'}; name the folder of a run (its --out)")
    for number, line in enumerate(lines, 1):
        try:
            read_line(run, json.loads(line))
        except (ValueError, KeyError, TypeError):
            if number < len(lines):
                sys.exit(f"error: {path}: line {number} is not a line of a log; was the file changed?")
    if run["options"] is None or not run["evals"]:
        sys.exit(f"error: {path}: holds no evaluation yet; let the run go on, or train with --val-data and --eval-every")
    return run


def read_line(run, o):
    if "run" in o:
        run["options"] = o["run"]["options"]
    elif "eval" in o and o["val_loss"] is not None:
        run["evals"][o["tokens"]] = o["val_loss"]
        run["bits"][o["tokens"]] = o.get("bits_per_byte")
    elif "sample" in o:
        run["sample"] = (o["sample"], o["text"])
    elif "step" in o and o["loss"] is not None:
        run["tokens"].append(o["tokens"])
        run["loss"].append(o["loss"])
        run["speeds"].append(o["timing"]["tokens_per_s"])


def name_runs(runs):
    """A run is called by its recipe; where two share one, by its recipe and folder."""
    recipes = [r["options"]["recipe"] for r in runs]
    for r in runs:
        recipe = r["options"]["recipe"]
        r["name"] = recipe if recipes.count(recipe) == 1 else f"{recipe} ({os.path.basename(os.path.normpath(r['folder']))})"


def note_differences(runs, base):
    """Says which options differ, for then the gap is not the recipe's alone."""
    for r in runs:
        for key, value in r["options"].items():
            if key not in MAY_DIFFER and value != base["options"].get(key):
                print(f"note: {r['name']} was run with --{key} {value}, {base['name']} with {base['options'].get(key)}: the gap is not the recipe's alone")


def compare_at(runs):
    """-> the most tokens after which all runs were evaluated."""
    common = set.intersection(*(set(r["evals"]) for r in runs))
    if not common:
        sys.exit("error: no evaluation falls after the same number of tokens in all runs; train them with one --eval-every and batch")
    for r in runs:
        if max(r["evals"]) > max(common):
            print(f"note: {r['name']} has gone on to {max(r['evals']) / 1e6:.3g} M tokens; all are compared after {max(common) / 1e6:.3g} M")
    return max(common)


def summarize(run, base, tokens):
    """-> a row of the table. tokens_per_s is the median over steps, evaluations and checkpoints left out."""
    return {"recipe": run["name"], "val_loss": run["evals"][tokens], "gap": run["evals"][tokens] - base["evals"][tokens],
            "bits_per_byte": run["bits"][tokens], "tokens_per_s": statistics.median(run["speeds"])}


def print_table(rows, base, unigram):
    width = max([len(r["recipe"]) for r in rows] + [len("unigram entropy")])
    print(f"{'recipe':<{width}}  {'val loss':>8}  {'gap':>8}  {'bits/byte':>9}  {'tokens/s':>9}")
    for r in rows:
        gap = "-" if r["recipe"] == base["name"] else f"{r['gap']:+.4f}"
        bits = "-" if r["bits_per_byte"] is None else f"{r['bits_per_byte']:.4f}"
        print(f"{r['recipe']:<{width}}  {r['val_loss']:8.4f}  {gap:>8}  {bits:>9}  {r['tokens_per_s']:9.0f}")
    if unigram:
        print(f"{'unigram entropy':<{width}}  {unigram:8.4f}  (of the validation text: the loss of a model that knows token frequencies only)")


def write_summary(rows, path):
    def number(value, digits):
        return "" if value is None else f"{value:.{digits}f}"
    with open(path, "w", newline="", encoding="utf-8") as f:
        writer = csv.writer(f, lineterminator="\n")
        writer.writerow(["recipe", "val_loss", "gap", "bits_per_byte", "tokens_per_s"])
        for r in rows:
            writer.writerow([r["recipe"], number(r["val_loss"], 6), number(r["gap"], 6), number(r["bits_per_byte"], 6), number(r["tokens_per_s"], 1)])
    print(f"wrote {path}")


def write_samples(runs, path):
    """What the models write; read by eye, it says more than a number."""
    with open(path, "w", encoding="utf-8") as f:
        for r in runs:
            if r["sample"]:
                text = f"{r['name']}, after step {r['sample'][0]}:\n{r['sample'][1].rstrip()}\n"
                print("\n" + text, end="")
                f.write(text + "\n")
    print(f"wrote {path}")


# ---------------------------------------------------------------------------------------------------------------------
# The plot

def smooth(values, width):
    """Running mean over the last `width` values."""
    out, total = [], 0.0
    for i, v in enumerate(values):
        total += v - (values[i - width] if i >= width else 0)
        out.append(total / min(i + 1, width))
    return out


def plot_losses(axis, runs, colors, unigram, width):
    for r, color in zip(runs, colors):
        axis.plot([t / 1e6 for t in r["tokens"]], smooth(r["loss"], width), color=color, lw=1, alpha=0.45)
        axis.plot([t / 1e6 for t in r["evals"]], r["evals"].values(), color=color, marker="o", ms=3.5, lw=1.5, label=r["name"])
    if unigram:
        axis.axhline(unigram, color="gray", ls=":", lw=1.2, label="unigram entropy")
    # The first steps, at the height of a model that knows nothing, would leave no room for the rest.
    shown = [v for r in runs for v in smooth(r["loss"], width)[len(r["loss"]) // 20:]] + [v for r in runs for v in r["evals"].values()]
    low, high = min(shown), max(shown + [unigram or 0])
    axis.set_ylim(low - 0.05 * (high - low), high + 0.08 * (high - low))
    axis.set(xlabel="million tokens", ylabel="loss (nats a token)", title=f"Loss: dots validation, thin line training (mean of {width} steps)")
    axis.legend()


def plot_gaps(axis, runs, base, colors, width):
    base_loss, highest = dict(zip(base["tokens"], base["loss"])), 0.0
    axis.axhline(0, color="black", lw=1)
    for r, color in zip(runs, colors):
        if r is base:
            continue
        both = [(t, l - base_loss[t]) for t, l in zip(r["tokens"], r["loss"]) if t in base_loss]
        axis.plot([t / 1e6 for t, _ in both], smooth([g for _, g in both], width), color=color, lw=1, alpha=0.35)
        evals = [(t, v - base["evals"][t]) for t, v in r["evals"].items() if t in base["evals"]]
        axis.plot([t / 1e6 for t, _ in evals], [g for _, g in evals], color=color, marker="o", ms=3.5, lw=1.5, label=f"{r['name']} ({evals[-1][1]:+.4f})")
        highest = max([highest] + [abs(g) for _, g in evals])
    axis.set_ylim(-0.5 * highest - 1e-3, 1.5 * highest + 1e-3)
    axis.set(xlabel="million tokens", ylabel=f"loss minus {base['name']}'s (nats a token)", title=f"Gap to {base['name']} at equal tokens")
    axis.legend()


def plot(runs, base, unigram, path):
    try:
        import matplotlib
        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        print(f"no {path}: matplotlib is not installed (Debian: apt-get install python3-matplotlib)")
        return
    width = max(1, len(base["loss"]) // 40)
    others = [c for c in plt.get_cmap("tab10").colors if c != plt.get_cmap("tab10").colors[7]]  # gray is the entropy's
    colors, count = [], 0
    for r in runs:
        colors.append("black" if r is base else others[count % len(others)])
        count += r is not base
    figure, axes = plt.subplots(1, 2 if len(runs) > 1 else 1, figsize=(11 if len(runs) > 1 else 6, 4.2), squeeze=False)
    plot_losses(axes[0][0], runs, colors, unigram, width)
    if len(runs) > 1:
        plot_gaps(axes[0][1], runs, base, colors, width)
    for axis in axes[0]:
        axis.grid(alpha=0.25)
        axis.title.set_fontsize(10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    print(f"wrote {path}")


def read_unigram_entropy(path):
    try:
        with open(path, encoding="utf-8") as f:
            return float(json.load(f)["val_unigram_entropy"])
    except (OSError, ValueError, KeyError, TypeError) as e:
        sys.exit(f"error: --meta {path}: {getattr(e, 'strerror', None) or 'holds no number val_unigram_entropy'}; name the meta.json of the runs' data")


def main():
    parser = argparse.ArgumentParser(description="Compares runs: a table, summary.csv, loss.png and samples.txt.")
    parser.add_argument("--out", required=True, help="folder for what is written")
    parser.add_argument("--meta", help="meta.json of the data: its unigram entropy is shown for scale")
    parser.add_argument("runs", nargs="+", metavar="RUN_FOLDER", help="holds a run's log.jsonl")
    args = parser.parse_args()
    unigram = read_unigram_entropy(args.meta) if args.meta else None
    runs = [read_run(f) for f in args.runs]
    name_runs(runs)
    base = next((r for r in runs if r["options"]["recipe"] == "bf16"), runs[0])
    note_differences(runs, base)
    tokens = compare_at(runs)
    rows = [summarize(r, base, tokens) for r in runs]
    print_table(rows, base, unigram)
    try:
        os.makedirs(args.out, exist_ok=True)
        write_summary(rows, os.path.join(args.out, "summary.csv"))
        plot(runs, base, unigram, os.path.join(args.out, "loss.png"))
        if any(r["sample"] for r in runs):
            write_samples(runs, os.path.join(args.out, "samples.txt"))
    except OSError as e:
        sys.exit(f"error: {e.filename or args.out}: {e.strerror}; use another --out")


if __name__ == "__main__":
    main()
