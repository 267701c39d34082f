// dev/cuda/ladder_address.cuh: an address of random words for the ladders, every part of it something else than 0, and the same for the CPU's functions.
#ifndef LADDER_ADDRESS_CUH
#define LADDER_ADDRESS_CUH

#include "../../llmc/cpu/quantize.h"
#include "../../llmc/cuda/quantize.cuh"

FN EdenAddress an_address(int gemm, int operand) {
    EdenAddress a;
    a.seed = 0x123456789ABCDEFull; a.step = 77; a.layer = 3; a.linear = 2; a.gemm = gemm; a.operand = operand; a.rank = 5; a.micro = 2;
    return a;
}
FN QuantizeAddress cpu_address(EdenAddress a) {
    QuantizeAddress q = {a.seed, (int64_t)a.step, a.layer, a.linear, a.gemm, a.operand, a.rank, (int)a.micro};
    return q;
}

#endif
