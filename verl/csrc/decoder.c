/* A forward of a dense decoder on the processor: all layers in one call of a team of threads, and draws of tokens.

   Needs nothing but the C library and threads. Torch's matrix products take other kernels for other numbers of rows, and its
   threads either sleep between two operators or spin against other processes; here every sum has one order, and threads that
   wait give way. verl/rollout/native/compiled/library.py loads it; on other processors kernels_for() finds nothing and torch computes. */

#define _GNU_SOURCE
#include "decoder.h"

#if defined(__x86_64__) && defined(__linux__)

#include <immintrin.h>
#include <math.h>
#include <string.h>
#include <sys/mman.h>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#define GAP 64 /* between the buffers of a workspace, never touched */
#else
#define GAP 0
#endif

#include "team.h"

#define STRING_(x) #x
#define STRING(x) STRING_(x)

#include "amx.h"
#ifdef HAVE_AMX
#define ISA avx512_amx
#define TARGET AMX_TARGET
#define WIDTH 16
#define HAS_PAIRS 1
#define HAS_TILES 1
#include "decoder_kernels.h"
#endif

#if defined(__clang__) ? __clang_major__ >= 9 : __GNUC__ >= 10
#define ISA avx512_bf16
#define TARGET __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512bf16")))
#define WIDTH 16
#define HAS_PAIRS 1
#include "decoder_kernels.h"
#define HAVE_BF16 1
#endif

#define ISA avx512
#define TARGET __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl")))
#define WIDTH 16
#define HAS_PAIRS 0
#include "decoder_kernels.h"

#define ISA avx2
#define TARGET __attribute__((target("avx2,fma")))
#define WIDTH 8
#define HAS_PAIRS 0
#include "decoder_kernels.h"

#ifdef HAVE_AMX
#define ISA int8_amx
#define TARGET __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512vnni,amx-tile,amx-int8")))
#define WIDTH 16
#define HAS_DOT 1
#define HAS_TILES 1
#include "int8_kernels.h"
#endif

#if defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11
#define ISA int8_avx512_vnni
#define TARGET __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512vnni")))
#define WIDTH 16
#define HAS_DOT 1
#include "int8_kernels.h"

#define ISA int8_avx_vnni
#define TARGET __attribute__((target("avx2,fma,avxvnni")))
#define WIDTH 8
#define HAS_DOT 1
#include "int8_kernels.h"
#define HAVE_VNNI 1
#endif

#define ISA int8_avx512
#define TARGET __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl")))
#define WIDTH 16
#define HAS_DOT 0
#include "int8_kernels.h"

#define ISA int8_avx2
#define TARGET __attribute__((target("avx2,fma")))
#define WIDTH 8
#define HAS_DOT 0
#include "int8_kernels.h"

/* The int8 kernels beside `k`, with panels of as many outputs */
static const struct int8_kernels *int8_of(const struct kernels *k)
{
    const int wide = k->width == 16;
#ifdef HAVE_AMX
    if (k == &kernels_avx512_amx && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("amx-int8"))
        return &kernels_int8_amx;
#endif
#ifdef HAVE_VNNI
    __builtin_cpu_init();
    if (wide ? __builtin_cpu_supports("avx512vnni") : __builtin_cpu_supports("avxvnni"))
        return wide ? &kernels_int8_avx512_vnni : &kernels_int8_avx_vnni;
#endif
    return wide ? &kernels_int8_avx512 : &kernels_int8_avx2;
}

/* The kernels of instruction set `name`, or the fastest for NULL; NULL where the processor lacks them. */
const struct kernels *kernels_for(const char *name)
{
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
#ifdef HAVE_AMX
    if (avx512 && (!name || !strcmp(name, "avx512_amx")) && amx_allowed())
        return &kernels_avx512_amx;
#endif
#ifdef HAVE_BF16
    /* AMD's processors multiply bfloat16 pairs twice as fast as widened ones, Intel's (Sapphire Rapids) at 0.6 of their rate.
       The maker decides and no measurement, so that a processor always computes the same bits. */
    int wanted = name ? !strcmp(name, "avx512_bf16") : __builtin_cpu_is("amd");
    if (avx512 && __builtin_cpu_supports("avx512bf16") && wanted)
        return &kernels_avx512_bf16;
#endif
    if (avx512 && (!name || !strcmp(name, "avx512")))
        return &kernels_avx512;
    if (avx2 && (!name || !strcmp(name, "avx2")))
        return &kernels_avx2;
    return 0;
}

