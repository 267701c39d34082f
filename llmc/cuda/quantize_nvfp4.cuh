// cuda/quantize_nvfp4.cuh: NVFP4 operands that know their amax before they are rounded: nearest, four-over-six or stochastic, with
// a rotation of 0 to 128. The rival recipes' quantizers (nvidia, tetrajet2), their 16x16 blocks of W, and a saved tensor decoded
// again. Same bits as cpu/quantize.h, up to the sign of a zero.
//
// Everything runs on `stream`; nothing synchronizes. Pointers are device memory, 16-byte aligned. A NaN or an infinity in the input
// gives a factor of NaN and unspecified values, never a fault.
#ifndef LLMC_CUDA_QUANTIZE_NVFP4_CUH
#define LLMC_CUDA_QUANTIZE_NVFP4_CUH

#include "quantize.cuh"
#include "quantize_nvfp4_tile.cuh"

// One direction of a tensor: FORMAT_NVFP4 in blocks 1x16, ROUND_RTN, ROUND_FOUR_SIX or ROUND_SR, a rotation of 0, 16, 32, 64 or 128.
//   at       of its random words (ROUND_SR: one a value, cpu/quantize.h) and rotation signs
//   out      code x s_b in BF16, exact, laid out like the tensor; the rotation is not normalised
//   factor   device, written: s_t, what turns out into the operand
struct Nvfp4Side { const OperandSpec *spec; EdenAddress at; bf16 *out; float *factor; };

// Scratch of one call: the rotated tensor's amax, a direction each. Calls on one stream may share it.
FN int64_t nvfp4_workspace_bytes(int64_t rows, int64_t cols);

// x (M,N) -> along_n: blocks along N (the operand's rows: M), along_m: blocks along M (the operand's rows: N); either may be NULL.
// M and N are multiples of 128.
//   amax   max |x| (device), for sides without rotation; NULL if not known. A rotated side's amax is that of the rotated values,
//          unknown until they are formed; what is not known is found by a pass of its own before, both directions in one read.
// Reads 2 B a value, 4 B with that pass, and writes 2 B a direction. Instructions a value and direction (sm_90a): about 34
// stochastic, 20 nearest, that pass 8. Two sides of which one is stochastic take a read each.
FN void nvfp4_quantize_launch(cudaStream_t stream, const bf16 *x, int64_t M, int64_t N, const Nvfp4Side *along_n, const Nvfp4Side *along_m,
                              const float *amax, void *workspace);

// A saved tensor (rows, cols), codes (rows, cols/2) and E4M3 scales (rows, cols/16) as quantize_forward_launch writes them, -> re-quantized
// along its ROWS. What is quantized is codes x s_b, exact: the saved s_t is another factor, the caller's. rows and cols are multiples
// of 128. Reads 0.5625 B a value twice (amax first), writes 2 B; about 53 instructions a value.
FN void nvfp4_requantize_launch(cudaStream_t stream, const uint8_t *codes, const uint8_t *scales, int64_t rows, int64_t cols,
                                const Nvfp4Side *along_rows, void *workspace);

// W (rows, cols) in blocks of 16x16, ROUND_RTN or ROUND_FOUR_SIX: W and its transpose have the same codes. cols is a multiple of 16.
//   amax     max |w| (device)
//   codes    (rows, cols/2), two a byte along the columns; scales (rows/16 rounded up, cols/16), E4M3; both or neither
//   decoded  (rows, cols) code x s_b in BF16, exact; may be NULL
//   factor   s_t (device, written)
// Reads 2 B a value, writes 2 B, and 0.504 B where codes are kept.
FN void nvfp4_square_launch(cudaStream_t stream, Rounding rounding, const bf16 *w, int64_t rows, int64_t cols, const float *amax,
                            uint8_t *codes, uint8_t *scales, bf16 *decoded, float *factor);

// codes (rows, cols/2), scales (rows, cols/16), blocks 1x16 -> code x s_b (rows, cols) in BF16, exact. cols is a multiple of 16.
// Reads 0.5625 B a value, writes 2 B.
FN void nvfp4_decode_launch(cudaStream_t stream, const uint8_t *codes, const uint8_t *scales, int64_t rows, int64_t cols, bf16 *out);

