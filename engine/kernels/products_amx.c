/* fp32 products of matrices, as exact as fp32, by AMX's units for bf16; and what a linear layer and an MLP do before
   and after them, while the numbers are at hand: biases, their gradients, GELU and its slope. */

#include "amx_pack.h"

#define DEEPEST   25  /* steps of a sum that are multiplied at once, at most, */
#define DEEP      12  /* and where that many can be had by cutting the right matrix into more pieces */
#define STEP_ROOM 192 /* steps of panels of the right matrix at once: 1.2 MB, which stay in the second cache */
#define WAIT      6   /* products between a block and what follows it, which would wait for the block to be stored */

int prepare(void) { return tiles_are_lent(); }

long room(void) { return STEP_ROOM * STEP_BYTES(FP32_PARTS); }

typedef struct {
    const float *at;
    long stride;
    int turned; /* it lies in memory the other way round */
} Matrix;

enum { NOTHING, GELU, TIMES };

/* c [rows, columns] = a [rows, depth] b [depth, columns] + bias, and then, by `after`, other = GELU(c) and c = GELU's
   slope there, or c = c * other. `sums`, where there is any: those of each row of a. */
typedef struct {
    Matrix a, b;
    float *c, *other, *sums;
    const float *bias;
    long rows, columns, depth;
    int after;
} Product;

/* Of 32 rows and columns, or fewer at an edge. */
typedef struct {
    float *c, *other;
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

INLINE void finish_row(float *c, float *other, int columns, int after)
{
    for (int j = 0; j < columns; j += 16) {
        __mmask16 there = first_of(columns - j);
        __m512 sum = _mm512_maskz_loadu_ps(there, c + j);
        if (after == GELU) {
            __m512 density, share = share_below(sum, &density),
                            factor = _mm512_mul_ps(sum, _mm512_set1_ps(0.39894228f));
            _mm512_mask_storeu_ps(other + j, there, _mm512_mul_ps(sum, share));
            _mm512_mask_storeu_ps(c + j, there, _mm512_fmadd_ps(factor, density, share));
        } else {
            _mm512_mask_storeu_ps(c + j, there, _mm512_mul_ps(sum, _mm512_maskz_loadu_ps(there, other + j)));
        }
    }
}

/* Rows of a block that is multiplied, but not finished. */
typedef struct {
    float *c, *other;
    long stride;
    int columns, after, row, rows, wait;
} Unfinished;

INLINE void finish_some(Unfinished *u)
{
    if (u->row == u->rows) return;
    if (u->wait-- > 0) return;
    const long at = u->row++ * u->stride;
    finish_row(u->c + at, u->other + at, u->columns, u->after);
}

/* What vectors do while tiles are multiplied: pack the panel of the left matrix that comes next, finish the block
   before, and fetch what is needed soon. */
typedef struct {
    Later pack;
    Unfinished finish;
    Fetch fetched[3];
    int each[3]; /* rows at once */
} Chores;

static __attribute__((noinline)) void do_some(Chores *c)
{
    pack_piece(&c->pack);
    finish_some(&c->finish);
    for (int i = 0; i < 3; i++) fetch_rows(&c->fetched[i], c->each[i]);
}

INLINE void multiply_meanwhile(const char *left, const char *right, long steps, Chores *chores)
{
    settle();
    for (int i = 0; i < 3; i++) chores->each[i] = (chores->fetched[i].rows + 6 * steps - 1) / (6 * steps);
    for (long step = 0; step < steps; step++) {
        MULTIPLY_STEP(left, right, FP32_PARTS, MULTIPLY, do_some(chores))
        store_aside(step, steps);
        left += STEP_BYTES(FP32_PARTS);
        right += STEP_BYTES(FP32_PARTS);
    }
}

/* Of the right matrix, those of its rows and columns that are multiplied next. */
typedef struct {
    long column, wide, k, steps;
    int deep;
} Piece;

static void compute(const Product *p, Block block, const char *left, const char *right, Piece now, const float *bias,
                    Chores *chores)
{
    _Alignas(64) float edge[PANEL * PANEL], shift[PANEL] = {0};
    const int whole = block.rows == PANEL && block.columns == PANEL;
    float *to = whole ? block.c : edge;
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
        for (int i = 0; i < block.rows && !whole; i++) memcpy(edge + i * PANEL, block.c + i * p->columns, bytes);
        start_from(to, stride);
    }
    multiply_meanwhile(left, right, now.steps, chores);
    while (chores->finish.row < chores->finish.rows) finish_some(&chores->finish);
    store_sums(to, stride);
    for (int i = 0; i < block.rows && !whole; i++) memcpy(block.c + i * p->columns, edge + i * PANEL, bytes);
    if (p->after && now.k + now.deep == p->depth) {
        const Unfinished next = {block.c, block.other, p->columns, block.columns, p->after, 0, block.rows, WAIT};
        chores->finish = next;
    }
}

