/* Products of matrices by AMX's units for bf16; and what a linear layer and an MLP do before and after them, while the
   numbers are at hand: biases, their gradients, GELU and its slope.

   HALF: whether numbers are bf16, or fp32 and computed as exactly. Weights and their gradients may be fp32 either way.
 */

#include "amx_pack.h"

#if HALF
typedef uint16_t Number;
#define PARTS     HALF_PARTS
#define DEEPEST   160 /* steps of a sum that are multiplied at once, at most: bf16 keeps no sum for later */
#define DEEP      36  /* the same, where more can be had only by cutting the right matrix into more pieces */
#define STEP_ROOM 576 /* steps of panels of the right matrix at once: 1.2 MB, which stay in the second cache */
#define PIECES    1   /* of work for vectors in a step */
#define WAIT      2   /* of these between a block and what follows it, which would wait for the block to be stored */
#else
typedef float Number;
#define PARTS     FP32_PARTS
#define DEEPEST   25
#define DEEP      12
#define STEP_ROOM 192
#define PIECES    6
#define WAIT      6
#endif

int prepare(void) { return tiles_are_lent(); }

/* Numbers of a sum that bf16 can be computed of. */
long longest(void) { return DEEPEST * STEP; }

long room(void) { return STEP_ROOM * STEP_BYTES(PARTS); }

typedef struct {
    const char *at;
    long stride;      /* in numbers */
    int half, turned; /* it lies in memory the other way round */
} Matrix;

/* bf16 need not be packed where numbers of a sum lie beside each other. */
#define LIES(p) (HALF && !(p)->a.turned)

enum { NOTHING, GELU, TIMES };

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

/* Of 32 rows and columns, or fewer at an edge: numbers from there on. */
typedef struct {
    long at;
    int rows, columns;
} Block;

/* The share of a normal distribution that lies below x, and its density without the factor. With z = 1 / (1 + 0.45 |x|)
   a polynomial in z, fitted to 3e-8 of itself down to where fp32 ends, stands for erfc(|x| / sqrt(2)) / 2 / density. */
INLINE __m512 share_below(__m512 x, __m512 *density)
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
    __m512 density, share = share_below(x, &density), factor = _mm512_mul_ps(x, _mm512_set1_ps(0.39894228f));
    *slope = _mm512_fmadd_ps(factor, density, share);
    return _mm512_mul_ps(x, share);
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

/* What vectors do while tiles are multiplied: pack the panel of the left matrix that comes next, finish the block
   before, and fetch what is needed soon. */
typedef struct {
    Later pack;
    Unfinished finish;
    Fetch fetched[3];
    int pieces, finished, each[3]; /* of each of these at once */
} Chores;

static __attribute__((noinline)) void do_some(Chores *c)
{
    pack_piece(&c->pack, HALF);
    for (int i = 1; i < c->pieces; i++) pack_piece(&c->pack, HALF);
    if (c->finish.row < c->finish.rows && c->finish.wait-- <= 0) finish_rows(&c->finish, c->finished);
    for (int i = 0; i < 3; i++) fetch_rows(&c->fetched[i], c->each[i]);
}

INLINE long shares(long all, long count) { return count > 0 ? (all + count - 1) / count : all; }

INLINE void multiply_meanwhile(const char *left, const char *right, long steps, Chores *chores)
{
    settle();
    for (long step = 0; step < steps; step++) {
        MULTIPLY_STEP(left, right, PARTS, MULTIPLY, do_some(chores))
        store_aside(step, steps, PARTS);
        left += STEP_BYTES(PARTS);
        right += STEP_BYTES(PARTS);
    }
}

/* The left matrix is loaded as it lies in memory. */
INLINE void multiply_lying(const char *left, long stride, const char *right, long steps, Chores *chores)
{
    settle();
    for (long step = 0; step < steps; step++) {
        _tile_loadd(4, left, stride);
        _tile_loadd(5, left + 16 * stride, stride);
        LOAD_RIGHT(0);
        MULTIPLY;
        do_some(chores);
        store_aside(step, steps, PARTS);
        left += STEP * sizeof(Number);
        right += STEP_BYTES(PARTS);
    }
}

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

