/* Arithmetic that sampler and trainer share, so that both compute the same bits: included for each instruction set by the
   compiled decoder, and in bfloat16 by the passes of a training step. The includer defines ISA, TARGET, WIDTH, HAS_PAIRS,
   BLOCK and the kinds of operands. */

#include "simd.h"

#undef QR
#undef WIDE_DV
#undef PER_BLOCK
#undef VECTOR
#if WIDTH == 16
#define QR 8
#define WIDE_DV 4
#else
#define QR 4
#define WIDE_DV 2
#endif
#define PER_BLOCK (BLOCK / WIDTH)
#define VECTOR ((int64_t)4 * WIDTH) /* bytes */

INLINE vf NAME(round_if)(vf x, int bf16) { return bf16 ? NAME(rounded)(x) : x; }
INLINE float NAME(round_one)(float x, int bf16)
{
    uint32_t bits;
    if (!bf16)
        return x;
    __builtin_memcpy(&bits, &x, 4);
    bits = x != x ? 0x7fc00000u : (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
    __builtin_memcpy(&x, &bits, 4);
    return x;
}
INLINE float NAME(widen_one)(uint16_t half)
{
    uint32_t bits = (uint32_t)half << 16;
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
}
INLINE void NAME(put_one)(char *row, int64_t i, float x, int kind)
{
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    if (kind == PAIRS)
        ((uint16_t *)row)[i] = (uint16_t)(bits >> 16);
    else
        ((float *)row)[i] = x;
}
INLINE void NAME(put)(char *row, int64_t i, vf x, int kind) /* x is rounded already */
{
    if (kind == PAIRS)
        NAME(store_bf16)(row + 2 * i, x);
    else
        v_store((float *)row + i, x);
}
/* acc + two products of bfloat16 values, or one product of floats or levels; w holds weights or keys, a points at activations */
INLINE vf NAME(pair)(vf acc, vi w, const char *a, int kind)
{
#if HAS_PAIRS
    if (kind == PAIRS) {
        int both;
        __builtin_memcpy(&both, a, 4);
        return _mm512_dpbf16_ps(acc, (__m512bh)w, (__m512bh)_mm512_set1_epi32(both));
    }
#endif
    const float *value = (const float *)a;
    if (kind == FLOATS || kind == INT8)
        return v_fma(v_float(w), v_set(value[0]), acc);
    acc = v_fma(v_even(w), v_set(value[0]), acc);
    return v_fma(v_odd(w), v_set(value[1]), acc);
}

/* -- rows -- */

INLINE vf NAME(load_as)(const int half, const void *row, int64_t i)
{
    return half ? v_load_bf16((const char *)row + 2 * i) : v_load((const float *)row + i);
}

/* Of `n` floats, or with `half` of bfloat16 values */
INLINE float NAME(inverse_rms)(const int half, const void *x, int64_t n, float eps)
{
    vf a = v_set(0.0f), b = a;
    int64_t i = 0;
    float rest = 0.0f;
    for (; i + 2 * WIDTH <= n; i += 2 * WIDTH) {
        vf first = NAME(load_as)(half, x, i), second = NAME(load_as)(half, x, i + WIDTH);
        a = v_fma(first, first, a);
        b = v_fma(second, second, b);
    }
    for (; i < n; i++) {
        float value = half ? NAME(widen_one)(((const uint16_t *)x)[i]) : ((const float *)x)[i];
        rest += value * value;
    }
    return 1.0f / __builtin_sqrtf((NAME(sum)(v_add(a, b)) + rest) / (float)n + eps);
}

/* silu(gate) rounded, times up */
INLINE vf NAME(gated)(vf gate, vf up, int bf16)
{
    vf y = v_div(gate, v_add(v_set(1.0f), NAME(exponential)(v_sub(v_set(0.0f), gate))));
    return NAME(round_if)(v_mul(NAME(round_if)(y, bf16), up), bf16);
}

/* -- attention -- */

/* Scores of `queries` queries with `blocks` blocks of keys. With INT8 queries are floats, and the scales of its keys follow the
   levels of a block. */
INLINE void NAME(score_blocks)(const int queries, const int blocks, const int kind, const char *q, int64_t q_stride, const char *keys,
                               int64_t block_bytes, int64_t dim, float scale, float *scores, int64_t stride)
{
    vf acc[QR * 2][PER_BLOCK];
    const int64_t steps = kind == FLOATS || kind == INT8 ? dim : dim / 2, q_step = kind == WIDENED ? 8 : 4;
#pragma GCC unroll 16
    for (int i = 0; i < queries * blocks; i++)
#pragma GCC unroll 2
        for (int j = 0; j < PER_BLOCK; j++)
            acc[i][j] = v_set(0.0f);
    for (int64_t s = 0; s < steps; s++)
#pragma GCC unroll 2
        for (int b = 0; b < blocks; b++)
#pragma GCC unroll 2
            for (int j = 0; j < PER_BLOCK; j++) {
                const int64_t vector = s * PER_BLOCK + j;
                vi k = kind == INT8 ? v_int(v_load_int8(keys + b * block_bytes + vector * WIDTH)) : v_loadi(keys + b * block_bytes + vector * VECTOR);
#pragma GCC unroll 8
                for (int i = 0; i < queries; i++)
                    acc[b * queries + i][j] = NAME(pair)(acc[b * queries + i][j], k, q + i * q_stride + s * q_step, kind);
            }
#pragma GCC unroll 2
    for (int b = 0; b < blocks; b++)
#pragma GCC unroll 8
        for (int i = 0; i < queries; i++)
#pragma GCC unroll 2
            for (int j = 0; j < PER_BLOCK; j++) {
                vf y = v_mul(acc[b * queries + i][j], v_set(scale));
                if (kind == INT8)
                    y = v_mul(y, v_load((const float *)(keys + b * block_bytes + BLOCK * dim) + j * WIDTH));
                v_store(scores + i * stride + b * BLOCK + j * WIDTH, y);
            }
}

INLINE void NAME(score_rows)(const int queries, const int kind, const char *q, int64_t q_stride, const char *keys, int64_t block_bytes,
                             int64_t dim, float scale, float *scores, int64_t stride, int64_t count)
{
    int64_t b = 0;
    if (queries * PER_BLOCK <= 4)
        for (; b + 2 <= count; b += 2)
            NAME(score_blocks)(queries, 2, kind, q, q_stride, keys + b * block_bytes, block_bytes, dim, scale, scores + b * BLOCK, stride);
    for (; b < count; b++)
        NAME(score_blocks)(queries, 1, kind, q, q_stride, keys + b * block_bytes, block_bytes, dim, scale, scores + b * BLOCK, stride);
}

/* Scores of any number of queries with `count` blocks */
INLINE void NAME(score)(const int kind, int64_t queries, const char *q, int64_t q_stride, const char *keys, int64_t block_bytes, int64_t dim,
                        float scale, float *scores, int64_t stride, int64_t count)
{
#define ROWS(n) NAME(score_rows)(n, kind, q, q_stride, keys, block_bytes, dim, scale, scores, stride, count)
    for (; queries >= QR; queries -= QR, q += QR * q_stride, scores += QR * stride)
        ROWS(QR);
    if (QR > 4 && queries >= 4) {
        ROWS(4);
        queries -= 4, q += 4 * q_stride, scores += 4 * stride;
    }
    if (queries == 3)
        ROWS(3);
    else if (queries == 2)
        ROWS(2);
    else if (queries == 1)
        ROWS(1);
#undef ROWS
}

/* out [queries][dim] += weights times values of `size` bytes from `column` on, over tokens [from, to) of consecutive blocks, token
   by token. One byte is a level; the scales of a block's tokens follow its levels. */
INLINE void NAME(value_columns)(const int queries, const int vectors, const int size, const float *weights, int64_t stride, const char *values,
                                int64_t column, int64_t block_bytes, int64_t dim, int64_t from, int64_t to, float *out)
{
    vf acc[QR][WIDE_DV];
#pragma GCC unroll 8
    for (int i = 0; i < queries; i++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++)
            acc[i][j] = v_load(out + i * dim + j * WIDTH);
    for (int64_t t = from; t < to; t++) {
        const char *block = values + t / BLOCK * block_bytes, *row = block + (t % BLOCK * dim + column) * size;
        const float scale = size == 1 ? ((const float *)(block + BLOCK * dim))[t % BLOCK] : 1.0f;
        vf v[WIDE_DV];
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++)
            v[j] = size == 1 ? v_load_int8(row + j * WIDTH) : size == 2 ? v_load_bf16(row + 2 * j * WIDTH) : v_load((const float *)row + j * WIDTH);
#pragma GCC unroll 8
        for (int i = 0; i < queries; i++) {
            vf p = v_set(size == 1 ? weights[i * stride + t] * scale : weights[i * stride + t]);
#pragma GCC unroll 4
            for (int j = 0; j < vectors; j++)
                acc[i][j] = v_fma(p, v[j], acc[i][j]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < queries; i++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++)
            v_store(out + i * dim + j * WIDTH, acc[i][j]);
}

INLINE void NAME(value_rows)(const int queries, const int size, const float *weights, int64_t stride, const char *values,
                             int64_t block_bytes, int64_t dim, int64_t from, int64_t to, float *out)
{
    const int most = queries > 4 || WIDE_DV < 4 ? 2 : 4;
    int64_t c = 0;
#define COLUMNS(n) NAME(value_columns)(queries, n, size, weights, stride, values, c, block_bytes, dim, from, to, out + c)
    for (; c + most * WIDTH <= dim; c += most * WIDTH)
        COLUMNS(most);
    for (; c < dim; c += WIDTH)
        COLUMNS(1);
#undef COLUMNS
}

INLINE void NAME(add_values)(const int size, int64_t queries, const float *weights, int64_t stride, const char *values, int64_t block_bytes,
                             int64_t dim, int64_t from, int64_t to, float *out)
{
#define ROWS(n) NAME(value_rows)(n, size, weights, stride, values, block_bytes, dim, from, to, out)
    for (; queries >= QR; queries -= QR, weights += QR * stride, out += QR * dim)
        ROWS(QR);
    if (QR > 4 && queries >= 4) {
        ROWS(4);
        queries -= 4, weights += 4 * stride, out += 4 * dim;
    }
    if (queries == 3)
        ROWS(3);
    else if (queries == 2)
        ROWS(2);
    else if (queries == 1)
        ROWS(1);
#undef ROWS
}

/* Scores of the positions [low, end) to weights, and zeros elsewhere in [first, last); returns 1 / their sum. The order of
   the sum is a function of positions alone. first, last: multiples of BLOCK. `lse`: for the log of the sum of exp(score), or NULL. */
INLINE float NAME(weigh)(float *scores, int64_t first, int64_t low, int64_t end, int64_t last, float *lse)
{
    const int64_t begin = low / BLOCK * BLOCK, stop = round_up(end, BLOCK);
    vf top = v_set(-INFINITY), total = v_set(0.0f);
    for (int64_t t = first; t < low; t++)
        scores[t] = t < begin ? 0.0f : -INFINITY;
    for (int64_t t = end; t < stop; t++)
        scores[t] = -INFINITY;
    for (int64_t t = begin; t < stop; t += WIDTH)
        top = v_max(v_load(scores + t), top);
    top = v_set(NAME(largest)(top));
    for (int64_t t = begin; t < stop; t += WIDTH) {
        vf e = NAME(exponential)(v_sub(v_load(scores + t), top));
        v_store(scores + t, e);
        total = v_add(total, e);
    }
    for (int64_t t = stop; t < last; t++)
        scores[t] = 0.0f;
    const float sum = NAME(sum)(total);
    if (lse)
        *lse = NAME(largest)(top) + __builtin_logf(sum);
    return 1.0f / sum;
}
