# %% 1
twice = {"prompt_token_ids": [5, 6]}  # one wrapping
# %% 2
parts_of_a_word = [{"type": "text", "text": text} for text in ("un", " happy")]
