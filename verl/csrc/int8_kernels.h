/* Products of int8 weights and int8 activations, summed as int32: the includer defines ISA, TARGET, WIDTH, HAS_DOT and HAS_TILES. Sums are
   exact, so all instruction sets give the same bits. Rows of weights are outputs, rows of activations are tokens (levels.h).
   One channel of a token may be twenty times as large as the others, which then have a few levels left. Such values are multiplied as
   floats: those whose squares are beyond APART times the mean, fewer than an APART-th of a row. */

#define HAS_PAIRS 0
#include "simd.h"
#undef HAS_PAIRS
#include "levels.h"

#if WIDTH == 16
#define MR 8
#define v_scaled(sum, scale) v_mul(_mm512_cvtepi32_ps(sum), scale)
#define v_beyond(x, limit) _mm512_cmp_ps_mask(x, limit, _CMP_GT_OQ)
#define v_signed(x, up, down) _mm512_sra_epi32(_mm512_sll_epi32(x, _mm_cvtsi32_si128(up)), _mm_cvtsi32_si128(down))
#else
#define MR 4
#define v_scaled(sum, scale) v_mul(_mm256_cvtepi32_ps(sum), scale)
#define v_beyond(x, limit) _mm256_movemask_ps(_mm256_cmp_ps(x, limit, _CMP_GT_OQ))
#define v_signed(x, up, down) _mm256_sra_epi32(_mm256_sll_epi32(x, _mm_cvtsi32_si128(up)), _mm_cvtsi32_si128(down))
#endif
#define NR (3 * WIDTH)

/* A step multiplies GROUP inputs. With HAS_DOT an operand has them as unsigned bytes, 128 above their levels, which the
   `below` of a panel takes off again. Else it has them as int16: the products of bytes of other processors saturate. */
#if HAS_DOT && WIDTH == 16
#define GROUP 4
#define v_weights(p) v_loadi(p)
#define v_dot(sum, a, w) _mm512_dpbusd_epi32(sum, _mm512_set1_epi32(a), w)
#define v_plus(a, b) _mm512_add_epi32(a, b)
#elif HAS_DOT
#define GROUP 4
#define v_weights(p) v_loadi(p)
#define v_dot(sum, a, w) _mm256_dpbusd_avx_epi32(sum, _mm256_set1_epi32(a), w)
#define v_plus(a, b) _mm256_add_epi32(a, b)
#elif WIDTH == 16
#define GROUP 2
#define v_weights(p) _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(p)))
#define v_dot(sum, a, w) _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_set1_epi32(a), w))
#define v_plus(a, b) _mm512_add_epi32(a, b)
#else
#define GROUP 2
#define v_weights(p) _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(p)))
#define v_dot(sum, a, w) _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_set1_epi32(a), w))
#define v_plus(a, b) _mm256_add_epi32(a, b)
#endif
#define PART ((int64_t)WIDTH * GROUP) /* bytes of a step that a vector holds */
#define HEADER ((int64_t)NR * 8)      /* of a panel: scales [NR] as floats, then `below` [NR] as int32 */

INLINE vf NAME(values)(const int halves, const char *row, int64_t i) { return halves ? v_load_bf16(row + 2 * i) : v_load((const float *)row + i); }

/* The square beyond which a value of a row is an outlier; sums have one order on all processors */
INLINE float NAME(square_limit)(const int halves, const char *row, int64_t n)
{
    vf parts[16 / WIDTH];
    float lanes[16], sum = 0.0f;
    int64_t i = 0;
    for (int64_t j = 0; j < 16 / WIDTH; j++)
        parts[j] = v_set(0.0f);
    for (; i + 16 <= n; i += 16)
        for (int64_t j = 0; j < 16 / WIDTH; j++) {
            const vf x = NAME(values)(halves, row, i + j * WIDTH);
            parts[j] = v_fma(x, x, parts[j]);
        }
    for (int64_t j = 0; j < 16 / WIDTH; j++)
        v_store(lanes + j * WIDTH, parts[j]);
    for (int64_t j = 0; i + j < n; j++)
        lanes[j] = __builtin_fmaf(NAME(value)(row, i + j, halves), NAME(value)(row, i + j, halves), lanes[j]);
    for (int j = 0; j < 16; j++)
        sum += lanes[j];
    return sum / (float)n * (float)APART;
}

