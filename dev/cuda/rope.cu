// rope.cu: ladder of the rotary embedding, in place on q and k.
//
// Build: nvcc -std=c++17 -O3 -arch=native -o rope dev/cuda/rope.cu     Run: ./rope [--quick]
//
// 1. one thread a pair, the table read for every head
// 2. the trainer's (llmc/cuda/rope.cuh): 16-byte vectors, a thread keeps its angles for all heads, four in flight
// 3. the same with one head in flight, 4. with two
#include "ladder_compare.cuh"

#include "../../llmc/cuda/rope.cuh"

typedef struct { int64_t rows; int seq, heads, kv_heads, head_dim; } Shape;
static int row_width(Shape s) { return (s.heads + 2 * s.kv_heads) * s.head_dim; }

__global__ void rope_naive(bf16 *qkv, const float2 *table, Shape s, int width) {
    const int half = s.head_dim / 2, pairs = (s.heads + s.kv_heads) * half;
    const int64_t index = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, row = index / pairs;
    if (row >= s.rows) return;
    const int head = (int)(index % pairs) / half, i = (int)(index % pairs) % half;
    const float2 angle = table[row % s.seq * half + i];
    bf16 *const x = qkv + row * width + head * s.head_dim + i;
    const float a = __bfloat162float(x[0]), b = __bfloat162float(x[half]);
    x[0] = __float2bfloat16_rn(a * angle.x - b * angle.y);
    x[half] = __float2bfloat16_rn(b * angle.x + a * angle.y);
}
static void rope_version(int version, bf16 *qkv, const float2 *table, Shape s) {
    if (version == 2) return rope_forward_launch(qkv, table, s.rows, s.seq, s.heads, s.kv_heads, s.head_dim, 0);
    if (version == 3) return rope_launch<1, 1>(qkv, table, s.rows, s.seq, s.heads, s.kv_heads, s.head_dim, 0);
    if (version == 4) return rope_launch<1, 2>(qkv, table, s.rows, s.seq, s.heads, s.kv_heads, s.head_dim, 0);
    const int64_t threads = s.rows * (s.heads + s.kv_heads) * (s.head_dim / 2);
    rope_naive<<<(unsigned)ceil_div(threads, 256), 256>>>(qkv, table, s, row_width(s));
    CUDA_LAUNCHED();
}
static std::vector<float2> angles(Shape s) {
    std::vector<float2> table((size_t)s.seq * s.head_dim / 2);
    rope_table_fill(table.data(), s.seq, s.head_dim, 10000.0f);
    return table;
}

// Against the rotation in float64 by an angle computed here. Tolerance: one rounding to BF16, and in float32 a rounding of the
// table's sine or cosine, of two products and of a sum: 4 units of |a| + |b|.
static void check_shape(Shape s) {
    const int64_t count = s.rows * row_width(s);
    const Bf16Host x = host_gauss_bf16(count, 1, 1.0f);
    float2 *table = device_copy(angles(s));
    char what[96];
    for (int version = 1; version <= 4; version++) for (int direction = 1; direction >= -1; direction -= 2) {
        if (version != 2 && direction < 0) continue;
        bf16 *qkv = device_copy_bf16(x);
        if (direction < 0) rope_backward_launch(qkv, table, s.rows, s.seq, s.heads, s.kv_heads, s.head_dim, 0);
        else rope_version(version, qkv, table, s);
        const Bf16Host got = host_copy_bf16(qkv, count);
        Worst turned;
        int64_t v_changed = 0;
        for (int64_t row = 0; row < s.rows; row++) for (int c = 0; c < row_width(s); c++) {
            const int64_t at = row * row_width(s) + c;
            const int head = c / s.head_dim, i = c % s.head_dim, half = s.head_dim / 2;
            if (head >= s.heads + s.kv_heads) { v_changed += got[at] != x[at]; continue; }
            const double angle = direction * (double)(row % s.seq) * pow(10000.0, -2.0 * (i % half) / s.head_dim);
            const double own = bf16_decode(x[at]), other = bf16_decode(x[i < half ? at + half : at - half]);
            const double want = own * cos(angle) + (i < half ? -other : other) * sin(angle);
            turned.add(bf16_decode(got[at]), want, BF16_UNIT * fabs(want) + 4 * F32_UNIT * (fabs(own) + fabs(other)));
        }
        snprintf(what, sizeof what, "rope version %d direction %d, %lld rows, %d + %d heads of %d", version, direction, (long long)s.rows,
                 s.heads, s.kv_heads, s.head_dim);
        turned.report(what);
        ladder_check(&ladder, v_changed == 0, "%s: %lld values of v changed", what, (long long)v_changed);
        device_free(qkv);
    }
    device_free(table);
}

static void time_shape(Shape s) {
    char shape[96];
    snprintf(shape, sizeof shape, "rope, %lld rows, %d + 2 x %d heads of %d", (long long)s.rows, s.heads, s.kv_heads, s.head_dim);
    ladder_heading(shape);
    const double bytes = 4.0 * (double)s.rows * (s.heads + s.kv_heads) * s.head_dim;
    bf16 *qkv = device_gauss_bf16(s.rows * row_width(s), 1);
    float2 *table = device_copy(angles(s));
    ladder_time_row("1 one thread a pair", bytes, [=] { rope_version(1, qkv, table, s); });
    ladder_time_row("2 vectors, 4 heads (trainer)", bytes, [=] { rope_version(2, qkv, table, s); });
    ladder_time_row("3 vectors, 1 head", bytes, [=] { rope_version(3, qkv, table, s); });
    ladder_time_row("4 vectors, 2 heads", bytes, [=] { rope_version(4, qkv, table, s); });
    device_free(qkv, table);
}

int main(int argc, char **argv) {
    const bool timed = ladder_begin(argc, argv);
    check_shape({2 * 33, 33, 5, 5, 128});
    check_shape({3 * 64, 64, 8, 2, 64});
    check_shape({17, 17, 1, 1, 16});
    if (timed) {
        time_shape({65536, 512, 5, 5, 128});
        time_shape({65536, 512, 8, 8, 128});
        time_shape({32768, 2048, 10, 10, 128});
        time_shape({16384, 2048, 16, 16, 128});
        time_shape({16384, 2048, 32, 8, 64});
    }
    return ladder_end();
}
