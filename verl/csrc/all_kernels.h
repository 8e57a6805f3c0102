/* The kernels of one instruction set: the includer defines ISA, TARGET and WIDTH. */

#include "simd.h"
#include "attention_kernels.h"
#include "pointwise_kernels.h"

static const struct kernels NAME(kernels) = {
    STRING(ISA), NAME(pack), NAME(forward), NAME(backward), NAME(sum_heads),
    {NAME(rms_norm), NAME(rms_norm_backward), NAME(swiglu), NAME(swiglu_backward), NAME(rotate)},
};

#undef ISA
#undef TARGET
#undef WIDTH
#undef NR
#undef MR