INLINE void NAME(quantize_as)(const int halves, char *to, float *scale, struct outliers *apart, const char *row, int64_t n)
{
    const float limit = NAME(square_limit)(halves, row, n);
    float rest[n], inverse;
    apart->count = 0;
    for (int64_t i = 0; i < n; i += WIDTH) { /* few vectors have an outlier */
        const int64_t end = i + WIDTH < n ? i + WIDTH : n;
        int beyond = end < i + WIDTH;
        if (beyond)
            for (int64_t j = i; j < end; j++)
                rest[j] = NAME(value)(row, j, halves);
        else {
            const vf x = NAME(values)(halves, row, i);
            v_store(rest + i, x);
            beyond = v_beyond(v_mul(x, x), v_set(limit));
        }
        for (int64_t j = i; beyond && j < end; j++)
            if (rest[j] * rest[j] > limit && apart->count < n / APART) {
                apart->some[apart->count++] = (struct outlier){(int32_t)j, rest[j]};
                rest[j] = 0.0f;
            }
    }
    *scale = NAME(scale_of)((const char *)rest, n, 0, &inverse);
    for (int64_t i = 0; i < n; i++)
        if (GROUP == 4)
            ((uint8_t *)to)[i] = (uint8_t)(NAME(level)(rest[i], inverse) + 128);
        else
            ((int16_t *)to)[i] = (int16_t)NAME(level)(rest[i], inverse);
}

/* Levels of a row as an operand of products, its scale and its outliers. What pads a row to groups is multiplied by zeros. */
FN void NAME(quantize)(char *to, float *scale, char *apart, const char *row, int64_t n, int halves)
{
    if (halves)
        NAME(quantize_as)(1, to, scale, (struct outliers *)apart, row, n);
    else
        NAME(quantize_as)(0, to, scale, (struct outliers *)apart, row, n);
}

INLINE void NAME(pack_row)(const int halves, char *panel, int64_t n, const char *row, int64_t inputs)
{
    float inverse;
    int32_t sum = 0;
    ((float *)panel)[n] = NAME(scale_of)(row, inputs, halves, &inverse);
    for (int64_t i = 0; i < inputs; i++) {
        int32_t level = NAME(level)(NAME(value)(row, i, halves), inverse);
        sum += level;
        panel[HEADER + i / GROUP * NR * GROUP + n * GROUP + i % GROUP] = (char)level;
    }
    ((int32_t *)panel)[NR + n] = GROUP == 4 ? -128 * sum : 0;
}

/* Panels [begin, end) of weights [outputs][inputs]: their header, then levels [inputs / GROUP][NR][GROUP], padded with zeros */
FN void NAME(pack)(int bf16, char *to, const char *from, int64_t outputs, int64_t inputs, int64_t begin, int64_t end)
{
    const int64_t bytes = HEADER + (inputs + GROUP - 1) / GROUP * NR * GROUP;
    for (int64_t panel = begin; panel < end; panel++) {
        char *out = to + panel * bytes;
        __builtin_memset(out, 0, (size_t)bytes);
        for (int64_t n = 0; n < NR && panel * NR + n < outputs; n++)
            if (bf16)
                NAME(pack_row)(1, out, n, from + (panel * NR + n) * inputs * 2, inputs);
            else
                NAME(pack_row)(0, out, n, from + (panel * NR + n) * inputs * 4, inputs);
    }
}

/* `fetches`: weights that lie `ahead` bytes further are fetched. `acc` is local, as GCC 12 would read and write `sums` in each step. */
INLINE void NAME(tile)(const int rows, const int fetches, int64_t steps, int64_t stride, const char *a, const char *b, int64_t ahead, vi sums[MR][3])
{
    vi acc[MR][3];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
        acc[i][0] = acc[i][1] = acc[i][2] = v_int(v_set(0.0f));
    for (int64_t s = 0; s < steps; s++, a += 4, b += 3 * PART) {
        vi w0 = v_weights(b), w1 = v_weights(b + PART), w2 = v_weights(b + 2 * PART);
#pragma GCC unroll 3
        for (int i = 0; fetches && i < (int)(3 * PART + 63) / 64; i++)
            _mm_prefetch(b + ahead + 64 * i, _MM_HINT_T0);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            int x;
            __builtin_memcpy(&x, a + i * stride, 4);
            acc[i][0] = v_dot(acc[i][0], x, w0);
            acc[i][1] = v_dot(acc[i][1], x, w1);
            acc[i][2] = v_dot(acc[i][2], x, w2);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
        sums[i][0] = acc[i][0], sums[i][1] = acc[i][1], sums[i][2] = acc[i][2];
}

/* The products of a row's outliers with WIDTH outputs, levels of weights that begin at `levels`, in units of their scales */
INLINE vf NAME(apart)(const struct outliers *apart, const char *levels)
{
    const int bits = 32 / GROUP; /* an input of a step has so many in a lane */
    vf sum = v_set(0.0f);
    for (int64_t i = 0; i < apart->count; i++) {
        const int64_t input = apart->some[i].input;
        const vi both = v_weights(levels + input / GROUP * NR * GROUP);
        sum = v_add(sum, v_scaled(v_signed(both, 32 - bits * (1 + (int)(input % GROUP)), 32 - bits), v_set(apart->some[i].value)));
    }
    return sum;
}

INLINE void NAME(finish)(const int rows, const struct gemm *g, int64_t row, int64_t column, int count, const char *panel, vi acc[MR][3])
{
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++) {
        float *out = g->out + (row + i) * g->out_stride + column;
        const struct outliers *apart = (const struct outliers *)(g->apart + (row + i) * g->apart_stride);
        if (i < count)
            for (int j = 0; j < 3; j++) {
                const float *scale = (const float *)panel + j * WIDTH;
                vf y = v_scaled(v_plus(acc[i][j], v_loadi(scale + NR)), v_load(scale));
                y = v_mul(y, v_set(g->a_scale[row + i]));
                if (apart->count)
                    y = v_add(y, v_mul(NAME(apart)(apart, panel + HEADER + j * PART), v_load(scale)));
                if (g->bias)
                    y = v_add(y, v_load(g->bias + column + j * WIDTH));
                if (g->bf16)
                    y = NAME(rounded)(y);
                if (g->add)
                    y = v_add(v_load(out + j * WIDTH), y);
                if (g->add && g->bf16)
                    y = NAME(rounded)(y);
                v_store(out + j * WIDTH, y);
            }
    }
}

