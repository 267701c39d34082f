// cuda/quantize_mx.cuh: MXFP4 operands on the GPU: QuEST for the forward, stochastic rounding for backward, and a backward product
// turned back out of the space that the forward rotated its operands into. Same bits as cpu/quantize.h and cpu/linear.h.
//
// A thread has a block of 32 values in registers, and four neighbouring lanes a run of 128, so that a rotation of 64 or 128 needs
// only shuffles for its last stages. Whatever memory asks for, other than the blocks' own order, goes through shared memory.
//
// Everything runs on `stream`; nothing synchronizes. Pointers are device memory, 16-byte aligned. A block that holds a NaN or an
// infinity once rotated gets the E8M0 scale 255, which stands for NaN, and decodes to NaN: there is no tensor scale to tell.
#ifndef LLMC_CUDA_QUANTIZE_MX_CUH
#define LLMC_CUDA_QUANTIZE_MX_CUH

#include "quantize.cuh"
#include "quantize_device.cuh"

// One direction of a tensor: FORMAT_MXFP4 in blocks 1x32, ROUND_SR, a rotation of 0 to 128 (a power of two).
//   at    of its random words (one a value, cpu/quantize.h) and rotation signs
//   out   code x 2^e in BF16, exact, laid out like the tensor; the operand is that times MX_SR_FACTOR
struct MxSide { const OperandSpec *spec; EdenAddress at; bf16 *out; };

// x (rows, cols) rotated and quantized along its columns by ROUND_QUEST. cols is a multiple of 32 and of the rotation.
//   codes    (rows, cols/2)   two E2M1 codes a byte, even column in the low nibble
//   scales   (rows, cols/32)  E8M0; codes and scales may both be NULL
//   mask     (rows, cols/32)  bit i of a word: value i of the block was not clipped; may be NULL
//   decoded  (rows, cols)     code x 2^e in BF16, exact; may be NULL
// Reads 2 B a value, writes 2 B + 0.53 B + 0.125 B.
FN void mx_quest_launch(cudaStream_t stream, const OperandSpec *spec, EdenAddress at, const bf16 *x, int64_t rows, int64_t cols,
                        uint8_t *codes, uint8_t *scales, uint32_t *mask, bf16 *decoded);

// x (M,N) -> along_n: blocks along N (the operand's rows: M), along_m: blocks along M (the operand's rows: N); either may be NULL.
// M and N are multiples of 32. Reads 2 B a value, once for both directions, and writes 2 B a direction.
FN void mx_sr_launch(cudaStream_t stream, const bf16 *x, int64_t M, int64_t N, const MxSide *along_n, const MxSide *along_m);

// A saved tensor (rows, cols), codes and scales as mx_quest_launch writes them, -> re-quantized along its ROWS. rows and cols are
// multiples of 32. Reads 0.53 B a value, writes 2 B.
FN void mx_requantize_launch(cudaStream_t stream, const uint8_t *codes, const uint8_t *scales, int64_t rows, int64_t cols,
                             const MxSide *along_rows);

// codes, scales -> code x 2^e (rows, cols) in BF16, exact. cols is a multiple of 32. Reads 0.53 B a value, writes 2 B.
FN void mx_decode_launch(cudaStream_t stream, const uint8_t *codes, const uint8_t *scales, int64_t rows, int64_t cols, bf16 *out);

// p (rows, K), float32: a backward product -> the gradient. K is a multiple of 32 and of the rotation.
//   mask   (rows, K/32) as mx_quest_launch writes it: products with what was clipped become zero; NULL: none do
//   spec   of the forward operand whose rotation p is in, turned back by its transpose; NULL: p is not turned. at: seed, step, layer
//          and linear of it (the signs are the forward GEMM's)
//   out    (rows, K) BF16, or NULL: then
//   dw     (rows, K), BF16 (dw_bf16) or float32: overwritten, or (accumulate) added to
// Reads 4 B a value, writes 2 or 4 B, and reads those too to accumulate.
FN void product_turn_back_launch(cudaStream_t stream, const OperandSpec *spec, EdenAddress at, const float *p, int64_t rows, int64_t K,
                                 const uint32_t *mask, bf16 *out, void *dw, int dw_bf16, int accumulate);

