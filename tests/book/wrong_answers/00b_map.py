# %% 1
def num_steps(prompt: int, output: int, budget: int) -> int:
    return -(-prompt // budget) + output  # the last prefill gives a token, too
# %% 2
def blocks_at_the_end(prompt: int, output: int, size: int) -> int:
    return -(-(prompt + output) // size)  # a slot for the last token
