// cuda/quantize_nvfp4_tile.cuh: the kernel behind nvfp4_quantize_launch and nvfp4_requantize_launch (quantize_nvfp4.cuh), on the tile
// machinery of quantize_eden.cuh: tiles of 128x128 in shared memory, four threads a run of 128 values.
//
// The tensor scale must be known before a value is rounded, so a rotated operand is formed twice: once for its amax, once to be
// rounded. Storing it in between would cost 4 B a value more. The amax pass leaves out the transform's last stage, as the larger of
// |a+b| and |a-b| is |a|+|b|: eight instructions a value and direction, at 2 B a value for both.
//
// Instructions a value of the stochastic pass: unpack with sign 1.3, transform 4 or 5, amax 1, Philox 10, rounding 9, decode and
// pack 1.5, moves, copies and addresses about 6.
#ifndef LLMC_CUDA_QUANTIZE_NVFP4_TILE_CUH
#define LLMC_CUDA_QUANTIZE_NVFP4_TILE_CUH

#include "quantize_eden.cuh"
#include "quantize_forward.cuh"

// The tile that is `step` further in the order of rows.
__device__ __forceinline__ EdenTile tile_after(EdenTile at, EdenTile step, uint32_t tiles_n) {
    at.m += step.m; at.n += step.n;
    if (at.n >= tiles_n) { at.n -= tiles_n; at.m++; }
    return at;
}

typedef enum { WORK_AMAX, WORK_NEAREST, WORK_STOCHASTIC } Nvfp4Work;

// What one direction needs besides its EdenSide (whose keys, address and first are those of one word a value).
struct Nvfp4Way {
    const float *amax;                 // of the (rotated) values
    float *factor;                     // s_t, written
    float override_, bound;
    int rotation, four_six;
};
struct Nvfp4Job {
    EdenJob eden;
    Nvfp4Way way[2];
    uint32_t *most;                    // (2) bits of amax, WORK_AMAX's result
    uint32_t tiles_m;                  // in a column
    int stages;                        // source buffers: 2 to fetch a tile while another is worked on
};
struct Nvfp4Shared {
    uint32_t sign[2][SIGNS_WORDS];
    TensorScale ts[2];
    uint32_t most[2];
};

// ---------------------------------------------------------------------------------------------------------------------
// Blocks of 16 values

