/* Operations on rows of a training step, each in one pass over memory. The includer defines the instruction set, and `element`,
   the type of what has rows: float, or uint16_t for bfloat16, in which the forward has the sampler's arithmetic. Sums of
   columns are of ROWS rows each. */

#define HALVES (sizeof(element) == 2)
#define ROUND(x) (HALVES ? NAME(rounded)(x) : (x))
#define AT(pointer, i) ((element *)(pointer) + (i))
/* of `count` values at p, at most a vector of them; what is loaded beyond is zero */
#define LOAD(p, count) NAME(load)(sizeof *(p) == 2, p, count)
#define STORE(p, x, count) NAME(store)(sizeof *(p) == 2, p, x, count)

INLINE vf NAME(load)(const int halves, const void *p, int64_t count)
{
    float lanes[WIDTH] = {0};
    if (count < WIDTH) {
        __builtin_memcpy(lanes, p, (size_t)(count * (halves ? 2 : 4)));
        p = lanes;
    }
    return halves ? v_load_bf16(p) : v_load((const float *)p);
}
INLINE void NAME(store)(const int halves, void *p, vf x, int64_t count)
{
    float lanes[WIDTH];
    void *to = count < WIDTH ? lanes : p;
    if (halves)
        NAME(store_bf16)(to, NAME(rounded)(x));
    else
        v_store((float *)to, x);
    if (count < WIDTH)
        __builtin_memcpy(p, lanes, (size_t)(count * (halves ? 2 : 4)));
}

/* out = x scale, rounded, times weight */
FN void NAME(rms_norm)(const struct rows *r, int64_t begin, int64_t end)
{
    const int64_t n = r->columns;
    for (int64_t t = begin; t < end; t++)
        for (int64_t i = 0; i < n; i += WIDTH) {
            vf y = ROUND(v_mul(LOAD(AT(r->x, t * n + i), n - i), v_set(r->scale[t])));
            STORE(AT(r->out, t * n + i), v_mul(y, LOAD(AT(r->weight, i), n - i)), n - i);
        }
}

/* out += d_y weight scale - x scale^3 <d_y x, weight> / n, and in sums what the rows add to the gradient of the weight */
FN void NAME(rms_norm_backward)(const struct rows *r, int64_t begin, int64_t end)
{
    const int64_t n = r->columns;
    const element *weight = AT(r->weight, 0);
    float *sums = r->sums + begin / ROWS * n;
    __builtin_memset(sums, 0, (size_t)n * 4);
    for (int64_t t = begin; t < end; t++) {
        const element *x = AT(r->x, t * n), *d_y = AT(r->d_y, t * n);
        const float s = r->scale[t];
        element *out = AT(r->out, t * n);
        vf dot = v_set(0.0f);
        for (int64_t i = 0; i < n; i += WIDTH) {
            vf product = v_mul(LOAD(d_y + i, n - i), LOAD(x + i, n - i));
            dot = v_fma(product, LOAD(weight + i, n - i), dot);
            STORE(sums + i, v_fma(product, v_set(s), LOAD(sums + i, n - i)), n - i);
        }
        const vf scale = v_set(s), pull = v_set(NAME(sum)(dot) * (s * s * s) / -(float)n);
        for (int64_t i = 0; i < n; i += WIDTH) {
            vf y = v_mul(LOAD(d_y + i, n - i), LOAD(weight + i, n - i));
            y = v_fma(y, scale, LOAD(out + i, n - i));
            STORE(out + i, v_fma(LOAD(x + i, n - i), pull, y), n - i);
        }
    }
}

INLINE vf NAME(sigmoid)(vf x) { return v_div(v_set(1.0f), v_add(v_set(1.0f), NAME(exponential)(v_sub(v_set(0.0f), x)))); }
INLINE vf NAME(silu)(vf x)
{
    return HALVES ? NAME(rounded)(v_div(x, v_add(v_set(1.0f), NAME(exponential)(v_sub(v_set(0.0f), x))))) : v_mul(x, NAME(sigmoid)(x));
}

/* out = silu(gate) up, for rows x of both back to back */
FN void NAME(swiglu)(const struct rows *r, int64_t begin, int64_t end)
{
    const int64_t n = r->columns;
    for (int64_t t = begin; t < end; t++) {
        const element *gate = AT(r->x, 2 * t * n), *up = gate + n;
        for (int64_t i = 0; i < n; i += WIDTH)
            STORE(AT(r->out, t * n + i), v_mul(NAME(silu)(LOAD(gate + i, n - i)), LOAD(up + i, n - i)), n - i);
    }
}

