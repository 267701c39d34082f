#!/usr/bin/env python3
"""A model of one decoder layer's linears on cards with FP4 tensor cores: Quartet II (native NVFP4) against BF16, forward and backward.

  python3 dev/bench/blackwell_model.py [--card b200|rtx5090|all] [--tokens N] [--micro-batches N] [--software] [--ideal]
                                       [--bf16-gemm F] [--fp4-gemm F] [--memory F] [--issue F] [--launch-us T] [--kernels] [--json]

It is arithmetic on data sheets, not a measurement: nothing here ran on Blackwell. A kernel takes the largest of its bytes at the card's memory rate,
its instructions at the card's issue rate and its FLOPs at the tensor cores' rate, each times the share of it that kernels attain; kernels follow each
other. Every term is printed beside the assumption that made it. --ideal: every share 1, launches free: the ceiling. --software: without the
hardware's conversions to E2M1 and E4M3. --kernels: every kernel of every layer. Only the Python standard library is needed.
"""
import argparse, json, os, sys

# Shares of those that kernels attain, with the reason, unless the command line says otherwise. A data sheet's peak is at its boost clock, and a GeForce
# card may clock higher: a share above 1 is possible.
H200_BF16 = (0.80, "8192^3 by cuBLASLt on an H200: 794 of 989 TFLOP/s; nothing was measured here on this card")
FP4_GUESS = (0.75, "a guess: FP8 on the H200 reaches 1483 of 1979 TFLOP/s, and no FP4 product was run here")
GEFORCE_BF16 = (1.12, "public measurement (github.com/binbinsh/gpu-bench, cuBLASLt, 8192^3): 234.8 TFLOP/s on an RTX 5090 D, whose BF16 rate is the RTX 5090's: it clocks beyond its data sheet")
GEFORCE_FP4 = (0.75, "a guess, as for the B200; the same source's 1040 TFLOP/s in FP4 is not used, as the RTX 5090 D's FP4 rate is capped below the RTX 5090's")
# The RTX 5090's BF16 share was put in after a first version with the H200's 0.80 gave 5.5x to 6.6x where the paper measured 3.1x to 4.2x: that
# comparison is no independent proof of this model. --bf16-gemm 0.8 gives the first version.
# Per card: dense FLOP/s with float32 accumulation, bytes/s of memory, FP32 FLOP/s (a fused multiply-add counts two: half of it is the lanes'
# instruction issue rate).
CARDS = {
    "b200": {"name": "B200 (HGX)", "bf16": 2.25e15, "fp4": 9.0e15, "memory": 8.0e12, "fp32": 75e12, "shares": {"bf16": H200_BF16, "fp4": FP4_GUESS},
             "source": "NVIDIA HGX B200 data sheet, an eighth of the 8-GPU board: FP4 144|72 PFLOP/s sparse|dense, BF16 36 sparse (18 dense), FP32 600 TFLOP/s, HBM3e 8 TB/s a GPU"},
    "rtx5090": {"name": "RTX 5090", "bf16": 209.5e12, "fp4": 1676e12, "memory": 1.792e12, "fp32": 104.8e12, "shares": {"bf16": GEFORCE_BF16, "fp4": GEFORCE_FP4},
                "source": "NVIDIA RTX Blackwell GPU Architecture, appendix A, table 3: BF16 with float32 accumulation 209.5, FP4 1676 TFLOP/s dense, FP32 104.8 TFLOP/s, GDDR7 1792 GB/s"},
}

# The paper's benchmark (arXiv 2601.22813 and its code's kernels/test/bench_linear.py): (outputs N, inputs K) of qkv, attention output, gate+up and
# down; 16 sequences of 2048 tokens; time summed over the four. Its speed-ups on an RTX 5090, forward+backward.
TOKENS = 16 * 2048
SIZES = {"800M": (2048, 5632), "3B": (3072, 8192), "7B": (4096, 11008), "22B": (6144, 16384)}   # width, FFN
PAPER = {"rtx5090": {"800M": 3.1, "3B": 3.6, "7B": 3.9, "22B": 4.2}}


def linears(size):
    d, f = SIZES[size]
    return {"qkv": (3 * d, d), "attention output": (d, d), "gate+up": (2 * f, d), "down": (d, f)}


