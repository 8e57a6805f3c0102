/* Sums of products of bfloat16 pairs in the tile registers of Intel's processors (AMX). A product of tiles adds 32 products to each
   sum, in one order, as oneDNN does. Rows are computed in two halves of the same number, which may overlap in one row. */

#ifndef VERL_AMX_H
#define VERL_AMX_H

#if defined(__clang__) ? __clang_major__ >= 16 : __GNUC__ >= 12
#define HAVE_AMX 1
#define AMX_TARGET __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512bf16,amx-tile,amx-bf16")))

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { AMX_ROWS = 32, AMX_STEPS = 16 }; /* rows of two halves, steps of a tile */

/* Whether the processor has the tiles and the kernel lets this process use them */
static int amx_allowed(void)
{
    enum { REQUEST = 0x1023, TILE_DATA = 18 }; /* ARCH_REQ_XCOMP_PERM of arch_prctl(2) */
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("amx-bf16") && !syscall(SYS_arch_prctl, REQUEST, TILE_DATA);
}

/* Tiles 0 to 6 with `rows` rows of 64 bytes; tile 7 with 16, a tile of the right operand. To be released by _tile_release(). */
#define AMX_SHAPE(count)                                                                                                      \
    do {                                                                                                                      \
        struct {                                                                                                              \
            uint8_t palette, start, reserved[14];                                                                             \
            uint16_t bytes[16];                                                                                               \
            uint8_t rows[16];                                                                                                 \
        } tiles_ = {.palette = 1};                                                                                            \
        for (int t = 0; t < 8; t++)                                                                                           \
            tiles_.bytes[t] = 64, tiles_.rows[t] = (uint8_t)(t < 7 ? (count) : AMX_STEPS);                                    \
        __asm__ volatile("" ::: "memory");                                                                                    \
        _tile_loadconfig(&tiles_);                                                                                            \
        __asm__ volatile("" ::: "memory");                                                                                    \
    } while (0)

#endif

#endif
