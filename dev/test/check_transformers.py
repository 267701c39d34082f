#!/usr/bin/env python3
"""Does Hugging Face transformers read a checkpoint as the same model?

  dev/test/check_transformers.py RUN_FOLDER... [--logits-program PROGRAM [--must-notice KEY=FACTOR]...]

Loads the newest checkpoint of each finished run with LlamaForCausalLM (float32 arithmetic), evaluates it on the validation tokens
that the run's last evaluation used, and compares the loss with the logged one. Needs torch and transformers.
Tolerance 0.2 %: the trainer rounds lm_head's operands, and on the GPU all activations, to BF16 (2^-9 relative, averaged over
thousands of tokens); an exchanged name, a wrong rotary convention or norm epsilon moves the loss by far more.

With PROGRAM (build/dump_logits_cpu, or build/dump_logits for the GPU) it compares the logits instead, every one of four sequences: the saved
weights are the model, so PROGRAM computes with the BF16 recipe whatever recipe trained them. Error: ||a - b|| / ||b||, b the
float32 logits of transformers. Two bounds, both must hold:
  - Roundings. Along the residual stream a layer rounds 13 tensors to BF16: norm, qkv, rotated q and k (one error of the scores),
    probabilities, attention's output, o_proj, sum; norm, gate, up, SwiGLU, down, sum; final norm and logits add 2. A rounding
    to nearest errs by at most 2^-8, as root mean square 1.5e-3 < 2^-9; as independent errors they add to sqrt(13 layers + 2) 2^-9.
  - Yardstick. Twice what transformers' own BF16 logits err: both round alike, each at places of its own choice.
The trainer's forward under the run's own recipe (FP8, FP4) is another function of the same weights: printed, not judged. So is
that under fp32, which on the CPU rounds nothing to BF16.
--must-notice checks this check: the first run's model is loaded once more with that number of its configuration (rms_norm_eps, rope_theta)
multiplied, and the comparison must fail.
Last line: "N passed, N failed".
"""
import argparse, glob, json, math, os, struct, subprocess, sys, tempfile

SEQUENCES = 4


def read_tokens(pattern):
    """The tokens of llm.c shards, in the order of their names."""
    tokens = []
    for path in sorted(glob.glob(pattern)):
        with open(path, "rb") as f:
            header = struct.unpack("<256i", f.read(1024))
            size = {20240520: "H", 20240801: "I"}[header[0]]
            tokens += struct.unpack(f"<{header[2]}{size}", f.read(header[2] * struct.calcsize(size)))
    return tokens


def load_model(checkpoint, dtype, spoil):
    """LlamaForCausalLM of the checkpoint; spoil: (key, factor) on its configuration, or None."""
    from transformers import LlamaConfig, LlamaForCausalLM
    config = LlamaConfig.from_pretrained(checkpoint)
    if spoil:
        key, factor = spoil
        rope = getattr(config, "rope_parameters", None)                # where newer versions keep rope_theta
        if rope and key in rope:
            rope[key] *= factor
        else:
            setattr(config, key, getattr(config, key) * factor)
    return LlamaForCausalLM.from_pretrained(checkpoint, config=config, dtype=dtype).eval()


def compare_loss(model, options, tokens, logged):
    """The loss of the run's last evaluation -> what to print, and whether it holds."""
    import torch
    batch, seq = options["batch"], options["seq"]
    most = (len(tokens) - 1) // seq // batch
    batches = min(max(options["eval-tokens"] // (batch * seq), 1), most)
    total = 0.0
    with torch.no_grad():
        for i in range(batches):
            x = torch.tensor([tokens[(i * batch + b) * seq:(i * batch + b) * seq + seq + 1] for b in range(batch)])
            logits = model(x[:, :-1]).logits
            total += torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]).double(), x[:, 1:].reshape(-1)).item()
    loss = total / batches
    difference = abs(loss / logged - 1)
    return f"transformers {loss:.5f}, trainer {logged:.5f}, difference {100 * difference:.4f} %", math.isfinite(loss) and difference <= 2e-3


