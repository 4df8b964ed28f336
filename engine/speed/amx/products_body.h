/* Products of matrices by AMX's units for bf16; and what a linear layer and an MLP do before and after them, while the
   numbers are at hand: biases, their gradients, GELU and its slope.

   HALF: whether numbers are bf16, or fp32 and computed as exactly. Weights and their gradients may be fp32 either way.
 */

#include "products_matrices.h"

int prepare(void) { return request_tiles(); }

/* Numbers of a sum that bf16 can be computed of. */
long longest(void) { return MOST_STEPS * STEP; }

#define RIGHT_BYTES (RIGHT_STEPS * STEP_BYTES(PARTS))
#define LEFT_BYTES  (MOST_STEPS * STEP_BYTES(PARTS))

/* For the right matrix, and for two panels of the left one for each thread: stacks may be small. */
long workspace_bytes(int threads) { return RIGHT_BYTES + threads * 2L * LEFT_BYTES; }

/* Of 32 rows and columns, or fewer at an edge: numbers from there on. */
typedef struct {
    long at;
    int rows, columns;
} Block;

/* What vectors do while tiles are multiplied: pack the panel of the left matrix that comes next, finish the block
   before, and prefetch what is needed soon. */
typedef struct {
    DeferredPacking pack;
    Unfinished finish;
    Prefetch prefetched[3];
    int pieces, finished, each[3]; /* of each of these at once */
} VectorWork;

static __attribute__((noinline)) void do_vector_work(VectorWork *c)
{
    pack_piece(&c->pack, HALF);
    for (int i = 1; i < c->pieces; i++) pack_piece(&c->pack, HALF);
    if (c->finish.row < c->finish.rows && c->finish.wait-- <= 0) finish_rows(&c->finish, c->finished);
    for (int i = 0; i < 3; i++) prefetch_rows(&c->prefetched[i], c->each[i]);
}

INLINE void multiply_meanwhile(const char *left, const char *right, long steps, VectorWork *work)
{
    compiler_barrier();
    for (long step = 0; step < steps; step++) {
        MULTIPLY_STEP(left, right, PARTS, MULTIPLY, do_vector_work(work))
        store_aside(step, steps, PARTS);
        left += STEP_BYTES(PARTS);
        right += STEP_BYTES(PARTS);
    }
}

/* The left matrix is loaded from where it is, not packed. */
INLINE void multiply_unpacked(const char *left, long stride, const char *right, long steps, VectorWork *work)
{
    compiler_barrier();
    for (long step = 0; step < steps; step++) {
        _tile_loadd(4, left, stride);
        _tile_loadd(5, left + 16 * stride, stride);
        LOAD_RIGHT(0);
        MULTIPLY;
        do_vector_work(work);
        store_aside(step, steps, PARTS);
        left += STEP * sizeof(Number);
        right += STEP_BYTES(PARTS);
    }
}

/* Sums that are not stored as they are: two blocks, one of which is being finished. */
typedef struct {
    _Alignas(64) float sums[2][PANEL * PANEL];
    int now;
} SumBuffers;

static void compute(const Product *p, Block block, Left left, const char *right, Piece now, const float *bias,
                    SumBuffers *buffers, VectorWork *work)
{
    _Alignas(64) float shift[PANEL] = {0};
    const int whole = block.rows == PANEL && block.columns == PANEL && !p->c_half;
    float *c = (float *)p->c + block.at, *to = whole ? c : buffers->sums[buffers->now ^= 1];
    const long stride = whole ? p->columns : PANEL, bytes = block.columns * sizeof *to;
    if (now.k == 0 && bias) {
        memcpy(shift, bias, bytes);
        compiler_barrier();
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
    if (UNPACKED(p))
        multiply_unpacked(left.at, left.stride, right, now.steps, work);
    else
        multiply_meanwhile(left.at, right, now.steps, work);
    finish(&work->finish);
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
        work->finish = next;
    }
}

