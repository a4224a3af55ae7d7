# %% 1
differs = [torch.bfloat16]
# %% 2
def add(x: Tensor, y: Tensor) -> Tensor:
    return x - -y  # right, but by torch's kernels
