/* The matrices of a product: where their pieces are, how they are packed, and when they are prefetched. */

#ifndef VITAMP_PRODUCTS_MATRICES_H
#define VITAMP_PRODUCTS_MATRICES_H

#include "products_numbers.h"

typedef struct {
    const char *at;
    long stride;          /* in numbers */
    int half, transposed; /* it lies in memory the other way round */
} Matrix;

/* bf16 need not be packed where numbers of a sum lie beside each other. */
#define UNPACKED(p) (HALF && !(p)->a.transposed)

/* c [rows, columns] = a [rows, depth] b [depth, columns] + bias, and then, by `after`, other = GELU(c) and c = GELU's
   slope there, or c = c * other. `sums`, where there is any: those of each row of a. */
typedef struct {
    Matrix a, b;
    char *c;
    Number *other;
    float *sums;
    const float *bias;
    long rows, columns, depth;
    int after, c_half;
} Product;

/* Of the right matrix, those of its rows and columns that are multiplied next. */
typedef struct {
    long column, wide, k, steps;
    int deep;
} Piece;

/* 32 rows of the left matrix: packed, or as they lie, `stride` bytes apart. */
typedef struct {
    const char *at;
    long stride;
} Left;

INLINE long ceil_divide(long all, long count) { return count > 0 ? (all + count - 1) / count : all; }

/* The numbers of a row of the left matrix, or of a column of the right one, follow `k`. */
INLINE const char *at_of(Matrix m, int summed_first, long i, long k)
{
    return m.at + (summed_first ? k * m.stride + i : i * m.stride + k) * (m.half ? 2 : 4);
}

/* Rows of the left matrix from `top` on; none where it ends. */
INLINE void defer_packing(DeferredPacking *deferred, const Product *p, long top, Piece now, char *to)
{
    const Packing what = {at_of(p->a, p->a.transposed, top, now.k),
                          p->a.stride,
                          HALF,
                          p->a.transposed,
                          0,
                          MIN(PANEL, p->rows - top),
                          now.deep,
                          PARTS,
                          to,
                          now.column == 0 && p->sums ? p->sums + top : 0};
    deferred->what = what;
    deferred->tile = deferred->piece = 0;
    deferred->tiles = top < p->rows ? tiles_of(&deferred->what) : 0;
    if (what.sums && deferred->tiles && now.k == 0) memset(what.sums, 0, PANEL * sizeof *what.sums);
}

/* Rows of the left matrix from `top` on, where they are, or, where a tile would reach beyond them, copied to
   `workspace`. */
INLINE Left unpacked_left(const Product *p, long top, Piece now, char *workspace)
{
    const Left there = {at_of(p->a, 0, top, now.k), p->a.stride * sizeof(Number)};
    const Left copied = {workspace, now.steps * STEP * sizeof(Number)};
    const long rows = MIN(PANEL, p->rows - top), bytes = now.deep * sizeof(Number);
    if (rows == PANEL && now.deep % STEP == 0) return there;
    memset(workspace, 0, PANEL * copied.stride);
    for (long i = 0; i < rows; i++) memcpy(workspace + i * copied.stride, there.at + i * there.stride, bytes);
    return copied;
}

/* Of the rows of the left matrix that are packed next, what is prefetched while one panel is multiplied: rows where all
   lie beside each other, else lines of 64 bytes of each. */
INLINE int prefetched_per_panel(const Product *p, Piece now)
{
    const int lines = (now.deep * sizeof(Number) + 63) / 64;
    return ceil_divide(p->a.transposed ? now.deep : lines, PANELS(now.wide));
}

INLINE Prefetch prefetch_of_rows(const Product *p, long top, Piece now, long panel, int share)
{
    const long size = sizeof(Number);
    const int first = panel * share, lines = (now.deep * size + 63) / 64;
    Prefetch next = {at_of(p->a, p->a.transposed, top, now.k), p->a.stride * size, 0, 0};
    if (top >= p->rows) return next;
    if (p->a.transposed) {
        next.at += first * next.stride;
        next.rows = MIN(share, now.deep - first);
        next.lines = PANEL * size / 64;
    } else {
        next.at += first * 64;
        next.rows = MIN(PANEL, p->rows - top);
        next.lines = MIN(share, lines - first);
    }
    return next;
}

