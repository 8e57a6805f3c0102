/* Products of large bfloat16 matrices, for the layers and the head of a training step. A slab of b is packed once for all
   threads, rows of a by the thread that multiplies them. Sums over `block` values begin at zero and are added: the order of a
   sum depends on the depth and no other size. */

#if HAS_TILES
#define TILES 3 /* of rows at a time */
#define TILE_ROWS AMX_ROWS
#else
#define TILES 8
#define TILE_ROWS MR
#endif

/* Part `part` of `parts` of a slab's columns as pairs [columns / NR][depth / 2][NR] */
FN void NAME(pack_slab)(const struct product *p, const struct slab *s, int64_t part, int64_t parts)
{
    const int64_t panels = round_up(s->columns, NR) / NR, first = panels * part / parts * NR, units = NAME(units)(s->depth);
    const int64_t count = at_most(panels * (part + 1) / parts * NR, s->columns) - first;
    const uint16_t *from = p->b + s->step * p->b_step + (s->column + first) * p->b_column;
    float *to = p->work + first * units;
    if (p->b_step == 1)
        NAME(pack_across)(to, from, p->b_column, count, s->depth, 2 * units);
    else
        NAME(pack_along)(to, from, p->b_step, s->depth, count, round_up(count, NR), units * NR, NR);
}

/* Sums [count][NR] to their place in the product, its columns up to `end` */
INLINE void NAME(put_sums)(const struct product *p, int64_t row, int64_t column, int64_t count, int64_t end, int add, const float *sums)
{
    for (int64_t i = 0; i < count; i++, sums += NR)
        for (int64_t j = 0; j < NR && column + j < end; j += WIDTH) {
            const __mmask16 mask = (__mmask16)((1u << at_most(end - column - j, WIDTH)) - 1);
            const int64_t at = (row + i) * p->columns + column + j;
            vf x = v_load(sums + j);
            if (p->halves)
                _mm256_mask_storeu_epi16((uint16_t *)p->out + at, mask, v_halves(x));
            else
                _mm512_mask_storeu_ps((float *)p->out + at, mask, add ? v_add(_mm512_maskz_loadu_ps(mask, (float *)p->out + at), x) : x);
        }
}

#if HAS_TILES
/* Columns of rows [depth] as rows of pairs, with zeros up to whole tiles; `left`: columns in memory */
INLINE void NAME(pack_rows)(float *to, const uint16_t *from, int64_t stride, int64_t depth, int64_t count, int64_t left, int64_t along)
{
    for (int64_t n = 0; n < depth; n += 2 * AMX_STEPS)
        for (int64_t i = 0; i < count; i += WIDTH) {
            vi x[WIDTH];
#pragma GCC unroll 16
            for (int j = 0; j < WIDTH; j++) {
                const uint16_t *row = from + (n + 2 * j) * stride + i;
                vf a = n + 2 * j < depth ? NAME(load)(1, row, left - i) : v_set(0.0f);
                x[j] = v_int(NAME(join)(a, n + 2 * j + 1 < depth ? NAME(load)(1, row + stride, left - i) : v_set(0.0f)));
            }
            NAME(transpose)(x);
#pragma GCC unroll 16
            for (int j = 0; j < WIDTH; j++)
                v_store(to + (i + j) * along + n / 2, v_float(x[j]));
        }
}

/* sums [32][NR] = a b over `steps` pairs, or with FURTHER they are added to it. A last part of a tile of b is read from `end`. */
INLINE void NAME(sum_tiles)(const int how, const float *a, int64_t along, const float *b, const float *end, int64_t steps, float *sums)
{
    float more[AMX_ROWS * NR] __attribute__((aligned(64))), *to = how == FURTHER ? more : sums;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t s = 0; s < steps; s += AMX_STEPS) {
        const float *from = s + AMX_STEPS <= steps ? b + s * NR : end;
        _tile_loadd(4, a + s, along * 4);
        _tile_loadd(7, from, NR * 4);
        _tile_dpbf16ps(0, 4, 7);
        _tile_loadd(5, a + s + AMX_ROWS / 2 * along, along * 4);
        _tile_dpbf16ps(2, 5, 7);
        _tile_loadd(7, from + WIDTH, NR * 4);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, to, NR * 4);
    _tile_stored(1, to + WIDTH, NR * 4);
    _tile_stored(2, to + AMX_ROWS / 2 * NR, NR * 4);
    _tile_stored(3, to + AMX_ROWS / 2 * NR + WIDTH, NR * 4);
    for (int64_t i = 0; how == FURTHER && i < AMX_ROWS * NR; i += WIDTH)
        v_store(sums + i, v_add(v_load(sums + i), v_load(more + i)));
}
#else
/* Columns of rows [depth] as pairs of two rows, [count / MR] tiles of [depth / 2][MR]; `left`: columns in memory */
INLINE void NAME(pack_tiles)(float *to, const uint16_t *from, int64_t stride, int64_t depth, int64_t count, int64_t left, int64_t tile)
{
    for (int64_t n = 0; n < depth; n += 2, from += 2 * stride)
        for (int64_t i = 0; i < count; i += MR) { /* a vector is longer than a row of the tile, and the next row covers its end */
            const int64_t width = at_most(left - i, WIDTH);
            _mm_prefetch(from + 16 * stride + i, _MM_HINT_T0);
            _mm_prefetch(from + 17 * stride + i, _MM_HINT_T0);
            vf a = NAME(load)(1, from + i, width), b = n + 1 < depth ? NAME(load)(1, from + stride + i, width) : v_set(0.0f);
            v_store(to + i / MR * tile + n / 2 * MR, NAME(join)(a, b));
        }
}

