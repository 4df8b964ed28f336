/* fp32 products of matrices, as exact as fp32, by AMX's units for bf16; and what a linear layer and an MLP do before
   and after them, while the numbers are at hand: biases, their gradients, GELU and its slope. */

#include "amx.h"

#define DEPTH       384 /* numbers summed at once: a panel of the left matrix takes 72 KB, packed */
#define COLUMNS     512 /* of the right matrix at once: 1.1 MB, packed, which stay in the second cache */
#define PANEL_BYTES (DEPTH / STEP * STEP_BYTES(FP32_PARTS))
#define ROOM        (COLUMNS / PANEL * PANEL_BYTES)

int prepare(void) { return tiles_are_lent(); }

long room(void) { return ROOM; }

typedef struct {
    const float *at;
    long stride;
    int turned; /* it lies in memory the other way round */
} Matrix;

enum { NOTHING, GELU, SLOPE };

/* c [rows, columns] = a [rows, depth] b [depth, columns] + bias, and then, by `after`, other = GELU(c), or
   c = c * (the slope of GELU at other). `sums`, where there is any: those of each row of a. */
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
        __m512 sum = _mm512_maskz_loadu_ps(there, c + j), density;
        if (after == GELU) {
            __m512 found = _mm512_mul_ps(sum, share_below(sum, &density));
            _mm512_mask_storeu_ps(other + j, there, found);
        } else {
            __m512 x = _mm512_maskz_loadu_ps(there, other + j), share = share_below(x, &density);
            __m512 slope = _mm512_fmadd_ps(_mm512_mul_ps(x, _mm512_set1_ps(0.39894228f)), density, share);
            _mm512_mask_storeu_ps(c + j, there, _mm512_mul_ps(sum, slope));
        }
    }
}

/* The panel of the left matrix that comes next, packed tile by tile while AMX's units are busy. */
typedef struct {
    Packing what;
    int done, tiles;
} Later;

INLINE void pack_some(Later *later)
{
    if (later->done < later->tiles) pack_tile(later->what, later->done++);
}

INLINE void multiply_and_pack(const char *left, const char *right, long steps, const Fetch *fetched, int count,
                              Later *later)
{
    for (long step = 0; step < steps; step++) {
        for (int i = 0; i < count; i++) fetch(share_of(fetched[i], step, steps));
        MULTIPLY_STEP(left, right, FP32_PARTS, MULTIPLY)
        pack_some(later);
        left += STEP_BYTES(FP32_PARTS);
        right += STEP_BYTES(FP32_PARTS);
    }
}

/* Steps of a sum; `first` and `last` of all. */
typedef struct {
    long steps;
    int first, last;
} Part;

static void compute(const Product *p, Block block, const char *left, const char *right, Part part, const float *bias,
                    const Fetch *fetched, Later *later)
{
    _Alignas(64) float edge[PANEL * PANEL], shift[PANEL] = {0};
    const int whole = block.rows == PANEL && block.columns == PANEL;
    float *to = whole ? block.c : edge;
    const long stride = whole ? p->columns : PANEL, bytes = block.columns * sizeof *to;
    if (part.first && bias) {
        memcpy(shift, bias, bytes);
        _tile_loadd(0, shift, 0); /* a stride of 0: the same in each row */
        _tile_loadd(1, shift + 16, 0);
        _tile_loadd(2, shift, 0);
        _tile_loadd(3, shift + 16, 0);
    } else if (part.first) {
        start_from_zero();
    } else {
        for (int i = 0; i < block.rows && !whole; i++) memcpy(edge + i * PANEL, block.c + i * p->columns, bytes);
        start_from(to, stride);
    }
    multiply_and_pack(left, right, part.steps, fetched, p->after ? 3 : 2, later);
    store_sums(to, stride);
    for (int i = 0; i < block.rows && !whole; i++) memcpy(block.c + i * p->columns, edge + i * PANEL, bytes);
    if (p->after && part.last)
        for (int i = 0; i < block.rows; i++)
            finish_row(block.c + i * p->columns, block.other + i * p->columns, block.columns, p->after);
}

/* The numbers of a row of the left matrix, or of a column of the right one, follow `k`. */
INLINE const float *at_of(Matrix m, int summed_first, long i, long k)
{
    return summed_first ? m.at + k * m.stride + i : m.at + i * m.stride + k;
}

/* Rows of the left matrix from `top` on; none where it ends. */
INLINE Later rows_to_pack(const Product *p, long top, long column, long k, int deep, char *to)
{
    const Packing what = {(const char *)at_of(p->a, p->a.turned, top, k),
                          p->a.stride,
                          0,
                          p->a.turned,
                          0,
                          LEAST(PANEL, p->rows - top),
                          deep,
                          FP32_PARTS,
                          to,
                          column == 0 && p->sums ? p->sums + top : 0};
    const Later later = {what, 0, top < p->rows ? tiles_of(what) : 0};
    if (what.sums && later.tiles && k == 0) memset(what.sums, 0, PANEL * sizeof *what.sums);
    return later;
}

