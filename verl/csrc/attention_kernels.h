/* Attention in float32, written once and compiled for each instruction set. Every sum has one order, a function of the segments
   alone. */

#define UNIT 1
#include "tile_kernels.h"

/* -- packing -- */

/* Rows [count][dim] as [count / NR][padded][NR], padded with zeros */
INLINE void NAME(pack_across)(float *to, const float *from, int64_t stride, int64_t count, int64_t dim, int64_t padded)
{
    for (int64_t first = 0; first < count; first += NR, to += padded * NR) {
        int64_t rows = at_most(count - first, NR);
        if (rows < NR || dim < padded)
            __builtin_memset(to, 0, (size_t)(padded * NR) * 4);
        int64_t n = 0;
        for (; n + 4 <= rows; n += 4) {
            const float *row = from + (first + n) * stride;
            int64_t d = 0;
            for (; d + 4 <= dim; d += 4) {
                __m128 r0 = _mm_loadu_ps(row + d), r1 = _mm_loadu_ps(row + stride + d);
                __m128 r2 = _mm_loadu_ps(row + 2 * stride + d), r3 = _mm_loadu_ps(row + 3 * stride + d);
                _MM_TRANSPOSE4_PS(r0, r1, r2, r3);
                _mm_storeu_ps(to + d * NR + n, r0), _mm_storeu_ps(to + (d + 1) * NR + n, r1);
                _mm_storeu_ps(to + (d + 2) * NR + n, r2), _mm_storeu_ps(to + (d + 3) * NR + n, r3);
            }
            for (; d < dim; d++)
                for (int64_t i = 0; i < 4; i++)
                    to[d * NR + n + i] = row[i * stride + d];
        }
        for (; n < rows; n++)
            for (int64_t d = 0; d < dim; d++)
                to[d * NR + n] = from[(first + n) * stride + d];
    }
}

/* Rows [count][dim] as [padded / NR][padded count][NR]; what pads the count is never read */
INLINE void NAME(pack_along)(float *to, const float *from, int64_t stride, int64_t count, int64_t dim, int64_t padded)
{
    for (int64_t c = 0; c < padded; c += NR, to += round_up(count, PAD) * NR)
        for (int64_t n = 0; n < count; n++)
            for (int64_t i = 0; i < NR; i++)
                to[n * NR + i] = c + i < dim ? from[n * stride + c + i] : 0.0f;
}

FN void NAME(pack)(const struct call *c, const struct work *w, int backward, int64_t index, int64_t kv_head)
{
    const struct range *r = c->ranges + index;
    const int64_t to = (kv_head * c->packed_rows + r->row) * w->padded;
    const float *k = c->k.data + r->first * c->k.token + kv_head * c->k.head, *v = c->v.data + r->first * c->v.token + kv_head * c->v.head;
    NAME(pack_across)(w->keys_across + to, k, c->k.token, r->count, c->head_dim, w->padded);
    if (backward) {
        NAME(pack_across)(w->values_across + to, v, c->v.token, r->count, c->head_dim, w->padded);
        NAME(pack_along)(w->keys + to, k, c->k.token, r->count, c->head_dim, w->padded);
    } else
        NAME(pack_along)(w->values + to, v, c->v.token, r->count, c->head_dim, w->padded);
}

/* Rows of a head [count][dim], scaled, as [padded to MR][padded], padded with zeros */
INLINE void NAME(take)(float *to, const struct heads *from, int64_t head, int64_t first, int64_t count, int64_t dim, int64_t padded, float scale)
{
    const float *row = from->data + first * from->token + head * from->head;
    for (int64_t i = 0; i < count; i++, row += from->token, to += padded) {
        for (int64_t d = 0; d < dim; d++)
            to[d] = row[d] * scale;
        for (int64_t d = dim; d < padded; d++)
            to[d] = 0.0f;
    }
    __builtin_memset(to, 0, (size_t)((round_up(count, MR) - count) * padded) * 4);
}

/* -- blocks of scores, see tile_kernels.h -- */

/* What query i sees of a block of keys, rounded up to vectors; what that has too much gets the score minus infinity. */
INLINE int64_t NAME(mask)(float *row, int64_t i, int64_t keys, int64_t ahead)
{
    const int64_t end = at_most(at_least(ahead + i + 1, 0), keys), stop = round_up(end, WIDTH);
    if (end < stop)
        v_store(row + stop - WIDTH, v_add(v_load(row + stop - WIDTH), v_load(HIDDEN + 16 - WIDTH + stop - end)));
    return stop;
}

INLINE float NAME(top)(vf x) /* the largest lane; NaN may be left out */
{
#if WIDTH == 16
    __m256 y = _mm256_max_ps(_mm512_castps512_ps256(x), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1)));
