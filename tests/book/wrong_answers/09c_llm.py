# %% 1
def tokens_in_next_piece(n: int) -> int:
    return n + 1
# %% 2
def first_answer(prompts: list[str], params: list[SamplingParams]) -> int:
    stream = llm.stream(prompts, params)
    last = [piece.index for piece in stream if piece.finished]  # until the end
    return last[0]
# %% 3
def break_even(parameters, layers, heads, dim) -> int:
    return int(2 * parameters // kv_bytes(layers, heads, dim, 1024))  # rounded down
