#!/usr/bin/env python3
"""An independent Llama in numpy float64: forward, loss, backward, clipped AdamW. Makes dev/test/llama_reference.bin for test_gpt2.cu.

    python3 dev/reference/llama_reference.py [OUT]

It shares no code with the C program: Philox, initial values, model and optimizer are written again from their definitions. The backward pass
is checked here by central differences along a random direction of every tensor; the script fails if they disagree.
Parameters are too many to store. Both sides make them: the initial values of seed 1234 rounded to BF16 and multiplied by 4 (exact; at 0.02 the
attention would be nearly uniform), and gains 1 + ((7 j + 5 index) mod 32 - 16)/64. Of each gradient the file holds the norm, products
with random +-1 vectors (their mean square estimates the squared error norm of all of the tensor), and evenly spaced entries.

The file, little-endian: int32 header[32] (names in HEADER below), int32 tokens and targets (micro_batches, B, T), int32 (length, sequence) of each
logits row, then float64: SCALARS below; the sensitivity of each result (see Noise), in the order in which the results follow: logits rows
(vocab values each); loss and gradient norm of each step; for every tensor its gradient, then for every tensor its change over all steps, as norm,
products, samples.
"""
import os
import sys

import numpy as np

LAYERS, WIDTH, HEADS, KV_HEADS, FFN, VOCAB, SEQ, BATCH, MICRO = 2, 128, 2, 1, 256, 128, 128, 2, 2
EPS, THETA = 1e-5, 1e4
SEED, SCALE = 1234, 4.0
STEPS, LR, BETA1, BETA2, ADAM_EPS, DECAY, CLIP = 10, 1e-3, 0.9, 0.95, 1e-4, 0.1, 1.0
PRODUCTS, SAMPLES = 32, 256
LOGITS = [(1, 0), (2, 1), (63, 1), (100, 0), (128, 0), (128, 1)]   # (length, sequence of micro-batch 0)
HEADER = ["magic", "version", "layers", "width", "heads", "kv_heads", "ffn", "vocab", "seq", "batch", "micro_batches", "steps", "products",
          "samples", "logits_rows", "tensors"]
SCALARS = ["norm_eps", "rope_theta", "seed", "init_scale", "lr", "beta1", "beta2", "adam_eps", "weight_decay", "clip"]
RNG_INIT, RNG_SAMPLE = 1, 7
HD, KVW = WIDTH // HEADS, KV_HEADS * (WIDTH // HEADS)
QKV = WIDTH + 2 * KVW


def philox(counter, step, address, seed):
    """Philox4x32-10 (Salmon et al. 2011) on counters of uint64 -> (n, 4) words."""
    mask = np.uint64(0xFFFFFFFF)
    counter = np.asarray(counter, np.uint64)
    c = [counter & mask, counter >> np.uint64(32), np.full(counter.shape, step, np.uint64), np.full(counter.shape, address, np.uint64)]
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(p1 >> np.uint64(32)) ^ c[1] ^ np.uint64(k0), p1 & mask, (p0 >> np.uint64(32)) ^ c[3] ^ np.uint64(k1), p0 & mask]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack(c, -1)


def bf16(x):
    """Nearest even, through the bits of the float32."""
    u = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    u = (u + 0x7FFF + ((u >> np.uint64(16)) & np.uint64(1))) & np.uint64(0xFFFF0000)
    return u.astype(np.uint32).view(np.float32).astype(np.float64)


def table():
    """(name, shape, standard deviation; 0: a gain), in the order of memory."""
    std, residual = np.float32(0.02), np.float32(0.02) / np.sqrt(np.float32(2 * LAYERS))
    t = [("embed", (VOCAB, WIDTH), std)]
    for l in range(LAYERS):
        t += [(f"{l}.attn_norm", (WIDTH,), 0), (f"{l}.qkv", (QKV, WIDTH), std), (f"{l}.attn_out", (WIDTH, WIDTH), residual),
              (f"{l}.ffn_norm", (WIDTH,), 0), (f"{l}.gate_up", (2 * FFN, WIDTH), std), (f"{l}.down", (WIDTH, FFN), residual)]
    return t + [("final_norm", (WIDTH,), 0), ("lm_head", (VOCAB, WIDTH), std)]


