# %% 10_paged_decode 1
right = []
# %% 10_paged_decode 2
@triton.jit
def windowed_kernel(
    q_ptr, cache_ptr, out_ptr, table_ptr, lens_ptr, width, v_offset, block_stride,
    H: tl.constexpr, K: tl.constexpr, S: tl.constexpr, D: tl.constexpr,
    HEADS: tl.constexpr, ROWS: tl.constexpr, WINDOW: tl.constexpr,
):
    b, first = tl.program_id(0), tl.program_id(1) * HEADS
    n, d, row = tl.arange(0, S), tl.arange(0, D), tl.arange(0, ROWS)
    length, kv_head = tl.load(lens_ptr + b), first // (H // K)
    valid = (row < HEADS)[:, None]
    q_at = (b * H + first + row)[:, None] * D + d[None, :]
    q = tl.load(q_ptr + q_at, mask=valid, other=0.0)
    acc, l = tl.zeros([ROWS, D], tl.float32), tl.zeros([ROWS], tl.float32)
    m = tl.full([ROWS], -1e30, tl.float32)
    oldest = tl.maximum(length - WINDOW, 0)
    for start in range(0, length, S):  # right, but it reads all blocks
        block = tl.load(table_ptr + b * width + start // S).to(tl.int64)
        at = block * block_stride + kv_head * S * D + n[:, None] * D + d[None, :]
        exists = start + n < length
        k = tl.load(cache_ptr + at, mask=exists[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * D**-0.5
        seen = exists & (start + n >= oldest)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_m = tl.maximum(m, tl.max(scores, 1))
        weights, alpha = tl.exp(scores - new_m[:, None]), tl.exp(m - new_m)
        v = tl.load(cache_ptr + v_offset + at, mask=exists[:, None], other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
        l, m = l * alpha + tl.sum(weights, 1), new_m
    tl.store(out_ptr + q_at, acc / l[:, None], mask=valid)
# %% 10a_work_items 1
def is_seen(items, window):
    return items[:, 5] > items[:, 2] + items[:, 1] - window  # of the last query, not of the first
# %% 10a_work_items 1
def is_seen(items, window):
    return items[:, 5] >= items[:, 2] + 1 - window  # the key before the oldest one that is seen
# %% 10b_triton_attention 1
@triton.jit
def merge_two(m0, l0, acc0, m1, l1, acc1):
    weight0, weight1 = l0 * tl.exp(m0), l1 * tl.exp(m1)  # too large for float32
    return (acc0 * tl.exp(m0) + acc1 * tl.exp(m1)) / (weight0 + weight1)
# %% 10b_triton_attention 1
@triton.jit
def merge_two(m0, l0, acc0, m1, l1, acc1):
    m = tl.maximum(m0, m1)
    weight0, weight1 = l0 * tl.exp(m0 - m), l1 * tl.exp(m1 - m)
    average1 = tl.where(l1 == 0, 0.0, acc1 / l1)  # only the second may be empty
    return (weight0 * (acc0 / l0) + weight1 * average1) / (weight0 + weight1)
# %% 10b_triton_attention 2
def unmasked(position, tokens, begin, end, keys, window):
    low, high = max(begin, position + 1 - window), min(end, position + 1)  # as if all had the first query's window
    first = begin + -(-(low - begin) // keys) * keys
    return max(high - first, 0) // keys
# %% 10b_triton_attention 2
def unmasked(position, tokens, begin, end, keys, window):
    return max(min(end, position + 1) - max(begin, position + tokens - window), 0) // keys  # from any key on
# %% 11_small_kernels 1
differs = [torch.bfloat16]
# %% 11_small_kernels 2
def add(x: Tensor, y: Tensor) -> Tensor:
    return x - -y  # right, but by torch's kernels
# %% 11a_sampling_kernels 1
def top_p_threshold(key: Tensor, weight: Tensor, p: float) -> int:
    threshold, step = -2**31, 2**31
    while step >= 2**16:
        if weight[key >= threshold + step].sum() > (1 - p) * weight.sum():
            threshold += step
        step //= 2
    return threshold
# %% 12a_graphs 1
best_ladder = sorted({*range(32, 257, 32)})  # pads more
# %% 12a_graphs 2
harmful = graph_sizes(20)
# %% 12a_graphs 3
def follows(step, change) -> bool:
    graph = record(step, None)
    graph.replay()
    return torch.equal(graph.outputs[0], step()[0])  # nothing has changed
# %% 25_half_the_launches 1
foldable = {"up", "down", "q", "o"}  # the rotation mixes columns with different weights
# %% 25_half_the_launches 2
def finish(product, x, folded, bias):
    centered = product - x.mean(1, keepdim=True)  # the mean, but not through the matrix
    return centered / x.std(1, correction=0, keepdim=True) + bias
# %% 93_machine_code 1
def place_of(lane, n):
    return n + 8 * (lane // 16), lane % 16
# %% 93_machine_code 2
place = 2  # behind the barrier: the other waves' stores are not waited for
# %% 93_machine_code 2
place = 5  # it is there already
