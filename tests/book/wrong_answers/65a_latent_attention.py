# %% 1
def share(n, chunk):
    pairs = n * (n + 1) / 2
    return (n * expand + pairs * plain) / (pairs * absorbing)  # as if all chunks shared the expanded keys
# %% 2
def rotate_neighbors(x, cos, sin):
    (first, second), half = x.unflatten(-1, (-1, 2)).unbind(-1), x.shape[-1] // 2
    cos, sin = cos[..., :half], sin[..., :half]  # the half with the minus sign
    turned = first * cos - second * sin, second * cos + first * sin
    return torch.stack(turned, -1).flatten(-2)
