/* The kernels, written once and compiled for each instruction set: the includer defines ISA, TARGET, WIDTH, HAS_PAIRS and HAS_TILES.
   A result depends on its own row only: sums run in one order over inputs, over keys and over the vocabulary, whatever the
   number of rows, the place in a tile, or the store that holds a key. */

#include "shared_kernels.h"
#include "levels.h"

#if WIDTH == 16
#define MR 8
#else
#define MR 4
#endif
#define NR (3 * WIDTH)
#if HAS_TILES
#define PAIR_ROWS AMX_ROWS
#else
#define PAIR_ROWS MR
#endif

/* -- matrix products -- */

INLINE void NAME(tile_steps)(const int rows, const int kind, const int ahead, int64_t steps, const int64_t stride, const char *a,
                             const char *b, const char *next, vf acc[MR][3])
{
    const int64_t a_step = kind == WIDENED ? 8 : 4;
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
        acc[i][0] = acc[i][1] = acc[i][2] = v_set(0.0f);
    for (int64_t s = 0; s < steps; s++, a += a_step, b += 3 * VECTOR, next += ahead * VECTOR) {
        vi w0 = v_loadi(b), w1 = v_loadi(b + VECTOR), w2 = v_loadi(b + 2 * VECTOR);
#pragma GCC unroll 3
        for (int i = 0; i < ahead; i++)
            if (ahead == 3)
                _mm_prefetch(next + i * VECTOR, _MM_HINT_T0);
            else
                _mm_prefetch(next + i * VECTOR, _MM_HINT_T1);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            acc[i][0] = NAME(pair)(acc[i][0], w0, a + i * stride, kind);
            acc[i][1] = NAME(pair)(acc[i][1], w1, a + i * stride, kind);
            acc[i][2] = NAME(pair)(acc[i][2], w2, a + i * stride, kind);
        }
    }
}

/* A tile: sums over `block` steps begin at zero and are added, as the matrix products of a training step add them */
INLINE void NAME(tile)(const int rows, const int kind, const int ahead, const struct gemm *g, const char *a, const char *b,
                       const char *next, vf acc[MR][3])
{
    const int64_t block = kind == PAIRS && g->block && g->block < g->steps ? g->block : g->steps;
    vf more[MR][3];
    NAME(tile_steps)(rows, kind, ahead, block, g->a_stride, a, b, next, acc);
    if (kind != PAIRS)
        return;
    for (int64_t s = block; s < g->steps; s += block) {
        int64_t steps = g->steps - s < block ? g->steps - s : block;
        NAME(tile_steps)(rows, kind, ahead, steps, g->a_stride, a + s * 4, b + s * 3 * VECTOR, next + s * ahead * VECTOR, more);
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < 3; j++)
                acc[i][j] = v_add(acc[i][j], more[i][j]);
    }
}

INLINE void NAME(finish)(const int rows, const struct gemm *g, int64_t row, int64_t column, int count, vf acc[MR][3])
{
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++) {
        float *out = g->out + (row + i) * g->out_stride + column;
        if (i < count)
            for (int j = 0; j < 3; j++) {
                vf y = acc[i][j];
                if (g->bias)
                    y = v_add(y, v_load(g->bias + column + j * WIDTH));
                y = NAME(round_if)(y, g->kind != FLOATS);
                if (g->add)
                    y = NAME(round_if)(v_add(v_load(out + j * WIDTH), y), g->kind != FLOATS);
                v_store(out + j * WIDTH, y);
            }
    }
}

