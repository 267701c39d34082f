#!/usr/bin/env python3
"""Does Hugging Face transformers read a checkpoint as the same model?

  dev/test/check_transformers.py RUN_FOLDER

Loads the newest checkpoint of a finished run with LlamaForCausalLM (float32 arithmetic), evaluates it on the validation tokens
that the run's last evaluation used, and compares the loss with the logged one. Needs torch and transformers.
Tolerance 0.2 %: the trainer rounds lm_head's operands, and on the GPU all activations, to BF16 (2^-9 relative, averaged over
thousands of tokens); an exchanged name, a wrong rotary convention or norm epsilon moves the loss by far more.
Last line: "N passed, N failed".
"""
import glob, json, math, os, struct, sys


def read_tokens(pattern):
    """The tokens of llm.c shards, in the order of their names."""
    tokens = []
    for path in sorted(glob.glob(pattern)):
        with open(path, "rb") as f:
            header = struct.unpack("<256i", f.read(1024))
            size = {20240520: "H", 20240801: "I"}[header[0]]
            tokens += struct.unpack(f"<{header[2]}{size}", f.read(header[2] * struct.calcsize(size)))
    return tokens


def main():
    import torch
    from transformers import LlamaForCausalLM
    if len(sys.argv) != 2:
        sys.exit("usage: dev/test/check_transformers.py RUN_FOLDER")
    run = sys.argv[1]
    lines = [json.loads(line) for line in open(os.path.join(run, "log.jsonl"), encoding="utf-8")]
    options = next(line["run"]["options"] for line in lines if "run" in line)
    logged = [line for line in lines if "eval" in line][-1]
    checkpoint = sorted(glob.glob(os.path.join(run, "step_*")))[-1]
    if int(checkpoint[-8:]) != logged["eval"]:
        sys.exit(f"error: {checkpoint} is not the model of the last evaluation (step {logged['eval']}); train with --save-every at the last step")
    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    batch, seq = options["batch"], options["seq"]
    tokens = read_tokens(options["val-data"])
    most = (len(tokens) - 1) // seq // batch
    batches = min(max(options["eval-tokens"] // (batch * seq), 1), most)
    total = 0.0
    with torch.no_grad():
        for i in range(batches):
            x = torch.tensor([tokens[(i * batch + b) * seq:(i * batch + b) * seq + seq + 1] for b in range(batch)])
            logits = model(x[:, :-1]).logits
            total += torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]).double(), x[:, 1:].reshape(-1)).item()
    loss = total / batches
    difference = abs(loss / logged["val_loss"] - 1)
    ok = math.isfinite(loss) and difference <= 2e-3
    print(f"{checkpoint}: transformers {loss:.5f}, trainer {logged['val_loss']:.5f}, difference {100 * difference:.4f} % {'ok' if ok else 'FAILED'}")
    print(f"{int(ok)} passed, {int(not ok)} failed")
    sys.exit(not ok)


if __name__ == "__main__":
    main()
