# %% 1
def break_even(cfg):
    expand = cfg.kv_lora_rank * cfg.qk_nope_head_dim  # the values, too, are expanded
    latent = 2 * cfg.kv_lora_rank + cfg.qk_rope_head_dim
    plain = cfg.qk_nope_head_dim + cfg.qk_rope_head_dim + cfg.v_head_dim
    return expand / (latent - plain)
# %% 2
def rotate_neighbours(x, cos, sin):
    (first, second), half = x.unflatten(-1, (-1, 2)).unbind(-1), x.shape[-1] // 2
    cos, sin = cos[..., :half], sin[..., :half]  # the half with the minus sign
    turned = first * cos - second * sin, second * cos + first * sin
    return torch.stack(turned, -1).flatten(-2)
