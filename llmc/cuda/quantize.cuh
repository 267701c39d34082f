// cuda/quantize.cuh: the quantizers on the GPU. Same bits as the block functions of quantize.h on the CPU.
//
//   forward   X, W   bf16 -> rtn or four_six 1x16: packed codes and scales (kept for backward) and the decoded operand
//   backward  dY     bf16, read once -> rotate + MS-EDEN (posthoc) along N for dgrad and along M for wgrad
//             X, W   packed -> rotate + MS-EDEN (posthoc) along their rows (X along M for wgrad, W along N for dgrad)
//
// Two outputs. Decoded: the operand of an emulated GEMM, BF16 in the layout of the input, exactly codes x scales (up to
// the sign of a zero). Packed: what a block-scaled FP4 GEMM (sm_100 and above) reads: two codes a byte along the inner
// dimension and E4M3 scales in 128x4 tiles; of MS-EDEN, codes 0 and 8 (both are zero) may stand for each other.
//
// Everything runs on `stream`; nothing synchronizes. Pointers are device memory, 16-byte aligned. Errors: a shape that a
// kernel cannot take is fatal(); a non-finite input gives unspecified finite or non-finite outputs, never a fault.
#ifndef LLMC_CUDA_QUANTIZE_CUH
#define LLMC_CUDA_QUANTIZE_CUH

#include "../quantize.h"
#include "../recipe.h"
#include "common.cuh"

// The address of an operand's noise: rotation signs (shared by both operands of a GEMM) and MS-EDEN scale words.
struct EdenAddress {
    uint64_t seed;
    uint32_t step;
    int layer, linear, gemm, operand;
    int rank;        // 0 for weights
    int64_t micro;   // micro-batch of the step; 0 for weights
};

// ---------------------------------------------------------------------------------------------------------------------
// Forward (quantize_forward.cuh)

// *amax = max |x| of `count` BF16 values (any count), for a producer that does not know it. NaNs are skipped.
// Reads 2 B a value. *amax is zeroed first.
FN void amax_launch(cudaStream_t stream, const bf16 *x, int64_t count, float *amax);

// Quantizes x (rows, cols) along its columns, blocks 1x16. cols is a multiple of 16, rows anything >= 1.
//   spec      its rounding: ROUND_RTN or ROUND_FOUR_SIX
//   amax      max |x|, already reduced (device)
//   codes     (rows, cols/2)   two E2M1 codes a byte, even column in the low nibble
//   scales    (rows, cols/16)  E4M3, row-major
//   decoded   (rows, cols)     code x s_b in BF16, exact; s_t is left to alpha
//   st        the tensor scale s_t (device, written)
//   other_st, alpha   when alpha is not NULL: *alpha = s_t * *other_st, what the forward GEMM multiplies by (device)
// codes and scales may both be NULL (nothing kept, for example in an evaluation); decoded may be NULL.
// Reads 2 B a value, writes 2.5625 B: floor 4.5625 B a value of copy bandwidth.
FN void quantize_forward_launch(cudaStream_t stream, const OperandSpec *spec, const bf16 *x, int64_t rows, int64_t cols,
                                    const float *amax, uint8_t *codes, uint8_t *scales, bf16 *decoded, float *st,
                                    const float *other_st, float *alpha);

// The same for a native FP4 GEMM: no decoded operand; scales in cuBLASLt's 128x4 tiles (tiled_scale_offset), rows padded to
// 128 and scale columns to 4, the padding zeroed. tiled_scale_bytes() says how large they are.
FN int64_t tiled_scale_bytes(int64_t rows, int64_t cols);
FN void quantize_forward_native_launch(cudaStream_t stream, const OperandSpec *spec, const bf16 *x, int64_t rows, int64_t cols,
                                           const float *amax, uint8_t *codes, uint8_t *tiled_scales, float *st,
                                           const float *other_st, float *alpha);