#else
    __m256 y = x;
#endif
    __m128 z = _mm_max_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    z = _mm_max_ps(z, _mm_movehl_ps(z, z));
    return _mm_cvtss_f32(_mm_max_ss(z, _mm_movehdup_ps(z)));
}

/* Zeros from `from` on, as far as tiles of rows (and of columns) read that hold query i */
INLINE void NAME(clear)(float *row, int64_t from, int64_t i, int64_t keys, int64_t ahead)
{
    const int64_t stop = at_most(round_up(NAME(seen)(i / MR * MR, ahead, keys) + MR, WIDTH), ROW);
    for (int64_t t = from; t < stop; t += WIDTH)
        v_store(row + t, v_set(0.0f));
}

/* -- forward -- */

/* Scores to weights relative to the largest so far, `top`; what was summed with another is scaled. */
INLINE void NAME(weigh)(float *scores, int64_t count, int64_t keys, int64_t ahead, float *out, int64_t padded, float *top, float *total)
{
    for (int64_t i = 0; i < count; i++, scores += ROW, out += padded) {
        const int64_t stop = NAME(mask)(scores, i, keys, ahead);
        vf most = v_set(top[i]), sum = v_set(0.0f);
        for (int64_t t = 0; t < stop; t += WIDTH)
            most = v_max(v_load(scores + t), most);
        const float before = top[i];
        top[i] = NAME(top)(most);
        most = v_set(top[i]);
        for (int64_t t = 0; t < stop; t += WIDTH) {
            vf e = NAME(exponential)(v_sub(v_load(scores + t), most));
            v_store(scores + t, e);
            sum = v_add(sum, e);
        }
        NAME(clear)(scores, stop, i, keys, ahead);
        if (top[i] > before && before > -INFINITY) {
            const vf factor = NAME(exponential)(v_sub(v_set(before), most));
            total[i] *= NAME(top)(factor);
            for (int64_t d = 0; d < padded; d += WIDTH)
                v_store(out + d, v_mul(v_load(out + d), factor));
        }
        total[i] += NAME(sum)(sum);
    }
}

INLINE void NAME(attend)(const struct call *c, const struct work *w, const struct range *r, int64_t kv_head, int64_t count, int64_t ahead,
                         float *top, float *total)
{
    const int64_t from = (kv_head * c->packed_rows + r->row) * w->padded, visible = at_most(r->count, ahead + count);
    for (int64_t first = 0; first < visible; first += KEYS) {
        const int64_t keys = at_most(visible - first, KEYS);
        NAME(block_scores)(w->q, c->head_dim, w->padded, w->keys_across + from + first * w->padded, count, keys, ahead - first, w->scores);
        NAME(weigh)(w->scores, count, keys, ahead - first, w->out, w->padded, top, total);
        NAME(add_rows)(w->scores, w->values + from + first * NR, round_up(r->count, PAD), w->padded, count, keys, ahead - first, w->out);
    }
}

FN void NAME(forward)(const struct call *c, const struct work *w, int64_t index, int64_t head)
{
    const struct segment *s = c->segments + index;
    const int64_t kv_head = head / (c->num_heads / c->num_kv_heads);
    float top[QUERIES], total[QUERIES];
    for (int64_t done = 0; done < s->count; done += QUERIES) {
        const int64_t count = at_most(s->count - done, QUERIES), first = s->first + done;
        NAME(take)(w->q, &c->q, head, first, count, c->head_dim, w->padded, c->scale);
        __builtin_memset(w->out, 0, (size_t)(QUERIES * w->padded) * 4);
        for (int64_t i = 0; i < count; i++)
            top[i] = -INFINITY, total[i] = 0.0f;
        if (s->prefix >= 0)
            NAME(attend)(c, w, c->ranges + s->prefix, kv_head, count, c->tokens, top, total);
        NAME(attend)(c, w, c->ranges + s->own, kv_head, count, done, top, total);
        for (int64_t i = 0; i < count; i++) {
            float *to = c->out.data + (first + i) * c->out.token + head * c->out.head, share = 1.0f / total[i];
            for (int64_t d = 0; d < c->head_dim; d++)
                to[d] = w->out[i * w->padded + d] * share;
            c->lse[(first + i) * c->num_heads + head] = top[i] + logf(total[i]);
        }
    }
}

/* -- backward: with p = exp(scores - lse) and delta = <d_out, out>
   d_scores = p (d_out v^T - delta), dv = p^T d_out, dk = d_scores^T q scale, dq = d_scores k scale -- */

