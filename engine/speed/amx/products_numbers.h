/* Numbers, in bf16 or fp32, and what is done to sums of products: GELU, its slope, storing. */

#ifndef VITAMP_PRODUCTS_NUMBERS_H
#define VITAMP_PRODUCTS_NUMBERS_H

#include "packing.h"

#if HALF
typedef uint16_t Number;
#define PARTS       HALF_PARTS
#define MOST_STEPS  160 /* steps of a sum that are multiplied at once, at most: bf16 keeps no sum for later */
#define USUAL_STEPS 36  /* the same, where more can be had only by cutting the right matrix into more pieces */
#define RIGHT_STEPS 576 /* steps of panels of the right matrix at once: 1.2 MB, which stay in the second cache */
#define PIECES      1   /* of work for vectors in a step */
#define WAIT        2   /* of these between a block and what follows it, which would wait for the block to be stored */
#else
typedef float Number;
#define PARTS       FP32_PARTS
#define MOST_STEPS  25
#define USUAL_STEPS 12
#define RIGHT_STEPS 192
#define PIECES      6
#define WAIT        6
#endif

enum { NOTHING, GELU, TIMES };

/* The normal distribution's cumulative function at x, and its density without the factor. With z = 1 / (1 + 0.45 |x|)
   a polynomial in z, fitted to 3e-8 of itself down to where fp32 ends, stands for erfc(|x| / sqrt(2)) / 2 / density. */
INLINE __m512 normal_cdf(__m512 x, __m512 *density)
{
    static const float factors[] = {3.82795783e-2f,  -2.25619964e-1f, 5.37516247e-1f, -6.11483202e-1f, 2.63683881e-1f,
                                    -2.16227660e-2f, 1.62542647e-1f,  1.77000679e-1f, 1.79708660e-1f,  -5.77851363e-6f};
    const __m512 one = _mm512_set1_ps(1.0f);
    __m512 z = _mm512_div_ps(one, _mm512_fmadd_ps(_mm512_abs_ps(x), _mm512_set1_ps(0.45f), one));
    *density = two_to(_mm512_mul_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(-0.72134752f)));
    __m512 tail = _mm512_mul_ps(polynomial(z, factors, 9), *density);
    __mmask16 below = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
    return _mm512_mask_mov_ps(_mm512_sub_ps(one, tail), below, tail);
}

/* 32 numbers of a row, or fewer at an edge. */
typedef struct {
    __m512 low, high;
} Row;

INLINE Row load_sums(const float *from, __mmask32 there)
{
    const Row row = {_mm512_maskz_loadu_ps(there, from), _mm512_maskz_loadu_ps(there >> 16, from + 16)};
    return row;
}

#if HALF
INLINE Row load_numbers(const Number *from, __mmask32 there)
{
    const __m512i both = _mm512_maskz_loadu_epi16(there, from);
    const Row row = {from_bf16(_mm512_castsi512_si256(both)), from_bf16(_mm512_extracti64x4_epi64(both, 1))};
    return row;
}
INLINE void store_numbers(Number *to, __mmask32 there, Row row)
{
    _mm512_mask_storeu_epi16(to, there, (__m512i)_mm512_cvtne2ps_pbh(row.high, row.low));
}
#else
INLINE Row load_numbers(const Number *from, __mmask32 there) { return load_sums(from, there); }
INLINE void store_numbers(Number *to, __mmask32 there, Row row)
{
    _mm512_mask_storeu_ps(to, there, row.low);
    _mm512_mask_storeu_ps(to + 16, there >> 16, row.high);
}
#endif

INLINE __m512 gelu(__m512 x, __m512 *slope)
{
    __m512 density, cdf = normal_cdf(x, &density), factor = _mm512_mul_ps(x, _mm512_set1_ps(0.39894228f));
    *slope = _mm512_fmadd_ps(factor, density, cdf);
    return _mm512_mul_ps(x, cdf);
}

INLINE void finish_row(const float *sums, Number *c, Number *other, int columns, int after)
{
    const __mmask32 there = columns >= PANEL ? 0xffffffff : (1u << columns) - 1;
    Row row = load_sums(sums, there);
    if (after == GELU) {
        Row slope;
        row.low = gelu(row.low, &slope.low);
        row.high = gelu(row.high, &slope.high);
        store_numbers(other, there, row);
        row = slope;
    } else if (after == TIMES) {
        const Row factor = load_numbers(other, there);
        row.low = _mm512_mul_ps(row.low, factor.low);
        row.high = _mm512_mul_ps(row.high, factor.high);
    }
    store_numbers(c, there, row);
}

/* Rows of a block that is multiplied, but not finished. */
typedef struct {
    const float *sums;
    Number *c, *other;
    long stride, sums_stride;
    int columns, after, row, rows, wait;
} Unfinished;

INLINE void finish_rows(Unfinished *u, int rows)
{
    for (; rows > 0 && u->row < u->rows; rows--, u->row++) {
        const long at = u->row * u->stride;
        finish_row(u->sums + u->row * u->sums_stride, u->c + at, u->other + at, u->columns, u->after);
    }
}

INLINE void finish(Unfinished *u) { finish_rows(u, PANEL); }

#endif