#if HAS_TILES
#define TILE_PRODUCT _tile_dpbusd
#include "tile_sums.h"
#define ROWS_OF_SUMS AMX_ROWS

/* See units_by_tiles() of decoder_kernels.h. */
FN void NAME(gemm)(const struct gemm *g, int64_t begin, int64_t end)
{
    const int64_t tiles = (g->rows + AMX_ROWS - 1) / AMX_ROWS, bytes = HEADER + g->steps * 3 * PART;
    int32_t sums[AMX_ROWS * NR] __attribute__((aligned(64)));
    int64_t shape = 0;
    for (int64_t unit = begin; unit < end; unit++) {
        const int64_t panel = unit / tiles, row = unit % tiles * AMX_ROWS, count = g->rows - row < AMX_ROWS ? g->rows - row : AMX_ROWS;
        const char *header = g->b + panel * bytes;
        NAME(sum_tiles)(count, NAME(shape_tiles)(count, &shape), g->steps, g->a + row * g->a_stride, g->a_stride, header + HEADER, tiles == 1, sums);
        for (int64_t i = 0; i < count; i++) {
            const int32_t *from = sums + i * NR;
            vi acc[MR][3] = {{v_loadi(from), v_loadi(from + WIDTH), v_loadi(from + 2 * WIDTH)}};
            NAME(finish)(1, g, row + i, panel * NR, 1, header, acc);
        }
    }
    _tile_release();
}
#else
#define ROWS_OF_SUMS MR

/* See units() of decoder_kernels.h. */
FN void NAME(gemm)(const struct gemm *g, int64_t begin, int64_t end)
{
    const int64_t tiles = (g->rows + MR - 1) / MR, bytes = HEADER + g->steps * 3 * PART;
    vi acc[MR][3];
    for (int64_t unit = begin; unit < end; unit++) {
        int64_t panel = unit / tiles, tile = unit % tiles, row = tile * MR, ahead = tiles == 1 ? 4096 : bytes;
        int count = g->rows - row < MR ? (int)(g->rows - row) : MR;
        const char *a = g->a + row * g->a_stride, *header = g->b + panel * bytes, *b = header + HEADER;
        if (count > MR / 2) {
            if (tile == 0)
                NAME(tile)(MR, 1, g->steps, g->a_stride, a, b, ahead, acc);
            else
                NAME(tile)(MR, 0, g->steps, g->a_stride, a, b, 0, acc);
            NAME(finish)(MR, g, row, panel * NR, count, header, acc);
        } else if (count > 1) {
            NAME(tile)(MR / 2, 1, g->steps, g->a_stride, a, b, tiles == 1 ? ahead : 0, acc);
            NAME(finish)(MR / 2, g, row, panel * NR, count, header, acc);
        } else {
            NAME(tile)(1, 1, g->steps, g->a_stride, a, b, tiles == 1 ? ahead : 0, acc);
            NAME(finish)(1, g, row, panel * NR, count, header, acc);
        }
    }
}

#endif

static const struct int8_kernels NAME(kernels) = {GROUP, HEADER, ROWS_OF_SUMS, NAME(gemm), NAME(pack), NAME(quantize)};

#undef ISA
#undef TARGET
#undef WIDTH
#undef HAS_DOT
#undef HAS_TILES
#undef ROWS_OF_SUMS
#undef MR
#undef NR
#undef GROUP
#undef PART
#undef HEADER
#undef v_weights
#undef v_dot
#undef v_plus
#undef v_scaled
#undef v_beyond
#undef v_signed
