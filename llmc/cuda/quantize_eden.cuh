// cuda/quantize_eden.cuh: rotation of 128 + MS-EDEN posthoc. Included by quantize.cuh, which states what each launch does;
// quantize_eden_launch.cuh has the launches, and what follows once the largest c is known.
//
// A tensor (M,N) is cut into tiles of 128x128, one at a time in shared memory. A run of 128 (a column of the tile for the pass
// along M, a row for the pass along N) belongs to four threads of a warp that hold 32 values each and exchange half of them in
// each of the last two stages of the transform; then a thread has two whole blocks of 16, whose sums are its own. Columns come
// out of shared memory by ldmatrix.trans: two neighbouring values of the run in one register, eight a load, as for rows. The
// pass along N writes its rows over themselves (nobody else reads them any more), the pass along M into a second tile; then 16
// threads write a row's 256 bytes. The next tile is on its way meanwhile (cp.async).
//
// Four threads a run rather than two or one: 32 values in 64 registers, so that an SM has 32 warps to hide latency with.
// Instructions a value and direction, of the issue rate: unpack with sign 1.3, transform 8, amax 1, scale 1, round 4, sums 2, decode 1,
// the block's own work about 3 (a reciprocal, a quotient, Philox), copies and addresses about 4.
#ifndef LLMC_CUDA_QUANTIZE_EDEN_CUH
#define LLMC_CUDA_QUANTIZE_EDEN_CUH

#include "quantize_device.cuh"

#define EDEN_TILE 128                  // rows and columns of a tile, and the rotation
#define EDEN_PARTS 4                   // threads a run
#define EDEN_VALUES (EDEN_TILE / EDEN_PARTS)
#define EDEN_THREADS (EDEN_TILE * EDEN_PARTS)
#define EDEN_WARPS (EDEN_THREADS / 32)
#define EDEN_PITCH 272                 // bytes between a tile's rows in shared memory: 16 more than they hold, against bank conflicts
#define EDEN_GAP 32                    // and between every 32 rows and the next, for threads that read rows r, r + 32, r + 64, r + 96 at once
#define EDEN_TILE_BYTES (EDEN_TILE * EDEN_PITCH + 3 * EDEN_GAP)
#define EDEN_CODES_PITCH 80            // the same for a row's 64 bytes of codes
#define EDEN_PACKED_BYTES (EDEN_TILE * (EDEN_CODES_PITCH + 8))
#define EDEN_MAX_CTAS 1024
#define EDEN_APART true               // the trainer's choice of APART, see eden_kernel

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
    uint32_t *c;                       // c of the blocks, a run's together: along N (M, N/128, 4), along M (M/128, N, 4); word k: blocks k and k + 4
    uint32_t *tile_min;                // (tiles): bits of the smallest c > 0, minus 1
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
// Which tile comes next. Of an SM's CTAs the scheduler prefers one: of equal shares it ends its own early and leaves the SM half empty
// (measured: 26 of 32 warps on average). So a CTA starts with the tile of its number, and draws each further one from a common counter.

// A tile's place: row and column in tiles. Beyond the last: TILE_NONE in m.
struct EdenTile { uint32_t m, n; };
#define TILE_NONE 0xFFFFFFFFu
// Tiles drawn by the kernel that runs. One kernel at a time may use it: all quantizers run on one stream.
static __device__ uint32_t tiles_drawn;
__device__ __forceinline__ EdenTile tile_place(uint32_t tile, const EdenJob &job) {
    const EdenTile at = {tile < job.tiles ? tile / job.tiles_n : TILE_NONE, tile % job.tiles_n};
    return at;
}
// By one thread of a CTA, which goes on until it draws one too many, and not beyond. The draw that is the last of all leaves the counter
// at zero for the next kernel: every tile but the CTAs' first is drawn, and one too many by each CTA.
__device__ __forceinline__ EdenTile tile_draw(const EdenJob &job) {
    const uint32_t draw = atomicAdd(&tiles_drawn, 1u);
    if (draw == job.tiles - 1u) tiles_drawn = 0u;
    return tile_place(gridDim.x + draw, job);
}

// ---------------------------------------------------------------------------------------------------------------------
// A thread's part of a run: positions 32*part and on before the transform, blocks part and part + 4 after it

