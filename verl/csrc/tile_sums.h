/* Sums in the tile registers of a product with panels of 48 outputs. A step has the 4 bytes of a row that one instruction multiplies:
   pairs of bfloat16 or four bytes. The includer defines TILE_PRODUCT, the instruction, and NR, the outputs. */

#define LINE 64
#define LOAD(tile, from, stride) _tile_loadd(tile, from, stride)

/* Rows of a half of `count`, for which the tiles are shaped unless they are */
INLINE int64_t NAME(shape_tiles)(int64_t count, int64_t *shape)
{
    const int64_t rows = count > AMX_ROWS / 2 ? (count + 1) / 2 : count;
    if (rows != *shape)
        AMX_SHAPE(rows);
    return *shape = rows;
}

/* Adds the products of 16 steps to the sums of rows `a`, and with `halves` of 2 of rows `lower` */
INLINE void NAME(add_steps)(const int halves, const char *a, const char *lower, int64_t stride, const char *b)
{
    LOAD(6, a, stride);
    LOAD(7, b, 3 * LINE);
    TILE_PRODUCT(0, 6, 7);
    LOAD(7, b + LINE, 3 * LINE);
    TILE_PRODUCT(1, 6, 7);
    LOAD(7, b + 2 * LINE, 3 * LINE);
    TILE_PRODUCT(2, 6, 7);
    if (halves < 2)
        return;
    LOAD(6, lower, stride);
    TILE_PRODUCT(5, 6, 7);
    LOAD(7, b + LINE, 3 * LINE);
    TILE_PRODUCT(4, 6, 7);
    LOAD(7, b, 3 * LINE);
    TILE_PRODUCT(3, 6, 7);
}

INLINE void NAME(sum_halves)(const int halves, int64_t rows, int64_t steps, const char *a, const char *lower, int64_t stride, const char *b,
                             int fetches, char *sums, char *lower_sums)
{
    int64_t s = 0;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    if (halves == 2) {
        _tile_zero(3);
        _tile_zero(4);
        _tile_zero(5);
    }
    for (; s + AMX_STEPS <= steps; s += AMX_STEPS, a += 4 * AMX_STEPS, lower += 4 * AMX_STEPS, b += 3 * AMX_STEPS * LINE) {
        for (int i = 0; fetches && i < 3 * AMX_STEPS; i++) /* they come from memory */
            _mm_prefetch(b + 8192 + i * LINE, _MM_HINT_T0);
        NAME(add_steps)(halves, a, lower, stride, b);
    }
    if (s < steps) { /* what is left, with zeros */
        char some[2][AMX_ROWS / 2][LINE] = {0}, others[3 * AMX_STEPS * LINE] = {0};
        for (int64_t i = 0; i < rows; i++) {
            __builtin_memcpy(some[0][i], a + i * stride, (size_t)(steps - s) * 4);
            if (halves == 2)
                __builtin_memcpy(some[1][i], lower + i * stride, (size_t)(steps - s) * 4);
        }
        __builtin_memcpy(others, b, (size_t)((steps - s) * 3 * LINE));
        __asm__ volatile("" ::: "memory");
        NAME(add_steps)(halves, some[0][0], some[1][0], LINE, others);
    }
    _tile_stored(0, sums, 3 * LINE);
    _tile_stored(1, sums + LINE, 3 * LINE);
    _tile_stored(2, sums + 2 * LINE, 3 * LINE);
    if (halves == 2) {
        _tile_stored(3, lower_sums, 3 * LINE);
        _tile_stored(4, lower_sums + LINE, 3 * LINE);
        _tile_stored(5, lower_sums + 2 * LINE, 3 * LINE);
    }
    __asm__ volatile("" ::: "memory");
}

/* Sums [count][NR] of up to 32 rows over `steps`, in two halves of `rows` that may overlap in one */
INLINE void NAME(sum_tiles)(int64_t count, int64_t rows, int64_t steps, const char *a, int64_t stride, const char *b, int fetches, void *sums)
{
    char *to = sums, *lower = to + (count - rows) * NR * 4;
    if (count > AMX_ROWS / 2)
        NAME(sum_halves)(2, rows, steps, a, a + (count - rows) * stride, stride, b, fetches, to, lower);
    else
        NAME(sum_halves)(1, rows, steps, a, a, stride, b, fetches, to, lower);
}

#undef LINE
#undef LOAD
#undef TILE_PRODUCT
