// adamw.h: one parameter's AdamW update (Loshchilov and Hutter, arXiv 1711.05101), host and device, one definition.
// IEEE float32 in the stated order, never contracted (see formats.h), so that equal gradients give equal weights everywhere.
#ifndef LLMC_ADAMW_H
#define LLMC_ADAMW_H

#include <math.h>

#include "common.h"
#include "formats.h"

// What is the same for every parameter of a step.
typedef struct {
    float lr, beta1, beta2, eps, weight_decay;
    float rest1, rest2;                  // 1 - beta
    float inv_bias1, inv_bias2;          // 1 / (1 - beta^t), t = step + 1
} AdamWScalars;

// step counts from 0: the run's steps, skipped ones too. Those leave m and v as they were, so that a step skipped in the first few
// dozen has the corrections divide by a little too much; later both are 1.
FN AdamWScalars adamw_scalars(float lr, float beta1, float beta2, float eps, float weight_decay, int64_t step) {
    AdamWScalars k;
    const double t = (double)step + 1;
    k.lr = lr; k.beta1 = beta1; k.beta2 = beta2; k.eps = eps; k.weight_decay = weight_decay;
    k.rest1 = 1.0f - beta1; k.rest2 = 1.0f - beta2;
    k.inv_bias1 = (float)(1.0 / (1.0 - pow((double)beta1, t)));
    k.inv_bias2 = (float)(1.0 / (1.0 - pow((double)beta2, t)));
    return k;
}

// g: gradient, clipped; p: weight. Updates m and v; returns the new weight, unrounded:
//   m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2;  p - lr * (mhat / (sqrt(vhat) + eps) + decay * p)
HD float adamw_update(AdamWScalars k, float p, float g, int decay, float *m, float *v) {
    *m = f32_add(f32_mul(k.beta1, *m), f32_mul(k.rest1, g));
    *v = f32_add(f32_mul(k.beta2, *v), f32_mul(f32_mul(k.rest2, g), g));
    const float denominator = f32_add(f32_sqrt(f32_mul(*v, k.inv_bias2)), k.eps);
    const float pull = f32_mul(decay ? k.weight_decay : 0.0f, p);
    return f32_sub(p, f32_mul(k.lr, f32_add(f32_div(f32_mul(*m, k.inv_bias1), denominator), pull)));
}

#endif
