/* Operations of a training step in bfloat16, for processors whose matrix products read pairs of bfloat16 values. The forward
   has the sampler's arithmetic and order of sums: both then compute the same bits. */

#include "shared_kernels.h"
#define element uint16_t
#include "pointwise_kernels.h"
#define UNIT 2
#include "tile_kernels.h"

#define HALF(pointer) ((uint16_t *)(pointer))

/* out [count], float32: the inverse RMS of rows of x */
FN void NAME(inverse_rms_rows)(const struct rows *r, int64_t begin, int64_t end)
{
    for (int64_t t = begin; t < end; t++)
        r->out[t] = NAME(inverse_rms)(1, HALF(r->x) + t * r->columns, r->columns, r->eps);
}

/* Values of two rows as pairs; a and b are rounded */
INLINE vf NAME(join)(vf a, vf b) { return v_float(_mm512_or_si512(_mm512_srli_epi32(v_int(a), 16), v_int(b))); }

/* Lane i of vector j to lane j of vector i */
INLINE void NAME(transpose)(vi x[WIDTH])
{
    vi y[WIDTH];
#pragma GCC unroll 4
    for (int i = 0; i < WIDTH; i += 4) {
        vi a = _mm512_unpacklo_epi32(x[i], x[i + 1]), b = _mm512_unpackhi_epi32(x[i], x[i + 1]);
        vi c = _mm512_unpacklo_epi32(x[i + 2], x[i + 3]), d = _mm512_unpackhi_epi32(x[i + 2], x[i + 3]);
        y[i] = _mm512_unpacklo_epi64(a, c), y[i + 1] = _mm512_unpackhi_epi64(a, c);
        y[i + 2] = _mm512_unpacklo_epi64(b, d), y[i + 3] = _mm512_unpackhi_epi64(b, d);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        vi a = _mm512_shuffle_i32x4(y[i], y[i + 4], 0x88), b = _mm512_shuffle_i32x4(y[i + 8], y[i + 12], 0x88);
        vi c = _mm512_shuffle_i32x4(y[i], y[i + 4], 0xdd), d = _mm512_shuffle_i32x4(y[i + 8], y[i + 12], 0xdd);
        x[i] = _mm512_shuffle_i32x4(a, b, 0x88), x[i + 8] = _mm512_shuffle_i32x4(a, b, 0xdd);
        x[i + 4] = _mm512_shuffle_i32x4(c, d, 0x88), x[i + 12] = _mm512_shuffle_i32x4(c, d, 0xdd);
    }
}

/* Rows [count][dim] as pairs of neighbours in a row, [count / NR][padded / 2][NR] */
INLINE void NAME(pack_across)(float *to, const uint16_t *from, int64_t stride, int64_t count, int64_t dim, int64_t padded)
{
    for (int64_t n = 0; n < round_up(count, PAD); n += WIDTH)
        for (int64_t d = 0; d < padded; d += 2 * WIDTH) {
            const int64_t width = at_least(at_most(dim - d, 2 * WIDTH), 0);
            vi x[WIDTH];
#pragma GCC unroll 16
            for (int i = 0; i < WIDTH; i++)
                x[i] = n + i < count ? _mm512_maskz_loadu_epi16((__mmask32)((1ull << width) - 1), from + (n + i) * stride + d) : _mm512_setzero_si512();
            NAME(transpose)(x);
            for (int64_t i = 0; i < WIDTH && 2 * i < padded - d; i++)
                v_store(to + n / NR * NR * (padded / 2) + (d / 2 + i) * NR + n % NR, v_float(x[i]));
        }
}

/* Rows [count][dim] as pairs of neighbours in a column: the pair of rows 2n and 2n + 1 has dims [d, d + NR) at d / NR * panel + n row */
INLINE void NAME(pack_along)(float *to, const uint16_t *from, int64_t stride, int64_t count, int64_t dim, int64_t padded, int64_t panel, int64_t row)
{
    for (int64_t n = 0; n < count; n += 2)
        for (int64_t d = 0; d < padded; d += WIDTH) {
            const int64_t left = at_least(dim - d, 0);
            const uint16_t *p = from + n * stride + d;
            vf a = NAME(load)(1, p, left), b = n + 1 < count ? NAME(load)(1, p + stride, left) : v_set(0.0f);
            v_store(to + d / NR * panel + n / 2 * row + d % NR, NAME(join)(a, b));
        }
}