// ---------------------------------------------------------------------------------------------------------------------
// A block of 32 in a thread's registers

// length 0: none. signs[part]: bit i: the sign of position 32*part + i of a run of 128, which repeats with the rotation.
struct MxRotation { int length; float norm; uint32_t signs[4]; };

FN MxRotation mx_rotation(const OperandSpec *spec, EdenAddress at, int gemm, int64_t inner) {
    const int d = spec->rotation;
    MxRotation r;
    memset(&r, 0, sizeof r);
    if (d && (d < 2 || d > ROTATION_MAX || (d & (d - 1)))) fatal("rotation of %d: it must be a power of two from 2 to %d", d, ROTATION_MAX);
    if (inner % MXFP4_BLOCK || (d && inner % d))
        fatal("an operand of %lld inner values has no blocks of %d in a rotation of %d: the length along the blocks must be a multiple of both",
              (long long)inner, MXFP4_BLOCK, d);
    r.length = d;
    if (!d) return r;
    r.norm = rotation_is_normalised(spec) ? rotation_norm(d) : 1.0f / (float)d;
    uint32_t bits[4] = {0, 0, 0, 0};
    if (spec->signs == SIGNS_RANDOM) rotation_bits(at.seed, at.step, at.layer, at.linear, gemm, bits);
    for (int i = 0; i < ROTATION_MAX; i++) r.signs[i / 32] |= rotation_sign(bits, i % d) >> 31 << i % 32;
    return r;
}
__device__ __forceinline__ void mx_signs(LaneBlock32 y, const MxRotation &r, int part) {
    const uint32_t word = r.signs[part];
#pragma unroll
    for (int i = 0; i < 32; i++) y[i][0] = f32_from_bits(f32_bits(y[i][0]) ^ (word << (31 - i) & 0x80000000u));
}
// hadamard() of every `length` values; this thread has the block number `part` of a run of 128, the lanes beside it the others.
__device__ __forceinline__ void mx_hadamard(LaneBlock32 y, int length, int part) {
#pragma unroll
    for (int h = 1; h < 32; h *= 2) {
        if (h >= length) break;
#pragma unroll
        for (int i = 0; i < 32; i++) {
            if (i & h) continue;
            const float a = y[i][0], b = y[i + h][0];
            y[i][0] = f32_add(a, b); y[i + h][0] = f32_sub(a, b);
        }
    }
    for (int other = 1; 32 * other < length; other *= 2)
#pragma unroll
        for (int i = 0; i < 32; i++) {
            const float theirs = __shfl_xor_sync(0xFFFFFFFFu, y[i][0], other);
            y[i][0] = part & other ? f32_sub(theirs, y[i][0]) : f32_add(y[i][0], theirs);
        }
}
__device__ __forceinline__ void mx_scale(LaneBlock32 y, float by) {
#pragma unroll
    for (int i = 0; i < 32; i++) y[i][0] = f32_mul(y[i][0], by);
}
__device__ __forceinline__ void mx_rotate(LaneBlock32 y, const MxRotation &r, int part) {
    if (!r.length) return;
    mx_signs(y, r, part);
    mx_hadamard(y, r.length, part);
    mx_scale(y, r.norm);
}
__device__ __forceinline__ bool mx_is_finite(LaneBlock32 y) {
    uint32_t most = 0u;
#pragma unroll
    for (int i = 0; i < 32; i++) most = u32_max(most, f32_bits(y[i][0]) & 0x7FFFFFFFu);
    return most < 0x7F800000u;
}
#define MX_SCALE_NAN 255u
__device__ __forceinline__ float mx_step(uint32_t scale) { return scale == MX_SCALE_NAN ? f32_from_bits(0x7FC00000u) : e8m0_decode(scale); }
__device__ __forceinline__ void mx_unpack(const uint4 w[4], LaneBlock32 y) {
#pragma unroll
    for (int i = 0; i < 32; i++) { Bf16x8 v; v.u = w[i / 8]; y[i][0] = v.get(i % 8); }
}
__device__ __forceinline__ void mx_pack(LaneBlock32 q, float step, uint4 w[4]) {
#pragma unroll
    for (int k = 0; k < 4; k++) {
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = f32_mul(q[8 * k + i][0], step);
        w[k] = pack8(v).u;
    }
}
__device__ __forceinline__ uint4 mx_decode8(uint32_t word, float step) {
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = f32_mul(e2m1_decode(word >> (4 * i)), step);
    return pack8(v).u;
}

