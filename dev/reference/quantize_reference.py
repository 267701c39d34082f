#!/usr/bin/env python3
"""Independent numpy reference of the block quantizers, and the maker of the golden vectors under dev/test/golden.

    quantize_reference.py vectors [FOLDER]   writes gauss, edge, zeros, formats, posthoc and search .json (default: dev/test/golden)
    quantize_reference.py check [FOLDER]     exit 1 if the files in FOLDER are not what `vectors` would write
    quantize_reference.py table              relative MSE and misalignment of every quantizer on N(0,1)

It shares no code with llmc/: formats are searched in tables of their values, in float64, and everything else is float32
arithmetic in the order that llmc/quantize.h states. Every array is float32; a matrix (rows, cols) is quantized along cols.
"""
import json
import os
import sys
import tempfile

import numpy as np

f32, f64, u32 = np.float32, np.float64, np.uint32
E2M1 = np.array([0, .5, 1, 1.5, 2, 3, 4, 6], f32)
E4M3 = np.array([m * 2.0 ** -9 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:127], f32)
EDEN_OVERRIDE = (17 / 16) * 0.93
EPS = f32(1e-8)


# ----------------------------------------------------------------------------------------------------------------------
# Formats


def e2m1_rne(v):
    """float32 -> code 0..15, nearest, ties to the even code, saturating at 6. Negatives that round to zero keep the sign bit."""
    a = np.minimum(np.abs(v), f32(6)).astype(f64)
    k = np.searchsorted(np.array([.25, .75, 1.25, 1.75, 2.5, 3.5, 5]), a, side="left")  # a tie stays below ...
    k = k + np.isin(a, [.75, 1.75, 3.5])                                                # ... unless its even neighbour is above
    return (k + 8 * np.signbit(v)).astype(np.uint8)


def stochastic(a, grid, last, u):
    """Index into grid: up in magnitude iff u < frac * 2^32, frac exact in float64."""
    g = grid.astype(f64)
    k = np.clip(np.searchsorted(g, a, side="right") - 1, 0, last - 1)
    frac = (a - g[k]) / (g[k + 1] - g[k])
    return k + (u.astype(f64) < frac * 2.0 ** 32)


def e2m1_sr(v, u):
    a = np.minimum(np.abs(v), f32(6)).astype(f64)
    return (stochastic(a, E2M1, 7, u) + 8 * np.signbit(v)).astype(np.uint8)


def e2m1_value(c):
    return np.where(c & 8, -E2M1[c & 7], E2M1[c & 7]).astype(f32)


def e4m3_rne(v):
    """Non-negative float32 -> code 0..126, nearest even, saturating at 448."""
    a = np.minimum(v, f32(448)).astype(f64)
    g = E4M3.astype(f64)
    k = np.clip(np.searchsorted(g, a, side="right") - 1, 0, 125)
    lo, hi = a - g[k], g[k + 1] - a
    return (k + ((hi < lo) | ((hi == lo) & (k % 2 == 1)))).astype(np.uint8)


def e4m3_sr(v, u):
    return stochastic(np.minimum(v, f32(448)).astype(f64), E4M3, 126, u).astype(np.uint8)


def bf16(x):
    b = np.asarray(x, f32).view(u32)
    return ((b + 0x7fff + ((b >> 16) & 1)) & 0xffff0000).astype(u32).view(f32)


# ----------------------------------------------------------------------------------------------------------------------
# Shared steps


def sum8(t):
    """Sum over the last axis (a multiple of 8) in float32: eights in index order, then the eights in order."""
    t = t.reshape(t.shape[:-1] + (-1, 8))
    p = t[..., 0].copy()
    for i in range(1, 8):
        p = p + t[..., i]
    s = p[..., 0].copy()
    for i in range(1, p.shape[-1]):
        s = s + p[..., i]
    return s