# Bytes a value. An NVFP4 value: half a byte of code and a sixteenth of a byte of scale. c: MS-EDEN's BF16 a block, until the tensor scale is known.
BF16, CODE, SCALE, C = 2, 1 / 2, 1 / 16, 2 / 16
NVFP4 = CODE + SCALE

# Instructions a value: "hardware" with cvt to E2M1 two values at a time, "software" without.
INSTRUCTIONS = {
    "four_six": {"hardware": 32.0, "software": 32.0},          # both candidates rounded and measured
    "dY both ways": {"hardware": 52.6, "software": 74.0},      # rotation, rounding, both sums of S, twice
    "again": {"hardware": 32.0, "software": 43.0},             # decoding, then one direction
    "finish": {"hardware": 2.5, "software": 3.5},              # a block: its c over the tensor scale, a random word, E4M3
}


def kernel(name, what, bytes_, instructions=0.0, flops=0.0, rate="fp4"):
    return {"name": name, "what": what, "bytes": bytes_, "instructions": instructions, "flops": flops, "rate": rate}


def gemm(name, rows, cols, inner, operand, rate):
    """D (rows, cols) in BF16 = A (rows, inner) B (cols, inner)^T; operand: bytes a value of A and B. Each is read once (what tiles read again is in L2)."""
    return kernel(name, f"{rows}x{cols}x{inner}", operand * (rows + cols) * inner + BF16 * rows * cols, flops=2.0 * rows * cols * inner, rate=rate)


def bf16_kernels(M, N, K):
    return {"forward": [gemm("forward GEMM", M, N, K, BF16, "bf16")],
            "backward": [gemm("dgrad GEMM", M, K, N, BF16, "bf16"), gemm("wgrad GEMM", N, K, M, BF16, "bf16")]}


def quartet2_kernels(M, N, K, conversions="hardware", micro_batches=1):
    """X (M,K), W (N,K), dY (M,N). W is quantized once a step: its two kernels are shared by the step's micro-batches."""
    def per_value(kind, values):
        return INSTRUCTIONS[kind][conversions] * values
    x, w, dy = M * K, N * K, M * N

    def finish(name, values, times=1):
        return kernel(f"scales of {name}", "c -> E4M3", times * values * (C + SCALE), times * per_value("finish", values))

    def share(k):
        return {**k, "bytes": k["bytes"] / micro_batches, "instructions": k["instructions"] / micro_batches, "launches": 1 / micro_batches}

    def again(name, values):
        return kernel(f"{name} again", "packed -> rotated, MS-EDEN", values * (NVFP4 + CODE + C), per_value("again", values))
    forward = [
        kernel("quantize X", "four_six", x * (BF16 + NVFP4), per_value("four_six", x)),
        share(kernel("quantize W", "four_six", w * (BF16 + NVFP4), per_value("four_six", w))),
        gemm("forward GEMM", M, N, K, NVFP4, "fp4")]
    backward = [
        kernel("dY both ways", "rotated, MS-EDEN", dy * (BF16 + 2 * (CODE + C)), per_value("dY both ways", dy)), finish("dY", dy, 2),
        again("W", w), finish("W", w), gemm("dgrad GEMM", M, K, N, NVFP4, "fp4"),
        again("X", x), finish("X", x), gemm("wgrad GEMM", N, K, M, NVFP4, "fp4")]
    return {"forward": forward, "backward": backward}


def kernel_times(k, card, share):
    """Seconds of each bound of a kernel."""
    return {"memory": k["bytes"] / (card["memory"] * share["memory"]),
            "issue": k["instructions"] / (card["fp32"] / 2 * share["issue"]),
            "tensor cores": k["flops"] / (card[k["rate"]] * share[k["rate"]])}


def kernel_seconds(k, card, share):
    return max(kernel_times(k, card, share).values()) + share["launch"] * k.get("launches", 1)