// ---------------------------------------------------------------------------------------------------------------------
// Blocks along the columns, one after another in memory: a warp has 32. Its lanes read and write 16-byte pieces side by side, and
// change them into blocks in shared memory; a gap after every eight pieces keeps both accesses free of bank conflicts.

#define MX_THREADS 128
__device__ __forceinline__ int mx_piece(int i) { return i + i / 8; }

struct QuestJob {
    const uint4 *x;
    int64_t blocks;
    MxRotation rotation;
    uint4 *codes, *decoded;
    uint8_t *scales;
    uint32_t *mask;
};
static __global__ void __launch_bounds__(MX_THREADS) mx_quest_kernel(const __grid_constant__ QuestJob job) {
    __shared__ uint4 shared[MX_THREADS / 32][144];
    uint4 *stage = shared[threadIdx.x / 32], w[4];
    const int lane = threadIdx.x & 31;
    const int64_t first = ((int64_t)blockIdx.x * MX_THREADS + threadIdx.x) / 32 * 32, left = job.blocks - first;
    if (left <= 0) return;
    const int n = left < 32 ? (int)left : 32;
#pragma unroll
    for (int i = lane; i < 128; i += 32) stage[mx_piece(i)] = i / 4 < n ? __ldcs(job.x + 4 * first + i) : make_uint4(0, 0, 0, 0);
    __syncwarp();
#pragma unroll
    for (int k = 0; k < 4; k++) w[k] = stage[mx_piece(4 * lane + k)];
    LaneBlock32 y, q;
    LaneBlock32Bits unclipped;
    uint32_t scale[1], mask = 0u;
    mx_unpack(w, y);
    mx_rotate(y, job.rotation, lane & 3);
    mx_quest_block(y, q, scale, unclipped);
    if (!mx_is_finite(y)) scale[0] = MX_SCALE_NAN;
#pragma unroll
    for (int i = 0; i < 32; i++) mask |= unclipped[i][0] << i;
    if (lane < n && job.codes) {
        uint32_t codes[4] = {0u, 0u, 0u, 0u};
#pragma unroll
        for (int i = 0; i < 32; i++) codes[i / 8] |= e2m1_encode(q[i][0]) << (4 * (i % 8));
        job.codes[first + lane] = make_uint4(codes[0], codes[1], codes[2], codes[3]);
        job.scales[first + lane] = (uint8_t)scale[0];
    }
    if (lane < n && job.mask) job.mask[first + lane] = mask;
    if (!job.decoded) return;
    mx_pack(q, mx_step(scale[0]), w);
    __syncwarp();
#pragma unroll
    for (int k = 0; k < 4; k++) stage[mx_piece(4 * lane + k)] = w[k];
    __syncwarp();
#pragma unroll
    for (int i = lane; i < 128; i += 32) if (i / 4 < n) job.decoded[4 * first + i] = stage[mx_piece(i)];
}
// CTAs for (rows, cols) in blocks of 32 along the columns, a thread each; *blocks: how many.
FN unsigned mx_ctas(int64_t rows, int64_t cols, int64_t *blocks) {
    if (rows < 1 || cols < 1 || cols % MXFP4_BLOCK || rows > (1ll << 37) / cols)
        fatal("the GPU cannot cut a tensor of %lld x %lld into blocks of %d: columns must be a multiple of it, and values at most 2^37",
              (long long)rows, (long long)cols, MXFP4_BLOCK);
    *blocks = rows * (cols / MXFP4_BLOCK);
    return (unsigned)ceil_div(*blocks, MX_THREADS);
}
FN void mx_quest_launch(cudaStream_t stream, const OperandSpec *spec, EdenAddress at, const bf16 *x, int64_t rows, int64_t cols,
                        uint8_t *codes, uint8_t *scales, uint32_t *mask, bf16 *decoded) {
    if (spec->format != FORMAT_MXFP4 || spec->block != BLOCK_1X32 || spec->rounding != ROUND_QUEST)
        fatal("the GPU's QuEST quantizer does not round by %d to format %d: mend the recipe's row", (int)spec->rounding, (int)spec->format);
    if (!codes != !scales) fatal("the QuEST quantizer writes codes and scales or neither: this is a bug");
    QuestJob job;
    memset(&job, 0, sizeof job);
    const unsigned ctas = mx_ctas(rows, cols, &job.blocks);
    job.rotation = mx_rotation(spec, at, at.gemm, cols);
    job.x = (const uint4 *)x; job.codes = (uint4 *)codes; job.scales = scales; job.mask = mask; job.decoded = (uint4 *)decoded;
    mx_quest_kernel<<<ctas, MX_THREADS, 0, stream>>>(job);
    CUDA_LAUNCHED();
}