def fma(a, b, c):
    """a*b + c rounded once to float32. The product is exact in float64; its sum with c is rounded to odd there (the last bit tells
    that something is missing), and from 53 bits to 24 that rounds as the exact sum does."""
    p, c = a.astype(f64) * b.astype(f64), c.astype(f64)
    s = p + c
    t = s - p
    missing = (p - (s - t)) + (c - t)                                      # s + missing = p + c exactly
    odd = (s.view(np.int64) & 1) == 1
    toward = np.where(missing > 0, np.inf, -np.inf)
    return np.where((missing != 0) & ~odd, np.nextafter(s, toward), s).astype(f32)


def dot8(a, b):
    """<a,b> over the last axis in the order of sum8, each product fused into its sum."""
    a, b = (t.reshape(t.shape[:-1] + (-1, 8)) for t in (a, b))
    p = np.zeros(a.shape[:-1], f32)
    for i in range(8):
        p = fma(a[..., i], b[..., i], p)
    s = p[..., 0].copy()
    for i in range(1, p.shape[-1]):
        s = s + p[..., i]
    return s


def fwht(x, signs, d):
    """Unnormalised Sylvester Walsh-Hadamard transform of signs * x over runs of d, float32, stages h = 1, 2, 4 ..."""
    y = (x * signs).reshape(-1, d).astype(f32)
    h = 1
    while h < d:
        y = y.reshape(-1, d // (2 * h), 2, h)
        y = np.stack((y[:, :, 0] + y[:, :, 1], y[:, :, 0] - y[:, :, 1]), 2).astype(f32).reshape(-1, d)
        h *= 2
    return y.reshape(x.shape)


def tensor_scale(amax, override, bound):
    """-> (inv = bound / (amax*override), s_t = amax*override / (6*bound)); amax == 0 -> (0, 1)."""
    a = f32(f32(amax) * f32(override))
    return (f32(0), f32(1)) if a == 0 else (f32(f32(bound) / a), f32(a / f32(6 * bound)))


def block_scale(bmax, override, inv):
    """E4M3 code of a block, at least 2^-9 when the block is not all zero, and the value it was rounded from."""
    t = ((bmax * f32(override)).astype(f32) * inv).astype(f32)
    return np.where(bmax > 0, np.maximum(e4m3_rne(t), 1), 0).astype(np.uint8), t


def encode(xb, sb, st):
    """Values over the block's decode step d = s_b * s_t: v = x * (1/d), 0 where s_b is 0."""
    d = (E4M3[sb] * st).astype(f32)
    e = np.where(sb > 0, f32(1) / np.where(sb > 0, d, f32(1)), f32(0)).astype(f32)
    return (xb * e[..., None]).astype(f32), d


# ----------------------------------------------------------------------------------------------------------------------
# NVFP4. Each -> codes (rows, cols), E4M3 codes (rows, cols/16) [16x16: (rows/16, cols/16)], tensor scale


def rtn(x, four_six=False, tile16=False):
    R, C = x.shape
    inv, st = tensor_scale(np.abs(x).max(), 1.0, 256 if four_six else 448)
    if tile16:
        xb = x.reshape(R // 16, 16, C // 16, 16).transpose(0, 2, 1, 3).reshape(R // 16, C // 16, 256)
    else:
        xb = x.reshape(R, C // 16, 16)
    sb, t = block_scale(np.abs(xb).max(-1), 1.0, inv)
    v, d = encode(xb, sb, st)
    q = e2m1_rne(v)
    if four_six:
        s4 = np.where(sb > 0, np.maximum(e4m3_rne((t * f32(1.5)).astype(f32)), 1), 0).astype(np.uint8)
        v4, d4 = encode(xb, s4, st)
        q4 = e2m1_rne(v4)

        def error(q, d):
            r = (xb - (e2m1_value(q) * d[..., None]).astype(f32)).astype(f32)
            return sum8((r * r).astype(f32))

        four = error(q4, d4) < error(q, d)
        sb = np.where(four, s4, sb).astype(np.uint8)
        q = np.where(four[..., None], q4, q).astype(np.uint8)
    if tile16:
        q = q.reshape(R // 16, C // 16, 16, 16).transpose(0, 2, 1, 3)
    return q.reshape(R, C), sb, st


def sr(x, u):
    """Stochastic values, override 17/16. u: one word a value."""
    R, C = x.shape
    inv, st = tensor_scale(np.abs(x).max(), 17 / 16, 448)
    xb = x.reshape(R, C // 16, 16)
    sb, _ = block_scale(np.abs(xb).max(-1), 17 / 16, inv)
    v, _ = encode(xb, sb, st)
    return e2m1_sr(v, u.reshape(v.shape)).reshape(R, C), sb, st


def ms_eden(x, signs, u):
    """Rotation of 128 + MS-EDEN, in the unnormalised rotated basis. u: one word a block."""
    R, C = x.shape
    y = fwht(x, np.tile(signs, C // 128), 128)
    inv, st = tensor_scale(np.abs(y).max(), EDEN_OVERRIDE, 256)
    yb = y.reshape(R, C // 16, 16)
    sb, _ = block_scale(np.abs(yb).max(-1), EDEN_OVERRIDE, inv)
    v, d = encode(yb, sb, st)
    q = e2m1_rne(v)
    N, D = sum8((yb * yb).astype(f32)), sum8((yb * (e2m1_value(q) * d[..., None]).astype(f32)).astype(f32))
    S = np.where(D > 0, N / np.where(D > 0, D, f32(1)), f32(1)).astype(f32)
    t = (E4M3[sb] * S).astype(f32)
    return q.reshape(R, C), np.where(sb > 0, e4m3_sr(t, u.reshape(t.shape)), 0).astype(np.uint8), st


def cut(m, bits):
    """Positive float32 -> its leading `bits` significant bits; below 2^-100 zero."""
    mantissa, exponent = np.frexp(m.astype(f64))                          # mantissa in [1/2, 1)
    m = np.ldexp(np.floor(mantissa * 2 ** bits) / 2 ** bits, exponent)
    return np.where(m >= 2.0 ** -100, m, 0).astype(f32)


def eden_codes(yb, m):
    """Codes of the blocks yb in units of m; also <v,v>, <v,q> and <v-q,v-q>."""
    e = np.where(m > 0, f32(1) / np.where(m > 0, m, f32(1)), f32(0)).astype(f32)
    v = (yb * e[..., None]).astype(f32)
    q = e2m1_rne(v)
    r = (v - e2m1_value(q)).astype(f32)
    return q, dot8(v, v), dot8(v, e2m1_value(q)), sum8((r * r).astype(f32))


def eden_align(q, m, V, D, u):
    """c = bf16(m*S), S = V/D."""
    S = (V / np.where(D > 0, D, f32(1))).astype(f32)
    return eden_scales(q, bf16((m * S).astype(f32)), u)


def eden_scales(q, c, u):
    """The tensor scale is the power of two at or above max(c)/256, and the block scales are c over it, rounded stochastically."""
    mantissa, exponent = np.frexp(float(c.max()) / 256)
    st = f32(1) if c.max() == 0 else f32(2.0 ** (exponent - 1 if mantissa == 0.5 else exponent))
    return q.reshape(q.shape[0], -1), e4m3_sr((c / st).astype(f32), u.reshape(c.shape)), st


def ms_eden_posthoc(x, signs, u):
    """The same with the range aligned after the fact. Per block: m = amax/6 cut to five significant bits."""
    R, C = x.shape
    yb = fwht(x, np.tile(signs, C // 128), 128).reshape(R, C // 16, 16)
    m = cut((np.abs(yb).max(-1) * f32(1 / 6)).astype(f32), 5)
    q, V, D, _ = eden_codes(yb, m)
    return eden_align(q, m, V, D, u)


def best_of(tries):
    """Of (error, arrays...) the first of least error, block by block."""
    best = list(next(tries))
    for t in tries:
        better = t[0] < best[0]
        for i, (new, old) in enumerate(zip(t, best)):
            best[i] = np.where(better if new.ndim == better.ndim else better[..., None], new, old)
    return best[1:]


def search(x, every, true):
    """Scale search: least squared error of nine codes from amax/7 up (every), or of the codes around those of amax/6 and amax/4. true:
    the winner's scale times <x,x>/<x,qd>, to nearest."""
    R, C = x.shape
    inv, st = tensor_scale(np.abs(x).max(), 1.0, 256)
    xb = x.reshape(R, C // 16, 16)
    amax = np.abs(xb).max(-1)
    t = ((amax * inv).astype(f32) * (f32(f32(6) / f32(7)) if every else f32(1))).astype(f32)
    first = np.maximum(e4m3_rne(t).astype(int), 1)
    if not every:
        first = np.maximum(first - 1, 1)

    def attempt(offset):
        sb = np.where(amax > 0, np.minimum(first + offset, 126), 0).astype(np.uint8)
        v, d = encode(xb, sb, st)
        q = e2m1_rne(v)
        r = (xb.astype(f64) - e2m1_value(q).astype(f64) * d[..., None].astype(f64)).astype(f32)  # rounded once
        return dot8(r, r), q, sb

    q, sb = best_of(attempt(o) for o in (range(9) if every else (0, 1, 5, 6)))
    if true:
        d = (E4M3[sb] * st).astype(f32)
        D = sum8((xb * (e2m1_value(q) * d[..., None]).astype(f32)).astype(f32))
        S = np.where(D > 0, sum8((xb * xb).astype(f32)) / np.where(D > 0, D, f32(1)), f32(1)).astype(f32)
        sb = np.where(sb > 0, np.maximum(e4m3_rne((E4M3[sb] * S).astype(f32)), 1), 0).astype(np.uint8)
    return q.reshape(R, C), sb, st


def eden_attempt(yb, m, e, V):
    """Of a candidate: codes, <v,v> (V if given), c = bf16(m*S), and its expected error over <y,y>, plus 1: A (1 + f(1-f)(step/c)^2)."""
    v = (yb * e[..., None]).astype(f32)
    q = e2m1_rne(v)
    g = e2m1_value(q)
    V = dot8(v, v) if V is None else V
    r = (f32(1) / np.maximum(dot8(v, g), f32(1))).astype(f32)
    S = (V * r).astype(f32)
    c = bf16((m * S).astype(f32))
    A = (S * (dot8(g, g) * r).astype(f32)).astype(f32)
    t = np.where(c > 0, 2 * np.frexp(c.astype(f64))[0], 1)
    k = t * 8 - np.floor(t * 8)
    return q, V, c, A, (t * t).astype(f32), (t * t + k * (1 - k) / 64).astype(f32)


def ms_eden_search_two(x, signs, u):
    """MS-EDEN post hoc with the better of two m: the block's largest value goes to 4, or to 6 (6.4 where the second largest of four maxima is near it)."""
    R, C = x.shape
    yb = fwht(x, np.tile(signs, C // 128), 128).reshape(R, C // 16, 16)
    top = np.sort(np.abs(yb).reshape(R, C // 16, 4, 4).max(-2), -1)
    amax, near = top[..., 3], top[..., 2] >= (top[..., 3] * f32(0.8)).astype(f32)
    m0 = (amax * np.where(near, f32(0.15625), f32(1 / 6))).astype(f32)
    some = m0 >= 2.0 ** -100
    m0, m1 = np.where(some, m0, 0).astype(f32), np.where(some, (amax * f32(0.25)).astype(f32), 0).astype(f32)
    e0 = np.where(some, f32(1) / np.where(some, m0, f32(1)), 0).astype(f32)
    q0, V, c0, A0, w0, h0 = eden_attempt(yb, m0, e0, None)
    e1 = (e0 * np.where(near, f32(0.625), f32(4 / 6))).astype(f32)
    q1, _, c1, A1, w1, h1 = eden_attempt(yb, m1, e1, (V * np.where(near, f32(0.390625), f32(4 / 9))).astype(f32))
    better = ((A1 * h1).astype(f32) * w0).astype(f32) < ((A0 * h0).astype(f32) * w1).astype(f32)
    return eden_scales(np.where(better[..., None], q1, q0), np.where(better, c1, c0), u)


def ms_eden_search(x, signs, u, every):
    """MS-EDEN post hoc with m of least squared error among values of four significant bits, upward from amax/7; or (not every) the better of two."""
    if not every:
        return ms_eden_search_two(x, signs, u)
    R, C = x.shape
    yb = fwht(x, np.tile(signs, C // 128), 128).reshape(R, C // 16, 16)
    first = cut((np.abs(yb).max(-1) * f32(f32(1) / f32(7))).astype(f32), 4)

    def attempt(offset):
        mantissa, exponent = np.frexp(first.astype(f64))
        for _ in range(offset):                                           # the next value of four bits
            mantissa = mantissa + 1 / 16
            mantissa, exponent = np.where(mantissa == 1, 0.5, mantissa), exponent + (mantissa == 1)
        m = np.where(first > 0, np.ldexp(mantissa, exponent), 0).astype(f32)
        q, V, D, E = eden_codes(yb, m)
        inverse = np.where(first > 0, f32(1) / np.where(first > 0, first, f32(1)), f32(0)).astype(f32)
        steps = (m * inverse).astype(f32)
        return (E * (steps * steps).astype(f32)).astype(f32), q, m, V, D

    q, m, V, D = best_of(attempt(o) for o in range(9))
    return eden_align(q, m, V, D, u)


def dequant(q, sb, st, tile16=False):
    s = np.repeat(E4M3[sb], 16, 1)
    s = np.repeat(s, 16, 0) if tile16 else s
    return (e2m1_value(q) * (s * st).astype(f32)).astype(f32)


# ----------------------------------------------------------------------------------------------------------------------
# MXFP4 (Quartet v1, arXiv 2505.14669). Each -> codes, exponents of the E8M0 scales (rows, cols/32)


def mx_quest(x):
    """Forward: Hadamard 32 (no signs, normalised), QuEST clip, E8M0 floor. Also -> mask (|v| < 6)."""
    R, C = x.shape
    y = (fwht(x, np.ones(C, f32), 32) * f32(32 ** -.5)).astype(f32).reshape(R, C // 32, 32)
    m = sum8(y) / f32(32)
    ms = sum8((y * y).astype(f32)) / f32(32)
    std = np.sqrt(np.maximum(ms - (m * m).astype(f32), f32(0))).astype(f32)
    s = ((std * f32(2.92247856 / 6)).astype(f32) + EPS).astype(f32)
    e = (np.frexp(s)[1] - 1).astype(int)
    v = np.ldexp(y, -e[..., None]).astype(f32)
    return e2m1_rne(v).reshape(R, C), e, (np.abs(v) < 6).reshape(R, C)


def mx_sr(x, signs, u):
    """Backward: signs + Hadamard 32 (normalised), E8M0 = 2^(floor(log2 amax) - 2), values times 3/4, stochastic."""
    R, C = x.shape
    y = (fwht(x, np.tile(signs, C // 32), 32) * f32(32 ** -.5)).astype(f32).reshape(R, C // 32, 32)
    a = np.abs(y).max(-1)
    e = np.where(a > 0, np.frexp(a)[1] - 1 - 2, -127).astype(int)
    v = (np.ldexp(y, -e[..., None]).astype(f32) * f32(.75)).astype(f32)
    v = np.where(a[..., None] > 0, v, f32(0)).astype(f32)
    return e2m1_sr(v, u.reshape(v.shape)).reshape(R, C), e


# ----------------------------------------------------------------------------------------------------------------------
# One scale a tensor or a row. -> dequantized values


def fp8(x, grid):
    amax = np.abs(x).max()
    v = (x * f32(grid[-1] / amax)).astype(f32).astype(f64)
    k = np.clip(np.searchsorted(grid, np.abs(v), side="right") - 1, 0, len(grid) - 2)
    lo, hi = np.abs(v) - grid[k], grid[k + 1] - np.abs(v)
    k = k + ((hi < lo) | ((hi == lo) & (k % 2 == 1)))
    return np.copysign(grid[k], v) * f64(f32(amax / f32(grid[-1])))


E5M2 = np.array([m * 2.0 ** -16 if e == 0 else (1 + m / 4) * 2.0 ** (e - 15) for e in range(31) for m in range(4)])


def fp4_rows(x):
    amax = np.abs(x).max(-1, keepdims=True)
    return e2m1_value(e2m1_rne((x * (f32(6) / amax).astype(f32)).astype(f32))) * (amax / f32(6)).astype(f32)


# ----------------------------------------------------------------------------------------------------------------------
# Golden vectors


def inputs():
    r = np.random.default_rng(7)
    R, C = 32, 256
    g = r.standard_normal((R, C))
    edge = g * np.exp(1.5 * r.standard_normal((R, C)))
    edge[0] = 0                                              # an all-zero row, block, run
    edge[1, :16] = 0
    edge[2, :128] = 0
    edge[3, 5] = 3e4                                         # one outlier
    edge[4] = 1e-7                                           # far below the tensor's largest
    edge[5] *= 1e-6
    edge[6], edge[7] = 1, -1
    edge[8, :16] = [6, -6, 5, -5, 3.5, 2.5, 1.75, 1.25, .75, .25, -.25, -.75, -0.0, 0, 4, 3]
    edge[9, ::2] = 0
    edge[10] = np.where(np.arange(C) % 128 == 17, 2.0, 0)    # one nonzero a run
    return {"gauss": bf16(g), "edge": bf16(edge), "zeros": np.zeros((R, C), f32)}


def words(a):
    return "".join("%08x" % v for v in np.asarray(a).ravel())


def floats(a):
    return words(np.asarray(a, f32).ravel().view(u32))


def nibbles(a):
    return "".join("%x" % v for v in a.ravel())


def octets(a):
    return "".join("%02x" % v for v in a.ravel())


def nvfp4(q, sb, st):
    return {"codes": nibbles(q), "scales": octets(sb), "tensor_scale": floats(st)}


def vectors(folder):
    def put(name, d):
        with open(os.path.join(folder, name + ".json"), "w") as f:
            json.dump(d, f, indent=0)

    r = np.random.default_rng(11)
    posthoc, searched = {}, {}
    for name, x in inputs().items():
        R, C = x.shape
        u = r.integers(0, 2 ** 32, (R, C), dtype=u32)
        ub = r.integers(0, 2 ** 32, (R, C // 16), dtype=u32)
        signs = (r.integers(0, 2, 128) * 2 - 1).astype(f32)
        out = {"rtn_1x16": nvfp4(*rtn(x)), "rtn_16x16": nvfp4(*rtn(x, tile16=True)), "four_six_1x16": nvfp4(*rtn(x, True)),
               "four_six_16x16": nvfp4(*rtn(x, True, True)), "sr_1x16": nvfp4(*sr(x, u)), "ms_eden_128": nvfp4(*ms_eden(x, signs, ub))}
        q, e, mask = mx_quest(x)
        out["mx_quest_32"] = {"codes": nibbles(q), "exponents": e.ravel().tolist(), "mask": "".join("1" if b else "0" for b in mask.ravel())}
        q, e = mx_sr(x, signs[:32], u)
        out["mx_sr_32"] = {"codes": nibbles(q), "exponents": e.ravel().tolist()}
        put(name, {"rows": R, "cols": C, "x": floats(x), "words_per_value": words(u), "words_per_block": words(ub),
                   "sign_bits": "".join("1" if s < 0 else "0" for s in signs), "quantizers": out})
        posthoc[name] = nvfp4(*ms_eden_posthoc(x, signs, ub))
        searched[name] = {kind + ("_all" if every else "_few"): nvfp4(*f(every)) for every in (False, True) for kind, f in (
            ("search", lambda every: search(x, every, False)), ("search_true", lambda every: search(x, every, True)),
            ("ms_eden_search", lambda every: ms_eden_search(x, signs, ub, every)))}
    put("posthoc", posthoc)  # x, words and signs: those of the file of that name
    put("search", searched)
    ties = [.25, .75, 1.25, 1.75, 2.5, 3.5, 5, 6, 7]
    v = np.concatenate([r.standard_normal(400).astype(f32) * f32(3), ties + [1e9, 0, 1e-30], -np.array(ties)]).astype(f32)
    w = np.concatenate([np.abs(r.standard_normal(400)) * 100, (E4M3[1:] + E4M3[:-1]) / 2, E4M3,
                        [448, 449, 464, 1e9, 2.0 ** -10, 2.0 ** -11, 2.0 ** -30]]).astype(f32)
    put("formats", {"e2m1_in": floats(v), "e2m1_codes": nibbles(e2m1_rne(v)), "e4m3_in": floats(w), "e4m3_codes": octets(e4m3_rne(w)),
                    "e4m3_values": floats(E4M3)})


def check(folder):
    bad = 0
    with tempfile.TemporaryDirectory() as fresh:
        vectors(fresh)
        for name in sorted(os.listdir(fresh)):
            path = os.path.join(folder, name)
            same = os.path.exists(path) and open(path).read() == open(os.path.join(fresh, name)).read()
            print("%s: %s" % (path, "the same" if same else "DIFFERS"))
            bad += not same
    sys.exit(1 if bad else 0)


def table(n=1 << 22):
    r = np.random.default_rng(3)
    x = bf16(r.standard_normal((n // 1024, 1024)))
    s = (r.integers(0, 2, 128) * 2 - 1).astype(f32)

    def show(name, d, ref):
        d, ref = d.astype(f64), ref.astype(f64)
        print("%-20s MSE %.4e   misalignment %+.2e" % (name, np.mean((d - ref) ** 2) / np.mean(ref ** 2), 1 - np.sum(d * ref) / np.sum(ref * ref)))

    def per_block():
        return r.integers(0, 2 ** 32, (x.shape[0], x.shape[1] // 16), dtype=u32)

    show("rtn 1x16", dequant(*rtn(x)), x)
    show("rtn 16x16", dequant(*rtn(x, tile16=True), tile16=True), x)
    show("four_six 1x16", dequant(*rtn(x, True)), x)
    show("four_six 16x16", dequant(*rtn(x, True, True), tile16=True), x)
    show("sr 1x16", dequant(*sr(x, r.integers(0, 2 ** 32, x.shape, dtype=u32))), x)
    for every in (False, True):
        show("search " + ("all" if every else "four"), dequant(*search(x, every, False)), x)
        show("search true " + ("all" if every else "four"), dequant(*search(x, every, True)), x)
    y = fwht(x, np.tile(s, 8), 128)
    for every in (False, True):
        show("ms_eden search " + ("all" if every else "two"), dequant(*ms_eden_search(x, s, per_block(), every)), y)
    show("ms_eden 128", dequant(*ms_eden(x, s, per_block())), y)
    show("ms_eden_posthoc 128", dequant(*ms_eden_posthoc(x, s, per_block())), y)
    y = fwht(x, np.ones(1024, f32), 32) * f32(32 ** -.5)
    q, e, _ = mx_quest(x)
    show("mx_quest 32", np.ldexp(e2m1_value(q).reshape(*e.shape, 32), e[..., None]).reshape(x.shape), y)
    y = fwht(x, np.tile(s[:32], 32), 32) * f32(32 ** -.5)
    q, e = mx_sr(x, s[:32], r.integers(0, 2 ** 32, x.shape, dtype=u32))
    show("mx_sr 32", np.ldexp(e2m1_value(q).reshape(*e.shape, 32), e[..., None]).reshape(x.shape) * 4 / 3, y)
    show("e4m3, tensor", fp8(x, E4M3.astype(f64)), x)
    show("e5m2, tensor", fp8(x, E5M2), x)
    show("e2m1, row", fp4_rows(x), x)


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    folder = sys.argv[2] if len(sys.argv) > 2 else os.path.join(here, "..", "test", "golden")
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    if command == "vectors":
        vectors(folder)
    elif command == "check":
        check(folder)
    elif command == "table":
        table()
    else:
        sys.stderr.write(__doc__)
        sys.exit(2)


if __name__ == "__main__":
    main()