/* Of the structures in decoder.h, which a caller compares with its own */
int kernels_revision(void) { return REVISION; }
const char *kernels_name(const struct kernels *k) { return k->name; }
int kernels_panel(const struct kernels *k) { return k->panel; }

/* -- the forward -- */

struct forward {
    const struct kernels *kernels;
    const struct int8_kernels *int8;
    const struct model *model;
    const struct step *step;
    int kind;
    int64_t x_stride, qkv_stride, gate_stride; /* floats */
    int64_t a_stride, att_stride, h_stride, level_stride, apart_stride; /* bytes */
    int64_t scratch_bytes, scores_stride, low_stride; /* low_stride: floats */
    float *x, *qkv, *gate_up, *low, *level_scales;
    char *q, *att, *a, *h, *levels, *apart, *scratch; /* levels, apart: of the operand of the next int8 product */
};

/* Where the next buffer of a workspace starts, behind one that ends at `end` */
static int64_t fence(char *work, int64_t end)
{
#ifdef __SANITIZE_ADDRESS__
    if (work)
        ASAN_POISON_MEMORY_REGION(work + end, GAP);
#else
    (void)work;
#endif
    return end + GAP;
}

/* Lay the buffers of a step out from `work` on; returns their bytes. */
static int64_t lay_out(struct forward *f, const struct kernels *k, const struct model *m, const struct step *s, char *work)
{
    /* a tile of 8 rows may begin at any row, where the tokens of an adapter do */
    const int64_t tokens = round_up(s->tokens, 8) + 8, chunk = tokens < CHUNK + 8 ? tokens : CHUNK + 8, dim = padded_head(m);
    const int64_t queries = s->max_tile * (m->heads / m->kv_heads), has_levels = m->int8 || m->int8_head;
    int64_t used = 0;
    f->kernels = k, f->int8 = int8_of(k), f->model = m, f->step = s;
    f->kind = (int)m->kind;
    f->x_stride = round_up(m->hidden, k->panel);
    f->qkv_stride = round_up((m->heads + 2 * m->kv_heads) * m->head_dim, k->panel);
    f->gate_stride = round_up(m->inner, k->panel);
    f->a_stride = row_bytes(m->hidden, f->kind);
    f->att_stride = row_bytes(m->heads * m->head_dim, f->kind);
    f->h_stride = row_bytes(m->inner, f->kind);
    f->scores_stride = round_up(s->max_seen, BLOCK) + 3 * BLOCK;
    f->low_stride = round_up(s->max_rank, k->panel);
    f->level_stride = has_levels ? (f->h_stride > f->att_stride ? f->h_stride : f->att_stride) + f->a_stride : 0;
#define TAKE(field, bytes) f->field = (void *)(work + used), used = fence(work, used + round_up(bytes, 64))
    TAKE(x, tokens * f->x_stride * 4);
    TAKE(q, tokens * m->heads * dim * item(f->kind));
    TAKE(att, tokens * f->att_stride);
    TAKE(a, chunk * f->a_stride);
    TAKE(qkv, chunk * f->qkv_stride * 4);
    TAKE(gate_up, chunk * 2 * f->gate_stride * 4);
    TAKE(h, chunk * f->h_stride);
    TAKE(low, chunk * f->low_stride * 4);
    TAKE(levels, chunk * f->level_stride);
    f->apart_stride = has_levels ? apart_bytes(m->inner + m->hidden + m->heads * m->head_dim) : 0;
    TAKE(level_scales, has_levels ? chunk * 4 : 0);
    TAKE(apart, chunk * f->apart_stride);
    f->scratch_bytes = round_up(queries * (f->scores_stride + 2 * dim) * 4, 64) + 64;
    TAKE(scratch, s->threads * f->scratch_bytes);
#undef TAKE
    return used;
}

