/* Operations on rows of a training step, each in one pass over memory, for the instruction set of attention_kernels.h. Sums of
   columns are of ROWS rows each. */

INLINE vf NAME(load)(const float *p, int64_t count)
{
    float lanes[WIDTH] = {0};
    if (count >= WIDTH)
        return v_load(p);
    for (int64_t i = 0; i < count; i++)
        lanes[i] = p[i];
    return v_load(lanes);
}
INLINE void NAME(store)(float *p, vf x, int64_t count)
{
    float lanes[WIDTH];
    if (count >= WIDTH) {
        v_store(p, x);
        return;
    }
    v_store(lanes, x);
    for (int64_t i = 0; i < count; i++)
        p[i] = lanes[i];
}

/* out = x scale weight */
FN void NAME(rms_norm)(const struct rows *r, int64_t begin, int64_t end)
{
    const int64_t n = r->columns;
    for (int64_t t = begin; t < end; t++)
        for (int64_t i = 0; i < n; i += WIDTH) {
            vf y = v_mul(NAME(load)(r->x + t * n + i, n - i), v_set(r->scale[t]));
            NAME(store)(r->out + t * n + i, v_mul(y, NAME(load)(r->weight + i, n - i)), n - i);
        }
}

/* out += d_y weight scale - x scale^3 <d_y x, weight> / n, and in sums what the rows add to the gradient of the weight */
FN void NAME(rms_norm_backward)(const struct rows *r, int64_t begin, int64_t end)
{
    const int64_t n = r->columns;
    float *sums = r->sums + begin / ROWS * n;
    __builtin_memset(sums, 0, (size_t)n * 4);
    for (int64_t t = begin; t < end; t++) {
        const float *x = r->x + t * n, *d_y = r->d_y + t * n;
        const float s = r->scale[t];
        float *out = r->out + t * n;
        vf dot = v_set(0.0f);
        for (int64_t i = 0; i < n; i += WIDTH) {
            vf product = v_mul(NAME(load)(d_y + i, n - i), NAME(load)(x + i, n - i));
            dot = v_fma(product, NAME(load)(r->weight + i, n - i), dot);
            NAME(store)(sums + i, v_fma(product, v_set(s), NAME(load)(sums + i, n - i)), n - i);
        }
        const vf scale = v_set(s), pull = v_set(NAME(sum)(dot) * (s * s * s) / -(float)n);
        for (int64_t i = 0; i < n; i += WIDTH) {
            vf y = v_mul(NAME(load)(d_y + i, n - i), NAME(load)(r->weight + i, n - i));
            y = v_fma(y, scale, NAME(load)(out + i, n - i));
            NAME(store)(out + i, v_fma(NAME(load)(x + i, n - i), pull, y), n - i);
        }
    }
}

INLINE vf NAME(sigmoid)(vf x) { return v_div(v_set(1.0f), v_add(v_set(1.0f), NAME(exponential)(v_sub(v_set(0.0f), x)))); }

/* out = silu(gate) up, for rows x of both back to back */
FN void NAME(swiglu)(const struct rows *r, int64_t begin, int64_t end)
{
    const int64_t n = r->columns;
    for (int64_t t = begin; t < end; t++) {
        const float *gate = r->x + 2 * t * n, *up = gate + n;
        for (int64_t i = 0; i < n; i += WIDTH) {
            vf g = NAME(load)(gate + i, n - i);
            NAME(store)(r->out + t * n + i, v_mul(v_mul(g, NAME(sigmoid)(g)), NAME(load)(up + i, n - i)), n - i);
        }
    }
}

/* As swiglu; gate and up become their gradients. */
FN void NAME(swiglu_backward)(const struct rows *r, int64_t begin, int64_t end)
{
    const int64_t n = r->columns;
    const vf one = v_set(1.0f);
    for (int64_t t = begin; t < end; t++) {
        float *gate = r->x + 2 * t * n, *up = gate + n;
        for (int64_t i = 0; i < n; i += WIDTH) {
            vf g = NAME(load)(gate + i, n - i), u = NAME(load)(up + i, n - i), d = NAME(load)(r->d_y + t * n + i, n - i);
            vf s = NAME(sigmoid)(g), activated = v_mul(g, s);
            NAME(store)(r->out + t * n + i, v_mul(activated, u), n - i);
            NAME(store)(up + i, v_mul(d, activated), n - i);
            vf slope = v_mul(s, v_fma(g, v_sub(one, s), one));
            NAME(store)(gate + i, v_mul(v_mul(d, u), slope), n - i);
        }
    }
}

/* Heads of x: each half times its cosines, plus the other half times `turn` */
FN void NAME(rotate)(const struct rows *r, int64_t begin, int64_t end)
{
    const int64_t half = r->columns / 2;
    for (int64_t t = begin; t < end; t++)
        for (int64_t h = 0; h < r->heads; h++) {
            float *x = r->x + t * r->stride + h * r->columns;
            const float *cosine = r->scale + t * r->columns, *turn = r->weight + t * r->columns;
            for (int64_t i = 0; i < half; i += WIDTH) {
                vf a = NAME(load)(x + i, half - i), b = NAME(load)(x + half + i, half - i);
                vf first = v_mul(a, NAME(load)(cosine + i, half - i)), second = v_mul(b, NAME(load)(cosine + half + i, half - i));
                NAME(store)(x + i, v_add(first, v_mul(b, NAME(load)(turn + i, half - i))), half - i);
                NAME(store)(x + half + i, v_add(second, v_mul(a, NAME(load)(turn + half + i, half - i))), half - i);
            }
        }
}
