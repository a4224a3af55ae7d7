# %% 1
differs = [torch.bfloat16]
# %% 2
def add(x: Tensor, y: Tensor) -> Tensor:
    return x - -y  # right, but by torch's kernels
# %% 3
weights, u_of_row = [3.0, 2.0, 1.0], 0.9