/* Keys and values of a range in blocks: keys [padded / 2][BLOCK][2], then values [BLOCK][padded], padded with zeros */
FN void NAME(pack)(const struct call *c, const struct work *w, int backward, int64_t index, int64_t kv_head)
{
    const struct range *r = c->ranges + index;
    const int64_t dim = c->head_dim, padded = w->padded;
    uint16_t *to = HALF(w->keys_across) + (kv_head * c->packed_rows + r->row) * 2 * padded;
    const uint16_t *k = HALF(c->k.data) + r->first * c->k.token + kv_head * c->k.head;
    const uint16_t *v = HALF(c->v.data) + r->first * c->v.token + kv_head * c->v.head;
    if (backward) {
        const int64_t units = (kv_head * c->packed_rows + r->row) * (padded / 2), panel = round_up(r->count, PAD) / 2 * NR;
        NAME(pack_across)(w->keys_across + units, k, c->k.token, r->count, dim, padded);
        NAME(pack_across)(w->values_across + units, v, c->v.token, r->count, dim, padded);
        NAME(pack_along)(w->keys + units, k, c->k.token, r->count, dim, padded, panel, NR);
        return;
    }
    __builtin_memset(to, 0, (size_t)(round_up(r->count, BLOCK) * 2 * padded) * 2);
    for (int64_t t = 0; t < r->count; t++, k += c->k.token, v += c->v.token) {
        uint16_t *block = to + t / BLOCK * 2 * BLOCK * padded, *key = block + t % BLOCK * 2;
        for (int64_t i = 0; i < dim; i++)
            key[i / 2 * 2 * BLOCK + i % 2] = k[i];
        __builtin_memcpy(block + BLOCK * padded + t % BLOCK * padded, v, (size_t)dim * 2);
    }
}

/* Attention of the queries of a segment that read one head of keys; `head` is that head */
FN void NAME(forward)(const struct call *c, const struct work *w, int64_t index, int64_t head)
{
    const struct segment *s = c->segments + index;
    const int64_t dim = c->head_dim, padded = w->padded, group = c->num_heads / c->num_kv_heads, stride = scores_stride(c);
    const int64_t q_bytes = padded * 2, block = 2 * BLOCK * padded * 2, tile = tile_tokens(c);
    const char *packed = (char *)(HALF(w->keys_across) + head * c->packed_rows * 2 * padded);
    const int64_t before = s->prefix < 0 ? 0 : c->ranges[s->prefix].count;
    const char *own = packed + c->ranges[s->own].row * 2 * padded * 2, *prefix = before ? packed + c->ranges[s->prefix].row * 2 * padded * 2 : 0;
    const char *own_values = own + BLOCK * padded * 2, *prefix_values = before ? prefix + BLOCK * padded * 2 : 0;
    float inverse[group * tile];
    for (int64_t first = 0; first < s->count; first += tile) {
        const int64_t count = at_most(tile, s->count - first), end = first + count, rows = count * group;
        __builtin_memset(w->q, 0, (size_t)(rows * q_bytes));
        __builtin_memset(w->out, 0, (size_t)(rows * padded) * 4);
        for (int64_t row = 0; row < rows; row++)
            __builtin_memcpy((char *)w->q + row * q_bytes, HALF(c->q.data) + (s->first + first + row / group) * c->q.token + (head * group + row % group) * c->q.head, (size_t)dim * 2);
        if (before)
            NAME(score)(PAIRS, rows, (char *)w->q, q_bytes, prefix, block, padded, c->scale, w->scores, stride, round_up(before, BLOCK) / BLOCK);
        NAME(score)(PAIRS, rows, (char *)w->q, q_bytes, own, block, padded, c->scale, w->scores + before, stride, round_up(end, BLOCK) / BLOCK);
        for (int64_t row = 0; row < rows; row++) {
            const int64_t t = first + row / group;
            float *lse = c->lse + (s->first + t) * c->num_heads + head * group + row % group;
            inverse[row] = NAME(weigh)(w->scores + row * stride, 0, 0, before + t + 1, round_up(before + end, BLOCK), lse);
        }
        if (before)
            NAME(add_values)(2, rows, w->scores, stride, prefix_values, block, padded, 0, before, w->out);
        NAME(add_values)(2, rows, w->scores + before, stride, own_values, block, padded, 0, end, w->out);
        for (int64_t row = 0; row < rows; row++) {
            char *to = (char *)(HALF(c->out.data) + (s->first + first + row / group) * c->out.token + (head * group + row % group) * c->out.head);
            for (int64_t d = 0; d < dim; d++)
                NAME(put_one)(to, d, NAME(round_one)(w->out[row * padded + d] * inverse[row], 1), PAIRS);
        }
    }
}

