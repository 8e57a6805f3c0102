/* Dithered rounding of float32 masters to bfloat16 in one pass over memory, see rounding.py, which has the same in torch. */
#include <stdint.h>

static const uint32_t LARGEST = 0x7F7F0000; /* of bfloat16 */

/* `rows` rows of `columns` elements, adjacent in `master` and `out`. In the whole tensor the first element is at `first`, and two
   rows are `stride` apart. The offset of position p is a[p % a_length] ^ b[p % b_length]. Returns 1 if a master is at or beyond
   the largest bfloat16, infinite or NaN: such elements need another rule. */
int verl_dither(uint16_t *restrict out, const uint32_t *restrict master, int64_t rows, int64_t columns, int64_t first,
                int64_t stride, const uint16_t *restrict a, int64_t a_length, const uint16_t *restrict b, int64_t b_length) {
    uint32_t extreme = 0;
    for (int64_t row = 0; row < rows; row++) {
        int64_t at_a = (first + row * stride) % a_length, at_b = (first + row * stride) % b_length;
        for (int64_t done = 0; done < columns;) {
            int64_t length = columns - done;
            if (length > a_length - at_a) length = a_length - at_a;
            if (length > b_length - at_b) length = b_length - at_b;
            const uint16_t *one = a + at_a, *other = b + at_b;
            for (int64_t i = 0; i < length; i++) {
                uint32_t bits = master[i];
                extreme |= (uint32_t)((bits & 0x7FFFFFFF) >= LARGEST);
                out[i] = (uint16_t)((bits + (uint32_t)(one[i] ^ other[i])) >> 16);
            }
            done += length, master += length, out += length;
            at_a = (at_a + length) % a_length, at_b = (at_b + length) % b_length;
        }
    }
    return (int)extreme;
}