static void multiply(const struct forward *f, const struct team *team, int thread, struct gemm g, int64_t inputs, int64_t outputs)
{
    const struct model *m = f->model;
    const int int8 = g.kind == INT8;
    g.kind = int8 ? INT8 : f->kind;
    g.block = inputs == m->hidden ? m->hidden_block : inputs == m->heads * m->head_dim ? m->heads_block : inputs == m->inner ? m->inner_block : 0;
    g.steps = int8 ? (inputs + f->int8->group - 1) / f->int8->group : g.kind == FLOATS ? inputs : (inputs + 1) / 2;
    g.panels = round_up(outputs, f->kernels->panel) / f->kernels->panel;
    int64_t tile = int8 ? f->int8->tile_rows : rows_of(f->kernels, g.kind), units = g.panels * ((g.rows + tile - 1) / tile);
    (int8 ? f->int8->gemm : f->kernels->gemm)(&g, units * thread / team->size, units * (thread + 1) / team->size);
}

/* This thread's share of the rows that an int8 product reads, if there is one */
static void quantize(const struct forward *f, const struct team *team, int thread, const char *a, int64_t a_stride, int64_t inputs, int64_t rows, int64_t int8)
{
    for (int64_t r = rows * thread / team->size; int8 && r < rows * (thread + 1) / team->size; r++)
        f->int8->quantize(f->levels + r * f->level_stride, f->level_scales + r, f->apart + r * f->apart_stride, a + r * a_stride, inputs, f->kind == PAIRS);
}

/* The rows of a run among those of a product that begins at token `first`: their number, from row *begin on */
static int64_t run_rows(const int64_t *ends, int64_t run, int64_t first, int64_t rows, int64_t *begin)
{
    int64_t start = run ? ends[run - 1] - first : -first, end = ends[run] - first;
    *begin = start > 0 ? start : 0;
    return (end < rows ? end : rows) - *begin;
}

/* The down (or up) products of the adapters of a projection's tokens */
static void low_rank_products(const struct forward *f, const struct team *team, int thread, const struct gemm *g, int64_t first, int64_t number,
                              const int64_t *ends, int64_t inputs, int64_t outputs, int up)
{
    const struct step *s = f->step;
    for (int64_t run = 0; run < s->num_runs; run++) {
        const struct low_rank *low = s->run_adapters[run] ? s->run_adapters[run] + number : 0;
        int64_t begin, rows = run_rows(ends, run, first, g->rows, &begin);
        if (!low || !low->rank || rows <= 0)
            continue;
        char *a = (char *)(f->low + begin * f->low_stride);
        if (up) {
            struct gemm product = {.add = 1, .a = a, .a_stride = f->low_stride * 4, .b = low->up, .out = g->out + begin * g->out_stride, .out_stride = g->out_stride, .rows = rows};
            multiply(f, team, thread, product, low->rank, outputs);
        } else {
            struct gemm product = {.a = g->a + begin * g->a_stride, .a_stride = g->a_stride, .b = low->down, .out = (float *)a, .out_stride = f->low_stride, .rows = rows};
            multiply(f, team, thread, product, inputs, low->rank);
        }
    }
}

/* Floats that hold bfloat16 values, as operands of a product in pairs, in place */
static void narrow(const struct forward *f, const struct team *team, int thread, int64_t rows)
{
    for (int64_t r = rows * thread / team->size; r < rows * (thread + 1) / team->size; r++) {
        char *row = (char *)(f->low + r * f->low_stride);
        for (int64_t i = 0; i < f->low_stride; i++)
            memcpy(row + 2 * i, row + 4 * i + 2, 2);
    }
}

/* A product with the adapters of its tokens, which begin at token `first` of the `ends` of runs */
static void multiply_adapted(const struct forward *f, struct team *team, int thread, struct gemm g, int64_t first, int64_t number, const int64_t *ends,
                             int64_t inputs, int64_t outputs)
{
    struct gemm base = g;
    if (number < 4 * f->model->layers ? f->model->int8 : f->model->int8_head) {
        base.kind = INT8, base.bf16 = number < 4 * f->model->layers && f->model->bf16; /* logits are float32 */
        base.a = f->levels, base.a_stride = f->level_stride, base.a_scale = f->level_scales;
        base.apart = f->apart, base.apart_stride = f->apart_stride;
    }
    multiply(f, team, thread, base, inputs, outputs);
    if (!f->step->num_runs)
        return;
    low_rank_products(f, team, thread, &g, first, number, ends, inputs, outputs, 0);
    barrier(team);
    if (f->kind == PAIRS) {
        narrow(f, team, thread, g.rows);
        barrier(team);
    }
    low_rank_products(f, team, thread, &g, first, number, ends, inputs, outputs, 1);
}