INLINE void NAME(differentiate)(float *scores, float *d_scores, int64_t count, int64_t keys, int64_t ahead, const float *lse, int64_t lse_stride,
                                const float *delta)
{
    for (int64_t i = 0; i < count; i++, scores += ROW, d_scores += ROW) {
        const int64_t stop = NAME(mask)(scores, i, keys, ahead);
        const vf log_sum = v_set(lse[i * lse_stride]), mean = v_set(delta[i]);
        for (int64_t t = 0; t < stop; t += WIDTH) {
            vf p = NAME(exponential)(v_sub(v_load(scores + t), log_sum));
            v_store(scores + t, p);
            v_store(d_scores + t, v_mul(p, v_sub(v_load(d_scores + t), mean)));
        }
        NAME(clear)(scores, stop, i, keys, ahead);
        NAME(clear)(d_scores, stop, i, keys, ahead);
    }
}

/* The part of one range of keys in the gradients of a segment; `ahead`: keys before its first query that all see, beside its own */
INLINE void NAME(pull_back)(const struct call *c, const struct work *w, const struct segment *s, const struct range *r, int64_t head, int64_t ahead)
{
    const int64_t padded = w->padded, from = (head / (c->num_heads / c->num_kv_heads) * c->packed_rows + r->row) * padded;
    for (int64_t first = 0; first < r->count; first += KEYS) {
        const int64_t keys = at_most(r->count - first, KEYS), to = (head * c->tokens + r->first + first) * padded;
        for (int64_t done = at_least(first - ahead, 0) / QUERIES * QUERIES; done < s->count; done += QUERIES) {
            const int64_t count = at_most(s->count - done, QUERIES), before = ahead + done - first;
            NAME(take)(w->q, &c->q, head, s->first + done, count, c->head_dim, padded, c->scale);
            NAME(take)(w->d_out, &c->d_out, head, s->first + done, count, c->head_dim, padded, 1.0f);
            NAME(block_scores)(w->q, c->head_dim, padded, w->keys_across + from + first * padded, count, keys, before, w->scores);
            NAME(block_scores)(w->d_out, c->head_dim, padded, w->values_across + from + first * padded, count, keys, before, w->d_scores);
            NAME(differentiate)(w->scores, w->d_scores, count, keys, before, c->lse + (s->first + done) * c->num_heads + head, c->num_heads,
                                w->delta + done);
            NAME(add_columns)(w->scores, w->d_out, padded, count, keys, before, w->dv + to);
            NAME(add_columns)(w->d_scores, w->q, padded, count, keys, before, w->dk + to);
            NAME(add_rows)(w->d_scores, w->keys + from + first * NR, round_up(r->count, PAD), padded, count, keys, before, w->dq + done * padded);
        }
    }
}

FN void NAME(backward)(const struct call *c, const struct work *w, int64_t group, int64_t head)
{
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
            const float *out = c->out.data + (s->first + t) * c->out.token + head * c->out.head;
            const float *d_out = c->d_out.data + (s->first + t) * c->d_out.token + head * c->d_out.head;
            vf sum = v_set(0.0f);
            float rest = 0.0f;
            int64_t d = 0;
            for (; d + WIDTH <= c->head_dim; d += WIDTH)
                sum = v_fma(v_load(out + d), v_load(d_out + d), sum);
            for (; d < c->head_dim; d++)
                rest += out[d] * d_out[d];
            w->delta[t] = NAME(sum)(sum) + rest;
        }
        if (s->prefix >= 0)
            NAME(pull_back)(c, w, s, c->ranges + s->prefix, head, c->tokens);
        NAME(pull_back)(c, w, s, c->ranges + s->own, head, 0);
        for (int64_t t = 0; t < s->count; t++)
            for (int64_t d = 0; d < c->head_dim; d++)
                c->dq.data[(s->first + t) * c->dq.token + head * c->dq.head + d] = w->dq[t * w->padded + d] * c->scale;
    }
}

/* dk and dv of tokens [begin, end): the sums over the heads of queries that share them */
FN void NAME(sum_heads)(const struct call *c, const struct work *w, int64_t begin, int64_t end)
{
    const int64_t group = c->num_heads / c->num_kv_heads;
    for (int64_t t = begin; t < end; t++)
        for (int64_t head = 0; head < c->num_heads; head++) {
            const int64_t kv_head = head / group, from = (head * c->tokens + t) * w->padded;
            float *dk = c->dk.data + t * c->dk.token + kv_head * c->dk.head, *dv = c->dv.data + t * c->dv.token + kv_head * c->dv.head;
            for (int64_t d = 0; d < c->head_dim; d++) {
                dk[d] = (head % group ? dk[d] : 0.0f) + w->dk[from + d];
                dv[d] = (head % group ? dv[d] : 0.0f) + w->dv[from + d];
            }
        }
}
