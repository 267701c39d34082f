// cuda/quantize_eden.cuh: rotation of 128 + MS-EDEN posthoc. Included by quantize.cuh, which states what each launch does.
//
// A tensor (M,N) is cut into tiles of 128x128, one at a time in shared memory. A run of 128 (a column of the tile for the pass
// along M, a row for the pass along N) belongs to SHARE threads: one that holds it whole, or two that hold half of it each
// and exchange values for the last stage of the transform. Nothing else crosses threads: all blocks and their sums are a
// thread's own. Columns come out of shared memory by ldmatrix.trans: two neighbouring values of the run in one register,
// eight a load, as for rows. The pass along N writes its row over itself (nobody else reads it any more), the pass along M
// into a second tile; then 16 threads write a row's 256 bytes. The next tile is on its way meanwhile (cp.async). Registers
// limit an SM to two CTAs: a thread's many independent values hide latency instead of more warps.
//
// Instructions a value and direction, of the issue rate: unpack with sign 1, transform 7, amax 1, scale 1, round 4, sums 4,
// decode 1, the block's own work about 3 (a reciprocal, a quotient, Philox), copies about 1; with SHARE = 2 one more.
#ifndef LLMC_CUDA_QUANTIZE_EDEN_CUH
#define LLMC_CUDA_QUANTIZE_EDEN_CUH

#include "quantize_device.cuh"

#define EDEN_TILE 128                  // rows and columns of a tile, and the rotation
#define EDEN_PITCH 272                 // bytes between a tile's rows in shared memory: 16 more than they hold, against bank conflicts
#define EDEN_HALF_GAP 64               // rows 64 and above lie this much further, for threads that read rows r and r + 64 at once
#define EDEN_TILE_BYTES (EDEN_TILE * EDEN_PITCH + EDEN_HALF_GAP)
#define EDEN_CODES_PITCH 80            // the same for a row's 64 bytes of codes
#define EDEN_PACKED_BYTES (EDEN_TILE * (EDEN_CODES_PITCH + 8))
#define EDEN_SHARE 2                   // threads a run, in the trainer's kernels
#define EDEN_STRIPS 8                  // most warps of a CTA: a strip is the runs of one warp
#define EDEN_MAX_CTAS 1024

enum { ALONG_N = 0, ALONG_M = 1 };     // along the rows' values; along the columns'
enum { DO_N = 1, DO_M = 2 };           // which of them a kernel does
typedef enum { SOURCE_BF16, SOURCE_PACKED, SOURCE_PACKED_TILED } EdenSource;

// What one direction needs besides the tensor. Constants of the launch, so they are operands of instructions, not loads.
struct EdenSide {
    uint32_t sign[EDEN_TILE];          // 0x80000000: position i of every run is negated
    PhiloxKeys keys;
    uint32_t step, address;
    uint64_t first;                    // Philox counter of the operand's first block: micro*rows*blocks/4
    int64_t blocks;                    // blocks of a row of the operand
    bf16 *decoded;                     // (M,N), or NULL
    uint8_t *codes, *tiled;            // packed policy: (rows, blocks*8) and the tiled scales
    uint16_t *c;                       // along N: (M, N/16); along M: (M/128, N, 8): a thread's eight neighbours together
    uint32_t *strip_min;               // (tiles, EDEN_STRIPS): bits of the smallest c > 0, minus 1
    uint32_t *cta_max;                 // (CTAs): bits of the largest c
};
struct EdenJob {
    int64_t M, N;
    uint32_t tiles, tiles_n;           // of 128x128; in a row
    const bf16 *x;                     // SOURCE_BF16
    const uint8_t *codes, *scales;     // SOURCE_PACKED*
    EdenSide side[2];
};

// ---------------------------------------------------------------------------------------------------------------------
// A thread's part of a run in registers: all 128 values, or 64 (half 0 or 1). VALUES = 128/SHARE.

// y = H y, in the order of hadamard(). partner: lane mask of the thread with the other half.
template <int SHARE>
__device__ __forceinline__ void run_hadamard(float y[EDEN_TILE / SHARE], int half, int partner) {
#pragma unroll
    for (int s = 0; s < (SHARE == 1 ? 7 : 6); s++)
#pragma unroll
        for (int p = 0; p < EDEN_TILE / SHARE / 2; p++) {
            const int h = 1 << s, i = ((p >> s) << (s + 1)) + (p & (h - 1));
            const float a = y[i], b = y[i + h];
            y[i] = f32_add(a, b); y[i + h] = f32_sub(a, b);
        }
    if (SHARE == 1) return;
    const float sign = half ? -1.0f : 1.0f;  // a + b; a - b: b's thread has it as -1*b + a, rounded once like the difference
#pragma unroll
    for (int i = 0; i < EDEN_TILE / SHARE; i++) y[i] = __fmaf_rn(y[i], sign, __shfl_xor_sync(0xFFFFFFFFu, y[i], partner));
}