/* The numbers of a row of the left matrix, or of a column of the right one, follow `k`. */
INLINE const float *at_of(Matrix m, int summed_first, long i, long k)
{
    return summed_first ? m.at + k * m.stride + i : m.at + i * m.stride + k;
}

/* Rows of the left matrix from `top` on; none where it ends. */
INLINE void pack_later(Later *later, const Product *p, long top, Piece now, char *to)
{
    const Packing what = {(const char *)at_of(p->a, p->a.turned, top, now.k),
                          p->a.stride,
                          0,
                          p->a.turned,
                          0,
                          LEAST(PANEL, p->rows - top),
                          now.deep,
                          FP32_PARTS,
                          to,
                          now.column == 0 && p->sums ? p->sums + top : 0};
    later->what = what;
    later->tile = later->piece = 0;
    later->tiles = top < p->rows ? tiles_of(&later->what) : 0;
    if (what.sums && later->tiles && now.k == 0) memset(what.sums, 0, PANEL * sizeof *what.sums);
}

/* A share of the rows of the left matrix that are packed next. */
static Fetch next_rows(const Product *p, long top, Piece now, long share)
{
    Fetch next = {(const char *)at_of(p->a, p->a.turned, top, now.k), p->a.stride * 4, 0, 0};
    const long shares = PANELS(now.wide);
    int lines = (now.deep * 4 + 63) / 64, each = ((p->a.turned ? now.deep : lines) + shares - 1) / shares;
    int first = share * each;
    if (top >= p->rows) return next;
    if (p->a.turned) { /* all rows lie beside each other, deep times */
        next.at += first * next.stride;
        next.rows = LEAST(each, now.deep - first);
        next.lines = PANEL * 4 / 64;
    } else {
        next.at += first * 64;
        next.rows = LEAST(PANEL, p->rows - top);
        next.lines = LEAST(each, lines - first);
    }
    return next;
}

/* A step of a panel, where the numbers of a sum lie beside each other. */
INLINE void pack_step(const Product *p, Piece now, long i, char *packed)
{
    const long panel = i / now.steps, step = i % now.steps, at = now.column + panel * PANEL;
    pack(at_of(p->b, 0, at, now.k + step * STEP), p->b.stride, 0, 0, 1, LEAST(PANEL, p->columns - at),
         LEAST(STEP, now.deep - step * STEP), FP32_PARTS, packed + i * STEP_BYTES(FP32_PARTS));
}

/* Two rows of all panels, where columns lie beside each other: memory is read in its order. */
INLINE void pack_rows(const Product *p, Piece now, long i, char *packed)
{
    const long step = i / 16, row = step * STEP + i % 16;
    const float *first = p->b.at + (now.k + row) * p->b.stride + now.column, *second = first + 16 * p->b.stride;
    for (long j = 0; j < PANELS(now.wide) * PANEL; j += 16) {
        const __mmask16 there = first_of(now.wide - j);
        const __m512 a = _mm512_maskz_loadu_ps(row < now.deep ? there : 0, first + j);
        const __m512 b = _mm512_maskz_loadu_ps(row + 16 < now.deep ? there : 0, second + j);
        char *to = packed + (j / PANEL * now.steps + step) * STEP_BYTES(FP32_PARTS) + j / 16 % 2 * TILE;
        store_parts(a, b, FP32_PARTS, 0, to + i % 16 * 64);
    }
}