static void normalise(const struct forward *f, const struct team *team, int thread, int64_t first, int64_t rows, const float *weight, float eps, int64_t int8)
{
    const struct model *m = f->model;
    for (int64_t r = rows * thread / team->size; r < rows * (thread + 1) / team->size; r++)
        f->kernels->rms_norm(f->a + r * f->a_stride, f->x + (first + r) * f->x_stride, m->hidden, round_up(m->hidden, 2),
                             (struct norm){weight, eps}, (int)m->bf16, f->kind);
    quantize(f, team, thread, f->a, f->a_stride, m->hidden, rows, int8);
}

/* Record a row of a token, [width] floats at column `column` of [columns], in `to`, a part of the record */
static void record_floats(const struct forward *f, uint16_t *to, int64_t layer, int64_t token, const float *from, int64_t width, int64_t column, int64_t columns)
{
    const int64_t slot = f->step->record->slots[token];
    if (slot >= 0)
        f->kernels->narrow(to + record_row(f->step->record, layer, slot, columns) + column, from, width);
}

/* Record the results of attention of all tokens, and in the last layer zeros for what is computed of kept tokens only. */
static void record_attended(const struct forward *f, struct team *team, int thread, int64_t layer)
{
    const struct model *m = f->model;
    const struct record *r = f->step->record;
    const int64_t width = m->heads * m->head_dim, is_last = layer + 1 == m->layers;
    for (int64_t t = f->step->tokens * thread / team->size; t < f->step->tokens * (thread + 1) / team->size; t++) {
        const int64_t slot = r->slots[t];
        if (slot < 0)
            continue;
        memcpy(r->attended + record_row(r, layer, slot, width), f->att + t * f->att_stride, (size_t)width * 2);
        if (is_last) { /* gradients are zero there, and zero times anything finite */
            memset(r->middle + record_row(r, layer, slot, m->hidden), 0, (size_t)m->hidden * 2);
            memset(r->gate_up + record_row(r, layer, slot, 2 * m->inner), 0, (size_t)m->inner * 4);
        }
    }
    if (is_last)
        barrier(team);
}

/* Queries of all tokens, their keys and values stored */
static void project(struct forward *f, struct team *team, int thread, int64_t layer)
{
    const struct model *m = f->model;
    const struct layer *w = m->layer + layer;
    const struct record *record = f->step->record;
    const int64_t width = (m->heads + 2 * m->kv_heads) * m->head_dim;
    for (int64_t first = 0; first < f->step->tokens; first += CHUNK) {
        int64_t rows = f->step->tokens - first < CHUNK ? f->step->tokens - first : CHUNK;
        normalise(f, team, thread, first, rows, w->input_norm, w->input_eps, m->int8);
        barrier(team);
        struct gemm g = {.a = f->a, .a_stride = f->a_stride, .b = w->qkv, .bias = w->qkv_bias, .out = f->qkv, .out_stride = f->qkv_stride, .rows = rows};
        multiply_adapted(f, team, thread, g, first, 4 * layer, f->step->run_ends, m->hidden, width);
        barrier(team);
        for (int64_t r = rows * thread / team->size; r < rows * (thread + 1) / team->size; r++) {
            if (record) {
                record_floats(f, record->x, layer, first + r, f->x + (first + r) * f->x_stride, m->hidden, 0, m->hidden);
                record_floats(f, record->qkv, layer, first + r, f->qkv + r * f->qkv_stride, width, 0, width);
            }
            f->kernels->heads(m, f->step, layer, first + r, f->qkv + r * f->qkv_stride,
                              f->q + (first + r) * m->heads * padded_head(m) * item(f->kind), f->kind);
        }
        barrier(team);
    }
}