// ---------------------------------------------------------------------------------------------------------------------
// Tiles of 128x128: launches of quantize_nvfp4_tile.cuh

FN int64_t nvfp4_workspace_bytes(int64_t rows, int64_t cols) { (void)rows; (void)cols; return 16; }

FN Nvfp4Job nvfp4_job(int64_t M, int64_t N, void *workspace) {
    if (M < EDEN_TILE || N < EDEN_TILE || M % EDEN_TILE || N % EDEN_TILE)
        fatal("cannot quantize a tensor of %lld x %lld on the GPU: it is cut into tiles, so both must be multiples of %d (tokens a micro-batch "
              "and widths)", (long long)M, (long long)N, EDEN_TILE);
    if (N > 1 << 22 || M / EDEN_TILE > (1 << 30) / (N / EDEN_TILE))
        fatal("cannot quantize a tensor of %lld x %lld: it is too large", (long long)M, (long long)N);
    Nvfp4Job job;
    memset(&job, 0, sizeof job);
    job.eden.M = M; job.eden.N = N;
    job.eden.tiles_n = (uint32_t)(N / EDEN_TILE);
    job.tiles_m = (uint32_t)(M / EDEN_TILE);
    job.eden.tiles = job.tiles_m * job.eden.tiles_n;
    job.most = (uint32_t *)workspace;
    return job;
}
// amax: of the values this side rounds, or NULL if a pass is to find it.
FN void nvfp4_side(Nvfp4Job *job, int direction, const Nvfp4Side *side, const float *amax) {
    const OperandSpec *s = side->spec;
    const int d = s->rotation, nearest = s->rounding == ROUND_RTN || s->rounding == ROUND_FOUR_SIX;
    if (s->format != FORMAT_NVFP4 || s->block != BLOCK_1X16 || !(nearest || s->rounding == ROUND_SR) || (d && d != 16 && d != 32 && d != 64 && d != 128))
        fatal("the GPU has no NVFP4 quantizer that rounds by %d in blocks of kind %d after a rotation of %d: mend the recipe's row, or train it "
              "with the CPU program", (int)s->rounding, (int)s->block, d);
    EdenSide *e = &job->eden.side[direction];
    Nvfp4Way *w = &job->way[direction];
    const EdenAddress a = side->at;
    const int64_t outer = direction == ALONG_M ? job->eden.N : job->eden.M, inner = direction == ALONG_M ? job->eden.M : job->eden.N;
    const RngStream stream = rng_stream(a.seed, a.step, rng_address(RNG_VALUE, a.layer, a.linear, a.gemm, a.operand, a.rank));
    uint32_t bits[4] = {0, 0, 0, 0};
    if (d && s->signs == SIGNS_RANDOM) rotation_bits(a.seed, a.step, a.layer, a.linear, a.gemm, bits);
    for (int i = 0; d && i < EDEN_TILE; i++) e->sign[i] = rotation_sign(bits, i % d) ^ turned_sign(d, i);
    e->keys = philox_keys(stream.key0, stream.key1);
    e->step = stream.step; e->address = stream.address;
    e->blocks = inner / 16;
    e->first = block_word_index(a.micro, outer, inner, 0, 0) / 4;
    e->decoded = side->out;
    w->rotation = d;
    w->four_six = s->rounding == ROUND_FOUR_SIX;
    w->override_ = s->rounding == ROUND_SR ? SR_OVERRIDE : 1.0f;
    w->bound = s->rounding == ROUND_FOUR_SIX ? FOUR_SIX_BOUND : RTN_BOUND;
    w->factor = side->factor;
    w->amax = amax ? amax : (const float *)(job->most + direction);
}

