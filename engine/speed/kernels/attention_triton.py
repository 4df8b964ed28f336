"""Triton kernels for attention over few tokens, forward and backward: one program per head, with its keys on the chip.

A row holds the queries, keys and values of all heads of one token. Shapes are compile-time constants: a model uses one
or two, and unnecessary masks are compiled away.
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
    """ROWS queries at a time, against all keys in up to three blocks, since their number is not a power of two.

    `scale` includes log2(e): there is an instruction for powers of 2.
    """
    WIDTH: tl.constexpr = H * D
    head = tl.program_id(0)
    place = qkv + (head // H).to(tl.int64) * (N * 3 * WIDTH) + head % H * D
    out += (head // H).to(tl.int64) * (N * WIDTH) + head % H * D
    logsumexp += head.to(tl.int64) * N
    k1 = _load(place + WIDTH, 0, N, 3 * WIDTH, D, K1)
    v1 = _load(place + 2 * WIDTH, 0, N, 3 * WIDTH, D, K1)
    if K2 > 0:
        k2 = _load(place + WIDTH, K1, N, 3 * WIDTH, D, K2)
        v2 = _load(place + 2 * WIDTH, K1, N, 3 * WIDTH, D, K2)
    if K3 > 0:
        k3 = _load(place + WIDTH, K1 + K2, N, 3 * WIDTH, D, K3)
        v3 = _load(place + 2 * WIDTH, K1 + K2, N, 3 * WIDTH, D, K3)
    for start in range(0, N, ROWS):
        q = _load(place, start, N, 3 * WIDTH, D, ROWS)
        s1 = _scores(q, k1, 0, N, K1)
        top = tl.max(s1, 1)
        if K2 > 0:
            s2 = _scores(q, k2, K1, N, K2)
            top = tl.maximum(top, tl.max(s2, 1))
        if K3 > 0:
            s3 = _scores(q, k3, K1 + K2, N, K3)
            top = tl.maximum(top, tl.max(s3, 1))
        top *= scale
        p1 = tl.exp2(s1 * scale - top[:, None])
        total = tl.sum(p1, 1)
        found = tl.dot(p1.to(v1.dtype), v1)
        if K2 > 0:
            p2 = tl.exp2(s2 * scale - top[:, None])
            total += tl.sum(p2, 1)
            found = tl.dot(p2.to(v2.dtype), v2, found)
        if K3 > 0:
            p3 = tl.exp2(s3 * scale - top[:, None])
            total += tl.sum(p3, 1)
            found = tl.dot(p3.to(v3.dtype), v3, found)
        _save(out, start, found / total[:, None], N, WIDTH, D, ROWS)
        rows = start + tl.arange(0, ROWS)
        tl.store(logsumexp + rows, top + tl.log2(total), mask=rows < N)


@triton.jit
def backward_kernel(
    qkv, out, logsumexp, grad, dqkv, scale, log_scale,
    N: tl.constexpr, H: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """All keys at once (KEYS, a power of 2, is at least their number N), and for them ROWS queries at a time."""
    WIDTH: tl.constexpr = H * D
    head = tl.program_id(0)
    place = qkv + (head // H).to(tl.int64) * (N * 3 * WIDTH) + head % H * D
    dplace = dqkv + (head // H).to(tl.int64) * (N * 3 * WIDTH) + head % H * D
    out += (head // H).to(tl.int64) * (N * WIDTH) + head % H * D
    grad += (head // H).to(tl.int64) * (N * WIDTH) + head % H * D
    logsumexp += head.to(tl.int64) * N
    k = _load(place + WIDTH, 0, N, 3 * WIDTH, D, KEYS)
    v = _load(place + 2 * WIDTH, 0, N, 3 * WIDTH, D, KEYS)
    keys = tl.arange(0, KEYS)
    dk = tl.zeros([KEYS, D], tl.float32)
    dv = tl.zeros([KEYS, D], tl.float32)
    for start in range(0, N, ROWS):
        q = _load(place, start, N, 3 * WIDTH, D, ROWS)
        do = _load(grad, start, N, WIDTH, D, ROWS)
        o = _load(out, start, N, WIDTH, D, ROWS)
        rows = start + tl.arange(0, ROWS)
        lse = tl.load(logsumexp + rows, mask=rows < N, other=float("inf"))  # rows beyond N get weight 0
        delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
        p = tl.exp2(tl.dot(k, tl.trans(q)) * log_scale - tl.expand_dims(lse, 0))
        p = tl.where(tl.expand_dims(keys, 1) < N, p, 0.0)
        dp = tl.dot(v, tl.trans(do))
        dv = tl.dot(p.to(do.dtype), do, dv)
        ds = (p * (dp - tl.expand_dims(delta, 0))).to(q.dtype)
        dk = tl.dot(ds, q, dk)
        # The warp-group instruction needs 64 rows; the transposed product has the up to 32 queries as columns.
        dq = tl.trans(tl.dot(tl.trans(k), ds))
        _save(dplace, start, dq * scale, N, 3 * WIDTH, D, ROWS)
    _save(dplace + WIDTH, 0, dk * scale, N, 3 * WIDTH, D, KEYS)
    _save(dplace + 2 * WIDTH, 0, dv, N, 3 * WIDTH, D, KEYS)