// ms_eden_posthoc_block() of 16 values -> q as eight pairs of BF16; -> bits of c, a BF16 value in a float32.
// v: y/m as rounded, for the caller that wants codes.
__device__ __forceinline__ uint32_t eden_block(const float y[16], float v[16], uint32_t q[8]) {
    float a[8];
#pragma unroll
    for (int i = 0; i < 8; i++) a[i] = fmaxf(fabsf(y[i]), fabsf(y[i + 8]));
#pragma unroll
    for (int h = 4; h > 0; h /= 2)
#pragma unroll
        for (int i = 0; i < h; i++) a[i] = fmaxf(a[i], a[i + h]);
    // A block of (next to) nothing has e = 0, which makes v, both sums, S and c zero.
    const float m = f32_from_bits(f32_bits(f32_mul(a[0], 1.0f / 6.0f)) & 0xFFF80000u);
    const float e = m >= AMAX_FLOOR ? f32_reciprocal(m) : 0.0f;
    float vv[2] = {0.0f, 0.0f}, vq[2] = {0.0f, 0.0f}, r[16];
#pragma unroll
    for (int i = 0; i < 16; i++) {
        v[i] = f32_mul(y[i], e);
        r[i] = e2m1_round_unclamped(v[i]);
        vv[i / 8] = f32_add(vv[i / 8], f32_mul(v[i], v[i]));
        vq[i / 8] = f32_add(vq[i / 8], f32_mul(v[i], r[i]));
    }
#pragma unroll
    for (int i = 0; i < 8; i++) q[i] = pack_bf16x2(r[2 * i], r[2 * i + 1]);
    // <v,q> is at least 35 (the largest v is 6 or a little more) or zero.
    const float S = f32_quotient(f32_add(vv[0], vv[1]), fmaxf(f32_add(vq[0], vq[1]), 1.0f));
    return pack_bf16x2(0.0f, f32_mul(m, S));
}

// The random words of the thread's blocks: a Philox call for four. counter: index of the thread's first block / 4.
template <int SHARE>
__device__ __forceinline__ void run_words(const EdenSide &side, uint64_t counter, uint32_t u[8 / SHARE]) {
#pragma unroll
    for (int i = 0; i < 2 / SHARE; i++) {
        const Philox4 p = philox_keyed((uint32_t)(counter + i), (uint32_t)((counter + i) >> 32), side.step, side.address, side.keys);
#pragma unroll
        for (int j = 0; j < 4; j++) u[4 * i + j] = p.w[j];
    }
}

