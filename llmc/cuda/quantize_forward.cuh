// cuda/quantize_forward.cuh: amax, and the forward quantizers of X and W (rtn and four_six, blocks 1x16). Included by
// quantize.cuh, which states what each launch does.
//
// Blocks run along the columns, so a tensor is a flat list of blocks of 16 values, 32 bytes; a thread takes one block, and its
// neighbours' loads and stores fall together. The decoded block goes through shared memory, so that a store instruction
// writes 512 bytes in a row instead of every other 16. A thread's next block is on its way while it works on one. Bound by memory:
// 4.56 B a value at copy bandwidth is worth about 36 instructions a value on an H200; four_six issues about 32, most of them for
// rounding and measuring each value twice.
#ifndef LLMC_CUDA_QUANTIZE_FORWARD_CUH
#define LLMC_CUDA_QUANTIZE_FORWARD_CUH

#include "quantize_device.cuh"

#define FORWARD_THREADS 256
#define AMAX_THREADS 512
#define FORWARD_FOUR_SIX true, 4       // the trainer's choice of AHEAD and CTAS, see forward_kernel
#define FORWARD_RTN true, 5
#define FORWARD_SEARCH true, 3

// ---------------------------------------------------------------------------------------------------------------------
// amax. Bits of magnitudes are in the order of the magnitudes, and those of a NaN are largest: a NaN makes amax NaN.

static __global__ void __launch_bounds__(AMAX_THREADS) amax_kernel(const bf16 *x, int64_t count, uint32_t *amax) {
    const int64_t thread = (int64_t)blockIdx.x * AMAX_THREADS + threadIdx.x, threads = (int64_t)gridDim.x * AMAX_THREADS;
    uint32_t most = 0u;  // two magnitudes of 15 bits
    for (int64_t i = thread; i < count / 8; i += threads) {
        const uint4 w = *reinterpret_cast<const uint4 *>(x + i * 8);
        most = __vmaxu2(__vmaxu2(__vmaxu2(w.x & 0x7FFF7FFFu, w.y & 0x7FFF7FFFu), __vmaxu2(w.z & 0x7FFF7FFFu, w.w & 0x7FFF7FFFu)), most);
    }
    if (thread < count % 8) most = __vmaxu2(most, (uint32_t)__bfloat16_as_ushort(x[count / 8 * 8 + thread]) & 0x7FFFu);
    most = __reduce_max_sync(0xFFFFFFFFu, max(most & 0xFFFFu, most >> 16));
    if ((threadIdx.x & 31) == 0) atomicMax(amax, most << 16);
}
FN void amax_launch(cudaStream_t stream, const bf16 *x, int64_t count, float *amax) {
    if (count < 0) fatal("amax of %lld values: this is a bug", (long long)count);
    CUDA_CHECK(cudaMemsetAsync(amax, 0, sizeof *amax, stream));
    const int64_t work = ceil_div(count / 8 + 1, AMAX_THREADS), most = 4 * (int64_t)device_attribute(cudaDevAttrMultiProcessorCount);
    amax_kernel<<<(int)(work < most ? work : most), AMAX_THREADS, 0, stream>>>(x, count, reinterpret_cast<uint32_t *>(amax));
    CUDA_LAUNCHED();
}

// ---------------------------------------------------------------------------------------------------------------------
// A block of 16 values

enum ForwardMode { MODE_RTN, MODE_FOUR_SIX, MODE_SEARCH, MODE_SEARCH_TRUE };
struct ForwardBlock {
    uint32_t q[8];   // pairs of BF16 of the E2M1 grid, up to the sign of a zero; CODES: q[0] and q[1] are the sixteen codes
    uint32_t sb;     // E4M3 code
};

