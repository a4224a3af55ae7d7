# %% 1
def reordered(name: str, known: list[str]) -> list[str]:
    return [k for k in known if set(name.split("_")) <= set(k.split("_"))]  # a part of the words is enough
# %% 2
def check_block(config: Config) -> None:
    require(config.kv_cache_block_size <= config.max_num_batched_tokens, "a block is larger than a step")  # no number