template <EdenSource SOURCE, int DIRECTIONS, Nvfp4Work WORK> static void nvfp4_start(cudaStream_t stream, Nvfp4Job job) {
    const int stage = eden_stage_bytes<SOURCE>();
    const int rest = SOURCE != SOURCE_BF16 || (WORK != WORK_AMAX && DIRECTIONS == (DO_N | DO_M)) ? EDEN_TILE_BYTES : 0;  // the second tile
    static int resident = 0, stages = 0;
    if (!resident) {
        int each = 0;
        const int room = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - (int)sizeof(Nvfp4Shared);
        stages = room >= 2 * stage + rest ? 2 : 1;
        CUDA_CHECK(cudaFuncSetAttribute(nvfp4_kernel<SOURCE, DIRECTIONS, WORK>, cudaFuncAttributeMaxDynamicSharedMemorySize, stages * stage + rest));
        CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, nvfp4_kernel<SOURCE, DIRECTIONS, WORK>, EDEN_THREADS, stages * stage + rest));
        resident = device_attribute(cudaDevAttrMultiProcessorCount) * (each > 0 ? each : 1);
    }
    job.stages = stages;
    const int ctas = grid_blocks(job.eden.tiles, resident, 3, 4);
    nvfp4_kernel<SOURCE, DIRECTIONS, WORK><<<ctas, EDEN_THREADS, stages * stage + rest, stream>>>(job);
    CUDA_LAUNCHED();
}
template <Nvfp4Work WORK> static void nvfp4_start_bf16(cudaStream_t stream, const Nvfp4Job &job, int directions) {
    if (directions == (DO_N | DO_M)) nvfp4_start<SOURCE_BF16, DO_N | DO_M, WORK>(stream, job);
    else if (directions == DO_N) nvfp4_start<SOURCE_BF16, DO_N, WORK>(stream, job);
    else if (directions == DO_M) nvfp4_start<SOURCE_BF16, DO_M, WORK>(stream, job);
}
FN void nvfp4_quantize_launch(cudaStream_t stream, const bf16 *x, int64_t M, int64_t N, const Nvfp4Side *along_n, const Nvfp4Side *along_m,
                              const float *amax, void *workspace) {
    const Nvfp4Side *sides[2] = {along_n, along_m};
    int look = 0, stochastic = 0, nearest = 0;  // directions whose amax is to be found; that round so
    Nvfp4Job job = nvfp4_job(M, N, workspace);
    job.eden.x = x;
    for (int d = 0; d < 2; d++) {
        if (!sides[d]) continue;
        const float *known = sides[d]->spec->rotation ? NULL : amax;
        nvfp4_side(&job, d, sides[d], known);
        if (!known) look |= 1 << d;
        if (sides[d]->spec->rounding == ROUND_SR) stochastic |= 1 << d;
        else nearest |= 1 << d;
    }
    if (look) CUDA_CHECK(cudaMemsetAsync(job.most, 0, 2 * sizeof *job.most, stream));
    nvfp4_start_bf16<WORK_AMAX>(stream, job, look);
    nvfp4_start_bf16<WORK_STOCHASTIC>(stream, job, stochastic);
    nvfp4_start_bf16<WORK_NEAREST>(stream, job, nearest);
}
FN void nvfp4_requantize_launch(cudaStream_t stream, const uint8_t *codes, const uint8_t *scales, int64_t rows, int64_t cols,
                                const Nvfp4Side *along_rows, void *workspace) {
    Nvfp4Job job = nvfp4_job(rows, cols, workspace);
    job.eden.codes = codes; job.eden.scales = scales;
    nvfp4_side(&job, ALONG_M, along_rows, NULL);
    CUDA_CHECK(cudaMemsetAsync(job.most, 0, 2 * sizeof *job.most, stream));
    nvfp4_start<SOURCE_PACKED, DO_M, WORK_AMAX>(stream, job);
    if (along_rows->spec->rounding == ROUND_SR) nvfp4_start<SOURCE_PACKED, DO_M, WORK_STOCHASTIC>(stream, job);
    else nvfp4_start<SOURCE_PACKED, DO_M, WORK_NEAREST>(stream, job);
}

// ---------------------------------------------------------------------------------------------------------------------
// W in 16x16 blocks: a thread has a row of a block, 16 threads a block. W is quantized once a step: the sum of errors in the CPU's
// order, row after row, may cost what it costs.