// Rounds x*e; with MEASURE -> the squared error in the order of four_six_try(). amax*e < 7.
template <bool MEASURE>
__device__ __forceinline__ float block_try(const float x[16], float d, float e, uint32_t q[8]) {
    float error[2] = {0.0f, 0.0f}, r[16];
#pragma unroll
    for (int i = 0; i < 16; i++) {
        r[i] = e2m1_round_unclamped(f32_mul(x[i], e));
        if (MEASURE) {
            const float miss = f32_sub(x[i], f32_mul(r[i], d));
            error[i / 8] = f32_add(error[i / 8], f32_mul(miss, miss));
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++) q[i] = pack_bf16x2(r[2 * i], r[2 * i + 1]);
    return f32_add(error[0], error[1]);
}
// Four pairs of E2M1 values and their signs -> eight codes. Times 2^-126 a value's BF16 bits are its code's three bits, at
// 8..6; two multiplications move a word's two codes and signs into its top byte, no two bits to one place.
__device__ __forceinline__ uint32_t pack_codes8(const uint32_t q[4], const uint32_t sign[4]) {
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; i++) w[i] = bf16x2_mul(q[i], 0x00800080u) * 0x00040040u + sign[i] * 0x1001u;
    return __byte_perm(__byte_perm(w[0], w[1], 0x0073), __byte_perm(w[2], w[3], 0x0073), 0x5410);
}
// Where the hardware converts, it rounds the chosen candidate x*e once more, two values an instruction: fewer than moving the bits of values
// that were rounded, and nothing else of those is needed where no decoded operand is made.
__device__ __forceinline__ void block_codes(const float x[16], float e, uint32_t q[8]) {
    float v[16];
#pragma unroll
    for (int i = 0; i < 16; i++) v[i] = f32_mul(x[i], e);
    q[0] = convert_e2m1x8_numbers(v);
    q[1] = convert_e2m1x8_numbers(v + 8);
}
// By the block functions of quantize.h: for the rare block whose scale is so small that values lie beyond 7 and must saturate. A search has such
// candidates besides its first only where E4M3 scales are subnormal.
template <ForwardMode MODE, bool CODES>
__device__ __noinline__ ForwardBlock block_saturating(uint4 w0, uint4 w1, float amax, TensorScale ts) {
    const uint32_t words[8] = {w0.x, w0.y, w0.z, w0.w, w1.x, w1.y, w1.z, w1.w};
    LaneBlock in, out;
    ForwardBlock b;
    float most[1] = {amax};
#pragma unroll
    for (int i = 0; i < 16; i++) in[i][0] = bf16_decode((uint16_t)(words[i / 2] >> (i % 2 * 16)));
    if (MODE >= MODE_SEARCH) search_block(in, most, ts, 0, MODE == MODE_SEARCH_TRUE, out, &b.sb);
    else if (MODE == MODE_FOUR_SIX) four_six_block(in, most, ts, out, &b.sb);
    else nvfp4_rtn_block(in, most, ts, out, &b.sb);
#pragma unroll
    for (int i = 0; i < 8; i++) b.q[i] = pack_bf16x2(out[2 * i][0], out[2 * i + 1][0]);
    if (CODES) {
        uint32_t sign[8];
#pragma unroll
        for (int i = 0; i < 8; i++) sign[i] = words[i] & 0x80008000u;
        const uint32_t low = pack_codes8(b.q, sign), high = pack_codes8(b.q + 4, sign + 4);
        b.q[0] = low;
        b.q[1] = high;
    }
    return b;
}
// One candidate's scale: nvfp4_block_scale() of t as a value, d = s_b*s_t and e = 1/d. A block of zeros gets a scale here
// (its values do not care) and is given code 0 at the end.
struct ForwardScale { float s, d, e; };
__device__ __forceinline__ ForwardScale forward_scale(float t, float st) {
    ForwardScale c;
    c.s = fmaxf(e4m3_round_unclamped(t), 0x1p-9f);
    c.d = f32_mul(c.s, st);
    c.e = f32_reciprocal(c.d);
    return c;
}
// Largest magnitude of 16 BF16 values: two at a time, which is exact in BF16. NaNs are skipped.
__device__ __forceinline__ float words_amax(const uint32_t w[8]) {
    __nv_bfloat162 a[8];
#pragma unroll
    for (int i = 0; i < 8; i++) memcpy(&a[i], &w[i], 4);
#pragma unroll
    for (int h = 4; h > 0; h /= 2)
#pragma unroll
        for (int i = 0; i < h; i++) a[i] = __hmax2(__habs2(a[i]), __habs2(a[i + h]));
    uint32_t most;
    memcpy(&most, &a[0], 4);
    return fmaxf(f32_from_bits(most << 16), f32_from_bits(most & 0xFFFF0000u));
}
// The second half of search_block(): the scale times S. x and q are magnitudes, q packed.
__device__ __forceinline__ uint32_t block_true_scale(const float x[16], const uint32_t q[8], uint32_t sb, float d) {
    float xx[2] = {0.0f, 0.0f}, xq[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const float a = fabsf(x[i]), v = f32_from_bits(i % 2 ? q[i / 2] & 0xFFFF0000u : q[i / 2] << 16);
        xx[i / 8] = f32_add(xx[i / 8], f32_mul(a, a));
        xq[i / 8] = f32_add(xq[i / 8], f32_mul(a, f32_mul(v, d)));
    }
    const float N = f32_add(xx[0], xx[1]), D = f32_add(xq[0], xq[1]), S = D > 0.0f ? f32_div(N, D) : 1.0f;
    return sb ? u32_max(e4m3_encode(f32_mul(e4m3_decode(sb), S)), 1u) : 0u;
}
// search_block() of magnitudes, which have the same errors.
template <ForwardMode MODE>
__device__ __forceinline__ ForwardBlock block_search(uint4 w0, uint4 w1, const float x[16], float amax, TensorScale ts) {
    ForwardBlock b;
    float least = 0.0f, best_d = 0.0f;
    const uint32_t first = search_first(amax, ts, 0);
    if (first > 0u && first < 16u) return block_saturating<MODE, false>(w0, w1, amax, ts);
    b.sb = 0u;
#pragma unroll
    for (int k = 0; k < SEARCH_FEW_COUNT; k++) {
        const uint32_t code = search_scale(first, 0, k);
        const float d = f32_mul(e4m3_decode(code), ts.st), e = code ? f32_reciprocal(d) : 0.0f;
        float error[2] = {0.0f, 0.0f}, r[16];
#pragma unroll
        for (int i = 0; i < 16; i++) {
            r[i] = e2m1_round_unclamped(f32_mul(fabsf(x[i]), e));
            if (k == 0) r[i] = fminf(r[i], E2M1_MAX);
            const float miss = f32_fma(-r[i], d, fabsf(x[i]));
            error[i / 8] = f32_fma(miss, miss, error[i / 8]);
        }
        const float sum = f32_add(error[0], error[1]);
        const bool better = k == 0 || sum < least;
        least = better ? sum : least;
        b.sb = better ? code : b.sb;
        best_d = better ? d : best_d;
#pragma unroll
        for (int i = 0; i < 8; i++) { const uint32_t two = pack_bf16x2(r[2 * i], r[2 * i + 1]); b.q[i] = better ? two : b.q[i]; }
    }
    if (MODE == MODE_SEARCH_TRUE) b.sb = block_true_scale(x, b.q, b.sb, best_d);
    return b;
}
template <ForwardMode MODE, bool CODES>
__device__ __forceinline__ ForwardBlock block_forward(uint4 w0, uint4 w1, TensorScale ts) {
    const uint32_t words[8] = {w0.x, w0.y, w0.z, w0.w, w1.x, w1.y, w1.z, w1.w};
    ForwardBlock b;
    float x[16];
#pragma unroll
    for (int i = 0; i < 8; i++) { x[2 * i] = f32_from_bits(words[i] << 16); x[2 * i + 1] = f32_from_bits(words[i] & 0xFFFF0000u); }
    const float amax = words_amax(words);
    if (MODE >= MODE_SEARCH) return block_search<MODE>(w0, w1, x, amax, ts);
    const float t = f32_mul(amax, ts.inv);
    const ForwardScale six = forward_scale(t, ts.st);
    // The second candidate's scale is no smaller. Fails for NaN too.
    if (!(f32_mul(amax, six.e) < 7.0f)) return block_saturating<MODE, CODES>(w0, w1, amax, ts);
    float s = six.s;
    if (MODE == MODE_FOUR_SIX) {
        const ForwardScale four = forward_scale(f32_mul(t, 1.5f), ts.st);
        uint32_t q4[8];
        const float error6 = block_try<true>(x, six.d, six.e, b.q), error4 = block_try<true>(x, four.d, four.e, q4);
        const bool better = error4 < error6;
        s = better ? four.s : s;
        if (CODES) block_codes(x, better ? four.e : six.e, b.q);
#pragma unroll
        for (int i = 0; i < 8 && !CODES; i++) b.q[i] = better ? q4[i] : b.q[i];
    } else if (CODES) {
        block_codes(x, six.e, b.q);
    } else {
        block_try<false>(x, six.d, six.e, b.q);
    }
    b.sb = amax > 0.0f ? e4m3_code(s) : 0u;
    return b;
}

