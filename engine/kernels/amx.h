/* Products of matrices by AMX's tiles, whose units multiply pairs of bf16 and add up in fp32.

   An fp32 number is the sum of three of bf16 (3 x 8 digits are 24). Of the nine products of two such numbers the six
   largest are computed; what is left out is below the last digit of fp32. Numbers of half precision are one part, and
   there is one product.

   Matrices are packed first. A panel is 32 rows of the left matrix, or 32 columns of the right one, two tiles wide. It
   goes in steps of 32 along the dimension that is summed over: a tile holds 16 pairs of these for 16 rows or columns.
   Which two make a pair does not matter as long as both sides agree: here it is i and i + 16. */

#ifndef VITAMP_AMX_H
#define VITAMP_AMX_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PANEL             32
#define STEP              32
#define TILE              1024
#define FP32_PARTS        3
#define HALF_PARTS        1
#define STEP_BYTES(parts) ((parts) * 2 * TILE)
#define STEPS(length)     (((length) + STEP - 1) / STEP)
#define PANELS(length)    (((length) + PANEL - 1) / PANEL)
#define LEAST(a, b)       ((a) < (b) ? (a) : (b))
#define INLINE            static inline __attribute__((always_inline))

/* Linux lends the tiles' registers to processes that ask. */
static int tiles_are_lent(void)
{
    const long request_permission = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

INLINE void begin_tiles(void)
{
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shape;
    memset(&shape, 0, sizeof shape);
    shape.palette = 1;
    for (int i = 0; i < 8; i++) {
        shape.row_bytes[i] = 64;
        shape.rows[i] = 16;
    }
    _tile_loadconfig(&shape);
}

INLINE void end_tiles(void) { _tile_release(); }

INLINE __m512 pairs_low(__m512 a, __m512 b)
{
    return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
}
INLINE __m512 pairs_high(__m512 a, __m512 b)
{
    return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
}

INLINE void transpose(__m512 *r)
{
    __m512 t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = pairs_low(t[i], t[i + 2]);
        r[i + 1] = pairs_high(t[i], t[i + 2]);
        r[i + 2] = pairs_low(t[i + 1], t[i + 3]);
        r[i + 3] = pairs_high(t[i + 1], t[i + 3]);
    }
    enum { even = 0x88, odd = 0xdd };
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], even);
        t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], odd);
        t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], even);
        t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], odd);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], even);
        r[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], odd);
        r[i + 4] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], even);
        r[i + 12] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], odd);
    }
}

INLINE __m512 from_bf16(__m256i values)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(values), 16));
}
INLINE __m256i to_bf16(__m512 values) { return (__m256i)_mm512_cvtneps_pbh(values); }

INLINE __mmask16 first_of(long count) { return count >= 16 ? 0xffff : count <= 0 ? 0 : (1 << count) - 1; }

INLINE __m512 polynomial(__m512 x, const float *factors, int degree)
{
    __m512 found = _mm512_set1_ps(factors[0]);
    for (int i = 1; i <= degree; i++) found = _mm512_fmadd_ps(found, x, _mm512_set1_ps(factors[i]));
    return found;
}