// |v| = a stochastically rounded on the E2M1 grid, up iff u < frac * 2^32: e2m1_encode_sr() for a <= 6, decoded. That is the grid's
// ceiling of a - step * u/2^32. u cut to a float's 24 bits decides alike, since frac * 2^32 is a float. Both sums round up, and a
// float's ceiling has the same grid's ceiling as its argument; 1.5 * 2^22 p has a step of p/2, the grid's, on both of its sides.
__device__ __forceinline__ float e2m1_round_stochastic(float a, uint32_t u) {
    const float p = f32_from_bits(f32_bits(fmaxf(a, 1.0f)) & 0x7F800000u);
    const float below = __fmaf_ru(p, f32_mul(__uint2float_rz(u), -0x1p-33f), a);
    return __fmaf_rn(p, -0x1.8p22f, __fmaf_ru(p, 0x1.8p22f, below));
}
// Nearest, saturating: q = pairs of x*e rounded; with MEASURE the squared errors of the first and the second eight, as
// four_six_try() has them.
template <bool MEASURE>
__device__ __forceinline__ void nearest_try(const float x[16], float d, float e, uint32_t q[8], float error[2]) {
    float r[16];
    error[0] = error[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        r[i] = e2m1_round_unclamped(fminf(fmaxf(f32_mul(x[i], e), -E2M1_MAX), E2M1_MAX));
        if (MEASURE) {
            const float miss = f32_sub(x[i], f32_mul(r[i], d));
            error[i / 8] = f32_add(error[i / 8], f32_mul(miss, miss));
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++) q[i] = pack_bf16x2(r[2 * i], r[2 * i + 1]);
}
__device__ __forceinline__ float block_most(const float y[16]) {
    float a[8];
#pragma unroll
    for (int i = 0; i < 8; i++) a[i] = fmaxf(fabsf(y[i]), fabsf(y[i + 8]));
#pragma unroll
    for (int h = 4; h > 0; h /= 2)
#pragma unroll
        for (int i = 0; i < h; i++) a[i] = fmaxf(a[i], a[i + h]);
    return a[0];
}
// The block y/unit (unit: a power of two) -> pairs of E2M1 values; -> s_b as a value.
__device__ __forceinline__ float block_nearest(const float y[16], float unit, bool four_six, TensorScale ts, uint32_t q[8]) {
    const float t = f32_mul(f32_mul(block_most(y), 1.0f / unit), ts.inv);
    const ForwardScale six = forward_scale(t, ts.st);
    float error[2];
    if (!four_six) {
        nearest_try<false>(y, 0.0f, f32_mul(six.e, 1.0f / unit), q, error);
        return six.s;
    }
    const ForwardScale four = forward_scale(f32_mul(t, 1.5f), ts.st);
    uint32_t q4[8];
    nearest_try<true>(y, f32_mul(six.d, unit), f32_mul(six.e, 1.0f / unit), q, error);
    const float error6 = f32_add(error[0], error[1]);
    nearest_try<true>(y, f32_mul(four.d, unit), f32_mul(four.e, 1.0f / unit), q4, error);
    const bool better = f32_add(error[0], error[1]) < error6;
#pragma unroll
    for (int i = 0; i < 8; i++) q[i] = better ? q4[i] : q[i];
    return better ? four.s : six.s;
}
// The same, stochastically; word: Philox counter of its first four values' words, a multiple of 4. A whole warp calls it.
__device__ __forceinline__ float block_stochastic(const float y[16], float unit, TensorScale ts, uint64_t word, const EdenSide &side, uint32_t q[8]) {
    const float most = block_most(y);
    const ForwardScale s = forward_scale(f32_mul(f32_mul(f32_mul(most, 1.0f / unit), SR_OVERRIDE), ts.inv), ts.st);
    const float e = f32_mul(s.e, 1.0f / unit);
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const Philox4 u = philox_keyed((uint32_t)word | k, (uint32_t)(word >> 32), side.step, side.address, side.keys);
        float r[4];
#pragma unroll
        for (int i = 0; i < 4; i++) r[i] = e2m1_round_stochastic(f32_mul(fabsf(y[4 * k + i]), e), u.w[i]);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t sign = __byte_perm(f32_bits(y[4 * k + 2 * i]), f32_bits(y[4 * k + 2 * i + 1]), 0x7632) & 0x80008000u;
            q[2 * k + i] = pack_bf16x2(r[2 * i], r[2 * i + 1]) | sign;
        }
    }
    // Rare: a subnormal scale may have been rounded down so far that values lie beyond 6; they gave 6 or more.
    if (__any_sync(0xFFFFFFFFu, f32_mul(most, e) > E2M1_MAX))
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const uint32_t sign = q[i] & 0x80008000u, value = q[i] ^ sign;
            q[i] = __vminu2(value, 0x40C040C0u) | sign;  // 6.0 twice; magnitudes are in the order of their bits
        }
    return s.s;
}

// ---------------------------------------------------------------------------------------------------------------------
// Runs of 128 in four threads: rotations of 16 and 32 stay inside a thread's 32 values, 64 takes one exchange with another
// thread, 128 two (see run_exchange)

