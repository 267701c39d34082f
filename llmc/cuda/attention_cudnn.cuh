// cuda/attention_cudnn.cuh: causal attention by cuDNN, through its graph C API ("backend API", cuDNN 9).
//
// cuDNN has no attention call there: it recognizes a graph of elementary operations (matmul, pointwise, reduction) and has a
// fused kernel for it. Operations, their order, types and shapes below are the ones it recognizes (those its own C++ frontend
// builds); in between lie virtual tensors, which exist in no memory. Q, K, V and their gradients are strided views of qkv.
//
// Two backward graphs: cuDNN's usual one adds dQ up with atomics, so two runs differ in the last bits; the deterministic one
// keeps dS, B*heads*T*T BF16 values, in the workspace. Failing to build a graph is no error: `message` says what cuDNN said.
#ifndef LLMC_CUDA_ATTENTION_CUDNN_CUH
#define LLMC_CUDA_ATTENTION_CUDNN_CUH

#include <cudnn.h>

#include "attention_flash.cuh"

typedef enum { CUDNN_FORWARD, CUDNN_BACKWARD, CUDNN_BACKWARD_DETERMINISTIC } CudnnPass;

// Unique ids of the tensors in memory; virtual ones are counted from UID_VIRTUAL.
enum { UID_Q = 1, UID_K, UID_V, UID_O, UID_STATS, UID_DO, UID_DQ, UID_DK, UID_DV, UID_SUM, UID_DQ_ACCUMULATOR, UID_SCALE, UID_MASKED, UID_ONE, UID_VIRTUAL };

// A graph and, when `plan` is not NULL, its execution plan. Its descriptors live as long as it does.
typedef struct {
    AttentionShape shape;
    CudnnPass pass;
    cudnnHandle_t handle;
    cudnnBackendDescriptor_t made[160], operations[32], plan;
    int made_count, operation_count;
    int64_t next_uid;
    int64_t engine_bytes, workspace_bytes;  // of cuDNN's engine; with the tensors that this graph keeps beside it
    int nondeterministic;          // cuDNN's own word on the engine
    float scale, masked, one;      // scalars, passed by value from here
    char message[512];             // the first failure
} CudnnGraph;

// -> 1 on success. The first failure is kept, with cuDNN's own text.
FN int cudnn_ok(CudnnGraph *g, cudnnStatus_t status, const char *what) {
    if (status == CUDNN_STATUS_SUCCESS) return 1;
    if (!g->message[0]) {
        char text[400] = "";
        cudnnGetLastErrorString(text, sizeof text);
        snprintf(g->message, sizeof g->message, "%s: %s: %s", what, cudnnGetErrorString(status), text);
    }
    return 0;
}
FN cudnnBackendDescriptor_t cudnn_make(CudnnGraph *g, cudnnBackendDescriptorType_t type) {
    cudnnBackendDescriptor_t d = NULL;
    if (g->made_count == (int)(sizeof g->made / sizeof *g->made)) fatal("a cuDNN graph of more than %d descriptors: this is a bug", g->made_count);
    if (cudnn_ok(g, cudnnBackendCreateDescriptor(type, &d), "creating a descriptor")) g->made[g->made_count++] = d;
    return d;
}
// After a failure nothing more is asked of cuDNN.
FN void cudnn_set(CudnnGraph *g, cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, int64_t count, const void *values) {
    if (!g->message[0]) cudnn_ok(g, cudnnBackendSetAttribute(d, name, type, count, values), "setting an attribute");
}
FN void cudnn_set_int(CudnnGraph *g, cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name, int64_t value) {
    cudnn_set(g, d, name, CUDNN_TYPE_INT64, 1, &value);
}
FN void cudnn_set_child(CudnnGraph *g, cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name, cudnnBackendDescriptor_t child) {
    cudnn_set(g, d, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &child);
}
FN void cudnn_finalize(CudnnGraph *g, cudnnBackendDescriptor_t d, const char *what) {
    if (!g->message[0]) cudnn_ok(g, cudnnBackendFinalize(d), what);
}

// ---------------------------------------------------------------------------------------------------------------------
// Tensors and operations. Shapes are (B, heads, rows, columns) with strides in elements.

typedef cudnnBackendDescriptor_t CudnnTensor;
typedef enum { TENSOR_MEMORY, TENSOR_VIRTUAL, TENSOR_BY_VALUE } CudnnTensorKind;

