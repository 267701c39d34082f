#!/usr/bin/env python3
"""From the summary.csv of scripts/run_30M_gap.sh: the README's table, the orders that the seeds carry, and a plot of the gaps beside the paper's.

  dev/bench/gap/report.py SUMMARY_CSV [--plot FILE.png]

The paper's gaps are those of its 30M model at 25 tokens a parameter (arXiv 2601.22813; C4, Llama-2's tokenizer). Spread: of a recipe's gaps over its
seeds, largest minus smallest; of the baseline, of its losses. A recipe of one seed has none of its own: the largest that was seen stands for it. An order
of two recipes is carried when their gaps differ by more than the larger of their spreads."""

import argparse
import csv
import sys

PAPER = {"bf16": 0.0, "quartet2": 0.0430, "quartet2-no46": 0.0445, "tetrajet2": 0.0541, "nvidia": 0.0548, "nvidia-46": 0.0565}


def read_summary(path):
    """-> rows by falling gap, each with "doubt": the spread that stands for it."""
    try:
        with open(path, newline="", encoding="utf-8") as f:
            rows = [{"recipe": r["recipe"], "seeds": int(r["seeds"]), "val_loss": float(r["val_loss"]), "gap": float(r["gap"]), "spread": float(r["spread"]) if r["spread"] else None,
                     "tokens_per_s": float(r["tokens_per_s"]), "memory_gib": float(r["memory_gib"])} for r in csv.DictReader(f)]
    except (OSError, ValueError, KeyError, TypeError) as e:
        sys.exit(f"error: {path}: {getattr(e, 'strerror', None) or 'is not a summary.csv of compare.sh'}")
    widest = max((r["spread"] for r in rows if r["spread"] is not None), default=None)
    for r in rows:
        r["doubt"] = widest if r["spread"] is None else r["spread"]
    return sorted(rows, key=lambda r: r["gap"])


def signed(x):
    return "-" if x is None else f"{x:+.4f}".replace("-", "\u2212")


def table(rows):
    lines = ["| recipe | seeds | validation loss | gap to bf16 | spread of the seeds | the paper's gap | tokens/s | memory GiB |", "|---|---|---|---|---|---|---|---|"]
    for r in rows:
        base = r["recipe"] == "bf16"
        lines.append(f"| `{r['recipe']}` | {r['seeds']} | {r['val_loss']:.4f} | {'-' if base else signed(r['gap'])} | {'-' if r['spread'] is None else format(r['spread'], '.4f')} | "
                     f"{'-' if base else signed(PAPER.get(r['recipe']))} | {r['tokens_per_s']:,.0f} | {r['memory_gib']:.2f} |".replace(",", " "))
    return lines


def carried(a, b):
    return a["doubt"] is not None and b["gap"] - a["gap"] > max(a["doubt"], b["doubt"])


def orders(rows):
    """For every recipe, which others are above it by more than the spread."""
    lines = []
    for i, a in enumerate(rows):
        above = [b["recipe"] for b in rows[i + 1:] if carried(a, b)]
        lines.append(f"{a['recipe']} is below {', '.join(above) if above else 'none'} by more than the spread")
    both = [r for r in rows if r["recipe"] in PAPER]
    pairs = [(a, b) for i, a in enumerate(both) for b in both[i + 1:] if carried(a, b)]
    against = [f"{a['recipe']} below {b['recipe']}" for a, b in pairs if PAPER[a["recipe"]] > PAPER[b["recipe"]]]
    lines.append(f"of {len(pairs)} orders that the spread carries among the paper's recipes, {len(pairs) - len(against)} are the paper's{'; not: ' + ', '.join(against) if against else ''}")
    return lines


def plot(rows, path):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axis = plt.subplots(figsize=(9, 0.36 * len(rows) + 1.4))
    for y, r in enumerate(rows):
        axis.barh(y, r["gap"], color="#56B4E9" if r["recipe"] != "bf16" else "black", height=0.6)
        if r["doubt"] is not None:                           # half of it to each side
            axis.errorbar(r["gap"], y, xerr=r["doubt"] / 2, color="black" if r["spread"] is not None else "#A0A0A0", capsize=3, lw=1.2)
    theirs = [(PAPER[r["recipe"]], y) for y, r in enumerate(rows) if r["recipe"] in PAPER and r["recipe"] != "bf16"]
    axis.plot(*zip(*theirs) if theirs else ([], []), "D", color="#D55E00", ms=6, label="the paper's, 30M at 25 tokens a parameter, C4")
    axis.errorbar([], [], xerr=[], color="black", capsize=3, label="spread of the seeds")
    axis.errorbar([], [], xerr=[], color="#A0A0A0", capsize=3, label="one seed: the largest spread seen")
    axis.set_yticks(range(len(rows)), [f"{r['recipe']} ({r['seeds']})" for r in rows])
    axis.axvline(0, color="black", lw=1)
    axis.set(xlabel="validation loss minus bf16's (nats a token)", title="Gap to bf16; in brackets, seeds")
    axis.grid(alpha=0.25, axis="x")
    axis.set_axisbelow(True)
    axis.legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    parser.add_argument("summary", metavar="SUMMARY_CSV")
    parser.add_argument("--plot", metavar="FILE.png")
    a = parser.parse_args()
    rows = read_summary(a.summary)
    print("\n".join(table(rows) + [""] + orders(rows)))
    if a.plot:
        plot(rows, a.plot)
        print(f"wrote {a.plot}")


if __name__ == "__main__":
    main()
