/* What the compiled kernels of a training step read and write. compiled.py and compiled_attention.py mirror these structures. */

#ifndef VERL_KERNELS_H
#define VERL_KERNELS_H

#include <stdint.h>

enum { REVISION = 3 };          /* counts up when a structure changes */
enum { QUERIES = 72 };          /* of a block; a multiple of the rows of every register tile */
enum { KEYS = 256 };            /* of a block; a multiple of PAD */
enum { PAD = 32 };              /* packed keys of a range are padded to a multiple of this, and so is head_dim */
enum { ROW = KEYS + PAD };      /* floats between two queries of a block of scores; not a power of two */

enum { BLOCK = 16, FLOATS = 0, WIDENED = 1, PAIRS = 2, INT8 = 3 }; /* of decoder.h, for bfloat16 */

/* [tokens][heads][head_dim] floats somewhere; strides in floats, that of head_dim is 1 */
struct heads {
    float *data;
    int64_t token, head;
};

/* A range of tokens whose keys are packed once: those of a segment, or of a prefix. `row`: where they lie among all packed. */
struct range {
    int64_t first, count, row;
};

/* Tokens that see the range `prefix` (an index, or -1) and one another, causally; `own` is their own range. */
struct segment {
    int64_t first, count, own, prefix;
};

/* Segments of one group share keys and are computed one after the other. */
struct call { /* longest: tokens of a segment, in bfloat16 with its prefix */
    int64_t num_heads, num_kv_heads, head_dim, tokens, longest, packed_rows, num_ranges, num_segments, num_groups, threads;
    int64_t bf16;               /* all tensors but lse are bfloat16, strides too are in elements */
    float scale;
    const struct range *ranges;
    const struct segment *segments;
    const int64_t *groups;      /* [num_groups + 1]: where the segments of a group begin */
    struct heads q, k, v, out, d_out, dq, dk, dv; /* from d_out on for the backward alone */
    float *lse;                 /* [tokens][num_heads]: log of the sum of exp(scores) */
    float *work;                /* attention_workspace() floats, 64-aligned */
};

/* Buffers of a call in its workspace, and those of one thread. Packed keys and values are [num_kv_heads][packed_rows * padded]. */
struct work {
    int64_t padded;             /* head_dim */
    float *keys_across, *values_across; /* per range [count / panel][padded][panel] */
    float *keys, *values;       /* per range [padded / panel][padded count][panel] */
    float *dk, *dv;             /* [num_heads][tokens][padded]: gradients by head of the queries */
    float *q, *d_out, *out;     /* [QUERIES][padded] */
    float *scores, *d_scores;   /* [QUERIES][ROW] */
    float *dq, *delta;          /* [longest][padded], [longest] */
    float *q_pairs, *d_out_pairs, *weights, *d_weights, *d_rows; /* of the backward in bfloat16, see bf16_kernels.h */
};

enum { ROWS = 32 };             /* at a time */
enum { RMS_NORM, RMS_NORM_BACKWARD, SWIGLU, SWIGLU_BACKWARD, ROTATE, LOG_SUM_EXP, LOGIT_GRADIENT, INVERSE_RMS, NUM_OPERATIONS };

/* An operation on `count` rows, see pointwise_kernels.h and bf16_kernels.h. */
struct rows {
    int64_t count, columns, heads, stride, threads; /* stride: of rows of heads */
    float *x, *out, *sums;      /* sums: [count / ROWS][columns], then one more row for the sum of all; or NULL */
    const float *d_y, *weight, *scale;
    float eps;
};

enum { FIRST, ONWARD, FURTHER };   /* of the sums of a tile, see tile_kernels.h */

/* out [rows][columns] = a b over `depth`, of bfloat16 values. Of the two strides of a, and of b, one is 1. */
struct product {
    int64_t rows, columns, depth, a_row, a_step, b_column, b_step;
    int64_t block, add, halves, threads; /* add: to out; halves: out is bfloat16, for depths of up to 8192 */
    const uint16_t *a, *b;
    void *out;
    float *work;                /* product_workspace() floats, 64-aligned */
};

/* Of b: `depth` values from `step` on of `columns` columns from `column` on */
struct slab {
    int64_t step, depth, column, columns;
};

/* The kernels of one instruction set. */
struct kernels {
    const char *name;
    void (*pack)(const struct call *, const struct work *, int backward, int64_t range, int64_t kv_head);
    void (*forward)(const struct call *, const struct work *, int64_t segment, int64_t head);
    void (*backward)(const struct call *, const struct work *, int64_t group, int64_t head);
    void (*sum)(const struct call *, const struct work *, int64_t begin, int64_t end);
    void (*rows[NUM_OPERATIONS])(const struct rows *, int64_t begin, int64_t end);
    void (*pack_slab)(const struct product *, const struct slab *, int64_t part, int64_t parts); /* in bfloat16 only */
    void (*multiply)(const struct product *, const struct slab *, float *a, int64_t part, int64_t parts);
    int undivided; /* sums of up to 8192 values of a product do not begin at zero again after `block` of them */
};

static inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
static inline int64_t at_least(int64_t n, int64_t low) { return n > low ? n : low; }
static inline int64_t at_most(int64_t n, int64_t high) { return n < high ? n : high; }

/* In bfloat16: the tokens of a tile of queries, and the floats between the scores of two queries */
static inline int64_t tile_tokens(const struct call *c) { return at_least((c->longest > 4096 ? 8 : 32) / (c->num_heads / c->num_kv_heads), 1); }
static inline int64_t scores_stride(const struct call *c) { return round_up(c->longest, 16) + 48; }

/* Floats between two packed rows of a, an odd number of cache lines */
static inline int64_t product_row(int64_t depth) { return round_up((depth + 1) / 2, 32) + 16; }

#endif