FN CudnnTensor cudnn_tensor(CudnnGraph *g, int64_t uid, cudnnDataType_t type, CudnnTensorKind kind, const int64_t dims[4], const int64_t strides[4]) {
    CudnnTensor t = cudnn_make(g, CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    const bool is_virtual = kind == TENSOR_VIRTUAL, by_value = kind == TENSOR_BY_VALUE;
    cudnn_set(g, t, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type);
    cudnn_set(g, t, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, dims);
    cudnn_set(g, t, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, strides);
    cudnn_set_int(g, t, CUDNN_ATTR_TENSOR_UNIQUE_ID, uid);
    cudnn_set_int(g, t, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, 16);
    cudnn_set(g, t, CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, &is_virtual);
    cudnn_set(g, t, CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, 1, &by_value);
    cudnn_finalize(g, t, "tensor");
    return t;
}
FN CudnnTensor cudnn_packed(CudnnGraph *g, int64_t uid, cudnnDataType_t type, CudnnTensorKind kind, int64_t b, int64_t heads, int64_t rows, int64_t columns) {
    const int64_t dims[4] = {b, heads, rows, columns}, strides[4] = {heads * rows * columns, rows * columns, columns, 1};
    return cudnn_tensor(g, uid, type, kind, dims, strides);
}
FN CudnnTensor cudnn_scalar(CudnnGraph *g, int64_t uid) { return cudnn_packed(g, uid, CUDNN_DATA_FLOAT, TENSOR_BY_VALUE, 1, 1, 1, 1); }
// heads of (B,T,*) rows of `row` elements, as (B, heads, T, D) or, transposed, (B, heads, D, T).
FN CudnnTensor cudnn_heads(CudnnGraph *g, int64_t uid, CudnnTensorKind kind, int heads, int64_t row, int transposed) {
    const int64_t B = g->shape.B, T = g->shape.T, D = g->shape.head_dim;
    const int64_t dims[4] = {B, heads, transposed ? D : T, transposed ? T : D};
    const int64_t strides[4] = {T * row, D, transposed ? 1 : row, transposed ? row : 1};
    return cudnn_tensor(g, uid, CUDNN_DATA_BFLOAT16, kind, dims, strides);
}
// A virtual (B, heads, T, T) of that type, and a virtual float32 (B, heads, T, 1).
FN CudnnTensor cudnn_scores(CudnnGraph *g, cudnnDataType_t type) {
    return cudnn_packed(g, g->next_uid++, type, TENSOR_VIRTUAL, g->shape.B, g->shape.heads, g->shape.T, g->shape.T);
}
FN CudnnTensor cudnn_rows(CudnnGraph *g) {
    return cudnn_packed(g, g->next_uid++, CUDNN_DATA_FLOAT, TENSOR_VIRTUAL, g->shape.B, g->shape.heads, g->shape.T, 1);
}

FN void cudnn_add_operation(CudnnGraph *g, cudnnBackendDescriptor_t op, const char *what) {
    cudnn_finalize(g, op, what);
    if (g->operation_count == (int)(sizeof g->operations / sizeof *g->operations)) fatal("a cuDNN graph of more than %d operations: this is a bug", g->operation_count);
    g->operations[g->operation_count++] = op;
}
// c = a b
FN void cudnn_matmul(CudnnGraph *g, CudnnTensor a, CudnnTensor b, CudnnTensor c) {
    const cudnnDataType_t type = CUDNN_DATA_FLOAT;
    cudnnBackendDescriptor_t how = cudnn_make(g, CUDNN_BACKEND_MATMUL_DESCRIPTOR), op = cudnn_make(g, CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
    cudnn_set(g, how, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type);
    cudnn_finalize(g, how, "matmul");
    cudnn_set_child(g, op, CUDNN_ATTR_OPERATION_MATMUL_ADESC, a);
    cudnn_set_child(g, op, CUDNN_ATTR_OPERATION_MATMUL_BDESC, b);
    cudnn_set_child(g, op, CUDNN_ATTR_OPERATION_MATMUL_CDESC, c);
    cudnn_set_child(g, op, CUDNN_ATTR_OPERATION_MATMUL_DESC, how);
    cudnn_add_operation(g, op, "matmul operation");
}
// y = mode(x, b), or for a selection y = t ? x : b; b and t may be NULL. axis: of an index, else -1.
FN void cudnn_pointwise(CudnnGraph *g, cudnnPointwiseMode_t mode, cudnnDataType_t compute, CudnnTensor x, CudnnTensor b, CudnnTensor t, CudnnTensor y, int axis) {
    cudnnBackendDescriptor_t how = cudnn_make(g, CUDNN_BACKEND_POINTWISE_DESCRIPTOR), op = cudnn_make(g, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    cudnn_set(g, how, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &mode);
    cudnn_set(g, how, CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, 1, &compute);
    if (axis >= 0) cudnn_set_int(g, how, CUDNN_ATTR_POINTWISE_AXIS, axis);
    cudnn_finalize(g, how, "pointwise");
    cudnn_set_child(g, op, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, how);
    cudnn_set_child(g, op, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x);
    if (b) cudnn_set_child(g, op, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, b);
    if (t) cudnn_set_child(g, op, CUDNN_ATTR_OPERATION_POINTWISE_TDESC, t);
    cudnn_set_child(g, op, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y);
    cudnn_add_operation(g, op, "pointwise operation");
}
// y = mode(x, b) in float32, y a new virtual tensor of scores or of rows.
FN CudnnTensor cudnn_scores_of(CudnnGraph *g, cudnnPointwiseMode_t mode, CudnnTensor x, CudnnTensor b) {
    CudnnTensor y = cudnn_scores(g, CUDNN_DATA_FLOAT);
    cudnn_pointwise(g, mode, CUDNN_DATA_FLOAT, x, b, NULL, y, -1);
    return y;
}
// y = x reduced along the dimensions in which y is 1 (or smaller: heads of a group).
FN void cudnn_reduce(CudnnGraph *g, cudnnReduceTensorOp_t mode, CudnnTensor x, CudnnTensor y) {
    const cudnnDataType_t type = CUDNN_DATA_FLOAT;
    cudnnBackendDescriptor_t how = cudnn_make(g, CUDNN_BACKEND_REDUCTION_DESCRIPTOR), op = cudnn_make(g, CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
    cudnn_set(g, how, CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1, &mode);
    cudnn_set(g, how, CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type);
    cudnn_finalize(g, how, "reduction");
    cudnn_set_child(g, op, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x);
    cudnn_set_child(g, op, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y);
    cudnn_set_child(g, op, CUDNN_ATTR_OPERATION_REDUCTION_DESC, how);
    cudnn_add_operation(g, op, "reduction operation");
}
FN void cudnn_reshape(CudnnGraph *g, CudnnTensor x, CudnnTensor y) {
    cudnnBackendDescriptor_t op = cudnn_make(g, CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
    cudnn_set_child(g, op, CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x);
    cudnn_set_child(g, op, CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y);
    cudnn_add_operation(g, op, "reshape operation");
}
// Scores with those of later keys replaced: row index >= column index ? s : masked.
FN CudnnTensor cudnn_causal(CudnnGraph *g, CudnnTensor s) {
    CudnnTensor row = cudnn_scores(g, CUDNN_DATA_INT32), column = cudnn_scores(g, CUDNN_DATA_INT32), seen = cudnn_scores(g, CUDNN_DATA_BOOLEAN), y = cudnn_scores(g, CUDNN_DATA_FLOAT);
    cudnn_pointwise(g, CUDNN_POINTWISE_GEN_INDEX, CUDNN_DATA_FLOAT, s, NULL, NULL, row, 2);
    cudnn_pointwise(g, CUDNN_POINTWISE_GEN_INDEX, CUDNN_DATA_FLOAT, s, NULL, NULL, column, 3);
    cudnn_pointwise(g, CUDNN_POINTWISE_CMP_GE, CUDNN_DATA_BOOLEAN, row, column, NULL, seen, -1);
    cudnn_pointwise(g, CUDNN_POINTWISE_BINARY_SELECT, CUDNN_DATA_FLOAT, s, cudnn_scalar(g, UID_MASKED), seen, y, -1);
    return y;
}

// ---------------------------------------------------------------------------------------------------------------------
// The two graphs.

FN int64_t cudnn_qkv_row(const AttentionShape *s) { return (int64_t)(s->heads + 2 * s->kv_heads) * s->head_dim; }
FN int64_t cudnn_out_row(const AttentionShape *s) { return (int64_t)s->heads * s->head_dim; }

// O = softmax(mask(scale Q K^T)) V, stats = max + ln sum.
FN void cudnn_build_forward(CudnnGraph *g) {
    const AttentionShape *s = &g->shape;
    const int64_t row = cudnn_qkv_row(s);
    CudnnTensor q = cudnn_heads(g, UID_Q, TENSOR_MEMORY, s->heads, row, 0), k = cudnn_heads(g, UID_K, TENSOR_MEMORY, s->kv_heads, row, 1);
    CudnnTensor v = cudnn_heads(g, UID_V, TENSOR_MEMORY, s->kv_heads, row, 0), o = cudnn_heads(g, UID_O, TENSOR_MEMORY, s->heads, cudnn_out_row(s), 0);
    CudnnTensor stats = cudnn_packed(g, UID_STATS, CUDNN_DATA_FLOAT, TENSOR_MEMORY, s->B, s->heads, s->T, 1);
    CudnnTensor scores = cudnn_scores(g, CUDNN_DATA_FLOAT), p = cudnn_scores(g, CUDNN_DATA_BFLOAT16);
    CudnnTensor largest = cudnn_rows(g), sum = cudnn_rows(g), log_sum = cudnn_rows(g);
    cudnn_matmul(g, q, k, scores);
    scores = cudnn_scores_of(g, CUDNN_POINTWISE_MUL, scores, cudnn_scalar(g, UID_SCALE));
    scores = cudnn_causal(g, scores);
    cudnn_reduce(g, CUDNN_REDUCE_TENSOR_MAX, scores, largest);
    CudnnTensor e = cudnn_scores_of(g, CUDNN_POINTWISE_EXP, cudnn_scores_of(g, CUDNN_POINTWISE_SUB, scores, largest), NULL);
    cudnn_reduce(g, CUDNN_REDUCE_TENSOR_ADD, e, sum);
    cudnn_pointwise(g, CUDNN_POINTWISE_LOG, CUDNN_DATA_FLOAT, sum, NULL, NULL, log_sum, -1);
    cudnn_pointwise(g, CUDNN_POINTWISE_ADD, CUDNN_DATA_FLOAT, largest, log_sum, NULL, stats, -1);
    cudnn_pointwise(g, CUDNN_POINTWISE_DIV, CUDNN_DATA_FLOAT, e, sum, NULL, p, -1);
    cudnn_matmul(g, p, v, o);
}

// dst (B, kv_heads, T, D) = x^T y summed over the heads of a group, x scores of (B, heads, T, T).
FN void cudnn_transposed_product(CudnnGraph *g, CudnnTensor x, CudnnTensor y, CudnnTensor dst) {
    const AttentionShape *s = &g->shape;
    const int64_t T = s->T, dims[4] = {s->B, s->heads, T, T}, strides[4] = {s->heads * T * T, T * T, 1, T};
    CudnnTensor transposed = cudnn_tensor(g, g->next_uid++, CUDNN_DATA_BFLOAT16, TENSOR_VIRTUAL, dims, strides);
    cudnn_reshape(g, x, transposed);
    if (s->heads == s->kv_heads) { cudnn_matmul(g, transposed, y, dst); return; }
    CudnnTensor every_head = cudnn_packed(g, g->next_uid++, CUDNN_DATA_BFLOAT16, TENSOR_VIRTUAL, s->B, s->heads, T, s->head_dim);
    cudnn_matmul(g, transposed, y, every_head);
    cudnn_reduce(g, CUDNN_REDUCE_TENSOR_ADD, every_head, dst);
}
// P = exp(mask(scale Q K^T - stats)); dV = P^T dO; dS = scale P (dO V^T - rowsum(dO O)); dK = dS^T Q; dQ = dS K.
FN void cudnn_build_backward(CudnnGraph *g) {
    const AttentionShape *s = &g->shape;
    const int64_t row = cudnn_qkv_row(s), out_row = cudnn_out_row(s), B = s->B, H = s->heads, T = s->T, D = s->head_dim;
    CudnnTensor q = cudnn_heads(g, UID_Q, TENSOR_MEMORY, s->heads, row, 0), k = cudnn_heads(g, UID_K, TENSOR_MEMORY, s->kv_heads, row, 1);
    CudnnTensor v = cudnn_heads(g, UID_V, TENSOR_MEMORY, s->kv_heads, row, 1), o = cudnn_heads(g, UID_O, TENSOR_MEMORY, s->heads, out_row, 0);
    CudnnTensor d_o = cudnn_heads(g, UID_DO, TENSOR_MEMORY, s->heads, out_row, 0), stats = cudnn_packed(g, UID_STATS, CUDNN_DATA_FLOAT, TENSOR_MEMORY, B, H, T, 1);
    CudnnTensor dq = cudnn_heads(g, UID_DQ, TENSOR_MEMORY, s->heads, row, 0), dk = cudnn_heads(g, UID_DK, TENSOR_MEMORY, s->kv_heads, row, 0);
    CudnnTensor dv = cudnn_heads(g, UID_DV, TENSOR_MEMORY, s->kv_heads, row, 0), scale = cudnn_scalar(g, UID_SCALE);

    const int64_t dims[4] = {B, H, T, D}, strides[4] = {H * T * D, T * D, H * D, 1};  // as recognized; virtual
    CudnnTensor product = cudnn_tensor(g, g->next_uid++, CUDNN_DATA_FLOAT, TENSOR_VIRTUAL, dims, strides), product_sum = cudnn_rows(g);
    CudnnTensor sum = cudnn_packed(g, UID_SUM, CUDNN_DATA_FLOAT, TENSOR_MEMORY, B, H, T, 1);
    cudnn_pointwise(g, CUDNN_POINTWISE_MUL, CUDNN_DATA_FLOAT, d_o, o, NULL, product, -1);
    cudnn_reduce(g, CUDNN_REDUCE_TENSOR_ADD, product, product_sum);
    cudnn_pointwise(g, CUDNN_POINTWISE_MUL, CUDNN_DATA_FLOAT, product_sum, cudnn_scalar(g, UID_ONE), NULL, sum, -1);

    CudnnTensor scores = cudnn_scores(g, CUDNN_DATA_FLOAT), dp = cudnn_scores(g, CUDNN_DATA_FLOAT);
    cudnn_matmul(g, q, k, scores);
    scores = cudnn_scores_of(g, CUDNN_POINTWISE_MUL, scores, scale);
    scores = cudnn_scores_of(g, CUDNN_POINTWISE_SUB, scores, stats);
    CudnnTensor p = cudnn_scores_of(g, CUDNN_POINTWISE_EXP, cudnn_causal(g, scores), NULL);
    cudnn_transposed_product(g, p, d_o, dv);

    cudnn_matmul(g, d_o, v, dp);
    CudnnTensor ds = cudnn_scores_of(g, CUDNN_POINTWISE_MUL, cudnn_scores_of(g, CUDNN_POINTWISE_SUB, dp, sum), p);
    ds = cudnn_scores_of(g, CUDNN_POINTWISE_MUL, ds, scale);
    cudnn_transposed_product(g, ds, q, dk);

    CudnnTensor k_rows = cudnn_heads(g, g->next_uid++, TENSOR_VIRTUAL, s->kv_heads, row, 0);
    cudnn_reshape(g, k, k_rows);
    if (g->pass == CUDNN_BACKWARD_DETERMINISTIC) { cudnn_matmul(g, ds, k_rows, dq); return; }
    CudnnTensor accumulator = cudnn_packed(g, UID_DQ_ACCUMULATOR, CUDNN_DATA_FLOAT, TENSOR_MEMORY, B, H, T, D);
    cudnn_matmul(g, ds, k_rows, accumulator);
    cudnn_pointwise(g, CUDNN_POINTWISE_IDENTITY, CUDNN_DATA_FLOAT, accumulator, NULL, NULL, dq, -1);
}

// ---------------------------------------------------------------------------------------------------------------------
// From a graph to a plan.

// Does cuDNN say of this engine that its results may differ between runs?
FN int cudnn_engine_nondeterministic(CudnnGraph *g, cudnnBackendDescriptor_t config) {
    cudnnBackendDescriptor_t engine = cudnn_make(g, CUDNN_BACKEND_ENGINE_DESCRIPTOR);
    cudnnBackendNumericalNote_t notes[CUDNN_NUMERICAL_NOTE_TYPE_COUNT];
    int64_t count = 0;
    if (!engine || cudnnBackendGetAttribute(config, CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &count, &engine) != CUDNN_STATUS_SUCCESS) return 0;
    count = 0;
    if (cudnnBackendGetAttribute(engine, CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE, CUDNN_NUMERICAL_NOTE_TYPE_COUNT, &count, notes) != CUDNN_STATUS_SUCCESS) return 0;
    for (int64_t i = 0; i < count; i++)
        if (notes[i] == CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC) return 1;
    return 0;
}
// Tries the engine configurations a heuristic proposes, best first; the first one whose plan can be made stays in g->plan.
FN void cudnn_try_heuristic(CudnnGraph *g, cudnnBackendDescriptor_t operation_graph, cudnnBackendHeurMode_t mode) {
    enum { MOST = 8 };
    cudnnBackendDescriptor_t heuristic = cudnn_make(g, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR), configs[MOST];
    cudnn_set_child(g, heuristic, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, operation_graph);
    cudnn_set(g, heuristic, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode);
    cudnn_finalize(g, heuristic, "heuristic");
    for (int i = 0; i < MOST; i++) configs[i] = cudnn_make(g, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    int64_t count = 0;
    if (g->message[0] || !cudnn_ok(g, cudnnBackendGetAttribute(heuristic, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR, MOST, &count, configs), "heuristic results")) return;
    for (int64_t i = 0; i < count && i < MOST && !g->plan; i++) {
        cudnnBackendDescriptor_t plan = cudnn_make(g, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
        g->message[0] = 0;  // of the configuration before
        cudnn_set(g, plan, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1, &g->handle);
        cudnn_set_child(g, plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, configs[i]);
        cudnn_finalize(g, plan, "execution plan");
        if (g->message[0]) continue;
        g->plan = plan;
        g->nondeterministic = cudnn_engine_nondeterministic(g, configs[i]);
    }
    if (!count && !g->message[0]) {
        char text[400] = "";
        cudnnGetLastErrorString(text, sizeof text);
        snprintf(g->message, sizeof g->message, "no engine for this graph: %s", text);
    }
}
// Bytes of the tensors a backward graph keeps in the workspace, each rounded up to 256.
FN int64_t cudnn_sum_bytes(const AttentionShape *s) { return ((int64_t)s->B * s->heads * s->T * 4 + 255) / 256 * 256; }
FN int64_t cudnn_accumulator_bytes(const CudnnGraph *g) {
    return g->pass == CUDNN_BACKWARD ? ((int64_t)g->shape.B * g->shape.heads * g->shape.T * g->shape.head_dim * 4 + 255) / 256 * 256 : 0;
}
FN void cudnn_graph_free(CudnnGraph *g) {
    if (!g) return;
    for (int i = g->made_count - 1; i >= 0; i--) cudnnBackendDestroyDescriptor(g->made[i]);
    free(g);
}
// One pass of a shape. `plan` is NULL where cuDNN has none, and `message` says why.
FN CudnnGraph *cudnn_graph_create(const AttentionShape *s, CudnnPass pass, cudnnHandle_t handle) {
    CudnnGraph *g = (CudnnGraph *)xcalloc(1, sizeof *g);
    g->shape = *s; g->pass = pass; g->handle = handle; g->next_uid = UID_VIRTUAL;
    g->scale = flash_scale(s); g->one = 1;
    g->masked = cudnnGetVersion() < 91000 ? -3.4028235e38f : -INFINITY;  // older ones recognize the largest finite value only
    if (pass == CUDNN_FORWARD) cudnn_build_forward(g); else cudnn_build_backward(g);
    cudnnBackendDescriptor_t operation_graph = cudnn_make(g, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    cudnn_set(g, operation_graph, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1, &g->handle);
    cudnn_set(g, operation_graph, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, g->operation_count, g->operations);
    cudnn_finalize(g, operation_graph, "operation graph");
    if (g->message[0]) return g;
    cudnn_try_heuristic(g, operation_graph, CUDNN_HEUR_MODE_A);
    if (!g->plan) {
        char first[sizeof g->message];
        memcpy(first, g->message, sizeof first);
        g->message[0] = 0;
        cudnn_try_heuristic(g, operation_graph, CUDNN_HEUR_MODE_FALLBACK);
        if (!g->plan) memcpy(g->message, first, sizeof first);
    }
    if (!g->plan) return g;
    int64_t count;
    g->message[0] = 0;
    if (!cudnn_ok(g, cudnnBackendGetAttribute(g->plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1, &count, &g->engine_bytes), "workspace size")) g->plan = NULL;
    g->workspace_bytes = (pass == CUDNN_FORWARD ? 0 : cudnn_sum_bytes(s) + cudnn_accumulator_bytes(g)) + g->engine_bytes;
    return g;
}

// Runs a plan. uids and pointers: `count` tensors; scalars are added here.
FN void cudnn_graph_run(CudnnGraph *g, const int64_t *uids, void *const *pointers, int count, void *engine_workspace, cudaStream_t stream) {
    enum { MOST = 20 };
    int64_t all_uids[MOST];
    void *all[MOST];
    if (count > MOST - 3) fatal("a cuDNN graph of %d tensors: this is a bug", count);
    memcpy(all_uids, uids, (size_t)count * sizeof *uids);
    memcpy(all, pointers, (size_t)count * sizeof *pointers);
    all_uids[count] = UID_SCALE; all[count++] = &g->scale;
    all_uids[count] = UID_MASKED; all[count++] = &g->masked;
    if (g->pass != CUDNN_FORWARD) { all_uids[count] = UID_ONE; all[count++] = &g->one; }
    cudnnBackendDescriptor_t pack = NULL;
    g->message[0] = 0;
    cudnn_ok(g, cudnnSetStream(g->handle, stream), "setting the stream");
    cudnn_ok(g, cudnnBackendCreateDescriptor(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, &pack), "creating a variant pack");
    cudnn_set(g, pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, count, all_uids);
    cudnn_set(g, pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, count, all);
    cudnn_set(g, pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &engine_workspace);
    cudnn_finalize(g, pack, "variant pack");
    if (!g->message[0]) cudnn_ok(g, cudnnBackendExecute(g->handle, g->plan, pack), "execution");
    if (g->message[0]) fatal("attention by cuDNN failed: %s; --attention flash uses the program's own kernels", g->message);
    cudnnBackendDestroyDescriptor(pack);
}
// See attention.cuh for the arguments; the workspace has workspace_bytes.
FN void cudnn_forward(CudnnGraph *g, bf16 *out, float *lse, const bf16 *qkv, void *workspace, cudaStream_t stream) {
    const AttentionShape *s = &g->shape;
    bf16 *q = (bf16 *)qkv, *k = q + cudnn_out_row(s), *v = k + (int64_t)s->kv_heads * s->head_dim;
    const int64_t uids[] = {UID_Q, UID_K, UID_V, UID_O, UID_STATS};
    void *const pointers[] = {q, k, v, out, lse};
    cudnn_graph_run(g, uids, pointers, 5, workspace, stream);
}
FN void cudnn_backward(CudnnGraph *g, bf16 *dqkv, const bf16 *dout, const bf16 *out, const float *lse, const bf16 *qkv, void *workspace, cudaStream_t stream) {
    const AttentionShape *s = &g->shape;
    const int64_t k_at = cudnn_out_row(s), v_at = k_at + (int64_t)s->kv_heads * s->head_dim;
    bf16 *q = (bf16 *)qkv;
    char *sum = (char *)workspace, *accumulator = sum + cudnn_sum_bytes(s), *engine = accumulator + cudnn_accumulator_bytes(g);
    const int64_t uids[] = {UID_Q, UID_K, UID_V, UID_O, UID_DO, UID_STATS, UID_DQ, UID_DK, UID_DV, UID_SUM, UID_DQ_ACCUMULATOR};
    void *const pointers[] = {q, q + k_at, q + v_at, (void *)out, (void *)dout, (void *)lse, dqkv, dqkv + k_at, dqkv + v_at, sum, accumulator};
    cudnn_graph_run(g, uids, pointers, g->pass == CUDNN_BACKWARD ? 11 : 10, engine, stream);
}

// The process's handle; NULL with the reason in *why when cuDNN cannot start.
FN cudnnHandle_t cudnn_handle(const char **why) {
    static cudnnHandle_t handle;
    static cudnnStatus_t status = CUDNN_STATUS_SUCCESS;
    if (!handle && status == CUDNN_STATUS_SUCCESS) status = cudnnCreate(&handle);
    *why = cudnnGetErrorString(status);
    return handle;
}

#endif
