# %% 1
def rotate_by_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, -1)
    cos, sin = cos.chunk(2, -1)[0], sin.chunk(2, -1)[0]  # the half with the minus sign
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)
# %% 2
attention = 1024 * (16 + 8 + 8) * 128 + 16 * 128 * 1024  # without q and k norm
num_weights = 151936 * 1024 + 28 * (attention + 3 * 1024 * 3072 + 2 * 1024) + 1024