def program_logits(program, checkpoint, recipe, x):
    """The trainer's logits (B,T,V) of the tokens x (B,T)."""
    import torch
    with tempfile.TemporaryDirectory() as folder:
        tokens, logits = os.path.join(folder, "tokens"), os.path.join(folder, "logits")
        x.to(torch.int32).numpy().tofile(tokens)
        subprocess.run([program, checkpoint, recipe, tokens, logits], check=True, stdout=subprocess.DEVNULL)
        with open(logits, "rb") as f:
            return torch.frombuffer(bytearray(f.read()), dtype=torch.float32).reshape(*x.shape, -1).double()


def compare_logits(checkpoint, options, tokens, program, spoil):
    """Every logit of the first SEQUENCES validation sequences -> what to print, and whether the bounds hold."""
    import torch
    seq = options["seq"]
    x = torch.tensor(tokens[:SEQUENCES * seq]).reshape(SEQUENCES, seq)
    with torch.no_grad():
        model = load_model(checkpoint, torch.float32, spoil)
        reference = model(x).logits.double()
        rounded = load_model(checkpoint, torch.bfloat16, spoil)(x).logits.double()
    error = lambda a: ((a - reference).norm() / reference.norm()).item()
    ours = program_logits(program, checkpoint, "bf16", x)
    others = {} if spoil else {recipe: error(program_logits(program, checkpoint, recipe, x)) for recipe in sorted({"fp32", options["recipe"]} - {"bf16"})}
    ours_error, yardstick = error(ours), error(rounded)
    bound = math.sqrt(13 * model.config.num_hidden_layers + 2) * 2**-9
    agree = lambda a: 100 * (a.argmax(-1) == reference.argmax(-1)).double().mean().item()
    text = (f"{reference.numel()} logits: error {ours_error:.3e}; bounds {bound:.3e} and twice transformers' BF16 error {yardstick:.3e}; "
            f"same largest {agree(ours):.2f} % (transformers' BF16 {agree(rounded):.2f} %)" + "".join(f"; under {recipe} {e:.1e}" for recipe, e in others.items()))
    return text, ours_error <= min(bound, 2 * yardstick)               # a NaN is not


def check_run(run, program, spoil=None):
    """-> what to print, and whether the run's newest checkpoint is the same model."""
    import torch
    with open(os.path.join(run, "log.jsonl"), encoding="utf-8") as f:
        lines = [json.loads(line) for line in f]
    options = next(line["run"]["options"] for line in lines if "run" in line)
    checkpoint = sorted(glob.glob(os.path.join(run, "step_*")))[-1]
    tokens = read_tokens(options["val-data"])
    if program:
        return compare_logits(checkpoint, options, tokens, program, spoil)
    logged = [line for line in lines if "eval" in line][-1]
    if int(checkpoint[-8:]) != logged["eval"]:
        sys.exit(f"error: {checkpoint} is not the model of the last evaluation (step {logged['eval']}); train with --save-every at the last step")
    return compare_loss(load_model(checkpoint, torch.float32, None), options, tokens, logged["val_loss"])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", nargs="+", metavar="RUN_FOLDER")
    parser.add_argument("--logits-program")
    parser.add_argument("--must-notice", action="append", default=[], metavar="KEY=FACTOR")
    args = parser.parse_args()
    if args.must_notice and not args.logits_program:
        parser.error("--must-notice needs --logits-program")
    good = []
    for run in args.runs:
        text, ok = check_run(run, args.logits_program)
        good.append(ok)
        print(f"{os.path.basename(os.path.normpath(run))}: {text} {'ok' if ok else 'FAILED'}", flush=True)
    for spoil in args.must_notice:
        key, factor = spoil.split("=")
        text, ok = check_run(args.runs[0], args.logits_program, (key, float(factor)))
        good.append(not ok)
        print(f"{spoil}: {text} {'FAILED to be noticed' if ok else 'noticed'}", flush=True)
    print(f"{sum(good)} passed, {len(good) - sum(good)} failed")
    sys.exit(not all(good))


if __name__ == "__main__":
    main()