// A stage whose pairs lie in two threads, a and b: each keeps half of its values and sends the other, so that a value costs half
// a shuffle and one operation. a keeps the lower half, b the upper. The halves must have the places y[0..15] (kept) and
// y[16..31] (sent) in both; what puts b's there at no cost is a sign: (a + b, a - b) with b negated is the same two, exchanged.
// Hence the block negated before the transform (part_sign). b's difference comes out negated too; run_block() says which block
// that is, and its scale takes the sign back. All of this is exact: the values are those of hadamard(), but for the sign of a zero.
__device__ __forceinline__ void run_exchange(float y[EDEN_VALUES], int partner) {
#pragma unroll
    for (int i = 0; i < EDEN_VALUES / 2; i++) {
        const float kept = y[i], got = __shfl_xor_sync(0xFFFFFFFFu, y[i + EDEN_VALUES / 2], partner);
        y[i] = f32_add(kept, got); y[i + EDEN_VALUES / 2] = f32_sub(kept, got);
    }
}
// y = H y. near, far: lane masks of the threads with the parts part ^ 1 and part ^ 2.
__device__ __forceinline__ void run_hadamard(float y[EDEN_VALUES], int near, int far) {
#pragma unroll
    for (int s = 0; s < 5; s++)
#pragma unroll
        for (int p = 0; p < EDEN_VALUES / 2; p++) {
            const int h = 1 << s, i = ((p >> s) << (s + 1)) + (p & (h - 1));
            const float a = y[i], b = y[i + h];
            y[i] = f32_add(a, b); y[i + h] = f32_sub(a, b);
        }
    run_exchange(y, near);
    run_exchange(y, far);
}
// Extra sign of position i: part 1's upper block, so that parts 1 and 3 keep that one; and all of part 3, so that parts 2 and 3
// keep what belongs to the odd parts.
__device__ __forceinline__ uint32_t part_sign(int i) { return i / 16 == 3 || i / 16 == 6 ? 0x80000000u : 0u; }
// Which of the run's eight blocks y[16*half..] is after the transform, and its sign.
__device__ __forceinline__ int run_block(int part, int half) { return part + 4 * (half ^ (part & 1)); }
__device__ __forceinline__ uint32_t run_block_sign(int part, int half) { return part >= 2 && (half ^ (part & 1)) ? 0x80000000u : 0u; }

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
        vv[i / 8] = f32_fma(v[i], v[i], vv[i / 8]);
        vq[i / 8] = f32_fma(v[i], r[i], vq[i / 8]);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) q[i] = pack_bf16x2(r[2 * i], r[2 * i + 1]);
    // <v,q> is at least 35 (the largest v is 6 or a little more) or zero.
    const float S = f32_quotient(f32_add(vv[0], vv[1]), fmaxf(f32_add(vq[0], vq[1]), 1.0f));
    return pack_bf16x2(0.0f, f32_mul(m, S));
}

// ms_eden_search_block() of 16 values, the same way. (1/m and 1/<v,q> as f32_reciprocal() has them: <v,q> is 0, or 16 to 600.)
struct EdenSums { float vq, qq; };
__device__ __forceinline__ EdenSums eden_candidate(const float y[16], float e, uint32_t q[8]) {
    float vq[2] = {0.0f, 0.0f}, qq[2] = {0.0f, 0.0f}, r[16];
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const float v = f32_mul(y[i], e);
        r[i] = e2m1_round_unclamped(v);
        vq[i / 8] = f32_fma(v, r[i], vq[i / 8]);
        qq[i / 8] = f32_fma(r[i], r[i], qq[i / 8]);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) q[i] = pack_bf16x2(r[2 * i], r[2 * i + 1]);
    const EdenSums s = {f32_add(vq[0], vq[1]), f32_add(qq[0], qq[1])};
    return s;
}
__device__ __forceinline__ EdenTry eden_try_fast(float m, float vv, EdenSums s) {
    EdenTry t;
    const float r = f32_reciprocal(fmaxf(s.vq, 1.0f)), S = f32_mul(vv, r);
    t.c = f32_from_bits(pack_bf16x2(0.0f, f32_mul(m, S)));
    t.A = f32_mul(S, f32_mul(s.qq, r));
    return t;
}
__device__ __forceinline__ uint32_t eden_block_search(const float y[16], uint32_t q[8]) {
    float a[8], vv[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 8; i++) a[i] = fmaxf(fabsf(y[i]), fabsf(y[i + 8]));
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = fmaxf(a[i], a[i + 4]);
    const float high0 = fmaxf(a[0], a[2]), high1 = fmaxf(a[1], a[3]), amax = fmaxf(high0, high1);
    const float second = fmaxf(fminf(high0, high1), fmaxf(fminf(a[0], a[2]), fminf(a[1], a[3])));
    const bool near_ = second >= f32_mul(amax, EDEN_NEAR);
    const float m0 = f32_mul(amax, near_ ? 0.15625f : 1.0f / 6.0f), m1 = f32_mul(amax, 0.25f);
    const float e0 = m0 >= AMAX_FLOOR ? f32_reciprocal(m0) : 0.0f, e1 = f32_mul(e0, near_ ? 0.625f : 4.0f / 6.0f);
#pragma unroll
    for (int i = 0; i < 16; i++) { const float v = f32_mul(y[i], e0); vv[i / 8] = f32_fma(v, v, vv[i / 8]); }
    uint32_t q1[8];
    const float V = f32_add(vv[0], vv[1]);
    const EdenTry t0 = eden_try_fast(m0, V, eden_candidate(y, e0, q)), t1 = eden_try_fast(m1, f32_mul(V, near_ ? 0.390625f : 4.0f / 9.0f), eden_candidate(y, e1, q1));
    const bool second_is_better = eden_second_is_better(t0, t1);
#pragma unroll
    for (int i = 0; i < 8; i++) q[i] = second_is_better ? q1[i] : q[i];
    return f32_bits(second_is_better ? t1.c : t0.c);
}

