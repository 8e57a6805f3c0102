/* What a forward of a dense decoder reads and writes. verl/rollout/native/compiled/library.py mirrors these structures. */

#ifndef VERL_DECODER_H
#define VERL_DECODER_H

#include <stdint.h>

enum { REVISION = 10 };         /* counts up when a structure changes */
enum { BLOCK = 16 };            /* tokens of a block of stored keys and values */
enum { CHUNK = 256 };           /* tokens that pass together from one matrix product to the next */
enum { MAX_HEAD_DIM = 256 };

/* How a matrix product reads its operands: float32; bfloat16 weights times float32 activations that hold bfloat16
   values; bfloat16 pairs through vdpbf16ps or tdpbf16ps; int8 weights times int8 activations, for which no other kernel has operands. */
enum { FLOATS = 0, WIDENED = 1, PAIRS = 2, INT8 = 3 };

struct layer {
    const void *qkv, *o, *gate_up, *down; /* packed, see pack(); without gate_up the layer ends behind its attention */
    const float *qkv_bias, *o_bias, *gate_up_bias, *down_bias; /* padded like the outputs, or NULL */
    const float *input_norm, *post_norm, *q_norm, *k_norm;     /* the last two may be NULL */
    float input_eps, post_eps, q_eps, k_eps;
    int64_t window; /* newest tokens that are seen, 0 for all */
};

struct model {
    int64_t layers, hidden, heads, kv_heads, head_dim, inner, vocab;
    int64_t hidden_block, heads_block, inner_block; /* of products with so many inputs, see struct gemm */
    int64_t bf16, kind; /* bf16: weights and roundings, else float32; kind: FLOATS, WIDENED or PAIRS */
    int64_t int8, int8_head; /* the weights of layers are int8, and of the head, see int8_kernels.h */
    int64_t int8_cache; /* keys and values are int8, see levels.h */
    float scale, final_eps;
    const struct layer *layer;
    const float *final_norm, *head_bias;
    const void *head;
};

/* The adapters of a projection's parts as one: y += up (down x), both packed; rank 0 for none. An adapter has one for each
   product: four of each layer (qkv, o, gate_up, down), then the head's. */
struct low_rank {
    const void *down, *up;
    int64_t rank;
};

/* Keys and values of one kind: per layer [slots][kv_heads][capacity / BLOCK] blocks. A block holds its keys as
   [padded head_dim / 2][BLOCK][2] (float32 and int8: [padded head_dim][BLOCK]), then its values as [BLOCK][padded head_dim]. In int8
   the float32 scales [BLOCK] of its tokens follow its keys, and those of its values follow these. */
struct store {
    void **layer;
    int64_t slot_stride, head_stride; /* elements */
};

/* Activations of tokens for the backward of a training step, in bfloat16 but for lse: [layers][capacity][...] each, with a slot
   for each token, or -1. x has one layer more, the last one's results, and like middle and gate_up of the last layer only of
   tokens in `keep`. */
struct record {
    uint16_t *x, *qkv, *attended, *middle, *gate_up;
    float *lse;
    int64_t capacity;
    const int64_t *slots; /* [tokens] of the step */
};

/* One forward. Each token sees prefix_end tokens of a slot of `prefix`, then own_end tokens of a slot of `own`; the last of
   them is itself, and its keys and values are written there. own_slot or prefix_slot may be -1. Tile i computes the attention
   of tokens order[tiles[i]] ... order[tiles[i + 1] - 1], which share their prefix slot. Run i of neighbours ends before token
   run_ends[i], and before kept token kept_ends[i]; its tokens have the adapter run_adapters[i], or NULL. */
struct step {
    int64_t tokens, num_tiles, max_tile, max_seen, num_kept, threads;
    int64_t num_runs, max_rank;
    const void *x;          /* [tokens][hidden], embeddings */
    const float *cos, *sin; /* [tokens][head_dim] */
    const int64_t *position, *prefix_slot, *prefix_end, *own_slot, *own_end, *order, *tiles;
    const int64_t *keep;    /* tokens whose logits are asked for, ascending */
    const int64_t *run_ends, *kept_ends;
    const struct low_rank *const *run_adapters;
    struct store prefix, own;
    const struct record *record; /* or NULL */
    float *logits;          /* [num_kept][padded vocab] */
    char *work;             /* workspace() bytes, 64-aligned */
};

