/* Products of tiles of registers and of blocks of scores. The includer defines UNIT, the values of an operand that a lane holds:
   one float, or two bfloat16 values that lie next to each other in the direction of the sum. Results are floats. */

#if UNIT == 1
#define MULTIPLY(a, b, sum) v_fma(a, b, sum)
#else
#define MULTIPLY(a, b, sum) _mm512_dpbf16_ps(sum, (__m512bh)(b), (__m512bh)(a))
#endif
#define NR (2 * WIDTH)             /* columns of a register tile, those of a panel */
#define MR (WIDTH == 16 ? 12 : 6)  /* its rows */

/* c[MR][NR] = a b over `steps`. ONWARD continues the sums in c; FURTHER adds sums that begin at zero to them. */
INLINE void NAME(tile)(const int how, const float *a, const int64_t a_row, const int64_t a_step, const float *b, const int64_t b_step,
                       int64_t steps, float *c, const int64_t c_row)
{
    vf acc[MR][2];
#pragma GCC unroll 12
    for (int i = 0; i < MR; i++) {
        acc[i][0] = how == ONWARD ? v_load(c + i * c_row) : v_set(0.0f);
        acc[i][1] = how == ONWARD ? v_load(c + i * c_row + WIDTH) : v_set(0.0f);
    }
    for (int64_t s = 0; s < steps; s++, a += a_step, b += b_step) {
        vf b0 = v_load(b), b1 = v_load(b + WIDTH);
#pragma GCC unroll 12
        for (int i = 0; i < MR; i++) {
            vf x = v_set(a[i * a_row]);
            acc[i][0] = MULTIPLY(x, b0, acc[i][0]);
            acc[i][1] = MULTIPLY(x, b1, acc[i][1]);
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < MR; i++) {
        float *to = c + i * c_row;
        v_store(to, how == FURTHER ? v_add(v_load(to), acc[i][0]) : acc[i][0]);
        v_store(to + WIDTH, how == FURTHER ? v_add(v_load(to + WIDTH), acc[i][1]) : acc[i][1]);
    }
}

/* -- blocks of scores: `count` queries against `keys` keys. Query i sees the keys up to `ahead` + i. -- */

INLINE int64_t NAME(units)(int64_t values) { return (values + UNIT - 1) / UNIT; }

/* Of a tile that begins with query t, the keys that its last query sees, at most `keys` */
INLINE int64_t NAME(seen)(int64_t t, int64_t ahead, int64_t keys) { return at_most(at_least(ahead + t + MR, 0), keys); }

/* scores = a across, but for tiles of which nothing is seen */
INLINE void NAME(block_scores)(const float *a, int64_t dim, int64_t padded, const float *across, int64_t count, int64_t keys, int64_t ahead, float *scores)
{
    for (int64_t p = 0; p < keys; p += NR)
        for (int64_t t = 0; t < count; t += MR)
            if (p < NAME(seen)(t, ahead, keys))
                NAME(tile)(FIRST, a + t * padded, padded, 1, across + p * padded, NR, dim, scores + t * ROW + p, ROW);
}

/* c[count][padded] += scores b, for scores [count][ROW / UNIT] and b [padded / NR][panel_rows][NR] */
INLINE void NAME(add_rows)(const float *scores, const float *b, int64_t panel_rows, int64_t padded, int64_t count, int64_t keys, int64_t ahead, float *c)
{
    for (int64_t d = 0; d < padded; d += NR)
        for (int64_t t = 0; t < count; t += MR)
            NAME(tile)(ONWARD, scores + t * (ROW / UNIT), ROW / UNIT, 1, b + d * panel_rows, NR, NAME(units)(NAME(seen)(t, ahead, keys)), c + t * padded + d, padded);
}

/* c[keys][padded] += scores^T b, for scores [count / UNIT][ROW] and b [count / UNIT][padded] */
INLINE void NAME(add_columns)(const float *scores, const float *b, int64_t padded, int64_t count, int64_t keys, int64_t ahead, float *c)
{
    float last[MR * NR];
    for (int64_t j = 0; j < keys; j += MR) {
        const int64_t first = at_most(at_least(j - ahead, 0), count) / UNIT, steps = NAME(units)(count) - first; /* first sees key j */
        const float *a = scores + first * ROW + j, *from = b + first * padded;
        for (int64_t d = 0; d < padded; d += NR)
            if (j + MR <= keys)
                NAME(tile)(ONWARD, a, 1, ROW, from + d, padded, steps, c + j * padded + d, padded);
            else {
                NAME(tile)(FIRST, a, 1, ROW, from + d, padded, steps, last, NR);
                for (int64_t i = 0; i < keys - j; i++)
                    for (int64_t n = 0; n < NR; n++)
                        c[(j + i) * padded + d + n] += last[i * NR + n];
            }
    }
}

#undef MULTIPLY