// What a kernel does to a block and what it writes: MS-EDEN decoded or packed, or with a searched scale, decoded.
enum EdenForm { EDEN_DECODED, EDEN_PACKED, EDEN_SEARCHED };

// Quantizes a rotated run. u: the blocks' random words; sign: theirs (run_block_sign). out: decoded, pairs of BF16; or codes, a word
// for eight. c: bits of the blocks' c. cmin, cmax: least of c's bits - 1 and greatest of c's bits, kept going.
template <EdenForm FORM>
__device__ __forceinline__ void run_quantize(const float y[EDEN_VALUES], const uint32_t u[2], const uint32_t sign[2], float scale_back,
                                             uint32_t out[EDEN_VALUES / 2], uint32_t c[2], uint32_t &cmin, uint32_t &cmax) {
#pragma unroll
    for (int b = 0; b < 2; b++) {
        float v[16];
        uint32_t q[8];
        c[b] = FORM == EDEN_SEARCHED ? eden_block_search(y + 16 * b, q) : eden_block(y + 16 * b, v, q);
        if (scale_back != 1.0f) c[b] = f32_bits(f32_mul(f32_from_bits(c[b]), scale_back));
        cmin = min(cmin, c[b] - 1u);
        cmax = max(cmax, c[b]);
        if (FORM == EDEN_PACKED) {
#pragma unroll
            for (int i = 0; i < 2; i++) out[2 * b + i] = convert_e2m1x8_numbers(v + 8 * i) ^ (sign[b] ? 0x88888888u : 0u);
        } else {
            const uint32_t s = bf16x2_twice(f32_from_bits(f32_bits(ms_eden_posthoc_extended(f32_from_bits(c[b]), u[b])) ^ sign[b]));
#pragma unroll
            for (int i = 0; i < 8; i++) out[8 * b + i] = bf16x2_mul(q[i], s);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Runs in a tile: which part of which run a thread has. A warp has eight neighbouring rows (part = lane/8) or eight neighbouring
// columns: an ldmatrix reads eight segments of 16 bytes, 8 columns of a row, and gives lane 4g+j two neighbouring rows of column
// g of a segment that j chooses: of part j. The eight segments (two rows of each part) lie in different banks.

struct EdenPlace { int run, part; };  // row or column of the tile; which part of it
__device__ __forceinline__ EdenPlace eden_place(int direction, int warp, int lane) {
    EdenPlace p;
    p.part = direction == ALONG_M ? lane & 3 : lane >> 3;
    p.run = 8 * warp + (direction == ALONG_M ? lane >> 2 : lane & 7);
    return p;
}
__device__ __forceinline__ uint32_t tile_offset(uint32_t row) { return row * EDEN_PITCH + (row >> 5) * EDEN_GAP; }

// Signs in shared memory, a gap after each part's 32, so that a warp's four parts read different banks.
#define SIGNS_WORDS (EDEN_TILE + 4 * EDEN_PARTS)
__device__ __forceinline__ int sign_place(int i) { return i + (i >> 5) * 4; }
// Unpacks four words, eight values, with the signs of their positions.
__device__ __forceinline__ void unpack_signed(const uint32_t w[4], const uint32_t *sign, float y[8]) {
    const uint4 a = *reinterpret_cast<const uint4 *>(sign), b = *reinterpret_cast<const uint4 *>(sign + 4);
    y[0] = bf16_lower_signed(w[0], a.x); y[1] = bf16_upper_signed(w[0], a.y);
    y[2] = bf16_lower_signed(w[1], a.z); y[3] = bf16_upper_signed(w[1], a.w);
    y[4] = bf16_lower_signed(w[2], b.x); y[5] = bf16_upper_signed(w[2], b.y);
    y[6] = bf16_lower_signed(w[3], b.z); y[7] = bf16_upper_signed(w[3], b.w);
}
// The n-th ldmatrix or stmatrix of a part lies 8 rows of the tile further. The lane gives the address of row lane%8 of matrix lane/8.
__device__ __forceinline__ void column_load(uint32_t tile, int warp, int lane, const uint32_t *sign, float y[EDEN_VALUES]) {
    const int part = (lane & 7) >> 1;
    const uint32_t address = tile + tile_offset(32 * part + 2 * (lane >> 3) + (lane & 1)) + 16 * warp;
#pragma unroll
    for (int n = 0; n < EDEN_VALUES / 8; n++) {
        uint32_t w[4];
        ldmatrix_transposed(w, address + n * 8 * EDEN_PITCH);
        unpack_signed(w, sign + 8 * n, y + 8 * n);
    }
}
__device__ __forceinline__ void column_store(uint32_t tile, int warp, int lane, const uint32_t out[EDEN_VALUES / 2]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
#if __CUDA_ARCH__ >= 900
        const uint32_t address = tile + tile_offset(16 * run_block((lane & 7) >> 1, half) + 2 * (lane >> 3) + (lane & 1)) + 16 * warp;
#pragma unroll
        for (int n = 0; n < 2; n++) stmatrix_transposed(address + n * 8 * EDEN_PITCH, out + 8 * half + 4 * n);
#else
        const EdenPlace p = eden_place(ALONG_M, warp, lane);
        const uint32_t address = tile + tile_offset(16 * run_block(p.part, half)) + 2 * p.run;
#pragma unroll
        for (int k = 0; k < 8; k++) {
            store_shared_u16(address + 2 * k * EDEN_PITCH, out[8 * half + k]);
            store_shared_u16(address + (2 * k + 1) * EDEN_PITCH, out[8 * half + k] >> 16);
        }
#endif
    }
}
__device__ __forceinline__ void row_load(const uint8_t *part, const uint32_t *sign, float y[EDEN_VALUES]) {
#pragma unroll
    for (int n = 0; n < EDEN_VALUES / 8; n++) {
        const uint4 v = *reinterpret_cast<const uint4 *>(part + 16 * n);
        const uint32_t w[4] = {v.x, v.y, v.z, v.w};
        unpack_signed(w, sign + 8 * n, y + 8 * n);
    }
}
__device__ __forceinline__ void row_store(uint8_t *row, int part, const uint32_t out[EDEN_VALUES / 2]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint4 *to = reinterpret_cast<uint4 *>(row + 32 * run_block(part, half));
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const uint32_t *w = out + 8 * half + 4 * n;
            to[n] = make_uint4(w[0], w[1], w[2], w[3]);
        }
    }
}