static void attend(struct forward *f, struct team *team, int thread, int64_t layer)
{
    const struct model *m = f->model;
    const struct step *s = f->step;
    const int64_t queries = s->max_tile * (m->heads / m->kv_heads), tasks = s->num_tiles * m->kv_heads;
    char *own = f->scratch + thread * f->scratch_bytes;
    struct attention a = {.model = m, .step = s, .layer = layer, .q = f->q, .out = f->att, .out_stride = f->att_stride, .kind = f->kind};
    a.scratch.out = (float *)own;
    a.scratch.q = own + queries * padded_head(m) * 4;
    a.scratch.scores = (float *)(a.scratch.q + queries * padded_head(m) * 4);
    a.scratch.scores_stride = f->scores_stride;
    for (int64_t task; (task = atomic_fetch_add(&team->next, 1)) < tasks;) {
        a.tile = task / m->kv_heads, a.kv_head = task % m->kv_heads;
        f->kernels->attend(&a);
    }
    barrier(team);
}

/* What attention gave is projected and added, then the feed-forward part, for the first `rows` tokens of x and att */
static void feed_forward(struct forward *f, struct team *team, int thread, int64_t layer, int64_t tokens)
{
    const struct model *m = f->model;
    const struct layer *w = m->layer + layer;
    const int is_last = layer + 1 == m->layers;
    const int64_t *ends = is_last ? f->step->kept_ends : f->step->run_ends;
    const struct record *record = f->step->record;
    for (int64_t first = 0; first < tokens; first += CHUNK) {
        int64_t rows = tokens - first < CHUNK ? tokens - first : CHUNK;
        float *x = f->x + first * f->x_stride;
        if (m->int8) {
            quantize(f, team, thread, f->att + first * f->att_stride, f->att_stride, m->heads * m->head_dim, rows, 1);
            barrier(team);
        }
        struct gemm o = {.add = 1, .a = f->att + first * f->att_stride, .a_stride = f->att_stride, .b = w->o, .bias = w->o_bias, .out = x, .out_stride = f->x_stride, .rows = rows};
        multiply_adapted(f, team, thread, o, first, 4 * layer + 1, ends, m->heads * m->head_dim, m->hidden);
        barrier(team);
        if (!w->gate_up) /* experts, which the caller computes */
            continue;
        normalise(f, team, thread, first, rows, w->post_norm, w->post_eps, m->int8);
        barrier(team);
        struct gemm up = {.a = f->a, .a_stride = f->a_stride, .b = w->gate_up, .bias = w->gate_up_bias, .out = f->gate_up, .out_stride = 2 * f->gate_stride, .rows = rows};
        multiply_adapted(f, team, thread, up, first, 4 * layer + 2, ends, m->hidden, 2 * f->gate_stride);
        barrier(team);
        for (int64_t r = rows * thread / team->size; r < rows * (thread + 1) / team->size; r++) {
            const float *gate = f->gate_up + 2 * r * f->gate_stride;
            const int64_t token = is_last ? f->step->keep[first + r] : first + r;
            if (record) {
                record_floats(f, record->middle, layer, token, x + r * f->x_stride, m->hidden, 0, m->hidden);
                record_floats(f, record->gate_up, layer, token, gate, m->inner, 0, 2 * m->inner);
                record_floats(f, record->gate_up, layer, token, gate + f->gate_stride, m->inner, m->inner, 2 * m->inner);
            }
            f->kernels->swiglu(f->h + r * f->h_stride, gate, gate + f->gate_stride, m->inner, round_up(m->inner, 2), (int)m->bf16, f->kind);
        }
        quantize(f, team, thread, f->h, f->h_stride, m->inner, rows, m->int8);
        barrier(team);
        struct gemm down = {.add = 1, .a = f->h, .a_stride = f->h_stride, .b = w->down, .bias = w->down_bias, .out = x, .out_stride = f->x_stride, .rows = rows};
        multiply_adapted(f, team, thread, down, first, 4 * layer + 3, ends, m->inner, m->hidden);
        barrier(team);
    }
}

