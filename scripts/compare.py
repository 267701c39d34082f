#!/usr/bin/env python3
"""Lays runs side by side, finished or still going on: a table, a CSV and a plot of the loss and of the gap to the baseline.

  scripts/compare.py --out DIR [--meta data/.../meta.json] RUN_FOLDER...

Reads RUN_FOLDER/log.jsonl only. Runs that differ by nothing but recipe and seed are one row a recipe: the mean over the seeds, and the
spread between them (largest minus smallest). The baseline is bf16, else what is named first; a gap is taken to the baseline's run
of the same seed, where there is one, else to its mean. All runs are compared after the same number of tokens: the last evaluation that all of them
have. Writes DIR/summary.csv, DIR/loss.png and, of runs with --quant-stats, DIR/quant.png (both left out, with a word, where matplotlib is missing) and
DIR/samples.txt (the last text each run wrote, if any).
"""
import argparse, csv, json, os, statistics, sys

import compare_plot

# Options that leave the comparison fair.
MAY_DIFFER = {"recipe", "seed", "log-every", "sample-every", "sample-tokens", "save-every", "keep", "keep-every", "quant-stats", "batch"}
COLUMNS = ["recipe", "seeds", "val_loss", "gap", "spread", "bits_per_byte", "tokens_per_s", "memory_gib"]


def read_run(folder):
    """-> dict of a run's curves, from its log. A line cut short at the end (a run still going on) is left out."""
    path = os.path.join(folder, "log.jsonl")
    run = {"folder": folder, "options": None, "tokens": [], "loss": [], "evals": {}, "bits": {}, "speeds": [], "sample": None,
           "quant": [], "memory": None}
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
        run["memory"] = o["run"].get("memory_bytes")
    elif "eval" in o and o["val_loss"] is not None:
        run["evals"][o["tokens"]] = o["val_loss"]
        run["bits"][o["tokens"]] = o.get("bits_per_byte")
    elif "sample" in o:
        run["sample"] = (o["sample"], o["text"])
    elif "quant" in o:
        run["quant"].append(o)
    elif "step" in o and o["loss"] is not None:
        run["tokens"].append(o["tokens"])
        run["loss"].append(o["loss"])
        run["speeds"].append(o["timing"]["tokens_per_s"])


def group_runs(runs):
    """-> groups in the order of the runs, each {"name", "runs"}: a recipe's runs of several seeds together; runs that differ in more
    apart, called by recipe and folder."""
    def key(r):
        return r["options"]["recipe"], tuple(sorted((k, str(v)) for k, v in r["options"].items() if k not in MAY_DIFFER))
    groups = []
    for r in runs:
        seeds = [g for g in groups if key(g["runs"][0]) == key(r) and all(o["options"]["seed"] != r["options"]["seed"] for o in g["runs"])]
        if seeds:
            seeds[0]["runs"].append(r)
        else:
            groups.append({"runs": [r]})
    recipes = [g["runs"][0]["options"]["recipe"] for g in groups]
    for g, recipe in zip(groups, recipes):
        g["name"] = recipe if recipes.count(recipe) == 1 else f"{recipe} ({os.path.basename(os.path.normpath(g['runs'][0]['folder']))})"
        for r in g["runs"]:
            r["name"] = g["name"] if len(g["runs"]) == 1 else f"{g['name']}, seed {r['options']['seed']}"
    return groups


def note_differences(groups, base):
    """Says which options differ, for then the gap is not the recipe's alone. An option that one of the programs did not have yet says nothing."""
    base = base["runs"][0]
    for r in (g["runs"][0] for g in groups):
        for key, value in r["options"].items():
            if key not in MAY_DIFFER and value != base["options"].get(key, value):
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


def gaps_to(base, group, tokens):
    """-> the gap of each of a group's runs, to the baseline's run of that seed or to its mean."""
    mean = statistics.fmean(b["evals"][tokens] for b in base["runs"])
    same = {b["options"]["seed"]: b["evals"][tokens] for b in base["runs"]}
    return [r["evals"][tokens] - same.get(r["options"]["seed"], mean) for r in group["runs"]]


def summarize(group, base, tokens):
    """-> a row of the table, means over seeds. spread: of the gaps (the baseline's: of its losses), None of one seed. tokens_per_s: the
    median over steps, evaluations and checkpoints left out. memory_gib: what the program planned to hold on the device."""
    runs, gaps = group["runs"], gaps_to(base, group, tokens)
    spread_of = [r["evals"][tokens] for r in runs] if group is base else gaps
    bits = [r["bits"][tokens] for r in runs]
    return {"recipe": group["name"], "seeds": len(runs), "val_loss": statistics.fmean(r["evals"][tokens] for r in runs), "gap": statistics.fmean(gaps),
            "spread": max(spread_of) - min(spread_of) if len(runs) > 1 else None,
            "bits_per_byte": None if None in bits else statistics.fmean(bits),
            "tokens_per_s": statistics.median(s for r in runs for s in r["speeds"]),
            "memory_gib": None if runs[0]["memory"] is None else runs[0]["memory"] / 2**30}


def cell(value, form):
    return "-" if value is None else format(value, form)


def print_table(rows, base, unigram):
    width, seeds = max([len(r["recipe"]) for r in rows] + [len("unigram entropy")]), any(r["seeds"] > 1 for r in rows)
    several = f"  {'seeds':>5}  {'spread':>7}" if seeds else ""
    print(f"{'recipe':<{width}}  {'val loss':>8}  {'gap':>8}{several}  {'bits/byte':>9}  {'tokens/s':>9}  {'memory GiB':>10}")
    for r in rows:
        several = f"  {r['seeds']:5d}  {cell(r['spread'], '7.4f'):>7}" if seeds else ""
        gap = "-" if r["recipe"] == base["name"] else f"{r['gap']:+.4f}"
        print(f"{r['recipe']:<{width}}  {r['val_loss']:8.4f}  {gap:>8}{several}  {cell(r['bits_per_byte'], '.4f'):>9}  {r['tokens_per_s']:9.0f}  "
              f"{cell(r['memory_gib'], '.2f'):>10}")
    if unigram:
        print(f"{'unigram entropy':<{width}}  {unigram:8.4f}  (of the validation text: the loss of a model that knows token frequencies only)")


def write_summary(rows, path):
    digits = {"val_loss": ".6f", "gap": ".6f", "spread": ".6f", "bits_per_byte": ".6f", "tokens_per_s": ".1f", "memory_gib": ".3f", "seeds": "d", "recipe": "s"}
    with open(path, "w", newline="", encoding="utf-8") as f:
        writer = csv.writer(f, lineterminator="\n")
        writer.writerow(COLUMNS)
        for r in rows:
            writer.writerow(["" if r[c] is None else format(r[c], digits[c]) for c in COLUMNS])
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
    groups = group_runs(runs)
    base = next((g for g in groups if g["runs"][0]["options"]["recipe"] == "bf16"), groups[0])
    note_differences(groups, base)
    tokens = compare_at(runs)
    rows = [summarize(g, base, tokens) for g in groups]
    print_table(rows, base, unigram)
    try:
        os.makedirs(args.out, exist_ok=True)
        write_summary(rows, os.path.join(args.out, "summary.csv"))
        compare_plot.plot(groups, base, rows, unigram, args.out)
        if any(r["sample"] for r in runs):
            write_samples(runs, os.path.join(args.out, "samples.txt"))
    except OSError as e:
        sys.exit(f"error: {e.filename or args.out}: {e.strerror}; use another --out")


if __name__ == "__main__":
    main()
