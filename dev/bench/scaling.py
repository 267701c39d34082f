#!/usr/bin/env python3
"""Predicts the step time on 1 to 1024 GPUs, on paper, from a model's sizes, one measured step on one GPU, and link speeds. Nothing here was measured
on several GPUs.

  dev/bench/scaling.py [--model 1.9B] [--step-ms 338.87] [--zero 0|1] [--reduce-dtype float32|bf16] [--total-batch TOKENS] [--weak]

Defaults: the step of one H200 of dev/bench/h200.md (bf16, one micro-batch of the preset's batch), eight GPUs a node. Assumptions:
  1. Time of a micro-batch is proportional to its tokens, whatever their number; a third of it is forward, two thirds backward, in which the layers share alike
     but for lm_head and loss, which come first and count by their FLOPs. (Small micro-batches on real cards take longer than that.)
  2. The optimizer's pass is memory traffic: 24 bytes a parameter at 4.2 TB/s, 1/N of it under ZeRO-1, and is part of the measured step.
  3. An all-reduce of S bytes over N ranks takes 2 (N-1)/N S / W, reduce-scatter and all-gather half of that each, W being --nvlink inside a node and the
     smaller of that and the node's whole network (--network x GPUs a node, one adapter a GPU) beyond it, times --efficiency; and a latency of --latency
     for each doubling of N.
  4. A bucket's reduction begins when its backward ends and buckets go one after another; what is not done when backward ends delays the update. Backward does
     not slow down under it. ZeRO-1's all-gather of BF16 parameters is not hidden at all.
  5. Steps are alike on all ranks: no stragglers, no loading, no saving."""

import argparse
import sys

from cost import flops_per_token, layer_matrices, parameters, presets

STEP_MS = {"30M": 42.39, "100M": 102.44, "560M": 199.97, "1.9B": 338.87}  # one micro-batch, bf16, dev/bench/h200.md
MEMORY = 4.2e12
COUNTS = [2 ** k for k in range(11)]


def bus(a, ranks):
    inside = a.nvlink * 1e9
    return a.efficiency * (inside if ranks <= a.node else min(inside, a.network * 1e9 * a.node))


def collective(a, size, ranks, passes):
    """Seconds: passes 2 for all-reduce, 1 for reduce-scatter and all-gather."""
    if ranks == 1:
        return 0.0
    return passes * (ranks - 1) / ranks * size / bus(a, ranks) + a.latency * 1e-6 * (ranks - 1).bit_length()


def buckets(p):
    """Parameters of each bucket in the order of backward: what follows the layers, the layers from the last, the embedding."""
    head = p["vocab"] * p["width"]
    return [head + p["width"]] + [layer_matrices(p) + 2 * p["width"]] * p["layers"] + [head]


def step(a, p, ranks, tokens):
    """-> seconds of compute, of communication that nothing hides, for `tokens` tokens a rank in micro-batches of at most the preset's."""
    whole = p["batch"] * p["seq"]
    optimizer = 24 * parameters(p) / MEMORY
    per_token = (a.step_ms * 1e-3 - optimizer) / whole
    compute = per_token * tokens + optimizer / (ranks if a.zero else 1)
    last = min(tokens, whole)                              # backward of the last micro-batch hides the reductions
    share = 6 * p["vocab"] * p["width"] / flops_per_token(p)
    backward = per_token * last * 2 / 3
    parts = [share * backward] + [(1 - share) * backward / p["layers"]] * p["layers"] + [0.0]
    computed = sent = 0.0
    for count, part in zip(buckets(p), parts):
        computed += part
        sent = max(sent, computed) + collective(a, count * (2 if a.reduce_dtype == "bf16" else 4), ranks, 1 if a.zero else 2)
    exposed = sent - computed if ranks > 1 else 0.0
    if a.zero:
        exposed += sum(collective(a, 2 * count, ranks, 1) for count in buckets(p))
    return compute, exposed


def table(a):
    """-> rows (GPUs, tokens a GPU, seconds a step, exposed seconds, tokens/s, efficiency against one GPU); None seconds: less than a sequence a GPU."""
    p = presets()[a.model]
    rows, alone = [], None
    for ranks in COUNTS:
        tokens = a.total_batch if a.weak else a.total_batch / ranks
        if tokens < p["seq"]:
            rows.append((ranks, tokens, None, None, None, None))
            continue
        compute, exposed = step(a, p, ranks, tokens)
        rate = tokens * ranks / (compute + exposed)
        alone = alone or rate
        rows.append((ranks, tokens, compute + exposed, exposed, rate, rate / ranks / alone))
    return rows


def options(arguments):
    o = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    o.add_argument("--model", default="1.9B", choices=list(presets()))
    o.add_argument("--step-ms", type=float, help="of one micro-batch of the preset on one GPU, optimizer included")
    o.add_argument("--zero", type=int, default=0, choices=(0, 1))
    o.add_argument("--reduce-dtype", default="float32", choices=("float32", "bf16"))
    o.add_argument("--total-batch", type=float, help="tokens a step of all GPUs, with --weak of each [the preset's; --weak: one micro-batch]")
    o.add_argument("--weak", action="store_true", help="the same tokens a GPU, not in all")
    o.add_argument("--node", type=int, default=8, help="GPUs a node [8]")
    o.add_argument("--nvlink", type=float, default=450, help="GB/s of a GPU each way [450]")
    o.add_argument("--network", type=float, default=50, help="GB/s of an adapter each way, one a GPU [50: 400 Gbit/s]")
    o.add_argument("--efficiency", type=float, default=0.8, help="share of a link that a collective reaches [0.8]")
    o.add_argument("--latency", type=float, default=15, help="microseconds a collective for each doubling of the GPUs [15]")
    a = o.parse_args(arguments)
    p = presets()[a.model]
    if a.step_ms is None:
        if a.model not in STEP_MS:
            o.error(f"no step of {a.model} was measured: give --step-ms")
        a.step_ms = STEP_MS[a.model]
    a.total_batch = a.total_batch or (p["batch"] * p["seq"] if a.weak else p["total_batch"])
    if not (a.step_ms > 0 and a.nvlink > 0 and a.network > 0 and 0 < a.efficiency <= 1 and a.total_batch >= p["seq"]):
        o.error("times, speeds and shares must be above 0, and --total-batch at least one sequence")
    if a.step_ms * 1e-3 <= 24 * parameters(p) / MEMORY:
        o.error(f"--step-ms {a.step_ms}: the optimizer's pass alone takes {24e3 * parameters(p) / MEMORY:.1f} ms")
    return a


def main(arguments):
    a = options(arguments)
    print(f"{a.model}, {a.step_ms} ms a micro-batch on one GPU (measured); ZeRO-{a.zero}, gradients in {a.reduce_dtype}; "
          f"{a.total_batch:.0f} tokens a step {'on each GPU' if a.weak else 'in all'}; on paper: see --help for what is assumed")
    print(f"{'GPUs':>5} {'tokens/GPU':>11} {'step ms':>9} {'exposed ms':>11} {'tokens/s':>12} {'efficiency':>11}")
    for ranks, tokens, seconds, exposed, rate, efficiency in table(a):
        if seconds is None:
            print(f"{ranks:5d} {tokens:11.0f} less than a sequence a GPU: raise --total-batch")
        else:
            print(f"{ranks:5d} {tokens:11.0f} {seconds * 1e3:9.2f} {exposed * 1e3:11.2f} {rate:12.0f} {efficiency:11.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
