/* Operations of a training step in bfloat16, for processors whose matrix products read pairs of bfloat16 values. The forward
   has the sampler's arithmetic and order of sums: both then compute the same bits. */

#include "shared_kernels.h"
#define element uint16_t
#include "pointwise_kernels.h"
#undef element

#define HALF(pointer) ((uint16_t *)(pointer))

/* out [count], float32: the inverse RMS of rows of x */
FN void NAME(inverse_rms_rows)(const struct rows *r, int64_t begin, int64_t end)
{
    for (int64_t t = begin; t < end; t++)
        r->out[t] = NAME(inverse_rms)(1, HALF(r->x) + t * r->columns, r->columns, r->eps);
}

/* Keys and values of a range in blocks: keys [padded / 2][BLOCK][2], then values [BLOCK][padded], padded with zeros */
FN void NAME(pack)(const struct call *c, const struct work *w, int backward, int64_t index, int64_t kv_head)
{
    const struct range *r = c->ranges + index;
    const int64_t dim = c->head_dim, padded = w->padded;
    uint16_t *to = HALF(w->keys_across) + (kv_head * c->packed_rows + r->row) * 2 * padded;
    const uint16_t *k = HALF(c->k.data) + r->first * c->k.token + kv_head * c->k.head;
    const uint16_t *v = HALF(c->v.data) + r->first * c->v.token + kv_head * c->v.head;
    (void)backward;
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
            NAME(add_values)(1, rows, w->scores, stride, prefix_values, block, padded, 0, before, w->out);
        NAME(add_values)(1, rows, w->scores + before, stride, own_values, block, padded, 0, end, w->out);
        for (int64_t row = 0; row < rows; row++) {
            char *to = (char *)(HALF(c->out.data) + (s->first + first + row / group) * c->out.token + (head * group + row % group) * c->out.head);
            for (int64_t d = 0; d < dim; d++)
                NAME(put_one)(to, d, NAME(round_one)(w->out[row * padded + d] * inverse[row], 1), PAIRS);
        }
    }
}

static const struct kernels NAME(kernels) = {
    STRING(ISA), NAME(pack), NAME(forward), 0, 0, {POINTWISE, NAME(inverse_rms_rows)},
};

#undef ISA
#undef TARGET
#undef WIDTH
#undef HAS_PAIRS
