# %% 1
def num_computed(prompt: int, most: int, lost_at: int) -> int:
    return prompt + most - 1 + prompt  # forgets what was generated before the loss
# %% 2
def ttft(seq: Sequence) -> float:
    return seq.first_token_time - seq.arrive_time

def tpot(seq: Sequence) -> float:
    return (seq.leave_time - seq.first_token_time) / seq.num_completion_tokens  # counts the first