/* How much is done at once so that all is done while a panel of the right matrix is multiplied. */
INLINE void plan(const Product *p, Piece now, int share, VectorWork *work)
{
    const long times = PIECES * now.steps;
    work->pieces = ceil_divide(pieces_of(&work->pack), PANELS(now.wide) * times);
    work->finished = ceil_divide(PANEL, times - WAIT);
    work->each[0] = ceil_divide(p->a.transposed ? share : PANEL, times);
    work->each[1] = work->each[2] = ceil_divide(PANEL, times);
    work->finish.row = work->finish.rows = work->finish.wait = 0;
}

/* Rows of c, of those of its columns that are packed. */
static void compute_rows(const Product *p, long begin, long end, Piece now, const char *packed, char *left_workspace)
{
    char *packed_left[2] = {left_workspace, left_workspace + LEFT_BYTES};
    const long across = PANELS(now.wide);
    const int share = prefetched_per_panel(p, now);
    SumBuffers buffers;
    VectorWork work;
    if (begin >= end) return; /* more threads than panels */
    buffers.now = 0;
    defer_packing(&work.pack, p, UNPACKED(p) ? p->rows : begin, now, packed_left[0]);
    plan(p, now, share, &work);
    for (long top = begin; top < end; top += PANEL) {
        const int this = (top - begin) / PANEL % 2;
        while (work.pack.tile < work.pack.tiles) pack_piece(&work.pack, HALF);
        defer_packing(&work.pack, p, !UNPACKED(p) && top + PANEL < end ? top + PANEL : p->rows, now,
                      packed_left[!this]);
        const Left panel_of_a = {packed_left[this], 0},
                   left = UNPACKED(p) ? unpacked_left(p, top, now, packed_left[0]) : panel_of_a;
        for (long panel = 0; panel < across; panel++) {
            const long at = now.column + panel * PANEL;
            const Block block = {top * p->columns + at, MIN(PANEL, p->rows - top), MIN(PANEL, p->columns - at)};
            plan_prefetches(p, now, top, end, panel, share, work.prefetched);
            compute(p, block, left, packed + panel * now.steps * STEP_BYTES(PARTS), now, p->bias ? p->bias + at : 0,
                    &buffers, &work);
        }
    }
    finish(&work.finish);
}

/* Each number is summed in the same order on any number of threads. `packed`: workspace_bytes(threads) of memory;
   `sums`: for whole panels. Of bf16 are, with HALF, a and `other`, and what is said to be `half`; all else is fp32. */
void product(const char *a, long a_stride, int a_transposed, const char *b, long b_stride, int b_transposed, int b_half,
             char *c, int c_half, const float *bias, Number *other, int after, float *sums, long rows, long columns,
             long depth, char *packed, int threads)
{
    const Product p = {{a, a_stride, HALF, a_transposed},
                       {b, b_stride, HALF && b_half, b_transposed},
                       c,
                       other,
                       sums,
                       bias,
                       rows,
                       columns,
                       depth,
                       after,
                       HALF && c_half};
    const long panels = PANELS(rows), all = STEPS(depth), fitting = RIGHT_STEPS / PANELS(columns);
    const long least = p.c_half ? MOST_STEPS : USUAL_STEPS, most = MIN(MOST_STEPS, fitting > least ? fitting : least);
    const long steps = ceil_divide(all, ceil_divide(all, most)), wide = RIGHT_STEPS / steps * PANEL;
#pragma omp parallel num_threads(threads)
    {
        begin_tiles();
        for (long column = 0; column < columns; column += wide)
            for (long k = 0; k < depth; k += steps * STEP) {
                const int deep = MIN(steps * STEP, depth - k);
                const Piece now = {column, MIN(wide, columns - column), k, STEPS(deep), deep};
#pragma omp for schedule(static)
                for (long i = 0; i < now.steps * (b_transposed ? PANELS(now.wide) : 16); i++) {
                    if (p.b.half)
                        pack_right(&p, now, i, packed, 1);
                    else
                        pack_right(&p, now, i, packed, 0);
                }
#pragma omp for schedule(static)
                for (long i = 0; i < threads; i++)
                    compute_rows(&p, panels * i / threads * PANEL, MIN(rows, panels * (i + 1) / threads * PANEL), now,
                                 packed, packed + RIGHT_BYTES + i * 2 * LEFT_BYTES);
            }
        end_tiles();
    }
}
