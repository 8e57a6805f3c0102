/* Vectors of floats of one instruction set: the includer defines ISA, TARGET and WIDTH, and may include this again with others. */

#undef vf
#undef vi
#undef v_load
#undef v_store
#undef v_loadi
#undef v_set
#undef v_fma
#undef v_add
#undef v_sub
#undef v_mul
#undef v_div
#undef v_max
#undef v_min
#undef v_float
#undef v_int
#undef v_even
#undef v_odd
#undef v_load_bf16
#undef v_load_int8
#undef v_halves

#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define NAME(name) JOIN(name, ISA)
#define FN static TARGET
#define INLINE static inline __attribute__((always_inline)) TARGET

#if WIDTH == 16
#define vf __m512
#define vi __m512i
#define v_load(p) _mm512_loadu_ps(p)
#define v_store(p, x) _mm512_storeu_ps(p, x)
#define v_loadi(p) _mm512_loadu_si512(p)
#define v_set(x) _mm512_set1_ps(x)
#define v_fma(a, b, c) _mm512_fmadd_ps(a, b, c)
#define v_add(a, b) _mm512_add_ps(a, b)
#define v_sub(a, b) _mm512_sub_ps(a, b)
#define v_mul(a, b) _mm512_mul_ps(a, b)
#define v_div(a, b) _mm512_div_ps(a, b)
#define v_max(a, b) _mm512_max_ps(a, b) /* b where one is NaN */
#define v_min(a, b) _mm512_min_ps(a, b)
#define v_float(x) _mm512_castsi512_ps(x)
#define v_int(x) _mm512_castps_si512(x)
#define v_even(x) v_float(_mm512_slli_epi32(x, 16)) /* bfloat16 pairs: the first and the second of each */
#define v_odd(x) v_float(_mm512_and_si512(x, _mm512_set1_epi32((int)0xffff0000)))
#define v_load_bf16(p) v_float(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(p))), 16))
#define v_load_int8(p) _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(p))))
#if HAS_PAIRS /* equal bits for other values than NaN, as threads of a team take numbers below the normal ones for zero */
#define v_halves(x) (__m256i)_mm512_cvtneps_pbh(x)
INLINE vf NAME(rounded)(vf x) { return v_float(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v_halves(x)), 16)); }
INLINE void NAME(store_bf16)(char *p, vf x) { _mm256_storeu_si256((__m256i *)p, v_halves(x)); }
#else
INLINE vf NAME(rounded)(vf x)
{
    vi bits = v_int(x), one = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    vi up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), one);
    up = _mm512_mask_mov_epi32(up, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
    return v_float(_mm512_and_si512(up, _mm512_set1_epi32((int)0xffff0000)));
}
INLINE void NAME(store_bf16)(char *p, vf x)
{
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(v_int(x), 16)));
}
#endif
INLINE vf NAME(power)(vf x, vf n) { return _mm512_scalef_ps(x, n); }
INLINE vf NAME(nearest)(vf x) { return _mm512_roundscale_ps(x, 8); }
#else
#define vf __m256
#define vi __m256i
#define v_load(p) _mm256_loadu_ps(p)
#define v_store(p, x) _mm256_storeu_ps(p, x)
#define v_loadi(p) _mm256_loadu_si256((const __m256i *)(p))
#define v_set(x) _mm256_set1_ps(x)
#define v_fma(a, b, c) _mm256_fmadd_ps(a, b, c)
#define v_add(a, b) _mm256_add_ps(a, b)
#define v_sub(a, b) _mm256_sub_ps(a, b)
#define v_mul(a, b) _mm256_mul_ps(a, b)
#define v_div(a, b) _mm256_div_ps(a, b)
#define v_max(a, b) _mm256_max_ps(a, b) /* b where one is NaN */
#define v_min(a, b) _mm256_min_ps(a, b)
#define v_float(x) _mm256_castsi256_ps(x)
#define v_int(x) _mm256_castps_si256(x)
#define v_even(x) v_float(_mm256_slli_epi32(x, 16))
#define v_odd(x) v_float(_mm256_and_si256(x, _mm256_set1_epi32((int)0xffff0000)))
#define v_load_bf16(p) v_float(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p))), 16))
#define v_load_int8(p) _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(p))))
INLINE vf NAME(rounded)(vf x)
{
    vi bits = v_int(x), one = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    vi up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), one);
    vf kept = _mm256_blendv_ps(v_float(up), v_float(_mm256_set1_epi32(0x7fc00000)), _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return v_float(_mm256_and_si256(v_int(kept), _mm256_set1_epi32((int)0xffff0000)));
}
INLINE void NAME(store_bf16)(char *p, vf x)
{
    vi high = _mm256_srli_epi32(v_int(x), 16);
    _mm_storeu_si128((__m128i *)p, _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1)));
}
INLINE vf NAME(power)(vf x, vf n) /* x * 2^n in two steps, as n may lie beyond the exponents */
{
    vi half = _mm256_srai_epi32(_mm256_cvtps_epi32(n), 1), rest = _mm256_sub_epi32(_mm256_cvtps_epi32(n), half);
    vi bias = _mm256_set1_epi32(127);
    x = v_mul(x, v_float(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23)));
    return v_mul(x, v_float(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23)));
}
INLINE vf NAME(nearest)(vf x) { return _mm256_round_ps(x, 8); }
#endif

INLINE float NAME(sum)(vf x) /* lanes in halves, always in the same order */
{
#if WIDTH == 16
    __m256 y = _mm256_add_ps(_mm512_castps512_ps256(x), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1)));
#else
    __m256 y = x;
#endif
    __m128 z = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    z = _mm_add_ps(z, _mm_movehl_ps(z, z));
    return _mm_cvtss_f32(_mm_add_ss(z, _mm_movehdup_ps(z)));
}

INLINE float NAME(largest)(vf x)
{
    float lanes[WIDTH], found;
    v_store(lanes, x);
    found = lanes[0];
    for (int i = 1; i < WIDTH; i++)
        found = lanes[i] > found || lanes[i] != lanes[i] ? lanes[i] : found;
    return found;
}

/* e^x: 2^n times a polynomial of the rest (coefficients of Cephes); 0 and infinity beyond float32, NaN stays */
INLINE vf NAME(exponential)(vf x)
{
    x = v_min(v_set(104.0f), v_max(v_set(-104.0f), x));
    vf n = NAME(nearest)(v_mul(x, v_set(1.44269504f)));
    vf r = v_fma(n, v_set(-0.693359375f), x);
    r = v_fma(n, v_set(2.12194440e-4f), r);
    vf y = v_fma(v_set(1.9875691500e-4f), r, v_set(1.3981999507e-3f));
    y = v_fma(y, r, v_set(8.3334519073e-3f));
    y = v_fma(y, r, v_set(4.1665795894e-2f));
    y = v_fma(y, r, v_set(1.6666665459e-1f));
    y = v_fma(y, r, v_set(5.0000001201e-1f));
    y = v_add(v_fma(y, v_mul(r, r), r), v_set(1.0f));
    return NAME(power)(y, n);
}
