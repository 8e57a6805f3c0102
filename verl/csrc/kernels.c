/* Kernels of a training step on the processor, in float32 and bfloat16, for what is no large matrix product. Attention over a
   packed batch: blocks of scores stay in a level-2 cache, and the matrix products around them are tiles of registers (Dao 2023,
   FlashAttention-2). And operations on rows, each in one pass over memory. packed.py, log_probs.py and cpu/pointwise.py have the
   same in torch. No result depends on the number of threads. */

#define _GNU_SOURCE
#include "kernels.h"

#if defined(__x86_64__) && defined(__linux__)

#include <math.h>
#include <string.h>

#include "team.h"

#define STRING_(x) #x
#define STRING(x) STRING_(x)

/* Added to a vector, the WIDTH floats from 16 - WIDTH + n on hide its last n lanes. */
#define H -INFINITY
static const float HIDDEN[32] = {[16] = H, H, H, H, H, H, H, H, H, H, H, H, H, H, H, H};
#undef H

#define POINTWISE                                                                                                                 \
    NAME(rms_norm), NAME(rms_norm_backward), NAME(swiglu), NAME(swiglu_backward), NAME(rotate), NAME(log_sum_exp), NAME(logit_gradient)

#define ISA avx512
#define TARGET __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl")))
#define WIDTH 16
#include "all_kernels.h"

#define ISA avx2
#define TARGET __attribute__((target("avx2,fma")))
#define WIDTH 8
#include "all_kernels.h"

#include "amx.h"
#ifdef HAVE_AMX
#define ISA avx512_amx
#define TARGET AMX_TARGET
#define WIDTH 16
#define HAS_PAIRS 1
#define HAS_TILES 1
#include "bf16_kernels.h"
#endif

#if defined(__clang__) ? __clang_major__ >= 9 : __GNUC__ >= 10
#define ISA avx512_bf16
#define TARGET __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512bf16")))
#define WIDTH 16
#define HAS_PAIRS 1
#define HAS_TILES 0
#include "bf16_kernels.h"
#define HAVE_BF16 1
#endif

/* The kernels for bfloat16 that go with the sampler's (see decoder.c), or NULL */
const struct kernels *bf16_kernels_for(const char *name)
{
    __builtin_cpu_init();
#ifdef HAVE_AMX
    if ((!name || !strcmp(name, "avx512_amx")) && amx_allowed())
        return &kernels_avx512_amx;
#endif
#ifdef HAVE_BF16
    if (__builtin_cpu_supports("avx512bf16") && (name ? !strcmp(name, "avx512_bf16") : __builtin_cpu_is("amd")))
        return &kernels_avx512_bf16;
#endif
    (void)name;
    return 0;
}

/* The kernels of instruction set `name`; NULL where the processor lacks them. For NULL those of AVX-512 on AMD's processors
 * (4% of a fine-tuning step faster than AVX2's, Zen 5), else AVX2's: on Intel's, AVX-512 has not been timed. */
const struct kernels *kernels_for(const char *name)
{
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    if (avx512 && (name ? !strncmp(name, "avx512", 6) : __builtin_cpu_is("amd")))
        return &kernels_avx512;
    if (avx2 && (!name || !strcmp(name, "avx2")))
        return &kernels_avx2;
    return 0;
}

int kernels_revision(void) { return REVISION; }
const char *kernels_name(const struct kernels *k) { return k->name; }

struct job {
    const struct kernels *kernels;
    const struct call *call;
    int backward;
};

/* Lay the buffers out from `from` on; returns their floats. Each thread has its own of some. */
static int64_t lay_out(struct work *w, const struct call *c, int backward, int64_t thread, float *from)
{
    const int64_t padded = round_up(c->head_dim, PAD), packed = c->num_kv_heads * c->packed_rows * padded;
    int64_t used = 0;
    w->padded = padded;
#define TAKE(field, floats) w->field = from + used, used += round_up(floats, 16) + 16
#define OWN(field, floats) w->field = from + used + thread * (round_up(floats, 16) + 16), used += c->threads * (round_up(floats, 16) + 16)
    TAKE(keys_across, packed);
    if (c->bf16 && !backward) { /* keys_across holds values too */
        const int64_t rows = tile_tokens(c) * (c->num_heads / c->num_kv_heads);
        OWN(q, rows * padded);
        OWN(scores, rows * scores_stride(c));
        OWN(out, rows * padded);
        return used;
    }
    OWN(q, QUERIES * padded);
    OWN(scores, QUERIES * ROW);
    if (backward) {
        TAKE(values_across, packed);
        TAKE(keys, packed);
        TAKE(dk, c->num_heads * c->tokens * padded);
        TAKE(dv, c->num_heads * c->tokens * padded);
        OWN(d_out, QUERIES * padded);
        OWN(d_scores, QUERIES * ROW);
        OWN(dq, round_up(c->longest, QUERIES) * padded);
        OWN(delta, c->longest);
        if (c->bf16) {
            OWN(q_pairs, QUERIES / 2 * padded);
            OWN(d_out_pairs, QUERIES / 2 * padded);
            OWN(weights, QUERIES / 2 * ROW);
            OWN(d_weights, QUERIES / 2 * ROW);
            OWN(d_rows, QUERIES * (ROW / 2));
        }
    } else {
        TAKE(values, packed);
        OWN(out, QUERIES * padded);
    }
#undef TAKE
#undef OWN
    return used;
}

