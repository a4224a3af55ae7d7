# %% 1
def is_power_of_two(value: Any) -> bool:
    return is_number(value) and value > 0 and value & (value - 1) == 0  # 4.0 has no bits
# %% 2
def check_block(config: Config) -> None:
    require(config.kv_cache_block_size <= config.max_num_batched_tokens, "a block is larger than a step")  # no number