// ---------------------------------------------------------------------------------------------------------------------
// The kernel

struct ForwardJob {
    const bf16 *x;
    uint32_t blocks;           // of the tensor: rows * columns
    uint32_t columns;          // cols/16, scales of a row
    const float *amax;
    uint8_t *codes, *scales;   // both or neither
    bf16 *decoded;
    float *st, *alpha;
    const float *other_st;
};

// Block k of the tensor; beyond its end, zeros.
__device__ __forceinline__ void block_load(const ForwardJob &job, uint64_t k, uint4 w[2]) {
    w[0] = w[1] = make_uint4(0, 0, 0, 0);
    if (k >= job.blocks) return;
    const uint4 *from = reinterpret_cast<const uint4 *>(job.x + k * 16);
    w[0] = from[0];
    w[1] = from[1];
}
// AHEAD: a thread's next block is loaded before it works on this one, or after. CTAS: an SM's, which limits registers.
template <ForwardMode MODE, bool TILED, bool AHEAD, int CTAS>
static __global__ void __launch_bounds__(FORWARD_THREADS, CTAS) forward_kernel(const __grid_constant__ ForwardJob job) {
    __shared__ uint4 staged[FORWARD_THREADS / 32][64];  // a warp's 32 decoded blocks, in chunks of 16 bytes
    constexpr bool CODES = TILED && CONVERT_E2M1_HARDWARE;
    const int lane = threadIdx.x & 31;
    uint4 *mine = staged[threadIdx.x >> 5];
    // Where a lane puts its block's two chunks of 16 bytes, and where it takes chunks lane and lane + 32 from. Chunk i lies at
    // i ^ bit 3 of i: eight neighbouring lanes then meet eight different groups of banks both ways.
    uint4 *put = mine + ((2 * lane) ^ ((lane >> 2) & 1)), *take = mine + (lane ^ ((lane >> 3) & 1));
    const TensorScale ts = nvfp4_tensor_scale(*job.amax, 1.0f, MODE == MODE_RTN ? RTN_BOUND : FOUR_SIX_BOUND);
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        const float st = f32_abs(*job.amax) < INFINITY ? ts.st : f32_from_bits(0x7FC00000u);
        *job.st = st;
        if (job.alpha) *job.alpha = f32_mul(st, *job.other_st);
    }
    // `first` is the warp's first block.
    const uint32_t step = gridDim.x * FORWARD_THREADS;
    uint4 ahead[2];
    block_load(job, blockIdx.x * FORWARD_THREADS + threadIdx.x, ahead);
    for (uint32_t first = blockIdx.x * FORWARD_THREADS + (threadIdx.x & ~31u); first < job.blocks; first += step) {
        const uint32_t k = first + lane;
        const bool live = k < job.blocks;
        const uint4 w[2] = {ahead[0], ahead[1]};
        if (AHEAD) block_load(job, (uint64_t)k + step, ahead);
        const uint32_t words[8] = {w[0].x, w[0].y, w[0].z, w[0].w, w[1].x, w[1].y, w[1].z, w[1].w};
        ForwardBlock b = block_forward<MODE, CODES>(w[0], w[1], ts);
        uint32_t sign[8];  // the input's: a negative value that rounded to zero keeps it
#pragma unroll
        for (int i = 0; i < 8; i++) sign[i] = words[i] & 0x80008000u;
        if (job.codes && live) {
            reinterpret_cast<uint2 *>(job.codes)[k] = CODES ? make_uint2(b.q[0], b.q[1]) : make_uint2(pack_codes8(b.q, sign), pack_codes8(b.q + 4, sign + 4));
            job.scales[TILED ? tiled_scale_offset(k / job.columns, k % job.columns, job.columns) : k] = (uint8_t)b.sb;
        }
        if (!TILED && job.decoded) {
            const uint32_t s = bf16x2_twice(e4m3_decode(b.sb));
#pragma unroll
            for (int i = 0; i < 8; i++) b.q[i] = bf16x2_mul(b.q[i] | sign[i], s);
            put[0] = make_uint4(b.q[0], b.q[1], b.q[2], b.q[3]);
            mine[(put - mine) ^ 1] = make_uint4(b.q[4], b.q[5], b.q[6], b.q[7]);
            __syncwarp();
            uint4 *to = reinterpret_cast<uint4 *>(job.decoded) + ((int64_t)first * 2 + lane);
#pragma unroll
            for (int i = 0; i < 2; i++) if (first + (lane + 32 * i) / 2 < job.blocks) to[32 * i] = take[32 * i];
            __syncwarp();
        }
        if (!AHEAD) block_load(job, (uint64_t)k + step, ahead);
    }
}