static void attention_job(struct team *team, int thread)
{
    const struct job *j = team->argument;
    const struct call *c = j->call;
    struct work w = {0};
    lay_out(&w, c, j->backward, thread, c->work);
    for (int64_t task; (task = atomic_fetch_add(&team->next, 1)) < c->num_ranges * c->num_kv_heads;)
        j->kernels->pack(c, &w, j->backward, task / c->num_kv_heads, task % c->num_kv_heads);
    barrier(team);
    const int64_t parts = j->backward ? c->num_groups : c->num_segments, heads = c->bf16 && !j->backward ? c->num_kv_heads : c->num_heads;
    for (int64_t task; (task = atomic_fetch_add(&team->next, 1)) < parts * heads;)
        (j->backward ? j->kernels->backward : j->kernels->forward)(c, &w, task / heads, task % heads);
    if (!j->backward)
        return;
    barrier(team);
    j->kernels->sum(c, &w, c->tokens * thread / team->size, c->tokens * (thread + 1) / team->size);
}

/* Floats that `call.work` must have */
int64_t attention_workspace(const struct call *c, int backward)
{
    struct work w;
    return lay_out(&w, c, backward, 0, 0);
}

void attention_run(const struct kernels *k, const struct call *c, int backward)
{
    struct job j = {k, c, backward};
    run_team(attention_job, &j, c->threads);
}

struct rows_job {
    const struct rows *rows;
    void (*run)(const struct rows *, int64_t begin, int64_t end);
};

static void rows_job(struct team *team, int thread)
{
    const struct rows_job *j = team->argument;
    const struct rows *r = j->rows;
    const int64_t chunks = round_up(r->count, ROWS) / ROWS;
    for (int64_t chunk; (chunk = atomic_fetch_add(&team->next, 1)) < chunks;)
        j->run(r, chunk * ROWS, at_most((chunk + 1) * ROWS, r->count));
    if (!r->sums)
        return;
    barrier(team);
    for (int64_t i = r->columns * thread / team->size; i < r->columns * (thread + 1) / team->size; i++) {
        float sum = 0.0f;
        for (int64_t chunk = 0; chunk < chunks; chunk++)
            sum += r->sums[chunk * r->columns + i];
        r->sums[chunks * r->columns + i] = sum;
    }
}

void rows_run(const struct kernels *k, int operation, const struct rows *r)
{
    struct rows_job j = {r, k->rows[operation]};
    run_team(rows_job, &j, r->threads);
}

struct product_job {
    const struct kernels *kernels;
    const struct product *product;
};

enum { ROWS_OF_A = 96, DEPTH = 8192, SLAB = 1 << 20 }; /* rows that a thread packs; depth of a slab, and its pairs */

static int64_t slab_depth(const struct product *p) { return p->depth > DEPTH ? p->block : p->depth; }
static int64_t slab_columns(const struct product *p)
{
    const int64_t most = at_least(SLAB / (slab_depth(p) / 2 + 1) / PAD * PAD, PAD), slabs = (p->columns + most - 1) / most;
    return round_up((p->columns + slabs - 1) / slabs, PAD);
}

/* Floats that `product.work` must have */
int64_t product_workspace(const struct product *p)
{
    const int64_t depth = slab_depth(p);
    return round_up(slab_columns(p) * (depth + 1) / 2, 16) + p->threads * ROWS_OF_A * product_row(depth);
}

static void product_job(struct team *team, int thread)
{
    const struct product_job *j = team->argument;
    const struct product *p = j->product;
    const int64_t width = slab_columns(p), depth = slab_depth(p), parts = round_up((p->rows + ROWS_OF_A - 1) / ROWS_OF_A, team->size);
    float *a = p->work + product_workspace(p) - (thread + 1) * ROWS_OF_A * product_row(depth);
    for (int64_t step = 0; step < p->depth; step += depth)
        for (int64_t column = 0; column < p->columns; column += width) {
            const struct slab s = {step, at_most(p->depth - step, depth), column, at_most(p->columns - column, width)};
            for (int64_t task; (task = atomic_fetch_add(&team->next, 1)) < 8;)
                j->kernels->pack_slab(p, &s, task, 8);
            barrier(team);
            for (int64_t task; (task = atomic_fetch_add(&team->next, 1)) < parts;)
                j->kernels->multiply(p, &s, a, task, parts);
            barrier(team);
        }
}

void product_run(const struct kernels *k, const struct product *p)
{
    struct product undivided = *p;
    undivided.block = k->undivided && p->depth <= DEPTH ? round_up(p->depth, 2) : p->block;
    struct product_job j = {k, &undivided};
    run_team(product_job, &j, p->threads);
}

#else

int kernels_revision(void) { return REVISION; }
const void *kernels_for(const char *name) { (void)name; return 0; }
const void *bf16_kernels_for(const char *name) { (void)name; return 0; }

#endif