/* Where sums lie that are not stored as they are: two blocks, one of which is being finished. */
typedef struct {
    _Alignas(64) float sums[2][PANEL * PANEL];
    int now;
} Drawer;

static void compute(const Product *p, Block block, Left left, const char *right, Piece now, const float *bias,
                    Drawer *drawer, Chores *chores)
{
    _Alignas(64) float shift[PANEL] = {0};
    const int whole = block.rows == PANEL && block.columns == PANEL && !p->c_half;
    float *c = (float *)p->c + block.at, *to = whole ? c : drawer->sums[drawer->now ^= 1];
    const long stride = whole ? p->columns : PANEL, bytes = block.columns * sizeof *to;
    if (now.k == 0 && bias) {
        memcpy(shift, bias, bytes);
        settle();
        _tile_loadd(0, shift, 0); /* a stride of 0: the same in each row */
        _tile_loadd(1, shift + 16, 0);
        _tile_loadd(2, shift, 0);
        _tile_loadd(3, shift + 16, 0);
    } else if (now.k == 0) {
        start_from_zero();
    } else {
        for (int i = 0; i < block.rows && !whole; i++) memcpy(to + i * PANEL, c + i * p->columns, bytes);
        start_from(to, stride);
    }
    if (LIES(p))
        multiply_lying(left.at, left.stride, right, now.steps, chores);
    else
        multiply_meanwhile(left.at, right, now.steps, chores);
    finish(&chores->finish);
    store_sums(to, stride);
    for (int i = 0; i < block.rows && !whole && !p->c_half; i++) memcpy(c + i * p->columns, to + i * PANEL, bytes);
    if (p->c_half || (p->after && now.k + now.deep == p->depth)) {
        const Unfinished next = {p->c_half ? to : c,
                                 (Number *)p->c + block.at,
                                 p->other + block.at,
                                 p->columns,
                                 p->c_half ? PANEL : p->columns,
                                 block.columns,
                                 p->after,
                                 0,
                                 block.rows,
                                 WAIT};
        chores->finish = next;
    }
}

/* The numbers of a row of the left matrix, or of a column of the right one, follow `k`. */
INLINE const char *at_of(Matrix m, int summed_first, long i, long k)
{
    return m.at + (summed_first ? k * m.stride + i : i * m.stride + k) * (m.half ? 2 : 4);
}

/* Rows of the left matrix from `top` on; none where it ends. */
INLINE void pack_later(Later *later, const Product *p, long top, Piece now, char *to)
{
    const Packing what = {at_of(p->a, p->a.turned, top, now.k),
                          p->a.stride,
                          HALF,
                          p->a.turned,
                          0,
                          LEAST(PANEL, p->rows - top),
                          now.deep,
                          PARTS,
                          to,
                          now.column == 0 && p->sums ? p->sums + top : 0};
    later->what = what;
    later->tile = later->piece = 0;
    later->tiles = top < p->rows ? tiles_of(&later->what) : 0;
    if (what.sums && later->tiles && now.k == 0) memset(what.sums, 0, PANEL * sizeof *what.sums);
}

/* Rows of the left matrix from `top` on as they lie, or, where a tile would reach beyond them, copied to `room`. */
INLINE Left lying(const Product *p, long top, Piece now, char *room)
{
    const Left there = {at_of(p->a, 0, top, now.k), p->a.stride * sizeof(Number)};
    const Left copied = {room, now.steps * STEP * sizeof(Number)};
    const long rows = LEAST(PANEL, p->rows - top), bytes = now.deep * sizeof(Number);
    if (rows == PANEL && now.deep % STEP == 0) return there;
    memset(room, 0, PANEL * copied.stride);
    for (long i = 0; i < rows; i++) memcpy(room + i * copied.stride, there.at + i * there.stride, bytes);
    return copied;
}

/* Of the rows of the left matrix that are packed next, what is fetched while one panel is multiplied: rows where all
   lie beside each other, else lines of 64 bytes of each. */