def initial(index, shape, std):
    n = int(np.prod(shape))
    if not std:
        return 1 + ((7 * np.arange(n) + 5 * index) % 32 - 16) / 64
    words = philox(np.arange((n + 3) // 4), index, RNG_INIT << 28, SEED).astype(np.float64)
    u = (np.floor(words[:, 0::2] / 256) + 1) * 2.0 ** -24
    angle = 2 * np.pi * words[:, 1::2] * 2.0 ** -32
    pair = np.sqrt(-2 * np.log(u))[..., None] * np.stack([np.cos(angle), np.sin(angle)], -1)
    return SCALE * bf16((float(std) * pair.reshape(-1)[:n]).astype(np.float32)).reshape(shape)


def rotate(x, sign):
    """x (B, heads, T, HD): rotate-half rotary embedding by sign * position."""
    t = np.arange(x.shape[2])[:, None] * THETA ** (-2.0 * np.arange(HD // 2) / HD)
    c, s = np.cos(t), sign * np.sin(t)
    a, b = x[..., :HD // 2], x[..., HD // 2:]
    return np.concatenate([a * c - b * s, b * c + a * s], -1)


BF16_ERROR = 2.0 ** -7 / np.sqrt(12) / np.sqrt(7 / 3)   # error norm over norm, mantissas even in 1..2: 1.48e-3


class Noise:
    """Relative noise as large as BF16's on every tensor that a program in low precision rounds, and weights truly rounded (theirs is no noise: a
    change of a few units in the last place is rounded alike in every step). What it does to a result is that result's sensitivity."""

    def __init__(self, seed=None):
        self.rng = None if seed is None else np.random.default_rng(seed)

    def __call__(self, x):
        return x if self.rng is None else x * (1 + BF16_ERROR * self.rng.standard_normal(x.shape))

    def weights(self, p):
        return p if self.rng is None else {n: bf16(x) for n, x in p.items()}


EXACT = Noise()


def norm(x, g):
    r = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + EPS)
    return x * r * g, (x, r, g)


def norm_back(dy, saved):
    x, r, g = saved
    h = dy * g
    return r * h - x * r ** 3 * (h * x).mean(-1, keepdims=True), (dy * x * r).sum((0, 1))


def split(x, heads):
    return x.reshape(x.shape[0], x.shape[1], heads, HD).transpose(0, 2, 1, 3)


def join(x):
    return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)


def weight_grad(dy, x):
    return np.einsum("btn,btk->nk", dy, x)


def run(p, tokens, targets=None, noise=EXACT):
    """tokens (B,T) -> logits; with targets (mean loss, gradients)."""
    saved, T = [], tokens.shape[1]
    p = noise.weights(p)
    x = p["embed"][tokens]
    mask = np.triu(np.full((T, T), -np.inf), 1)
    for l in range(LAYERS):
        h, n1 = norm(x, p[f"{l}.attn_norm"])
        h = noise(h)
        qkv = noise(h @ p[f"{l}.qkv"].T)
        q, k = noise(rotate(split(qkv[..., :WIDTH], HEADS), 1)), noise(rotate(split(qkv[..., WIDTH:WIDTH + KVW], KV_HEADS), 1))
        v = split(qkv[..., WIDTH + KVW:], KV_HEADS)
        K, V = np.repeat(k, HEADS // KV_HEADS, 1), np.repeat(v, HEADS // KV_HEADS, 1)
        s = q @ K.transpose(0, 1, 3, 2) / np.sqrt(HD) + mask
        a = np.exp(s - s.max(-1, keepdims=True))
        a = noise(a / a.sum(-1, keepdims=True))
        o = noise(join(a @ V))
        x = noise(x + o @ p[f"{l}.attn_out"].T)
        h2, n2 = norm(x, p[f"{l}.ffn_norm"])
        h2 = noise(h2)
        gu = noise(h2 @ p[f"{l}.gate_up"].T)
        gate, up = gu[..., :FFN], gu[..., FFN:]
        sig = 1 / (1 + np.exp(-gate))
        y = noise(gate * sig * up)
        x = noise(x + y @ p[f"{l}.down"].T)
        saved.append((h, n1, q, K, V, a, o, h2, n2, gate, up, sig, y))
    z, n3 = norm(x, p["final_norm"])
    z = noise(z)
    logits = noise(z @ p["lm_head"].T)
    if targets is None:
        return logits
    e = np.exp(logits - logits.max(-1, keepdims=True))
    prob = e / e.sum(-1, keepdims=True)
    at = np.take_along_axis(prob, targets[..., None], -1)
    loss = -np.log(at).mean()
    d = prob.copy()
    np.put_along_axis(d, targets[..., None], at - 1, -1)
    d = noise(d / targets.size)
    g = {"lm_head": weight_grad(d, z)}
    dx, g["final_norm"] = norm_back(noise(d @ p["lm_head"]), n3)
    for l in reversed(range(LAYERS)):
        h, n1, q, K, V, a, o, h2, n2, gate, up, sig, y = saved[l]
        dx = noise(dx)
        g[f"{l}.down"] = weight_grad(dx, y)
        dy = noise(dx @ p[f"{l}.down"])
        dgu = noise(np.concatenate([dy * up * sig * (1 + gate * (1 - sig)), dy * gate * sig], -1))
        g[f"{l}.gate_up"] = weight_grad(dgu, h2)
        back, g[f"{l}.ffn_norm"] = norm_back(noise(dgu @ p[f"{l}.gate_up"]), n2)
        dx = noise(dx + back)
        g[f"{l}.attn_out"] = weight_grad(dx, o)
        do = noise(split(dx @ p[f"{l}.attn_out"], HEADS))
        da = do @ V.transpose(0, 1, 3, 2)
        ds = noise(a * (da - (a * da).sum(-1, keepdims=True)) / np.sqrt(HD))
        B = tokens.shape[0]
        dk = (ds.transpose(0, 1, 3, 2) @ q).reshape(B, KV_HEADS, -1, T, HD).sum(2)
        dv = (a.transpose(0, 1, 3, 2) @ do).reshape(B, KV_HEADS, -1, T, HD).sum(2)
        dqkv = noise(np.concatenate([join(rotate(ds @ K, -1)), join(rotate(dk, -1)), join(dv)], -1))
        g[f"{l}.qkv"] = weight_grad(dqkv, h)
        back, g[f"{l}.attn_norm"] = norm_back(noise(dqkv @ p[f"{l}.qkv"]), n1)
        dx = dx + back
    g["embed"] = np.zeros_like(p["embed"])
    np.add.at(g["embed"], tokens, dx)
    return loss, g


def step_gradient(p, tokens, targets, noise=EXACT):
    """Mean over the micro-batches."""
    parts = [run(p, tokens[i], targets[i], noise) for i in range(MICRO)]
    return sum(l for l, _ in parts) / MICRO, {n: sum(g[n] for _, g in parts) / MICRO for n in p}


def total_norm(g):
    return float(np.sqrt(sum((x * x).sum() for x in g.values())))


def check_by_differences(p, g, tokens, targets, rng):
    """Central differences along a random direction of each tensor. Step h: error h^2 f''' / 6 + rounding 1e-16 loss / h, least near h = 1e-5."""
    worst = 0.0
    for name in p:
        v = rng.standard_normal(p[name].shape)
        v *= 1e-4 * np.sqrt((p[name] ** 2).mean())
        f = [np.mean([run({**p, name: p[name] + s * v}, tokens[i], targets[i])[0] for i in range(MICRO)]) for s in (1, -1)]
        numeric, exact = (f[0] - f[1]) / 2, (g[name] * v).sum()
        error = abs(numeric - exact) / (np.sqrt((g[name] ** 2).sum()) * np.sqrt((v ** 2).sum()))
        worst = max(worst, error)
        if not error < 1e-7:
            sys.exit(f"error: backward of {name} disagrees with differences: {exact:.12g} against {numeric:.12g}")
    print(f"backward against central differences: worst error {worst:.1e} of |gradient| |direction|")


def summary(x, index):
    """norm, products with +-1 vectors (bit e of product r: word r*ceil(n/32) + e/32 of stream (77, step=index, RNG_SAMPLE)), samples."""
    x = x.reshape(-1)
    n, words = x.size, (x.size + 31) // 32
    bits = philox(np.arange((PRODUCTS * words + 3) // 4), index, RNG_SAMPLE << 28, 77).reshape(-1)[:PRODUCTS * words].reshape(PRODUCTS, words)
    signs = 1 - 2.0 * ((bits[:, :, None] >> np.arange(32, dtype=np.uint64)) & np.uint64(1)).reshape(PRODUCTS, -1)[:, :n]
    count = min(n, SAMPLES)
    return np.concatenate([[np.sqrt((x * x).sum())], signs @ x, x[np.arange(count) * n // count]])


def train(p, tokens, targets, tensors, noise=EXACT, say=False):
    """Everything that is compared, as arrays: logits rows; loss and gradient norm of each step; gradients of the first step; changes over all steps."""
    results = [run(p, tokens[0, s:s + 1, :n], None, noise)[0, -1] for n, s in LOGITS]
    start, first, curve = p, None, []
    m, v = {n: 0 * x for n, x in p.items()}, {n: 0 * x for n, x in p.items()}
    for step in range(STEPS):
        loss, g = step_gradient(p, tokens, targets, noise)
        first = first or g
        size = total_norm(g)
        curve += [np.array([loss]), np.array([size])]
        clip, new = CLIP / size if size > CLIP else 1.0, {}
        for name, _, std in tensors:
            gc = g[name] * clip
            m[name] = BETA1 * m[name] + (1 - BETA1) * gc
            v[name] = BETA2 * v[name] + (1 - BETA2) * gc * gc
            update = m[name] / (1 - BETA1 ** (step + 1)) / (np.sqrt(v[name] / (1 - BETA2 ** (step + 1))) + ADAM_EPS)
            new[name] = p[name] - LR * (update + (DECAY * p[name] if std else 0))
        p = new
        if say:
            print(f"step {step}: loss {loss:.6f}, gradient norm {size:.6f}")
    return results + curve + [first[n] for n in p] + [p[n] - start[n] for n in p]


def sensitivities(exact, p, tokens, targets, tensors):
    """Of each result: its relative error over that of each rounding (root mean square over some draws of the noise)."""
    draws = 4
    total = np.zeros(len(exact))
    for d in range(draws):
        noisy = train(p, tokens, targets, tensors, Noise(100 + d))
        total += [((a - b) ** 2).sum() / (a ** 2).sum() / BF16_ERROR ** 2 / draws for a, b in zip(exact, noisy)]
    return np.sqrt(total)


def main():
    out = sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "test", "llama_reference.bin")
    rng = np.random.default_rng(5)
    # A text with some order in it: each token follows from the one before, or is random one time in three.
    stream = np.empty((MICRO, BATCH, SEQ + 1), np.int64)
    stream[..., 0] = rng.integers(0, VOCAB, (MICRO, BATCH))
    for t in range(SEQ):
        chance = rng.random((MICRO, BATCH)) < 1 / 3
        stream[..., t + 1] = np.where(chance, rng.integers(0, VOCAB, (MICRO, BATCH)), (stream[..., t] * 5 + 17) % VOCAB)
    tokens, targets = stream[..., :-1], stream[..., 1:]

    tensors = table()
    p = {name: initial(i, shape, std) for i, (name, shape, std) in enumerate(tensors)}
    check_by_differences(p, step_gradient(p, tokens, targets)[1], tokens, targets, rng)
    results = train(p, tokens, targets, tensors, say=True)
    sensitive = sensitivities(results, p, tokens, targets, tensors)

    header = np.zeros(32, "<i4")
    header[:len(HEADER)] = [0x4C524546, 1, LAYERS, WIDTH, HEADS, KV_HEADS, FFN, VOCAB, SEQ, BATCH, MICRO, STEPS, PRODUCTS, SAMPLES, len(LOGITS),
                            len(tensors)]
    scalars = [EPS, THETA, SEED, SCALE, LR, BETA1, BETA2, ADAM_EPS, DECAY, CLIP]
    plain = len(LOGITS) + 2 * STEPS
    with open(out, "wb") as f:
        f.write(header.tobytes())
        for ints in (tokens, targets, np.array(LOGITS)):
            f.write(ints.astype("<i4").tobytes())
        for doubles in [scalars, sensitive] + results[:plain] + [summary(x, i % len(tensors)) for i, x in enumerate(results[plain:])]:
            f.write(np.asarray(doubles, "<f8").tobytes())
    print(f"{os.path.getsize(out)} bytes written to {os.path.relpath(out)}")


if __name__ == "__main__":
    main()
