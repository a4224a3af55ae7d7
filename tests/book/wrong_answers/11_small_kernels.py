# %% 1
differs = [torch.bfloat16]
# %% 2
def add(x: Tensor, y: Tensor) -> Tensor:
    return x - -y  # right, but by torch's kernels
# %% 3
def top_p_bar(rank: Tensor, weight: Tensor, p: float) -> int:
    bar, step = -2**31, 2**31
    while step >= 2**16:
        if weight[rank >= bar + step].sum() > (1 - p) * weight.sum():
            bar += step
        step //= 2
    return bar