struct gemm {
    int kind, add;          /* add: out += the product, each rounded to bfloat16 if the weights are */
    const char *a;
    int64_t a_stride;       /* bytes */
    const char *b;
    const float *bias;
    float *out;
    int64_t out_stride;     /* floats */
    int64_t rows, steps, panels;
    int64_t block;          /* pairs: steps whose sum begins at zero, 0 for all */
    const float *a_scale;   /* int8: of each row */
    const char *apart;      /* int8: outliers of each row, `struct outliers`, apart_stride bytes from row to row */
    int64_t apart_stride;
    int bf16;               /* int8: results are rounded */
};

/* Values of a row of activations that are multiplied as floats, by ascending input: fewer than an APART-th of the inputs */
enum { APART = 32 };
struct outlier {
    int32_t input;
    float value;
};
struct outliers {
    int64_t count;
    struct outlier some[];
};

struct norm {
    const float *weight;
    float eps;
};

/* What thread-local scratch an attention task has. */
struct scratch {
    float *scores, *out;
    char *q;
    int64_t scores_stride;
};

struct attention {
    const struct model *model;
    const struct step *step;
    int64_t layer, tile, kv_head;
    const char *q;          /* [tokens][heads][padded head_dim] */
    char *out;              /* [tokens] rows of out_stride bytes */
    int64_t out_stride;
    struct scratch scratch;
    int kind;
};

/* The kernels of one instruction set. */
struct kernels {
    const char *name;
    int width, tile_rows, pair_rows, panel; /* vector width in floats, rows of a tile of sums, and in pairs, outputs of a weight panel */
    void (*gemm)(const struct gemm *, int64_t begin, int64_t end);
    void (*pack)(int bf16, char *to, const char *from, int64_t outputs, int64_t inputs, int64_t begin, int64_t end);
    void (*widen)(float *to, const void *from, int64_t n, int bf16);
    void (*narrow)(uint16_t *to, const float *from, int64_t n);
    void (*rms_norm)(char *to, const float *x, int64_t n, int64_t padded, struct norm, int bf16, int kind);
    void (*heads)(const struct model *, const struct step *, int64_t layer, int64_t token, const float *qkv, char *q, int kind);
    void (*attend)(const struct attention *);
    void (*swiglu)(char *to, const float *gate, const float *up, int64_t n, int64_t padded, int bf16, int kind);
    void (*draw)(const float *logits, int64_t vocab, float temperature, double u, int64_t *token, float *log_prob);
};

/* Rows of a tile of sums of a product */
static inline int64_t rows_of(const struct kernels *k, int kind) { return kind == PAIRS ? k->pair_rows : k->tile_rows; }

/* The int8 kernels of one instruction set. */
struct int8_kernels {
    int64_t group, header, tile_rows; /* inputs of a step; bytes of a panel before its levels; rows of a tile of sums */
    void (*gemm)(const struct gemm *, int64_t begin, int64_t end);
    void (*pack)(int bf16, char *to, const char *from, int64_t outputs, int64_t inputs, int64_t begin, int64_t end);
    void (*quantize)(char *to, float *scale, char *apart, const char *row, int64_t n, int halves);
};

/* Row of a token's slot in a part of a record whose rows have `width` elements */
static inline int64_t record_row(const struct record *r, int64_t layer, int64_t slot, int64_t width) { return (layer * r->capacity + slot) * width; }
static inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
static inline int64_t padded_head(const struct model *m) { return round_up(m->head_dim, 16); }
/* Bytes of a key's or value's element, and of the keys or the values of a block */
static inline int64_t stored(const struct model *m) { return m->int8_cache ? 1 : m->bf16 ? 2 : 4; }
static inline int64_t half_block(const struct model *m) { return BLOCK * (padded_head(m) * stored(m) + (m->int8_cache ? 4 : 0)); }
/* Bytes of an activation, and the stride of a row of `n`: never a power of two, so that rows do not share cache sets. */
static inline int64_t item(int kind) { return kind == PAIRS ? 2 : 4; }
static inline int64_t apart_bytes(int64_t inputs) { return 16 + inputs / APART * 8; }
static inline int64_t row_bytes(int64_t n, int kind) { return (round_up(n, 32) + 32) * item(kind); }

#endif