template <ForwardMode MODE, bool TILED, bool AHEAD, int CTAS> static void forward_start(cudaStream_t stream, const ForwardJob &job) {
    static int resident = 0;
    if (!resident) {
        int each = 0;
        CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, forward_kernel<MODE, TILED, AHEAD, CTAS>, FORWARD_THREADS, 0));
        resident = device_attribute(cudaDevAttrMultiProcessorCount) * (each > 0 ? each : 1);
    }
    forward_kernel<MODE, TILED, AHEAD, CTAS><<<grid_blocks(ceil_div(job.blocks, FORWARD_THREADS), resident, 3, 8), FORWARD_THREADS, 0, stream>>>(job);
    CUDA_LAUNCHED();
}
FN ForwardJob forward_job(const OperandSpec *spec, int native, const bf16 *x, int64_t rows, int64_t cols, const float *amax, uint8_t *codes,
                              uint8_t *scales, bf16 *decoded, float *st, const float *other_st, float *alpha) {
    if (rows < 1 || cols < 16 || cols % 16)
        fatal("cannot quantize a tensor of %lld x %lld: columns must be a multiple of 16", (long long)rows, (long long)cols);
    const int search = spec->rounding == ROUND_SEARCH || spec->rounding == ROUND_SEARCH_TRUE;
    if ((spec->rounding != ROUND_RTN && spec->rounding != ROUND_FOUR_SIX && !search) || (search && (native || spec->search != SEARCH_FEW)))
        fatal("the GPU's %s forward quantizer has no rounding %d, search %d: this is a bug", native ? "packed" : "decoded", (int)spec->rounding, (int)spec->search);
    if (!codes != !scales) fatal("the forward quantizer writes codes and scales or neither: this is a bug");
    if (rows > (1ll << 31) / (cols / 16)) fatal("cannot quantize a tensor of %lld x %lld: it is too large", (long long)rows, (long long)cols);
    ForwardJob job;
    job.x = x; job.blocks = (uint32_t)(rows * (cols / 16)); job.columns = (uint32_t)(cols / 16); job.amax = amax;
    job.codes = codes; job.scales = scales; job.decoded = decoded;
    job.st = st; job.alpha = alpha; job.other_st = other_st;
    return job;
}
FN void quantize_forward_launch(cudaStream_t stream, const OperandSpec *spec, const bf16 *x, int64_t rows, int64_t cols,
                                    const float *amax, uint8_t *codes, uint8_t *scales, bf16 *decoded, float *st,
                                    const float *other_st, float *alpha) {
    const ForwardJob job = forward_job(spec, 0, x, rows, cols, amax, codes, scales, decoded, st, other_st, alpha);
    switch (spec->rounding) {
    case ROUND_FOUR_SIX: forward_start<MODE_FOUR_SIX, false, FORWARD_FOUR_SIX>(stream, job); break;
    case ROUND_SEARCH: forward_start<MODE_SEARCH, false, FORWARD_SEARCH>(stream, job); break;
    case ROUND_SEARCH_TRUE: forward_start<MODE_SEARCH_TRUE, false, FORWARD_SEARCH>(stream, job); break;
    default: forward_start<MODE_RTN, false, FORWARD_RTN>(stream, job);
    }
}
FN int64_t tiled_scale_bytes(int64_t rows, int64_t cols) { return ceil_div(rows, 128) * ceil_div(cols / 16, 4) * 512; }
FN void quantize_forward_native_launch(cudaStream_t stream, const OperandSpec *spec, const bf16 *x, int64_t rows, int64_t cols,
                                           const float *amax, uint8_t *codes, uint8_t *tiled_scales, float *st,
                                           const float *other_st, float *alpha) {
    const ForwardJob job = forward_job(spec, 1, x, rows, cols, amax, codes, tiled_scales, NULL, st, other_st, alpha);
    if (rows % 128 || cols % 64) CUDA_CHECK(cudaMemsetAsync(tiled_scales, 0, (size_t)tiled_scale_bytes(rows, cols), stream));
    if (spec->rounding == ROUND_FOUR_SIX) forward_start<MODE_FOUR_SIX, true, FORWARD_FOUR_SIX>(stream, job);
    else forward_start<MODE_RTN, true, FORWARD_RTN>(stream, job);
}

#endif
