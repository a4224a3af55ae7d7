# %% 1
loud_row = Need("loud=True", has("loud", True), {"scheduler": ("atom",)}, "shouting takes no turns")
# %% 2
def implied(options):
    usual, known = vars(Config("tiny")), vars(Config("tiny", **options))
    return {n for n in known if n != "hf_config" and known[n] != usual[n]}
# %% 3
@dataclass
class PromptLimit(Variant):
    max_prompt_len: int | None = None

    @classmethod
    def check(cls, config, given):
        asked, longest = config.max_prompt_len, config.max_model_len
        require((asked or 0) <= (longest or 10**9), f"max_prompt_len={asked}")  # 0 goes through