INLINE int share_of_rows(const Product *p, Piece now)
{
    const int lines = (now.deep * sizeof(Number) + 63) / 64;
    return shares(p->a.turned ? now.deep : lines, PANELS(now.wide));
}

INLINE Fetch next_rows(const Product *p, long top, Piece now, long panel, int share)
{
    const long size = sizeof(Number);
    const int first = panel * share, lines = (now.deep * size + 63) / 64;
    Fetch next = {at_of(p->a, p->a.turned, top, now.k), p->a.stride * size, 0, 0};
    if (top >= p->rows) return next;
    if (p->a.turned) {
        next.at += first * next.stride;
        next.rows = LEAST(share, now.deep - first);
        next.lines = PANEL * size / 64;
    } else {
        next.at += first * 64;
        next.rows = LEAST(PANEL, p->rows - top);
        next.lines = LEAST(share, lines - first);
    }
    return next;
}

/* A step of a panel, where the numbers of a sum lie beside each other. */
INLINE void pack_step(const Product *p, Piece now, long i, char *packed, int half)
{
    const long panel = i / now.steps, step = i % now.steps, at = now.column + panel * PANEL;
    pack(at_of(p->b, 0, at, now.k + step * STEP), p->b.stride, half, 0, 1, LEAST(PANEL, p->columns - at),
         LEAST(STEP, now.deep - step * STEP), PARTS, packed + i * STEP_BYTES(PARTS));
}

/* The same for a left matrix that lies: pairs are of neighbours. */
INLINE void pack_neighbours(const Product *p, Piece now, long i, char *packed, int half)
{
    const long panel = i / now.steps, step = i % now.steps, at = now.column + panel * PANEL,
               left = now.deep - step * STEP;
    const __mmask16 first = first_of(left), second = first_of(left - 16);
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
    const long step = i / 16, apart = LIES(p) ? 1 : 16, row = step * STEP + i % 16 * (LIES(p) ? 2 : 1);
    const char *first = at_of(p->b, 1, now.column, now.k + row);
    const char *second = at_of(p->b, 1, now.column, now.k + row + apart);
    for (long j = 0; j < PANELS(now.wide) * PANEL; j += 16) {
        const __mmask16 there = first_of(now.wide - j);
        const __m512 a = load_row(first, j, half, row < now.deep ? there : 0);
        const __m512 b = load_row(second, j, half, row + apart < now.deep ? there : 0);
        char *to = packed + (j / PANEL * now.steps + step) * STEP_BYTES(PARTS) + j / 16 % 2 * TILE;
        store_parts(a, b, PARTS, half, to + i % 16 * 64);
    }
}

INLINE void pack_right(const Product *p, Piece now, long i, char *packed, int half)
{
    if (p->b.turned && LIES(p))
        pack_neighbours(p, now, i, packed, half);
    else if (p->b.turned)
        pack_step(p, now, i, packed, half);
    else
        pack_rows(p, now, i, packed, half);
}

/* What is needed soon: the next block of c, and of `other`, and a share of the rows that are packed next. */
INLINE void foresee(const Product *p, Piece now, long top, long end, long panel, int share, Fetch *fetched)
{
    const int ends = (panel + 1) * PANEL >= now.wide;
    const long at = (ends ? top + PANEL : top) * p->columns + now.column + (ends ? 0 : (panel + 1) * PANEL);
    const long left = end - (ends ? top + PANEL : top), size = p->c_half ? 2 : 4;
    const int rows = left > 0 ? LEAST(PANEL, left) : 0;
    const Fetch of_c = {p->c + at * size, p->columns * size, rows, PANEL * size / 64};
    const Fetch of_other = {(const char *)(p->other + at), p->columns * sizeof(Number), p->after ? rows : 0,
                            PANEL * sizeof(Number) / 64};
    fetched[0] = next_rows(p, top + 2 * PANEL, now, panel, share);
    fetched[1] = of_c;
    fetched[2] = of_other;
}