/* Units [begin, end) of a product: a unit is a panel of weights times a tile of rows, tiles of a panel together. */
INLINE void NAME(units)(const int kind, const struct gemm *g, int64_t begin, int64_t end)
{
    const int64_t tiles = (g->rows + MR - 1) / MR, bytes = g->steps * 3 * VECTOR, ahead = 4096;
    vf acc[MR][3];
    for (int64_t unit = begin; unit < end; unit++) {
        int64_t panel = unit / tiles, tile = unit % tiles, row = tile * MR;
        int count = g->rows - row < MR ? (int)(g->rows - row) : MR;
        const char *a = g->a + row * g->a_stride, *b = g->b + panel * bytes;
        /* a lone tile fetches weights shortly before it needs them; the first of several fetch the next panel, so that it
           comes from memory while they multiply */
        const char *next = tiles == 1 ? b + ahead : b;
        if (tiles > 1 && tile < 3 && panel + 1 < g->panels)
            next = b + bytes + tile * (bytes / 3);
        if (count > MR / 2) {
            if (tiles > 1)
                NAME(tile)(MR, kind, 1, g, a, b, next, acc);
            else
                NAME(tile)(MR, kind, 3, g, a, b, next, acc);
            NAME(finish)(MR, g, row, panel * NR, count, acc);
        } else if (count > 1) {
            NAME(tile)(MR / 2, kind, 3, g, a, b, tiles > 1 ? b : next, acc);
            NAME(finish)(MR / 2, g, row, panel * NR, count, acc);
        } else {
            NAME(tile)(1, kind, 3, g, a, b, tiles > 1 ? b : next, acc);
            NAME(finish)(1, g, row, panel * NR, count, acc);
        }
    }
}

#if HAS_TILES
#define TILE_PRODUCT _tile_dpbf16ps
#include "tile_sums.h"

/* `units` of pairs, whose tiles have up to 32 rows */
FN void NAME(units_by_tiles)(const struct gemm *g, int64_t begin, int64_t end)
{
    const int64_t tiles = (g->rows + AMX_ROWS - 1) / AMX_ROWS, bytes = g->steps * 3 * VECTOR;
    const int64_t block = g->block && g->block < g->steps ? g->block : g->steps;
    float sums[AMX_ROWS * NR] __attribute__((aligned(64))), more[AMX_ROWS * NR] __attribute__((aligned(64)));
    int64_t shape = 0;
    for (int64_t unit = begin; unit < end; unit++) {
        const int64_t panel = unit / tiles, row = unit % tiles * AMX_ROWS;
        const int64_t count = g->rows - row < AMX_ROWS ? g->rows - row : AMX_ROWS, rows = NAME(shape_tiles)(count, &shape);
        const char *a = g->a + row * g->a_stride, *b = g->b + panel * bytes;
        for (int64_t s = 0; s < g->steps; s += block) {
            const int64_t steps = g->steps - s < block ? g->steps - s : block;
            NAME(sum_tiles)(count, rows, steps, a + 4 * s, g->a_stride, b + s * 3 * VECTOR, tiles == 1, s ? more : sums);
            for (int64_t i = 0; s && i < count * NR; i += WIDTH)
                v_store(sums + i, v_add(v_load(sums + i), v_load(more + i)));
        }
        for (int64_t i = 0; i < count; i++) {
            const float *from = sums + i * NR;
            vf acc[MR][3] = {{v_load(from), v_load(from + WIDTH), v_load(from + 2 * WIDTH)}};
            NAME(finish)(1, g, row + i, panel * NR, 1, acc);
        }
    }
    _tile_release();
}
#endif

FN void NAME(gemm)(const struct gemm *g, int64_t begin, int64_t end)
{
    if (g->kind == FLOATS)
        NAME(units)(FLOATS, g, begin, end);
    else if (g->kind == WIDENED)
        NAME(units)(WIDENED, g, begin, end);
#if HAS_TILES
    else
        NAME(units_by_tiles)(g, begin, end);
#elif HAS_PAIRS
    else
        NAME(units)(PAIRS, g, begin, end);
#endif
}

/* Panels [begin, end) of weights [outputs][inputs]: [panel][inputs / 2][NR][2] bfloat16 or [panel][inputs][NR] float32, padded
   with zeros. */