def predict(size, card, share, tokens=TOKENS, conversions="hardware", micro_batches=1):
    """-> seconds of BF16 and of Quartet II, forward and both passes, over the four linears; what Quartet II's kernels are bound by."""
    total = {"size": size, "bf16": {"forward": 0.0, "backward": 0.0}, "quartet2": {"forward": 0.0, "backward": 0.0}, "gemm": 0.0, "kernels": []}
    for linear, (N, K) in linears(size).items():
        for recipe, kernels in (("bf16", bf16_kernels(tokens, N, K)), ("quartet2", quartet2_kernels(tokens, N, K, conversions, micro_batches))):
            for phase, list_ in kernels.items():
                for k in list_:
                    seconds, times = kernel_seconds(k, card, share), kernel_times(k, card, share)
                    total[recipe][phase] += seconds
                    if recipe == "quartet2" and k["flops"]:
                        total["gemm"] += seconds
                    total["kernels"].append({**k, "linear": linear, "recipe": recipe, "phase": phase, "seconds": seconds, "bound": max(times, key=times.get)})
    for recipe in ("bf16", "quartet2"):
        total[recipe]["both"] = total[recipe]["forward"] + total[recipe]["backward"]
    for phase in ("forward", "both"):
        total[f"speedup_{phase}"] = total["bf16"][phase] / total["quartet2"][phase]
    total["gemm_share"] = total["gemm"] / total["quartet2"]["both"]
    return total


def implied_fp4(size, speedup, card, share, tokens=TOKENS, conversions="hardware", micro_batches=1):
    """The share of the FP4 peak at which the model gives `speedup` (forward and backward), None where no share does: what a measurement says of its GEMMs if
    all else is as modelled."""
    low, high = 1e-3, 2.0

    def at(fp4):
        return predict(size, card, {**share, "fp4": fp4}, tokens, conversions, micro_batches)["speedup_both"]
    if not at(low) <= speedup <= at(high):
        return None
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle) < speedup else (low, middle)
    return low


def shares(a, card):
    """-> share of each rate that kernels attain on this card, and the reason for the GEMMs' two."""
    if a.ideal:
        return {"bf16": 1.0, "fp4": 1.0, "memory": 1.0, "issue": 1.0, "launch": 0.0}, {"bf16": "--ideal", "fp4": "--ideal"}
    given = {"bf16": a.bf16_gemm, "fp4": a.fp4_gemm}
    share = {k: card["shares"][k][0] if given[k] is None else given[k] for k in given}
    why = {k: card["shares"][k][1] if given[k] is None else "given on the command line" for k in given}
    return {**share, "memory": a.memory, "issue": a.issue, "launch": a.launch_us * 1e-6}, why


def assumptions(a):
    conversions = "software" if a.software else "hardware"
    i = {k: v[conversions] for k, v in INSTRUCTIONS.items()}
    return [
        ("memory", f"{1.0 if a.ideal else a.memory:.3f} of the data sheet", "--ideal" if a.ideal else "a device copy on the H200: 4.20 of 4.8 TB/s; nothing stays in L2 between kernels"),
        ("issue", f"{1.0 if a.ideal else a.issue:.2f} of FP32 FLOP/s / 2", "--ideal" if a.ideal else "what rotate + MS-EDEN attains on the H200; four_six attains 0.77"),
        ("launch", f"{0.0 if a.ideal else a.launch_us:.1f} us a kernel", "--ideal" if a.ideal else "the gap between kernels of a stream whose queue is full"),
        ("quantize X, W", f"read {BF16}, write {NVFP4} B a value; {i['four_six']:.0f} instructions", "amax comes from the producer; the count is the H200's, whose roundings are in software: too many"),
        ("dY both ways", f"read {BF16}, write {2 * (CODE + C)} B a value; {i['dY both ways']:.1f} instructions",
         "H200: 50.6 for decoded operands; packed by cvt one more a value and direction, in software 74 (from the packed kernel's time at 0.65 of issue)"),
        ("X, W again", f"read {NVFP4}, write {CODE + C} B a value; {i['again']:.0f} instructions", "H200: 31 for decoded operands; packed as for dY"),
        ("scales", f"read {C}, write {SCALE} B a value; {i['finish']} instructions", "estimate: a quarter of a Philox, a division and an E4M3 rounding a block of 16"),
        ("W", f"1/{a.micro_batches} of its forward quantization", "once a step; the paper's benchmark quantizes it with every call: 1"),
        ("results", "BF16 in both recipes", "the trainer's float32 weight gradients cost both the same bytes more"),
        ("overlap", "none", "kernels follow each other; within one, memory, issue and tensor cores overlap fully"),
    ]


def share_of(text):
    value = float(text)
    if not 0 < value <= 2:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 2")
    return value


