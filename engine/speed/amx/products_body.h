/* Products of matrices by AMX's units for bf16; and what a linear layer and an MLP do before and after them, while the
   numbers are at hand: biases, their gradients, GELU and its slope.

   HALF: whether numbers are bf16, or fp32 and computed as exactly. Weights and their gradients may be fp32 either way.
 */

#include "products_matrices.h"

int prepare(void) { return tiles_are_lent(); }

/* Numbers of a sum that bf16 can be computed of. */
long longest(void) { return DEEPEST * STEP; }

#define RIGHT_ROOM (STEP_ROOM * STEP_BYTES(PARTS))
#define LEFT_ROOM  (DEEPEST * STEP_BYTES(PARTS))

/* For the right matrix, and for two panels of the left one for each thread: stacks may be small. */
long room(int threads) { return RIGHT_ROOM + threads * 2L * LEFT_ROOM; }

/* Of 32 rows and columns, or fewer at an edge: numbers from there on. */
typedef struct {
    long at;
    int rows, columns;
} Block;

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
static void compute_rows(const Product *p, long begin, long end, Piece now, const char *packed, char *left_room)
{
    char *packed_left[2] = {left_room, left_room + LEFT_ROOM};
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

/* Each number is summed in the same order on any number of threads. `packed`: room(threads); `sums`: for whole panels.
   Of bf16 are, with HALF, a and `other`, and what is said to be `half`; all else is fp32. */
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
                                 packed, packed + RIGHT_ROOM + i * 2 * LEFT_ROOM);
            }
        end_tiles();
    }
}
