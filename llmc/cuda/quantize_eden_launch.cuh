// cuda/quantize_eden_launch.cuh: what MS-EDEN does once the largest c of a tensor is known, and the launches. Included by quantize.cuh,
// which states what each does.
#ifndef LLMC_CUDA_QUANTIZE_EDEN_LAUNCH_CUH
#define LLMC_CUDA_QUANTIZE_EDEN_LAUNCH_CUH

#include "quantize_eden.cuh"

#define FINISH_THREADS 256
#define FINISH_WARPS (FINISH_THREADS / 32)

// Tensor scales st[2] of the directions done, from the CTAs' maxima; NaN if a c was not finite. Called by every thread of the CTA.
// The first CTA writes what a launch is to know: st_out (one a direction), alpha.
__device__ __forceinline__ void eden_tensor_scales(const EdenJob &job, int directions, int ctas, float st[2]) {
    __shared__ uint32_t best[2][FINISH_WARPS];
    uint32_t most[2] = {0u, 0u};
    for (int i = threadIdx.x; i < ctas; i += FINISH_THREADS)
#pragma unroll
        for (int d = 0; d < 2; d++) if (directions >> d & 1) most[d] = max(most[d], job.side[d].cta_max[i]);
#pragma unroll
    for (int d = 0; d < 2; d++) {
        most[d] = __reduce_max_sync(0xFFFFFFFFu, most[d]);
        if ((threadIdx.x & 31) == 0) best[d][threadIdx.x >> 5] = most[d];
    }
    __syncthreads();
#pragma unroll
    for (int d = 0; d < 2; d++) {
#pragma unroll
        for (int w = 0; w < FINISH_WARPS; w++) most[d] = max(most[d], best[d][w]);
        st[d] = most[d] < 0x7F800000u ? ms_eden_posthoc_tensor_scale(f32_from_bits(most[d])) : f32_from_bits(0x7FC00000u);
    }
}
// st_out: one a direction done. alpha: the saved scale / 128, times the new one where it is not in the values.
__device__ __forceinline__ void eden_report(int directions, const float st[2], bool in_values, float *st_out, const float *saved_st, float *alpha) {
    if (blockIdx.x || threadIdx.x) return;
    if (st_out) {
        if (directions & DO_N) *st_out++ = st[0];
        if (directions & DO_M) *st_out = st[1];
    }
    const float rotated = alpha ? f32_mul(*saved_st, 1.0f / EDEN_TILE) : 0.0f;
    if (alpha) *alpha = in_values ? rotated : f32_mul(rotated, directions & DO_M ? st[1] : st[0]);
}

