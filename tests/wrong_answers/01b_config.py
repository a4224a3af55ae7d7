# %% 1
num_sequences = int(24e9 * 0.9 // (2000 * kv_bytes_per_token(36, 8, 128)))  # without the weights
# %% 2
num_tokens = 100 + 300  # the last token need not be computed
# %% 3
@dataclass
class PromptLimit(Variant):
    max_prompt_len: int | None = None

    @classmethod
    def check(cls, config, given):
        asked, longest = config.max_prompt_len, config.max_model_len
        require((asked or 0) <= (longest or 10**9), f"max_prompt_len={asked}")  # 0 goes through