static __global__ void __launch_bounds__(256) mx_decode_kernel(const uint32_t *codes, const uint8_t *scales, int64_t eights, uint4 *out) {
    for (int64_t k = (int64_t)blockIdx.x * 256 + threadIdx.x; k < eights; k += (int64_t)gridDim.x * 256)
        out[k] = mx_decode8(codes[k], mx_step(scales[k / 4]));
}
FN void mx_decode_launch(cudaStream_t stream, const uint8_t *codes, const uint8_t *scales, int64_t rows, int64_t cols, bf16 *out) {
    int64_t blocks;
    const unsigned ctas = mx_ctas(rows, cols, &blocks), most = 16u * (unsigned)device_attribute(cudaDevAttrMultiProcessorCount);
    mx_decode_kernel<<<ctas < most ? ctas : most, 256, 0, stream>>>((const uint32_t *)codes, scales, 4 * blocks, (uint4 *)out);
    CUDA_LAUNCHED();
}

struct TurnJob {
    const float4 *p;
    int64_t blocks;
    MxRotation rotation;
    const uint32_t *mask;
    void *to;
    int to_bf16, accumulate;
};
// Four gradients to piece i of the result.
__device__ __forceinline__ void turn_store(const TurnJob &job, int64_t i, float4 v) {
    if (job.to_bf16) {
        uint2 *to = (uint2 *)job.to + i;
        if (job.accumulate) {
            const uint2 old = *to;
            v.x = f32_add(f32_from_bits(old.x << 16), v.x); v.y = f32_add(f32_from_bits(old.x & 0xFFFF0000u), v.y);
            v.z = f32_add(f32_from_bits(old.y << 16), v.z); v.w = f32_add(f32_from_bits(old.y & 0xFFFF0000u), v.w);
        }
        *to = make_uint2(pack_bf16x2(v.x, v.y), pack_bf16x2(v.z, v.w));
        return;
    }
    float4 *to = (float4 *)job.to + i;
    if (job.accumulate) {
        const float4 old = *to;
        v.x = f32_add(old.x, v.x); v.y = f32_add(old.y, v.y); v.z = f32_add(old.z, v.z); v.w = f32_add(old.w, v.w);
    }
    *to = v;
}
static __global__ void __launch_bounds__(MX_THREADS) turn_back_kernel(const __grid_constant__ TurnJob job) {
    __shared__ float4 shared[MX_THREADS / 32][288];
    float4 *stage = shared[threadIdx.x / 32];
    const int lane = threadIdx.x & 31;
    const int64_t first = ((int64_t)blockIdx.x * MX_THREADS + threadIdx.x) / 32 * 32, left = job.blocks - first;
    if (left <= 0) return;
    const int n = left < 32 ? (int)left : 32;
#pragma unroll
    for (int i = lane; i < 256; i += 32) stage[mx_piece(i)] = i / 8 < n ? __ldcs(job.p + 8 * first + i) : make_float4(0, 0, 0, 0);
    __syncwarp();
    LaneBlock32 y;
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const float4 v = stage[mx_piece(8 * lane + k)];
        y[4 * k][0] = v.x; y[4 * k + 1][0] = v.y; y[4 * k + 2][0] = v.z; y[4 * k + 3][0] = v.w;
    }
    if (job.mask) {
        const uint32_t mask = lane < n ? job.mask[first + lane] : 0u;
#pragma unroll
        for (int i = 0; i < 32; i++) y[i][0] = f32_mul(y[i][0], mask >> i & 1u ? 1.0f : 0.0f);  // a NaN stays
    }
    if (job.rotation.length) {
        mx_hadamard(y, job.rotation.length, lane & 3);
        mx_scale(y, job.rotation.norm);
        mx_signs(y, job.rotation, lane & 3);
    }
    __syncwarp();