/* Rows of c, of those of its columns that are packed. */
static void compute_rows(const Product *p, long begin, long end, Piece now, const char *packed)
{
    _Alignas(64) char left[2][DEEPEST * STEP_BYTES(FP32_PARTS)];
    const long across = PANELS(now.wide);
    if (begin >= end) return; /* more threads than panels */
    Chores chores;
    chores.finish.row = chores.finish.rows = 0;
    pack_later(&chores.pack, p, begin, now, left[0]);
    for (long top = begin; top < end; top += PANEL) {
        while (chores.pack.tile < chores.pack.tiles) pack_piece(&chores.pack);
        const int this = (top - begin) / PANEL % 2, high = LEAST(PANEL, p->rows - top);
        pack_later(&chores.pack, p, top + PANEL < end ? top + PANEL : p->rows, now, left[!this]);
        for (long panel = 0; panel < across; panel++) {
            const long at = now.column + panel * PANEL, offset = top * p->columns + at,
                       end_of_row = panel + 1 == across;
            const long next = end_of_row ? offset - panel * PANEL + PANEL * p->columns : offset + PANEL;
            const long below = end_of_row ? end - top - PANEL : high;
            const int rows = below > 0 ? LEAST(PANEL, below) : 0;
            const Fetch of_c = {(const char *)(p->c + next), p->columns * 4, rows, 2};
            const Fetch of_other = {(const char *)(p->other + next), p->columns * 4, p->after ? rows : 0, 2};
            chores.fetched[0] = next_rows(p, top + 2 * PANEL, now, panel);
            chores.fetched[1] = of_c;
            chores.fetched[2] = of_other;
            const Block block = {p->c + offset, p->other + offset, high, LEAST(PANEL, p->columns - at)};
            compute(p, block, left[this], packed + panel * now.steps * STEP_BYTES(FP32_PARTS), now,
                    p->bias ? p->bias + at : 0, &chores);
        }
    }
    while (chores.finish.row < chores.finish.rows) finish_some(&chores.finish);
}

/* Each number is summed in the same order on any number of threads. `packed`: room(); `sums`: for whole panels. */
void product(const float *a, long a_stride, int a_turned, const float *b, long b_stride, int b_turned, float *c,
             const float *bias, float *other, int after, float *sums, long rows, long columns, long depth, char *packed,
             int threads)
{
    const Product p = {
        {a, a_stride, a_turned}, {b, b_stride, b_turned}, c, other, sums, bias, rows, columns, depth, after};
    const long panels = PANELS(rows), all = STEPS(depth), fitting = STEP_ROOM / PANELS(columns);
    const long most = fitting > DEEPEST ? DEEPEST : fitting > DEEP ? fitting : DEEP, pieces = (all + most - 1) / most;
    const long steps = (all + pieces - 1) / pieces, wide = STEP_ROOM / steps * PANEL;
#pragma omp parallel num_threads(threads)
    {
        begin_tiles();
        for (long column = 0; column < columns; column += wide)
            for (long k = 0; k < depth; k += steps * STEP) {
                const int deep = LEAST(steps * STEP, depth - k);
                const Piece now = {column, LEAST(wide, columns - column), k, STEPS(deep), deep};
#pragma omp for schedule(static)
                for (long i = 0; i < now.steps * (b_turned ? PANELS(now.wide) : 16); i++) {
                    if (b_turned)
                        pack_step(&p, now, i, packed);
                    else
                        pack_rows(&p, now, i, packed);
                }
#pragma omp for schedule(static)
                for (long i = 0; i < threads; i++)
                    compute_rows(&p, panels * i / threads * PANEL, LEAST(rows, panels * (i + 1) / threads * PANEL), now,
                                 packed);
            }
        end_tiles();
    }
}