FN void NAME(pack)(int bf16, char *to, const char *from, int64_t outputs, int64_t inputs, int64_t begin, int64_t end)
{
    int64_t steps = bf16 ? (inputs + 1) / 2 : inputs;
    for (int64_t panel = begin; panel < end; panel++) {
        uint32_t *out = (uint32_t *)to + panel * steps * NR;
        for (int64_t first = 0; first < steps; first += 16) /* in pieces that stay in the level-1 cache */
            for (int64_t n = 0; n < NR; n++) {
                const int64_t row = panel * NR + n, last = first + 16 < steps ? first + 16 : steps;
                const char *in = from + row * inputs * (bf16 ? 2 : 4);
                for (int64_t s = first; s < last; s++) {
                    uint32_t bits = 0;
                    if (row < outputs)
                        __builtin_memcpy(&bits, in + 4 * s, bf16 && 2 * s + 1 == inputs ? 2 : 4);
                    out[s * NR + n] = bits;
                }
            }
    }
}

/* -- between the products -- */

FN void NAME(widen)(float *to, const void *from, int64_t n, int bf16)
{
    if (!bf16) {
        __builtin_memcpy(to, from, (size_t)n * 4);
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = (uint32_t)((const uint16_t *)from)[i] << 16;
        __builtin_memcpy(to + i, &bits, 4);
    }
}

FN void NAME(narrow)(uint16_t *to, const float *from, int64_t n) /* floats that hold bfloat16 values */
{
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        __builtin_memcpy(&bits, from + i, 4);
        to[i] = (uint16_t)(bits >> 16);
    }
}

/* x / rms(x) rounded, times the weight, as an operand of a product; zeros up to `padded` */
FN void NAME(rms_norm)(char *to, const float *x, int64_t n, int64_t padded, struct norm norm, int bf16, int kind)
{
    float scale = NAME(inverse_rms)(0, x, n, norm.eps);
    int64_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH) {
        vf y = NAME(round_if)(v_mul(v_load(x + i), v_set(scale)), bf16);
        NAME(put)(to, i, NAME(round_if)(v_mul(y, v_load(norm.weight + i)), bf16), kind);
    }
    for (; i < n; i++)
        NAME(put_one)(to, i, NAME(round_one)(NAME(round_one)(x[i] * scale, bf16) * norm.weight[i], bf16), kind);
    for (; i < padded; i++)
        NAME(put_one)(to, i, 0.0f, kind);
}

/* Levels of x, `stride` bytes apart, and their scale */
INLINE void NAME(store_levels)(char *to, int64_t stride, float *scale, const float *x, int64_t n)
{
    float inverse;
    *scale = NAME(scale_of)((const char *)x, n, 0, &inverse);
    for (int64_t i = 0; i < n; i++)
        to[i * stride] = (char)NAME(level)(x[i], inverse);
}

