"""Triton kernels for attention over few tokens, forward and backward: one program per head, with its keys on the chip.

`qkv` has the layout images x N tokens x (queries, keys, values) x H heads x D columns: a row holds the queries, keys
and values of all heads of one token. Shapes are compile-time constants: a model uses one or two, and unnecessary masks
are compiled away.
"""

# tl.constexpr arguments are plain numbers; Triton's compiler evaluates the branches that depend on them.
# pyright: reportPossiblyUnboundVariable=false, reportArgumentType=false

import triton
import triton.language as tl


@triton.jit
def _load(place, start, N, ROW: tl.constexpr, D: tl.constexpr, COUNT: tl.constexpr):
    rows = start + tl.arange(0, COUNT)
    columns = tl.arange(0, D)
    return tl.load(place + rows[:, None] * ROW + columns[None, :], mask=rows[:, None] < N, other=0.0)


@triton.jit
def _save(place, start, values, N: tl.constexpr, ROW: tl.constexpr, D: tl.constexpr, COUNT: tl.constexpr):
    rows = start + tl.arange(0, COUNT)
    columns = tl.arange(0, D)
    values = values.to(place.dtype.element_ty)
    tl.store(place + rows[:, None] * ROW + columns[None, :], values, mask=rows[:, None] < N)


@triton.jit
def _scores(q, k, FIRST: tl.constexpr, N: tl.constexpr, KEYS: tl.constexpr):
    scores = tl.dot(q, tl.trans(k))
    if FIRST + KEYS > N:
        keys = FIRST + tl.arange(0, KEYS)
        scores = tl.where(keys[None, :] < N, scores, float("-inf"))
    return scores