/* A step of a panel, where the numbers of a sum lie beside each other. */
INLINE void pack_step(const Product *p, Piece now, long i, char *packed, int half)
{
    const long panel = i / now.steps, step = i % now.steps, at = now.column + panel * PANEL;
    pack(at_of(p->b, 0, at, now.k + step * STEP), p->b.stride, half, 0, 1, MIN(PANEL, p->columns - at),
         MIN(STEP, now.deep - step * STEP), PARTS, packed + i * STEP_BYTES(PARTS));
}

/* The same for a left matrix that is not packed: pairs are of neighbours. */
INLINE void pack_neighbours(const Product *p, Piece now, long i, char *packed, int half)
{
    const long panel = i / now.steps, step = i % now.steps, at = now.column + panel * PANEL,
               left = now.deep - step * STEP;
    const __mmask16 first = mask_of_first(left), second = mask_of_first(left - 16);
    for (int tile = 0; tile < 2; tile++) {
        __m512 r[16];
        for (int j = 0; j < 16; j++) {
            const long column = at + tile * 16 + j;
            const char *from = at_of(p->b, 0, column, now.k + step * STEP);
            const int is_there = column < p->columns;
            const __m512 low = load_row(from, 0, half, is_there ? first : 0);
            const __m512 high = load_row(from, 16, half, is_there ? second : 0);
            r[j] = (__m512)_mm512_cvtne2ps_pbh(high, low);
        }
        transpose(r);
        for (int j = 0; j < 16; j++)
            _mm512_store_ps((float *)(packed + i * STEP_BYTES(PARTS) + tile * TILE + j * 64), r[j]);
    }
}

/* Two rows of all panels, where columns lie beside each other: memory is read in its order. */
INLINE void pack_rows(const Product *p, Piece now, long i, char *packed, int half)
{
    const long step = i / 16, apart = UNPACKED(p) ? 1 : 16, row = step * STEP + i % 16 * (UNPACKED(p) ? 2 : 1);
    const char *first = at_of(p->b, 1, now.column, now.k + row);
    const char *second = at_of(p->b, 1, now.column, now.k + row + apart);
    for (long j = 0; j < PANELS(now.wide) * PANEL; j += 16) {
        const __mmask16 there = mask_of_first(now.wide - j);
        const __m512 a = load_row(first, j, half, row < now.deep ? there : 0);
        const __m512 b = load_row(second, j, half, row + apart < now.deep ? there : 0);
        char *to = packed + (j / PANEL * now.steps + step) * STEP_BYTES(PARTS) + j / 16 % 2 * TILE;
        store_parts(a, b, PARTS, half, to + i % 16 * 64);
    }
}

INLINE void pack_right(const Product *p, Piece now, long i, char *packed, int half)
{
    if (p->b.transposed && UNPACKED(p))
        pack_neighbours(p, now, i, packed, half);
    else if (p->b.transposed)
        pack_step(p, now, i, packed, half);
    else
        pack_rows(p, now, i, packed, half);
}

/* What is needed soon: the next block of c, and of `other`, and a share of the rows that are packed next. */
INLINE void plan_prefetches(const Product *p, Piece now, long top, long end, long panel, int share,
                            Prefetch *prefetched)
{
    const int ends = (panel + 1) * PANEL >= now.wide;
    const long at = (ends ? top + PANEL : top) * p->columns + now.column + (ends ? 0 : (panel + 1) * PANEL);
    const long left = end - (ends ? top + PANEL : top), size = p->c_half ? 2 : 4;
    const int rows = left > 0 ? MIN(PANEL, left) : 0;
    const Prefetch of_c = {p->c + at * size, p->columns * size, rows, PANEL * size / 64};
    const Prefetch of_other = {(const char *)(p->other + at), p->columns * sizeof(Number), p->after ? rows : 0,
                               PANEL * sizeof(Number) / 64};
    prefetched[0] = prefetch_of_rows(p, top + 2 * PANEL, now, panel, share);
    prefetched[1] = of_c;
    prefetched[2] = of_other;
}

#endif