#define SQUARE_THREADS 256

struct SquareJob {
    const bf16 *w;
    int64_t rows, cols;
    uint32_t tiles, tiles_n;           // of 16x16; in a row
    const float *amax;
    uint8_t *codes, *scales;
    bf16 *decoded;
    float *factor;
};
// Sum of the 16 rows' errors, of this thread's block; the same in all of its threads.
__device__ __forceinline__ float square_error(const float error[2], int lane) {
    float sum = 0.0f;
#pragma unroll
    for (int r = 0; r < 16; r++)
#pragma unroll
        for (int half = 0; half < 2; half++) sum = f32_add(sum, __shfl_sync(0xFFFFFFFFu, error[half], (lane & 16) + r));
    return sum;
}
// -> the block scale as a value; q: of this thread's row.
template <bool FOUR_SIX>
__device__ __forceinline__ float square_round(const float x[16], float amax, TensorScale ts, int lane, uint32_t q[8]) {
    const float t = f32_mul(amax, ts.inv);
    const ForwardScale six = forward_scale(t, ts.st);
    float error[2];
    nearest_try<FOUR_SIX>(x, six.d, six.e, q, error);
    if (!FOUR_SIX) return six.s;
    const ForwardScale four = forward_scale(f32_mul(t, 1.5f), ts.st);
    uint32_t q4[8];
    const float error6 = square_error(error, lane);
    nearest_try<true>(x, four.d, four.e, q4, error);
    const bool better = square_error(error, lane) < error6;
#pragma unroll
    for (int i = 0; i < 8; i++) q[i] = better ? q4[i] : q[i];
    return better ? four.s : six.s;
}
template <bool FOUR_SIX> static __global__ void __launch_bounds__(SQUARE_THREADS) square_kernel(const __grid_constant__ SquareJob job) {
    const int lane = threadIdx.x & 31;
    const TensorScale ts = nvfp4_tensor_scale(*job.amax, 1.0f, FOUR_SIX ? FOUR_SIX_BOUND : RTN_BOUND);
    if (blockIdx.x == 0 && threadIdx.x == 0) *job.factor = f32_abs(*job.amax) < INFINITY ? ts.st : f32_from_bits(0x7FC00000u);
    const uint32_t first = (blockIdx.x * SQUARE_THREADS + (threadIdx.x & ~31u)) / 16, step = gridDim.x * (SQUARE_THREADS / 16);
    for (uint64_t pair = first; pair < job.tiles; pair += step) {  // a warp's two blocks
        const uint32_t tile = (uint32_t)pair + lane / 16;
        const int64_t row = (int64_t)(tile / job.tiles_n) * 16 + lane % 16, col = (int64_t)(tile % job.tiles_n) * 16, at = row * job.cols + col;
        const bool live = tile < job.tiles && row < job.rows;
        uint4 w[2] = {make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)};
        if (live) for (int i = 0; i < 2; i++) w[i] = reinterpret_cast<const uint4 *>(job.w + at)[i];
        const uint32_t words[8] = {w[0].x, w[0].y, w[0].z, w[0].w, w[1].x, w[1].y, w[1].z, w[1].w};
        float x[16], amax = words_amax(words);
#pragma unroll
        for (int i = 0; i < 8; i++) { x[2 * i] = f32_from_bits(words[i] << 16); x[2 * i + 1] = f32_from_bits(words[i] & 0xFFFF0000u); }
#pragma unroll
        for (int o = 8; o > 0; o /= 2) amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, o));
        uint32_t q[8], sign[8];
        const float rounded = square_round<FOUR_SIX>(x, amax, ts, lane, q), s = amax > 0.0f ? rounded : 0.0f;
        if (!live) continue;
#pragma unroll
        for (int i = 0; i < 8; i++) sign[i] = words[i] & 0x80008000u;
        if (job.codes) {
            *reinterpret_cast<uint2 *>(job.codes + at / 2) = make_uint2(pack_codes8(q, sign), pack_codes8(q + 4, sign + 4));
            if (lane % 16 == 0) job.scales[tile] = (uint8_t)e4m3_code(s);
        }
        if (!job.decoded) continue;
        const uint32_t two = bf16x2_twice(s);