@triton.jit
def forward_kernel(
    qkv, out, logsumexp, scale,
    N: tl.constexpr, H: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    K1: tl.constexpr, K2: tl.constexpr, K3: tl.constexpr,
):  # fmt: skip
    """Compute softmax(q k^T * scale) v for one head of one image: a program has all keys, and ROWS queries at a time.

    `qkv`: images x N tokens x (queries, keys, values) x H heads x D columns. `out`: images x N x H x D.
    `logsumexp`: images x H x N, to base 2, for the backward pass. The keys are in up to three blocks of K1, K2 and K3
    keys, powers of two, of which the last ones may be 0: their number N need not be a power of two.
    `scale` includes log2(e), so that exp2 takes the place of exp: there is an instruction for powers of 2.
    """
    # Addresses of this head: a row of `qkv` has 3 * WIDTH columns, first all queries, then all keys, then all values.
    WIDTH: tl.constexpr = H * D
    program = tl.program_id(0)  # image * H + head
    queries = qkv + (program // H).to(tl.int64) * (N * 3 * WIDTH) + program % H * D
    out += (program // H).to(tl.int64) * (N * WIDTH) + program % H * D
    logsumexp += program.to(tl.int64) * N

    # The blocks of keys and values.
    k1 = _load(queries + WIDTH, 0, N, 3 * WIDTH, D, K1)
    v1 = _load(queries + 2 * WIDTH, 0, N, 3 * WIDTH, D, K1)
    if K2 > 0:
        k2 = _load(queries + WIDTH, K1, N, 3 * WIDTH, D, K2)
        v2 = _load(queries + 2 * WIDTH, K1, N, 3 * WIDTH, D, K2)
    if K3 > 0:
        k3 = _load(queries + WIDTH, K1 + K2, N, 3 * WIDTH, D, K3)
        v3 = _load(queries + 2 * WIDTH, K1 + K2, N, 3 * WIDTH, D, K3)

    for start in range(0, N, ROWS):
        # Scores of the queries with each block, and the maximum of each query over all blocks.
        q = _load(queries, start, N, 3 * WIDTH, D, ROWS)
        s1 = _scores(q, k1, 0, N, K1)
        maximum = tl.max(s1, 1)
        if K2 > 0:
            s2 = _scores(q, k2, K1, N, K2)
            maximum = tl.maximum(maximum, tl.max(s2, 1))
        if K3 > 0:
            s3 = _scores(q, k3, K1 + K2, N, K3)
            maximum = tl.maximum(maximum, tl.max(s3, 1))
        maximum *= scale

        # Softmax weights before they are divided by their total, and the sum of the values by these weights.
        p1 = tl.exp2(s1 * scale - maximum[:, None])
        total = tl.sum(p1, 1)
        weighted_values = tl.dot(p1.to(v1.dtype), v1)
        if K2 > 0:
            p2 = tl.exp2(s2 * scale - maximum[:, None])
            total += tl.sum(p2, 1)
            weighted_values = tl.dot(p2.to(v2.dtype), v2, weighted_values)
        if K3 > 0:
            p3 = tl.exp2(s3 * scale - maximum[:, None])
            total += tl.sum(p3, 1)
            weighted_values = tl.dot(p3.to(v3.dtype), v3, weighted_values)
        _save(out, start, weighted_values / total[:, None], N, WIDTH, D, ROWS)
        rows = start + tl.arange(0, ROWS)
        tl.store(logsumexp + rows, maximum + tl.log2(total), mask=rows < N)


@triton.jit
def backward_kernel(
    qkv, out, logsumexp, grad, dqkv, scale, log_scale,
    N: tl.constexpr, H: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of queries, keys and values for one head of one image.

    A program has all N keys at once (KEYS, a power of 2, is at least N), and for them ROWS queries at a time. So the
    gradient of a query is complete at once; those of keys and values are summed over the queries.
    `qkv`, `dqkv`: images x N tokens x (queries, keys, values) x H heads x D columns. `out`, `grad`: output and its
    gradient, images x N x H x D. `logsumexp`: of the forward pass, images x H x N, to base 2. `scale`: of the scores.
    `log_scale`: scale * log2(e), for powers of 2. As in the papers on attention, dX is the gradient of X.
    """
    # Addresses of this head: a row of `qkv` has 3 * WIDTH columns, first all queries, then all keys, then all values.
    WIDTH: tl.constexpr = H * D
    program = tl.program_id(0)  # image * H + head
    queries = qkv + (program // H).to(tl.int64) * (N * 3 * WIDTH) + program % H * D
    dqueries = dqkv + (program // H).to(tl.int64) * (N * 3 * WIDTH) + program % H * D
    out += (program // H).to(tl.int64) * (N * WIDTH) + program % H * D
    grad += (program // H).to(tl.int64) * (N * WIDTH) + program % H * D
    logsumexp += program.to(tl.int64) * N

    k = _load(queries + WIDTH, 0, N, 3 * WIDTH, D, KEYS)
    v = _load(queries + 2 * WIDTH, 0, N, 3 * WIDTH, D, KEYS)
    keys = tl.arange(0, KEYS)
    dk = tl.zeros([KEYS, D], tl.float32)
    dv = tl.zeros([KEYS, D], tl.float32)
    for start in range(0, N, ROWS):
        q = _load(queries, start, N, 3 * WIDTH, D, ROWS)
        dout = _load(grad, start, N, WIDTH, D, ROWS)
        output = _load(out, start, N, WIDTH, D, ROWS)
        rows = start + tl.arange(0, ROWS)
        lse = tl.load(logsumexp + rows, mask=rows < N, other=float("inf"))  # rows beyond N get weight 0
        # For each query, the sum of weights * dweights over the keys: it equals that of dout * output over the columns.
        key_sums = tl.sum(dout.to(tl.float32) * output.to(tl.float32), 1)
        # The softmax weights, keys x queries: 2^(score * log_scale - logsumexp). Keys beyond N get 0.
        weights = tl.exp2(tl.dot(k, tl.trans(q)) * log_scale - tl.expand_dims(lse, 0))
        weights = tl.where(tl.expand_dims(keys, 1) < N, weights, 0.0)
        # Gradients of the weights, of the values, and through the softmax of the scores (ds) and the keys.
        dweights = tl.dot(v, tl.trans(dout))
        dv = tl.dot(weights.to(dout.dtype), dout, dv)
        ds = (weights * (dweights - tl.expand_dims(key_sums, 0))).to(q.dtype)
        dk = tl.dot(ds, q, dk)
        # The GPU's instruction for matrix products of several warps needs 64 rows or more in the result. There are at
        # most 32 queries, so the transposed product is computed, in which they are the columns.
        dq = tl.trans(tl.dot(tl.trans(k), ds))
        _save(dqueries, start, dq * scale, N, 3 * WIDTH, D, ROWS)
    _save(dqueries + WIDTH, 0, dk * scale, N, 3 * WIDTH, D, KEYS)
    _save(dqueries + 2 * WIDTH, 0, dv, N, 3 * WIDTH, D, KEYS)
