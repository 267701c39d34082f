"""The plots of compare.py: loss.png (loss, and gap to the baseline over tokens) and quant.png (--quant-stats)."""
import os

# Colours that differ for most eyes, and line styles beside them: up to 33 recipes can be told apart.
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C4B00", "#6A3D9A", "#7FA800", "#B2182B", "#A0A0A0"]
STYLES = [("-", "o"), ("--", "s"), (":", "^")]
OPERANDS = [("forward", "x"), ("forward", "w"), ("dgrad", "dy"), ("dgrad", "w"), ("wgrad", "dy"), ("wgrad", "x")]
QUANT_ROWS = [("error", "relative squared error"), ("zeros", "share of zeroed values"), ("clipped", "share of clipped blocks"), ("amax", "amax")]
LINEARS = ["qkv", "attn_out", "gate_up", "down"]


def smooth(values, width):
    """Running mean over the last `width` values."""
    out, total = [], 0.0
    for i, v in enumerate(values):
        total += v - (values[i - width] if i >= width else 0)
        out.append(total / min(i + 1, width))
    return out


def mean_curve(runs, key):
    """-> [(tokens, mean over the runs)] where all of them have a value."""
    common = set.intersection(*(set(r[key]) for r in runs))
    return [(t, sum(r[key][t] for r in runs) / len(runs)) for t in sorted(common)]