/* As swiglu; gate and up become their gradients. */
FN void NAME(swiglu_backward)(const struct rows *r, int64_t begin, int64_t end)
{
    const int64_t n = r->columns;
    const vf one = v_set(1.0f);
    for (int64_t t = begin; t < end; t++) {
        element *gate = AT(r->x, 2 * t * n), *up = gate + n;
        for (int64_t i = 0; i < n; i += WIDTH) {
            vf g = LOAD(gate + i, n - i), u = LOAD(up + i, n - i), d = LOAD(AT(r->d_y, t * n + i), n - i);
            vf s = NAME(sigmoid)(g), activated = ROUND(v_mul(g, s));
            STORE(AT(r->out, t * n + i), v_mul(activated, u), n - i);
            STORE(up + i, v_mul(d, activated), n - i);
            vf slope = v_mul(s, v_fma(g, v_sub(one, s), one));
            STORE(gate + i, v_mul(v_mul(d, u), slope), n - i);
        }
    }
}

/* Heads of x: each half times its cosines, plus the other half times `turn` */
FN void NAME(rotate)(const struct rows *r, int64_t begin, int64_t end)
{
    const int64_t half = r->columns / 2;
    for (int64_t t = begin; t < end; t++)
        for (int64_t h = 0; h < r->heads; h++) {
            element *x = AT(r->x, t * r->stride + h * r->columns), *y = x + half;
            const element *cosine = AT(r->scale, t * r->columns), *turn = AT(r->weight, t * r->columns);
            for (int64_t i = 0; i < half; i += WIDTH) {
                vf a = LOAD(x + i, half - i), b = LOAD(y + i, half - i);
                vf first = ROUND(v_mul(a, LOAD(cosine + i, half - i))), second = ROUND(v_mul(b, LOAD(cosine + half + i, half - i)));
                STORE(x + i, v_add(first, ROUND(v_mul(b, LOAD(turn + i, half - i)))), half - i);
                STORE(y + i, v_add(second, ROUND(v_mul(a, LOAD(turn + half + i, half - i)))), half - i);
            }
        }
}

/* Of `count` values at x, minus infinity beyond */
INLINE vf NAME(logits)(const element *x, int64_t count) { return v_add(LOAD(x, count), v_load(HIDDEN + 16 - at_most(count, WIDTH))); }

/* out [count], float32: log of the sum of exp(x / eps) */
FN void NAME(log_sum_exp)(const struct rows *r, int64_t begin, int64_t end)
{
    const int64_t n = r->columns;
    const vf inverse = v_set(1.0f / r->eps);
    for (int64_t t = begin; t < end; t++) {
        const element *x = AT(r->x, t * n);
        vf most = v_set(-INFINITY), total = v_set(0.0f);
        for (int64_t i = 0; i < n; i += WIDTH)
            most = v_max(NAME(logits)(x + i, n - i), most);
        const float top = NAME(largest)(most);
        for (int64_t i = 0; i < n; i += WIDTH)
            total = v_add(total, NAME(exponential)(v_mul(v_sub(NAME(logits)(x + i, n - i), v_set(top)), inverse)));
        r->out[t] = top / r->eps + logf(NAME(sum)(total));
    }
}

/* x = weight exp(x / eps - scale): with the log-sum-exp as scale, the gradient of a log-prob times -weight in other tokens' logits */
FN void NAME(logit_gradient)(const struct rows *r, int64_t begin, int64_t end)
{
    const int64_t n = r->columns;
    const vf inverse = v_set(1.0f / r->eps);
    const unsigned modes = _mm_getcsr();
    _mm_setcsr(modes | 0x8000); /* results below 1e-38 are zero: as denormals they would take a hundred times as long */
    for (int64_t t = begin; t < end; t++)
        for (int64_t i = 0; i < n; i += WIDTH) {
            vf p = NAME(exponential)(v_sub(v_mul(LOAD(AT(r->x, t * n + i), n - i), inverse), v_set(r->scale[t])));
            STORE(AT(r->x, t * n + i), v_mul(p, v_set(r->weight[t])), n - i);
        }
    _mm_setcsr(modes);
}

#undef LOAD
#undef STORE
#undef AT
#undef ROUND
#undef HALVES