/* 2 to the power, to 2e-9 of itself before rounding. */
INLINE __m512 two_to(__m512 power)
{
    static const float factors[] = {
        1.53458060e-4f, 1.33999312e-3f, 9.61848898e-3f, 5.55032878e-2f, 2.40226469e-1f, 6.93147206e-1f, 1.0f};
    __m512 whole = _mm512_roundscale_ps(power, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return _mm512_scalef_ps(polynomial(_mm512_sub_ps(power, whole), factors, 6), whole);
}

/* 16 rows of 16 numbers, as far as there are any; the rest is 0. `half`: whether they are bf16 in memory. */
INLINE void load_block(const void *from, long stride, int half, int rows, int columns, __m512 *r)
{
    __mmask16 there = first_of(columns);
    for (int i = 0; i < 16; i++) {
        if (i >= rows)
            r[i] = _mm512_setzero_ps();
        else if (half)
            r[i] = from_bf16(_mm256_maskz_loadu_epi16(there, (const uint16_t *)from + i * stride));
        else
            r[i] = _mm512_maskz_loadu_ps(there, (const float *)from + i * stride);
    }
}

/* Pairs of bf16 out of fp32: the parts of a row of each, largest first. */
INLINE void store_parts(__m512 first, __m512 second, int parts, int exact, char *to)
{
    const __m512i high = _mm512_set1_epi32(0xffff0000);
    enum { either_and = 0xf8 }; /* a | (b & c) */
    if (parts == 1 && !exact) {
        first = from_bf16(to_bf16(first));
        second = from_bf16(to_bf16(second));
    }
    for (int part = 0; part < parts; part++) {
        __m512i a = _mm512_castps_si512(first), b = _mm512_castps_si512(second);
        __m512i pair = _mm512_ternarylogic_epi32(_mm512_srli_epi32(a, 16), b, high, either_and);
        _mm512_store_si512((void *)(to + part * 2 * TILE), pair);
        first = _mm512_sub_ps(first, _mm512_castsi512_ps(_mm512_and_si512(a, high)));
        second = _mm512_sub_ps(second, _mm512_castsi512_ps(_mm512_and_si512(b, high)));
    }
}

/* What is packed: a panel of `wide` rows of the left matrix, or columns of the right one, `summed` numbers long each.
   `summed_first`: whether numbers that lie beside each other in memory belong to different sums; only then `sums`, of
   32 rows, may be added to. */
typedef struct {
    const char *from;
    long stride; /* in numbers */
    int half, summed_first, right, wide, summed, parts;
    char *to;
    float *sums;
} Packing;

INLINE int tiles_of(Packing p) { return 2 * STEPS(p.summed); }

INLINE void pack_tile(Packing p, int tile)
{
    const long size = p.half ? 2 : 4;
    const int begin = tile % 2 * 16, k = tile / 2 * STEP, left = p.summed - k;
    __m512 upper[16], lower[16];
    if (p.summed_first) {
        const char *at = p.from + (k * p.stride + begin) * size;
        load_block(at, p.stride, p.half, left, p.wide - begin, upper);
        load_block(at + 16 * p.stride * size, p.stride, p.half, left - 16, p.wide - begin, lower);
    } else {
        const char *at = p.from + (begin * p.stride + k) * size;
        load_block(at, p.stride, p.half, p.wide - begin, left, upper);
        load_block(at + 16 * size, p.stride, p.half, p.wide - begin, left - 16, lower);
    }
    if (p.sums) { /* of each row of the left matrix, whose numbers lie under each other */
        __m512 sum = _mm512_load_ps(p.sums + begin), more = upper[0];
        for (int i = 1; i < 16; i++) more = _mm512_add_ps(more, upper[i]);
        for (int i = 0; i < 16; i++) more = _mm512_add_ps(more, lower[i]);
        _mm512_store_ps(p.sums + begin, _mm512_add_ps(sum, more));
    }
    if (p.summed_first != p.right) {
        transpose(upper);
        transpose(lower);
    }
    char *row = p.to + k / STEP * STEP_BYTES(p.parts) + tile % 2 * TILE;
    for (int i = 0; i < 16; i++) store_parts(upper[i], lower[i], p.parts, p.half, row + i * 64);
}

INLINE void pack(const void *from, long stride, int half, int summed_first, int right, int wide, int summed, int parts,
                 char *to)
{
    const Packing p = {from, stride, half, summed_first, right, wide, summed, parts, to, 0};
    for (int tile = 0; tile < tiles_of(p); tile++) pack_tile(p, tile);
}

/* Memory to be fetched into the second cache while tiles are multiplied. */
typedef struct {
    const char *at;
    long stride;     /* in bytes */
    int rows, lines; /* of 64 bytes */
} Fetch;

/* One of so many shares of its rows. */
INLINE Fetch share_of(Fetch what, long share, long shares)
{
    int each = (what.rows + shares - 1) / shares, first = share * each;
    what.at += first * what.stride;
    what.rows = first < what.rows ? LEAST(each, what.rows - first) : 0;
    return what;
}

INLINE void fetch(Fetch what)
{
    for (int row = 0; row < what.rows; row++)
        for (int line = 0; line < what.lines; line++)
            _mm_prefetch(what.at + row * what.stride + line * 64, _MM_HINT_T1);
}

#define LOAD_LEFT(part)                           \
    _tile_loadd(4, left + (part) * 2 * TILE, 64); \
    _tile_loadd(5, left + (part) * 2 * TILE + TILE, 64)
#define LOAD_RIGHT(part)                           \
    _tile_loadd(6, right + (part) * 2 * TILE, 64); \
    _tile_loadd(7, right + (part) * 2 * TILE + TILE, 64)
#define MULTIPLY             \
    _tile_dpbf16ps(0, 4, 6); \
    _tile_dpbf16ps(1, 4, 7); \
    _tile_dpbf16ps(2, 5, 6); \
    _tile_dpbf16ps(3, 5, 7)
#define MULTIPLY_ONE_WIDE    \
    _tile_dpbf16ps(0, 4, 6); \
    _tile_dpbf16ps(2, 5, 6)
#define MULTIPLY_ONE_HIGH    \
    _tile_dpbf16ps(0, 4, 6); \
    _tile_dpbf16ps(1, 4, 7)

INLINE void start_from(const float *c, long stride)
{
    _tile_loadd(0, c, stride * 4);
    _tile_loadd(1, c + 16, stride * 4);
    _tile_loadd(2, c + 16 * stride, stride * 4);
    _tile_loadd(3, c + 16 * stride + 16, stride * 4);
}

INLINE void start_from_zero(void)
{
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

#define MULTIPLY_STEP(left, right, parts, multiply)             \
    if (parts == 3) { /* each product loads one side at most */ \
        LOAD_LEFT(2);                                           \
        LOAD_RIGHT(0);                                          \
        multiply;                                               \
        LOAD_LEFT(1);                                           \
        multiply;                                               \
        LOAD_RIGHT(1);                                          \
        multiply;                                               \
        LOAD_LEFT(0);                                           \
        multiply;                                               \
        LOAD_RIGHT(2);                                          \
        multiply;                                               \
        LOAD_RIGHT(0);                                          \
        multiply;                                               \
    } else {                                                    \
        LOAD_LEFT(0);                                           \
        LOAD_RIGHT(0);                                          \
        multiply;                                               \
    }

#define MULTIPLY_PANELS(multiply)                                                 \
    for (long step = 0; step < steps; step++) {                                   \
        for (int i = 0; i < count; i++) fetch(share_of(fetched[i], step, steps)); \
        MULTIPLY_STEP(left, right, parts, multiply)                               \
        left += STEP_BYTES(parts);                                                \
        right += STEP_BYTES(parts);                                               \
    }

/* Two tiles by two; where a panel has 16 rows or columns at most, the second one's are not computed. */
INLINE void multiply_panels(const char *left, const char *right, long steps, int parts, long rows, long columns,
                            const Fetch *fetched, int count)
{
    if (columns <= 16) {
        MULTIPLY_PANELS(MULTIPLY_ONE_WIDE)
    } else if (rows <= 16) {
        MULTIPLY_PANELS(MULTIPLY_ONE_HIGH)
    } else {
        MULTIPLY_PANELS(MULTIPLY)
    }
}

INLINE void store_sums(float *c, long stride)
{
    _tile_stored(0, c, stride * 4);
    _tile_stored(1, c + 16, stride * 4);
    _tile_stored(2, c + 16 * stride, stride * 4);
    _tile_stored(3, c + 16 * stride + 16, stride * 4);
}

#endif