// Quantizes a rotated run. out: decoded, pairs of BF16; or codes, a word for eight. c: the blocks' c, two a word.
// cmin, cmax: least of c's bits - 1 and greatest of c's bits, kept going.
template <bool NATIVE, int SHARE>
__device__ __forceinline__ void run_quantize(const float y[EDEN_TILE / SHARE], const uint32_t u[8 / SHARE], float scale_back,
                                             uint32_t out[EDEN_TILE / SHARE / 2], uint32_t c2[4 / SHARE], uint32_t &cmin, uint32_t &cmax) {
#pragma unroll
    for (int b = 0; b < 8 / SHARE; b++) {
        float v[16];
        uint32_t q[8];
        uint32_t c = eden_block(y + 16 * b, v, q);
        if (scale_back != 1.0f) c = f32_bits(f32_mul(f32_from_bits(c), scale_back));
        cmin = min(cmin, c - 1u);
        cmax = max(cmax, c);
        c2[b / 2] = b % 2 ? __byte_perm(c2[b / 2], c, 0x7610) : c >> 16;
        if (NATIVE) {
#pragma unroll
            for (int i = 0; i < 2; i++) out[2 * b + i] = e2m1_encode8(v + 8 * i);
        } else {
            const uint32_t s = bf16x2_twice(ms_eden_posthoc_extended(f32_from_bits(c), u[b]));
#pragma unroll
            for (int i = 0; i < 8; i++) out[8 * b + i] = bf16x2_mul(q[i], s);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Runs in a tile: which part of which run a thread has.
//
// Rows: 32/SHARE neighbouring rows a warp, half = lane/16. Columns: an ldmatrix reads eight segments of 16 bytes (8 columns of
// a row), and gives lane 4g+j two neighbouring rows of column g of a segment that j chooses. SHARE = 1: j picks one of four
// segments, two apart. SHARE = 2: j/2 picks one of two segments, two apart, and j%2 the upper or lower 64 rows. Either way
// the eight segments (two rows each) lie in different banks.

struct EdenPlace { int run, half; };  // row or column of the tile; which half of it
template <int SHARE> __device__ __forceinline__ int column_segment(int warp, int j) {
    return SHARE == 1 ? (warp >> 1) * 8 + (warp & 1) + 2 * j : (warp >> 1) * 4 + (warp & 1) + 2 * (j >> 1);
}
template <int SHARE> __device__ __forceinline__ EdenPlace eden_place(int direction, int warp, int lane) {
    EdenPlace p;
    p.half = SHARE == 1 ? 0 : direction == ALONG_M ? lane & 1 : lane >> 4;
    p.run = direction == ALONG_M ? 8 * column_segment<SHARE>(warp, lane & 3) + (lane >> 2) : SHARE == 1 ? warp * 32 + lane : warp * 16 + (lane & 15);
    return p;
}
template <int SHARE> __device__ __forceinline__ int eden_partner(int direction) { return direction == ALONG_M ? 1 : 16; }

__device__ __forceinline__ uint32_t tile_offset(uint32_t row) { return row * EDEN_PITCH + (row >= 64 ? EDEN_HALF_GAP : 0); }

// Signs in shared memory: 64, a gap, 64, so that the two halves of a warp read different banks.
#define SIGNS_WORDS (EDEN_TILE + 4)
__device__ __forceinline__ int sign_place(int i) { return i + (i >= 64 ? SIGNS_WORDS - EDEN_TILE : 0); }
// Unpacks four words, eight values, with the signs of their positions.
__device__ __forceinline__ void unpack_signed(const uint32_t w[4], const uint32_t *sign, float y[8]) {
    const uint4 a = *reinterpret_cast<const uint4 *>(sign), b = *reinterpret_cast<const uint4 *>(sign + 4);
    y[0] = bf16_lower_signed(w[0], a.x); y[1] = bf16_upper_signed(w[0], a.y);
    y[2] = bf16_lower_signed(w[1], a.z); y[3] = bf16_upper_signed(w[1], a.w);
    y[4] = bf16_lower_signed(w[2], b.x); y[5] = bf16_upper_signed(w[2], b.y);
    y[6] = bf16_lower_signed(w[3], b.z); y[7] = bf16_upper_signed(w[3], b.w);
}
// The lane's address for its row of the first ldmatrix (matrix lane/8, row lane%8); the n-th lies 8 rows of the tile further.
template <int SHARE> __device__ __forceinline__ uint32_t column_address(uint32_t tile, int warp, int lane) {
    const int j = (lane & 7) >> 1, row = 2 * (lane >> 3) + (lane & 1) + (SHARE == 1 ? 0 : 64 * (j & 1));
    return tile + tile_offset(row) + column_segment<SHARE>(warp, j) * 16;
}
// How far the n-th ldmatrix lies.
template <int SHARE> __device__ __forceinline__ constexpr uint32_t column_step(int n) {
    return n * 8 * EDEN_PITCH + (SHARE == 1 && n >= 8 ? EDEN_HALF_GAP : 0);
}
template <int SHARE>
__device__ __forceinline__ void column_load(uint32_t tile, int warp, int lane, const uint32_t *sign, float y[EDEN_TILE / SHARE]) {
    const uint32_t address = column_address<SHARE>(tile, warp, lane);
#pragma unroll
    for (int n = 0; n < 16 / SHARE; n++) {
        uint32_t w[4];
        ldmatrix_transposed(w, address + column_step<SHARE>(n));
        unpack_signed(w, sign + sign_place(8 * n), y + 8 * n);
    }
}
template <int SHARE>
__device__ __forceinline__ void column_store(uint32_t tile, int warp, int lane, const uint32_t out[EDEN_TILE / SHARE / 2]) {
#if __CUDA_ARCH__ >= 900
    const uint32_t address = column_address<SHARE>(tile, warp, lane);
#pragma unroll
    for (int n = 0; n < 16 / SHARE; n++) stmatrix_transposed(address + column_step<SHARE>(n), out + 4 * n);
#else
    const EdenPlace p = eden_place<SHARE>(ALONG_M, warp, lane);
    const uint32_t address = tile + tile_offset(64 * p.half) + 2 * p.run;
#pragma unroll
    for (int k = 0; k < EDEN_TILE / SHARE / 2; k++) {
        store_shared_u16(address + tile_offset(2 * k), out[k]);
        store_shared_u16(address + tile_offset(2 * k + 1), out[k] >> 16);
    }
#endif
}
template <int SHARE>
__device__ __forceinline__ void row_load(const uint8_t *row, const uint32_t *sign, float y[EDEN_TILE / SHARE]) {
#pragma unroll
    for (int n = 0; n < 16 / SHARE; n++) {
        const uint4 v = *reinterpret_cast<const uint4 *>(row + 16 * n);
        const uint32_t w[4] = {v.x, v.y, v.z, v.w};
        unpack_signed(w, sign + sign_place(8 * n), y + 8 * n);
    }
}
template <int SHARE>
__device__ __forceinline__ void row_store(uint8_t *row, const uint32_t out[EDEN_TILE / SHARE / 2]) {
#pragma unroll
    for (int n = 0; n < 16 / SHARE; n++)
        *reinterpret_cast<uint4 *>(row + 16 * n) = make_uint4(out[4 * n], out[4 * n + 1], out[4 * n + 2], out[4 * n + 3]);
}

// ---------------------------------------------------------------------------------------------------------------------
// Tiles between global and shared memory

// Sixteen threads a row, 16 bytes each. pitch: bytes of a row in global memory; offsets within a tile fit 32 bits.
template <int SHARE>
__device__ __forceinline__ void tile_fetch(uint32_t tile, const uint8_t *x, uint32_t pitch) {  // asynchronous
    const uint32_t row = threadIdx.x >> 4, chunk = 16 * (threadIdx.x & 15);
    uint32_t from = row * pitch + chunk;
    tile += row * EDEN_PITCH + chunk;
#pragma unroll
    for (int i = 0; i < 16 / SHARE; i++, from += 8 * SHARE * pitch) cp_async16(tile + tile_offset(i * 8 * SHARE), x + from);
}
template <int SHARE>
__device__ __forceinline__ void tile_write(const uint8_t *tile, uint8_t *out, uint32_t pitch) {
    const uint32_t row = threadIdx.x >> 4, chunk = 16 * (threadIdx.x & 15);
    uint32_t to = row * pitch + chunk;
    tile += row * EDEN_PITCH + chunk;
#pragma unroll
    for (int i = 0; i < 16 / SHARE; i++, to += 8 * SHARE * pitch)
        *reinterpret_cast<uint4 *>(out + to) = *reinterpret_cast<const uint4 *>(tile + tile_offset(i * 8 * SHARE));
}
// Packed tile: 128 rows of 64 bytes of codes, then 128 rows of 8 scales.
template <EdenSource SOURCE, int SHARE>
__device__ __forceinline__ void packed_fetch(uint32_t packed, const EdenJob &job, int64_t m, int64_t n) {
#pragma unroll
    for (int i = 0; i < 4 / SHARE; i++) {
        const int k = i * EDEN_TILE * SHARE + threadIdx.x, row = k >> 2, chunk = k & 3;
        cp_async16(packed + row * EDEN_CODES_PITCH + chunk * 16, job.codes + (m + row) * (job.N / 2) + n / 2 + chunk * 16);
    }
    const int row = threadIdx.x;
    if (row >= EDEN_TILE) return;
    const uint32_t scales = packed + EDEN_TILE * EDEN_CODES_PITCH + row * 8;
    const int64_t C = job.N / 16;
    if (SOURCE == SOURCE_PACKED) cp_async8(scales, job.scales + (m + row) * C + n / 16);
    else for (int i = 0; i < 2; i++) cp_async4(scales + 4 * i, job.scales + tiled_scale_offset(m + row, n / 16 + 4 * i, C));
}
// A thread decodes its row (or half of it) into the tile: codes x s_b x 2^-7, exact (PACKED_SCALE, quantize_device.cuh).
template <int SHARE>
__device__ __forceinline__ void packed_decode(const uint8_t *packed, uint8_t *tile, EdenPlace place) {
    const uint8_t *codes = packed + place.run * EDEN_CODES_PITCH + place.half * 32;
    const uint8_t *scales = packed + EDEN_TILE * EDEN_CODES_PITCH + place.run * 8 + place.half * 4;
    uint8_t *to = tile + tile_offset(place.run) + place.half * 128;
#pragma unroll
    for (int i = 0; i < 4 / SHARE; i++) {
        const uint4 v = *reinterpret_cast<const uint4 *>(codes + 16 * i);
        const uint32_t words[4] = {v.x, v.y, v.z, v.w}, s = *reinterpret_cast<const uint16_t *>(scales + 2 * i);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const uint32_t scale = packed_scale_bf16x2(j < 2 ? s & 0xFFu : s >> 8);
            uint32_t d[4];
#pragma unroll
            for (int k = 0; k < 4; k++) d[k] = packed_decode2(words[j], k, scale);
            *reinterpret_cast<uint4 *>(to + 64 * i + 16 * j) = make_uint4(d[0], d[1], d[2], d[3]);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The kernel. DIRECTIONS: DO_N, DO_M or both. STAGES: source buffers, 2 to fetch a tile while another is worked on.

template <EdenSource SOURCE> __host__ __device__ constexpr int eden_stage_bytes() {
    return SOURCE == SOURCE_BF16 ? EDEN_TILE_BYTES : EDEN_PACKED_BYTES;
}
// The tile beside the source buffers: the pass along M writes there, and packed sources are decoded there.
template <EdenSource SOURCE, int DIRECTIONS> __host__ __device__ constexpr bool eden_has_second_tile() {
    return SOURCE != SOURCE_BF16 || DIRECTIONS == (DO_N | DO_M);
}
template <EdenSource SOURCE, int DIRECTIONS, int STAGES> constexpr int eden_shared_bytes() {
    return STAGES * eden_stage_bytes<SOURCE>() + (eden_has_second_tile<SOURCE, DIRECTIONS>() ? EDEN_TILE_BYTES : 0);
}

// A tile's place: row and column in tiles.
struct EdenTile { uint32_t m, n; };
__device__ __forceinline__ EdenTile tile_after(EdenTile at, EdenTile step, uint32_t tiles_n) {
    at.m += step.m; at.n += step.n;
    if (at.n >= tiles_n) { at.n -= tiles_n; at.m++; }
    return at;
}
template <EdenSource SOURCE, int SHARE>
__device__ __forceinline__ void eden_fetch(uint32_t stage, const EdenJob &job, EdenTile at) {
    const int64_t m = (int64_t)at.m * EDEN_TILE, n = (int64_t)at.n * EDEN_TILE;
    if (SOURCE == SOURCE_BF16) tile_fetch<SHARE>(stage, reinterpret_cast<const uint8_t *>(job.x + m * job.N + n), (uint32_t)job.N * 2);
    else packed_fetch<SOURCE, SHARE>(stage, job, m, n);
}

// One direction of one tile: work (rows and columns of the tile) -> side.c, strip_min and, decoded, `to`; packed, side.codes.
// -> greatest c of the thread. barrier: other warps may still be reading the rows that this one is about to overwrite.
template <bool NATIVE, int SHARE>
__device__ __forceinline__ uint32_t eden_pass(const EdenJob &job, bool along_m, EdenTile at, uint8_t *work, uint8_t *to, const uint32_t *sign,
                                              float scale_back, bool barrier) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, direction = along_m ? ALONG_M : ALONG_N;
    const EdenSide &side = job.side[direction];
    const EdenPlace place = eden_place<SHARE>(direction, warp, lane);
    const uint32_t inner = along_m ? at.m : at.n;
    const int64_t row = (int64_t)(along_m ? at.n : at.m) * EDEN_TILE + place.run;  // of the operand
    float y[EDEN_TILE / SHARE];
    uint32_t u[8 / SHARE], out[EDEN_TILE / SHARE / 2], c2[4 / SHARE], cmin = 0xFFFFFFFFu, cmax = 0u;
    sign += SIGNS_WORDS * direction + sign_place(64 * place.half);
    if (along_m) column_load<SHARE>(shared_address(work), warp, lane, sign, y);
    else row_load<SHARE>(work + tile_offset(place.run) + 128 * place.half, sign, y);
    run_words<SHARE>(side, side.first + row * (side.blocks / 4) + 2 * inner + place.half, u);
    run_hadamard<SHARE>(y, place.half, eden_partner<SHARE>(direction));
    run_quantize<NATIVE, SHARE>(y, u, scale_back, out, c2, cmin, cmax);
    uint16_t *c = side.c + (along_m ? at.m * job.N + row : row * job.tiles_n + at.n) * 8 + 4 * place.half;
    if (SHARE == 1) *reinterpret_cast<uint4 *>(c) = make_uint4(c2[0], c2[1], c2[2 / SHARE], c2[3 / SHARE]);
    else *reinterpret_cast<uint2 *>(c) = make_uint2(c2[0], c2[1]);
    cmin = __reduce_min_sync(0xFFFFFFFFu, cmin);
    if (lane == 0) side.strip_min[((int64_t)at.m * job.tiles_n + at.n) * EDEN_STRIPS + warp] = cmin;
    if (NATIVE) {
        uint4 *codes = reinterpret_cast<uint4 *>(side.codes + row * (side.blocks * 8) + inner * (EDEN_TILE / 2) + 32 * place.half);
#pragma unroll
        for (int i = 0; i < 4 / SHARE; i++) codes[i] = make_uint4(out[4 * i], out[4 * i + 1], out[4 * i + 2], out[4 * i + 3]);
    } else if (along_m) {
        column_store<SHARE>(shared_address(to), warp, lane, out);
    } else {
        if (barrier) __syncthreads();
        row_store<SHARE>(to + tile_offset(place.run) + 128 * place.half, out);
    }
    return cmax;
}

template <EdenSource SOURCE, int DIRECTIONS, int STAGES, bool NATIVE, int SHARE>
__global__ void __launch_bounds__(EDEN_TILE * SHARE, 2) eden_kernel(const __grid_constant__ EdenJob job) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ __align__(16) uint32_t signs[2 * SIGNS_WORDS];
    __shared__ uint32_t best[2];
    constexpr int STAGE_BYTES = eden_stage_bytes<SOURCE>();
    constexpr bool SECOND = eden_has_second_tile<SOURCE, DIRECTIONS>();
    constexpr float SCALE_BACK = SOURCE == SOURCE_BF16 ? 1.0f : 1.0f / PACKED_SCALE;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    uint8_t *second = shared + STAGES * STAGE_BYTES;
    if (threadIdx.x < 2) best[threadIdx.x] = 0u;
    for (int i = threadIdx.x; i < 2 * EDEN_TILE; i += EDEN_TILE * SHARE)
        signs[(i >> 7) * SIGNS_WORDS + sign_place(i & 127)] = job.side[i >> 7].sign[i & 127];
    uint32_t cmax[2] = {0u, 0u};
    int stage = 0;
    EdenTile at = {blockIdx.x / job.tiles_n, blockIdx.x % job.tiles_n};
    const EdenTile step = {gridDim.x / job.tiles_n, gridDim.x % job.tiles_n};
    if (STAGES == 2) { eden_fetch<SOURCE, SHARE>(shared_address(shared), job, at); cp_async_commit(); }
    for (uint32_t tile = blockIdx.x; tile < job.tiles; tile += gridDim.x) {
        const EdenTile next = tile_after(at, step, job.tiles_n);
        uint8_t *work = shared + stage * STAGE_BYTES;
        if (STAGES == 1) { eden_fetch<SOURCE, SHARE>(shared_address(work), job, at); cp_async_commit(); }
        cp_async_wait_all();
        __syncthreads();
        if (STAGES == 2) {
            stage ^= 1;
            if (tile + gridDim.x < job.tiles) eden_fetch<SOURCE, SHARE>(shared_address(shared + stage * STAGE_BYTES), job, next);
            cp_async_commit();
        }
        if (SOURCE != SOURCE_BF16) {
            packed_decode<SHARE>(work, second, eden_place<SHARE>(ALONG_N, warp, lane));
            work = second;
            __syncthreads();
        }
        uint8_t *columns = SECOND ? second : work;
#pragma unroll 1
        for (int direction = DIRECTIONS & DO_M ? ALONG_M : ALONG_N; direction >= (DIRECTIONS & DO_N ? ALONG_N : ALONG_M); direction--) {
            const bool along_m = DIRECTIONS == DO_M || (DIRECTIONS != DO_N && direction == ALONG_M);
            const uint32_t most = eden_pass<NATIVE, SHARE>(job, along_m, at, work, along_m ? columns : work, signs, SCALE_BACK, DIRECTIONS & DO_M);
            cmax[0] = max(cmax[0], along_m ? 0u : most);
            cmax[1] = max(cmax[1], along_m ? most : 0u);
        }
        __syncthreads();
        if (!NATIVE) {
            const int64_t first = at.m * (EDEN_TILE * job.N) + at.n * EDEN_TILE;
            if (DIRECTIONS & DO_M) tile_write<SHARE>(columns, reinterpret_cast<uint8_t *>(job.side[ALONG_M].decoded + first), (uint32_t)job.N * 2);
            if (DIRECTIONS & DO_N) tile_write<SHARE>(work, reinterpret_cast<uint8_t *>(job.side[ALONG_N].decoded + first), (uint32_t)job.N * 2);
            if (STAGES == 1) __syncthreads();
        }
        at = next;
    }
#pragma unroll
    for (int d = 0; d < 2; d++) {
        const uint32_t most = __reduce_max_sync(0xFFFFFFFFu, cmax[d]);
        if (lane == 0) atomicMax(&best[d], most);
    }
    __syncthreads();
    if (threadIdx.x < 2 && (DIRECTIONS >> threadIdx.x & 1)) job.side[threadIdx.x].cta_max[blockIdx.x] = best[threadIdx.x];
}

// ---------------------------------------------------------------------------------------------------------------------
// When the largest c is known

#define FINISH_THREADS 256

// Tensor scale from the CTAs' maxima; NaN if a c was not finite. Called by every thread of the CTA.
__device__ __forceinline__ float eden_tensor_scale(const uint32_t *cta_max, int ctas) {
    __shared__ uint32_t best[FINISH_THREADS / 32];
    uint32_t most = 0u;
    for (int i = threadIdx.x; i < ctas; i += FINISH_THREADS) most = max(most, cta_max[i]);
    most = __reduce_max_sync(0xFFFFFFFFu, most);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) best[threadIdx.x >> 5] = most;
    __syncthreads();
    for (int w = 0; w < FINISH_THREADS / 32; w++) most = max(most, best[w]);
    return most < 0x7F800000u ? ms_eden_posthoc_tensor_scale(f32_from_bits(most)) : f32_from_bits(0x7FC00000u);
}

// What a block's decoded values are to be multiplied by: q*extended -> q*(s_b*s_t) where the E4M3 scale is subnormal, else 1. The
// product of a value and the rounded quotient is within 2^-22 of q*s_b*s_t, a BF16 number, so rounding to BF16 finds it.
__device__ __forceinline__ float block_ratio(float c, float st, float least, uint32_t u) {
    if (!(c > 0.0f && c < least)) return 1.0f;
    return f32_div(f32_mul(e4m3_decode(ms_eden_posthoc_scale(c, st, u)), st), ms_eden_posthoc_extended(c, u));
}
#define RATIO_PITCH (EDEN_TILE + 4)
// The ratios of a tile's blocks, ratio[block][run]: two threads a run, four blocks each (one Philox call, if it is needed).
__device__ __forceinline__ void tile_ratios(float *ratio, const EdenJob &job, int direction, int64_t tm, int64_t tn, float st, float least) {
    const EdenSide &side = job.side[direction];
    const bool along_m = direction == ALONG_M;
    const int run = threadIdx.x >> 1, half = threadIdx.x & 1;
    const int64_t row = (along_m ? tn : tm) * EDEN_TILE + run;
    const uint2 c2 = *reinterpret_cast<const uint2 *>(side.c + (along_m ? tm * job.N + row : row * job.tiles_n + tn) * 8 + 4 * half);
    const float c[4] = {f32_from_bits(c2.x << 16), f32_from_bits(c2.x & 0xFFFF0000u), f32_from_bits(c2.y << 16), f32_from_bits(c2.y & 0xFFFF0000u)};
    Philox4 p = {{0u, 0u, 0u, 0u}};
    if (fminf(fminf(c[0] > 0.0f ? c[0] : INFINITY, c[1] > 0.0f ? c[1] : INFINITY), fminf(c[2] > 0.0f ? c[2] : INFINITY, c[3] > 0.0f ? c[3] : INFINITY)) < least) {
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

// Decoded policy: blocks with c < 2^-6 s_t, whose E4M3 scale is subnormal, get that scale. A CTA looks at a tile's least c
// (32 B) and, if such a block is there, at the tile: gradients of queries and keys are often that much smaller than those of
// values beside them, so whole tiles are mended as well as single blocks. st_out, alpha: see the launches.
template <int SHARE> __global__ void __launch_bounds__(FINISH_THREADS)
eden_mend_kernel(const __grid_constant__ EdenJob job, int directions, int ctas, float *st_out, const float *saved_st, float *alpha) {
    __shared__ float ratio[8 * RATIO_PITCH];
    static_assert(FINISH_THREADS == 2 * EDEN_TILE, "two threads a run");
    int found = 0;
    for (int d = 0; d < 2; d++) {
        if (!(directions >> d & 1)) continue;
        const EdenSide &side = job.side[d];
        const float st = eden_tensor_scale(side.cta_max, ctas), least = f32_mul(st, 0x1p-6f);
        if (blockIdx.x == 0 && threadIdx.x == 0) {
            if (st_out) st_out[found] = st;
            if (alpha) *alpha = f32_mul(*saved_st, 1.0f / EDEN_TILE);
        }
        found++;
        if (!(st < INFINITY)) continue;
        for (uint32_t tile = blockIdx.x; tile < job.tiles; tile += gridDim.x) {
            const uint4 *mins = reinterpret_cast<const uint4 *>(side.strip_min + (int64_t)tile * EDEN_STRIPS);
            uint32_t smallest = 0xFFFFFFFFu;
#pragma unroll
            for (int i = 0; i < SHARE; i++) smallest = min(smallest, min(min(mins[i].x, mins[i].y), min(mins[i].z, mins[i].w)));
            if (smallest >= f32_bits(least) - 1u) continue;
            const int64_t tm = tile / job.tiles_n, tn = tile % job.tiles_n;
            tile_ratios(ratio, job, d, tm, tn, st, least);
            __syncthreads();
            tile_mend(ratio, side.decoded + tm * (EDEN_TILE * job.N) + tn * EDEN_TILE, job.N, d == ALONG_M);
            __syncthreads();
        }
    }
}

// Packed policy: the E4M3 scales of four neighbouring blocks a thread, into the tiled layout.
static __global__ void __launch_bounds__(FINISH_THREADS)
eden_scales_kernel(const __grid_constant__ EdenJob job, int directions, int ctas, float *st_out, const float *saved_st, float *alpha) {
    int found = 0;
    for (int d = 0; d < 2; d++) {
        if (!(directions >> d & 1)) continue;
        const EdenSide &side = job.side[d];
        const float st = eden_tensor_scale(side.cta_max, ctas);
        if (blockIdx.x == 0 && threadIdx.x == 0) {
            if (st_out) st_out[found] = st;
            if (alpha) *alpha = f32_mul(f32_mul(*saved_st, 1.0f / EDEN_TILE), st);
        }
        found++;
        const int64_t quads = side.blocks / 4, rows = d == ALONG_M ? job.N : job.M;
        for (int64_t k = (int64_t)blockIdx.x * FINISH_THREADS + threadIdx.x; k < rows * quads; k += (int64_t)gridDim.x * FINISH_THREADS) {
            const int64_t row = k / quads, quad = k % quads;
            const uint16_t *c = side.c + (d == ALONG_M ? (quad / 2) * job.N + row : row * job.tiles_n + quad / 2) * 8 + (quad & 1) * 4;
            const uint64_t i = side.first + (uint64_t)(row * quads + quad);
            const Philox4 p = philox_keyed((uint32_t)i, (uint32_t)(i >> 32), side.step, side.address, side.keys);
            uint32_t four = 0u;
            for (int b = 0; b < 4; b++)
                four |= (st < INFINITY ? ms_eden_posthoc_scale(bf16_decode(c[b]), st, p.w[b]) : 0u) << (8 * b);
            *reinterpret_cast<uint32_t *>(side.tiled + tiled_scale_offset(row, quad * 4, side.blocks)) = four;
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Launches

FN int64_t eden_c_bytes(int64_t rows, int64_t cols) { return rows * cols / 16 * 2; }
FN int64_t eden_strip_bytes(int64_t rows, int64_t cols) { return (rows / EDEN_TILE) * (cols / EDEN_TILE) * EDEN_STRIPS * 4; }
FN int64_t eden_workspace_bytes(int64_t rows, int64_t cols) {
    return 2 * (eden_c_bytes(rows, cols) + eden_strip_bytes(rows, cols) + EDEN_MAX_CTAS * 4);
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
        job.side[d].c = (uint16_t *)p; p += eden_c_bytes(M, N);
        job.side[d].strip_min = (uint32_t *)p; p += eden_strip_bytes(M, N);
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

template <EdenSource SOURCE, int DIRECTIONS, int STAGES, bool NATIVE, int SHARE>
FN int eden_start(cudaStream_t stream, const EdenJob &job) {  // -> CTAs launched
    constexpr int bytes = eden_shared_bytes<SOURCE, DIRECTIONS, STAGES>();
    static int resident = 0;  // CTAs that fit the device at once
    if (!resident) {
        int each = 0;
        CUDA_CHECK(cudaFuncSetAttribute(eden_kernel<SOURCE, DIRECTIONS, STAGES, NATIVE, SHARE>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
        CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, eden_kernel<SOURCE, DIRECTIONS, STAGES, NATIVE, SHARE>, EDEN_TILE * SHARE, bytes));
        resident = device_attribute(cudaDevAttrMultiProcessorCount) * (each > 0 ? each : 1);
        if (resident > EDEN_MAX_CTAS) resident = EDEN_MAX_CTAS;
    }
    const int ctas = job.tiles < (uint32_t)resident ? (int)job.tiles : resident;
    eden_kernel<SOURCE, DIRECTIONS, STAGES, NATIVE, SHARE><<<ctas, EDEN_TILE * SHARE, bytes, stream>>>(job);
    CUDA_LAUNCHED();
    return ctas;
}
// Two stages where shared memory has room for them.
template <EdenSource SOURCE, int DIRECTIONS, bool NATIVE>
FN int eden_start_staged(cudaStream_t stream, const EdenJob &job) {
    const bool roomy = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) >= eden_shared_bytes<SOURCE, DIRECTIONS, 2>();
    return roomy ? eden_start<SOURCE, DIRECTIONS, 2, NATIVE, EDEN_SHARE>(stream, job) : eden_start<SOURCE, DIRECTIONS, 1, NATIVE, EDEN_SHARE>(stream, job);
}
// After eden_start with the same SHARE. native: codes were written, scales are to come.
template <int SHARE> FN void eden_finish(cudaStream_t stream, const EdenJob &job, int native, int directions, int ctas, float *st, const float *saved_st, float *alpha) {
    const int64_t work = native ? ceil_div(job.M * job.N / 64, FINISH_THREADS) : job.tiles;
    const int64_t most = (int64_t)device_attribute(cudaDevAttrMultiProcessorCount) * 8;
    const int grid = (int)(work < most ? work : most);
    if (native) eden_scales_kernel<<<grid, FINISH_THREADS, 0, stream>>>(job, directions, ctas, st, saved_st, alpha);
    else eden_mend_kernel<SHARE><<<grid, FINISH_THREADS, 0, stream>>>(job, directions, ctas, st, saved_st, alpha);
    CUDA_LAUNCHED();
}

FN void eden_both_launch(cudaStream_t stream, const bf16 *dy, int64_t M, int64_t N, bf16 *along_n, bf16 *along_m,
                             EdenAddress n, EdenAddress m, void *workspace, float *st) {
    EdenJob job = eden_job(M, N, workspace);
    job.x = dy;
    eden_side(&job, ALONG_N, n); job.side[ALONG_N].decoded = along_n;
    eden_side(&job, ALONG_M, m); job.side[ALONG_M].decoded = along_m;
    const int ctas = eden_start_staged<SOURCE_BF16, DO_N | DO_M, false>(stream, job);
    eden_finish<EDEN_SHARE>(stream, job, 0, DO_N | DO_M, ctas, st, NULL, NULL);
}
FN void eden_one_launch(cudaStream_t stream, const bf16 *dy, int64_t M, int64_t N, int along_rows, bf16 *out,
                            EdenAddress a, void *workspace, float *st) {
    EdenJob job = eden_job(M, N, workspace);
    const int direction = along_rows ? ALONG_M : ALONG_N;
    job.x = dy;
    eden_side(&job, direction, a); job.side[direction].decoded = out;
    const int ctas = along_rows ? eden_start_staged<SOURCE_BF16, DO_M, false>(stream, job) : eden_start_staged<SOURCE_BF16, DO_N, false>(stream, job);
    eden_finish<EDEN_SHARE>(stream, job, 0, 1 << direction, ctas, st, NULL, NULL);
}
FN void eden_requant_launch(cudaStream_t stream, const uint8_t *codes, const uint8_t *scales, int64_t rows, int64_t cols,
                                bf16 *out, EdenAddress a, const float *saved_st, float *alpha, void *workspace, float *st) {
    EdenJob job = eden_job(rows, cols, workspace);
    job.codes = codes; job.scales = scales;
    eden_side(&job, ALONG_M, a); job.side[ALONG_M].decoded = out;
    const int ctas = eden_start_staged<SOURCE_PACKED, DO_M, false>(stream, job);
    eden_finish<EDEN_SHARE>(stream, job, 0, DO_M, ctas, st, saved_st, alpha);
}
FN void eden_both_native_launch(cudaStream_t stream, const bf16 *dy, int64_t M, int64_t N,
                                    uint8_t *codes_n, uint8_t *tiled_n, uint8_t *codes_m, uint8_t *tiled_m,
                                    EdenAddress n, EdenAddress m, void *workspace, float *st) {
    EdenJob job = eden_job(M, N, workspace);
    job.x = dy;
    eden_side(&job, ALONG_N, n); job.side[ALONG_N].codes = codes_n; job.side[ALONG_N].tiled = tiled_n;
    eden_side(&job, ALONG_M, m); job.side[ALONG_M].codes = codes_m; job.side[ALONG_M].tiled = tiled_m;
    const int ctas = eden_start_staged<SOURCE_BF16, DO_N | DO_M, true>(stream, job);
    eden_finish<EDEN_SHARE>(stream, job, 1, DO_N | DO_M, ctas, st, NULL, NULL);
}
FN void eden_requant_native_launch(cudaStream_t stream, const uint8_t *codes, const uint8_t *tiled_scales, int64_t rows,
                                       int64_t cols, uint8_t *codes_t, uint8_t *tiled_t, EdenAddress a,
                                       const float *saved_st, float *alpha_factor, void *workspace, float *st) {
    EdenJob job = eden_job(rows, cols, workspace);
    job.codes = codes; job.scales = tiled_scales;
    eden_side(&job, ALONG_M, a); job.side[ALONG_M].codes = codes_t; job.side[ALONG_M].tiled = tiled_t;
    const int ctas = eden_start_staged<SOURCE_PACKED_TILED, DO_M, true>(stream, job);
    eden_finish<EDEN_SHARE>(stream, job, 1, DO_M, ctas, st, saved_st, alpha_factor);
}

#endif
