/* Products of matrices by AMX's tiles, whose units multiply pairs of bf16 and add up in fp32.

   An fp32 number is the sum of three of bf16 (3 x 8 digits are 24). Of the nine products of two such numbers the six
   largest are computed; what is left out is below the last digit of fp32. Numbers of half precision are one part, and
   there is one product.

   Matrices are packed first. A panel is 32 rows of the left matrix, or 32 columns of the right one, two tiles wide. It
   goes in steps of 32 along the dimension that is summed over: a tile holds 16 pairs of these for 16 rows or columns.
   Which two make a pair does not matter as long as both sides agree: here it is i and i + 16, and neighbours where the
   left matrix is bf16 and loaded as it lies in memory. */

#ifndef VITAMP_TILES_H
#define VITAMP_TILES_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifdef EMULATE_TILES
#include "emulated_tiles.h"
#endif

#define PANEL             32
#define STEP              32
#define TILE              1024
#define FP32_PARTS        3
#define HALF_PARTS        1
#define STEP_BYTES(parts) ((parts) * 2 * TILE)
#define STEPS(length)     (((length) + STEP - 1) / STEP)
#define PANELS(length)    (((length) + PANEL - 1) / PANEL)
#define MIN(a, b)         ((a) < (b) ? (a) : (b))
#define INLINE            static inline __attribute__((always_inline))

/* Linux lends the tiles' registers to processes that ask. */
static int request_tiles(void)
{
#ifdef EMULATE_TILES
    return 1;
#else
    const long request_permission = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#endif
}

/* Eight tiles of 16 rows of 64 bytes. In memory for good: compilers do not see what tiles are loaded from. */
static const struct {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} SHAPE = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

INLINE void begin_tiles(void) { _tile_loadconfig(&SHAPE); }

INLINE void end_tiles(void) { _tile_release(); }

/* gcc does not know what tiles are loaded from. After this, what was stored before is in memory. */
INLINE void compiler_barrier(void) { __asm__ volatile("" ::: "memory"); }

/* After some 140 products without a store the next store waits for a quarter of a microsecond, on the Xeon that was
   tried. So after 48 a tile is stored where nobody reads it. */
INLINE void store_aside(long step, long steps, int parts)
{
    _Alignas(64) char aside[TILE];
    const int often = parts == FP32_PARTS ? 2 : 12; /* 48 products */
    if (step % often == often - 1 && step + 1 < steps) _tile_stored(0, aside, 64);
}

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

INLINE __mmask16 mask_of_first(long count) { return count >= 16 ? 0xffff : count <= 0 ? 0 : (1 << count) - 1; }

INLINE __m512 polynomial(__m512 x, const float *factors, int degree)
{
    __m512 result = _mm512_set1_ps(factors[0]);
    for (int i = 1; i <= degree; i++) result = _mm512_fmadd_ps(result, x, _mm512_set1_ps(factors[i]));
    return result;
}

/* 2 to the power, to 2e-9 of itself before rounding. */
INLINE __m512 two_to(__m512 power)
{
    static const float factors[] = {
        1.53458060e-4f, 1.33999312e-3f, 9.61848898e-3f, 5.55032878e-2f, 2.40226469e-1f, 6.93147206e-1f, 1.0f};
    __m512 whole = _mm512_roundscale_ps(power, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return _mm512_scalef_ps(polynomial(_mm512_sub_ps(power, whole), factors, 6), whole);
}

/* Memory to prefetch into the second cache while tiles are multiplied. */
typedef struct {
    const char *at;
    long stride;     /* in bytes */
    int rows, lines; /* of 64 bytes */
} Prefetch;

/* One of `count` slices of its rows. */
INLINE Prefetch slice_of(Prefetch what, long index, long count)
{
    int each = (what.rows + count - 1) / count, first = index * each;
    what.at += first * what.stride;
    what.rows = first < what.rows ? MIN(each, what.rows - first) : 0;
    return what;
}

INLINE void prefetch_rows(Prefetch *what, int rows)
{
    for (; rows > 0 && what->rows > 0; rows--, what->rows--, what->at += what->stride)
        for (int line = 0; line < what->lines; line++) _mm_prefetch(what->at + line * 64, _MM_HINT_T1);
}

INLINE void prefetch(Prefetch what) { prefetch_rows(&what, what.rows); }

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
    compiler_barrier();
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

/* `meanwhile`: what vectors do while tiles are multiplied. In small pieces: the CPU looks ahead a few hundred
   instructions, and has to find the next products among them. */
#define MULTIPLY_STEP(left, right, parts, multiply, meanwhile)  \
    if (parts == 3) { /* each product loads one side at most */ \
        LOAD_LEFT(2);                                           \
        LOAD_RIGHT(0);                                          \
        multiply;                                               \
        meanwhile;                                              \
        LOAD_LEFT(1);                                           \
        multiply;                                               \
        meanwhile;                                              \
        LOAD_RIGHT(1);                                          \
        multiply;                                               \
        meanwhile;                                              \
        LOAD_LEFT(0);                                           \
        multiply;                                               \
        meanwhile;                                              \
        LOAD_RIGHT(2);                                          \
        multiply;                                               \
        meanwhile;                                              \
        LOAD_RIGHT(0);                                          \
        multiply;                                               \
        meanwhile;                                              \
    } else {                                                    \
        LOAD_LEFT(0);                                           \
        LOAD_RIGHT(0);                                          \
        multiply;                                               \
        meanwhile;                                              \
    }

#define MULTIPLY_PANELS(multiply)                                                       \
    for (long step = 0; step < steps; step++) {                                         \
        for (int i = 0; i < count; i++) prefetch(slice_of(prefetched[i], step, steps)); \
        MULTIPLY_STEP(left, right, parts, multiply, )                                   \
        store_aside(step, steps, parts);                                                \
        left += STEP_BYTES(parts);                                                      \
        right += STEP_BYTES(parts);                                                     \
    }

/* Two tiles by two; where a panel has 16 rows or columns at most, the second one's are not computed. */
INLINE void multiply_panels(const char *left, const char *right, long steps, int parts, long rows, long columns,
                            const Prefetch *prefetched, int count)
{
    compiler_barrier();
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