/* From a row of the q, k, v product: norms of heads, rotary embedding; q to `q_out`, k and v to their store. */
INLINE void NAME(heads_as)(const int bf16, const int kind, const struct model *m, const struct step *s, int64_t layer,
                           int64_t token, const float *qkv, char *q_out)
{
    const struct layer *w = m->layer + layer;
    const int64_t dim = m->head_dim, half = dim / 2, padded = padded_head(m);
    const float *cosine = s->cos + token * dim, *sine = s->sin + token * dim;
    const int in_own = s->own_slot[token] >= 0;
    const struct store *store = in_own ? &s->own : &s->prefix;
    const int64_t slot = in_own ? s->own_slot[token] : s->prefix_slot[token];
    const int64_t at = (in_own ? s->own_end[token] : s->prefix_end[token]) - 1;
    float x[MAX_HEAD_DIM] __attribute__((aligned(64))), y[MAX_HEAD_DIM] __attribute__((aligned(64)));
    for (int64_t h = 0; h < m->heads + 2 * m->kv_heads; h++) {
        const float *from = qkv + h * dim;
        const int64_t kv = h < m->heads + m->kv_heads ? h - m->heads : h - m->heads - m->kv_heads;
        char *block = (char *)store->layer[layer] +
                      stored(m) * (slot * store->slot_stride + kv * store->head_stride) + at / BLOCK * 2 * half_block(m);
        if (h >= m->heads + m->kv_heads) { /* a value */
            char *value = block + half_block(m) + at % BLOCK * padded * stored(m);
            if (m->int8_cache)
                NAME(store_levels)(value, 1, (float *)(block + half_block(m) + BLOCK * padded) + at % BLOCK, from, dim);
            for (int64_t i = 0; i < dim && !m->int8_cache; i++)
                NAME(put_one)(value, i, from[i], bf16 ? PAIRS : FLOATS);
            continue;
        }
        const float *norm = h < m->heads ? w->q_norm : w->k_norm;
        if (norm) {
            float scale = NAME(inverse_rms)(0, from, dim, h < m->heads ? w->q_eps : w->k_eps);
            for (int64_t i = 0; i < dim; i++)
                x[i] = NAME(round_one)(NAME(round_one)(from[i] * scale, bf16) * norm[i], bf16);
            from = x;
        }
        for (int64_t i = 0; i < half; i++) {
            float first = NAME(round_one)(from[i] * cosine[i], bf16), second = NAME(round_one)(from[half + i] * cosine[half + i], bf16);
            float turned = NAME(round_one)(-from[half + i] * sine[i], bf16), back = NAME(round_one)(from[i] * sine[half + i], bf16);
            y[i] = NAME(round_one)(first + turned, bf16);
            y[half + i] = NAME(round_one)(second + back, bf16);
        }
        if (h < m->heads) {
            char *q = q_out + h * padded * item(kind);
            for (int64_t i = 0; i < dim; i++)
                NAME(put_one)(q, i, y[i], kind);
            for (int64_t i = dim; i < padded; i++)
                NAME(put_one)(q, i, 0.0f, kind);
        } else if (m->int8_cache) {
            NAME(store_levels)(block + at % BLOCK, BLOCK, (float *)(block + BLOCK * padded) + at % BLOCK, y, dim);
        } else if (bf16) {
            uint16_t *key = (uint16_t *)block + at % BLOCK * 2;
            for (int64_t i = 0; i < dim; i++)
                NAME(put_one)((char *)(key + i / 2 * 2 * BLOCK), i & 1, y[i], PAIRS);
        } else {
            float *key = (float *)block + at % BLOCK;
            for (int64_t i = 0; i < dim; i++)
                key[i * BLOCK] = y[i];
        }
    }
}

FN void NAME(heads)(const struct model *m, const struct step *s, int64_t layer, int64_t token, const float *qkv, char *q, int kind)
{
    if (kind == FLOATS)
        NAME(heads_as)(0, FLOATS, m, s, layer, token, qkv, q);
    else if (kind == WIDENED)
        NAME(heads_as)(1, WIDENED, m, s, layer, token, qkv, q);
    else
        NAME(heads_as)(1, PAIRS, m, s, layer, token, qkv, q);
}

/* silu(gate) rounded, times up, as an operand of a product */
FN void NAME(swiglu)(char *to, const float *gate, const float *up, int64_t n, int64_t padded, int bf16, int kind)
{
    float lanes[WIDTH];
    for (int64_t i = 0; i < n; i += WIDTH) {
        vf x = v_load(gate + i); /* rows are padded to whole panels */
        vf y = NAME(gated)(x, v_load(up + i), bf16);
        if (i + WIDTH <= n) {
            NAME(put)(to, i, y, kind);
            continue;
        }
        v_store(lanes, y);
        for (int64_t j = i; j < n; j++)
            NAME(put_one)(to, j, lanes[j - i], kind);
    }
    for (int64_t i = n; i < padded; i++)
        NAME(put_one)(to, i, 0.0f, kind);
}

/* -- attention -- */

/* Have the keys and values on their way that a row alone reads, some blocks of them; they come from memory. */
INLINE void NAME(fetch_own)(const struct attention *a, int64_t token, int64_t block)
{
    const struct step *s = a->step;
    if (s->own_slot[token] < 0)
        return;
    const char *from = (char *)s->own.layer[a->layer] +
                       stored(a->model) * (s->own_slot[token] * s->own.slot_stride + a->kv_head * s->own.head_stride);
    int64_t bytes = round_up(s->own_end[token], BLOCK) / BLOCK * block;
    for (int64_t i = 0; i < bytes && i < 1 << 16; i += 64)
        _mm_prefetch(from + i, _MM_HINT_T1);
}