static void forward_job(struct team *team, int thread)
{
    struct forward *f = team->argument;
    const struct model *m = f->model;
    const struct step *s = f->step;
    for (int64_t t = s->tokens * thread / team->size; t < s->tokens * (thread + 1) / team->size; t++) {
        float *x = f->x + t * f->x_stride;
        f->kernels->widen(x, (const char *)s->x + t * m->hidden * (m->bf16 ? 2 : 4), m->hidden, (int)m->bf16);
        memset(f->att + t * f->att_stride, 0, (size_t)f->att_stride); /* also what pads a row to pairs */
    }
    barrier(team);
    for (int64_t layer = 0; layer < m->layers; layer++) {
        project(f, team, thread, layer);
        attend(f, team, thread, layer);
        if (s->record)
            record_attended(f, team, thread, layer);
        if (layer + 1 < m->layers) {
            feed_forward(f, team, thread, layer, s->tokens);
            continue;
        }
        for (int64_t i = 0; thread == 0 && i < s->num_kept; i++)
            if (s->keep[i] != i) { /* ascending, so nothing is overwritten that is needed later */
                memcpy(f->x + i * f->x_stride, f->x + s->keep[i] * f->x_stride, (size_t)f->x_stride * 4);
                memcpy(f->att + i * f->att_stride, f->att + s->keep[i] * f->att_stride, (size_t)f->att_stride);
            }
        barrier(team);
        feed_forward(f, team, thread, layer, s->num_kept);
    }
    for (int64_t i = s->num_kept * thread / team->size; s->record && i < s->num_kept * (thread + 1) / team->size; i++)
        record_floats(f, s->record->x, m->layers, s->keep[i], f->x + i * f->x_stride, m->hidden, 0, m->hidden);
    for (int64_t first = 0; first < s->num_kept; first += CHUNK) {
        int64_t rows = s->num_kept - first < CHUNK ? s->num_kept - first : CHUNK;
        int64_t stride = round_up(m->vocab, f->kernels->panel);
        normalise(f, team, thread, first, rows, m->final_norm, m->final_eps, m->int8_head);
        barrier(team);
        struct gemm g = {.a = f->a, .a_stride = f->a_stride, .b = m->head, .bias = m->head_bias, .out = s->logits + first * stride, .out_stride = stride, .rows = rows};
        multiply_adapted(f, team, thread, g, first, 4 * m->layers, s->kept_ends, m->hidden, m->vocab);
        barrier(team);
    }
}

/* Bytes that `step.work` must have; of the step only sizes are read. */
int64_t decoder_workspace(const struct kernels *k, const struct model *m, const struct step *s)
{
    struct forward f = {0};
    return lay_out(&f, k, m, s, 0);
}

void decoder_forward(const struct kernels *k, const struct model *m, const struct step *s)
{
    struct forward f = {0};
    lay_out(&f, k, m, s, s->work);
    run_team(forward_job, &f, s->threads);
#ifdef __SANITIZE_ADDRESS__
    ASAN_UNPOISON_MEMORY_REGION(s->work, decoder_workspace(k, m, s));
#endif
}

/* -- weights -- */

struct packing {
    const struct kernels *kernels;
    int bf16, int8;
    char *to;
    const char *from;
    int64_t outputs, inputs;
};

static void packing_job(struct team *team, int thread)
{
    const struct packing *p = team->argument;
    int64_t panels = round_up(p->outputs, p->kernels->panel) / p->kernels->panel;
    (p->int8 ? int8_of(p->kernels)->pack : p->kernels->pack)(p->bf16, p->to, p->from, p->outputs, p->inputs, panels * thread / team->size, panels * (thread + 1) / team->size);
}

/* Bytes of weights [outputs][inputs] once packed, with `int8` as int8 */
int64_t decoder_packed(const struct kernels *k, int bf16, int int8, int64_t outputs, int64_t inputs)
{
    const struct int8_kernels *kernels = int8_of(k);
    if (int8)
        return round_up(outputs, k->panel) / k->panel * (kernels->header + round_up(inputs, kernels->group) * k->panel);
    return round_up(outputs, k->panel) * (bf16 ? (inputs + 1) / 2 : inputs) * 4;
}

void decoder_pack(const struct kernels *k, int bf16, int int8, char *to, const char *from, int64_t outputs, int64_t inputs, int64_t threads)
{
    struct packing p = {k, bf16, int8, to, from, outputs, inputs};
    run_team(packing_job, &p, threads);
}

