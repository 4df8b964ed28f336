/* What AMX's tiles are loaded from: parts of numbers, in the order in which they are multiplied (see tiles.h). */

#ifndef VITAMP_PACKING_H
#define VITAMP_PACKING_H

#include "tiles.h"

/* 16 numbers of a row, as far as there are any; the rest is 0. `half`: whether they are bf16 in memory. */
INLINE __m512 load_row(const void *from, long at, int half, __mmask16 there)
{
    return half ? from_bf16(_mm256_maskz_loadu_epi16(there, (const uint16_t *)from + at))
                : _mm512_maskz_loadu_ps(there, (const float *)from + at);
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

INLINE int tiles_of(const Packing *p) { return 2 * STEPS(p->summed); }

/* Rows of what goes into a tile, as they lie in memory: of the first numbers of its pairs, or of the second ones. */
INLINE void load_rows(const Packing *p, int tile, int second, int begin, int count, __m512 *r)
{
    const int across = tile % 2 * 16, k = tile / 2 * STEP + second * 16;
    const int row = (p->summed_first ? k : across) + begin, column = p->summed_first ? across : k;
    const int left = (p->summed_first ? p->summed : p->wide) - row;
    const __mmask16 there = mask_of_first((p->summed_first ? p->wide : p->summed) - column);
    for (int i = 0; i < count; i++)
        r[i] = i < left ? load_row(p->from, (row + i) * p->stride + column, p->half, there) : _mm512_setzero_ps();
}

/* To the sums of each row of the left matrix, whose numbers lie under each other. */
INLINE void add_rows(const Packing *p, int tile, const __m512 *r)
{
    float *sums = p->sums + tile % 2 * 16;
    __m512 sum = _mm512_load_ps(sums);
    for (int i = 0; i < 16; i++) sum = _mm512_add_ps(sum, r[i]);
    _mm512_store_ps(sums, sum);
}

/* As they lie in the tile. */
INLINE void load_block(const Packing *p, int tile, int second, __m512 *r)
{
    load_rows(p, tile, second, 0, 16, r);
    if (p->sums) add_rows(p, tile, r);
    if (p->summed_first != p->right) transpose(r);
}

INLINE char *tile_at(const Packing *p, int tile) { return p->to + tile / 2 * STEP_BYTES(p->parts) + tile % 2 * TILE; }

/* A tile of bf16: a pair of these is transposed as one number. */
INLINE void pack_half(const Packing *p, int tile)
{
    __m512 first[16], second[16];
    load_rows(p, tile, 0, 0, 16, first);
    load_rows(p, tile, 1, 0, 16, second);
    if (p->sums) {
        add_rows(p, tile, first);
        add_rows(p, tile, second);
    }
    for (int i = 0; i < 16; i++) {
        __m512i low = _mm512_srli_epi32(_mm512_castps_si512(first[i]), 16), high = _mm512_castps_si512(second[i]);
        first[i] = _mm512_castsi512_ps(_mm512_or_si512(low, high));
    }
    if (p->summed_first != p->right) transpose(first);
    for (int i = 0; i < 16; i++) _mm512_store_ps((float *)(tile_at(p, tile) + i * 64), first[i]);
}

INLINE void store_block(const Packing *p, int tile, int begin, int count, const __m512 *first, const __m512 *second)
{
    char *to = tile_at(p, tile) + begin * 64;
    for (int i = 0; i < count; i++) store_parts(first[i], second[i], p->parts, p->half, to + i * 64);
}

INLINE void pack(const void *from, long stride, int half, int summed_first, int right, int wide, int summed, int parts,
                 char *to)
{
    const Packing p = {from, stride, half, summed_first, right, wide, summed, parts, to, 0};
    __m512 first[16], second[16];
    for (int tile = 0; tile < tiles_of(&p); tile++) {
        if (half) {
            pack_half(&p, tile);
            continue;
        }
        load_block(&p, tile, 0, first);
        load_block(&p, tile, 1, second);
        store_block(&p, tile, 0, 16, first, second);
    }
}

/* pack(), a few rows at a time. */
typedef struct {
    Packing what;
    int tile, tiles, piece;
    __m512 first[16], second[16]; /* transposed */
} DeferredPacking;

#define PIECE 4 /* rows */

INLINE int pieces_of(const DeferredPacking *l)
{
    return l->tiles * (l->what.half ? 1 : 16 / PIECE + 2 * (l->what.summed_first != l->what.right));
}

INLINE void pack_piece(DeferredPacking *l, int half)
{
    if (l->tile == l->tiles) return;
    const Packing *p = &l->what;
    if (half) {
        pack_half(p, l->tile++);
        return;
    }
    const int turns = p->summed_first != p->right, piece = l->piece++, begin = (piece - 2 * turns) * PIECE;
    if (begin < 0) {
        load_block(p, l->tile, piece, piece ? l->second : l->first);
        return;
    }
    if (turns) {
        store_block(p, l->tile, begin, PIECE, l->first + begin, l->second + begin);
    } else {
        __m512 first[PIECE], second[PIECE];
        load_rows(p, l->tile, 0, begin, PIECE, first);
        load_rows(p, l->tile, 1, begin, PIECE, second);
        store_block(p, l->tile, begin, PIECE, first, second);
    }
    if (begin + PIECE == 16) {
        l->piece = 0;
        l->tile++;
    }
}

#endif