// What a block's decoded values are to be multiplied by: q*extended -> q*(s_b*s_t) where the E4M3 scale is subnormal, else 1. The
// product of a value and the rounded quotient is within 2^-22 of q*s_b*s_t, a BF16 number, so rounding to BF16 finds it.
__device__ __forceinline__ float block_ratio(float c, float st, float least, uint32_t u) {
    if (!(c > 0.0f && c < least)) return 1.0f;
    return f32_div(f32_mul(e4m3_decode(ms_eden_posthoc_scale(c, st, u)), st), ms_eden_posthoc_extended(c, u));
}
#define RATIO_PITCH (EDEN_TILE + 4)
// The ratios of a tile's blocks, ratio[block][run]: two threads a run, four neighbouring blocks each (one Philox call, if it is needed).
__device__ __forceinline__ void tile_ratios(float *ratio, const EdenJob &job, int direction, int64_t tm, int64_t tn, float st, float least) {
    const EdenSide &side = job.side[direction];
    const bool along_m = direction == ALONG_M;
    const int run = threadIdx.x >> 1, half = threadIdx.x & 1;
    const int64_t row = (along_m ? tn : tm) * EDEN_TILE + run;
    const uint4 pairs = *reinterpret_cast<const uint4 *>(side.c + (along_m ? tm * job.N + row : row * job.tiles_n + tn) * 4);
    const uint32_t words[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
    float c[4];
    bool small = false;
#pragma unroll
    for (int b = 0; b < 4; b++) {
        c[b] = f32_from_bits(half ? words[b] & 0xFFFF0000u : words[b] << 16);
        small |= c[b] > 0.0f && c[b] < least;
    }
    Philox4 p = {{0u, 0u, 0u, 0u}};
    if (small) {
        const uint64_t i = side.first + (uint64_t)(row * (side.blocks / 4) + 2 * (along_m ? tm : tn) + half);
        p = philox_keyed((uint32_t)i, (uint32_t)(i >> 32), side.step, side.address, side.keys);
    }
#pragma unroll
    for (int b = 0; b < 4; b++) ratio[(4 * half + b) * RATIO_PITCH + run] = block_ratio(c[b], st, least, p.w[b]);
}
// Multiplies a tile by its ratios: sixteen threads a row, eight values and eight rows a thread. Rows whose ratios are all 1 stay.
__device__ __forceinline__ void tile_mend(const float *ratio, bf16 *values, int64_t N, bool along_m) {
    const int chunk = threadIdx.x & 15, first = (threadIdx.x >> 4) * 8;
    float r[8];
#pragma unroll
    for (int i = 0; i < 8; i++) r[i] = along_m ? ratio[(first / 16) * RATIO_PITCH + chunk * 8 + i] : 1.0f;
#pragma unroll 4
    for (int k = 0; k < 8; k++) {
        if (!along_m) {
            const float one = ratio[(chunk / 2) * RATIO_PITCH + first + k];
#pragma unroll
            for (int i = 0; i < 8; i++) r[i] = one;
        }
        bool same = true;
#pragma unroll
        for (int i = 0; i < 8; i++) same &= r[i] == 1.0f;
        if (same) continue;
        bf16 *at = values + (first + k) * N + chunk * 8;
        float x[8];
        unpack8(load8(at), x);
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = f32_mul(x[i], r[i]);
        store8(at, pack8(x));
    }
}

// Decoded policy: blocks with c < 2^-6 s_t, whose E4M3 scale is subnormal, get that scale. A thread looks at the least c of one of the
// CTA's tiles, both directions at once; the CTA then mends those that have such a block: gradients of queries and keys are often
// that much smaller than those of values beside them, so whole tiles are mended as well as single blocks. st_out, alpha: see
// the launches.
static __global__ void __launch_bounds__(FINISH_THREADS)
eden_mend_kernel(const __grid_constant__ EdenJob job, int directions, int ctas, float *st_out, const float *saved_st, float *alpha) {
    __shared__ float ratio[8 * RATIO_PITCH];
    __shared__ uint32_t marked[2][FINISH_WARPS];
    static_assert(FINISH_THREADS == 2 * EDEN_TILE, "two threads a run");
    float st[2];
    eden_tensor_scales(job, directions, ctas, st);
    eden_report(directions, st, true, st_out, saved_st, alpha);
    for (uint32_t first = blockIdx.x; first < job.tiles; first += gridDim.x * FINISH_THREADS) {
        const uint32_t mine = first + threadIdx.x * gridDim.x;
        uint32_t found = 0u;
#pragma unroll
        for (int d = 0; d < 2; d++) {
            const bool look = (directions >> d & 1) && mine < job.tiles && st[d] < INFINITY;
            const bool small = look && job.side[d].tile_min[mine] < f32_bits(f32_mul(st[d], 0x1p-6f)) - 1u;
            const uint32_t warp_found = __ballot_sync(0xFFFFFFFFu, small);
            if ((threadIdx.x & 31) == 0) marked[d][threadIdx.x >> 5] = warp_found;
            found |= warp_found;
        }
        if (!__syncthreads_or(found != 0u)) continue;
        for (int k = 0; k < 2 * FINISH_WARPS; k++) {
            const int d = k / FINISH_WARPS, w = k % FINISH_WARPS;
            for (uint32_t left = marked[d][w]; left; left &= left - 1u) {
                const uint32_t tile = first + (w * 32 + __ffs(left) - 1) * gridDim.x;
                const int64_t tm = tile / job.tiles_n, tn = tile % job.tiles_n;
                tile_ratios(ratio, job, d, tm, tn, st[d], f32_mul(st[d], 0x1p-6f));
                __syncthreads();
                tile_mend(ratio, job.side[d].decoded + tm * (EDEN_TILE * job.N) + tn * EDEN_TILE, job.N, d == ALONG_M);
                __syncthreads();
            }
        }
        __syncthreads();
    }
}

// Packed policy: the E4M3 scales of four neighbouring blocks a thread, into the tiled layout.
static __global__ void __launch_bounds__(FINISH_THREADS)
eden_scales_kernel(const __grid_constant__ EdenJob job, int directions, int ctas, float *st_out, const float *saved_st, float *alpha) {
    float st[2];
    eden_tensor_scales(job, directions, ctas, st);
    eden_report(directions, st, false, st_out, saved_st, alpha);
#pragma unroll
    for (int d = 0; d < 2; d++) {
        if (!(directions >> d & 1)) continue;
        const EdenSide &side = job.side[d];
        const int64_t quads = side.blocks / 4, rows = d == ALONG_M ? job.N : job.M;
        for (int64_t k = (int64_t)blockIdx.x * FINISH_THREADS + threadIdx.x; k < rows * quads; k += (int64_t)gridDim.x * FINISH_THREADS) {
            const int64_t row = k / quads, quad = k % quads;
            const uint32_t *c = side.c + (d == ALONG_M ? quad / 2 * job.N + row : row * job.tiles_n + quad / 2) * 4;
            const uint64_t i = side.first + (uint64_t)(row * quads + quad);
            const Philox4 p = philox_keyed((uint32_t)i, (uint32_t)(i >> 32), side.step, side.address, side.keys);
            uint32_t four = 0u;
            for (int b = 0; b < 4; b++)
                four |= (st[d] < INFINITY ? ms_eden_posthoc_scale(bf16_decode((uint16_t)(c[b] >> (quad & 1) * 16)), st[d], p.w[b]) : 0u) << (8 * b);
            *reinterpret_cast<uint32_t *>(side.tiled + tiled_scale_offset(row, quad * 4, side.blocks)) = four;
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Launches

FN int64_t eden_c_bytes(int64_t rows, int64_t cols) { return rows * cols / 16 * 2; }
FN int64_t eden_min_bytes(int64_t rows, int64_t cols) { return ceil_div((rows / EDEN_TILE) * (cols / EDEN_TILE), 4) * 16; }
FN int64_t eden_workspace_bytes(int64_t rows, int64_t cols) {
    return 2 * (eden_c_bytes(rows, cols) + eden_min_bytes(rows, cols) + EDEN_MAX_CTAS * 4);
}

FN EdenJob eden_job(int64_t M, int64_t N, void *workspace) {
    if (M < EDEN_TILE || N < EDEN_TILE || M % EDEN_TILE || N % EDEN_TILE)
        fatal("cannot rotate a tensor of %lld x %lld: both must be multiples of %d (tokens a micro-batch and widths)", (long long)M, (long long)N, EDEN_TILE);
    if (N > 1 << 22 || M / EDEN_TILE * (N / EDEN_TILE) > 1 << 30) fatal("cannot rotate a tensor of %lld x %lld: it is too large", (long long)M, (long long)N);
    EdenJob job;
    memset(&job, 0, sizeof job);
    job.M = M; job.N = N;
    job.tiles_n = (uint32_t)(N / EDEN_TILE); job.tiles = (uint32_t)(M / EDEN_TILE) * job.tiles_n;
    uint8_t *p = (uint8_t *)workspace;
    for (int d = 0; d < 2; d++) {
        job.side[d].c = (uint32_t *)p; p += eden_c_bytes(M, N);
        job.side[d].tile_min = (uint32_t *)p; p += eden_min_bytes(M, N);
        job.side[d].cta_max = (uint32_t *)p; p += EDEN_MAX_CTAS * 4;
    }
    return job;
}
FN void eden_side(EdenJob *job, int direction, EdenAddress a) {
    EdenSide *s = &job->side[direction];
    const int64_t rows = direction == ALONG_M ? job->N : job->M;
    const RngStream stream = rng_stream(a.seed, a.step, rng_address(RNG_SCALE, a.layer, a.linear, a.gemm, a.operand, a.rank));
    uint32_t bits[4];
    rotation_bits(a.seed, a.step, a.layer, a.linear, a.gemm, bits);
    for (int i = 0; i < EDEN_TILE; i++) s->sign[i] = rotation_sign(bits, i);
    s->keys = philox_keys(stream.key0, stream.key1);
    s->step = stream.step; s->address = stream.address;
    s->blocks = (direction == ALONG_M ? job->M : job->N) / 16;
    s->first = block_word_index(a.micro, rows, s->blocks, 0, 0) / 4;
}


template <EdenSource SOURCE, int DIRECTIONS, int STAGES, bool NATIVE, bool APART>
FN int eden_start(cudaStream_t stream, const EdenJob &job) {  // -> CTAs launched
    constexpr int bytes = eden_shared_bytes<SOURCE, DIRECTIONS, STAGES>();
    static int resident = 0;  // CTAs that fit the device at once
    if (!resident) {
        int each = 0;
        CUDA_CHECK(cudaFuncSetAttribute(eden_kernel<SOURCE, DIRECTIONS, STAGES, NATIVE, APART>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
        CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, eden_kernel<SOURCE, DIRECTIONS, STAGES, NATIVE, APART>, EDEN_THREADS, bytes));
        resident = device_attribute(cudaDevAttrMultiProcessorCount) * (each > 0 ? each : 1);
        if (resident > EDEN_MAX_CTAS) resident = EDEN_MAX_CTAS;
    }
    const int ctas = job.tiles < (uint32_t)resident ? (int)job.tiles : resident;
    eden_kernel<SOURCE, DIRECTIONS, STAGES, NATIVE, APART><<<ctas, EDEN_THREADS, bytes, stream>>>(job);
    CUDA_LAUNCHED();
    return ctas;
}
// Two stages where shared memory has room for them (and for EdenShared).
template <EdenSource SOURCE, int DIRECTIONS, bool NATIVE>
FN int eden_start_staged(cudaStream_t stream, const EdenJob &job) {
    const int room = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - (int)sizeof(EdenShared);
    return room >= eden_shared_bytes<SOURCE, DIRECTIONS, 2>() ? eden_start<SOURCE, DIRECTIONS, 2, NATIVE, EDEN_APART>(stream, job)
                                                              : eden_start<SOURCE, DIRECTIONS, 1, NATIVE, EDEN_APART>(stream, job);
}
// After eden_start. native: codes were written, scales are to come.
FN void eden_finish(cudaStream_t stream, const EdenJob &job, int native, int directions, int ctas, float *st, const float *saved_st, float *alpha) {
    const int64_t work = native ? ceil_div(job.M * job.N / 64, FINISH_THREADS) : job.tiles;
    const int64_t most = (int64_t)device_attribute(cudaDevAttrMultiProcessorCount) * 8;
    const int grid = (int)(work < most ? work : most);
    if (native) eden_scales_kernel<<<grid, FINISH_THREADS, 0, stream>>>(job, directions, ctas, st, saved_st, alpha);
    else eden_mend_kernel<<<grid, FINISH_THREADS, 0, stream>>>(job, directions, ctas, st, saved_st, alpha);
    CUDA_LAUNCHED();
}

FN void eden_check(const OperandSpec *spec) {
    if (spec->rounding != ROUND_MS_EDEN_POSTHOC || spec->rotation != EDEN_TILE)
        fatal("the GPU's MS-EDEN has no rounding %d with a rotation of %d: this is a bug", (int)spec->rounding, spec->rotation);
}
FN void eden_both_launch(cudaStream_t stream, const OperandSpec *spec, const bf16 *dy, int64_t M, int64_t N, bf16 *along_n, bf16 *along_m,
                             EdenAddress n, EdenAddress m, void *workspace, float *st) {
    eden_check(spec);
    EdenJob job = eden_job(M, N, workspace);
    job.x = dy;
    eden_side(&job, ALONG_N, n); job.side[ALONG_N].decoded = along_n;
    eden_side(&job, ALONG_M, m); job.side[ALONG_M].decoded = along_m;
    const int ctas = eden_start_staged<SOURCE_BF16, DO_N | DO_M, false>(stream, job);
    eden_finish(stream, job, 0, DO_N | DO_M, ctas, st, NULL, NULL);
}
FN void eden_one_launch(cudaStream_t stream, const OperandSpec *spec, const bf16 *dy, int64_t M, int64_t N, int along_rows, bf16 *out,
                            EdenAddress a, void *workspace, float *st) {
    eden_check(spec);
    EdenJob job = eden_job(M, N, workspace);
    const int direction = along_rows ? ALONG_M : ALONG_N;
    job.x = dy;
    eden_side(&job, direction, a); job.side[direction].decoded = out;
    const int ctas = along_rows ? eden_start_staged<SOURCE_BF16, DO_M, false>(stream, job) : eden_start_staged<SOURCE_BF16, DO_N, false>(stream, job);
    eden_finish(stream, job, 0, 1 << direction, ctas, st, NULL, NULL);
}
FN void eden_requant_launch(cudaStream_t stream, const OperandSpec *spec, const uint8_t *codes, const uint8_t *scales, int64_t rows, int64_t cols,
                                bf16 *out, EdenAddress a, const float *saved_st, float *alpha, void *workspace, float *st) {
    eden_check(spec);
    EdenJob job = eden_job(rows, cols, workspace);
    job.codes = codes; job.scales = scales;
    eden_side(&job, ALONG_M, a); job.side[ALONG_M].decoded = out;
    const int ctas = eden_start_staged<SOURCE_PACKED, DO_M, false>(stream, job);
    eden_finish(stream, job, 0, DO_M, ctas, st, saved_st, alpha);
}
FN void eden_both_native_launch(cudaStream_t stream, const bf16 *dy, int64_t M, int64_t N,
                                    uint8_t *codes_n, uint8_t *tiled_n, uint8_t *codes_m, uint8_t *tiled_m,
                                    EdenAddress n, EdenAddress m, void *workspace, float *st) {
    EdenJob job = eden_job(M, N, workspace);
    job.x = dy;
    eden_side(&job, ALONG_N, n); job.side[ALONG_N].codes = codes_n; job.side[ALONG_N].tiled = tiled_n;
    eden_side(&job, ALONG_M, m); job.side[ALONG_M].codes = codes_m; job.side[ALONG_M].tiled = tiled_m;
    const int ctas = eden_start_staged<SOURCE_BF16, DO_N | DO_M, true>(stream, job);
    eden_finish(stream, job, 1, DO_N | DO_M, ctas, st, NULL, NULL);
}
FN void eden_requant_native_launch(cudaStream_t stream, const uint8_t *codes, const uint8_t *tiled_scales, int64_t rows,
                                       int64_t cols, uint8_t *codes_t, uint8_t *tiled_t, EdenAddress a,
                                       const float *saved_st, float *alpha_factor, void *workspace, float *st) {
    EdenJob job = eden_job(rows, cols, workspace);
    job.codes = codes; job.scales = tiled_scales;
    eden_side(&job, ALONG_M, a); job.side[ALONG_M].codes = codes_t; job.side[ALONG_M].tiled = tiled_t;
    const int ctas = eden_start_staged<SOURCE_PACKED_TILED, DO_M, true>(stream, job);
    eden_finish(stream, job, 1, DO_M, ctas, st, saved_st, alpha_factor);
}

#endif
