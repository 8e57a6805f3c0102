/* Rows in int8: a level is a value over the scale of its row, the largest magnitude over 127, rounded to even. Levels lie between
   -127 and 127. Included for each instruction set, after simd.h. */

INLINE float NAME(value)(const char *row, int64_t i, const int halves)
{
    uint32_t bits;
    float x;
    if (halves)
        bits = (uint32_t)((const uint16_t *)row)[i] << 16;
    else
        __builtin_memcpy(&bits, row + 4 * i, 4);
    __builtin_memcpy(&x, &bits, 4);
    return x;
}

/* The scale of a row, and *inverse of it; not finite if a value is not (whose bits are then the largest) */
INLINE float NAME(scale_of)(const char *row, int64_t n, const int halves, float *inverse)
{
    int32_t most = 0;
    float largest, scale;
    for (int64_t i = 0; i < n; i++) {
        float x = NAME(value)(row, i, halves);
        int32_t bits;
        __builtin_memcpy(&bits, &x, 4);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    __builtin_memcpy(&largest, &most, 4);
    scale = largest / 127.0f;
    *inverse = scale > 0 ? 127.0f / largest : 0.0f;
    return scale;
}

INLINE int32_t NAME(level)(float x, float inverse)
{
    float shifted = x * inverse + 12582912.0f; /* 1.5 * 2^23: the low bits of the sum are the rounded product */
    int32_t bits;
    __builtin_memcpy(&bits, &shifted, 4);
    return bits - 0x4b400000;
}