/* A share of the rows of the left matrix that are packed next. */
static Fetch next_rows(const Product *p, long top, long k, int deep, long share, long shares)
{
    Fetch next = {(const char *)at_of(p->a, p->a.turned, top, k), p->a.stride * 4, 0, 0};
    int lines = (deep * 4 + 63) / 64, each = ((p->a.turned ? deep : lines) + shares - 1) / shares, first = share * each;
    if (top >= p->rows) return next;
    if (p->a.turned) { /* all rows lie beside each other, deep times */
        next.at += first * next.stride;
        next.rows = LEAST(each, deep - first);
        next.lines = PANEL * 4 / 64;
    } else {
        next.at += first * 64;
        next.rows = LEAST(PANEL, p->rows - top);
        next.lines = LEAST(each, lines - first);
    }
    return next;
}

/* The right matrix in the order in which it lies in memory. */
INLINE void pack_right_step(const Product *p, long column, long k, int deep, long across, long i, char *packed)
{
    const Matrix b = p->b;
    long steps = STEPS(deep), panel = b.turned ? i / steps : i % across, step = b.turned ? i % steps : i / across;
    long at = column + panel * PANEL, after = k + (step + 1) * STEP;
    if (!b.turned) {
        const Fetch next = {(const char *)at_of(b, 1, at, after), b.stride * 4, LEAST(STEP, p->depth - after), 2};
        fetch(next);
    }
    pack(at_of(b, !b.turned, at, k + step * STEP), b.stride, 0, !b.turned, 1, LEAST(PANEL, p->columns - at),
         LEAST(STEP, deep - step * STEP), FP32_PARTS, packed + panel * PANEL_BYTES + step * STEP_BYTES(FP32_PARTS));
}

/* Rows of c, of those of its columns that are packed. */
static void compute_rows(const Product *p, long begin, long end, long column, long k, int deep, long across,
                         const char *packed)
{
    _Alignas(64) char left[2][PANEL_BYTES];
    const Part part = {STEPS(deep), k == 0, k + deep == p->depth};
    if (begin >= end) return; /* more threads than panels */
    Later later = rows_to_pack(p, begin, column, k, deep, left[0]);
    for (long top = begin; top < end; top += PANEL) {
        while (later.done < later.tiles) pack_some(&later);
        const int now = (top - begin) / PANEL % 2, high = LEAST(PANEL, p->rows - top);
        later = rows_to_pack(p, top + PANEL < end ? top + PANEL : p->rows, column, k, deep, left[!now]);
        for (long panel = 0; panel < across; panel++) {
            const long at = column + panel * PANEL, offset = top * p->columns + at, end_of_row = panel + 1 == across;
            const long next = end_of_row ? offset - panel * PANEL + PANEL * p->columns : offset + PANEL;
            const long below = end_of_row ? end - top - PANEL : high;
            const int rows = below > 0 ? LEAST(PANEL, below) : 0;
            const Fetch fetched[] = {next_rows(p, top + 2 * PANEL, k, deep, panel, across),
                                     {(const char *)(p->c + next), p->columns * 4, rows, 2},
                                     {(const char *)(p->other + next), p->columns * 4, rows, 2}};
            const Block block = {p->c + offset, p->other + offset, high, LEAST(PANEL, p->columns - at)};
            compute(p, block, left[now], packed + panel * PANEL_BYTES, part, p->bias ? p->bias + at : 0, fetched,
                    &later);
        }
    }
}

/* Each number is summed in the same order on any number of threads. `packed`: room(); `sums`: for whole panels. */
void product(const float *a, long a_stride, int a_turned, const float *b, long b_stride, int b_turned, float *c,
             const float *bias, float *other, int after, float *sums, long rows, long columns, long depth, char *packed,
             int threads)
{
    const Product p = {
        {a, a_stride, a_turned}, {b, b_stride, b_turned}, c, other, sums, bias, rows, columns, depth, after};
    const long panels = PANELS(rows);
#pragma omp parallel num_threads(threads)
    {
        begin_tiles();
        for (long column = 0; column < columns; column += COLUMNS)
            for (long k = 0; k < depth; k += DEPTH) {
                const int deep = LEAST(DEPTH, depth - k);
                const long across = PANELS(LEAST(COLUMNS, columns - column));
#pragma omp for schedule(static)
                for (long i = 0; i < across * STEPS(deep); i++) pack_right_step(&p, column, k, deep, across, i, packed);
#pragma omp for schedule(static)
                for (long i = 0; i < threads; i++)
                    compute_rows(&p, panels * i / threads * PANEL, LEAST(rows, panels * (i + 1) / threads * PANEL),
                                 column, k, deep, across, packed);
            }
        end_tiles();
    }
}
