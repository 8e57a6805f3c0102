/* The kernels of one instruction set: the includer defines ISA, TARGET and WIDTH. */

#include "simd.h"
#include "attention_kernels.h"
#define element float
#include "pointwise_kernels.h"
#undef element

static const struct kernels NAME(kernels) = {
    STRING(ISA), NAME(pack), NAME(forward), NAME(backward), NAME(sum_heads),
    {POINTWISE},
};

#undef ISA
#undef TARGET
#undef WIDTH
#undef NR
#undef MR
#undef UNIT