#endif

/* Rows of a, or columns of it, as the tiles read them */
INLINE void NAME(pack_left)(const struct product *p, const struct slab *s, float *a, int64_t row, int64_t count)
{
    const int64_t units = NAME(units)(s->depth), along = product_row(s->depth);
    const uint16_t *from = p->a + s->step * p->a_step + row * p->a_row;
    if (p->a_step == 1)
        for (int64_t i = 0; i < round_up(count, TILE_ROWS); i++) {
#if HAS_TILES
            __builtin_memset(a + i * along + units - 1, 0, (size_t)(round_up(units, AMX_STEPS) - units + 1) * 4);
#else
            a[i * along + units - 1] = 0.0f;
#endif
            __builtin_memcpy(a + i * along, from + at_most(i, count - 1) * p->a_row, (size_t)s->depth * 2);
        }
    else
#if HAS_TILES
        NAME(pack_rows)(a, from, p->a_step, s->depth, round_up(count, TILE_ROWS), p->rows - row, along);
#else
        NAME(pack_tiles)(a, from, p->a_step, s->depth, count, p->rows - row, MR * along);
#endif
}

/* Part `part` of `parts` of the rows, times a slab */
FN void NAME(multiply)(const struct product *p, const struct slab *s, float *a, int64_t part, int64_t parts)
{
    float sums[TILES * TILE_ROWS * NR] __attribute__((aligned(64)));
    const int64_t tiles = round_up(p->rows, TILE_ROWS) / TILE_ROWS, row = tiles * part / parts * TILE_ROWS;
    const int64_t count = at_most(tiles * (part + 1) / parts * TILE_ROWS, p->rows) - row;
    const int64_t units = NAME(units)(s->depth), along = product_row(s->depth);
    const int add = p->add || s->step;
    if (count <= 0)
        return;
    NAME(pack_left)(p, s, a, row, count);
#if HAS_TILES
    float end[AMX_STEPS * NR] __attribute__((aligned(64))) = {0};
    AMX_SHAPE(AMX_ROWS / 2);
#else
    const int is_along = p->a_step == 1;
#endif
    for (int64_t n = 0; n < s->columns; n += NR) {
        const float *b = p->work + n * units;
        for (int64_t i = 0; add && i < count; i++) /* what the sums are added to comes from memory meanwhile */
            for (int64_t j = 0; j < NR; j += WIDTH)
                _mm_prefetch((float *)p->out + (row + i) * p->columns + s->column + n + j, _MM_HINT_T1);
#if HAS_TILES
        __builtin_memcpy(end, b + units / AMX_STEPS * AMX_STEPS * NR, (size_t)(units % AMX_STEPS * NR) * 4);
        __asm__ volatile("" ::: "memory");
#endif
        for (int64_t u = 0; u < units; u += p->block / 2)
            for (int64_t i = 0; i < count; i += TILE_ROWS) {
                const int64_t steps = at_most(units - u, p->block / 2);
#if HAS_TILES
                NAME(sum_tiles)(u ? FURTHER : FIRST, a + i * along + u, along, b + u * NR, end, steps, sums + i * NR);
#else
                if (is_along)
                    NAME(tile)(u ? FURTHER : FIRST, a + i * along + u, along, 1, b + u * NR, NR, steps, sums + i * NR, NR);
                else
                    NAME(tile)(u ? FURTHER : FIRST, a + i * along + u * MR, 1, MR, b + u * NR, NR, steps, sums + i * NR, NR);
#endif
            }
        NAME(put_sums)(p, row, s->column + n, count, s->column + s->columns, add, sums);
    }
#if HAS_TILES
    _tile_release();
#endif
}

#undef TILES
#undef TILE_ROWS