/* -- backward, as in attention_kernels.h: products of bfloat16 values, summed as floats -- */

/* Of `count` queries: weights and gradients of scores as pairs of two queries [count / 2][ROW], and the latter also as pairs
   of two keys [count][ROW / 2]. Zeros as far as tiles read. */
INLINE void NAME(differentiate)(const struct work *w, int64_t count, int64_t keys, int64_t ahead, const float *lse, int64_t lse_stride,
                                const float *delta, float scale)
{
    for (int64_t i = 0; i < count; i += 2) {
        const int64_t stop = at_most(round_up(NAME(seen)(i / MR * MR, ahead, keys) + MR, WIDTH), ROW);
        for (int64_t t = 0; t < stop; t += WIDTH) {
            vf p[2], d[2];
#pragma GCC unroll 2
            for (int j = 0; j < 2; j++) {
                const int64_t row = at_most(i + j, count - 1), end = i + j < count ? at_most(ahead + i + j + 1, keys) : 0;
                const __mmask16 visible = (__mmask16)((1u << at_most(at_least(end - t, 0), WIDTH)) - 1);
                vf e = NAME(exponential)(v_fma(v_load(w->scores + row * ROW + t), v_set(scale), v_set(-lse[row * lse_stride])));
                vf slope = v_mul(v_mul(e, v_set(scale)), v_sub(v_load(w->d_scores + row * ROW + t), v_set(delta[row])));
                p[j] = NAME(rounded)(_mm512_maskz_mov_ps(visible, e));
                d[j] = NAME(rounded)(_mm512_maskz_mov_ps(visible, slope));
                NAME(store_bf16)((char *)(w->d_rows + (i + j) * (ROW / 2)) + 2 * t, d[j]);
            }
            v_store(w->weights + i / 2 * ROW + t, NAME(join)(p[0], p[1]));
            v_store(w->d_weights + i / 2 * ROW + t, NAME(join)(d[0], d[1]));
        }
    }
}

/* Rows of a head as pairs in both directions */
INLINE void NAME(take)(float *rows, float *pairs, const struct heads *from, int64_t head, int64_t first, int64_t count, int64_t dim, int64_t padded)
{
    const uint16_t *row = HALF(from->data) + first * from->token + head * from->head;
    NAME(pack_along)(pairs, row, from->token, count, dim, padded, NR, padded);
    __builtin_memset(rows, 0, (size_t)(QUERIES * padded) * 2);
    for (int64_t i = 0; i < count; i++)
        __builtin_memcpy((char *)rows + i * padded * 2, row + i * from->token, (size_t)dim * 2);
}

INLINE void NAME(pull_back)(const struct call *c, const struct work *w, const struct segment *s, const struct range *r, int64_t head, int64_t ahead)
{
    const int64_t padded = w->padded, half = padded / 2, from = (head / (c->num_heads / c->num_kv_heads) * c->packed_rows + r->row) * half;
    for (int64_t first = 0; first < r->count; first += KEYS) {
        const int64_t keys = at_most(r->count - first, KEYS), to = (head * c->tokens + r->first + first) * padded;
        for (int64_t done = at_least(first - ahead, 0) / QUERIES * QUERIES; done < s->count; done += QUERIES) {
            const int64_t count = at_most(s->count - done, QUERIES), before = ahead + done - first;
            NAME(take)(w->q, w->q_pairs, &c->q, head, s->first + done, count, c->head_dim, padded);
            NAME(take)(w->d_out, w->d_out_pairs, &c->d_out, head, s->first + done, count, c->head_dim, padded);
            NAME(block_scores)(w->q, half, half, w->keys_across + from + first * half, count, keys, before, w->scores);
            NAME(block_scores)(w->d_out, half, half, w->values_across + from + first * half, count, keys, before, w->d_scores);
            NAME(differentiate)(w, count, keys, before, c->lse + (s->first + done) * c->num_heads + head, c->num_heads, w->delta + done, c->scale);
            NAME(add_columns)(w->weights, w->d_out_pairs, padded, count, keys, before, w->dv + to);
            NAME(add_columns)(w->d_weights, w->q_pairs, padded, count, keys, before, w->dk + to);
            NAME(add_rows)(w->d_rows, w->keys + from + first / 2 * NR, round_up(r->count, PAD) / 2, padded, count, keys, before, w->dq + done * padded);
        }
    }
}