// The random words of a tile, words[direction][quad of blocks][run]: a Philox call for four neighbouring blocks, a call a thread and
// two directions.
#define EDEN_QUADS (2 * EDEN_TILE)     // of a tile and direction
__device__ __forceinline__ void side_words(uint4 *words, const EdenSide &side, uint32_t outer, uint32_t inner) {
    const uint32_t k = threadIdx.x & (EDEN_QUADS - 1), run = k & (EDEN_TILE - 1), quad = k / EDEN_TILE;
    const int64_t row = (int64_t)outer * EDEN_TILE + run;  // of the operand
    const uint64_t i = side.first + (uint64_t)(row * (side.blocks / 4) + 2 * inner + quad);
    const Philox4 p = philox_keyed((uint32_t)i, (uint32_t)(i >> 32), side.step, side.address, side.keys);
    words[k] = make_uint4(p.w[0], p.w[1], p.w[2], p.w[3]);
}

// ---------------------------------------------------------------------------------------------------------------------
// Tiles between global and shared memory

// Sixteen threads a row, 16 bytes each. pitch: bytes of a row in global memory; offsets within a tile fit 32 bits.
__device__ __forceinline__ void tile_fetch(uint32_t tile, const uint8_t *x, uint32_t pitch) {  // asynchronous
    const uint32_t row = threadIdx.x >> 4, chunk = 16 * (threadIdx.x & 15);
    uint32_t from = row * pitch + chunk;
    tile += row * EDEN_PITCH + chunk;
#pragma unroll
    for (int i = 0; i < 4; i++, from += 32 * pitch) cp_async16(tile + tile_offset(i * 32), x + from);
}
__device__ __forceinline__ void tile_write(const uint8_t *tile, uint8_t *out, uint32_t pitch) {
    const uint32_t row = threadIdx.x >> 4, chunk = 16 * (threadIdx.x & 15);
    uint32_t to = row * pitch + chunk;
    tile += row * EDEN_PITCH + chunk;
#pragma unroll
    for (int i = 0; i < 4; i++, to += 32 * pitch)
        *reinterpret_cast<uint4 *>(out + to) = *reinterpret_cast<const uint4 *>(tile + tile_offset(i * 32));
}
// Packed tile: 128 rows of 64 bytes of codes, then 128 rows of 8 scales.
template <EdenSource SOURCE>
__device__ __forceinline__ void packed_fetch(uint32_t packed, const EdenJob &job, int64_t m, int64_t n) {
    const int k = threadIdx.x >> 2, chunk = threadIdx.x & 3, row = threadIdx.x;
    cp_async16(packed + k * EDEN_CODES_PITCH + chunk * 16, job.codes + (m + k) * (job.N / 2) + n / 2 + chunk * 16);
    if (row >= EDEN_TILE) return;
    const uint32_t scales = packed + EDEN_TILE * EDEN_CODES_PITCH + row * 8;
    const int64_t C = job.N / 16;
    if (SOURCE == SOURCE_PACKED) cp_async8(scales, job.scales + (m + row) * C + n / 16);
    else for (int i = 0; i < 2; i++) cp_async4(scales + 4 * i, job.scales + tiled_scale_offset(m + row, n / 16 + 4 * i, C));
}
// A thread decodes 32 values of a row into the tile: codes x s_b x 2^-7, exact (PACKED_SCALE, quantize_device.cuh).
__device__ __forceinline__ void packed_decode(const uint8_t *packed, uint8_t *tile, EdenPlace place) {
    const uint4 v = *reinterpret_cast<const uint4 *>(packed + place.run * EDEN_CODES_PITCH + place.part * 16);
    const uint32_t s = *reinterpret_cast<const uint16_t *>(packed + EDEN_TILE * EDEN_CODES_PITCH + place.run * 8 + place.part * 2);
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
    uint4 *to = reinterpret_cast<uint4 *>(tile + tile_offset(place.run) + place.part * 64);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const uint32_t scale = packed_scale_bf16x2(j < 2 ? s & 0xFFu : s >> 8);
        uint32_t d[4];
#pragma unroll
        for (int k = 0; k < 4; k++) d[k] = packed_decode2(words[j], k, scale);
        to[j] = make_uint4(d[0], d[1], d[2], d[3]);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The kernel. DIRECTIONS: DO_N, DO_M or both. STAGES: source buffers, 2 to fetch a tile while another is worked on. APART: each
// direction has its own code (more of it, but addresses and constants are fixed), or both run through the same.

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
struct EdenShared {
    uint4 words[2][EDEN_QUADS];
    uint32_t sign[2][SIGNS_WORDS];
    uint32_t least[2][EDEN_WARPS];     // of the tile, a warp each
    uint32_t most[2];                  // of the CTA
    EdenTile next[2];                  // the CTA's next tile, and the one after that
};
template <EdenSource SOURCE>
__device__ __forceinline__ void eden_fetch(uint32_t stage, const EdenJob &job, EdenTile at) {
    const int64_t m = (int64_t)at.m * EDEN_TILE, n = (int64_t)at.n * EDEN_TILE;
    if (SOURCE == SOURCE_BF16) tile_fetch(stage, reinterpret_cast<const uint8_t *>(job.x + m * job.N + n), (uint32_t)job.N * 2);
    else packed_fetch<SOURCE>(stage, job, m, n);
}
template <int DIRECTIONS>
__device__ __forceinline__ void tile_words(EdenShared &common, const EdenJob &job, EdenTile at) {
    if (threadIdx.x < EDEN_QUADS) { if (DIRECTIONS & DO_N) side_words(common.words[ALONG_N], job.side[ALONG_N], at.m, at.n); }
    else if (DIRECTIONS & DO_M) side_words(common.words[ALONG_M], job.side[ALONG_M], at.n, at.m);
}

// One direction of one tile: work (rows and columns of the tile) -> side.c, common.least and, decoded, `to`; packed, side.codes.
// -> greatest c of the thread. barrier: other warps may still be reading the rows that this one is about to overwrite.
template <EdenForm FORM>
__device__ __forceinline__ uint32_t eden_pass(const EdenJob &job, bool along_m, EdenTile at, uint8_t *work, uint8_t *to, EdenShared &common,
                                              float scale_back, bool barrier) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, direction = along_m ? ALONG_M : ALONG_N;
    const EdenSide &side = job.side[direction];
    const EdenPlace place = eden_place(direction, warp, lane);
    const int64_t row = (int64_t)(along_m ? at.n : at.m) * EDEN_TILE + place.run;  // of the operand
    float y[EDEN_VALUES];
    uint32_t u[2], sign[2], out[EDEN_VALUES / 2], c[2], cmin = 0xFFFFFFFFu, cmax = 0u;
    const uint32_t *signs = common.sign[direction] + sign_place(EDEN_VALUES * place.part);
    if (along_m) column_load(shared_address(work), warp, lane, signs, y);
    else row_load(work + tile_offset(place.run) + 2 * EDEN_VALUES * place.part, signs, y);
    run_hadamard(y, along_m ? 1 : 8, along_m ? 2 : 16);
    const uint32_t *words = reinterpret_cast<const uint32_t *>(common.words[direction]) + 4 * place.run + place.part;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u[half] = words[run_block(place.part, half) / 4 * (4 * EDEN_TILE)];
        sign[half] = run_block_sign(place.part, half);
    }
    constexpr bool NATIVE = FORM == EDEN_PACKED;
    run_quantize<FORM>(y, u, sign, scale_back, out, c, cmin, cmax);
    side.c[(along_m ? at.m * job.N + row : row * job.tiles_n + at.n) * 4 + place.part] = __byte_perm(c[0], c[1], place.part & 1 ? 0x3276 : 0x7632);
    cmin = __reduce_min_sync(0xFFFFFFFFu, cmin);
    if (lane == 0) common.least[direction][warp] = cmin;
    if (NATIVE) {
        uint8_t *codes = side.codes + row * (side.blocks * 8) + (along_m ? at.m : at.n) * (EDEN_TILE / 2);
#pragma unroll
        for (int half = 0; half < 2; half++)
            *reinterpret_cast<uint2 *>(codes + 8 * run_block(place.part, half)) = make_uint2(out[2 * half], out[2 * half + 1]);
    } else if (along_m) {
        column_store(shared_address(to), warp, lane, out);
    } else {
        if (barrier) __syncthreads();
        else __syncwarp();
        row_store(to + tile_offset(place.run), place.part, out);
    }
    return cmax;
}

