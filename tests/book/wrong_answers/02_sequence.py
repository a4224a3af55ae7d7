# %% 1
def num_missing(seq: Sequence) -> int:
    return seq.num_prompt_tokens - seq.num_computed_tokens  # forgets what was generated
# %% 2
def ttft(seq: Sequence) -> float:
    return seq.first_token_time - seq.arrive_time

def tpot(seq: Sequence) -> float:
    return (seq.leave_time - seq.first_token_time) / seq.num_completion_tokens  # counts the first
