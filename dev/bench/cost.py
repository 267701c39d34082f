#!/usr/bin/env python3
"""What a reference run costs: FLOPs, GPU hours, memory a GPU. The headers of scripts/run_*.sh are this program's output.

  dev/bench/cost.py MODEL TOKENS       one run, e.g. 1.9B 38e9
  dev/bench/cost.py --headers          writes the cost into the headers of scripts/run_*.sh (a line "# cost: MODEL TOKENS" asks for it)

Presets are read from llmc/model_file.h, so that nothing is stated twice. FLOPs a token: 6 x parameters in matrix products + 6 x layers x width x
sequence (llama_flops_per_token: causal attention, forward and backward). GPU hours: FLOPs / (MFU x 989e12), an H200's dense BF16 peak; MFU as
measured on one H200 (dev/bench/h200.md), 50 % for bf16, 40 % for quartet2. Memory: what cuda/memory.cuh plans under --recompute norm at the preset's batch,
counted from the same shapes; without NCCL's own buffers and the CUDA context (about 1 GiB)."""

import os
import re
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PEAK = 989e12
MFU = {"bf16": 0.50, "quartet2": 0.40}


def presets():
    """name -> layers, width, heads, vocab, seq, batch, total_batch"""
    with open(os.path.join(ROOT, "llmc", "model_file.h"), encoding="utf-8") as f:
        rows = re.findall(r'\{"([^"]+)", (\d+), (\d+), (\d+), (\d+), (\d+), [\d.e-]+, (\d+), (\d+)\}', f.read())
    return {name: dict(zip(("layers", "width", "heads", "vocab", "seq", "batch", "total_batch"), map(int, rest))) for name, *rest in rows}


def ffn(p):
    return (8 * p["width"] // 3 + 255) // 256 * 256


def layer_matrices(p):
    d = p["width"]
    return 4 * d * d + 3 * d * ffn(p)


def parameters(p):
    return 2 * p["vocab"] * p["width"] + p["layers"] * (layer_matrices(p) + 2 * p["width"]) + p["width"]


def flops_per_token(p):
    return 6 * (p["layers"] * layer_matrices(p) + p["vocab"] * p["width"]) + 6 * p["layers"] * p["width"] * p["seq"]


def state_bytes(p, ranks=1, zero=0):
    """BF16 parameters, float32 gradients, float32 m and v; ZeRO-1 spreads the last two."""
    return parameters(p) * (2 + 4 + 8 / (ranks if zero else 1))


def activation_bytes(p, batch):
    """Per layer and token: the residual stream twice, attention's output, q k v, gate and up, SwiGLU's output in BF16, and the statistics;
    once: four streams and the widest of the phases' work spaces (logits: 512 MiB at least)."""
    d, f, tokens = p["width"], ffn(p), batch * p["seq"]
    layer = 2 * (3 * d + 3 * d + 3 * f) + 8 + 4 * p["heads"]
    work = max(2 * tokens * (f + 3 * d + 2 * f), 512 << 20)
    return p["layers"] * layer * tokens + 4 * 2 * d * tokens + work


def gib(n):
    return n / 2 ** 30


def cost(name, tokens):
    """The lines of a header, without the leading '# '."""
    p = presets()[name]
    total = flops_per_token(p) * tokens
    hours = {recipe: total / (share * PEAK) / 3600 for recipe, share in MFU.items()}
    memory = state_bytes(p) + activation_bytes(p, p["batch"])
    lines = [f"{parameters(p) / 1e6:.1f} M parameters, {tokens / 1e9:.4g} B tokens ({tokens / parameters(p):.0f} a parameter), "
             f"{flops_per_token(p) / 1e9:.3f} GFLOP a token: {total:.2e} FLOPs",
             "H200 hours at a stated MFU: " + ", ".join(f"{hours[r]:.1f} for {r} ({MFU[r]:.0%})" for r in MFU),
             f"memory a GPU at batch {p['batch']}: {gib(memory):.1f} GiB, of which {gib(parameters(p) * 8):.1f} GiB optimizer state (1/N of that with --zero 1 on N GPUs)"]
    return lines


def header_of(text):
    """-> the text of a script with its cost lines made anew: those between "# cost: MODEL TOKENS" and the next line that does not begin with '#   '."""
    def fill(match):
        return match.group(1) + "".join(f"#   {line}\n" for line in cost(match.group(2), float(match.group(3))))
    return re.sub(r"(# cost: (\S+) (\S+)[^\n]*\n)(?:#   [^\n]*\n)*", fill, text)


def main(arguments):
    if arguments == ["--headers"]:
        folder = os.path.join(ROOT, "scripts")
        for name in sorted(os.listdir(folder)):
            path = os.path.join(folder, name)
            with open(path, encoding="utf-8") as f:
                text = f.read()
            if "# cost: " in text:
                with open(path, "w", encoding="utf-8") as f:
                    f.write(header_of(text))
                print(f"wrote {path}")
        return 0
    if len(arguments) == 2 and arguments[0] in presets():
        try:
            print("\n".join(cost(arguments[0], float(arguments[1]))))
            return 0
        except ValueError:
            pass
    print(f"usage: cost.py MODEL TOKENS | --headers; MODEL is one of {', '.join(presets())}, TOKENS a number such as 3e9", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