// After all warps of a tile: its outputs to global memory, its least c, and the random words of the CTA's next tile.
template <int DIRECTIONS, bool NATIVE>
__device__ __forceinline__ void tile_finish(const EdenJob &job, EdenTile at, EdenTile next, bool more, const uint8_t *rows,
                                            const uint8_t *columns, EdenShared &common) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    if (!NATIVE) {
        const int64_t first = at.m * (EDEN_TILE * job.N) + at.n * EDEN_TILE;
        if (DIRECTIONS & DO_M) tile_write(columns, reinterpret_cast<uint8_t *>(job.side[ALONG_M].decoded + first), (uint32_t)job.N * 2);
        if (DIRECTIONS & DO_N) tile_write(rows, reinterpret_cast<uint8_t *>(job.side[ALONG_N].decoded + first), (uint32_t)job.N * 2);
        if (more) tile_words<DIRECTIONS>(common, job, next);
    }
    if (warp < 2 && (DIRECTIONS >> warp & 1)) {
        const uint32_t least = __reduce_min_sync(0xFFFFFFFFu, common.least[warp][lane & (EDEN_WARPS - 1)]);
        if (lane == 0) job.side[warp].tile_min[(int64_t)at.m * job.tiles_n + at.n] = least;
    }
}

template <EdenSource SOURCE, int DIRECTIONS, int STAGES, EdenForm FORM, bool APART>
__global__ void __launch_bounds__(EDEN_THREADS, 2) eden_kernel(const __grid_constant__ EdenJob job) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ EdenShared common;
    constexpr bool NATIVE = FORM == EDEN_PACKED;
    constexpr int STAGE_BYTES = eden_stage_bytes<SOURCE>();
    constexpr bool SECOND = eden_has_second_tile<SOURCE, DIRECTIONS>();
    constexpr float SCALE_BACK = SOURCE == SOURCE_BF16 ? 1.0f : 1.0f / PACKED_SCALE;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    uint8_t *second = shared + STAGES * STAGE_BYTES;
    if (threadIdx.x < 2) common.most[threadIdx.x] = 0u;
    if (threadIdx.x < 2 * EDEN_TILE) {
        const int i = threadIdx.x & (EDEN_TILE - 1), d = threadIdx.x / EDEN_TILE;
        common.sign[d][sign_place(i)] = job.side[d].sign[i] ^ part_sign(i);
    }
    uint32_t cmax[2] = {0u, 0u};
    int stage = 0;
    EdenTile at = tile_place(blockIdx.x, job);
    if (STAGES == 2) { eden_fetch<SOURCE>(shared_address(shared), job, at); cp_async_commit(); }
    if (!NATIVE) tile_words<DIRECTIONS>(common, job, at);
    if (threadIdx.x == 0) common.next[0] = tile_draw(job);
    for (int turn = 0; at.m != TILE_NONE; turn ^= 1) {
        uint8_t *work = shared + stage * STAGE_BYTES;
        if (STAGES == 1) { eden_fetch<SOURCE>(shared_address(work), job, at); cp_async_commit(); }
        cp_async_wait_all();
        __syncthreads();
        if (STAGES == 2) {
            const EdenTile ahead = common.next[turn];
            stage ^= 1;
            if (ahead.m != TILE_NONE) eden_fetch<SOURCE>(shared_address(shared + stage * STAGE_BYTES), job, ahead);
            cp_async_commit();
        }
        if (SOURCE != SOURCE_BF16) {
            packed_decode(work, second, eden_place(ALONG_N, warp, lane));
            work = second;
            __syncthreads();
        }
        uint8_t *columns = SECOND ? second : work;
        if (APART || DIRECTIONS != (DO_N | DO_M)) {
            if (DIRECTIONS & DO_M) cmax[1] = max(cmax[1], eden_pass<FORM>(job, true, at, work, columns, common, SCALE_BACK, false));
            if (DIRECTIONS & DO_N) cmax[0] = max(cmax[0], eden_pass<FORM>(job, false, at, work, work, common, SCALE_BACK, DIRECTIONS & DO_M));
        } else {
#pragma unroll 1
            for (int direction = ALONG_M; direction >= ALONG_N; direction--) {
                const bool along_m = direction == ALONG_M;
                const uint32_t most = eden_pass<FORM>(job, along_m, at, work, along_m ? columns : work, common, SCALE_BACK, true);
                cmax[0] = max(cmax[0], along_m ? 0u : most);
                cmax[1] = max(cmax[1], along_m ? most : 0u);
            }
        }
        __syncthreads();
        const EdenTile next = common.next[turn];           // again, rather than in registers until here
        const bool more = next.m != TILE_NONE;
        tile_finish<DIRECTIONS, NATIVE>(job, at, next, more, work, columns, common);
        if (threadIdx.x == 0 && more) common.next[turn ^ 1] = tile_draw(job);
        if (STAGES == 1 && !NATIVE) __syncthreads();
        at = next;
    }
#pragma unroll
    for (int d = 0; d < 2; d++) {
        const uint32_t most = __reduce_max_sync(0xFFFFFFFFu, cmax[d]);
        if (lane == 0) atomicMax(&common.most[d], most);
    }
    __syncthreads();
    if (threadIdx.x < 2 && (DIRECTIONS >> threadIdx.x & 1)) job.side[threadIdx.x].cta_max[blockIdx.x] = common.most[threadIdx.x];
}

#endif