def counted(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def not_negative(text):
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no time")
    return value


def arguments(argv):
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    p.add_argument("--card", choices=[*CARDS, "all"], default="all")
    p.add_argument("--tokens", type=counted, default=TOKENS, help="tokens a micro-batch (%(default)s: the paper's)")
    p.add_argument("--micro-batches", type=counted, default=1, help="of a step, which share W's forward quantization (%(default)s)")
    p.add_argument("--software", action="store_true", help="without hardware conversions")
    p.add_argument("--ideal", action="store_true", help="every share 1, no launch gaps: the ceiling")
    p.add_argument("--bf16-gemm", type=share_of, help="share of the dense BF16 peak (B200 0.80, RTX 5090 1.12)")
    p.add_argument("--fp4-gemm", type=share_of, help="share of the dense FP4 peak (0.75)")
    p.add_argument("--memory", type=share_of, default=0.875, help="share of the memory rate (%(default)s)")
    p.add_argument("--issue", type=share_of, default=0.65, help="share of the issue rate (%(default)s)")
    p.add_argument("--launch-us", type=not_negative, default=2.0, help="gap before a kernel (%(default)s)")
    p.add_argument("--kernels", action="store_true", help="print every kernel")
    p.add_argument("--json", action="store_true", help="everything as one JSON object")
    return p.parse_args(argv)


def print_kernels(result):
    print(f"{'':8}{'linear':18}{'kernel':16}{'':28}{'MB':>9}{'TFLOP':>8}{'us':>9}  bound by")
    for k in result["kernels"]:
        print(f"{k['recipe']:10}{k['linear']:18}{k['name']:16}{k['what']:26}{k['bytes'] / 1e6:9.1f}{k['flops'] / 1e12:8.2f}{k['seconds'] * 1e6:9.1f}  {k['bound']}")


def main(argv=None):
    a = arguments(argv)
    names = list(CARDS) if a.card == "all" else [a.card]
    conversions = "software" if a.software else "hardware"
    share = {c: shares(a, CARDS[c]) for c in names}
    how = (a.tokens, conversions, a.micro_batches)
    results = {c: [predict(s, CARDS[c], share[c][0], *how) for s in SIZES] for c in names}
    for c in names:
        for r in results[c]:
            r["paper"] = PAPER.get(c, {}).get(r["size"])
            r["implied_fp4_share"] = implied_fp4(r["size"], r["paper"], CARDS[c], share[c][0], *how) if r["paper"] else None
    if a.json:
        print(json.dumps({"model": "prediction from data sheets, not measured", "tokens": a.tokens, "conversions": conversions, "micro_batches": a.micro_batches,
                          "cards": {c: {**CARDS[c], "shares": share[c][0], "shares_why": share[c][1]} for c in names},
                          "assumptions": [list(x) for x in assumptions(a)], "results": results}, indent=1))
        return 0
    print(f"Linear layers of one decoder layer, {a.tokens} tokens, Quartet II in native NVFP4 over BF16: a prediction from data sheets, not measured.\n")
    for what, value, why in assumptions(a):
        print(f"  {what:14}{value}\n  {'':14}  {why}")
    for c in names:
        print(f"\n{CARDS[c]['name']}: {CARDS[c]['source']}")
        for k in ("bf16", "fp4"):
            print(f"  {k.upper() + ' GEMM':14}{share[c][0][k]:.2f} of the dense peak\n  {'':14}  {share[c][1][k]}")
        print(f"  {'size':6}{'BF16 ms':>10}{'quartet2 ms':>13}{'GEMM share':>12}{'forward':>10}{'fwd+bwd':>10}{'paper':>8}{'model/paper':>13}{'FP4 GEMM that would give the paper':>38}")
        for r in results[c]:
            implied = f"{r['implied_fp4_share']:.2f} of the peak" if r["implied_fp4_share"] else "-"
            paper = f"{r['paper']:7.1f}x{r['speedup_both'] / r['paper']:13.2f}" if r["paper"] else f"{'-':>8}{'-':>13}"
            print(f"  {r['size']:6}{r['bf16']['both'] * 1e3:10.2f}{r['quartet2']['both'] * 1e3:13.2f}{r['gemm_share'] * 100:11.0f}%{r['speedup_forward']:9.2f}x{r['speedup_both']:9.2f}x{paper}{implied:>38}")
        if a.kernels:
            for r in results[c]:
                print(f"\n{CARDS[c]['name']}, {r['size']}")
                print_kernels(r)
    return 0


if __name__ == "__main__":
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        status = 1
    sys.exit(status)