/* `size`: bytes of a stored element */
INLINE void NAME(attend_as)(const int bf16, const int kind, const int size, const struct attention *a)
{
    const struct model *m = a->model;
    const struct step *s = a->step;
    const int64_t dim = padded_head(m), group = m->heads / m->kv_heads, window = m->layer[a->layer].window;
    const int scoring = size == 1 ? INT8 : kind, widens = size == 1 && kind == PAIRS;
    const int64_t q_bytes = dim * item(scoring), block = 2 * half_block(m), stride = a->scratch.scores_stride;
    const int64_t *tokens = s->order + s->tiles[a->tile], count = s->tiles[a->tile + 1] - s->tiles[a->tile];
    const int64_t slot = s->prefix_slot[tokens[0]];
    int64_t first = INT64_MAX, last = 0; /* positions of the prefix that any of them sees */
    for (int64_t i = 0; i < count; i++) {
        int64_t t = tokens[i], low = window && s->position[t] >= window ? s->position[t] - window + 1 : 0;
        char *q = a->scratch.q + i * group * q_bytes;
        NAME(widen)((float *)q, a->q + (t * m->heads + a->kv_head * group) * dim * item(kind), group * q_bytes / 4, widens);
        first = low < first ? low : first;
        last = s->prefix_end[t] > last ? s->prefix_end[t] : last;
    }
    NAME(fetch_own)(a, tokens[0], block);
    first = first / BLOCK * BLOCK;
    if (slot < 0 || first >= last)
        last = 0;
    const char *prefix = slot < 0 ? 0 : (char *)s->prefix.layer[a->layer] + size * (slot * s->prefix.slot_stride + a->kv_head * s->prefix.head_stride);
    if (last)
        NAME(score)(scoring, count * group, a->scratch.q, q_bytes, prefix + first / BLOCK * block, block, dim, m->scale,
                    a->scratch.scores + first, stride, round_up(last, BLOCK) / BLOCK - first / BLOCK);
    __builtin_memset(a->scratch.out, 0, (size_t)(count * group * dim * 4));
    float inverse[count * group];
    const char *own[count];
    const struct record *record = s->record;
    for (int64_t i = 0; i < count; i++) {
        int64_t t = tokens[i], seen = s->position[t] + 1, base = seen - s->own_end[t];
        int64_t low = window && seen > window ? seen - window : 0, skipped = low > base ? (low - base) / BLOCK : 0;
        float *scores = a->scratch.scores + i * group * stride;
        if (i + 1 < count)
            NAME(fetch_own)(a, tokens[i + 1], block);
        if (s->own_slot[t] >= 0) {
            own[i] = (char *)s->own.layer[a->layer] + size * (s->own_slot[t] * s->own.slot_stride + a->kv_head * s->own.head_stride);
            NAME(score)(scoring, group, a->scratch.q + i * group * q_bytes, q_bytes, own[i] + skipped * block, block, dim, m->scale,
                        scores + base + skipped * BLOCK, stride, round_up(s->own_end[t], BLOCK) / BLOCK - skipped);
        }
        float *lse = !record || record->slots[t] < 0 ? 0 : record->lse + record_row(record, a->layer, record->slots[t], m->heads) + a->kv_head * group;
        for (int64_t h = 0; h < group; h++)
            inverse[i * group + h] = NAME(weigh)(scores + h * stride, last && first < low ? first : low / BLOCK * BLOCK, low, seen, round_up(last, BLOCK), lse ? lse + h : 0);
    }
    if (last)
        NAME(add_values)(size, count * group, a->scratch.scores, stride, prefix + block / 2, block, dim, first, last, a->scratch.out);
    for (int64_t i = 0; i < count; i++) {
        int64_t t = tokens[i], seen = s->position[t] + 1, base = seen - s->own_end[t], low = window && seen > window ? seen - window : 0;
        float *out = a->scratch.out + i * group * dim;
        if (s->own_slot[t] >= 0)
            NAME(add_values)(size, group, a->scratch.scores + i * group * stride + base, stride, own[i] + block / 2, block, dim,
                             low > base ? low - base : 0, s->own_end[t], out);
        char *to = a->out + t * a->out_stride;
        for (int64_t h = 0; h < group; h++)
            for (int64_t d = 0; d < m->head_dim; d++)
                NAME(put_one)(to, (a->kv_head * group + h) * m->head_dim + d,
                              NAME(round_one)(out[h * dim + d] * inverse[i * group + h], bf16), kind);
    }
}

