// quantizer_table.c: prints the table of quantizer_table.h for 2^22 samples of N(0,1). Exit status 1 if a line is outside the
// tolerance: 1 % of the expected relative MSE, 3e-4 of the expected misalignment.
#include "quantizer_table.h"

int main(void) {
    const int outside = table_run(1);
    if (outside) fatal("%d of the %d quantizers are outside the tolerance: the lines marked OUTSIDE", outside, TABLE_COUNT);
    return 0;
}