def plot_losses(axis, groups, looks, unigram, width):
    for g, (color, style, marker) in zip(groups, looks):
        for r in g["runs"]:
            axis.plot([t / 1e6 for t in r["tokens"]], smooth(r["loss"], width), color=color, lw=0.8, alpha=0.35)
        evals = mean_curve(g["runs"], "evals")
        axis.plot([t / 1e6 for t, _ in evals], [v for _, v in evals], color=color, ls=style, marker=marker, ms=3.5, lw=1.5, label=g["name"])
    if unigram:
        axis.axhline(unigram, color="gray", ls="-.", lw=1.2, label="unigram entropy")
    # The first steps, at the height of a model that knows nothing, would leave no room for the rest.
    runs = [r for g in groups for r in g["runs"]]
    shown = [v for r in runs for v in smooth(r["loss"], width)[len(r["loss"]) // 20:]] + [v for r in runs for v in r["evals"].values()]
    low, high = min(shown), max(shown + [unigram or 0])
    axis.set_ylim(low - 0.05 * (high - low), high + 0.08 * (high - low))
    axis.set(xlabel="million tokens", ylabel="loss (nats a token)", title=f"Loss: marks validation, thin line training (mean of {width} steps)")


def plot_gaps(axis, groups, base, rows, looks, width):
    """Gaps at equal tokens. The seeds of a recipe are drawn thin, their mean with marks; the legend goes from the largest gap to the smallest."""
    highest, zero, lines = 0.0, axis.axhline(0, color="black", lw=1, label=f"{base['name']}: the baseline"), []
    means = dict(mean_curve(base["runs"], "evals"))
    for g, row, (color, style, marker) in zip(groups, rows, looks):
        if g is base:
            continue
        seeds = {b["options"]["seed"]: b for b in base["runs"]}
        for r in g["runs"]:
            to = seeds.get(r["options"]["seed"], base["runs"][0])
            losses = dict(zip(to["tokens"], to["loss"]))
            both = [(t, l - losses[t]) for t, l in zip(r["tokens"], r["loss"]) if t in losses]
            if len(groups) <= 4:  # of more the noise would hide the marks
                axis.plot([t / 1e6 for t, _ in both], smooth([v for _, v in both], width), color=color, lw=0.8, alpha=0.35)
            if len(g["runs"]) > 1:
                own = [(t, v - to["evals"].get(t, means.get(t))) for t, v in sorted(r["evals"].items()) if t in means]
                axis.plot([t / 1e6 for t, _ in own], [v for _, v in own], color=color, lw=0.8, alpha=0.6)
        gaps = [(t, v - means[t]) for t, v in mean_curve(g["runs"], "evals") if t in means]
        spread = "" if row["spread"] is None else f", spread {row['spread']:.4f}"
        line, = axis.plot([t / 1e6 for t, _ in gaps], [v for _, v in gaps], color=color, ls=style, marker=marker, ms=3.5, lw=1.5,
                          label=f"{g['name']} ({row['gap']:+.4f}{spread})")
        lines.append((row["gap"], line))
        late = [abs(v) for t, v in gaps if t >= 0.25 * gaps[-1][0]]  # while losses fall fast, gaps are larger than ever after
        highest = max([highest] + late)
    axis.set_ylim(-0.5 * highest - 1e-3, 1.5 * highest + 1e-3)
    axis.set(xlabel="million tokens", ylabel=f"loss minus {base['name']}'s (nats a token)", title=f"Gap to {base['name']} at equal tokens")
    return [line for _, line in sorted(lines, key=lambda pair: -pair[0])] + [zero]


def quant_curve(r, linear, values):
    """values(record) -> numbers; the mean of those of a linear's records at each measured step -> (steps, means)."""
    means = []
    for step in sorted({q["quant"] for q in r["quant"]}):
        found = [v for q in r["quant"] if q["quant"] == step and q["linear"] == linear for v in values(q) if v is not None]
        if found:
            means.append((step, sum(found) / len(found)))
    return [s for s, _ in means], [v for _, v in means]


def plot_quant(plt, groups, looks, path):
    """Rows: what was measured, and the gradients' cosine and error; columns: kinds of linear layer, each the mean over the layers. Up to three runs: a colour
    an operand and a line style a run. More: a colour a run and a line style a GEMM, the mean over the operands that the recipe quantizes."""
    from matplotlib.lines import Line2D
    measured = [(g["runs"][0], look[0]) for g, look in zip(groups, looks) if g["runs"][0]["quant"]]
    many, gemms = len(measured) > 3, ("forward", "dgrad", "wgrad")
    styles = dict(zip(gemms, ("-", "--", ":")))
    figure, axes = plt.subplots(len(QUANT_ROWS) + 2, len(LINEARS), figsize=(17, 17), squeeze=False, sharex=True)
    for column, linear in enumerate(LINEARS):
        for n, (r, color) in enumerate(measured):
            sets = [(g, [o for gemm, o in OPERANDS if gemm == g]) for g in gemms] if many else [(gemm, [o]) for gemm, o in OPERANDS]
            for k, (gemm, operands) in enumerate(sets):
                look = {"color": color, "ls": styles[gemm]} if many else {"color": COLORS[k], "ls": STYLES[n][0]}
                for row, (key, _) in enumerate(QUANT_ROWS):
                    x, y = quant_curve(r, linear, lambda q: [(q[gemm].get(o) or {}).get(key) for o in operands])
                    if x:
                        axes[row][column].plot(x, y, marker=".", label=f"{r['name']}: {gemm} {operands[0]}", **look)
            for k, gemm in enumerate(gemms[1:]):
                look = {"color": color, "ls": styles[gemm]} if many else {"color": COLORS[2 * k + 2], "ls": STYLES[n][0]}
                for row, key in ((len(QUANT_ROWS), "cosine"), (len(QUANT_ROWS) + 1, "error")):
                    x, y = quant_curve(r, linear, lambda q: [q[gemm].get(key)])
                    axes[row][column].plot(x, y, marker=".", label=f"{r['name']}: {gemm}", **look)
        axes[0][column].set_title(linear)
        axes[-1][column].set_xlabel("step")
    for row, name in enumerate([n for _, n in QUANT_ROWS] + ["cosine of dX, dW with the exact", "relative error of dX, dW"]):
        axes[row][0].set_ylabel(name)
        for axis in axes[row]:
            axis.grid(alpha=0.25)
            if row == 3:
                axis.set_yscale("log")
    if many:
        lines = [Line2D([], [], color=color, label=r["name"]) for r, color in measured] + [Line2D([], [], color="gray", ls=styles[g], label=g) for g in gemms]
        axes[0][-1].legend(handles=lines, fontsize=9, loc="upper left", bbox_to_anchor=(1.02, 1))
    for row in () if many else (0, len(QUANT_ROWS)):
        handles, labels = axes[row][0].get_legend_handles_labels()
        axes[row][-1].legend(handles, labels, fontsize=8, loc="upper left", bbox_to_anchor=(1.02, 1))
    figure.savefig(path, dpi=80, bbox_inches="tight")
    print(f"wrote {path}")


def plot(groups, base, rows, unigram, folder):
    path = os.path.join(folder, "loss.png")
    try:
        import matplotlib
        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        print(f"no {path}: matplotlib is not installed (Debian: apt-get install python3-matplotlib)")
        return
    looks, count = [], 0
    for g in groups:
        style, marker = STYLES[count // len(COLORS) % len(STYLES)]
        looks.append(("black", "-", "o") if g is base else (COLORS[count % len(COLORS)], style, marker))
        count += g is not base
    width, many = max(1, len(base["runs"][0]["loss"]) // 40), len(groups) > 6
    figure, axes = plt.subplots(1, 2 if len(groups) > 1 else 1, figsize=((14 if many else 11) if len(groups) > 1 else 6, 5.2 if many else 4.2), squeeze=False)
    plot_losses(axes[0][0], groups, looks, unigram, width)
    if not many:
        axes[0][0].legend()
    if len(groups) > 1:
        lines = plot_gaps(axes[0][1], groups, base, rows, looks, width)
        if many:  # one legend for both panels, beside them
            axes[0][1].legend(handles=axes[0][0].get_lines()[-1:] * bool(unigram) + lines, loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=9)
        else:
            axes[0][1].legend(handles=lines)
    for axis in axes[0]:
        axis.grid(alpha=0.25)
        axis.title.set_fontsize(10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    print(f"wrote {path}")
    if any(g["runs"][0]["quant"] for g in groups):
        plot_quant(plt, groups, looks, os.path.join(folder, "quant.png"))