#pragma unroll
    for (int k = 0; k < 8; k++) stage[mx_piece(8 * lane + k)] = make_float4(y[4 * k][0], y[4 * k + 1][0], y[4 * k + 2][0], y[4 * k + 3][0]);
    __syncwarp();
#pragma unroll
    for (int i = lane; i < 256; i += 32) if (i / 8 < n) turn_store(job, 8 * first + i, stage[mx_piece(i)]);
}
FN void product_turn_back_launch(cudaStream_t stream, const OperandSpec *spec, EdenAddress at, const float *p, int64_t rows, int64_t K,
                                 const uint32_t *mask, bf16 *out, void *dw, int dw_bf16, int accumulate) {
    TurnJob job;
    memset(&job, 0, sizeof job);
    const unsigned ctas = mx_ctas(rows, K, &job.blocks);
    if (spec) job.rotation = mx_rotation(spec, at, GEMM_FORWARD, K);
    job.p = (const float4 *)p; job.mask = mask;
    job.to = out ? (void *)out : dw; job.to_bf16 = out != NULL || dw_bf16; job.accumulate = out == NULL && accumulate;
    turn_back_kernel<<<ctas, MX_THREADS, 0, stream>>>(job);
    CUDA_LAUNCHED();
}

// ---------------------------------------------------------------------------------------------------------------------
// Stochastic rounding in both directions of a tile of 128x128: 256 threads, two blocks each and direction. Lanes 4k .. 4k+3 have the
// four blocks of a row (along N) or of a column (along M).

#define MX_TILE 128
#define MX_TILE_THREADS 256
// Place of (row, column) in shared memory, in values. The gaps spread the four blocks of a run, read at once, over the banks.
__device__ __forceinline__ int mx_tile_at(int r, int c) { return r * 152 + r / 32 * 16 + c + c / 64 * 16; }
#define MX_TILE_VALUES (MX_TILE * 152 + 64)