// Extra sign of position i, so that an exchange finds its halves in the same places in both threads; and what follows from it: which
// of the run's eight blocks y[16*half..] is after the rotation, and its sign.
HD uint32_t turned_sign(int rotation, int i) {
    const int block = i / 16;
    const int negated = rotation == 128 ? block == 3 || block == 6 : rotation == 64 && block % 4 == 3;
    return negated ? 0x80000000u : 0u;
}
HD int turned_block(int rotation, int part, int half) {
    if (rotation == 128) return part + 4 * (half ^ (part & 1));
    return rotation == 64 ? 2 * (part & 2) + (part & 1) + 2 * half : 2 * part + half;
}
HD uint32_t turned_block_sign(int rotation, int part, int half) {
    const int negated = rotation == 128 ? part >= 2 && (half ^ (part & 1)) : rotation == 64 && (part & half);
    return negated ? 0x80000000u : 0u;
}
template <int H> __device__ __forceinline__ void run_stage(float y[EDEN_VALUES]) {
#pragma unroll
    for (int i = 0; i < EDEN_VALUES; i++)
        if (!(i & H)) {
            const float a = y[i], b = y[i + H];
            y[i] = f32_add(a, b); y[i + H] = f32_sub(a, b);
        }
}
// The rotation of 0 to 128. Few branches: each costs moves, as the values must be in the same registers after both of its ways.
__device__ __forceinline__ void run_rotate_16(float y[EDEN_VALUES]) { run_stage<1>(y); run_stage<2>(y); run_stage<4>(y); run_stage<8>(y); }
__device__ __forceinline__ void run_rotate(float y[EDEN_VALUES], int rotation, int near, int far) {
    if (rotation == 16) { run_rotate_16(y); return; }
    if (rotation == 0) return;
    run_rotate_16(y);
    run_stage<16>(y);
    if (rotation > 32) run_exchange(y, near);
    if (rotation > 64) run_exchange(y, far);
}
// The larger of two magnitudes, or NaN if one is.
__device__ __forceinline__ float max_nan(float a, float b) {
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
// Largest |y| after a last stage of pairs H apart.
template <int H> __device__ __forceinline__ float pairs_most(const float y[EDEN_VALUES]) {
    float most[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < EDEN_VALUES; i++)
        if (!(i & H)) most[i % 4] = max_nan(most[i % 4], f32_add(fabsf(y[i]), fabsf(y[i + H])));
    return max_nan(max_nan(most[0], most[1]), max_nan(most[2], most[3]));
}
// Largest magnitude of the rotated run, as far as this thread has it.
__device__ __forceinline__ float run_most(float y[EDEN_VALUES], int rotation, int near, int far) {
    if (rotation == 16) { run_stage<1>(y); run_stage<2>(y); run_stage<4>(y); return pairs_most<8>(y); }
    if (rotation == 32) { run_rotate_16(y); return pairs_most<16>(y); }
    run_rotate(y, rotation, near, far);
    float most[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < EDEN_VALUES; i++) most[i % 4] = max_nan(most[i % 4], fabsf(y[i]));
    return max_nan(max_nan(most[0], most[1]), max_nan(most[2], most[3]));
}

// One block of column_store() and row_store(), after any rotation.
__device__ __forceinline__ void turned_column_store(uint32_t tile, int warp, int lane, int rotation, int half, const uint32_t out[8]) {
#if __CUDA_ARCH__ >= 900
    const uint32_t address = tile + tile_offset(16 * turned_block(rotation, (lane & 7) >> 1, half) + 2 * (lane >> 3) + (lane & 1)) + 16 * warp;
#pragma unroll
    for (int n = 0; n < 2; n++) stmatrix_transposed(address + n * 8 * EDEN_PITCH, out + 4 * n);
#else
    const EdenPlace p = eden_place(ALONG_M, warp, lane);
    const uint32_t address = tile + tile_offset(16 * turned_block(rotation, p.part, half)) + 2 * p.run;
#pragma unroll
    for (int k = 0; k < 8; k++) {
        store_shared_u16(address + 2 * k * EDEN_PITCH, out[k]);
        store_shared_u16(address + (2 * k + 1) * EDEN_PITCH, out[k] >> 16);
    }
#endif
}
__device__ __forceinline__ void turned_row_store(uint8_t *row, int part, int rotation, int half, const uint32_t out[8]) {
    uint4 *to = reinterpret_cast<uint4 *>(row + 32 * turned_block(rotation, part, half));
    to[0] = make_uint4(out[0], out[1], out[2], out[3]);
    to[1] = make_uint4(out[4], out[5], out[6], out[7]);
}

// ---------------------------------------------------------------------------------------------------------------------
// The kernel

// One direction of one tile. -> bits of the thread's largest magnitude (WORK_AMAX); or rounds: work -> `to`, both tiles. unit: the values in
// work are the tensor's times it. barrier: other warps may still be reading the rows that this one is about to overwrite.
template <Nvfp4Work WORK>
__device__ __forceinline__ uint32_t nvfp4_pass(const Nvfp4Job &job, bool along_m, EdenTile at, uint8_t *work, uint8_t *to,
                                               const Nvfp4Shared &common, float unit, bool barrier) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, direction = along_m ? ALONG_M : ALONG_N;
    const int near = along_m ? 1 : 8, far = along_m ? 2 : 16;
    const EdenSide &side = job.eden.side[direction];
    const Nvfp4Way &way = job.way[direction];
    const EdenPlace place = eden_place(direction, warp, lane);
    float y[EDEN_VALUES];
    const uint32_t *signs = common.sign[direction] + sign_place(EDEN_VALUES * place.part);
    if (along_m) column_load(shared_address(work), warp, lane, signs, y);
    else row_load(work + tile_offset(place.run) + 2 * EDEN_VALUES * place.part, signs, y);
    if (WORK == WORK_AMAX) return f32_bits(f32_mul(run_most(y, way.rotation, near, far), 1.0f / unit));
    run_rotate(y, way.rotation, near, far);
    const int64_t row = (int64_t)(along_m ? at.n : at.m) * EDEN_TILE + place.run;  // of the operand
    const uint64_t words = side.first + (uint64_t)(row * (side.blocks * 4)) + (along_m ? at.m : at.n) * (EDEN_TILE / 4);
    const TensorScale ts = common.ts[direction];
    if (!along_m) {
        if (barrier) __syncthreads();
        else __syncwarp();
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int block = turned_block(way.rotation, place.part, half);
        uint32_t q[8];
        const float s = WORK == WORK_STOCHASTIC ? block_stochastic(y + 16 * half, unit, ts, words + 4 * block, side, q)
                                                : block_nearest(y + 16 * half, unit, way.four_six, ts, q);
        const uint32_t two = bf16x2_twice(f32_from_bits(f32_bits(s) ^ turned_block_sign(way.rotation, place.part, half)));
#pragma unroll
        for (int i = 0; i < 8; i++) q[i] = bf16x2_mul(q[i], two);
        if (along_m) turned_column_store(shared_address(to), warp, lane, way.rotation, half, q);
        else turned_row_store(to + tile_offset(place.run), place.part, way.rotation, half, q);
    }
    return 0u;
}
// Signs and tensor scales into shared memory; the first CTA writes the factors.
template <int DIRECTIONS, Nvfp4Work WORK>
__device__ __forceinline__ void nvfp4_prepare(const Nvfp4Job &job, Nvfp4Shared &common) {
    if (threadIdx.x < 2 * EDEN_TILE) {
        const int i = threadIdx.x & (EDEN_TILE - 1), d = threadIdx.x / EDEN_TILE;
        common.sign[d][sign_place(i)] = job.eden.side[d].sign[i];
    }
    if (threadIdx.x < 2) common.most[threadIdx.x] = 0u;
    if (threadIdx.x >= 2 || !(DIRECTIONS >> threadIdx.x & 1)) return;
    if (WORK == WORK_AMAX) return;
    const Nvfp4Way &way = job.way[threadIdx.x];
    const float amax = *way.amax;
    const TensorScale ts = nvfp4_tensor_scale(amax, way.override_, way.bound);
    common.ts[threadIdx.x] = ts;
    if (blockIdx.x == 0) *way.factor = f32_abs(amax) < INFINITY ? ts.st : f32_from_bits(0x7FC00000u);
}
template <EdenSource SOURCE, int DIRECTIONS, Nvfp4Work WORK>
static __global__ void __launch_bounds__(EDEN_THREADS, 2) nvfp4_kernel(const __grid_constant__ Nvfp4Job job) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ Nvfp4Shared common;
    constexpr int STAGE_BYTES = eden_stage_bytes<SOURCE>();
    constexpr bool SECOND = SOURCE != SOURCE_BF16 || (WORK != WORK_AMAX && DIRECTIONS == (DO_N | DO_M));  // a tile beside the buffers
    constexpr float UNIT = SOURCE == SOURCE_BF16 ? 1.0f : PACKED_SCALE;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const bool ahead = job.stages == 2;
    uint8_t *second = shared + job.stages * STAGE_BYTES;
    uint32_t most[2] = {0u, 0u};
    int stage = 0;
    EdenTile at = {blockIdx.x / job.eden.tiles_n, blockIdx.x % job.eden.tiles_n};
    const EdenTile step = {gridDim.x / job.eden.tiles_n, gridDim.x % job.eden.tiles_n};
    eden_fetch<SOURCE>(shared_address(shared), job.eden, at);
    cp_async_commit();
    nvfp4_prepare<DIRECTIONS, WORK>(job, common);
    while (at.m < job.tiles_m) {
        const EdenTile next = tile_after(at, step, job.eden.tiles_n);
        const bool more = next.m < job.tiles_m;
        uint8_t *work = shared + stage * STAGE_BYTES;
        cp_async_wait_all();
        __syncthreads();
        if (ahead) {
            stage ^= 1;
            if (more) eden_fetch<SOURCE>(shared_address(shared + stage * STAGE_BYTES), job.eden, next);
            cp_async_commit();
        }
        if (SOURCE != SOURCE_BF16) {
            packed_decode(work, second, eden_place(ALONG_N, warp, lane));
            work = second;
            __syncthreads();
        }
        uint8_t *columns = SECOND ? second : work;
        if (DIRECTIONS & DO_M) most[1] = max(most[1], nvfp4_pass<WORK>(job, true, at, work, columns, common, UNIT, false));
        if (DIRECTIONS & DO_N) most[0] = max(most[0], nvfp4_pass<WORK>(job, false, at, work, work, common, UNIT, DIRECTIONS & DO_M));
        if (WORK != WORK_AMAX) {
            const int64_t first = (int64_t)at.m * (EDEN_TILE * job.eden.N) + (int64_t)at.n * EDEN_TILE;
            const uint32_t pitch = (uint32_t)job.eden.N * 2;
            __syncthreads();
            if (DIRECTIONS & DO_M) tile_write(columns, reinterpret_cast<uint8_t *>(job.eden.side[ALONG_M].decoded + first), pitch);
            if (DIRECTIONS & DO_N) tile_write(work, reinterpret_cast<uint8_t *>(job.eden.side[ALONG_N].decoded + first), pitch);
        }
        if (!ahead) {
            __syncthreads();
            if (more) eden_fetch<SOURCE>(shared_address(shared), job.eden, next);
            cp_async_commit();
        }
        at = next;
    }
    if (WORK == WORK_AMAX) {
#pragma unroll
        for (int d = 0; d < 2; d++) {
            most[d] = __reduce_max_sync(0xFFFFFFFFu, most[d]);
            if (lane == 0) atomicMax(&common.most[d], most[d]);
        }
        __syncthreads();
        if (threadIdx.x < 2 && (DIRECTIONS >> threadIdx.x & 1)) atomicMax(&job.most[threadIdx.x], common.most[threadIdx.x]);
    }
}

#endif