/* How much is done at once so that all is done while a panel of the right matrix is multiplied. */
INLINE void plan(const Product *p, Piece now, int share, Chores *chores)
{
    const long times = PIECES * now.steps;
    chores->pieces = shares(pieces_of(&chores->pack), PANELS(now.wide) * times);
    chores->finished = shares(PANEL, times - WAIT);
    chores->each[0] = shares(p->a.turned ? share : PANEL, times);
    chores->each[1] = chores->each[2] = shares(PANEL, times);
    chores->finish.row = chores->finish.rows = chores->finish.wait = 0;
}

/* Rows of c, of those of its columns that are packed. */
static void compute_rows(const Product *p, long begin, long end, Piece now, const char *packed)
{
    _Alignas(64) char packed_left[2][DEEPEST * STEP_BYTES(PARTS)];
    const long across = PANELS(now.wide);
    const int share = share_of_rows(p, now);
    Drawer drawer;
    Chores chores;
    if (begin >= end) return; /* more threads than panels */
    drawer.now = 0;
    pack_later(&chores.pack, p, LIES(p) ? p->rows : begin, now, packed_left[0]);
    plan(p, now, share, &chores);
    for (long top = begin; top < end; top += PANEL) {
        const int this = (top - begin) / PANEL % 2;
        while (chores.pack.tile < chores.pack.tiles) pack_piece(&chores.pack, HALF);
        pack_later(&chores.pack, p, !LIES(p) && top + PANEL < end ? top + PANEL : p->rows, now, packed_left[!this]);
        const Left panel_of_a = {packed_left[this], 0},
                   left = LIES(p) ? lying(p, top, now, packed_left[0]) : panel_of_a;
        for (long panel = 0; panel < across; panel++) {
            const long at = now.column + panel * PANEL;
            const Block block = {top * p->columns + at, LEAST(PANEL, p->rows - top), LEAST(PANEL, p->columns - at)};
            foresee(p, now, top, end, panel, share, chores.fetched);
            compute(p, block, left, packed + panel * now.steps * STEP_BYTES(PARTS), now, p->bias ? p->bias + at : 0,
                    &drawer, &chores);
        }
    }
    finish(&chores.finish);
}

/* Each number is summed in the same order on any number of threads. `packed`: room(); `sums`: for whole panels. Of
   bf16 are, with HALF, a and `other`, and what is said to be `half`; all else is fp32. */
void product(const char *a, long a_stride, int a_turned, const char *b, long b_stride, int b_turned, int b_half,
             char *c, int c_half, const float *bias, Number *other, int after, float *sums, long rows, long columns,
             long depth, char *packed, int threads)
{
    const Product p = {{a, a_stride, HALF, a_turned},
                       {b, b_stride, HALF && b_half, b_turned},
                       c,
                       other,
                       sums,
                       bias,
                       rows,
                       columns,
                       depth,
                       after,
                       HALF && c_half};
    const long panels = PANELS(rows), all = STEPS(depth), fitting = STEP_ROOM / PANELS(columns);
    const long least = p.c_half ? DEEPEST : DEEP, most = LEAST(DEEPEST, fitting > least ? fitting : least);
    const long steps = shares(all, shares(all, most)), wide = STEP_ROOM / steps * PANEL;
#pragma omp parallel num_threads(threads)
    {
        begin_tiles();
        for (long column = 0; column < columns; column += wide)
            for (long k = 0; k < depth; k += steps * STEP) {
                const int deep = LEAST(steps * STEP, depth - k);
                const Piece now = {column, LEAST(wide, columns - column), k, STEPS(deep), deep};
#pragma omp for schedule(static)
                for (long i = 0; i < now.steps * (b_turned ? PANELS(now.wide) : 16); i++) {
                    if (p.b.half)
                        pack_right(&p, now, i, packed, 1);
                    else
                        pack_right(&p, now, i, packed, 0);
                }
#pragma omp for schedule(static)
                for (long i = 0; i < threads; i++)
                    compute_rows(&p, panels * i / threads * PANEL, LEAST(rows, panels * (i + 1) / threads * PANEL), now,
                                 packed);
            }
        end_tiles();
    }
}
