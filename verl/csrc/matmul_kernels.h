/* Products of large bfloat16 matrices, for the layers and the head of a training step. A slab of b is packed once for all
   threads, rows of a by the thread that multiplies them. Sums over `block` values begin at zero and are added: the order of a
   sum depends on the depth and no other size. */

#define TILES 8 /* of rows at a time */

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

/* Part `part` of `parts` of the rows, times a slab */
FN void NAME(multiply)(const struct product *p, const struct slab *s, float *a, int64_t part, int64_t parts)
{
    float sums[TILES * MR * NR];
    const int64_t tiles = round_up(p->rows, MR) / MR, row = tiles * part / parts * MR, count = at_most(tiles * (part + 1) / parts * MR, p->rows) - row;
    const int64_t units = NAME(units)(s->depth), along = product_row(s->depth), tile = MR * along;
    const uint16_t *from = p->a + s->step * p->a_step + row * p->a_row;
    const int add = p->add || s->step, is_along = p->a_step == 1;
    if (is_along)
        for (int64_t i = 0; i < round_up(count, MR); i++) {
            a[i * along + units - 1] = 0.0f;
            __builtin_memcpy(a + i * along, from + at_most(i, count - 1) * p->a_row, (size_t)s->depth * 2);
        }
    else
        NAME(pack_tiles)(a, from, p->a_step, s->depth, count, p->rows - row, tile);
    for (int64_t n = 0; n < s->columns; n += NR) {
        const float *b = p->work + n * units;
        for (int64_t i = 0; add && i < count; i++) /* what the sums are added to comes from memory meanwhile */
            for (int64_t j = 0; j < NR; j += WIDTH)
                _mm_prefetch((float *)p->out + (row + i) * p->columns + s->column + n + j, _MM_HINT_T1);
        for (int64_t u = 0; u < units; u += p->block / 2)
            for (int64_t i = 0; i < count; i += MR) {
                const int64_t steps = at_most(units - u, p->block / 2);
                if (is_along)
                    NAME(tile)(u ? FURTHER : FIRST, a + i * along + u, along, 1, b + u * NR, NR, steps, sums + i * NR, NR);
                else
                    NAME(tile)(u ? FURTHER : FIRST, a + i / MR * tile + u * MR, 1, MR, b + u * NR, NR, steps, sums + i * NR, NR);
            }
        NAME(put_sums)(p, row, s->column + n, count, s->column + s->columns, add, sums);
    }
}

#undef TILES
