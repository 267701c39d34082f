// shard.h: which part of the optimizer state a rank keeps under ZeRO-1 (Rajbhandari et al., arXiv 1910.02054).
//
// Gradients are reduced bucket by bucket (llama_bucket), each bucket is dealt out to all ranks (dist_piece), and a rank's state is its
// pieces one after another. Without ZeRO every rank owns all, in the order of the parameters.
#ifndef LLMC_SHARD_H
#define LLMC_SHARD_H

#include "dist.h"
#include "llama.h"

FN int llama_ranks(const LlamaOptions *o) { return o->ranks > 1 ? o->ranks : 1; }

// Elements first .. first + count - 1 of the flat parameter buffer, whose optimizer state begins at element `state` of the rank's.
typedef struct { int64_t first, count, state; } OwnedRun;
// What a rank owns of a bucket.
FN OwnedRun owned_run(const LlamaOptions *o, const ParamTable *t, int bucket, int rank) {
    const ParamBucket b = llama_bucket(&o->config, t, bucket);
    const OwnedRun whole = {b.first, b.count, b.first};
    if (!o->zero || llama_ranks(o) == 1) return whole;
    const DistPiece p = dist_piece(b.count, rank, llama_ranks(o));
    OwnedRun run = {b.first + p.first, p.count, 0};
    for (int i = 0; i < bucket; i++) run.state += dist_piece(llama_bucket(&o->config, t, i).count, rank, llama_ranks(o)).count;
    return run;
}
// The part that a rank owns of the `count` elements from a tensor's beginning; count 0: none.
FN OwnedRun owned_part(const LlamaOptions *o, const ParamTable *t, const Param *p, int64_t count, int rank) {
    OwnedRun run = owned_run(o, t, llama_bucket_of(&o->config, p), rank);
    const int64_t from = run.first > p->offset ? run.first : p->offset;
    const int64_t end = run.first + run.count < p->offset + count ? run.first + run.count : p->offset + count;
    run.state += from - run.first;
    run.first = from;
    run.count = end > from ? end - from : 0;
    if (run.count == 0) run.state = 0;
    return run;
}
// Elements of state that this rank keeps.
FN int64_t owned_count(const LlamaOptions *o, const ParamTable *t) {
    const OwnedRun last = owned_run(o, t, llama_bucket_count(&o->config) - 1, o->rank);
    return last.state + last.count;
}
FN int state_is_sharded(const LlamaOptions *o, enum LlamaState what) {
    return o->zero && llama_ranks(o) > 1 && (what == LLAMA_ADAM_M || what == LLAMA_ADAM_V);
}
// A tensor of the state from all ranks into rank 0's `values`. own: this rank's part of it, on the host. Every rank calls it.
FN void owned_gather(const LlamaOptions *o, const ParamTable *t, const Param *p, const float *own, float *values) {
    for (int r = 0; r < llama_ranks(o); r++) {
        const OwnedRun run = owned_part(o, t, p, p->count, r);
        if (run.count) dist_to_first(values ? values + (run.first - p->offset) : NULL, own, run.count, r);
    }
}

#endif