FN void NAME(backward)(const struct call *c, const struct work *w, int64_t group, int64_t head)
{
    const int64_t dim = c->head_dim;
    for (int64_t i = c->groups[group]; i < c->groups[group + 1]; i++) {
        const struct segment *s = c->segments + i;
        const size_t bytes = (size_t)(s->count * w->padded) * 4;
        __builtin_memset(w->dk + (head * c->tokens + s->first) * w->padded, 0, bytes);
        __builtin_memset(w->dv + (head * c->tokens + s->first) * w->padded, 0, bytes);
    }
    for (int64_t i = c->groups[group]; i < c->groups[group + 1]; i++) {
        const struct segment *s = c->segments + i;
        __builtin_memset(w->dq, 0, (size_t)(round_up(s->count, MR) * w->padded) * 4);
        for (int64_t t = 0; t < s->count; t++) {
            const uint16_t *out = HALF(c->out.data) + (s->first + t) * c->out.token + head * c->out.head;
            const uint16_t *d_out = HALF(c->d_out.data) + (s->first + t) * c->d_out.token + head * c->d_out.head;
            vf sum = v_set(0.0f);
            for (int64_t d = 0; d < dim; d += WIDTH)
                sum = v_fma(NAME(load)(1, out + d, dim - d), NAME(load)(1, d_out + d, dim - d), sum);
            w->delta[t] = NAME(sum)(sum);
        }
        if (s->prefix >= 0)
            NAME(pull_back)(c, w, s, c->ranges + s->prefix, head, c->tokens);
        NAME(pull_back)(c, w, s, c->ranges + s->own, head, 0);
        for (int64_t t = 0; t < s->count; t++)
            for (int64_t d = 0; d < dim; d += WIDTH)
                NAME(store)(1, HALF(c->dq.data) + (s->first + t) * c->dq.token + head * c->dq.head + d, v_load(w->dq + t * w->padded + d), dim - d);
    }
}

/* dk and dv of tokens [begin, end): the sums over the heads of queries that share them */
FN void NAME(sum_heads)(const struct call *c, const struct work *w, int64_t begin, int64_t end)
{
    const int64_t group = c->num_heads / c->num_kv_heads, dim = c->head_dim;
    for (int64_t t = begin; t < end; t++)
        for (int64_t kv_head = 0; kv_head < c->num_kv_heads; kv_head++)
            for (int64_t d = 0; d < dim; d += WIDTH) {
                vf k = v_set(0.0f), v = k;
                for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
                    k = v_add(k, v_load(w->dk + (head * c->tokens + t) * w->padded + d));
                    v = v_add(v, v_load(w->dv + (head * c->tokens + t) * w->padded + d));
                }
                NAME(store)(1, HALF(c->dk.data) + t * c->dk.token + kv_head * c->dk.head + d, k, dim - d);
                NAME(store)(1, HALF(c->dv.data) + t * c->dv.token + kv_head * c->dv.head + d, v, dim - d);
            }
}

#include "matmul_kernels.h"

static const struct kernels NAME(kernels) = {
    STRING(ISA), NAME(pack), NAME(forward), NAME(backward), NAME(sum_heads), {POINTWISE, NAME(inverse_rms_rows)}, NAME(pack_slab), NAME(multiply), HAS_TILES,
};

#undef ISA
#undef TARGET
#undef WIDTH
#undef HAS_PAIRS
#undef HAS_TILES
#undef element
#undef NR
#undef MR
#undef UNIT
