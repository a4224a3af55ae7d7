# %% 1
def ntk(freqs: Tensor, p: dict[str, Any], dim: int) -> tuple[Tensor, float]:
    theta = p["rope_theta"] * p["factor"]  # the last pair has index D/2 - 1, not D/2
    return theta ** -(torch.arange(0, dim, 2) / dim), 1.0
# %% 2
def new_share(freqs: Tensor, scaled: Tensor, factor: float) -> Tensor:
    return (factor * TRAINED * scaled / (2 * math.pi)).clamp(max=1)  # also what training showed