/* y = x weights^T + bias on its own, from activations as the kernels take them (for tests and measurements) */
struct product {
    void (*gemm)(const struct gemm *, int64_t begin, int64_t end);
    struct gemm g;
    int64_t units;
};

static void product_job(struct team *team, int thread)
{
    const struct product *p = team->argument;
    p->gemm(&p->g, p->units * thread / team->size, p->units * (thread + 1) / team->size);
}

static void multiply_alone(const struct kernels *k, struct product p, int64_t outputs, int64_t threads)
{
    const int64_t tile = p.g.kind == INT8 ? int8_of(k)->tile_rows : rows_of(k, p.g.kind);
    p.g.panels = round_up(outputs, k->panel) / k->panel;
    p.g.out_stride = p.g.panels * k->panel;
    p.units = p.g.panels * ((p.g.rows + tile - 1) / tile);
    run_team(product_job, &p, threads);
}

void decoder_product(const struct kernels *k, int kind, const char *x, int64_t x_stride, const char *weights, float *out, int64_t rows, int64_t outputs,
                     int64_t inputs, int64_t block, int64_t threads)
{
    const int64_t steps = kind == FLOATS ? inputs : (inputs + 1) / 2;
    struct gemm g = {.kind = kind, .block = block, .a = x, .a_stride = x_stride, .b = weights, .out = out, .rows = rows, .steps = steps};
    multiply_alone(k, (struct product){k->gemm, g, 0}, outputs, threads);
}

/* The same with int8 weights. `levels` and `apart`, rows of `stride` and apart_bytes(inputs) bytes, and `scales` are memory to work in. */
void decoder_int8_product(const struct kernels *k, int halves, int bf16, const char *x, int64_t stride, char *levels, float *scales, char *apart, const char *weights,
                          float *out, int64_t rows, int64_t outputs, int64_t inputs, int64_t threads)
{
    const struct int8_kernels *int8 = int8_of(k);
    const int64_t apart_stride = apart_bytes(inputs);
    for (int64_t r = 0; r < rows; r++)
        int8->quantize(levels + r * stride, scales + r, apart + r * apart_stride, x + r * stride, inputs, halves);
    const int64_t steps = (inputs + int8->group - 1) / int8->group;
    struct gemm g = {.kind = INT8, .bf16 = bf16, .a = levels, .a_stride = stride, .a_scale = scales, .apart = apart, .apart_stride = apart_stride, .b = weights, .out = out, .rows = rows, .steps = steps};
    multiply_alone(k, (struct product){int8->gemm, g, 0}, outputs, threads);
}

/* -- tokens -- */

struct drawing {
    const struct kernels *kernels;
    const float *logits;
    int64_t rows, stride, vocab;
    float temperature;
    const double *u;
    int64_t *tokens;
    float *log_probs;
};

static void drawing_job(struct team *team, int thread)
{
    const struct drawing *d = team->argument;
    for (int64_t r; (r = atomic_fetch_add(&team->next, 1)) < d->rows;)
        d->kernels->draw(d->logits + r * d->stride, d->vocab, d->temperature, d->u ? d->u[r] : 0.0, d->tokens + r, d->log_probs + r);
    (void)thread;
}

void decoder_draw(const struct kernels *k, const float *logits, int64_t rows, int64_t stride, int64_t vocab, float temperature, const double *u,
                  int64_t *tokens, float *log_probs, int64_t threads)
{
    struct drawing d = {k, logits, rows, stride, vocab, temperature, u, tokens, log_probs};
    run_team(drawing_job, &d, threads < rows ? threads : rows);
}

/* Ask for large pages: a step reads all weights once, and a page of 4 KiB is 21 steps of a product. */
void decoder_large_pages(char *memory, int64_t bytes)
{
    intptr_t start = (intptr_t)round_up((intptr_t)memory, 1 << 21), end = ((intptr_t)memory + bytes) & -(intptr_t)(1 << 21);
    if (start < end)
        madvise((void *)start, (size_t)(end - start), MADV_HUGEPAGE);
}

#else

int kernels_revision(void) { return REVISION; }
const struct kernels *kernels_for(const char *name) { (void)name; return 0; }

#endif