FN void NAME(attend)(const struct attention *a)
{
    if (a->model->int8_cache)
        NAME(attend_as)((int)a->model->bf16, a->kind, 1, a);
    else if (a->kind == FLOATS)
        NAME(attend_as)(0, FLOATS, 4, a);
    else if (a->kind == WIDENED)
        NAME(attend_as)(1, WIDENED, 2, a);
    else
        NAME(attend_as)(1, PAIRS, 2, a);
}

/* -- tokens -- */

INLINE vf NAME(load_some)(const float *p, int64_t n) /* n floats, then minus infinity */
{
    float lanes[WIDTH];
    if (n >= WIDTH)
        return v_load(p);
    for (int64_t i = 0; i < WIDTH; i++)
        lanes[i] = i < n ? p[i] : -INFINITY;
    return v_load(lanes);
}

/* The token t with cdf(t-1) <= u < cdf(t) of softmax(logits / temperature), summed in vocabulary order, or the likeliest (the
   first of equals) at temperature 0; and its log-prob. */
FN void NAME(draw)(const float *logits, int64_t vocab, float temperature, double u, int64_t *token, float *log_prob)
{
    enum { PART = 256 };
    const int64_t parts = (vocab + PART - 1) / PART;
    const vf scale = v_set(temperature > 0 ? 1 / temperature : 1.0f);
    double sums[parts], total = 0.0, before = 0.0;
    vf top = v_set(-INFINITY);
    for (int64_t i = 0; i < vocab; i += WIDTH)
        top = v_max(NAME(load_some)(logits + i, vocab - i), top);
    const float most = NAME(largest)(top);
    top = v_set(most);
    for (int64_t p = 0; p < parts; p++) {
        vf sum = v_set(0.0f);
        for (int64_t i = p * PART; i < vocab && i < (p + 1) * PART; i += WIDTH)
            sum = v_add(sum, NAME(exponential)(v_mul(v_sub(NAME(load_some)(logits + i, vocab - i), top), scale)));
        total += sums[p] = NAME(sum)(sum);
    }
    int64_t found = 0, chosen = 0;
    if (temperature <= 0)
        while (found + 1 < vocab && logits[found] != most)
            found++;
    else if (total > 0 && total < INFINITY) {
        float weights[PART];
        double target = u * total;
        int64_t p = 0;
        while (p + 1 < parts && before + sums[p] <= target)
            before += sums[p++];
        for (int64_t i = 0; i < PART; i += WIDTH)
            v_store(weights + i, NAME(exponential)(v_mul(v_sub(NAME(load_some)(logits + p * PART + i, vocab - p * PART - i), top), scale)));
        for (int64_t i = 0; i < PART; i++) { /* sums in other orders: u may point a rounding beyond the part, then its last token is meant */
            if (weights[i] > 0)
                chosen = i;
            if (before + weights[i] > target && weights[i] > 0)
                break;
            before += weights[i];
        }
        found = p * PART + chosen;
    }
    *token = found;
    *log_prob = (float)((logits[found] - most) * (temperature > 0 ? 1 / temperature : 1.0f) - __builtin_log(total));
}

static const struct kernels NAME(kernels) = {
    STRING(ISA), WIDTH, MR, PAIR_ROWS, NR, NAME(gemm), NAME(pack), NAME(widen), NAME(narrow), NAME(rms_norm), NAME(heads),
    NAME(attend), NAME(swiglu), NAME(draw),
};

#undef ISA
#undef TARGET
#undef WIDTH
#undef HAS_PAIRS
#undef HAS_TILES
#undef PAIR_ROWS
#undef MR
#undef NR
