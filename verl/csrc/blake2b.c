/* BLAKE2b-256 (RFC 7693) of eight messages at a time, one in each lane of a vector, see digests.py, which has the same with hashlib. */
#include <stdint.h>
#include <string.h>

#define LANES 8
#define BLOCK 128 /* bytes */
typedef uint64_t lanes __attribute__((vector_size(8 * LANES)));

static const uint64_t IV[8] = {0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
                               0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};
static const uint64_t PARAMETERS = 0x01010020; /* digests of 32 bytes, no key, no tree */

#define ROTATED(x, n) (((x) >> (n)) | ((x) << (64 - (n))))
#define MIX(a, b, c, d, x, y) \
    a += b + m[x], d = ROTATED(d ^ a, 32), c += d, b = ROTATED(b ^ c, 24); \
    a += b + m[y], d = ROTATED(d ^ a, 16), c += d, b = ROTATED(b ^ c, 63);
#define ROUND(s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15) \
    MIX(v0, v4, v8, v12, s0, s1) MIX(v1, v5, v9, v13, s2, s3) MIX(v2, v6, v10, v14, s4, s5) MIX(v3, v7, v11, v15, s6, s7) \
    MIX(v0, v5, v10, v15, s8, s9) MIX(v1, v6, v11, v12, s10, s11) MIX(v2, v7, v8, v13, s12, s13) MIX(v3, v4, v9, v14, s14, s15)

/* Digests of 32 bytes of the eight messages that follow each other in `data`, each of `length` bytes, a positive multiple of 128.
   Words are read in the order of the processor, so it must be little-endian. */
#if defined(__x86_64__) && defined(__gnu_linux__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
void verl_blake2b(uint8_t *out, const uint8_t *data, int64_t length)
{
    lanes h[8], m[16];
    for (int i = 0; i < 8; i++) h[i] = (lanes){0} + IV[i];
    h[0] ^= PARAMETERS;
    for (int64_t at = 0; at < length; at += BLOCK) {
        uint64_t words[LANES][16];
        for (int lane = 0; lane < LANES; lane++) memcpy(words[lane], data + lane * length + at, BLOCK);
        for (int i = 0; i < 16; i++)
            m[i] = (lanes){words[0][i], words[1][i], words[2][i], words[3][i], words[4][i], words[5][i], words[6][i], words[7][i]};
        uint64_t last = at + BLOCK == length ? ~(uint64_t)0 : 0;
        lanes v0 = h[0], v1 = h[1], v2 = h[2], v3 = h[3], v4 = h[4], v5 = h[5], v6 = h[6], v7 = h[7];
        lanes v8 = (lanes){0} + IV[0], v9 = (lanes){0} + IV[1], v10 = (lanes){0} + IV[2], v11 = (lanes){0} + IV[3];
        lanes v12 = (lanes){0} + (IV[4] ^ (uint64_t)(at + BLOCK)), v13 = (lanes){0} + IV[5];
        lanes v14 = (lanes){0} + (IV[6] ^ last), v15 = (lanes){0} + IV[7];
        ROUND(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
        ROUND(14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3)
        ROUND(11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4)
        ROUND(7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8)
        ROUND(9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13)
        ROUND(2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9)
        ROUND(12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11)
        ROUND(13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10)
        ROUND(6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5)
        ROUND(10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0)
        ROUND(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
        ROUND(14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3)
        h[0] ^= v0 ^ v8, h[1] ^= v1 ^ v9, h[2] ^= v2 ^ v10, h[3] ^= v3 ^ v11;
        h[4] ^= v4 ^ v12, h[5] ^= v5 ^ v13, h[6] ^= v6 ^ v14, h[7] ^= v7 ^ v15;
    }
    for (int lane = 0; lane < LANES; lane++)
        for (int i = 0; i < 4; i++) {
            uint64_t word = h[i][lane];
            memcpy(out + 32 * lane + 8 * i, &word, 8);
        }
}
