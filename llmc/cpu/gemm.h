// cpu/gemm.h: C = alpha op(A) op(B) + beta C in float32, row-major.
//
// OpenBLAS multiplies, OpenMP shares the work: the rows of C are cut into tasks, and a thread calls a single-threaded
// sgemm on each of its tasks. (OpenBLAS's own thread pool and OpenMP's would otherwise spin against each other.)
// Without OpenBLAS (-DNO_OPENBLAS) a plain loop nest does the same sum, several times slower.
#ifndef LLMC_CPU_GEMM_H
#define LLMC_CPU_GEMM_H

#ifdef _OPENMP
#include <omp.h>
#endif
#ifndef NO_OPENBLAS
#include <cblas.h>
#undef I                               // <complex.h>, which cblas.h includes, takes this name
#endif

#include "../common.h"

// Threads that a parallel region will have.
FN int thread_count(void) {
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}
// Number of the calling thread inside a parallel region, from 0.
FN int thread_index(void) {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

// op(A) is (M,K), op(B) is (K,N), C is (M,N); op transposes when its flag is set. lda, ldb, ldc: elements from one row of
// the array as it lies in memory to the next. beta = 0 never reads C. Runs on the calling thread alone.
#ifndef NO_OPENBLAS
FN void gemm_serial(int trans_a, int trans_b, int64_t M, int64_t N, int64_t K, float alpha, const float *a, int64_t lda,
                    const float *b, int64_t ldb, float beta, float *c, int64_t ldc) {
    cblas_sgemm(CblasRowMajor, trans_a ? CblasTrans : CblasNoTrans, trans_b ? CblasTrans : CblasNoTrans, (blasint)M, (blasint)N,
                (blasint)K, alpha, a, (blasint)lda, b, (blasint)ldb, beta, c, (blasint)ldc);
}
// Called before the first parallel region that multiplies.
FN void gemm_prepare(void) {
    static int ready = 0;
    if (!ready) { openblas_set_num_threads(1); ready = 1; }
}
#else
FN void gemm_serial(int trans_a, int trans_b, int64_t M, int64_t N, int64_t K, float alpha, const float *a, int64_t lda,
                    const float *b, int64_t ldb, float beta, float *c, int64_t ldc) {
    for (int64_t i = 0; i < M; i++) {
        float *row = c + i * ldc;
        for (int64_t j = 0; j < N; j++) row[j] = beta == 0 ? 0 : beta * row[j];
        if (trans_b) {
            for (int64_t j = 0; j < N; j++) {
                const float *bj = b + j * ldb;
                float sum = 0;
#pragma omp simd reduction(+ : sum)
                for (int64_t k = 0; k < K; k++) sum += (trans_a ? a[k * lda + i] : a[i * lda + k]) * bj[k];
                row[j] += alpha * sum;
            }
        } else {
            for (int64_t k = 0; k < K; k++) {
                const float aik = alpha * (trans_a ? a[k * lda + i] : a[i * lda + k]), *bk = b + k * ldb;
                for (int64_t j = 0; j < N; j++) row[j] += aik * bk[j];
            }
        }
    }
}
FN void gemm_prepare(void) {}
#endif

// The same on all threads. Rows of C are cut into tasks by M alone, since sgemm's order of summation depends on the shape it is
// given: so the bits do not depend on the number of threads.
FN void gemm(int trans_a, int trans_b, int64_t M, int64_t N, int64_t K, float alpha, const float *a, int64_t lda,
             const float *b, int64_t ldb, float beta, float *c, int64_t ldc) {
    gemm_prepare();
    const int64_t eighth = (M + 127) / 128 * 16;                       // whole tiles of sgemm's inner kernel
    const int64_t rows = eighth < 64 ? 64 : eighth > 512 ? 512 : eighth;
#pragma omp parallel for schedule(dynamic)
    for (int64_t i = 0; i < M; i += rows) {
        const int64_t n = M - i < rows ? M - i : rows;
        gemm_serial(trans_a, trans_b, n, N, K, alpha, trans_a ? a + i : a + i * lda, lda, b, ldb, beta, c + i * ldc, ldc);
    }
}

#endif