struct MxWay {
    MxRotation rotation;
    RngStream words;
    uint64_t first;        // the Philox call of the operand's first value; its row o, value i: first + (o*inner + i) / 4
    bf16 *out;             // NULL: not this direction
};
struct MxJob {
    const bf16 *x;         // or, NULL:
    const uint8_t *codes, *scales;
    int64_t M, N;
    uint32_t tiles_n;
    MxWay along_n, along_m;
};
// y -> code x 2^e as BF16. The random words are calls word .. word+7.
__device__ __forceinline__ void mx_sr_round(LaneBlock32 y, const MxWay &way, int part, uint64_t word, uint4 w[4]) {
    LaneBlock32 q;
    LaneBlock32Bits u;
    uint32_t scale[1];
    mx_rotate(y, way.rotation, part);
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const Philox4 p = rng_words4(way.words, word + (uint64_t)k);
#pragma unroll
        for (int j = 0; j < 4; j++) u[4 * k + j][0] = p.w[j];
    }
    mx_sr_block(y, u, q, scale);
    mx_pack(q, mx_step(mx_is_finite(y) ? scale[0] : MX_SCALE_NAN), w);
}
__device__ __forceinline__ void mx_tile_in(uint16_t *tile, const MxJob &job, int64_t m, int64_t n) {
#pragma unroll
    for (int k = 0; k < MX_TILE * MX_TILE / 8 / MX_TILE_THREADS; k++) {
        const int piece = k * MX_TILE_THREADS + threadIdx.x, r = piece / 16, c = piece % 16 * 8;
        const int64_t at = (m + r) * job.N + n + c;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (m + r < job.M && n + c < job.N)
            v = job.x ? __ldcs(reinterpret_cast<const uint4 *>(job.x + at))
                      : mx_decode8(*reinterpret_cast<const uint32_t *>(job.codes + at / 2), mx_step(job.scales[at / 32]));
        *reinterpret_cast<uint4 *>(tile + mx_tile_at(r, c)) = v;
    }
}
__device__ __forceinline__ void mx_tile_out(const uint16_t *tile, const MxJob &job, int64_t m, int64_t n, bf16 *out) {
#pragma unroll
    for (int k = 0; k < MX_TILE * MX_TILE / 8 / MX_TILE_THREADS; k++) {
        const int piece = k * MX_TILE_THREADS + threadIdx.x, r = piece / 16, c = piece % 16 * 8;
        if (m + r < job.M && n + c < job.N)
            *reinterpret_cast<uint4 *>(out + (m + r) * job.N + n + c) = *reinterpret_cast<const uint4 *>(tile + mx_tile_at(r, c));
    }
}
static __global__ void __launch_bounds__(MX_TILE_THREADS, 2) mx_sr_kernel(const __grid_constant__ MxJob job) {
    extern __shared__ __align__(16) uint16_t tile[];                 // two tiles where both directions are wanted
    const int part = threadIdx.x & 3, line = threadIdx.x / 4;        // of 64 rows or columns at once
    const int64_t m = (int64_t)(blockIdx.x / job.tiles_n) * MX_TILE, n = (int64_t)(blockIdx.x % job.tiles_n) * MX_TILE;
    mx_tile_in(tile, job, m, n);
    __syncthreads();
    if (job.along_n.out) {
        uint16_t *rounded = tile + (job.along_m.out ? MX_TILE_VALUES : 0);
#pragma unroll 1
        for (int r = line; r < MX_TILE; r += 64) {
            LaneBlock32 y;
            uint4 w[4];
#pragma unroll
            for (int k = 0; k < 4; k++) w[k] = *reinterpret_cast<const uint4 *>(tile + mx_tile_at(r, 32 * part + 8 * k));
            mx_unpack(w, y);
            mx_sr_round(y, job.along_n, part, job.along_n.first + (uint64_t)((m + r) * job.N + n + 32 * part) / 4, w);
#pragma unroll
            for (int k = 0; k < 4; k++) *reinterpret_cast<uint4 *>(rounded + mx_tile_at(r, 32 * part + 8 * k)) = w[k];
        }
        __syncthreads();
        mx_tile_out(rounded, job, m, n, job.along_n.out);
    }
    if (!job.along_m.out) return;
#pragma unroll 1
    for (int c = line; c < MX_TILE; c += 64) {                       // in place: a block's only reader is its writer
        uint16_t *from = tile + mx_tile_at(32 * part, c);
        LaneBlock32 y;
        uint4 w[4];
#pragma unroll
        for (int i = 0; i < 32; i++) y[i][0] = bf16_decode(from[i * 152]);
        mx_sr_round(y, job.along_m, part, job.along_m.first + (uint64_t)((n + c) * job.M + m + 32 * part) / 4, w);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const uint32_t word[4] = {w[k].x, w[k].y, w[k].z, w[k].w};
#pragma unroll
            for (int i = 0; i < 8; i++) from[(8 * k + i) * 152] = (uint16_t)(word[i / 2] >> (16 * (i & 1)));
        }
    }
    __syncthreads();
    mx_tile_out(tile, job, m, n, job.along_m.out);
}
FN MxWay mx_way(const MxSide *side, int64_t outer, int64_t inner) {
    MxWay w;
    memset(&w, 0, sizeof w);
    if (!side) return w;
    const OperandSpec *s = side->spec;
    const EdenAddress a = side->at;
    if (s->format != FORMAT_MXFP4 || s->block != BLOCK_1X32 || s->rounding != ROUND_SR)
        fatal("the GPU's MXFP4 quantizer of backward operands does not round by %d to format %d: mend the recipe's row", (int)s->rounding, (int)s->format);
    w.rotation = mx_rotation(s, a, a.gemm, inner);
    w.words = rng_stream(a.seed, a.step, rng_address(RNG_VALUE, a.layer, a.linear, a.gemm, a.operand, a.rank));
    w.first = block_word_index(a.micro, outer, inner, 0, 0) / 4;
    w.out = side->out;
    return w;
}
FN void mx_sr_start(cudaStream_t stream, MxJob job, const MxSide *along_n, const MxSide *along_m) {
    if (job.M < 32 || job.N < 32 || job.M % 32 || job.N % 32 || job.M > (1ll << 37) / job.N)
        fatal("cannot quantize a tensor of %lld x %lld to MXFP4: both must be multiples of 32 (tokens a micro-batch and widths), and values at "
              "most 2^37", (long long)job.M, (long long)job.N);
    job.tiles_n = (uint32_t)ceil_div(job.N, MX_TILE);
    const int64_t tiles = ceil_div(job.M, MX_TILE) * job.tiles_n;
    if (tiles > INT32_MAX) fatal("cannot quantize a tensor of %lld x %lld: it is too large", (long long)job.M, (long long)job.N);
    job.along_n = mx_way(along_n, job.M, job.N);
    job.along_m = mx_way(along_m, job.N, job.M);
    const int bytes = (int)sizeof(uint16_t) * MX_TILE_VALUES;
    static int ready = 0;
    if (!ready) CUDA_CHECK(cudaFuncSetAttribute(mx_sr_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 2 * bytes));
    ready = 1;
    mx_sr_kernel<<<(unsigned)tiles, MX_TILE_THREADS, along_n && along_m ? 2 * bytes : bytes, stream>>>(job);
    CUDA_LAUNCHED();
}
FN void mx_sr_launch(cudaStream_t stream, const bf16 *x, int64_t M, int64_t N, const MxSide *along_n, const MxSide *along_m) {
    MxJob job;
    memset(&job, 0, sizeof job);
    job.x = x; job.M = M; job.N = N;
    mx_sr_start(stream, job, along_n, along_m);
}
FN void mx_requantize_launch(cudaStream_t stream, const uint8_t *codes, const uint8_t *scales, int64_t rows, int64_t cols,
                             const MxSide *along_rows) {
    MxJob job;
    memset(&job, 0, sizeof job);
    job.codes = codes; job.scales = scales; job.M = rows; job.N = cols;
    mx_sr_start(stream, job, NULL, along_rows);
}

#endif