#pragma unroll
        for (int i = 0; i < 8; i++) q[i] = bf16x2_mul(q[i] | sign[i], two);
        uint4 *to = reinterpret_cast<uint4 *>(job.decoded + at);
        to[0] = make_uint4(q[0], q[1], q[2], q[3]);
        to[1] = make_uint4(q[4], q[5], q[6], q[7]);
    }
}
FN void nvfp4_square_launch(cudaStream_t stream, Rounding rounding, const bf16 *w, int64_t rows, int64_t cols, const float *amax,
                            uint8_t *codes, uint8_t *scales, bf16 *decoded, float *factor) {
    if (rows < 1 || cols < 16 || cols % 16)
        fatal("cannot quantize a tensor of %lld x %lld: columns must be a multiple of 16", (long long)rows, (long long)cols);
    if (rounding != ROUND_RTN && rounding != ROUND_FOUR_SIX) fatal("the GPU's 16x16 quantizer has no rounding %d: mend the recipe's row", (int)rounding);
    if (!codes != !scales) fatal("the 16x16 quantizer writes codes and scales or neither: this is a bug");
    if (ceil_div(rows, 16) > (1ll << 31) / (cols / 16)) fatal("cannot quantize a tensor of %lld x %lld: it is too large", (long long)rows, (long long)cols);
    SquareJob job;
    job.w = w; job.rows = rows; job.cols = cols;
    job.tiles_n = (uint32_t)(cols / 16); job.tiles = (uint32_t)(ceil_div(rows, 16) * job.tiles_n);
    job.amax = amax; job.codes = codes; job.scales = scales; job.decoded = decoded; job.factor = factor;
    const int64_t work = ceil_div(job.tiles, SQUARE_THREADS / 16), most = 8 * (int64_t)device_attribute(cudaDevAttrMultiProcessorCount);
    const int grid = (int)(work < most ? work : most);
    if (rounding == ROUND_FOUR_SIX) square_kernel<true><<<grid, SQUARE_THREADS, 0, stream>>>(job);
    else square_kernel<false><<<grid, SQUARE_THREADS, 0, stream>>>(job);
    CUDA_LAUNCHED();
}

// ---------------------------------------------------------------------------------------------------------------------
// Decoding: a thread has half a block, 4 bytes of codes and 16 of values, so that a warp's stores are 512 bytes in a row.

static __global__ void __launch_bounds__(256) nvfp4_decode_kernel(const uint32_t *codes, const uint8_t *scales, int64_t eights, uint4 *out) {
    const uint32_t back = bf16x2_twice(1.0f / PACKED_SCALE);
    for (int64_t k = (int64_t)blockIdx.x * 256 + threadIdx.x; k < eights; k += (int64_t)gridDim.x * 256) {
        const uint32_t word = codes[k], scale = packed_scale_bf16x2(scales[k / 2]);
        uint32_t d[4];
#pragma unroll
        for (int i = 0; i < 4; i++) d[i] = bf16x2_mul(packed_decode2(word, i, scale), back);
        out[k] = make_uint4(d[0], d[1], d[2], d[3]);
    }
}
FN void nvfp4_decode_launch(cudaStream_t stream, const uint8_t *codes, const uint8_t *scales, int64_t rows, int64_t cols, bf16 *out) {
    if (rows < 1 || cols < 16 || cols % 16 || rows > INT64_MAX / 2 / cols)
        fatal("cannot decode a tensor of %lld x %lld: columns must be a multiple of 16", (long long)rows, (long long)cols);
    const int64_t eights = rows * cols / 8, work = ceil_div(eights, 256), most = 32 * (int64_t)device_attribute(cudaDevAttrMultiProcessorCount);
    nvfp4_decode_kernel<<<(int)(work < most ? work : most), 256, 0, stream>>>((const uint32_t *)codes, scales, eights, (uint4 *)out);
    CUDA_LAUNCHED();
}

#endif