// ---------------------------------------------------------------------------------------------------------------------
// Backward: rotation of 128 + MS-EDEN posthoc (quantize_eden.cuh, quantize_eden_launch.cuh). Both dimensions are multiples of 128.
//
// The tensor scale of posthoc is a power of two, so s_b*s_t does not depend on it unless s_b is subnormal: the kernel emits
// code * (s_b*s_t) at once, keeps each block's c and their largest and smallest, and a second, tiny kernel mends the blocks
// whose scale turns out subnormal (it looks at 4 B a tile of 128x128 and direction). s_t is thereby in the values: alpha is 1/128 only
// (times the s_t that the saved X or W was quantized with, see eden_requant_launch).

// Scratch of one call, for any of the functions below: the blocks' c, tile minima, CTA maxima. About 0.25 B a value for
// eden_both_launch, half of it for eden_requant_launch. Calls on one stream may share it.
FN int64_t eden_workspace_bytes(int64_t rows, int64_t cols);

// dY (M,N) -> along_n (M,N): operand A of dgrad, blocks along N, noise at address n (rows of the operand: M)
//          -> along_m (M,N): operand A^T of wgrad, blocks along M, noise at address m (rows of the operand: N); the layout
//             is dY's: the GEMM takes it transposed.
// st (device, 2 floats, may be NULL): the tensor scales found, along N and along M; already in the values.
// Reads 2 B a value, writes 4 B + 0.25 B of c: floor 6.25 B a value, or about 50 instructions (25 a direction).
FN void eden_both_launch(cudaStream_t stream, const OperandSpec *spec, const bf16 *dy, int64_t M, int64_t N, bf16 *along_n, bf16 *along_m,
                             EdenAddress n, EdenAddress m, void *workspace, float *st);

// One direction only: dY (M,N) along N (along_rows = 0) or along M (along_rows = 1). For a layer that needs one gradient.
FN void eden_one_launch(cudaStream_t stream, const OperandSpec *spec, const bf16 *dy, int64_t M, int64_t N, int along_rows, bf16 *out,
                            EdenAddress a, void *workspace, float *st);

// A saved tensor (rows, cols), as quantize_forward_launch wrote it, -> out (rows, cols): rotated and re-quantized along its
// ROWS. X (M,K) -> operand B of wgrad; W (N,K) -> operand B of dgrad. The rotation is fed codes x s_b, exact; the saved s_t
// goes into *alpha = *saved_st / 128 (device, written; the GEMM's whole alpha, since both new tensor scales are in the values).
// st (device, 1 float, may be NULL): the tensor scale found; already in the values.
// Reads 0.5625 B a value, writes 2 B + 0.125 B of c: floor 2.69 B a value, or about 31 instructions.
FN void eden_requant_launch(cudaStream_t stream, const OperandSpec *spec, const uint8_t *codes, const uint8_t *scales, int64_t rows, int64_t cols,
                                bf16 *out, EdenAddress a, const float *saved_st, float *alpha, void *workspace, float *st);

// Native FP4: packed operands. along_n: codes (M,N/2), scales of (M, N/16); along_m: codes of dY^T (N,M/2), scales of
// (N, M/16); scales in 128x4 tiles. st[0], st[1]: tensor scales (device), to be multiplied into alpha with 1/128.
FN void eden_both_native_launch(cudaStream_t stream, const bf16 *dy, int64_t M, int64_t N,
                                    uint8_t *codes_n, uint8_t *tiled_n, uint8_t *codes_m, uint8_t *tiled_m,
                                    EdenAddress n, EdenAddress m, void *workspace, float *st);
// Saved tensor with scales in 128x4 tiles -> codes of its transpose (cols, rows/2), scales of (cols, rows/16) in tiles.
// *st: the new tensor scale; *alpha_factor = *saved_st / 128 * *st.
FN void eden_requant_native_launch(cudaStream_t stream, const uint8_t *codes, const uint8_t *tiled_scales, int64_t rows,
                                       int64_t cols, uint8_t *codes_t, uint8_t *tiled_t, EdenAddress a,
                                       const float *saved_st, float *alpha_factor, void *workspace, float *st);

#include "quantize_forward.cuh"
#include "quantize_eden_launch.cuh"

#endif
