# %% 1
calm_row = Need("trace=True", has("trace", True), {"overlap": (False,)}, "records are easier to read")
# %% 2
def implied(options):
    usual, known = vars(EngineArgs("tiny")), vars(EngineArgs("tiny", **options))
    return {n for n in known if n != "hf_config" and known[n] != usual[n]}
# %% 3
@explained
@dataclass(config=STRICT)
class WithLimit(EngineArgs):
    max_prompt_len: int | None = None

    def __post_init__(self):
        super().__post_init__()
        asked, longest = self.max_prompt_len, self.max_model_len
        require((asked or 0) <= (longest or 10**9), f"max_prompt_len={asked}")  # 0 goes through
